"""Training runs lose nothing and overwrite nothing: what is stopped can be continued, what is there stays there."""

import json
import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

import train
from loading.tokenizer import load_tokenizer
from pipeline_model import HeadConfig, read_checkpoint
from script_utils import lock_folder
from tests.test_train import VOCAB, assert_same_weights, run, script_error, weights
from tests.test_train import work as work  # a fixture
from tests.tiny import FAMILIES
from training import start
from training.conversations import load_conversations
from training.run_state import StopSignals, append_log, list_checkpoints
from training.start import target_config
from training.trainer import Trainer


def names(output):
    return [path.name for path in list_checkpoints(output)]


@pytest.mark.parametrize("crash", [False, True])
def test_the_last_validation_loses_nothing(work, tmp_path, monkeypatch, capsys, crash):
    """Guards a run that is stopped, or crashes, in the validation after its last step: it had neither checkpoint nor
    head. Continued, it is the run that was not stopped."""
    whole, output = tmp_path / "whole", tmp_path / "out"
    assert run(work, whole, "--max_steps", 3) == 0
    load = Trainer.load

    def stopped(self, part, *rows):
        if part == "val":
            if crash:
                raise RuntimeError("out of memory")
            os.kill(os.getpid(), signal.SIGTERM)
        return load(self, part, *rows)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "load", stopped)
        if crash:
            with pytest.raises(RuntimeError):
                run(work, output, "--max_steps", 3)
        else:
            assert run(work, output, "--max_steps", 3) == 128 + signal.SIGTERM
            assert json.loads((output / "run.json").read_text())["outcome"] == "stopped"
    assert names(output) == ["checkpoint-3"]
    assert run(work, output, "--max_steps", 3, "--resume_from", "auto") == 0
    assert_same_weights(weights(whole), weights(output))


def test_a_closed_terminal_leaves_a_checkpoint(work, tmp_path, monkeypatch):
    """Guards ssh that drops: SIGHUP killed the run. A validation amid the run is left at once, too."""
    load = Trainer.load

    def stopped(self, part, *rows):
        if part == "val":
            os.kill(os.getpid(), signal.SIGHUP)
        return load(self, part, *rows)

    monkeypatch.setattr(Trainer, "load", stopped)
    assert run(work, tmp_path, "--max_steps", 9, "--eval_interval", 2) == 128 + signal.SIGHUP
    assert names(tmp_path) == ["checkpoint-2"]
    assert "validation" not in (tmp_path / "log.jsonl").read_text()


