"""Training end to end on tiny targets: same curve for any number of processes, exact resume, and heads that learn."""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

import pipeline_inference
import train
from loading.checkpoint_files import CHECKPOINT_NAME
from pipeline_model import Target, load_head, read_checkpoint
from script_utils import run_script
from tests.tiny import FAMILIES, VOCAB, spd_decoder, tiny_head, tiny_model, tiny_target
from training import head_loss, optimizers
from training import launch as training_launch
from training.conversations import PadCollator, load_conversations
from training.forward import teacher_features
from training.head_loss import HeadLoss
from training.new_head import new_head
from training.optimizers import CpuMuon, build_optimizers, lr_factor, orthogonalise, orthogonalise_all
from training.run_state import (
    STATE_NAME,
    DataOrder,
    StopSignals,
    draw_fill,
    fill_weights,
    list_checkpoints,
    read_log,
    save_checkpoint,
)
from training.start import layer_placement, read_draft_vocab
from training.trainer import Trainer

ROOT = Path(train.__file__).parent
NUMBERS, STRIDES, REPLY = 12, 5, 20  # the language: "stride 3, start 4" is answered with 7 10 1 4 ... modulo 12
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}assistant "
    "{% generation %}{{ m.content }} <eos> {% endgeneration %}{% else %}user {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def make_tokenizer():
    words = ["[UNK]", "<eos>", "user", "assistant", *map(str, range(NUMBERS)), *(f"s{k}" for k in range(STRIDES + 1))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def reply(stride, start, length=REPLY):
    return " ".join(str((start + stride * step) % NUMBERS) for step in range(1, length + 1))


def write_language(path, lengths, copies=1):
    """Every stride and start, with replies whose lengths are taken from `lengths` in turn."""
    pairs = [(stride, start) for stride in range(1, STRIDES + 1) for start in range(NUMBERS)] * copies
    with path.open("w") as file:
        for index, (stride, start) in enumerate(pairs):
            answer = reply(stride, start, lengths[index % len(lengths)])
            turns = [("user", f"s{stride} {start}"), ("assistant", answer)]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A random target `target`, its tokenizer, `data.jsonl` of 60 conversations of many lengths, a draft vocabulary."""
    folder = tmp_path_factory.mktemp("train")
    tiny_model("llama").save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    write_language(folder / "data.jsonl", [3, 17, 8, 30, 5, 12, 21])
    (folder / "draft.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": list(range(0, VOCAB, 2))}))
    return folder


def arguments(work, output, *more):
    base = ["--model_name", work / "target", "--data_path", work / "data.jsonl", "--cache_dir", work / "cache"]
    base += ["--output_dir", output, "--num_stages", 4, "--batch_size", 2, "--gradient_accumulation_steps", 2]
    base += ["--log_interval", 1, "--warmup_steps", 2, "--lr", 1e-3, "--val_fraction", 0.1, "--max_length", 64]
    base += ["--num_spec_layers", 2, "--min_length", 2, "--max_length_overflow", "truncate", "--weight_decay", 0.01]
    return [str(item) for item in [*base, *more]]


def run(work, output, *more):
    """Train in this process; the exit code."""
    return train.main(train.build_parser().parse_args(arguments(work, output, *more)))


def script_error(work, tmp_path, capsys, *more):
    """The one line on stderr of a run that must end with exit code 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *arguments(work, tmp_path / "out", *more)])
        with pytest.raises(SystemExit) as stopped:
            run_script(train.main, train.build_parser())
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in lines if not line.startswith("conversations: ")]  # the data's progress bar
    assert len(lines) == 1, lines
    return lines[0]


def training_lines(output):
    return [line for line in read_log(output / "log.jsonl") if "validation" not in line]


def comparable(output):
    """The log without times."""
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_s")}
        for line in read_log(output / "log.jsonl")
    ]


def weights(output):
    return read_checkpoint(output)[1]


