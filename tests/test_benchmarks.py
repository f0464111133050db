"""The benchmarks on a tiny target: what they time, what they print, what they refuse."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cycle_overhead, cycle_time, gpu_check, muon_step, train_throughput, write_answers
from benchmarks.replay import filled_trace, shuffled_trace
from pipeline_inference import SPDDrafter
from pipeline_model import SpeculationHead, Target, save_head
from tests.ranks import CONTEXT
from tests.tiny import CHAT_TEMPLATE, save_target, tiny_head

CARD = ["target", "machine", "bfloat16", "versions"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("target")
    save_target(folder, layers=6, chat_template=CHAT_TEMPLATE)
    return folder


def flags(folder, *more):
    return [
        *("--base_model_path", str(folder), "--num_stages", "3", "--draft_vocab_size", "20", "--threads", "1"),
        *("--device", "cpu", *more),
    ]


def rows(out):
    """The cells of every table row."""
    return [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]


def test_cycle_time_reports_what_it_measured(folder, capsys):
    """Guards against ratios of other numbers than those shown, a card that lacks a line, and JSON that is not last."""
    cycle_time.main(cycle_time.build_parser().parse_args(flags(folder, "--cycles", "3", "--rounds", "2")))
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert [line.split()[0] for line in out.splitlines()[:4]] == CARD
    assert f"{folder}, n = 3, L_s = 2" in out
    milliseconds = {name.removesuffix("_ms"): value for name, value in result.items() if name.endswith("_ms")}
    shown = [float(cells[1]) for cells in rows(out)[2:9]]
    assert shown == pytest.approx(list(milliseconds.values()), abs=0.006)  # rounded to two and three digits
    ms = milliseconds
    expected = {
        "cycle_over_ar_plus_draft": ms["cycle"] / (ms["ar_step"] + ms["draft"]),
        "tree4_over_chain": ms["tree4_bf16"] / ms["chain_bf16"],
        "ar_over_hf_generate": ms["ar_token"] / ms["hf_token"],
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=0.01)
    assert result["threads"] == 1


def test_a_first_compilation_is_timed_in_a_process_of_its_own(tmp_path):
    """Guards the cold time: a process that starts for it, and whose compiler has the given cache."""
    assert cycle_time.in_new_process(os.getenv, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path)) == str(tmp_path)
    assert os.getenv("TORCHINDUCTOR_CACHE_DIR") != str(tmp_path)


def test_cycle_time_compares_compiled_stages_and_contexts(folder, capsys, monkeypatch):
    """Guards against ratios of other numbers than those shown, and prompts of other lengths than were asked for."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # what is timed matters here, not how fast
    monkeypatch.setattr(cycle_time, "STREAMED", 2**20)
    caches, first = [], cycle_time.FirstCompiled(4.0, 2.0)
    monkeypatch.setattr(
        cycle_time, "in_new_process", lambda _run, _args, cache: caches.append((cache, os.listdir(cache))) or first
    )
    more = ["--cycles", "2", "--rounds", "1", "--compile", "--context", "40", "7"]
    prompts, start = [], cycle_time.Decoder.start
    monkeypatch.setattr(
        cycle_time.Decoder, "start", lambda decoder, ids, count: prompts.append(len(ids)) or start(decoder, ids, count)
    )
    cycle_time.main(cycle_time.build_parser().parse_args(flags(folder, *more)))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = {
        "ar_compiled_over_eager": result["ar_step_compiled_ms"] / result["ar_step_ms"],
        "cycle_compiled_over_eager": result["cycle_compiled_ms"] / result["cycle_ms"],
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=0.01)
    assert result["ar_over_bandwidth_bound"] > 0
    assert caches[0][0] == caches[1][0]  # an empty folder, and then what the first process left in it
    assert caches[0][1] == []
    assert (result["first_compiled_token_s_cold"], result["first_compiled_head_s_warm"]) == first
    assert [row["length"] for row in result["context"]] == [7, 40]
    assert prompts[:10] == [7] * 5 + [40] * 5
    for row in result["context"]:
        assert row["tree4_over_chain"] == pytest.approx(row["tree4_ms"] / row["cycle_ms"], rel=0.05)
        assert row["prefill_over_hf_generate"] == pytest.approx(row["prefill_ms"] / row["hf_prefill_ms"], rel=0.05)
    too_long = flags(folder, "--cycles", "2", "--context", "5000")
    with pytest.raises(ValueError, match=r"--context is 5000: with --cycles 2 and --num_stages 3"):
        cycle_time.main(cycle_time.build_parser().parse_args(too_long))


