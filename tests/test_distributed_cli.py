"""The command lines of the scripts with ranks: what they take, what they start, and what they refuse beforehand."""

import argparse
import json
import logging
import signal
import sys
from pathlib import Path

import pytest

import eval as evaluation
from baselines.registry import with_defaults
from decoding.sampling import Sampling
from distributed_inference import eval_mp_pipeline_dataset, example_mp_pipeline_generate, launch, self_launch
from distributed_inference.eval_mp_pipeline_dataset import DistributedEvaluation
from distributed_inference.example_mp_pipeline_generate import PROMPT, Example
from distributed_inference.launch import Checked, Lead, choose_device
from distributed_inference.self_launch import plan_launches, start_ranks
from distributed_inference.startup import Environment
from pipeline_model import Target, save_head
from tests.ranks import evaluate, ranks
from tests.tiny import hf_greedy, save_target, tiny_head, tiny_model

TOKENS = 5
SCRIPTS = {"example": example_mp_pipeline_generate, "evaluation": eval_mp_pipeline_dataset}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target of four layers, heads for two (1;3), three and four stages that name it, and two prompts."""
    folder = tmp_path_factory.mktemp("files")
    target_path = str(folder / "target")
    save_target(target_path)
    target = Target.load(target_path)
    for name, sizes, fields in (
        ("h2", (1, 3), {"aggr_feature_bound": (0, 1, 3)}),
        ("h2_more", (1, 3), {"aggr_feature_bound": (0, 1, 2, 4)}),
        ("h3", (2, 1, 1), {}),
        ("h4", (1, 1, 1, 1), {}),
    ):
        save_head(tiny_head(target, sizes, base_model_path=target_path, **fields), folder / f"{name}.pt")
    (folder / "data" / "mt_bench").mkdir(parents=True)
    lines = [json.dumps({"question_id": index, "category": "x", "turns": [f"w5 w17 w{index}"]}) for index in (3, 4)]
    (folder / "data" / "mt_bench" / "question.jsonl").write_text("\n".join(lines))
    return folder


def heads(files, *names):
    return [str(files / f"{name}.pt") for name in names]


def data(files, tmp_path):
    return ["--data_dir", str(files / "data"), "--output_dir", str(tmp_path / "out")]


def greedy(prompt):
    return hf_greedy(tiny_model("llama"), prompt, TOKENS)


def as_rank(rank, world_size):
    return Environment(rank, rank, world_size)


# ---------------------------------------------------------------------------------------------------------------------
# The commands as they are written
# ---------------------------------------------------------------------------------------------------------------------


def test_the_example_needs_a_head_alone(files, monkeypatch):
    """Guards against a command of the paper's repository that asks for the target's path, a prompt or another GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    command = ["--spec_head_ckpt", *heads(files, "h4"), "--rank_gpus", "0,1,2,3,4", "--max_new_tokens", "512"]
    args = example_mp_pipeline_generate.build_parser().parse_args([*command, "--temperature", "0.0"])
    args.max_new_tokens = 100  # the tiny target has 256 positions
    checked = Checked(args, as_rank(3, 5))
    script = Example(args)
    script.prepare(checked)
    assert checked.base_model_path == str(files / "target")
    assert (str(checked.device), checked.backend) == ("cuda:3", "nccl")
    assert [prompt for prompt, _ in script.prompts] == [PROMPT]
    assert plan_launches(Example, args) == [(5, [])]


