"""Emulated devices: ranks that take as long as they are told to, decode what they always do, and say when they fail."""

import argparse
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch

from distributed_inference import eval_mp_pipeline_dataset, example_mp_pipeline_generate
from distributed_inference.emulation import LATE, Emulation, Faithfulness, Pace, at_least, milliseconds
from distributed_inference.eval_mp_pipeline_dataset import DistributedEvaluation
from distributed_inference.launch import Checked
from distributed_inference.startup import Environment
from pipeline_inference import Generation
from pipeline_model import Target, save_head
from tests.ranks import evaluate, generate, ranks
from tests.tiny import hf_greedy, save_target, tiny_head, tiny_model
from timeline import DRAFT, VERIFY

CPU = torch.device("cpu")
TOKENS = 6
TIMES = ["--emulate_stage_ms", "30", "--emulate_head_ms", "12", "--emulate_verify_ms", "6"]
TOKEN_SECONDS = 0.04 + 0.006  # of the target alone: stages 1;3, 10 ms per layer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target of four layers, a head for stages 1;3, and a prompt."""
    folder = tmp_path_factory.mktemp("files")
    save_target(str(folder / "target"))
    target = Target.load(str(folder / "target"))
    head = tiny_head(target, (1, 3), aggr_feature_bound=(0, 1, 3), base_model_path=str(folder / "target"))
    save_head(head, folder / "head.pt")
    (folder / "data" / "mt_bench").mkdir(parents=True)
    question = {"question_id": 3, "category": "x", "turns": ["w5 w17 w3"]}
    (folder / "data" / "mt_bench" / "question.jsonl").write_text(json.dumps(question))
    return folder


def flags(files, *more):
    return ["--spec_head_ckpt", str(files / "head.pt"), "--rank_gpus", "cpu", "--max_new_tokens", str(TOKENS), *more]


def test_the_example_decodes_in_emulated_time(files, tmp_path):
    """Guards against other tokens, a part that takes less than its time, a baseline that takes less than the stages
    together, and output that does not say what is emulated."""
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    more = ["--baseline", "--prompt", "w5 w17 w3", "--profile_timing", str(report), "--html", str(page)]
    with ranks(3, tmp_path, generate, *flags(files, *TIMES, *more)) as running:
        assert running.join() == [0, 0, 0], running.err(0)
        out = running.out(0)
    assert out.index("[standard]") < out.index("[pipeline]")
    assert "[compare] ids are equal" in out
    speeds = re.search(r"\[standard\] .*?, ([\d.]+) tokens/s.*\[pipeline\] .*?, ([\d.]+) tokens/s", out, re.S).groups()
    assert float(speeds[0]) <= 1 / TOKEN_SECONDS + 0.05
    measured = json.loads(report.read_text())
    assert all(row["median_ms"] >= 10 for row in measured["by_stage"] if row["stage"] == 0)
    assert all(row["median_ms"] >= 30 for row in measured["by_stage"] if row["stage"] == 1)
    assert all(row["draft_ms"] >= 12 for row in measured["by_fill"] if row["draft_ms"])
    times = "stage 30 ms, head 12 ms, verification 6 ms"
    assert f"[emulated] {times}" in out
    assert f"EMULATED devices: {times}" in page.read_text()
    assert "the target alone, on one emulated device" in page.read_text()


def test_the_evaluation_says_that_devices_are_emulated(files, tmp_path):
    """Guards against rows of emulated devices that are taken for measured ones, and a pipeline with a first stage on
    the draft rank, at lag 1, that does not take its time."""
    out = tmp_path / "out"
    more = ["--data_dir", str(files / "data"), "--output_dir", str(out), "--colocate_draft", "--verify_lag", "1"]
    with ranks(2, tmp_path, evaluate, *flags(files, *TIMES, *more)) as running:
        assert running.join() == [0, 0], running.err(0)
        assert "[emulated] stage 30 ms" in running.out(0)
    [row] = [json.loads(path.read_text()) for path in (out / "raw").glob("*_emulated30-12-6__per_sample.jsonl")]
    assert row["output_ids"] == hf_greedy(tiny_model("llama"), [5, 17, 3], TOKENS)
    assert row["baseline_decode_wall_sec"] >= (TOKENS - 1) * TOKEN_SECONDS
    assert row["stage_sec"][0] >= 0.010 * (TOKENS - 1)
    assert row["stage_sec"][1] >= 0.030 * (TOKENS - 1)
    [summary] = (out / "summary").glob("*__summary.json")
    settings = json.loads(summary.read_text())["settings"]
    assert settings["label"].endswith(", emulated")
    assert settings["device"].startswith("EMULATED devices (stage 30 ms, head 12 ms, verification 6 ms) on ")
    [baseline] = (out / "baseline_cache").glob("*.json")
    assert json.loads(baseline.read_text())["settings"]["device"] == settings["device"]
    assert "EMULATED devices" in (out / "summary" / "mp_pipeline_eval__table.md").read_text()


@pytest.mark.alone
def test_emulated_devices_take_their_time_side_by_side(files, tmp_path):
    """Guards against sleeps that come on top of work or of each other, and a baseline that is slower than one device.

    Drafts are not verified, so the pipeline stays full: 30 ms of the first stage, 90 of the second one for each of 15
    tokens, and the last verdict. The target alone takes 120 ms and the verdict for each.
    """
    times = ["--emulate_stage_ms", "90", "--emulate_head_ms", "30", "--emulate_verify_ms", "9", "--no-verify"]
    more = ["--baseline", "--prompt", "w5 w17 w3", "--max_new_tokens", "16"]
    with ranks(3, tmp_path, generate, *flags(files, *times, *more)) as running:
        assert running.join() == [0, 0, 0], running.err(0)
        out = running.out(0)
    speeds = [float(speed) for speed in re.findall(r", ([\d.]+) tokens/s", out)]
    expected = [1 / 0.129, 15 / (0.030 + 15 * 0.090 + 0.009)]
    assert speeds == pytest.approx(expected, rel=0.1)
    [speedup] = re.findall(r"\[compare\] ([\d.]+)x as fast", out)
    assert float(speedup) == pytest.approx(speeds[1] / speeds[0], abs=0.02)