def test_the_timed_draft_is_that_of_a_steady_cycle(folder, monkeypatch):
    """Guards against a head forward that computes rows a cycle would not, leaves some out, or sees a longer cache."""
    drafts: list[list] = []
    plain = {"draft": SPDDrafter.draft, "aggregate": SpeculationHead.aggregate, "rows": SpeculationHead.forward_rows}

    def draft(drafter, tree):
        drafts.append([])
        return plain["draft"](drafter, tree)

    def aggregate(head, kind, features):
        if drafts:
            drafts[-1].append((kind, len(features)))
        return plain["aggregate"](head, kind, features)

    def forward_rows(head, rows, rope, cache, *args, **kwargs):
        if drafts:
            drafts[-1].append((rows.shape, cache.length))
        return plain["rows"](head, rows, rope, cache, *args, **kwargs)

    args = cycle_time.build_parser().parse_args(flags(folder, "--cycles", "4"))
    bench = cycle_time.Bench(args, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(SPDDrafter, "draft", draft)
    monkeypatch.setattr(SpeculationHead, "aggregate", aggregate)
    monkeypatch.setattr(SpeculationHead, "forward_rows", forward_rows)
    generation = bench.pipeline(1)
    bench.fill(generation)
    drafts.clear()
    generation._cycle()
    (steady,) = drafts
    assert len(steady) > 2  # some rows change, and they run

    drafts.clear()
    assert len(bench.draft_seconds()) == 4
    assert drafts[-4:] == [steady] * 4


def test_the_loop_alone_is_measured_for_each_number_of_stages(capsys):
    """Guards against a row of other figures than its cycles', and an ideal of ranks for stages that take turns."""
    sleeps = ["--stage_ms", "0.5", "--draft_ms", "0", "--verify_ms", "0.25", "--cycles", "8"]
    args = cycle_overhead.build_parser().parse_args(["--single_process", "--num_stages", "3", "1", *sleeps])
    cycle_overhead.main(args)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["num_stages"] for run in result["runs"]] == [3, 1]
    assert [run["ideal_ms"] for run in result["runs"]] == [1.75, 0.75]
    for run in result["runs"]:
        assert run["overhead_ms"] == pytest.approx(run["cycle_ms"] - run["ideal_ms"], abs=0.002)
        assert run["overhead_ms"] >= 0 < run["host_ms"]


def child(command, pipe):
    """In a process of its own: a benchmark's command line, and what it prints."""
    script = import_module(f"benchmarks.{Path(command[1]).stem}")
    sys.argv, printed = command[1:], io.StringIO()
    with contextlib.redirect_stdout(printed):
        script.main(script.build_parser().parse_args(sys.argv[1:]))
    pipe.send(printed.getvalue())