def test_the_evaluation_combines_heads_temperatures_and_widths(files, tmp_path):
    """Guards against a combination that is not run, and heads on the same ranks whose messages need other buffers."""
    command = ["--spec_head_ckpt", *heads(files, "h2", "h2_more"), *data(files, tmp_path), "--max_new_tokens", "8"]
    axes = ["--temperature", "0", "1", "--draft_top_k", "1", "4", "--warmup_new_tokens", "4"]
    args = eval_mp_pipeline_dataset.build_parser().parse_args([*command, *axes])
    checked = Checked(args, as_rank(0, 3))
    script = DistributedEvaluation(args)
    script.prepare(checked)
    assert [planned.settings["label"] for planned in script.plan.runs] == [
        f"SPD {head}, n = 2 (1;3), W = {width}, T = {temperature}"
        for head in ("h2", "h2_more")
        for temperature in (0, 1)
        for width in (1, 4)
    ]
    names = {planned.files.rows.path.name for planned in script.plan.runs}
    assert len(names) == 8
    assert all(name.startswith("mp_pipeline_eval__") for name in names)
    assert (checked.width, checked.anchors) == (4, (0, 1, 2, 3, 4))
    checksums = checked.facts(args)["head checksum"].split()
    assert len(set(checksums)) == 2


def test_an_evaluation_has_the_defaults_of_eval():
    """Guards against figures over ranks that are of other generations than those of eval.py, by default."""
    ours = vars(eval_mp_pipeline_dataset.build_parser().parse_args(["--spec_head_ckpt", "h"]))
    theirs = evaluation.build_parser().parse_args(["--spec_head_ckpt", "h"])
    theirs = vars(with_defaults(theirs, "decoding_flags"))
    shared = (ours.keys() & theirs.keys()) - {"profile_timing"}  # off in both; a file here
    assert {"max_new_tokens", "temperature", "draft_top_k", "top_k", "top_p", "seed", "enable_thinking"} <= shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_another_split_is_named_in_the_runs(files, tmp_path):
    """Guards against rows of a pipeline of four stages that say they are of the head's two."""
    command = ["--spec_head_ckpt", *heads(files, "h2"), *data(files, tmp_path), "--stage_layers", "1;1;1;1"]
    args = eval_mp_pipeline_dataset.build_parser().parse_args([*command, "--max_new_tokens", "8"])
    script = DistributedEvaluation(args)
    script.prepare(Checked(args, as_rank(0, 5)))
    [planned] = script.plan.runs
    assert planned.settings["label"] == "SPD h2, n = 4, W = 1, T = 0"
    assert "__n4_W1_T0__mp5" in planned.files.name


@pytest.mark.parametrize("text", ["", " ", None])
def test_an_empty_gpu_list_is_the_local_rank(files, text, monkeypatch):
    """Guards against `--rank_gpus ""`, as scripts pass it, that is refused or sends every rank to GPU 0."""
    args = argparse.Namespace(rank_gpus=text, dist_backend=None)
    assert str(choose_device(args, as_rank(1, 3))[0]) == "cpu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert str(choose_device(args, Environment(rank=6, local_rank=2, world_size=8))[0]) == "cuda:2"


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        ([], None),
        (["--profile_timing"], "profile_timing.json"),
        (["--profile_timing", "p.json"], "p.json"),
        (["--profile_timing", "p.json", "--no-profile_timing"], None),
        (["--no_profile_timing"], None),
        (["--profile_timing", "True"], "profile_timing.json"),
        (["--profile_timing", "p.json", "--profile_timing", "false"], None),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_profile_timing_is_a_switch_or_a_file(script, flags, file):
    """Guards against either spelling that users bring being refused."""
    parser = SCRIPTS[script].build_parser()
    assert parser.parse_args(["--spec_head_ckpt", "h.pt", *flags]).profile_timing == file


@pytest.mark.parametrize(("flags", "tokens"), [([], [4, 4]), (["--warmup_new_tokens", "3"], [3, 3])])
def test_warm_up_is_as_long_as_asked(flags, tokens):
    """Guards against a warm-up that runs once, or for another length; 2 n tokens unless it is given."""
    command = ["--spec_head_ckpt", "h.pt", "--warmup_iters", "2", *flags]
    lead, asked = object.__new__(Lead), []
    lead.args = example_mp_pipeline_generate.build_parser().parse_args(command)
    lead.layout = argparse.Namespace(num_stages=2)
    lead.warm_up([1], argparse.Namespace(generate=lambda prompt, count: asked.append(count)))
    assert asked == tokens