def assert_same_weights(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def launch(processes, *more):
    """`accelerate launch`, on CPUs, in the background."""
    options = ["--num_processes", processes, "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, ROOT / "train.py", *more]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(item) for item in command], env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE
    )


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def test_same_curve_with_one_and_two_processes(work, tmp_path):
    """Guards the promise of `accelerate launch`: loss, agreement, counts, learning rates and validation of a global
    batch do not depend on how many processes share it (weights by rank, a scheduler stepped once per process)."""
    settings = ["--max_steps", 6, "--optimizer", "muon", "--draft_vocab_json", work / "draft.json"]
    launched = launch(2, *arguments(work, tmp_path / "2", *settings, "--gradient_accumulation_steps", 2))
    assert run(work, tmp_path / "1", *settings, "--gradient_accumulation_steps", 4) == 0
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in "12")
    assert json.loads((tmp_path / "2" / "run.json").read_text())["processes"] == 2
    assert [line["step"] for line in one] == [line["step"] for line in two] == [1, 2, 3, 4, 5, 6, 6]
    for ours, theirs in zip(one, two, strict=True):
        assert ours["supervised_tokens"] == theirs["supervised_tokens"]
        for left, right in zip(ours.get("validation", [ours]), theirs.get("validation", [theirs]), strict=True):
            assert left["loss"] == pytest.approx(right["loss"], abs=1e-4)
            assert left["agreement"] == pytest.approx(right["agreement"], abs=1e-4)
            assert left.get("lr") == right.get("lr")
            assert left.get("gradient_norm", 0) == pytest.approx(right.get("gradient_norm", 0), rel=1e-4)
    expected = [1e-3 * factor for factor in (0.5, 1.0, 1.0, 0.75, 0.5, 0.25)]
    assert [line["lr"] for line in one[:-1]] == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_exact(work, tmp_path, optimizer):
    """Guards resuming: a run continued in its second epoch, amid a log interval, ends bit for bit like one that never
    stopped, log included (optimiser state, data position, draws, counters, window of the log)."""
    settings = ["--optimizer", optimizer, "--epochs", 2, "--log_interval", 3, "--eval_interval", 8]
    settings += ["--gradient_accumulation_steps", 3]  # 54 examples, 6 per step: 18 steps
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(work, whole, *settings, "--save_interval", 11, "--keep_checkpoints", 5) == 0
    assert [path.name for path in list_checkpoints(whole)] == ["checkpoint-11", "checkpoint-18"]
    assert training_lines(whole)[-1]["step"] == 18
    set_seed(7)  # a new process would not have the same random states either: nothing may be drawn from them
    assert run(work, resumed, *settings, "--resume_from", whole / "checkpoint-11") == 0
    assert_same_weights(weights(whole), weights(resumed))
    assert comparable(whole) == comparable(resumed)


def test_feature_cache_changes_nothing_between_runs(work, tmp_path, monkeypatch):
    """Guards --feature_cache: two epochs with a cache that fills, with a full one, and from a checkpoint, are the same
    run; with a full cache the target's layers never run."""
    more = ["--epochs", 2, "--save_interval", 7, "--feature_cache", tmp_path / "cache"]
    assert run(work, tmp_path / "filling", *more) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", lambda *_: pytest.fail("the target ran"))
        assert run(work, tmp_path / "full", *more) == 0
        checkpoint = list_checkpoints(tmp_path / "full")[0]
        assert run(work, tmp_path / "resumed", *more, "--resume_from", checkpoint) == 0
    assert comparable(tmp_path / "full") == comparable(tmp_path / "filling")
    assert_same_weights(weights(tmp_path / "full"), weights(tmp_path / "filling"))
    assert_same_weights(weights(tmp_path / "resumed"), weights(tmp_path / "filling"))
    assert run(work, tmp_path / "plain", "--epochs", 2) == 0
    losses = [[line["loss"] for line in training_lines(tmp_path / name)] for name in ("plain", "filling")]
    np.testing.assert_allclose(*losses, rtol=0.02)  # bfloat16


def test_signal_stops_after_the_step_and_auto_continues(work, tmp_path, monkeypatch, capsys):
    """Guards clusters and Ctrl-C: SIGTERM amid a step leaves a checkpoint of a whole step and exit code 143, and
    `--resume_from auto` then ends where an undisturbed run ends."""
    settings = ["--max_steps", 5, "--resume_from", "auto"]
    assert run(work, tmp_path / "whole", *settings) == 0

    load, calls = Trainer.load, []

    def interrupted(self, *args):
        calls.append(None)
        if len(calls) == 6:  # in the first half of step 3: both micro-batches of a step are loaded one by one
            os.kill(os.getpid(), signal.SIGTERM)
        return load(self, *args)

    monkeypatch.setattr(Trainer, "load", interrupted)
    output = tmp_path / "stopped"
    assert run(work, output, *settings) == 128 + signal.SIGTERM
    assert [path.name for path in list_checkpoints(output)] == ["checkpoint-3"]
    assert not (output / CHECKPOINT_NAME).exists()
    assert "--resume_from auto" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setattr(Trainer, "load", load)
    assert run(work, output, *settings) == 0
    assert_same_weights(weights(tmp_path / "whole"), weights(output))
    assert comparable(tmp_path / "whole") == comparable(output)


def test_second_interrupt_is_immediate():
    """Guards against a run that cannot be stopped: the second Ctrl-C raises, a launcher's SIGTERM after the first does
    not."""
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_half_written_checkpoints_are_never_picked(work, tmp_path, capsys):
    """Guards atomicity: neither a folder without its state nor the remains of a killed write are resumed from or
    counted as kept, and the remains go away."""
    output = tmp_path / "out"
    settings = ["--save_interval", 1, "--resume_from", "auto"]
    assert run(work, output, *settings, "--max_steps", 3) == 0
    assert [path.name for path in list_checkpoints(output)] == ["checkpoint-2", "checkpoint-3"]
    half, remains = output / "checkpoint-9", output / ".checkpoint-killed" / "new"
    half.mkdir()
    shutil.copy(output / CHECKPOINT_NAME, half)
    shutil.copytree(output / "checkpoint-3", remains)
    capsys.readouterr()
    assert run(work, output, *settings, "--max_steps", 4) == 0
    assert f"{Path('checkpoint-3')} at step 3 of 4" in capsys.readouterr().err
    assert [path.name for path in list_checkpoints(output)] == ["checkpoint-3", "checkpoint-4"]
    assert not remains.parent.exists()

    damaged = output / "checkpoint-4" / STATE_NAME
    damaged.write_bytes(damaged.read_bytes()[:1000])
    error = script_error(work, tmp_path, capsys, "--max_steps", 5, "--resume_from", damaged.parent)
    assert "cannot be read" in error