def run_forked(command, **_):
    """`subprocess.run` for a benchmark, without paying for its imports."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=child, args=(list(map(str, command)), theirs))
    process.start()
    theirs.close()
    out = ours.recv()
    process.join()
    return subprocess.CompletedProcess(command, process.exitcode, out, "")


def replayed(*flags):
    """The rows of `cycle_overhead.py --replay`, and what it printed."""
    done = run_forked([sys.executable, cycle_overhead.__file__, "--replay", *flags])
    return json.loads(done.stdout.splitlines()[-1])["runs"], done.stdout


def counted_cycles(flags, num_stages, lag):
    """Cycles of a pipeline by moving tokens: every list entry is a token in flight and the cycles that it has gone."""
    cycles, verified, in_flight = 0, 0, [0]
    while verified < len(flags):
        cycles += 1
        in_flight = [passed + 1 for passed in in_flight] + [0]  # a draft enters in the next cycle
        if in_flight[0] == num_stages + lag:
            in_flight = in_flight[1:] if flags[verified] else [0]
            verified += 1
    return cycles


@pytest.mark.alone
def test_a_replay_takes_as_long_as_it_should():
    """Guards against acceptance, cycles or waits of a replay that are others than the flags say."""
    times = ["--stage_ms", 30, "--draft_ms", 10, "--verify_ms", 6, "--hidden_size", 32]
    acceptance = ["--alpha_by_fill", 0.5, 0.9, "--new_tokens", 12]
    runs, _ = replayed("--num_stages", 2, "--verify_lag", 0, 1, *times, *acceptance)
    flags = filled_trace([0.5, 0.9], 12).accepted
    assert 0 < sum(flags) < 12
    for run in runs:
        assert run["cycles"] == counted_cycles(flags, 2, run["verify_lag"])
        assert run["accept_length"] == pytest.approx(2 * 12 / run["cycles"], abs=1e-4)
        assert run["speedup"] == pytest.approx(run["predicted"], rel=0.1)
        assert run["speedup"] == pytest.approx(run["tokens_per_second"] * (2 * 30 + 6) / 1e3, rel=1e-3)
    # A refill waits for both stages and the verdict, an accepted draft for one stage; at lag 1 every cycle is a stage.
    milliseconds = [66 * (12 - sum(flags[:-1])) + 33 * sum(flags[:-1]), 30 * runs[1]["cycles"]]
    assert [run["predicted"] for run in runs] == [pytest.approx(66 * 12 / value, abs=1e-4) for value in milliseconds]


def test_a_replay_of_the_published_figures():
    """Guards against other acceptance than the published L_acc has, and a card that does not say what is emulated."""
    runs, out = replayed("--new_tokens", 20, "--num_stages", 4, "--hidden_size", 32)
    [run] = runs
    assert run["published"] == 2.27
    assert run["alpha"] == round(20 * (1 - (4 / 2.64 - 1) / 3)) / 20
    assert [line.split()[0] for line in out.splitlines()[:5]] == ["real", "emulated", "token", "baseline", "n"]
    assert "stage 7.9 ms, head 4.2 ms, verification 4 ms; baseline 28.4 ms per token" in out


def test_flags_by_fill_follow_the_fill():
    """Guards against a draft that is accepted as one made with fewer or more tokens in flight."""
    assert filled_trace([1, 0, 1], 6).accepted == (True, False) * 3
    assert filled_trace([1, 1, 0], 6).accepted == (True, True, False) * 2
    assert sum(shuffled_trace(0.3, 50).accepted) == 15


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--alpha", "0.5"], "--alpha is about --replay"),
        (["--replay", "--stage_ms", "3"], "--stage_ms with --replay needs the acceptance as well"),
        (["--replay", "--num_stages", "5"], "published for 4, 8"),
        (["--replay", "--alpha", "2"], "an acceptance of 2.0 was given"),
        (["--replay", "--alpha_by_fill", "0.5"], "--alpha_by_fill has 1 values, but n is 8"),
        (["--replay", "--alpha", "0.5", "--trace", "x"], "--alpha and --trace both give the acceptance"),
        (["--replay", "--single_process"], "drop one of the two"),
    ],
)
def test_replays_that_cannot_be_are_refused(flags, message):
    """Guards against flags that are left out of account, or a traceback."""
    with pytest.raises(ValueError, match=re.escape(message)):
        cycle_overhead.main(cycle_overhead.build_parser().parse_args(flags))


def test_train_throughput_reports_what_it_measured(folder, capsys, monkeypatch):
    """Guards against a plain form that computes another loss, wrong rates, and a child process that fails unseen."""
    more = ["--batch_size", "2", "--length", "24", "--steps", "1", "--autocast", "none"]
    command = [train_throughput.__file__, *flags(folder, *more)]
    monkeypatch.setattr(sys, "argv", command)  # memory is measured in children that run the same command
    monkeypatch.setattr(train_throughput, "subprocess", SimpleNamespace(run=run_forked))
    train_throughput.main(train_throughput.build_parser().parse_args(command[1:]))
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert [line.split()[0] for line in out.splitlines()[:5]] == [CARD[0], "batch", *CARD[1:]]
    table = {(cells[0], cells[1]): cells[2:] for cells in rows(out)[2:]}
    assert table.keys() == {(size, form) for size in ("16k", "full") for form in ("plain", "ours", "cached")}
    for size in ("16k", "full"):
        assert table[size, "plain"][2] == table[size, "ours"][2]
        # Its hidden states have gone through bfloat16.
        assert float(table[size, "cached"][2]) == pytest.approx(float(table[size, "ours"][2]), rel=0.01)
    for size in ("16k", "full"):
        share = float(table[size, "ours"][3])
        assert share == pytest.approx(result[f"fraction_of_gemm_bound_{size}"], abs=0.006)
    assert result["tokens_per_s_16k"] == pytest.approx(float(table["16k", "ours"][1]), abs=1)
    assert re.search(r"peak memory of a step, 16k: plain \d+ MB, ours \d+ MB", out)


def test_the_gpu_check_runs_as_far_as_a_cpu_can(folder, tmp_path, capsys, monkeypatch):
    """Guards the one script that nobody here can run on its device: what each check reports, that a failed one does not
    hide the others, and the exit code. Ranks, which are processes, say something wrong here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(gpu_check.Checks, "_run", lambda checks, *command: "nothing")
    target = Target.load(str(folder))
    save_head(tiny_head(target, (2, 2, 2)), tmp_path / "head.pt")
    output = tmp_path / "found.json"
    flags = ["--device", "cpu", "--base_model_path", str(folder), "--spec_head_ckpt", str(tmp_path / "head.pt")]
    monkeypatch.setattr(gpu_check, "PROMPT", "w3 w9 w5")
    monkeypatch.setattr(gpu_check, "FAMILIES", ["llama"])
    monkeypatch.setattr(gpu_check, "WINDOWED", ["qwen3 window"])
    args = gpu_check.build_parser().parse_args([*flags, "--max_new_tokens", "6", "--output", str(output)])
    assert gpu_check.main(args) == 1
    checks = json.loads(output.read_text())["checks"]
    states = {name: entry["status"] for name, entry in checks.items()}
    assert states == {
        **{"exactness": "ok", "compiled": "skipped", "eager": "ok", "graphed": "ok", "flash": "skipped"},
        **{"ranks": "failed", "graphed_ranks": "failed", "training": "skipped"},
    }
    assert checks["exactness"]["generations"] == 3 * 2
    for kind in ("eager", "graphed"):
        assert checks[kind]["equal_tokens"] == 6
        for row in (checks[kind]["standard"], checks[kind]["pipeline"]):
            parts = sum(row["stage_ms"]) + row["draft_ms"] + row["verify_ms"]
            assert row["cycle_ms"] == pytest.approx(parts + row["host_ms"], abs=0.01)
    assert "2 ranks wrote something else" in checks["ranks"]["reason"]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--num_stages", "7", "num_stages is 7, but the target has 6 layers"),
    ],
)
def test_flags_that_cannot_be_are_refused(folder, flag, value, message):
    """Guards against a traceback, or a division by zero after minutes of measuring."""
    with pytest.raises(ValueError, match=re.escape(message)):
        cycle_time.main(cycle_time.build_parser().parse_args(flags(folder, flag, value)))


