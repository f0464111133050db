"""Replay for PPSD: the same traces as a speculation head's, on its own rows, against the decode loop and as a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baselines import train_baseline
from baselines.ppsd import PPSDReplay, ppsd_decoder
from loading.checkpoint_files import read_payload
from pipeline_inference import Decoder
from script_utils import run_script
from tests.test_replay import Recorder, batch_of
from tests.test_train import assert_same_weights, comparable, work  # noqa: F401, a fixture
from tests.tiny import random_prompt, tiny_target
from tests.tiny_baselines import tiny_ppsd
from training.forward import teacher_features
from training.replay import Trace
from training.replay_loss import ReplaySettings
from training.run_state import list_checkpoints, read_log


def run(work, output, *more):  # noqa: F811
    args = ["--method", "ppsd", "--num_stages", 4, "--model_name", work / "target", "--data_path", work / "data.jsonl"]
    args += ["--cache_dir", work / "cache", "--output_dir", output, "--batch_size", 2, "--log_interval", 1]
    args += ["--warmup_steps", 1, "--lr", 1e-3, "--val_fraction", 0.1, "--max_length", 64, "--min_length", 2]
    args += ["--max_length_overflow", "truncate", *more]
    return train_baseline.main(train_baseline.build_parser().parse_args(list(map(str, args))))


def decoded(target, head, sizes, prompt, count, right=None):
    """A decode: the whole sequence, the result, the recorder. `right`: at which positions to draft right."""
    decoder = ppsd_decoder(target, head, sizes)
    sequence = [*prompt, *Decoder(decoder.executor).generate(prompt, count).tokens]
    script = {place: token for place, token in enumerate(sequence) if right is not None and right(place)}
    decoder.drafter = Recorder(decoder.drafter, script)
    return sequence, decoder.generate(prompt, count), decoder.drafter


def replayed(target, head, sequences, lengths):
    """The replay of some texts, and what it takes of them."""
    ids, labels, mask = batch_of(sequences, lengths)
    features, hidden = teacher_features(target, ids, mask, head.config.anchors)
    teacher = {"features": features, "hidden": hidden, "labels": labels, "attention_mask": mask}
    return PPSDReplay(head, target, ReplaySettings()), teacher


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_at_every_event_are_those_of_decoding(family, sizes):
    """Guards a comparison that is not fair: logits at every verified event of a real decode, fills and cycles."""
    target, lengths = tiny_target(family), (4, 9)
    head = tiny_ppsd(target, sizes, layers=2)
    runs = [
        decoded(target, head, sizes, random_prompt(length, seed=length), 20 + length, lambda place: place % 4)
        for length in lengths
    ]
    replay, teacher = replayed(target, head, [sequence for sequence, _, _ in runs], lengths)
    trace = Trace.of(teacher["labels"].numpy(), len(sizes))
    trace = trace.with_flags(np.concatenate([result.accepted[1:] for _, result, _ in runs]))
    logits = head.lm_head(target.norm(replay.outputs(teacher, sizes, trace)))
    for event in range(trace.num_events):
        recorder, position = runs[trace.sequences[event]][2], int(trace.positions[event])
        assert trace.fills[event] == recorder.fills[position]
        torch.testing.assert_close(logits[event], recorder.logits[position], atol=1e-5, rtol=1e-4)
    counts = trace.counts()
    assert counts.cycles == sum(result.cycles for _, result, _ in runs)
    assert 0.5 < counts.alpha < 1


def test_one_repeat_gives_the_flags_of_decoding():
    """Guards the flags: as rows do not depend on fills, they are exact at once."""
    sizes, accepted = (1, 2, 1), 0
    target = tiny_target("llama", vocab_size=5)
    head = tiny_ppsd(target, sizes)
    for seed in range(4):
        sequence, result, _ = decoded(target, head, sizes, [seed, 1, 2], 30)
        replay, teacher = replayed(target, head, [sequence], [3])
        trace, _ = replay.renewed(teacher, sizes, np.random.default_rng(seed))
        assert trace.accepted.tolist() == result.accepted[1:]
        assert trace.counts().cycles == result.cycles
        accepted += sum(result.accepted[1:])
    assert accepted > 0, "the drafts were all wrong: nothing was tried"


def test_runs_log_their_traces_and_resume(work, tmp_path):  # noqa: F811
    """Guards `--method ppsd --rows replay` as a run: traces in training and held out, resuming, early stopping."""
    more = ["--rows", "replay", "--max_steps", 4, "--reject_weight", 2, "--value_weight", "--stop_on", "trace_alpha"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(work, whole, *more, "--save_interval", 2, "--keep_checkpoints", 5) == 0
    assert run(work, resumed, *more, "--resume_from", list_checkpoints(whole)[0]) == 0
    assert_same_weights(read_payload(whole)[1], read_payload(resumed)[1])
    assert comparable(whole) == comparable(resumed)
    lines = read_log(whole / "log.jsonl")
    assert all(0 <= line["trace_n4"]["alpha"] <= 1 for line in lines[:4])
    assert lines[-1]["traces"][0]["verified"] > 10


def test_held_out_traces_of_a_plain_run(work, tmp_path):  # noqa: F811
    """Guards the comparison on held-out answers: the staircase's training of PPSD is judged by the same traces."""
    assert run(work, tmp_path, "--max_steps", 1) == 0
    (trace,) = read_log(tmp_path / "log.jsonl")[-1]["traces"]
    assert (trace["num_stages"], trace["verified"] > 10) == (4, True)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--trace", "full"), "--trace belongs to --rows replay"),
        (("--rows", "replay", "--flushed", 1), "unrecognized arguments: --flushed"),
        (("--rows", "replay", "--trace", "none"), "invalid choice: 'none'"),
        (("--method", "eagle3", "--rows", "replay"), "--rows belongs to --method ppsd"),
    ],
)
def test_bad_flags(work, tmp_path, capsys, monkeypatch, more, part):  # noqa: F811
    base = ["--method", "ppsd", "--num_stages", 4, "--model_name", work / "target", "--output_dir", tmp_path / "out"]
    words = ["train_baseline.py", *base, "--data_path", work / "data.jsonl", *more]
    if "eagle3" in more:
        words[3:5] = []
    monkeypatch.setattr("sys.argv", list(map(str, words)))
    with pytest.raises(SystemExit) as stopped:
        run_script(train_baseline.main, train_baseline.build_parser())
    lines = capsys.readouterr().err.strip().splitlines()
    assert (stopped.value.code, len(lines)) == (2, 1)
    assert part in lines[0]