def test_checkpoint_write_that_fails_leaves_the_old_one(work, tmp_path, monkeypatch):
    """Guards against a full disk: when writing a checkpoint again breaks off, the one of that name stays whole."""
    output = tmp_path / "out"
    assert run(work, output, "--max_steps", 2, "--save_interval", 2) == 0
    before = (output / "checkpoint-2" / STATE_NAME).read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.run_state.torch.save", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(output, 2, load_head(output, Target.load(str(work / "target"))), {}, keep=2)
    assert (output / "checkpoint-2" / STATE_NAME).read_bytes() == before
    assert list(output.glob(".checkpoint-*")) == []


def test_outputs(work, tmp_path):
    """Guards what users and papers build on: head in the released format, log, record, curve, and tokens counted."""
    output = tmp_path / "out"
    assert run(work, output, "--max_steps", 4, "--eval_interval", 2, "--log_interval", 3) == 0
    config, _ = read_checkpoint(output)
    assert (config.version, config.num_stages, config.trained_num_stages) == (11, 4, None)
    lines = read_log(output / "log.jsonl")
    assert [(line["step"], "validation" in line) for line in lines] == [(2, True), (3, False), (4, False), (4, True)]
    assert [(entry["num_stages"], entry["fill"]) for entry in lines[0]["validation"]] == [(4, f) for f in (1, 2, 3, 4)]
    record = json.loads((output / "run.json").read_text())
    assert record["outcome"] == "finished"
    assert record["arguments"]["num_stages"] == [4]
    assert record["supervised_tokens"] == lines[-1]["supervised_tokens"] > 0
    assert record["data"]["conversations"] == record["train_examples"] + record["val_examples"] == 60
    assert (output / "training_curve.png").read_bytes().startswith(b"\x89PNG")


def test_time_budget_writes_the_head(work, tmp_path):
    """Guards `--max_minutes`: the run ends early and cleanly, with a head and a checkpoint to go on from."""
    output = tmp_path / "out"
    assert run(work, output, "--max_steps", 10_000, "--max_minutes", 1e-6) == 0
    assert (output / CHECKPOINT_NAME).exists()
    assert [path.name for path in list_checkpoints(output)] == ["checkpoint-1"]
    assert json.loads((output / "run.json").read_text())["outcome"] == "out of time"


@pytest.mark.parametrize(
    ("more", "version", "sizes"),
    [
        (["--version", 10], 10, (1, 1, 1, 1)),
        (["--version", 10, "--num_stages", 2, "--shallow_hidden_layer_indices", "4,1;0,2"], 10, (2, 2)),
        (["--num_stages", 3, "--stage_layers", "1;2;1"], 12, (1, 2, 1)),
    ],
    ids=str,
)
def test_versions_from_training_to_decoding(work, tmp_path, capsys, more, version, sizes):
    """Guards version 10 and uneven stages end to end: the flags reach the checkpoint, a stopped run goes on to the same
    weights, and the command line decodes with the head, losslessly and with the factor of the largest stage."""
    output, more = tmp_path / "out", [*more, "--optimizer", "muon", "--max_steps", 4]
    assert run(work, output, *more, "--save_interval", 2) == 0
    whole = read_checkpoint(output)[1]
    shutil.rmtree(output / "checkpoint-4")  # as if it had been stopped on the way there
    assert run(work, output, *more, "--resume_from", "auto") == 0
    config, state = read_checkpoint(output)
    assert (config.version, config.split(4)) == (version, sizes)
    if "--shallow_hidden_layer_indices" in more:
        assert config.shallow_hidden_layer_indices == ((4, 1), (0, 2))
    assert all(torch.equal(weight, state[name]) for name, weight in whole.items())

    capsys.readouterr()
    flags = ["--base_model_path", work / "target", "--spec_head_ckpt", output, "--prompt", "s1 4", "--device", "cpu"]
    cli = pipeline_inference.build_parser().parse_args([*map(str, flags), "--max_new_tokens", "12"])
    assert pipeline_inference.main(cli) == 0
    shown = capsys.readouterr().out
    assert "[compare] ids are equal" in shown
    cycles, n, length = re.search(r"\[pipeline\].* (\d+) cycles, n = (\d), .*L_acc ([\d.]+)", shown).groups()
    assert int(n) == len(sizes)
    assert float(length) == pytest.approx(4 / max(sizes) * 11 / int(cycles), abs=0.005)


