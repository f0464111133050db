"""Hidden states that the target leaves while it writes: those of a pass over the text, and training's only ones."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch

import train
from pipeline_inference import Sampling
from pipeline_model import Target
from tests.test_train import NUMBERS, make_tokenizer, write_language
from tests.tiny import VOCAB, random_prompt, tiny_model, tiny_target
from training import generate_answers
from training.batch_generation import generate_batch
from training.feature_cache import FeatureCache
from training.forward import teacher_features
from training.written_features import Recording, WrittenFile, features_folder, write_texts

PROMPTS = [random_prompt(length, seed=length) for length in (3, 9, 14, 5)]
ENDS = tuple(range(12))  # so many that the rows end one after the other


@pytest.mark.parametrize("family", ["llama", "qwen3 window", "qwen3_5"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_states_are_those_of_a_pass(family, temperature):
    """Guards padding, rows that move when others end, the order of layers, and the argmax when sampling."""
    target = tiny_target(family)
    recording = Recording([3, 1, 0], target.num_layers)
    assert recording.layers == (1, 3, target.num_layers)
    for prompts in (PROMPTS[::-1], PROMPTS):  # one recording serves one batch after the other
        written = generate_batch(target, prompts, 12, ENDS, Sampling(temperature), recording=recording)
        texts = list(recording.texts(written))
    assert len(set(map(len, written))) > 1
    for prompt, new, text in zip(PROMPTS, written, texts, strict=True):
        assert text.ids.tolist() == [*prompt, *new][:-1]
        assert text.prompt == len(prompt)
        ids = torch.tensor(text.ids.tolist())[None]
        states, hidden = teacher_features(target, ids, torch.ones_like(ids), recording.layers)
        found = torch.from_numpy(text.states.view(np.int16).copy()).view(torch.bfloat16).float()
        torch.testing.assert_close(found, states[0].bfloat16().float(), rtol=0.01, atol=1e-5)
        best = target.logits(hidden[0]).argmax(dim=-1)
        assert text.best[len(prompt) - 1 :].tolist() == best[len(prompt) - 1 :].tolist()


def test_a_file_is_what_was_written(tmp_path):
    """Guards the format: each text with its own ids, states and argmaxes, whatever its length."""
    target, recording = tiny_target("llama"), Recording([2], 4)
    written = generate_batch(target, PROMPTS, 8, ENDS, recording=recording)
    texts = list(recording.texts(written))
    write_texts(tmp_path / "000000.npz", texts, recording.layers, "hash")
    file = WrittenFile(tmp_path / "000000.npz")
    assert (file.layers, file.target) == ([2, 4], "hash")
    for found, text in zip(file.texts(), texts, strict=True):
        assert found.prompt == text.prompt
        for name in ("ids", "states", "best"):
            np.testing.assert_array_equal(getattr(found, name), getattr(text, name))
    assert file.problem([2, 4], "hash") is None
    assert file.problem([1, 2, 3], "hash") == "has no layer 1, 3"
    assert "another target's" in file.problem([2, 4], "other")


# ---------------------------------------------------------------------------------------------------------------------
# From writing to training
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny target, and its own greedy and sampled answers with their states."""
    folder = tmp_path_factory.mktemp("written")
    model, tokenizer = tiny_model("llama"), make_tokenizer()
    # It writes numbers and ends, for other words do not come back from text to the same ids.
    written = [1, *tokenizer.convert_tokens_to_ids(list(map(str, range(NUMBERS))))]
    others = [token for token in range(VOCAB) if token not in written]
    model.lm_head.weight.data[others] = 0
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    write_language(folder / "data.jsonl", [3, 5])
    (folder / "draft.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": list(range(0, VOCAB, 2))}))
    write(folder, folder / "own.jsonl", "--feature_layers", "2,4")
    write(folder, folder / "sampled.jsonl", "--feature_layers", "2,4", "--temperature", 1, "--top_k", 2)
    return folder


def write(work, output, *more):
    flags = ["--model_name", work / "target", "--data_path", work / "data.jsonl", "--output", output, "--device", "cpu"]
    flags += ["--max_new_tokens", 12, "--batch_size", 7, "--dtype", "float32", *more]
    generate_answers.main(generate_answers.build_parser().parse_args([str(flag) for flag in flags]))


def learn(work, output, *more, data=("own.jsonl", "sampled.jsonl")):
    flags = ["--model_name", work / "target", "--output_dir", output, "--draft_vocab_json", work / "draft.json"]
    flags += [item for name in data for item in ("--data_path", work / name)]
    flags += ["--num_stages", 2, "--num_spec_layers", 1, "--aggr_feature_bound", "0,2,4", "--max_steps", 6]
    flags += ["--batch_size", 4, "--min_length", 2, "--cache_dir", output.parent / "rows", "--log_interval", 1]
    flags += ["--val_fraction", 0.1, "--feature_cache", output.parent / "cache", *more]
    assert train.main(train.build_parser().parse_args([str(flag) for flag in flags])) == 0
    return [record for line in (output / "log.jsonl").open() if "loss" in (record := json.loads(line))]


@pytest.mark.parametrize("rows", ["staircase", "replay"])
def test_training_never_runs_the_target(work, tmp_path, monkeypatch, capsys, rows):
    """Guards the whole way: every example, of training and held out, greedy and sampled, is found; the target's layers
    do not run; and the losses are those of its own pass, but for rounding."""
    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", lambda *_: pytest.fail("the target ran"))
        found = learn(work, tmp_path / "found" / "run", "--rows", rows)
    said = capsys.readouterr()
    examples = int(re.search(r"^  examples +(\d+)$", said.out, re.M)[1])
    assert sum(map(int, re.findall(r"; (\d+) examples from", said.err))) == examples == 120
    monkeypatch.setattr("training.trainer.take_written", lambda *_: "")
    plain = learn(work, tmp_path / "plain" / "run", "--rows", rows)
    np.testing.assert_allclose([line["loss"] for line in found], [line["loss"] for line in plain], rtol=0.02)


