"""The scripts with ranks as real processes: what they print, what every rank loads, and how they end when one fails."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import colocated_speed
from decoding.sampling import Sampling
from decoding.stage import Stage
from distributed_inference.example_mp_pipeline_generate import PROMPT as EXAMPLE_PROMPT
from distributed_inference.launch import RankParser, add_arguments
from distributed_inference.layout import Layout, parse_gpus
from distributed_inference.stages import StageServer
from distributed_inference.startup import check_same
from evaluation.prompts import Sample
from evaluation.workers import sample_seed
from pipeline_inference import Generation
from pipeline_model import Target, TargetPart, load_head, save_head
from tests.ranks import CONTEXT, evaluate, generate, ranks
from tests.tiny import FAMILIES, VOCAB, hf_greedy, save_target, spd_decoder, tiny_head, tiny_model

IDS = [5, 17, 3]
PROMPT = "w5 w17 w3"
ERROR = "example_mp_pipeline_generate.py: error: "


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target of four layers, and a head for two stages of it."""
    folder = tmp_path_factory.mktemp("files")
    save_target(folder / "target")
    target = Target.load(str(folder / "target"))
    save_head(tiny_head(target, (1, 3), base_model_path=str(folder / "target")), folder / "head.pt")
    return folder


def flags(files, *more, tokens=12):
    paths = ["--base_model_path", str(files / "target"), "--spec_head_ckpt", str(files / "head.pt")]
    return [*paths, "--rank_gpus", "cpu", "--max_new_tokens", str(tokens), "--prompt", PROMPT, *more]


def expected(files, tokens=12, **settings):
    """What one process decodes."""
    target = Target.load(str(files / "target"))
    return spd_decoder(target, load_head(files / "head.pt", target), **settings).generate(IDS, tokens)


# ---------------------------------------------------------------------------------------------------------------------
# What is printed and written
# ---------------------------------------------------------------------------------------------------------------------


def test_example_prints_the_pipelines_text_and_times(files, tmp_path):
    """Guards against text, counts, memory, profile, trace or page that are not those of the run."""
    written = ["--profile_timing", str(tmp_path / "profile.json"), "--trace", str(tmp_path / "trace.json")]
    written += ["--html", str(tmp_path / "page.html")]
    with ranks(3, tmp_path, generate, *flags(files, *written)) as running:
        assert running.join() == [0, 0, 0]
        out = running.out(0)
        assert [running.out(rank) + running.err(rank) for rank in (1, 2)] == ["", ""]
    result = expected(files)
    assert " ".join(f"w{token}" for token in result.tokens) in out
    assert "[pipeline] 12 tokens (length), " in out
    assert f"{result.cycles} cycles, n = 2, alpha {result.alpha:.2f} ({result.n_accepted}/11)" in out
    assert re.search(r"^rank 0 \(draft\) +cpu +none", out, re.M)
    assert re.search(r"^rank 2 \(stage 1\) +cpu +1-3", out, re.M)
    assert re.search(r"^\| stage 1 \| [\d.]+ \| [\d.]+ \|$", out, re.M)
    assert f"| {result.timings.rollbacks} rollbacks | " in out
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert [row["stage"] for row in profile["by_stage"]] == [0, 1]
    assert all(row["median_ms"] > 0 and 0 < row["cycles"] < result.cycles for row in profile["by_stage"])
    rows = profile["by_fill"]
    assert sum(row["cycles"] for row in rows) == result.cycles - 1
    assert {row["fill"] for row in rows} == {1, 2}
    for row in rows:
        parts = row["draft_ms"] + row["wait_ms"] + row["verify_ms"] + row["rest_ms"]
        assert parts == pytest.approx(row["cycle_ms"], rel=0.9)  # medians do not add up exactly
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        "draft",
        "stage 0",
        "stage 1",
        "verify",
        "wait",
    }
    assert out.splitlines()[-1] == f"Page written to {tmp_path / 'page.html'}: open it in a browser"
    [data] = re.findall(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)
    [shown] = json.loads(data)["runs"]
    tiles = {name: (value, note) for _, name, value, note in shown["metrics"]}
    assert tiles["cycles"] == (str(result.cycles), "")
    assert tiles["tokens"] == ("12", "the same as standard's")
    assert shown["tokens"]["fate"].count("accepted") == result.n_accepted
    assert all(sum(part["seconds"]) > 0 for part in shown["parts"] if part["name"].startswith("stage "))


