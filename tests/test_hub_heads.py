"""Heads that come from the hub: owner/repo:file.pt wherever a head is read. A stand-in answers for the hub."""

import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from evaluation.files import checkpoint_labels
from loading import checkpoint_files
from loading.checkpoint_files import checkpoint_file
from pipeline_inference import build_parser, main
from pipeline_model import Target, read_checkpoint, save_head
from script_utils import run_script
from tests.tiny import save_target, tiny_head


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one repository, whose branches have a head each; notes what it is asked for."""
    save_target(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"))
    for branch, sizes in (("main", (2, 2)), ("v10", (1, 3))):
        head = tiny_head(target, sizes, base_model_path=str(tmp_path / "target"))
        save_head(head, tmp_path / branch / "sub" / "Tiny_s2_l2.pt")
    asked = []

    def download(repository, name, *, revision):
        asked.append((repository, name, revision))
        file = tmp_path / (revision or "main") / name
        if repository != "owner/heads" or not file.is_file():
            raise LocalEntryNotFoundError("404: not there.\nA second line, about caches.")
        return str(file)

    monkeypatch.setattr(checkpoint_files, "hf_hub_download", download)
    checkpoint_files._downloaded.cache_clear()
    yield asked
    checkpoint_files._downloaded.cache_clear()


def test_a_head_of_the_hub_decodes(hub, capsys):
    """Guards the one command that uses a published head; each file is asked for once, however often it is read."""
    flags = ["--spec_head_ckpt", "owner/heads:sub/Tiny_s2_l2.pt", "--max_new_tokens", "4", "--prompt", "w1 w2"]
    assert main(build_parser().parse_args(flags)) == 0
    assert "[compare] ids are equal (4 tokens)" in capsys.readouterr().out
    assert hub == [("owner/heads", "sub/Tiny_s2_l2.pt", None)]


def test_branches_are_other_heads(hub, tmp_path):
    """Guards against the head of another branch, and against two heads under one name in an evaluation."""
    specs = ["owner/heads:sub/Tiny_s2_l2.pt", "owner/heads@v10:sub/Tiny_s2_l2.pt"]
    assert [read_checkpoint(spec)[0].split(4) for spec in specs] == [(2, 2), (1, 3)]
    assert checkpoint_file(specs[1]) == tmp_path / "v10" / "sub" / "Tiny_s2_l2.pt"
    assert checkpoint_labels(specs[:1]) == {specs[0]: "Tiny_s2_l2"}
    assert len(set(checkpoint_labels(specs).values())) == 2


@pytest.mark.parametrize("spec", ["owner/heads:gone.pt", "owner/heads@gone:sub/Tiny_s2_l2.pt", "nobody/heads:x.pt"])
def test_what_the_hub_does_not_give_is_one_line(hub, capsys, monkeypatch, spec):
    """Guards against the hub's page of text, or a traceback, for a mistyped name or a machine without network."""
    monkeypatch.setattr(sys, "argv", ["pipeline_inference.py", "--spec_head_ckpt", spec])
    with pytest.raises(SystemExit) as caught:
        run_script(main, build_parser())
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"no head checkpoint {spec!r} on the hub (404: not there.)" in message


def test_local_files_come_first(hub, tmp_path, monkeypatch):
    """Guards against a local file with a colon in its name that is looked for on the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "heads:x.pt").write_text("")
    assert checkpoint_file("owner/heads:x.pt") == Path("owner/heads:x.pt")
    assert checkpoint_file("owner/heads") == Path("owner/heads")
    assert hub == []