def test_nohup_is_respected():
    """Guards `nohup train.py`, which a closed terminal must not stop."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_earlier_checkpoint_is_a_new_folder(work, tmp_path, capsys):
    """Guards going back: each new checkpoint was deleted as soon as it was written, the one resumed from too, and
    `--resume_from auto` took the abandoned line. The old line stays, the new one has its own folder and goes on."""
    output, branch = tmp_path / "out", tmp_path / "branch"
    settings = ["--max_steps", 3, "--save_interval", 1, "--keep_checkpoints", 3]
    assert run(work, output, *settings) == 0
    back = ["--resume_from", output / "checkpoint-1"]
    capsys.readouterr()
    message = script_error(work, tmp_path, capsys, *map(str, [*settings, *back]))
    assert "goes on to checkpoint-3" in message
    assert "name another --output_dir" in message
    assert names(output) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]

    assert run(work, branch, *settings, *back, "--max_minutes", 1e-6) == 0
    assert names(branch) == ["checkpoint-2"]
    capsys.readouterr()
    assert "auto" in script_error(work, tmp_path, capsys, *map(str, [*settings, *back]), "--output_dir", str(branch))
    assert run(work, branch, *settings, "--resume_from", "auto") == 0
    assert f"continuing {branch / 'checkpoint-2'} at step 2 of 3" in capsys.readouterr().err
    assert_same_weights(weights(output), weights(branch))


@pytest.mark.parametrize("resume", [[], ["--resume_from", "auto"]])
def test_a_finished_head_is_not_overwritten(work, tmp_path, capsys, resume):
    """Guards a head whose run was too short for a checkpoint: a second run replaced it without a word."""
    output = tmp_path / "out"
    assert run(work, output, "--max_steps", 1, "--val_fraction", 0) == 0
    assert names(output) == []
    before = {path: path.read_bytes() for path in output.iterdir()}
    capsys.readouterr()
    more = ["--max_steps", "2", "--seed", "7", "--val_fraction", "0", *resume]
    assert "holds a finished head" in script_error(work, tmp_path, capsys, *more)
    assert {path: path.read_bytes() for path in output.iterdir()} == before


def test_a_second_run_touches_nothing(work, tmp_path, capsys):
    """Guards two runs in one folder (a requeued job): the second start, even one that refused its arguments, deleted
    the checkpoint that the first was just writing."""
    output = tmp_path / "out"
    being_written = output / ".checkpoint-first" / "new"
    being_written.mkdir(parents=True)
    with lock_folder("--output_dir", output):
        message = script_error(work, tmp_path, capsys, "--resume_from", "auto")
        assert f"is in use: process {os.getpid()} on " in message
        assert being_written.exists()


def test_a_refused_start_leaves_nothing(work, tmp_path, capsys):
    """Guards "nothing written": a run whose data is missing leaves no empty folder behind."""
    script_error(work, tmp_path, capsys, "--data_path", "missing.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["checkpoint", "log"])
def test_a_full_disk_names_the_last_checkpoint(work, tmp_path, monkeypatch, at):
    """Guards a night's run: a full disk was a traceback ("unexpected pos 110400 vs 110292"); what is there is whole,
    and the run goes on from it."""
    output, calls = tmp_path / "out", []
    name = "training.run_state.torch.save" if at == "checkpoint" else "training.run_state.append_text"
    genuine = torch.save if at == "checkpoint" else append_log.__globals__["append_text"]

    def full(first, *more):
        calls.append(None)
        if len(calls) == (4 if at == "checkpoint" else 2):  # a head and a state each
            raise OSError(28, "No space left on device", str(output / "file"))
        return genuine(first, *more)

    settings = ["--max_steps", "3", "--save_interval", "1", "--keep_checkpoints", "9"]
    with monkeypatch.context() as patch:
        patch.setattr(name, full)
        with pytest.raises(ValueError, match="cannot be written") as caught:
            run(work, output, *settings)
    message = str(caught.value)
    assert "cannot be written (No space left on device, step 2" in message
    assert f"--resume_from auto goes on from {output / 'checkpoint-1'} when there is room" in message
    assert names(output) == ["checkpoint-1"]
    assert run(work, output, *settings, "--resume_from", "auto") == 0


def test_a_refusal_names_what_differs(work, tmp_path, capsys):
    """Guards resuming with another head: the line had 213,000 characters, both draft vocabularies, token by token."""
    ids = list(range(0, VOCAB, 2))
    (tmp_path / "a.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": ids}))
    (tmp_path / "b.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": [1, *ids[1:]]}))
    more = ["--save_interval", "1", "--max_steps", "2", "--warmup_steps", "0", "--draft_vocab_json"]
    assert run(work, tmp_path / "out", *more, tmp_path / "a.json", "--max_steps", 1) == 0
    for other, part in (
        (["a.json", "--num_spec_layers", "1"], "head: num_spec_layers 2, this one has 1"),
        (["b.json"], f"head: draft_token_ids a list of {len(ids)}, this one has another"),
    ):
        capsys.readouterr()
        flags = [*more, str(tmp_path / other[0]), *other[1:], "--resume_from", "auto"]
        message = script_error(work, tmp_path, capsys, *flags)
        assert part in message
        assert len(message) < 500


# ---------------------------------------------------------------------------------------------------------------------
# The paper's command lines


PAPER = "--model_name M --data_path F --num_stages 8 --output_dir O"


def test_defaults_are_the_papers(monkeypatch):
    """Guards users of the paper's command line against another head without a word: 64 sequences a step on 8
    processes, 4 speculation layers, no weight decay, nothing under 10 tokens, longer examples left out."""
    args = train.build_parser().parse_args(PAPER.split())
    target = FAMILIES["llama"](max_position_embeddings=4096)
    for name in ("load_target_config", "check_target_weights"):
        monkeypatch.setattr(start, name, lambda *_, **__: target)
    target_config(args)
    assert 8 * args.batch_size * args.gradient_accumulation_steps == 64
    assert (args.num_spec_layers, args.weight_decay, args.min_length, args.max_length) == (4, 0, 10, 2048)
    assert (args.max_length_overflow, args.lr, args.lr_scheduler, args.warmup_steps) == ("discard", 1e-4, "linear", 100)
    assert (args.epochs, args.max_grad_norm, args.optimizer, args.mask_assistant) == (1, 1.0, "adamw", True)


def test_a_target_of_few_positions_takes_the_papers_command_line(monkeypatch):
    """Guards the paper's command line on a small target: its default of 2,048 tokens is then the target's limit; a
    --max_length that is given and does not fit is refused."""
    target = FAMILIES["llama"](max_position_embeddings=256)
    for name in ("load_target_config", "check_target_weights"):
        monkeypatch.setattr(start, name, lambda *_, **__: target)
    args = train.build_parser().parse_args(PAPER.split())
    target_config(args)
    assert args.max_length == 256
    with pytest.raises(ValueError, match="--max_length is 300"):
        target_config(train.build_parser().parse_args([*PAPER.split(), "--max_length", "300"]))


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--draft_vocab_json", ""], "draft_vocab_json", None),
        (["--aggr_feature_bound", ""], "aggr_feature_bound", "auto"),
        (["--aggr_feature_bound", "None"], "aggr_feature_bound", "auto"),
        (["--mask_assistant", "True"], "mask_assistant", True),
        (["--mask_assistant", "False"], "mask_assistant", False),
        (["--no-mask_assistant"], "mask_assistant", False),
        (["--trained_with_use_deepest", "false"], "trained_with_use_deepest", False),
        (["--force_rebuild_cache"], "force_rebuild_cache", True),
        (["--spec_intermediate_size_fallback", "48"], "spec_intermediate_size_fallback", 48),
    ],
    ids=str,
)
def test_values_as_the_paper_writes_them(flags, name, value):
    """Guards command lines that users bring along: they were unrecognised arguments, or files named ''."""
    assert getattr(train.build_parser().parse_args([*PAPER.split(), *flags]), name) == value


def test_base_layers_count_from_0(work, tmp_path):
    """Guards --spec_init_from_base_layers 0,3: in the paper's checkpoints 0 is the first layer. The config says so;
    without its entry, and with layers counted from 1, as this project's first heads have it, it loads as well."""
    settings = ["--spec_init_from_base_layers", "0,3", "--spec_intermediate_size_fallback", 48, "--lr", 1e-12]
    assert run(work, tmp_path, "--max_steps", 1, *settings) == 0
    config, state = read_checkpoint(tmp_path)
    assert (config.spec_init_from_base_layers, config.spec_init_first_layer) == ((0, 3), 0)
    assert config.spec_intermediate_size_fallback == 48
    source = AutoModelForCausalLM.from_pretrained(work / "target").state_dict()
    for own, layer in ((0, 0), (1, 3)):
        theirs = source[f"model.layers.{layer}.mlp.up_proj.weight"]
        torch.testing.assert_close(state[f"spec_layers.{own}.mlp.up_proj.weight"], theirs, rtol=0, atol=1e-9)
    old = config.to_dict() | {"spec_init_from_base_layers": [1, 4]}
    del old["spec_init_first_layer"]
    assert HeadConfig.parse(old).spec_init_from_base_layers == (1, 4)


