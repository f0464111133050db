"""The planner: its splits against all others, its times against simulated and real pipelines, its files and flags."""

import json
import random
import re
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from decoding.metrics import spd_costs
from evaluation.metrics import failed_row, sample_row
from evaluation.prompts import Sample
from pipeline_model import auto_shallow_layers, save_head, split_layers
from planning import plan_stages
from planning.cost_model import (
    Placement,
    Times,
    best_plan,
    best_split,
    predict,
    read_times,
    read_traces,
    replay,
    times_record,
    trace_alpha,
)
from planning.message_time import message_ms
from script_utils import run_script
from tests.tiny import (
    hf_greedy,
    oracle,
    random_prompt,
    save_target,
    scripted_decoder,
    tiny_head,
    tiny_model,
    tiny_target,
)

ROOT = Path(plan_stages.__file__).parents[1]
PLACEMENTS = [Placement(colocated, lm_head) for colocated in (False, True) for lm_head in ("draft", "last")]


def times_of(layers, head=3.0, verify=2.0, message=0.0):
    return Times(tuple(layers), dict.fromkeys(range(1, len(layers) + 1), head), verify, message)


# ---------------------------------------------------------------------------------------------------------------------
# Splits
# ---------------------------------------------------------------------------------------------------------------------


def busy_ranks(times, sizes, placement):
    """Milliseconds a cycle of each rank that runs a stage, written down."""
    bounds = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    busy = [sum(times.layers[low:high]) for low, high in pairwise(bounds)]
    if placement.lm_head == "last":
        busy[-1] += times.verify
    if placement.colocated:
        busy[0] += times.head[len(sizes)] + (times.verify if placement.lm_head == "draft" else 0)
    return busy


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_best_split_beats_every_other(placement):
    """Guards the search: against all splits of few layers with uneven times, its busiest rank is the least busy, and
    of those splits it is the most even."""
    rng = random.Random(0)
    for layers in range(1, 9):
        times = times_of([rng.choice([1.0, 1.0, 2.5]) for _ in range(layers)], rng.choice([0.5, 4]), rng.choice([0, 3]))
        for n in range(1, min(layers, 4) + 1):
            cuts = [(0, *chosen, layers) for chosen in combinations(range(1, layers), n - 1)]
            splits = [tuple(high - low for low, high in pairwise(cut)) for cut in cuts]
            scores = {}
            for split in splits:
                busy = busy_ranks(times, split, placement)
                scores[split] = round(max(busy), 6), round(sum(x * x for x in busy), 6)
            found = best_split(times, n, placement)
            assert scores[found] == min(scores.values()), (layers, n)


def test_equal_layers_are_split_as_without_a_planner():
    """Guards against another split than the default one where nothing speaks for it."""
    for layers, n in [(12, 4), (10, 4), (30, 8), (7, 7), (5, 1)]:
        assert best_split(times_of([1.0] * layers, verify=0), n, Placement(lm_head="last")) == split_layers(layers, n)


def test_the_last_stage_gives_layers_away_for_the_lm_head():
    """Guards what the planner is for: an lm_head worth six layers leaves its stage six layers less, co-located heads
    leave the first stage as many less as they are worth, and the better place for the lm_head is found."""
    times = times_of([1.0] * 32, head=2, verify=6)
    assert best_split(times, 2, Placement(lm_head="last")) == (19, 13)
    assert best_split(times, 2, Placement(colocated=True)) == (12, 20)
    assert best_plan(times, 8, [Placement(), Placement(lm_head="last")], 0.8).placement.lm_head == "draft"
    heavy = times_of([1.0] * 32, head=4, verify=6)
    assert best_plan(heavy, 8, [Placement(), Placement(lm_head="last")], 0.95).placement.lm_head == "last"


# ---------------------------------------------------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------------------------------------------------