def test_heads_are_loaded_in_turn(monkeypatch):
    """Guards against a run that decodes with another one's head, and a head that is loaded for every run."""
    loaded = []

    def load(path, target):
        loaded.append(path)
        return argparse.Namespace(path=path, config=argparse.Namespace(anchors=(0,)))

    monkeypatch.setattr(launch, "load_head", load)
    monkeypatch.setattr(launch, "RemoteExecutor", lambda *_, **__: None)
    monkeypatch.setattr(launch, "SPDDrafter", lambda head, *_, **__: head)
    monkeypatch.setattr(Lead, "_decoder", lambda self, executor, drafter, sampling, **_: drafter.path)
    args = eval_mp_pipeline_dataset.build_parser().parse_args(["--spec_head_ckpt", "a", "b"])
    pipeline = argparse.Namespace(target=None)
    lead = Lead(args, argparse.Namespace(layout=argparse.Namespace(stage_sizes=(1, 3))), pipeline, load("a", None))
    assert [lead.speculative(path, Sampling(), 1) for path in "aabba"] == list("aabba")
    assert loaded == ["a", "b", "a"]


# ---------------------------------------------------------------------------------------------------------------------
# Which ranks are started
# ---------------------------------------------------------------------------------------------------------------------


def parse(files, tmp_path, *flags):
    command = [*data(files, tmp_path), "--max_new_tokens", "8", *flags]
    return eval_mp_pipeline_dataset.build_parser().parse_args(command)


def test_heads_of_another_split_get_ranks_of_their_own(files, tmp_path):
    """Guards against a head on ranks that were split for another one, and files of two launches that overwrite."""
    h2, more, h3 = heads(files, "h2", "h2_more", "h3")
    traced = ["--trace", str(tmp_path / "t.json"), "--colocate_draft"]
    launches = plan_launches(
        DistributedEvaluation, parse(files, tmp_path, "--spec_head_ckpt", h2, h3, more, "--rank_gpus", "cpu", *traced)
    )
    assert launches == [
        (2, ["--spec_head_ckpt", h2, more, "--trace", str(tmp_path / "t_stages1-3.json")]),
        (3, ["--spec_head_ckpt", h3, "--trace", str(tmp_path / "t_stages2-1-1.json")]),
    ]
    assert not (tmp_path / "out").exists()