def test_several_depths(work, tmp_path):
    """Guards `--num_stages 2,4`: one head for several pipelines, which says so, validates on each and decodes on each;
    types that a shorter pipeline never uses must not stop the gradients."""
    output = tmp_path / "out"
    assert run(work, output, "--num_stages", "2,4", "--max_steps", 6) == 0
    target = Target.load(str(work / "target"))
    head = load_head(output, target)
    assert (head.config.num_stages, head.config.trained_num_stages) == (4, (2, 4))
    shapes = [(entry["num_stages"], entry["fill"]) for entry in read_log(output / "log.jsonl")[-1]["validation"]]
    assert shapes == [(2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4)]
    plain = spd_decoder(target, head).generate([2, 5, 3], 8).tokens
    assert len(plain) == 8


def test_training_goes_on_from_a_head(work, tmp_path, capsys):
    """Guards --init_head: a run of one step with a tiny learning rate ends where the other began; another head is
    refused by what differs."""
    assert run(work, tmp_path / "first", "--max_steps", 3) == 0
    more = ["--init_head", tmp_path / "first", "--max_steps", 1, "--lr", 1e-12]
    assert run(work, tmp_path / "second", *more) == 0
    for name, weight in weights(tmp_path / "first").items():
        torch.testing.assert_close(weights(tmp_path / "second")[name], weight, rtol=0, atol=1e-9)
    for flag, value, part in (
        ("--num_spec_layers", 1, "its num_spec_layers is 2, this run's 1"),
        ("--draft_vocab_json", work / "draft.json", "its draft_token_ids differs"),
        ("--spec_init_from_base_layers", "1,2", "leave --spec_init_from_base_layers out"),
        ("--head_init", "identity", "leave --head_init out"),
    ):
        capsys.readouterr()
        assert part in script_error(work, tmp_path, capsys, *map(str, more), flag, str(value))


def test_loss_that_is_not_finite(work, tmp_path, monkeypatch, capsys):
    """Guards a night's run: a step with a non-finite loss changes no weight and is reported with its examples; five in
    a row end the run with exit code 1 and name the last good checkpoint."""
    genuine, calls = head_loss.training_loss, []
    bad = {3, *range(7, 100)}  # one micro-batch of step 2, then all from step 4 on

    def poisoned(*args, **kwargs):
        calls.append(None)
        loss = genuine(*args, **kwargs)
        return loss._replace(total=loss.total * (math.nan if len(calls) in bad else 1.0))

    monkeypatch.setattr(head_loss, "training_loss", poisoned)
    output = tmp_path / "out"
    settings = ["--save_interval", 1, "--keep_checkpoints", 9, "--val_fraction", 0]
    assert run(work, output, "--max_steps", 20, *settings) == 1
    heads = [weights(output / f"checkpoint-{step}") for step in (1, 2, 3)]
    assert_same_weights(heads[0], heads[1])
    assert not torch.equal(heads[1]["lm_head.weight"], heads[2]["lm_head.weight"])
    errors = capsys.readouterr().err.splitlines()
    assert sum("step skipped; examples data.jsonl:" in line.replace(str(work) + "/", "") for line in errors) == 6
    assert sum("gave up" in line and "checkpoint-7" in line and "data.jsonl:" in line for line in errors) == 1
    lines = training_lines(output)
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 2, 3, 4, 5][: len(lines)]
    assert lines[1]["loss"] is None


@pytest.mark.parametrize("scale", [2.0**8, 2.0**126])
def test_fp16_scaling(work, tmp_path, monkeypatch, scale):
    """Guards fp16: a loss scale changes nothing in float32 but is undone before clipping, and steps that overflow are
    no fault of the data: they are left out, the scale falls, and the run goes on."""
    settings = ["--max_steps", 6, "--optimizer", "muon", "--lr_scheduler", "constant", "--warmup_steps", 0]
    assert run(work, tmp_path / "plain", *settings) == 0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=True)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *_, **__: scaler)
    assert run(work, tmp_path / "scaled", *settings) == 0
    plain, scaled = training_lines(tmp_path / "plain"), training_lines(tmp_path / "scaled")
    assert all(line["skipped_steps"] == 0 for line in scaled)
    overflowed = [line["loss"] is None for line in scaled]
    assert scaler.get_scale() == scale / 2 ** sum(overflowed)
    assert 0 < sum(overflowed) < 6 or scale == 2.0**8
    if scale == 2.0**8:
        assert_same_weights(weights(tmp_path / "plain"), weights(tmp_path / "scaled"))
        assert [line["gradient_norm"] for line in plain] == [line["gradient_norm"] for line in scaled]


# ---------------------------------------------------------------------------------------------------------------------
# What steps are made of