def simulate(times, sizes, placement, accepted):
    """When each verdict falls: every rank and message of distributed_inference, event by event.

    The draft rank lets a token enter, waits for the previous cycle's anchors, drafts, waits for the last stage, and
    verifies. A stage runs what arrives, in order; it never hears of rejections, so it runs flushed tokens as well.
    """
    n, colocated, on_last = len(sizes), placement.colocated, placement.lm_head == "last"
    stages = list(predict(times, sizes, placement).stages)
    stages[-1] += times.verify if on_last else 0
    now, cycle, free, verdicts = 0.0, 0, [0.0] * n, []
    back = {}  # (cycle, stage) -> when the stage's message is at the draft rank
    root = 0  # the cycle in which the token entered that verifies next
    entering = True
    while len(verdicts) < len(accepted):
        if entering:
            arrives = now + times.message
            for stage in range(n):
                if stage == 0 and colocated:
                    now += stages[0]
                    back[cycle, 0], arrives = now, now + times.message
                    continue
                free[stage] = max(arrives, free[stage]) + stages[stage]
                back[cycle + stage, stage] = arrives = free[stage] + times.message
        before = [back.get((cycle - 1, stage), 0.0) for stage in range(n)]  # anchors of the previous cycle
        now = max(now, *before) + times.head[n]
        entering = True  # the draft
        now = max(now, back.get((cycle, n - 1), 0.0))
        if cycle == root + n - 1:
            now += 0 if on_last else times.verify
            flag = accepted[len(verdicts)]
            verdicts.append(now)
            root = root + 1 if flag else cycle + 1
        cycle += 1
    return verdicts


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize(
    "times",
    [
        times_of([4.2] * 8, 3.5, 1.2, 0.1),  # the draft rank is slowest
        times_of([7.9] * 4, 4.2, 4.0, 0.1),  # a token's way is
        times_of([3, 3, 3, 9, 3], 2, 1, 0.05),  # a stage is
        times_of([1.0] * 12, 6, 9, 0.0),  # the lm_head is
    ],
    ids=["draft", "way", "stage", "lm_head"],
)
def test_predictions_equal_a_simulated_pipeline(times, placement):
    """Guards the closed forms: cycle, refill and a random trace within 2% of a pipeline simulated event by event."""
    n = min(5, len(times.layers))
    sizes = split_layers(len(times.layers), n)
    plan = predict(times, sizes, placement)
    full = simulate(times, sizes, placement, [True] * 60)
    assert (full[-1] - full[-21]) / 20 == pytest.approx(plan.cycle, rel=0.02)
    alone = simulate(times, sizes, placement, [False] * 20)
    assert (alone[-1] - alone[-11]) / 10 == pytest.approx(plan.refill, rel=0.02)
    rng = random.Random(1)
    flags = [rng.random() < 0.8 for _ in range(400)]
    expected = simulate(times, sizes, placement, flags)[-1] / len(flags)
    assert plan.milliseconds_a_token(sum(flags) / len(flags)) == pytest.approx(expected, rel=0.02)


@pytest.fixture(scope="module")
def message():
    return message_ms(torch.device("cpu"), torch.zeros(1, 2560), 30)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("depths", "stage", "draft", "verify"), [((2, 4), 80, 20, 60), ((2,), 50, 70, 30)], ids=["way", "draft"]
)
def test_prediction_within_a_tenth_of_real_processes(message, depths, stage, draft, verify):
    """Guards the planner against the pipeline itself: cycles of real ranks and messages whose models sleep."""
    command = [sys.executable, "benchmarks/cycle_overhead.py", "--num_stages", *depths, "--stage_ms", stage]
    command += ["--draft_ms", draft, "--verify_ms", verify, "--cycles", 16]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=True)
    # The mean: these pipelines wait for verdicts, so tokens come in bursts, and a median falls in or between them.
    measured = {run["num_stages"]: run["mean_ms"] for run in json.loads(done.stdout.splitlines()[-1])["runs"]}
    for n in depths:
        times = Times((float(stage),) * n, {n: float(draft)}, float(verify), message)
        assert predict(times, (1,) * n, Placement()).cycle == pytest.approx(measured[n], rel=0.1)


def test_closed_form_of_the_accept_length():
    """Guards L_acc = factor / (1 + (n-1)(1 - alpha)): the values of method.md section 7, and uneven stages."""
    for n, expected in ((4, 2.5), (8, 10 / 3), (16, 4.0)):
        plan = predict(times_of([1.0] * 32), split_layers(32, n), Placement())
        assert plan.accept_length(0.8) == pytest.approx(expected)
        assert (plan.accept_length(1), plan.accept_length(0)) == (n, 1)
    assert predict(times_of([1.0] * 8), (2, 4, 2), Placement()).accept_length(1) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Traces
# ---------------------------------------------------------------------------------------------------------------------