def test_evaluation_writes_what_eval_writes(files, tmp_path):
    """Guards against rows, seeds or a baseline that are not those of the same prompts in one process; and resuming."""
    (tmp_path / "data" / "questions").mkdir(parents=True)
    lines = [json.dumps({"question_id": index, "category": "x", "turns": [f"w5 w17 w{index}"]}) for index in (3, 4)]
    (tmp_path / "data" / "questions" / "question.jsonl").write_text("\n".join(lines))
    target_and_head = ["--base_model_path", str(files / "target"), "--spec_head_ckpt", str(files / "head.pt")]
    data = ["--data_dir", str(tmp_path / "data"), "--datasets", "questions", "--output_dir", str(tmp_path / "out")]
    arguments = [*target_and_head, *data, "--rank_gpus", "cpu", "--max_new_tokens", "8", "--temperature", "1"]
    with ranks(3, tmp_path / "first", evaluate, *arguments) as running:
        assert running.join() == [0, 0, 0], running.err(0)
        assert "2 prompts, alpha" in running.out(0)
    with ranks(3, tmp_path / "second", evaluate, *arguments) as running:
        assert running.join() == [2, 2, 2]
        assert "go on with --resume" in running.err(0)
    [rows] = (tmp_path / "out" / "raw").glob("*__per_sample.jsonl")
    target = Target.load(str(files / "target"))
    decoder = spd_decoder(target, load_head(files / "head.pt", target), sampling=Sampling(1.0))
    for row, index in zip(map(json.loads, rows.read_text().splitlines()), (3, 4), strict=True):
        sample = Sample("questions", index, "x", (5, 17, index))
        decoder.seed = sample_seed(0, sample)
        assert row["output_ids"] == decoder.generate(sample.prompt_ids, 8).tokens
        assert row["baseline_new_tokens"] == 7
        assert len(row["stage_sec"]) == 2
    [summary] = (tmp_path / "out" / "summary").glob("*__summary.json")
    settings = json.loads(summary.read_text())["settings"]
    assert settings["placement"] == "3 ranks, gloo, stages 1;3"


def test_cycle_overhead_adds_up():
    """Guards against a benchmark that does not run, or whose figures do not belong together."""
    flags = ["--num_stages", "2", "--verify_lag", "0", "1", "--cycles", "20", "--stage_ms", "6", "--hidden_size", "32"]
    script = [sys.executable, "benchmarks/cycle_overhead.py", *flags]
    done = subprocess.run(script, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [(run["verify_lag"], run["ideal_ms"], run["bound_ms"]) for run in report["runs"]] == [(0, 7.2, 6), (1, 6, 6)]
    for run in report["runs"]:
        assert run["overhead_ms"] == pytest.approx(run["cycle_ms"] - run["ideal_ms"], abs=2e-3)
        assert run["efficiency"] == pytest.approx(run["ideal_ms"] / run["cycle_ms"], abs=1e-3)
        assert run["cycle_ms"] > 6
    assert report["cycle_ms"] == report["runs"][0]["cycle_ms"]


def measure_colocated(flags, result):
    """A rank of benchmarks/colocated_speed.py, on whichever core there is."""
    args = colocated_speed.build_parser().parse_args(flags)
    args.cores = [min(os.sched_getaffinity(0))] * 2
    colocated_speed.run_rank(args, [IDS], int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), result)


