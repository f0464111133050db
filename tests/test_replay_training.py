"""`train.py --rows replay` as a run: processes, resuming, versions, the feature cache, its flags and its log."""

from __future__ import annotations

import json

import pytest

from tests.test_train import (
    arguments,
    assert_same_weights,
    comparable,
    launch,
    run,
    script_error,
    training_lines,
    weights,
    work,  # noqa: F401, a fixture
)
from training.run_state import list_checkpoints, read_log

REPLAY = ("--rows", "replay", "--gradient_accumulation_steps", 4, "--max_steps", 6)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--version", 10),
        ("--num_stages", "2,4", "--loss", "lk", "--reject_weight", 2, "--value_weight"),
        ("--trace", "bernoulli", "--loss", "tv"),
        ("--stage_layers", "1;2;1", "--num_stages", 3, "--trace", "full"),
        ("--trace_temperature", 1),
        ("--flushed", 2, "--num_stages", "2,4"),
        ("--flushed", 1, "--trace_temperature", 1, "--version", 10),
    ],
)
def test_runs_of_every_kind_log_their_traces(work, tmp_path, more):  # noqa: F811
    """Guards each flag in a real run: steps are taken, and the log says what decoding would have accepted."""
    assert run(work, tmp_path, *REPLAY, *more) == 0
    lines = training_lines(tmp_path)
    assert len(lines) == 6
    traces = [value for line in lines for name, value in line.items() if name.startswith("trace_n")]
    assert len(traces) >= 6
    for trace in traces:
        assert 0 <= trace["alpha"] <= 1
        assert 1 <= trace["mean_fill"] <= 4
    last = [line for line in read_log(tmp_path / "log.jsonl") if "traces" in line][-1]
    shapes = [(entry["num_stages"], entry["fill"]) for entry in last["validation"]]
    assert shapes == [(trace["num_stages"],) * 2 for trace in last["traces"]]  # drafts of all fills are in one pass
    held_out = last["traces"]
    assert [trace["num_stages"] for trace in held_out] == ([2, 4] if "2,4" in more else [3 if 3 in more else 4])
    assert all(trace["verified"] > 10 and trace["accept_length"] >= 0.9 for trace in held_out)


def test_held_out_texts_are_not_counted(work, tmp_path):  # noqa: F811
    """Guards the running acceptance, with which the flags of a new text begin, against validations in between."""
    often, once = tmp_path / "often", tmp_path / "once"
    for folder, interval in ((often, 1), (once, 100)):
        assert run(work, folder, *REPLAY, "--max_steps", 3, "--eval_interval", interval) == 0
    assert training_lines(often)[-1]["trace_n4"] == training_lines(once)[-1]["trace_n4"]
    assert_same_weights(weights(often), weights(once))


def test_resume_is_exact(work, tmp_path):  # noqa: F811
    """Guards the running acceptance, with which the flags of a new text begin: it is part of a checkpoint."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = [*REPLAY, "--log_interval", 3, "--loss", "lk"]
    assert run(work, whole, *settings, "--save_interval", 4, "--keep_checkpoints", 5) == 0
    assert run(work, resumed, *settings, "--resume_from", list_checkpoints(whole)[0]) == 0
    assert_same_weights(weights(whole), weights(resumed))
    assert comparable(whole) == comparable(resumed)


def test_same_run_with_one_and_two_processes(work, tmp_path):  # noqa: F811
    """Guards what processes must agree on: flags, running acceptance, types that rest, the mean's denominator,
    and with early stopping when to stop."""
    settings = [*REPLAY, "--stop_on", "trace_alpha", "--eval_interval", 3]
    launched = launch(2, *arguments(work, tmp_path / "2", *settings, "--gradient_accumulation_steps", 2))
    assert run(work, tmp_path / "1", *settings) == 0
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in "12")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for ours, theirs in zip(training_lines(tmp_path / "1"), training_lines(tmp_path / "2"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["trace_n4"]["alpha"] == pytest.approx(theirs["trace_n4"]["alpha"], abs=1e-3)
    assert one[-1]["traces"][0]["alpha"] == pytest.approx(two[-1]["traces"][0]["alpha"], abs=0.02)


def test_greedy_and_sampled_texts_mix(work, tmp_path, capsys):  # noqa: F811
    """Guards the way from a line's temperature to its trace: texts that all say 1 are trained on and judged as with
    --trace_temperature 1, and those of a mixed file by their own."""

    def with_temperatures(name, greedy):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "target").symlink_to(work / "target")
        lines = [json.loads(line) for line in (work / "data.jsonl").read_text().splitlines()]
        texts = [line | {"temperature": 0 if greedy(index) else 1} for index, line in enumerate(lines)]
        (folder / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        return folder

    settings = [*REPLAY, "--max_steps", 2, "--val_fraction", 0.3]
    sampled, mixed = with_temperatures("sampled", lambda index: False), with_temperatures("mixed", lambda i: i % 2)
    assert run(sampled, tmp_path / "said", *settings) == 0
    assert run(work, tmp_path / "told", *settings, "--trace_temperature", 1) == 0
    assert_same_weights(weights(tmp_path / "said"), weights(tmp_path / "told"))
    assert comparable(tmp_path / "said") == comparable(tmp_path / "told")
    capsys.readouterr()
    assert run(mixed, tmp_path / "both", *settings) == 0
    trace = read_log(tmp_path / "both" / "log.jsonl")[-1]["traces"][0]
    assert list(trace["alpha_by_temperature"]) == ["0", "1"]
    assert f"{trace['alpha_by_temperature']['1']:.4f} at T = 1" in capsys.readouterr().err
    assert trace["alpha_by_temperature"]["1"] > trace["alpha_by_temperature"]["0"]  # this target's answers are random


def test_feature_cache_serves_replay(work, tmp_path):  # noqa: F811
    """Guards --feature_cache with --rows replay: the second epoch reads states, and the run is the same twice."""
    more = [*REPLAY, "--max_steps", 20, "--feature_cache", tmp_path / "cache", "--log_interval", 10]
    assert run(work, tmp_path / "first", *more) == 0
    assert run(work, tmp_path / "second", *more) == 0
    assert_same_weights(weights(tmp_path / "first"), weights(tmp_path / "second"))


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--trace", "full"), "--trace belongs to --rows replay"),
        (("--reject_weight", 2), "--reject_weight belongs to --rows replay"),
        (("--rows", "replay", "--no-trained_with_use_deepest"), "--rows replay needs --trained_with_use_deepest"),
        (("--rows", "replay", "--fill_alpha", 0.5), "leave --fill_alpha out"),
        (("--loss_eta", 2), "--loss_eta belongs to --loss lk"),
        (("--flushed", 2), "--flushed belongs to --rows replay"),
        (("--rows", "replay", "--flushed", 0), "at least 1"),
        (("--rows", "replay", "--flushed", 1, "--num_stages", 1), "--flushed needs --num_stages of 2 or more"),
        (("--rows", "replay", "--trace_temperature", -1), "at least 0"),
        (("--rows", "replay", "--trace_temperature", "nan"), "'nan' is not a number"),
        (("--rows", "replay", "--reject_weight", 0), "above 0"),
        (("--rows", "replay", "--trace", "decode"), "invalid choice: 'decode'"),
        (("--rows", "packed"), "invalid choice: 'packed'"),
        (("--loss", "ce"), "invalid choice: 'ce'"),
    ],
)
def test_flags_that_contradict(work, tmp_path, capsys, more, part):  # noqa: F811
    assert part in script_error(work, tmp_path, capsys, *more)