def test_the_cache_is_rebuilt_on_demand(work, tmp_path, monkeypatch):
    """Guards --force_rebuild_cache: rows that are there are tokenised again, and only then."""
    settings = {"data_path": work / "data.jsonl", "cache_dir": tmp_path, "verbose": False}
    tokenizer = load_tokenizer(str(work / "target"))
    rows = load_conversations(tokenizer=tokenizer, **settings).train["input_ids"]
    (cached,) = tmp_path.iterdir()
    before = cached.stat().st_ino
    load_conversations(tokenizer=tokenizer, **settings)
    assert cached.stat().st_ino == before
    again = load_conversations(tokenizer=tokenizer, rebuild=True, **settings)
    assert cached.stat().st_ino != before
    assert again.train["input_ids"] == rows
    assert list(tmp_path.iterdir()) == [cached]


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("ACCELERATE_USE_FSDP", "true", "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "tensor, context or sequence parallelism"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "fp8"),
        ("LOCAL_WORLD_SIZE", "8", "8 processes were started on 2 GPUs: use --num_processes 2"),
    ],
)
def test_accelerate_configurations_are_never_half_followed(work, tmp_path, monkeypatch, capsys, variable, value, part):
    """Guards `accelerate config`: what training does not do is refused by name, before anything is loaded."""
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert part in script_error(work, tmp_path, capsys)
    assert list(tmp_path.iterdir()) == []