def test_colocated_speed_measures_the_pipeline(files, tmp_path):
    """Guards against a benchmark that does not run, or that decodes anything but the pipeline's own tokens."""
    paths = ["--base_model_path", str(files / "target"), "--spec_head_ckpt", str(files / "head.pt")]
    limits = ["--stage_layers", "1;3", "--max_new_tokens", "12"]
    with ranks(2, tmp_path, measure_colocated, [*paths, *limits], tmp_path / "result.json") as running:
        assert running.join() == [0, 0], running.err(0)
    assert json.loads((tmp_path / "result.json").read_text())["tokens"] == [expected(files).tokens]


def test_torchrun_starts_the_example(files):
    """Guards against a script that needs anything torchrun does not give, and processes that stay behind.

    The head names its target, the prompt is the script's own.
    """
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = ["distributed_inference/example_mp_pipeline_generate.py", "--spec_head_ckpt", str(files / "head.pt")]
    done = subprocess.run(
        [sys.executable, "-m", *command, *script, "--max_new_tokens", "12", "--colocate_draft", "--verify_lag", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    prompt = [0] * len(EXAMPLE_PROMPT.split())  # none of its words is in the vocabulary
    assert " ".join(f"w{token}" for token in hf_greedy(tiny_model("llama"), prompt, 12)) in done.stdout
    assert "rank 0 (draft, stage 0)" in done.stdout


def test_ranks_begin_anew_with_torchrun_and_end_with_it(tmp_path):
    """Guards against a second attempt that meets where the first one did, and ranks that outlive their torchrun."""
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    script = "distributed_inference/example_mp_pipeline_generate.py"
    save_target(tmp_path / "target", max_position_embeddings=100_000)
    save_head(tiny_head(Target.load(str(tmp_path / "target")), (1, 3)), tmp_path / "head.pt")
    arguments = flags(tmp_path, "--colocate_draft", "--warmup_iters", "0", tokens=90_000)
    printed = tmp_path / "out"
    with open(printed, "wb") as out:
        torchrun = psutil.Popen(
            [sys.executable, "-m", *command, script, *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    found = []
    try:
        for attempt in (1, 2):
            deadline = time.monotonic() + 90
            while printed.read_text().count("Prompt 1/1") < attempt:
                assert time.monotonic() < deadline, printed.read_text()
                time.sleep(0.1)
            found = torchrun.children()
            if attempt == 1:
                found[-1].kill()
        torchrun.kill()
        assert psutil.wait_procs(found, timeout=15)[1] == []
    finally:
        for process in (torchrun, *found):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        torchrun.wait()


# ---------------------------------------------------------------------------------------------------------------------
# A rank loads its part
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_has_its_own_weights_and_no_others(family, tied, tmp_path):
    """Guards against a rank that loads more than it runs, or other weights: ties, split rows and experts included."""
    model = save_target(tmp_path, family, tied=tied)
    whole = model.state_dict()
    layout = Layout((1, 2, 1), lm_head="split")
    held = set()
    for rank in range(layout.world_size):
        part = layout.part(rank, VOCAB)
        target = Target.load(str(tmp_path), part=part)
        state = target.model.state_dict()
        rows = state.pop("lm_head.weight")
        assert torch.equal(rows, whole["lm_head.weight"][part.lm_head.start : part.lm_head.stop])
        assert all(torch.equal(weight, whole[name]) for name, weight in state.items())
        layers = {int(name.split(".")[2]) for name in state if name.startswith("model.layers.")}
        assert layers == set(part.layers)
        assert ("model.embed_tokens.weight" in state) is (rank == 0)
        held |= state.keys()
    assert held == whole.keys() - {"lm_head.weight"}


def peak_of(part, path, pipe):
    """In a process of its own: the peak memory that loading adds, in bytes."""

    def status(name):
        return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    Target.load(path, part=TargetPart(range(0)))  # what loading imports is there before
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    target = Target.load(path, part=part)
    for weight in target.model.parameters():
        weight.sum()  # weights in a mapped file count once they are read
    pipe.send((status("VmHWM") - before, sum(weight.nbytes for weight in target.model.parameters())))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak memory")
def test_loading_a_part_never_needs_the_whole(tmp_path):
    """Guards against weights that are read only to be dropped: a rank's peak must follow its own layers."""
    save_target(tmp_path, layers=16, hidden_size=256, intermediate_size=1024, head_dim=64)
    peaks, weights = {}, {}
    for count in (2, 16):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=peak_of, args=(TargetPart(range(count)), str(tmp_path), theirs))
        process.start()
        peaks[count], weights[count] = ours.recv()
        process.join()
    assert weights[16] * 0.9 < peaks[16]
    assert peaks[2] < weights[16] / 3


def test_checkpoints_without_safetensors_are_refused(files, tmp_path):
    """Guards against a rank that reads a whole pickled checkpoint to keep a part of it."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((files / "target" / name).read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        Target.load(str(tmp_path), part=TargetPart(range(1)))


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes that are found before anything is loaded
# ---------------------------------------------------------------------------------------------------------------------


def test_number_of_ranks_must_fit(files, tmp_path):
    """Guards against ranks that wait for one that was never started; both numbers are named."""
    begun = time.monotonic()
    with ranks(2, tmp_path, generate, *flags(files)) as running:
        assert running.join() == [2, 2]
        assert running.err(0) == (
            f"{ERROR}2 ranks were started, but 2 stages with a draft rank need 3: torchrun --nproc_per_node=3\n"
        )
        assert running.err(1) == ""
    assert time.monotonic() - begun < 45


@pytest.mark.parametrize(
    ("text", "message"), [("0,1", "lists 2 GPUs, but there are 3 ranks"), ("0,x,1", "'0,x,1'"), ("0,,1", "'0,,1'")]
)
def test_gpu_lists_are_checked(text, message):
    """Guards against a list that leaves a rank without a GPU, or names none."""
    with pytest.raises(ValueError, match=message):
        parse_gpus(text, 3)
    assert parse_gpus("0, 1,0", 3) == [0, 1, 0]


def one_rank_differs(rank, *changes):
    """The example, with other flags on one rank."""
    first, *others = changes
    generate(*(others if os.environ["RANK"] == str(rank) else first))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--dtype", "bfloat16"], "rank 2 (stage 1) has dtype bfloat16, but rank 0 (draft) has float32"),
        (["--base_model_path", "/nowhere"], "rank 2: no target model at '/nowhere'"),
    ],
    ids=["another dtype", "a missing file"],
)
def test_a_rank_that_differs_is_named(files, tmp_path, change, message):
    """Guards against ranks that disagree and go on, and a rank that fails alone while the others wait for it."""
    with ranks(3, tmp_path, one_rank_differs, 2, flags(files), *flags(files, *change)) as running:
        assert running.join() == [2, 2, 2]
        assert running.err(0).startswith(f"{ERROR}{message}")
        assert running.err(0).count("\n") == 1


def test_every_fact_is_compared():
    """Guards against a difference that is gathered and not looked at."""
    facts = {"number of stages": "2", "head checksum": "abc", "code version": "1"}
    check_same([facts, dict(facts)], str)
    for name in facts:
        with pytest.raises(ValueError, match=f"1 has {name} other, but 0 has {facts[name]}"):
            check_same([facts, facts | {name: "other"}], str)


def test_a_port_in_use_is_named(files, tmp_path):
    """Guards against a traceback, or a hang, where another program has the port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with ranks(3, tmp_path, generate, *flags(files, "--meet_timeout_sec", "2"), port=port) as running:
            assert running.join() == [2, 2, 2]
            assert f"rank 0 cannot meet the others at 127.0.0.1:{port}" in running.err(0)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that die
# ---------------------------------------------------------------------------------------------------------------------


def stuck_at(where, victim, *arguments):
    """The example; one rank says so and sleeps when it gets to a place."""
    owner, name, calls = {
        "load": (Target, "load", 0),
        "prefill": (Stage, "prefill", 0),
        "decode": (Stage, "run", 7),
        "cycle": (Generation, "_cycle", 7),
    }[where]
    if os.environ["RANK"] == str(victim):
        original = getattr(owner, name)
        count = iter(range(1000))

        def sleep(*args, **kwargs):
            if next(count) >= calls:
                print("here", flush=True)
                time.sleep(600)
            return original(*args, **kwargs)

        setattr(owner, name, sleep)
    generate(*arguments)


@pytest.mark.parametrize(
    ("where", "victim", "said"),
    [
        ("load", 2, "rank 0 (draft) lost rank 2 (stage 1): it closed its connection"),
        ("prefill", 1, "lost rank 1 (stage 0): it closed its connection"),
        ("decode", 2, "lost rank 2 (stage 1): it closed its connection"),
        ("cycle", 0, "lost rank 0 (draft): it closed its connection"),
    ],
)
def test_survivors_of_a_killed_rank_end_with_its_name(files, tmp_path, where, victim, said):
    """Guards against survivors that hang, end with 0, or do not say who is gone; verified tokens are not lost."""
    arguments = flags(files, "--warmup_iters", "0")
    with ranks(3, tmp_path, stuck_at, where, victim, *arguments) as running:
        running.wait_for(victim, "here")
        os.kill(running.processes[victim].pid, signal.SIGKILL)
        codes = running.join(timeout=30)
        assert codes == [-9 if rank == victim else 1 for rank in range(3)]
        for rank in {0, 1, 2} - {victim}:
            assert said in running.err(rank)
            assert running.err(rank).count("\n") == 1
        if where == "decode":
            printed = re.search(r"\[stopped\] (\d+) tokens were verified: (\[.*\])", running.out(0))
            assert json.loads(printed[2]) == expected(files).tokens[: int(printed[1])]
            assert int(printed[1]) >= 2


@pytest.mark.parametrize(("where", "limit"), [("load", "--load_timeout_sec"), ("decode", "--decode_timeout_sec")])
def test_a_rank_that_hangs_is_given_up(files, tmp_path, where, limit):
    """Guards against survivors that wait for ever where no connection breaks, or name each other."""
    arguments = flags(files, "--warmup_iters", "0", limit, "4")
    with ranks(3, tmp_path, stuck_at, where, 1, *arguments) as running:
        running.wait_for(1, "here")
        assert running.join(30) == [1, 1, 1]
        assert all("lost rank 1 (stage 0): it did not answer for 4 s" in running.err(rank) for rank in range(3))


def test_a_frozen_rank_is_given_up(files, tmp_path):
    """Guards against survivors that name a rank that waits itself, for the one whose process is stopped."""
    arguments = flags(files, "--warmup_iters", "0", "--decode_timeout_sec", "2", tokens=150)
    with ranks(3, tmp_path, slow_stages, *arguments) as running:
        running.wait_for(0, f"{PROMPT}\nw")  # it decodes
        os.kill(running.processes[1].pid, signal.SIGSTOP)
        for rank in (0, 2):
            running.processes[rank].join(30)
            assert running.processes[rank].exitcode == 1
            assert "lost rank 1 (stage 0): it did not answer for 2 s" in running.err(rank)


def slow_stages(*arguments):
    """The example, in no hurry."""
    run = Stage.run
    Stage.run = lambda *args: time.sleep(0.05) or run(*args)
    generate(*arguments)


def failing_stage(*arguments):
    """The example; stage 1 raises in its third cycle."""
    if os.environ["RANK"] == "2":
        original, count = Stage.run, iter(range(1000))

        def run(*args):
            if next(count) == 2:
                raise RuntimeError("out of memory")
            return original(*args)

        Stage.run = run
    generate(*arguments)


def test_the_reason_of_a_failed_rank_reaches_all(files, tmp_path):
    """Guards against survivors that know only that somebody is gone."""
    with ranks(3, tmp_path, failing_stage, *flags(files)) as running:
        assert running.join() == [1, 1, 1]
        reason = "rank 2 (stage 1) failed with RuntimeError: out of memory"
        assert all(reason in running.err(rank) for rank in range(3))
        assert "Traceback" in running.err(2)


def test_ctrl_c_ends_a_rank_that_waits(files, tmp_path):
    """Guards against a rank that cannot be stopped while it waits for a message, and lost tokens."""
    with ranks(3, tmp_path, stuck_at, "decode", 2, *flags(files, "--warmup_iters", "0")) as running:
        running.wait_for(2, "here")
        time.sleep(0.3)
        os.kill(running.processes[0].pid, signal.SIGINT)
        running.processes[0].join(20)
        assert running.processes[0].exitcode == 130
        assert "stopped by SIGINT" in running.err(0)
        assert "tokens were verified" in running.out(0)
        running.processes[1].join(20)
        assert running.processes[1].exitcode == 1


def with_pipe(read_by, *arguments):
    """The example; rank 0 prints into a pipe whose reader has ended, or takes nothing in."""
    if os.environ["RANK"] == "0":
        reader, writer = os.pipe()
        if read_by == "nobody":
            os.close(reader)
        else:
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, bytes(1 << 12))
            os.set_blocking(writer, True)
        os.dup2(writer, 1)
        os.close(writer)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"))
    elif os.environ["RANK"] == "1":
        serve = StageServer.serve
        StageServer.serve = lambda self: print("serving", flush=True) or serve(self)
    generate(*arguments)


def test_ranks_end_when_nobody_reads_their_output(files, tmp_path):
    """Guards against tracebacks and waiting ranks after `| head`."""
    with ranks(3, tmp_path, with_pipe, "nobody", *flags(files)) as running:
        assert running.join(30) == [141, 141, 141]
        assert [running.err(rank) for rank in range(3)] == ["", "", ""]


def test_ctrl_c_ends_a_rank_whose_output_is_not_read(files, tmp_path):
    """Guards against `| tee` or `| less`: the thread that ends the rank waited for the output, for ever."""
    with ranks(3, tmp_path, with_pipe, "one who sleeps", *flags(files, "--warmup_iters", "0")) as running:
        running.wait_for(1, "serving")
        time.sleep(0.5)
        os.kill(running.processes[0].pid, signal.SIGINT)
        assert running.join(20) == [130, 1, 1]
        assert "stopped by SIGINT" in running.err(0)
        assert "rank 1 (stage 0) stops: rank 0 (draft) was stopped by SIGINT" in running.err(1)


@pytest.mark.parametrize("seconds", ["0", "-1", "1e-7", "1e15", "inf", "nan", "soon"])
@pytest.mark.parametrize("what", ["meet", "load", "prefill", "decode"])
def test_timeouts_of_no_use_are_refused(what, seconds, capsys):
    """Guards against a timeout that ends every run, one that overflows, and one that never ends."""
    parser = RankParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as exit_info:
        parser.parse_args(["--spec_head_ckpt", "b", f"--{what}_timeout_sec={seconds}"])
    assert exit_info.value.code == 2
    assert f"--{what}_timeout_sec: '{seconds}' is not a number at least 0.1 and at most" in capsys.readouterr().err


def test_bad_flags_are_said_once_a_machine(monkeypatch):
    """Guards against the same line from every rank."""
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        captured = io.StringIO()
        with contextlib.redirect_stderr(captured), pytest.raises(SystemExit) as exit_info:
            RankParser().error("wrong")
        assert exit_info.value.code == 2
        assert captured.getvalue().count("\n") == lines


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("width", ["1", "4"])
def test_compiled_stages_decode_the_same(files, tmp_path, width):
    """Guards against compiled stages that differ, or compile again in every generation."""
    arguments = flags(files, "--compile", "--draft_top_k", width, "--prompt", "w9 w2")
    with ranks(3, tmp_path, generate, *arguments) as running:
        assert running.join(timeout=400) == [0, 0, 0], running.err(1)
        assert " ".join(f"w{token}" for token in expected(files, draft_top_k=int(width)).tokens) in running.out(0)