def test_every_token_weighs_the_same_in_any_micro_batching(work, tmp_path):
    """Guards against the mean of means: eight examples of very different lengths give the same loss, gradient norm and
    next steps as one micro-batch, as two, and as eight, some of which have no position in the draft vocabulary."""
    settings = ["--max_steps", 3, "--no-trained_with_use_deepest", "--draft_vocab_json", work / "draft.json"]
    curves = []
    for batch_size in (8, 4, 1):
        output = tmp_path / str(batch_size)
        split = ["--batch_size", batch_size, "--gradient_accumulation_steps", 8 // batch_size]
        assert run(work, output, *settings, *split, "--val_fraction", 0) == 0
        curves.append([(line["loss"], line["gradient_norm"]) for line in training_lines(output)])
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    np.testing.assert_allclose(curves[2], curves[0], rtol=1e-4)


def test_every_weight_gets_a_gradient():
    """Guards DistributedDataParallel, which waits for every gradient: a fill of 1 leaves types without rows, a batch
    without supervised tokens leaves everything without a loss."""
    target = tiny_target("llama")
    head = tiny_head(target, (1, 1, 1, 1)).requires_grad_(True)
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    features, hidden = teacher_features(target, ids, mask, head.config.aggr_feature_bound)
    for labels, fill in ((ids, 1), (torch.full_like(ids, -100), 4)):
        teacher = {"features": features, "hidden": hidden, "labels": labels, "attention_mask": mask}
        loss = HeadLoss(head, target)(teacher, (1, 1, 1, 1), fill)
        loss.total.backward()
        assert all(weight.grad is not None for weight in head.parameters())
        moved = any(bool(weight.grad.any()) for weight in head.parameters())
        assert moved == bool((labels >= 0).any())
        head.zero_grad()


def test_data_order_covers_epochs_in_any_grouping():
    """Guards the data position: each epoch shows each example once, in another order, and the same examples make up
    step k whether 1 or 4 processes share it."""
    lengths = np.random.default_rng(0).integers(1, 50, size=37)
    order = DataOrder(lengths, batch_size=2, micro_batches=4, seed=5)
    assert order.steps(2) == 10  # 74 examples, 8 per step
    seen = [np.concatenate(order.step(step)) for step in range(10)]
    counts = np.bincount(np.concatenate(seen), minlength=37)
    assert set(counts) == {2, 3}  # 80 - 74 from the third epoch
    assert not np.array_equal(order.epoch(0), order.epoch(1))
    for step, rows in enumerate(seen):
        assert (np.diff(lengths[rows]) <= 0).all()
        other = DataOrder(lengths, batch_size=1, micro_batches=8, seed=5).step(step)
        assert np.array_equal(np.concatenate(other), rows)


def test_fill_draws():
    """Guards method.md section 4: half of the micro-batches full, the others uniform in 1 .. n-1, n uniform; always
    full without use_deepest."""
    draws = [draw_fill((2, 6), True, None, 1, index) for index in range(4000)]
    six = [fill for n, fill in draws if n == 6]
    assert len(six) / len(draws) == pytest.approx(0.5, abs=0.04)
    assert six.count(6) / len(six) == pytest.approx(0.5, abs=0.04)
    assert all(six.count(fill) / len(six) == pytest.approx(0.1, abs=0.03) for fill in (1, 2, 3, 4, 5))
    assert {fill for n, fill in draws if n == 2} == {1, 2}
    assert {draw_fill((6,), False, None, 1, index) for index in range(50)} == {(6, 6)}
    assert draw_fill((1,), True, None, 1, 0) == (1, 1)


@pytest.mark.parametrize("alpha", [0.3, 0.7])
def test_fills_are_weighted_as_decoding_verifies_them(alpha):
    """Guards --fill_alpha: shares of verified drafts by fill, against a pipeline that accepts with chance alpha."""
    n, random = 4, np.random.default_rng(0)
    verified = np.zeros(n)
    fill = 1
    for _ in range(40_000):
        verified[fill - 1] += 1
        fill = min(n, fill + 1) if random.random() < alpha else 1
    np.testing.assert_allclose(fill_weights(n, alpha), verified / verified.sum(), atol=0.01)
    draws = [draw_fill((2, n), True, alpha, 1, index) for index in range(4000)]
    for depth in (2, n):
        fills = np.bincount([fill for at, fill in draws if at == depth], minlength=depth + 1)[1:]
        np.testing.assert_allclose(fills / fills.sum(), fill_weights(depth, alpha), atol=0.04)
    assert fill_weights(n, 1.0).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.5), ("cosine", 0.5), ("constant", 1.0)])