def test_a_list_of_gpus_serves_the_longest_pipeline(files, tmp_path, monkeypatch):
    """Guards against a list that fits one of two launches and ends the other."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "GPU")
    flags = ["--spec_head_ckpt", *heads(files, "h2", "h3"), "--rank_gpus", "4,5,6,7"]
    launches = plan_launches(DistributedEvaluation, parse(files, tmp_path, *flags))
    assert [flags[-2:] for _, flags in launches] == [["--rank_gpus", "4,5,6"], ["--rank_gpus", "4,5,6,7"]]


def test_torchrun_cannot_serve_another_split(files, tmp_path):
    """Guards against ranks that start although one of the heads needs others; the way out is named."""
    args = parse(files, tmp_path, "--spec_head_ckpt", *heads(files, "h2", "h3"))
    with pytest.raises(ValueError, match=r"h2.pt' has stages 1;3, but '.*h3.pt' has stages 2;1;1: .* with python"):
        Checked(args, as_rank(0, 3))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--spec_head_ckpt", "nowhere.pt"], "no head checkpoint at 'nowhere.pt'"),
        (["--spec_head_ckpt", "{h2}", "--rank_gpus", "0,1,2"], "rank 0 wants GPU 0, but this machine has 0"),
        (
            ["--spec_head_ckpt", "{h2}", "{h3}", "--num_stages", "3"],
            "h2.pt': --num_stages is 3, but the head",
        ),
        (["--spec_head_ckpt", "{h2}", "{h3}", "--draft_top_k", "0"], "draft_top_k is 0"),
        (["--spec_head_ckpt", "{h2}", "{again}"], "twice"),
        (["--spec_head_ckpt", "{h2}", "{h3}", "--datasets", "none"], "no data set 'none'"),
        (
            ["--spec_head_ckpt", "{h2}", "--warmup_new_tokens", "-1"],
            "--warmup_new_tokens: '-1' is not an integer at least 0",
        ),
        (["--spec_head_ckpt", "{h2}", "--trace", "{h3}/trace.json"], "h3.pt/trace.json' cannot be written"),
        (["--spec_head_ckpt", "{h2}", "--no-baseline", "--baseline_rows", "x"], "drop one"),
    ],
)
def test_bad_input_starts_nothing(files, tmp_path, monkeypatch, capfd, flags, message):
    """Guards against ranks that are started to say what one process knew before; once, in one line, exit code 2."""
    paths = {name: str(files / f"{name}.pt") for name in ("h2", "h3")} | {"again": str(files / "data" / ".." / "h2.pt")}
    flags = [*data(files, tmp_path), "--max_new_tokens", "8", *(flag.format(**paths) for flag in flags)]
    monkeypatch.setattr(sys, "argv", ["eval_mp_pipeline_dataset.py", *flags])
    monkeypatch.setattr(self_launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as exit_info:
        eval_mp_pipeline_dataset.main()
    error = capfd.readouterr().err
    assert (exit_info.value.code, error.count("\n")) == (2, 1)
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("codes", "started", "code"), [([0, 0], 2, 0), ([1, 0], 2, 1), ([2, 0], 1, 2), ([137, 0], 1, 137)]
)
def test_a_failure_is_the_exit_code(files, tmp_path, monkeypatch, codes, started, code):
    """Guards against a failed launch that a later one hides or keeps from running, and launches that outlive Ctrl-C."""
    given = []
    monkeypatch.setattr(self_launch, "start_ranks", lambda *launch: given.append(launch) or codes[len(given) - 1])
    args = parse(files, tmp_path, "--spec_head_ckpt", *heads(files, "h2", "h3"))
    assert (self_launch.launch_all(DistributedEvaluation, args), len(given)) == (code, started)


def test_a_head_that_does_not_name_its_target(files, tmp_path):
    """Guards against a traceback, or a target of nobody's choice, where the path is missing."""
    target = Target.load(str(files / "target"))
    save_head(tiny_head(target, (1, 3)), tmp_path / "h.pt")
    args = parse(files, tmp_path, "--spec_head_ckpt", str(tmp_path / "h.pt"))
    with pytest.raises(ValueError, match="--base_model_path"):
        Checked(args, as_rank(0, 3))


def test_under_torchrun_a_rank_is_a_rank(monkeypatch):
    """Guards against ranks that start ranks."""
    monkeypatch.setattr(sys, "argv", ["example_mp_pipeline_generate.py", "--spec_head_ckpt", "h.pt"])
    monkeypatch.setattr(self_launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(launch.RankProcess, "run", lambda self: sys.exit(77))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as exit_info:
        example_mp_pipeline_generate.main()
    assert exit_info.value.code == 77


@pytest.fixture
def _as_before(caplog):
    """Undo what launching does to this process; torch's reports go to `caplog`."""
    torchs = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    torchs.addHandler(caplog.handler)
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    yield
    torchs.removeHandler(caplog.handler)
    logging.disable(logging.NOTSET)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("assert os.environ['WORLD_SIZE'] == '2'", 0),
        ("sys.exit(3 * (os.environ['RANK'] == '1'))", 3),
        ("os.environ['RANK'] == '0' and os.kill(os.getpid(), 9)", 128 + 9),
        ("stop_all(signal.SIGTERM)", 128 + signal.SIGTERM),
        ("stop_all(signal.SIGINT)", 128 + signal.SIGINT),
    ],
    ids=["all well", "a rank's own code", "a killed rank", "SIGTERM", "Ctrl-C"],
)
def test_exit_codes_are_those_of_the_ranks(tmp_path, body, code, capfd, caplog):
    """Guards against a failure that ends with 0 or in the launcher's own words, and ranks that outlive a signal."""
    script = tmp_path / "script.py"
    note = f"open({str(tmp_path)!r} + '/signal' + os.environ['RANK'], 'w').close()"
    script.write_text(
        f"import os, signal, sys, time\n"
        f"def stop(*_):\n    {note}\n    sys.exit(1)\n"
        f"def stop_all(number):\n    time.sleep(1)\n    if os.environ['RANK'] == '0':\n"
        f"        os.kill(os.getppid(), number)\n    time.sleep(60)\n"
        f"signal.signal(signal.SIGTERM, stop)\n{body}\n"
    )
    assert start_ranks(2, [str(script)]) == code
    assert (capfd.readouterr().err, caplog.records) == ("", [])
    if "stop_all" in body:
        assert sorted(path.name for path in tmp_path.glob("signal*")) == ["signal0", "signal1"]