def test_muon_step_times_all_three_kinds(folder, capsys, monkeypatch):
    """Guards against a ratio of other numbers than those shown, and against processes that wait for each other."""
    started = partial(muon_step.multiprocessing.start_processes, start_method="forkserver")  # without the imports
    monkeypatch.setattr(muon_step.multiprocessing, "spawn", started)
    muon_step.main(muon_step.build_parser().parse_args(flags(folder, "--processes", "2", "--rounds", "2", "--library")))
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    shown = {cells[0]: float(cells[1]) for cells in rows(out)[2:]}
    assert shown == {name: pytest.approx(result[f"{name}_ms"], abs=0.06) for name in ("alone", "shared", "library")}
    assert result["shared_over_alone"] == pytest.approx(result["shared_ms"] / result["alone_ms"], rel=0.01)
    assert result["alone_over_library"] == pytest.approx(result["alone_ms"] / result["library_ms"], rel=0.01)


def test_write_answers_reports_what_it_measured(folder, capsys, monkeypatch):
    """Guards rates and ratios, and the bound: products counted by hand at the rate that was measured."""
    monkeypatch.setattr(write_answers, "gemm_rate", lambda *_: 1e9)
    more = ["--batch_size", "3", "--prompt_tokens", "6", "--max_new_tokens", "4", "--rounds", "1", "--dtype", "float32"]
    args = write_answers.build_parser().parse_args(flags(folder, *more))
    write_answers.main(args)
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    shown = {cells[0]: float(cells[1]) for cells in rows(out)[2:]}
    assert shown == {"ours": result["tokens_per_s"], "generate": result["tokens_per_s_generate"]}
    assert result["speedup_over_generate"] == pytest.approx(shown["ours"] / shown["generate"], rel=0.01)
    target = Target.load(str(folder))
    weights = sum(weight.numel() for name, weight in target.layers.named_parameters() if "proj" in name)
    products = 2 * (weights * (3 + 4 + 6 + 3 * 3) + target.lm_head.weight.numel() * 12)
    seconds = 12 / shown["ours"]
    # The count of a layer's products includes some attention.
    assert products / 1e9 / seconds <= result["fraction_of_gemm_bound"] + 1e-3 <= 1.3 * products / 1e9 / seconds + 2e-3


def test_the_products_of_a_training_step_are_counted(folder):
    """Guards the bound of a step: every product, forward and backward, in place or not, against a count by hand."""
    args = train_throughput.build_parser().parse_args(
        flags(folder, "--batch_size", "1", "--length", "24", "--autocast", "none")
    )
    bench = train_throughput.Bench(args, torch.device("cpu"))
    counts = {size: bench.multiplications("ours", size) for size in bench.heads}
    more, width = 61 - 20, bench.target.config.hidden_size
    # A larger draft vocabulary: logits and their two gradients. The teacher's are of the whole vocabulary in any case.
    assert counts["full"] - counts["16k"] == 3 * 2 * bench.tokens * width * more