def test_learning_rate(schedule, middle):
    """Guards the schedule's ends: no step is wasted on a rate of 0, the peak is reached, the last step is small."""
    factors = [lr_factor(step, 110, 10, schedule) for step in range(110)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert factors[60] == pytest.approx(middle)
    assert factors[-1] <= (1.0 if schedule == "constant" else 0.011)
    assert lr_factor(0, 1, 0, schedule) == 1.0


def test_muon_takes_the_matrices_only():
    """Guards the split of the optimisers: lm_head and vectors are AdamW's, each weight has one optimiser, vectors are
    not decayed, and lr_adamw is half of lr unless given."""
    head = tiny_head(tiny_target("llama"), (2, 2), num_spec_layers=1).requires_grad_(True)
    muon, adamw = build_optimizers(head, "muon", lr=2e-3, weight_decay=0.1)
    names = {id(weight): name for name, weight in head.named_parameters()}
    taken = [[names[id(w)] for group in o.param_groups for w in group["params"]] for o in (muon, adamw)]
    assert sorted(taken[0] + taken[1]) == sorted(names.values())
    assert all("norm" in name or name == "lm_head.weight" for name in taken[1])
    assert not any("norm" in name for name in taken[0])
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (2e-3, 1e-3)


@pytest.mark.parametrize(("optimizer", "shared"), [("adamw", 2e-3), ("muon", 1e-3)])
def test_lm_head_has_its_own_rate(optimizer, shared):
    """Guards --lm_head_lr_scale: the rate of lm_head alone is scaled, and a frozen one is in no optimizer."""
    head = tiny_head(tiny_target("llama"), (2, 2), num_spec_layers=1).requires_grad_(True)
    for scale in (0.1, 1, 0):
        head.lm_head.requires_grad_(scale > 0)
        optimizers = build_optimizers(head, optimizer, lr=2e-3, lm_head_lr_scale=scale)
        rates = {id(w): group["lr"] for o in optimizers for group in o.param_groups for w in group["params"]}
        assert len(rates) == len(list(head.parameters())) - (scale == 0)
        assert rates.get(id(head.lm_head.weight), 0) == pytest.approx(scale * shared)
        assert rates[id(head.aggr_projs[0].weight)] == 2e-3
        assert rates[id(head.spec_layers[0].input_layernorm.weight)] == shared


@pytest.mark.parametrize("more", [("--version", 10, "--optimizer", "muon"), ("--rows", "replay"), ()])
def test_frozen_lm_head_stays_the_target_s(work, tmp_path, more):
    """Guards the starts in whole runs: lm_head is the target's to the last bit when frozen, all else moves, and the
    checkpoint says which layers it started from."""
    settings = ["--head_init", "identity+late_layers", "--lm_head_lr_scale", 0, "--max_steps", 2, *more]
    assert run(work, tmp_path, *settings) == 0
    config, state = read_checkpoint(tmp_path)
    target = Target.load(str(work / "target"))
    assert config.spec_init_from_base_layers == (2, 3)
    assert torch.equal(state["lm_head.weight"], target.lm_head.weight)
    start = new_head(config, target, (2, 3), identity_projections=True).state_dict()
    assert not any(torch.equal(state[name], start[name]) for name in state if "self_attn" in name)
    moved = [name for name in state if "proj" in name and not torch.equal(state[name], start[name])]
    assert any(name.startswith(("aggr_projs", "g0_proj")) for name in moved)


@pytest.mark.parametrize(("optimizer", "version"), [("adamw", 11), ("muon", 11), ("muon", 10)])
def test_types_without_rows_stay_where_they_are(work, tmp_path, monkeypatch, optimizer, version):
    """Guards rare types: a projection moves in the steps whose fills need it and in no other, momentum or not."""
    moved, fills = [], []
    step = Trainer.train_step

    def watched(self, signals):
        before = [[module.weight.detach().clone() for module in modules] for modules in self.head.projections]
        number = self.progress.step
        result = step(self, signals)
        pairs = [zip(old, modules, strict=True) for old, modules in zip(before, self.head.projections, strict=True)]
        changes = [{not torch.equal(old, module.weight) for old, module in kind} for kind in pairs]
        assert all(len(change) == 1 for change in changes)  # the modules of one type move together
        moved.append([change.pop() for change in changes])
        fills.append({fill for _, fill in self.draw_fills(number)})
        return result

    monkeypatch.setattr(Trainer, "train_step", watched)
    more = ["--optimizer", optimizer, "--fill_alpha", 0.7, "--version", version, "--max_steps", 16]
    more += ["--aggr_feature_bound", "0,1,2,3,4"] if version == 11 else []
    assert run(work, tmp_path, *more, "--gradient_accumulation_steps", 1) == 0
    assert len({len(step_fills) for step_fills in fills}) == 1
    assert {1, 4} <= set.union(*fills)
    for types, (fill,) in zip(moved, fills, strict=True):
        # n = 4 with an anchor a layer, or version 10: depth and type are the same, and fill F has depths 0 .. F-1 and
        # the deepest.
        assert types == [kind < fill or kind == 4 for kind in range(5)]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_cpu_muon_is_muon(shape, native, monkeypatch):
    """Guards the CPU's Muon, with bfloat16 kernels and without: several steps move a matrix as the library's do."""
    monkeypatch.setattr(optimizers, "native_bfloat16", lambda device: native)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    settings = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    gradients, ends = [torch.randn(shape, generator=generator) for _ in range(4)], []
    for optimizer_class in (torch.optim.Muon, CpuMuon):
        weight = torch.nn.Parameter(start.clone())
        optimizer = optimizer_class([weight], **settings)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        ends.append(weight.detach())
    moved = (ends[0] - start).norm()
    assert (ends[0] - ends[1]).norm() < 0.02 * moved


def test_processes_share_muons_products(monkeypatch):
    """Guards the shares: every matrix is orthogonalised by one process and comes from there, none has nearly all."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(48, 16), (16, 48), (16, 16), (16, 16), (8, 16), (8, 16), (24, 16)]
    matrices = [torch.randn(shape, generator=generator) for shape in shapes]
    expected = [orthogonalise(matrix, (3.4445, -4.775, 2.0315), 5) for matrix in matrices]
    senders = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for rank in range(2):
        sources = []
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "broadcast", lambda matrix, src, sources=sources: sources.append(src))
        updates = [matrix.clone() for matrix in matrices]
        orthogonalise_all(updates, (3.4445, -4.775, 2.0315), 5)
        for update, matrix, whole, source in zip(updates, matrices, expected, sources, strict=True):
            assert torch.equal(update, whole if source == rank else matrix)
        senders.append(sources)
    assert senders[0] == senders[1]
    work = [0, 0]
    for shape, owner in zip(shapes, senders[0], strict=True):
        work[owner] += min(shape) ** 2 * sum(shape)
    assert max(work) < 0.6 * sum(work)


def test_layers_are_placed_so_that_hidden_states_end_beside_the_head():
    """Guards sharded targets: all layers placed, in runs, the last on the head's GPU, where the rest lies."""
    placement = layer_placement(10, range(1, 8, 3))  # GPUs 1, 4, 7
    layers = [placement[f"model.layers.{layer}"] for layer in range(10)]
    assert layers == sorted(layers, key=[4, 7, 1].index)
    assert set(layers) == {1, 4, 7}
    assert {placement[name] for name in ("model.embed_tokens", "model.norm", "lm_head")} == {layers[-1]}
    assert set(layer_placement(3, range(1)).values()) == {0}


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--model_name", "no/such/target"], "no target model at 'no/such/target'"),
        (["--data_path", "missing.jsonl"], "missing.jsonl"),
        (["--num_stages", "5"], "the target has 4 layers"),
        (["--num_stages", "two"], "list of integers"),
        (["--num_stages", "2,4", "--stage_layers", "2;2"], "give one n"),
        (["--stage_layers", "1;1;1;2"], "sums to 5"),
        (["--aggr_feature_bound", "0,2,9"], "ends at layer 9"),
        (["--aggr_feature_bound", "0,two"], "not a list of integers"),
        (["--version", "10", "--aggr_feature_bound", "0,2"], "--aggr_feature_bound does not belong to --version 10"),
        (["--version", "10", "--num_stages", "2,4"], "made for one n"),
        (["--version", "10", "--stage_layers", "1;1;1;1"], "made for one n and an even split"),
        (["--version", "10", "--shallow_hidden_layer_indices", "0,2;0,1"], "must hold --num_stages, 4, lists"),
        (["--version", "10", "--shallow_hidden_layer_indices", "4;3;2;0,2"], "g_1 reads layer 2, but the first 1 of 4"),
        (["--version", "10", "--shallow_hidden_layer_indices", "0,2;x"], "shallow_hidden_layer_indices is '0,2;x'"),
        (["--shallow_hidden_layer_indices", "0,2;0,1"], "does not belong to --version 11"),
        (["--version", "9"], "invalid choice: 9"),
        (["--spec_init_from_base_layers", "4"], "num_spec_layers"),
        (["--head_init", "late_layers", "--num_spec_layers", "5"], "only 4 full-attention layers"),
        (["--head_init", "late_layers", "--spec_init_from_base_layers", "1,2"], "leave --spec_init_from_base_layers"),
        (["--head_init", "zero"], "invalid choice: 'zero'"),
        (["--lm_head_lr_scale", "-1"], "at least 0"),
        (["--draft_vocab_json", "none.json"], "cannot be read"),
        (["--batch_size", "0"], "at least 1"),
        (["--lr", "0"], "above 0"),
        (["--lr_adamw", "1e-3"], "--optimizer muon"),
        (["--feature_cache_layers", "1,2"], "--feature_cache_layers needs --feature_cache"),
        (["--max_length", "9999"], "positions for 256"),
        (["--val_fraction", "0.7"], "at most 0.5"),
        (["--tracker", "wandb"], "pip install wandb"),
        (["--mixed_precision", "fp16"], "CUDA"),
        (["--attn_implementation", "flex_attention"], "CUDA"),
        (["--fill_alpha", "0.5", "--no-trained_with_use_deepest"], "needs --trained_with_use_deepest"),
        (["--device_map", "auto"], "CUDA"),
        (["--resume_from", "nowhere"], "not a complete checkpoint"),
    ],
)
def test_bad_input_is_one_line(work, tmp_path, capsys, monkeypatch, more, part):
    """Guards users: each mistake ends with exit code 2 and one line that names it, not with a traceback."""
    monkeypatch.setattr(training_launch, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert part in script_error(work, tmp_path, capsys, *more)


@pytest.mark.parametrize(
    ("listed", "warned"),
    [
        ({"vocab_size": 61, "token_ids": [1, 60]}, False),
        ({"vocab_size": 59, "token_ids": [1, 60]}, False),  # the tokenizer's length, without added tokens
        ({"vocab_size": 62, "token_ids": [60, 1, 1]}, False),
        ({"token_ids": [1, 60]}, False),
        ({"vocab_size": 99, "token_ids": [1, 60]}, True),
        ({"vocab_size": "many", "token_ids": [1, 60]}, True),
    ],
)
def test_draft_vocabulary_fits_by_its_tokens(tmp_path, capsys, listed, warned):
    """A list for 151,643 or 151,669 tokens was refused by a model with 151,936 rows, all of its tokens among them."""
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(listed), encoding="utf-8-sig")
    assert read_draft_vocab(str(path), 61) == [1, 60]
    message = capsys.readouterr().err
    assert message.count("\n") == warned
    assert ("is it this target's tokenizer?" in message) == warned