# ---------------------------------------------------------------------------------------------------------------------
# With models
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_as_before")
def test_python_evaluates_heads_of_different_depths(files, tmp_path, monkeypatch, capfd):
    """Guards against any run of two launches that is missing, or whose greedy ids are not `model.generate`'s.

    The ranks are processes as users have them; what starts them is this process, which has imported everything.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    axes = ["--temperature", "0", "1", "--draft_top_k", "1", "4", "--warmup_new_tokens", "4", "--colocate_draft"]
    limits = ["--max_new_tokens", str(TOKENS), "--prompts_per_dataset", "1", "--rank_gpus", "cpu"]
    flags = ["--spec_head_ckpt", *heads(files, "h2", "h3"), *axes, *limits, *data(files, tmp_path)]
    monkeypatch.setattr(sys, "argv", [eval_mp_pipeline_dataset.__file__, *flags])
    with pytest.raises(SystemExit) as exit_info:
        eval_mp_pipeline_dataset.main()
    printed = capfd.readouterr()
    assert exit_info.value.code == 0, printed.err
    assert "[launch 2/2] 3 ranks: --spec_head_ckpt" in printed.out
    raw = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out" / "raw").glob("*.jsonl")}
    assert len(raw) == 8
    for name, row in raw.items():
        assert row["baseline_new_tokens"] == TOKENS - 1
        if "_T0_" in name:
            assert row["output_ids"] == greedy([5, 17, 3])


@pytest.fixture(scope="module")
def baseline(files, tmp_path_factory):
    """What eval.py writes of the target alone: a cache file, and the rows of `--method autoregressive`."""
    folder = tmp_path_factory.mktemp("baseline")
    common = ["--base_model_path", str(files / "target"), "--data_dir", str(files / "data"), "--gpus", "cpu"]
    limits = ["--max_new_tokens", str(TOKENS), "--output_dir", str(folder / "out")]
    args = evaluation.build_parser().parse_args([*common, *limits, "--method", "autoregressive"])
    assert evaluation.main(args) == 0
    [cached] = (folder / "out" / "baseline_cache").glob("*.jsonl")
    [raw] = (folder / "out" / "raw").glob("*.jsonl")
    return {"cached": cached, "raw": raw}


def test_cells_are_over_one_device(files, baseline, tmp_path):
    """Guards against wall-clock speed-ups over anything but the rows that were given, and rows that are changed."""
    before = baseline["cached"].read_bytes()
    given = ["--baseline_rows", str(baseline["cached"]), "--max_new_tokens", str(TOKENS), "--rank_gpus", "cpu"]
    arguments = ["--spec_head_ckpt", *heads(files, "h2", "h2_more"), *data(files, tmp_path), *given]
    with ranks(3, tmp_path / "first", evaluate, *arguments) as running:
        assert running.join() == [0, 0, 0], running.err(0)
        assert running.out(0).count("2/2 equal to the baseline") == 2
    theirs = {row["question_id"]: row for row in map(json.loads, before.splitlines())}
    for path in (tmp_path / "out" / "raw").glob("*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            alone = theirs[row["question_id"]]
            assert row["output_ids"] == greedy([5, 17, row["question_id"]])
            speeds = [each["new_tokens"] / each["decode_wall_sec"] for each in (row, alone)]
            assert row["speedup_vs_baseline"] == pytest.approx(speeds[0] / speeds[1])
    table = (tmp_path / "out" / "summary" / "mp_pipeline_eval__table.md").read_text()
    assert "3 ranks, gloo, stages 1;3, baseline on one device (" in table
    assert baseline["cached"].read_bytes() == before
    assert not (tmp_path / "out" / "baseline_cache").exists()


def test_rows_of_either_kind_are_taken(files, baseline, tmp_path):
    """Guards against the raw rows of eval.py being refused, or the file of another temperature being taken."""
    for path in baseline.values():
        flags = ["--spec_head_ckpt", *heads(files, "h2"), "--max_new_tokens", str(TOKENS), "--baseline_rows", str(path)]
        args = parse(files, tmp_path, *flags)
        plan_launches(DistributedEvaluation, args)
        args.temperature = [0.0, 1.0]
        with pytest.raises(ValueError, match="0 files made with temperature 1"):
            plan_launches(DistributedEvaluation, args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda settings, rows: settings.update(target_fingerprint="x"), "target_fingerprint x"),
        (lambda settings, rows: settings.update(max_new_tokens=9), "max_new_tokens 9, but this run has 5"),
        (lambda settings, rows: settings.update(top_p=0.5), "top_p 0.5, but this run has 1.0"),
        (lambda settings, rows: settings.update(seed=7), "seed 7, but this run has 0"),
        (lambda settings, rows: settings.update(temperature=0.7), "temperature 0.7, but this run has 0"),
        (lambda settings, rows: settings.update(dtype="bfloat16"), "dtype bfloat16"),
        (lambda settings, rows: settings.update(quantization="bnb_4bit"), "quantization bnb_4bit"),
        (lambda settings, rows: settings.update(device="H1, 1 thread"), "made on H1, but the ranks are on"),
        (lambda settings, rows: settings.update(method="spd"), "rows of method spd"),
        (lambda settings, rows: settings.update(placement="3 ranks, gloo"), "made on 3 ranks, gloo"),
        (
            lambda settings, rows: rows[1].update(prompt_sha256="x"),
            "another prompt for data set 'mt_bench', ",
        ),
        (lambda settings, rows: rows.pop(), "has no row of data set 'mt_bench', question 4"),
        (lambda settings, rows: rows[1].update(error="x"), "failed at data set 'mt_bench', question 4"),
        (lambda settings, rows: settings.clear(), "temperature None"),
    ],
)
def test_other_rows_are_refused_by_name(files, baseline, tmp_path, change, message):
    """Guards against a speed-up over another target, other prompts, settings or hardware."""
    record = json.loads(baseline["cached"].with_suffix(".json").read_text())
    rows = [json.loads(line) for line in baseline["cached"].read_text().splitlines()]
    change(record["settings"], rows)
    (tmp_path / "rows.json").write_text(json.dumps(record))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = ["--max_new_tokens", str(TOKENS), "--baseline_rows", str(tmp_path / "rows.jsonl")]
    with pytest.raises(ValueError, match=message):
        plan_launches(DistributedEvaluation, parse(files, tmp_path, "--spec_head_ckpt", *heads(files, "h2"), *flags))


@pytest.mark.parametrize("missing", ["rows.jsonl", "rows.json"])
def test_rows_without_a_file_or_settings(files, tmp_path, missing):
    """Guards against a traceback where one of the two files was left behind."""
    for name in {"rows.jsonl", "rows.json"} - {missing}:
        (tmp_path / name).write_text("{}")
    flags = ["--spec_head_ckpt", *heads(files, "h2"), "--baseline_rows", str(Path(tmp_path / "rows.jsonl"))]
    with pytest.raises(ValueError, match=r"rows\.json"):
        plan_launches(DistributedEvaluation, parse(files, tmp_path, *flags))