def record(path, num_stages, *, width=1):
    """Real generations with mixed drafts, as eval.py writes them; returns the results."""
    target, prompt = tiny_target("llama"), random_prompt(5)
    sequence = prompt + hf_greedy(tiny_model("llama"), prompt, 40)
    sizes, rows, results = split_layers(4, num_stages), [], []
    for seed in range(3):
        rank = lambda at, seed=seed: random.Random(100 * seed + at).choice([0, 0, 0, 1, 2])  # noqa: E731
        choose = oracle(sequence, rank=rank, width=width)
        result = scripted_decoder(target, sizes, prompt, choose, draft_top_k=width).generate(prompt, 30)
        sample = Sample("demo", seed, "writing", tuple(prompt))
        rows.append(sample_row(sample, result, spd_costs(sizes, 1)))
        results.append(result)
    rows.append(failed_row(sample, RuntimeError("lost")))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return results


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_replay_at_the_recorded_depth_is_the_recorded_run(tmp_path, num_stages):
    """Guards reading and replaying: flags, cycles and L_acc of a trace are those of the decoder that made it; failed
    samples are left out."""
    results = record(tmp_path / "raw.jsonl", num_stages)
    traces = read_traces(tmp_path / "raw.jsonl")
    assert [list(trace.accepted) for trace in traces] == [result.accepted[1:] for result in results]
    assert [trace.cycles(num_stages) for trace in traces] == [result.cycles for result in results]
    assert trace_alpha(traces) == sum(r.n_accepted for r in results) / sum(r.n_verified for r in results)
    plan = predict(times_of([1.0] * 4), split_layers(4, num_stages), Placement())
    tokens, cycles = (sum(getattr(r, name) for r in results) for name in ("new_tokens", "cycles"))
    assert replay(traces, plan).accept_length == pytest.approx(num_stages * tokens / cycles)


def test_replay_at_another_depth(tmp_path):
    """Guards the use of a trace for other n: cycles are those of a decoder with that n and the same drafts."""
    record(tmp_path / "two.jsonl", 2)
    deeper = record(tmp_path / "four.jsonl", 4)
    traces = read_traces(tmp_path / "two.jsonl")
    assert [trace.cycles(4) for trace in traces] == [result.cycles for result in deeper]
    plan = predict(times_of([1.0] * 4, 0.5, 0.2), (1, 1, 1, 1), Placement())
    tokens, misses = 3 * 29, sum(not flag for trace in traces for flag in trace.accepted[:-1])
    expected = (3 + misses) * plan.refill + (tokens - 3 - misses) * plan.cycle
    assert replay(traces, plan).milliseconds_a_token == pytest.approx(expected / tokens)