def test_a_folder_of_answers(work, tmp_path, monkeypatch, capsys):
    """Guards --data_path with a folder: its answers are read, their states are found, and are no text themselves."""
    (tmp_path / "data").mkdir()
    for path in work.glob("own.*"):
        (tmp_path / "data" / path.name).symlink_to(path)
    shutil.copytree(features_folder(work / "own.jsonl"), tmp_path / "data" / "more" / "own.features")
    monkeypatch.setattr(Target, "forward", lambda *_: pytest.fail("the target ran"))
    learn(work, tmp_path / "run", data=[tmp_path / "data"])
    assert "more/own.features (hidden states)" in capsys.readouterr().out


def test_cut_examples_take_the_beginning(work, tmp_path, monkeypatch):
    """Guards --max_length: an example that ends earlier than the answer has its states, too."""
    monkeypatch.setattr(Target, "forward", lambda *_: pytest.fail("the target ran"))
    learn(work, tmp_path / "run", "--max_length", 10, "--max_length_overflow", "truncate")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--aggr_feature_bound", "0,1,4"], "own.features has no layer 1: not used"),
        (["--feature_cache_layers", "3"], "own.features has no layer 3: not used"),
    ],
)
def test_states_that_lack_a_layer_are_not_used(work, tmp_path, capsys, more, reason):
    """Guards against silence about a pass that was meant to be spared."""
    learn(work, tmp_path / "run", *more, data=["own.jsonl"])
    assert reason in capsys.readouterr().err


def test_states_of_another_target_are_not_used(work, tmp_path, capsys):
    """Guards against the hidden states of other weights under the same text."""
    tiny_model("llama", seed=5).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    learn(work, tmp_path / "run", "--model_name", tmp_path / "target", data=["own.jsonl"])
    assert "own.features is another target's, or this one's in another dtype: not used" in capsys.readouterr().err


def test_other_text_is_left_to_the_target(work, tmp_path, monkeypatch):
    """Guards against states that are given to an example whose prompt they know, but not its text."""
    lines = [json.loads(line) for line in (work / "own.jsonl").open()]
    for line in lines[::2]:
        line["messages"][-1]["content"] += " 4"
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    features_folder(tmp_path / "own.jsonl").symlink_to(features_folder(work / "own.jsonl"))
    ran, forward = [], FeatureCache._add
    monkeypatch.setattr(FeatureCache, "_add", lambda self, rows, *more: (ran.extend(rows), forward(self, rows, *more)))
    learn(work, tmp_path / "run", "--epochs", 1, data=[tmp_path / "own.jsonl"])
    assert ran


def test_a_damaged_file_is_one_line(work, tmp_path):
    """Guards against a traceback of numpy's, and names the way out."""
    (tmp_path / "own.jsonl").write_bytes((work / "own.jsonl").read_bytes())
    folder = features_folder(tmp_path / "own.jsonl")
    folder.mkdir()
    whole = (features_folder(work / "own.jsonl") / "000000.npz").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-4000].replace(b"PK", b"KP")):
        (folder / "000000.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"000000.npz' cannot be read .*: delete .*own.features'"):
            learn(work, tmp_path / "run", data=[tmp_path / "own.jsonl"])


def test_a_killed_writing_leaves_the_same_states(work, tmp_path):
    """Guards resuming: the file of a batch is there before its lines, and the same as without the kill."""
    for name in ("own.jsonl", "own.run.json"):
        (tmp_path / name).write_bytes((work / name).read_bytes())
    folder = features_folder(tmp_path / "own.jsonl")
    folder.mkdir()
    files = sorted(features_folder(work / "own.jsonl").iterdir())
    for path in files[:3]:
        (folder / path.name).write_bytes(path.read_bytes())
    lines = (work / "own.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "own.jsonl").write_bytes(b"".join(lines[: 3 * 7 + 2]))
    write(work, tmp_path / "own.jsonl", "--feature_layers", "2,4")
    assert (tmp_path / "own.jsonl").read_bytes() == (work / "own.jsonl").read_bytes()
    assert [path.name for path in sorted(folder.iterdir())] == [path.name for path in files]
    for path in files:
        for found, text in zip(WrittenFile(folder / path.name).texts(), WrittenFile(path).texts(), strict=True):
            np.testing.assert_array_equal(found.states, text.states)
    with pytest.raises(ValueError, match=r"begun with --feature_layers \[2, 4\], now it is \[2\]"):
        write(work, tmp_path / "own.jsonl", "--feature_layers", "2")


@pytest.mark.parametrize(
    ("layers", "part"), [("2,9", "--feature_layers has a 9: the target's layers are 1 to 4"), ("2;4", "'2;4' is not")]
)
def test_wrong_layers_are_one_line(work, tmp_path, capsys, monkeypatch, layers, part):
    """Guards the promise of one line that names the value, exit code 2, nothing written."""
    flags = ["--model_name", work / "target", "--data_path", work / "data.jsonl", "--output", tmp_path / "o.jsonl"]
    monkeypatch.setattr(sys, "argv", ["gen", *map(str, flags), "--feature_layers", layers])
    with pytest.raises(SystemExit) as stopped:
        generate_answers.run_script(generate_answers.main, generate_answers.build_parser())
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert part in line
    assert not list(tmp_path.iterdir())