def test_draft_vocabulary_of_another_target(work, tmp_path, capsys):
    """Guards against silent nonsense: a list with tokens that the target lacks, or no list at all, is refused."""
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({"vocab_size": 61, "token_ids": [1, 61]}))
    assert "has token 61, the target's vocabulary only 61 tokens" in script_error(
        work, tmp_path, capsys, "--draft_vocab_json", path
    )
    path.write_text("[1, 2]")
    assert "lacks token_ids" in script_error(work, tmp_path, capsys, "--draft_vocab_json", path)
    for wrong in ([-1, 2], [], [1.5], "12"):
        path.write_text(json.dumps({"token_ids": wrong}))
        with pytest.raises(ValueError, match="--draft_vocab_json"):
            read_draft_vocab(str(path), 61)


def test_earlier_checkpoints_are_found():
    """Guards the runs that are under way: a file of another name would hide the checkpoints they go on from."""
    assert (CHECKPOINT_NAME, STATE_NAME) == ("speculation_head_final.pt", "training_state.pt")


def test_runs_do_not_mix(work, tmp_path, capsys):
    """Guards older results: a new run refuses a folder with checkpoints, and a resumed one other settings or data."""
    output = tmp_path / "out"
    assert run(work, output, "--max_steps", 1, "--save_interval", 1) == 0
    capsys.readouterr()
    assert "--resume_from auto" in script_error(work, tmp_path, capsys, "--max_steps", 2)
    for more, part in (
        (["--seed", 1], "--seed 0"),
        (["--batch_size", 4], "examples per step 4"),
        (["--num_spec_layers", 1], "head"),
        (["--max_length", 8], "training tokens"),
    ):
        assert part in script_error(work, tmp_path, capsys, "--resume_from", "auto", *more).split("belongs to")[1]