def test_work_counts_towards_the_given_time():
    """Guards against a block that sleeps the whole time after its work, or that sleeps when nothing is emulated."""
    begun = time.perf_counter()
    with at_least(0.05):
        time.sleep(0.04)
    assert 0.05 <= time.perf_counter() - begun < 0.085
    begun = time.perf_counter()
    with at_least(0.0):
        pass
    assert time.perf_counter() - begun < 0.01


def test_times_of_the_parts():
    """Guards the times of uneven stages, of a head without a time of its own, and of the target alone."""
    emulation = Emulation((2, 1, 3), 60)
    assert [emulation.stage_seconds(stage) for stage in range(3)] == pytest.approx([0.04, 0.02, 0.06])
    assert emulation.head_seconds(2) == pytest.approx(0.04)
    assert emulation.token_seconds == pytest.approx(0.12)
    assert emulation.pipeline == Pace(layer_us=20_000)
    assert emulation.alone == (0, pytest.approx(0.04), 0.0)  # three cycles a token
    given = Emulation((2, 1, 3), 60, head_ms=7, verify_ms=5)
    assert (given.head_seconds(2), given.pipeline.verify, given.alone.verify) == (0.007, 0.005, 0.005)
    assert (emulation.file_name, given.file_name) == ("emulated60-layers-0", "emulated60-7-5")
    assert not Emulation((2, 1, 3), 0)
    assert Emulation((2, 1, 3), 0).pipeline == Emulation((2, 1, 3), 0).alone == Pace()


def generation(cycles, *, tokens=0, decode=0.0):
    """As much of a generation as its faithfulness depends on."""
    ended = object.__new__(Generation)
    ended.timeline = SimpleNamespace(cycles=cycles)
    ended.result = SimpleNamespace(new_tokens=tokens, timings=SimpleNamespace(decode=decode))
    return ended


def test_late_forwards_are_counted_and_named(capsys):
    """Guards against a run on overloaded cores that looks like one of real devices; and against crying wolf."""
    pipeline = SimpleNamespace(drafter=SimpleNamespace(seconds=0.02), verify_lag=0)
    just_in_time = {"stage 0": 0.03 * 1.04, "stage 1": 0.061, DRAFT: 0.02, VERIFY: 0.01, "wait": 9.0}
    faithful = Faithfulness(Emulation((1, 2), 60, verify_ms=10))
    faithful.add(pipeline, generation([just_in_time] * 50))
    faithful.report()
    printed = capsys.readouterr()
    assert "0 of 200 forwards" in printed.out
    assert printed.err == ""
    late = [{"stage 1": 0.07}, {DRAFT: 0.05}, {"stage 1": 0.08, VERIFY: 0.02}]
    faithful.add(pipeline, generation(late))
    alone = SimpleNamespace(drafter=None)
    faithful.add(alone, generation([], tokens=5, decode=5 * 0.1 * (LATE - 0.01)))
    assert "the target alone" not in faithful.late
    faithful.add(alone, generation([], tokens=5, decode=5 * 0.1 * (LATE + 0.01)))
    faithful.report()
    warning = capsys.readouterr().err
    assert warning.startswith("warning: 9 of 214 forwards")
    assert "(draft 1, stage 1 2, the target alone 5, verify 1)" in warning
    assert "raise --emulate_stage_ms" in warning


@pytest.mark.parametrize("text", ["fast", "-1", "nan", "10001"])
def test_times_that_are_none(text):
    """Guards against sleeps without end, and a traceback."""
    with pytest.raises(argparse.ArgumentTypeError, match="is no number of milliseconds from 0 to 10,000"):
        milliseconds(text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--emulate_head_ms", "3"], "need --emulate_stage_ms"),
        (["--emulate_verify_ms", "3"], "need --emulate_stage_ms"),
        ([*TIMES, "--lm_head", "last"], "--lm_head is last: use draft"),
    ],
)
def test_what_cannot_be_emulated_is_refused(files, more, message):
    """Guards against times that are left out of account."""
    args = example_mp_pipeline_generate.build_parser().parse_args(flags(files, *more))
    with pytest.raises(ValueError, match=message):
        Checked(args, Environment(0, 0, 3))


def test_gpus_and_rows_of_a_real_device_are_refused(files, tmp_path):
    """Guards against sleeps beside kernels that nobody waits for, and speed-ups over another kind of time."""
    with pytest.raises(ValueError, match="these are on cuda:1: add --rank_gpus cpu"):
        Emulation((1, 3), 30).check(SimpleNamespace(lm_head="draft"), torch.device("cuda:1"))
    more = ["--data_dir", str(files / "data"), "--output_dir", str(tmp_path / "out"), "--baseline_rows", "x.jsonl"]
    args = eval_mp_pipeline_dataset.build_parser().parse_args(flags(files, *TIMES, *more))
    with pytest.raises(ValueError, match="--baseline_rows has times of a real device"):
        DistributedEvaluation(args).prepare(Checked(args, Environment(0, 0, 3)))