def test_traces_that_cannot_be_replayed_are_refused(tmp_path):
    """Guards against a draft tree's trace, an empty one, and another kind of file, each in one line."""
    path = tmp_path / "raw.jsonl"
    record(path, 4, width=2)
    with pytest.raises(ValueError, match=r"line 1: .* cycles, where a chain has .*--draft_top_k 1"):
        read_traces(path)
    for text, complaint in [('{"a": 1}\n', "line 1 is no sample's row"), ("x\n", "line 1 is no"), ("", "no sample")]:
        path.write_text(text)
        with pytest.raises(ValueError, match=complaint):
            read_traces(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_traces(tmp_path / "none.jsonl")


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def write_times(path, **changes):
    times = {"layers_ms": [1.0] * 12, "head_ms": 1.5, "verify_ms": 2.0, "message_ms": 0.05}
    path.write_text(json.dumps(times | changes))
    return path


def run(capsys, *flags):
    """The output of a run, and its last line."""
    plan_stages.main(plan_stages.build_parser().parse_args(list(map(str, flags))))
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_table_and_choice(tmp_path, capsys):
    """Guards what is printed: a row for each n that devices and layers allow, the best of them in the last lines."""
    path, picture = write_times(tmp_path / "times.json"), tmp_path / "plan.png"
    out, best = run(capsys, "--timings", path, "--num_devices", 12, "--alpha", 0.5, "--plot", picture)
    table = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")][2:]
    assert [(cells[0], cells[1]) for cells in table] == [(str(n), str(n + 1)) for n in range(1, 12)]
    speedups = [float(cells[9]) for cells in table]
    assert 1 < best["num_stages"] == speedups.index(max(speedups)) + 1 < 11
    assert table[best["num_stages"] - 1][2] == best["stage_layers"]
    assert f'--stage_layers "{best["stage_layers"]}" --lm_head {best["lm_head"]}' in out
    assert best["autoregressive_ms"] == 14
    assert best["speedup_replayed"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")

    out, best = run(capsys, "--timings", path, "--num_devices", 30, "--colocate_draft", "--plot", picture)
    assert re.search(r"^\| 12 \| 12 \| 1;1;1", out, re.M)  # no more stages than layers
    assert best["alpha"] == plan_stages.DEFAULT_ALPHA

    record(tmp_path / "raw.jsonl", 2)
    out, best = run(capsys, "--timings", path, "--num_devices", 4, "--trace", tmp_path / "raw.jsonl", "--plot", picture)
    assert "speed-up replayed" in out
    assert best["speedup_replayed"] == pytest.approx(best["speedup"], rel=0.1)
    assert best["alpha"] == round(trace_alpha(read_traces(tmp_path / "raw.jsonl")), 4)


@pytest.mark.parametrize(("family", "version"), [("llama", 11), ("qwen3_5", 10)])
def test_measured_times_make_the_same_plan_as_their_file(tmp_path, capsys, monkeypatch, family, version):
    """Guards measuring: every part is timed, layers of one kind alike, and the saved file is what was planned with."""
    save_target(tmp_path / "target", family)
    target = tiny_target(family)
    fields = {"shallow_hidden_layer_indices": auto_shallow_layers(4, 2)} if version == 10 else {}
    save_head(tiny_head(target, (2, 2), **fields), tmp_path / "head.pt")
    monkeypatch.setattr(plan_stages, "message_ms", lambda *_: 0.25)
    flags = ["--num_devices", 9, "--plot", tmp_path / "plan.png"]
    measure = ["--base_model_path", tmp_path / "target", "--spec_head_ckpt", tmp_path / "head.pt", "--threads", 1]
    measure += ["--rounds", 3, "--context", 20, "--save_timings", tmp_path / "times.json"]
    _, best = run(capsys, *flags, *measure)
    times = read_times(tmp_path / "times.json", 4)
    assert list(times.head) == [1, 2, 3, 4]
    assert min(*times.layers, *times.head.values(), times.verify) > 0
    assert times.message == 0.25
    kinds = 2 if family == "qwen3_5" else 1
    assert len(set(times.layers)) == kinds
    assert "commit" in json.loads((tmp_path / "times.json").read_text())
    _, again = run(capsys, *flags, "--timings", tmp_path / "times.json")
    assert again == best
    assert read_times(write_times(tmp_path / "other.json", **times_record(times)), 4) == times


BAD = [
    (["--num_devices", "1"], "--num_devices is 1: a stage and the head need at least 2"),
    (["--num_devices", "0", "--colocate_draft"], "--num_devices is 0: a stage and the head need at least 1"),
    (["--alpha", "1.5"], "--alpha is 1.5"),
    (["--alpha", "nan"], "--alpha is nan"),
    (["--alpha", "0.5", "--trace", "x"], "not allowed with argument"),
    (["--trace", "none.jsonl"], "--trace 'none.jsonl' cannot be read"),
    (["--save_timings", "t.json"], "--save_timings belongs to measuring"),
    (["--plot", "."], "--plot '.' cannot be written (it is a folder)"),
    (["--timings", "none.json"], "cannot be read"),
]
BAD_TIMES = [
    ({"layers_ms": []}, "layers_ms must list a time for each layer"),
    ({"layers_ms": [1, -1]}, r"layers_ms\[1\] is -1"),
    ({"verify_ms": "fast"}, "verify_ms is 'fast'"),
    ({"head_ms": {"1": 2.0}}, "head_ms lacks n = 2"),
    ({"head_ms": {"1": 2.0, "2": None}}, r"head_ms\[2\] is None"),
    ({"message_ms": float("inf")}, "message_ms is inf"),
]


@pytest.mark.parametrize(("flags", "complaint"), BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_bad_flags_are_one_line(tmp_path, capsys, monkeypatch, flags, complaint):
    """Guards users: exit code 2, one line that names the value, and no plot."""
    picture = tmp_path / "plan.png"
    argv = ["--timings", str(write_times(tmp_path / "times.json")), "--num_devices", "4", "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["plan_stages.py", *argv, *flags])
    with pytest.raises(SystemExit) as stopped:
        run_script(plan_stages.main, plan_stages.build_parser())
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert complaint in message
    assert message.count("\n") == 1
    assert not picture.exists()


@pytest.mark.parametrize(("change", "complaint"), BAD_TIMES, ids=[complaint for _, complaint in BAD_TIMES])
def test_bad_timings_are_named(tmp_path, change, complaint):
    """Guards against a plan from numbers that cannot be, and a KeyError for an n without a head's time."""
    with pytest.raises(ValueError, match=complaint):
        read_times(write_times(tmp_path / "times.json", **change), 2)
    (tmp_path / "times.json").write_text('{"layers_ms": [1.0]}')
    with pytest.raises(ValueError, match="must hold layers_ms, head_ms, verify_ms, message_ms"):
        read_times(tmp_path / "times.json", 2)


def test_measuring_what_cannot_be_is_refused(tmp_path):
    """Guards against a traceback for a context without positions, and a head's error after a target's long loading."""
    save_target(tmp_path / "target")
    parse = plan_stages.build_parser().parse_args
    flags = ["--num_devices", "3", "--base_model_path", str(tmp_path / "target")]
    with pytest.raises(ValueError, match="--context is 256, but the target has positions for 256"):
        plan_stages.main(parse([*flags, "--context", "256"]))
    with pytest.raises(ValueError, match="no head checkpoint"):
        plan_stages.main(parse(["--num_devices", "3", "--base_model_path", "nothing", "--spec_head_ckpt", "none.pt"]))