def test_lonely_process_is_refused(monkeypatch):
    """Guards a silent trap: on a CPU, `accelerate launch --num_processes 2` without --multi_gpu starts one process.
    Where its command line cannot be seen, the run is refused; else all processes are started (`launch` above)."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    args = argparse.Namespace(tracker="none")
    with pytest.raises(ValueError, match="--multi_gpu"):
        training_launch.check_launch(args)


# ---------------------------------------------------------------------------------------------------------------------
# Learning


def train_tiny_target(rows, steps):
    """A target that has learned the language."""
    set_seed(0)
    config = FAMILIES["llama"](num_hidden_layers=4)
    config.initializer_range = 0.08
    config.eos_token_id = 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        picked = torch.randint(len(rows), (24,), generator=generator)
        batch = PadCollator(0)([rows[int(index)] for index in picked])
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def test_head_learns_a_language_and_decodes_it(tmp_path):
    """Guards the whole method: trained on a deterministic language, the head agrees with the target on more than 0.9
    of the positions, and a pipeline with it accepts nearly every draft. Any fault in features, mask, loss, optimiser,
    checkpoint or decode loop shows here."""
    tokenizer = make_tokenizer()
    write_language(tmp_path / "data.jsonl", [REPLY], copies=5)
    data = {"data_path": str(tmp_path / "data.jsonl"), "cache_dir": tmp_path / "cache", "verbose": False}
    model = train_tiny_target(list(load_conversations(tokenizer=tokenizer, **data).train), steps=150)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    settings = ["--optimizer", "muon", "--lr", 5e-3, "--max_steps", 150, "--batch_size", 16]
    settings += ["--gradient_accumulation_steps", 1, "--log_interval", 50, "--warmup_steps", 10]
    output = tmp_path / "out"
    assert run(tmp_path, output, *settings) == 0
    full = read_log(output / "log.jsonl")[-1]["validation"][-1]
    assert full["fill"] == 4
    assert full["agreement"] > 0.9

    target = Target.load(str(tmp_path / "target"))
    decoder = spd_decoder(target, load_head(output, target))
    new_tokens = cycles = 0
    for stride, start in ((1, 0), (2, 7), (3, 4), (5, 11)):
        turn = [{"role": "user", "content": f"s{stride} {start}"}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        result = decoder.generate(prompt, REPLY)
        assert tokenizer.decode(result.tokens) == reply(stride, start)
        new_tokens, cycles = new_tokens + len(result.tokens), cycles + result.cycles
        print(result.equivalent_accept_length, result.alpha)
    assert 4 * new_tokens / cycles > 0.8 * 4
