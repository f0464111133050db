"""Early stopping on held-out traces: when a run ends, which head it leaves, and that being stopped changes nothing."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from pipeline_model import read_checkpoint
from tests.test_train import (
    assert_same_weights,
    comparable,
    run,
    script_error,
    weights,
    work,  # noqa: F401, a fixture
)
from training.held_out import BEST_NAME, EarlyStopping, HeldOutTraces
from training.run_state import list_checkpoints, read_log

STOP = ("--stop_on", "trace_alpha", "--stop_patience", 2, "--eval_interval", 1, "--save_interval", 1)


def scripted(monkeypatch, alphas):
    """Validations whose acceptance is the next of `alphas`, again and again where a validation is repeated."""
    left = iter(alphas)
    trace = {"num_stages": 4, "verified": 100, "alpha_by_temperature": {}}
    monkeypatch.setattr(HeldOutTraces, "figures", lambda *_: [trace | {"alpha": next(left)}])


def test_patience_counts_validations_since_the_best():
    """Guards the rule itself: only a higher acceptance is better, all depths count by their drafts, and the count of
    validations starts anew with each best one."""
    early = EarlyStopping(patience=2)
    over = []
    for step, pair in enumerate([(0.2, 0.2), (0.2, 0.2), (0.0, 0.4), (0.4, 0.0), (0.3, 0.3)]):
        traces = [{"verified": count, "alpha": alpha} for count, alpha in zip((10, 30), pair, strict=True)]
        early.judge(step, traces, [])
        over.append(early.is_over)
    assert over == [False, False, False, False, True]
    assert (early.step, early.alpha) == (2, pytest.approx(0.3))
    with pytest.raises(ValueError, match="no answer of two tokens"):
        early.judge(9, [], [])


def test_run_ends_and_leaves_its_best_head(work, tmp_path, monkeypatch):  # noqa: F811
    """Guards the head that is left: that of the best validation, not the last one, with its figures in the record."""
    scripted(monkeypatch, [0.3, 0.5, 0.4, 0.5, 0.9])
    assert run(work, tmp_path, *STOP, "--max_steps", 20, "--keep_checkpoints", 9) == 0
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    assert_same_weights(weights(tmp_path), weights(tmp_path / "checkpoint-2"))
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["outcome"], record["steps"]) == ("stopped early", 4)
    assert (record["best_step"], record["trace_alpha"]) == (2, 0.5)
    assert record["validation"] == read_log(tmp_path / "log.jsonl")[3]["validation"]
    assert not (tmp_path / BEST_NAME).exists()


def test_last_validation_may_be_the_best(work, tmp_path, monkeypatch):  # noqa: F811
    """Guards the end of a run that was not stopped: its last validation counts like every other."""
    scripted(monkeypatch, [0.3, 0.2, 0.4])
    assert run(work, tmp_path, *STOP, "--max_steps", 3) == 0
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["outcome"], record["best_step"]) == ("finished", 3)
    assert_same_weights(weights(tmp_path), weights(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("step", [2, 4])
def test_resume_knows_the_best(work, tmp_path, monkeypatch, step):  # noqa: F811
    """Guards a run that goes on in another folder, from before its end and from the end itself: count, best head and
    log are those of the whole run."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    alphas = [0.3, 0.5, 0.4, 0.5]
    scripted(monkeypatch, alphas)
    assert run(work, whole, *STOP, "--max_steps", 20, "--keep_checkpoints", 9) == 0
    scripted(monkeypatch, alphas[step:])
    assert run(work, resumed, *STOP, "--max_steps", 20, "--resume_from", whole / f"checkpoint-{step}") == 0
    assert comparable(resumed) == comparable(whole)
    assert_same_weights(weights(resumed), weights(whole))
    assert read_checkpoint(whole / "checkpoint-3" / BEST_NAME)[0] == read_checkpoint(whole)[0]


def test_stop_in_a_validation(work, tmp_path, monkeypatch):  # noqa: F811
    """Guards the count of validations: one that a signal broke off is made when the run goes on."""
    settings = [*STOP, "--max_steps", 20]
    alphas = [0.3, 0.5, 0.4, 0.5]
    scripted(monkeypatch, alphas)
    assert run(work, tmp_path / "whole", *settings) == 0
    scripted(monkeypatch, alphas)
    add, seen = HeldOutTraces.add, []

    def stopping(self, *batch):
        seen.append(batch)
        if len(seen) == 8:  # three batches a validation
            os.kill(os.getpid(), signal.SIGTERM)
        return add(self, *batch)

    monkeypatch.setattr(HeldOutTraces, "add", stopping)
    assert run(work, tmp_path / "stopped", *settings) == 128 + signal.SIGTERM
    assert len(seen) == 8
    assert run(work, tmp_path / "stopped", *settings, "--resume_from", "auto") == 0
    assert comparable(tmp_path / "stopped") == comparable(tmp_path / "whole")
    assert all(torch.equal(w, weights(tmp_path / "whole")[k]) for k, w in weights(tmp_path / "stopped").items())


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--stop_patience", 2), "--stop_patience belongs to --stop_on"),
        (("--stop_on", "loss"), "invalid choice: 'loss'"),
        (("--stop_on", "trace_alpha", "--val_fraction", 0), "give a --val_fraction above 0"),
        (("--stop_on", "trace_alpha", "--no-trained_with_use_deepest"), "whose decoding can be replayed"),
    ],
)
def test_flags_that_contradict(work, tmp_path, capsys, more, part):  # noqa: F811
    assert part in script_error(work, tmp_path, capsys, *more)
