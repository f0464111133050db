"""eval.py as users run it: files, resume, workers, baseline cache, failures and bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import torch

import eval
import pipeline_inference
from baselines.method import split_name
from decoding.metrics import spd_costs
from decoding.sampling import Sampling, Verdict
from eval import build_parser, main
from evaluation import files as evaluation_files
from evaluation import plan as evaluation_plan
from evaluation.metrics import METRICS, summarise
from evaluation.plan import Planner, parse_devices
from evaluation.prompts import Sample
from evaluation.workers import Evaluator, sample_seed
from loading.checkpoint_files import CHECKPOINT_NAME
from pipeline_inference import Decoder
from pipeline_model import Target, load_head, save_head
from script_utils import run_script
from tests.tiny import CHAT_TEMPLATE, hf_greedy, save_target, spd_decoder, tiny_head, tiny_target

TEMPLATE = CHAT_TEMPLATE + "{% if enable_thinking %} w3{% endif %}"
SETS = {"first": ["w5 w17 w3", "w8 w2", "w40 w41 w42 w43"], "second": ["w9", "w22 w5"]}
TIMES = re.compile(r"_sec$|tok_s$|speedup_vs_baseline$")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target with a chat template, heads for two splits of it, and two data sets."""
    folder = tmp_path_factory.mktemp("files")
    save_target(folder / "target", chat_template=TEMPLATE)
    target = Target.load(str(folder / "target"))
    save_head(tiny_head(target, (2, 2)), folder / "head" / CHECKPOINT_NAME)
    save_head(tiny_head(target, (1, 1, 1, 1), trained_num_stages=(2, 4)), folder / "deep.pt")
    for name, prompts in SETS.items():
        (folder / "data" / name).mkdir(parents=True)
        lines = [
            json.dumps({"question_id": index, "category": "chat", "turns": [prompt]})
            for index, prompt in enumerate(prompts)
        ]
        (folder / "data" / name / "question.jsonl").write_text("\n".join(lines))
    return folder


def arguments(files, output, *flags, heads=("head",)):
    """The argument list of a small run; a flag that is repeated in `flags` replaces the one here."""
    paths = [str(files / head) for head in heads]
    base = ["--base_model_path", str(files / "target"), "--spec_head_ckpt", *paths, "--data_dir", str(files / "data")]
    base += ["--datasets", "first", "second", "--max_new_tokens", "8", "--gpus", "cpu", "--output_dir", str(output)]
    return [*base, *flags]


def evaluate(files, output, *flags, **kwargs):
    """Exit code of a run in this process."""
    return main(build_parser().parse_args(arguments(files, output, *flags, **kwargs)))


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(output):
    """The rows of the only run in an output folder, by sample."""
    (path,) = (output / "raw").glob("*__per_sample.jsonl")
    return {(row["dataset"], row["question_id"]): row for row in read_rows(path)}


def without_times(rows):
    return {key: {name: value for name, value in row.items() if not TIMES.search(name)} for key, row in rows.items()}


def summary_of(output):
    (path,) = (output / "summary").glob("*__summary.json")
    return json.loads(path.read_text())


@pytest.fixture
def no_plots(monkeypatch):
    """For tests of many runs: a picture takes longer than all else in them."""
    monkeypatch.setattr(eval, "plot_summary", lambda summary, path: None)


@pytest.fixture
def ticking(monkeypatch):
    """A clock that moves a fixed step a look: equal work takes equal time, in any order and after any interruption."""
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) / 1024)


@pytest.fixture
def decoded(monkeypatch):
    """The prompts of all generations, warm-ups included, with the number of stages that ran them."""
    seen = []
    generate = Decoder.generate

    def record(self, prompt, max_new_tokens):
        seen.append((len(self.executor.stage_sizes), tuple(prompt)))
        return generate(self, prompt, max_new_tokens)

    monkeypatch.setattr(Decoder, "generate", record)
    return seen


# ---------------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------------


def test_files_rows_and_summary_of_a_run(files, tmp_path, capsys):
    """Guards against rows that are not what the decoder did, and a summary that is not the rows'."""
    # Wide: some drafts of a random head are right.
    assert evaluate(files, tmp_path, "--draft_top_k", "6", "--profile_timing") == 0
    name = "pipeline_eval__head__target__n2_W6_T0"
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("[rs]*/*")) == [
        f"raw/{name}__per_sample.jsonl",
        f"raw/{name}__run.json",
        f"summary/{name}__plots.png",
        f"summary/{name}__summary.json",
        "summary/pipeline_eval__head__target__results.json",
        "summary/pipeline_eval__table.md",
    ]
    target = Target.load(str(files / "target"))
    decoder = spd_decoder(target, load_head(files / "head", target), draft_top_k=6)
    rows = rows_of(tmp_path)
    assert len(rows) == 5
    for (dataset, question_id), row in rows.items():
        prompt = [1, *(int(word[1:]) for word in SETS[dataset][question_id].split()), 2]
        result = decoder.generate(prompt, 8)
        assert row["output_ids"] == hf_greedy(target.model, prompt, 8)
        assert row["text"] == " ".join(f"w{token}" for token in row["output_ids"])
        assert (row["new_tokens"], row["decode_loop_steps"]) == (7, result.cycles)
        assert (row["n_accepted"], row["n_verified"]) == (result.n_accepted, result.n_verified)
        assert (row["prompt_tokens"], row["stop_reason"]) == (len(prompt), "length")
        assert row["question"] == SETS[dataset][question_id]
        assert row["equal_to_baseline"] is True
        assert all(row[metric.name] is not None for metric in METRICS)
        assert row["wall_time_sec"] == row["prefill_sec"] + row["decode_wall_sec"]
        assert 0 < row["ideal_decode_wall_sec"] < row["decode_wall_sec"]

    assert sum(row["n_accepted"] for row in rows.values()) > 0
    summary = summary_of(tmp_path)
    assert summary == json.loads(
        json.dumps(summarise(rows.values(), summary["settings"], spd_costs((2, 2), 2), num_devices=3))
    )
    assert summary["overall"]["equal_to_baseline"] == 5
    assert set(summary["datasets"]) == {"first", "second"}
    record = json.loads((tmp_path / "raw" / f"{name}__run.json").read_text())
    rows_settings = {name: value for name, value in summary["settings"].items() if name != "prompts"}
    assert record["settings"] == rows_settings
    assert record["arguments"]["max_new_tokens"] == 8
    assert {"commit", "versions"} <= set(record)
    assert (summary["settings"]["chat_template"], summary["settings"]["dtype"]) == (True, "float32")

    results = json.loads((tmp_path / "summary" / "pipeline_eval__head__target__results.json").read_text())["results"]
    assert [entry["dataset"] for entry in results] == ["first", "second"]
    assert results[1].items() >= (summary["datasets"]["second"] | {"draft_top_k": 6, "temperature": 0.0}).items()

    captured = capsys.readouterr()
    assert captured.out.startswith(
        "data sets: first, second\n[run 1/1] SPD head, n = 2, W = 6, T = 0: 5 prompts, alpha "
    )
    assert "5/5 equal to the baseline" in captured.out
    assert f"{tmp_path}/summary/pipeline_eval__table.md" in captured.out
    assert re.search(r"^\| stage 1 \| [\d.]+ \| [\d.]+ \|$", captured.out, re.M)
    bar = captured.err.splitlines()[-1].split("\r")[-1]
    assert re.search(rf"5/5 .*alpha {summary['overall']['alpha_pooled']:.2f}, [\d.]+ tokens/s", bar)
    table = (tmp_path / "summary" / "pipeline_eval__table.md").read_text()
    assert "| method | overall | first | second |" in table


def user_folder(files, tmp_path, monkeypatch):
    """A folder as users have it, and the working directory: data sets, and a head that says where its target is."""
    monkeypatch.chdir(tmp_path)
    for name in ("mt_bench", "gsm8k"):
        shutil.copytree(files / "data" / "second", tmp_path / "eval_data" / name)
    target = tiny_target("llama")
    save_head(tiny_head(target, (2, 2), base_model_path=str(files / "target")), "H.pt")


COMMAND = (
    "--spec_head_ckpt H.pt --data_dir eval_data --output_dir O --gpus 0,1,2,3 --max_new_tokens 512 --temperature 0.0 "
    "--draft_top_k 4 --baseline --baseline_cache_dir C"
)


def test_the_papers_command_line_is_planned(files, tmp_path, monkeypatch):
    """Guards against a command line of the paper's users that needs one flag more here: the target, above all."""
    user_folder(files, tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    command = COMMAND.replace("512", "200")  # the tiny target has 256 positions
    planner = Planner(build_parser().parse_args(command.split()))
    plan = planner.plan()
    assert plan.devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert (plan.options.path, plan.options.dtype) == (str(files / "target"), torch.bfloat16)
    assert planner.args.base_model_path == str(files / "target")
    (planned,) = plan.runs
    assert (planned.run.stage_sizes, planned.run.draft_top_k, planned.run.max_new_tokens) == ((2, 2), 4, 200)
    assert planned.run.sampling.greedy
    assert planned.files.summary == Path("O/summary/pipeline_eval__H__target__n2_W4_T0__summary.json")
    assert planned.baseline_rows.path.parent == Path("C")
    assert [sample.dataset for sample in plan.samples] == ["mt_bench", "mt_bench", "gsm8k", "gsm8k"]
    assert [path.name for path in tmp_path.iterdir()] == ["eval_data", "H.pt"]


def test_the_papers_command_line_runs(files, tmp_path, monkeypatch):
    """Guards against a target taken from the checkpoint in the plan alone, and missing in the run or its record."""
    user_folder(files, tmp_path, monkeypatch)
    command = COMMAND.replace("0,1,2,3", "cpu").replace("512", "6")
    assert main(build_parser().parse_args(command.split())) == 0
    assert summary_of(Path("O"))["overall"]["equal_to_baseline"] == 4
    assert len(list(Path("C").glob("baseline__target__T0__*.jsonl"))) == 1
    (record,) = Path("O/raw").glob("*__run.json")
    assert json.loads(record.read_text())["arguments"]["base_model_path"] == str(files / "target")


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        ([""], "'0.pt': the head's checkpoint does not name its target: give --base_model_path"),
        (["/gone/model"], "'0.pt': the head was trained on '/gone/model', a folder that is not on this machine"),
        (["a/b", "a/c", "a/b"], "heads of several targets ('0.pt' on 'a/b', '1.pt' on 'a/c'): give --base_model_path"),
        ([], "--method spd needs --spec_head_ckpt"),
    ],
)
def test_heads_that_do_not_say_which_target(files, tmp_path, capsys, monkeypatch, targets, complaint):
    """Guards against a guessed target: heads of two targets, and of one that is not here, are refused by name."""
    monkeypatch.chdir(tmp_path)
    for index, target in enumerate(targets):
        save_head(tiny_head(tiny_target("llama"), (2, 2), base_model_path=target), f"{index}.pt")
    heads = [f"{index}.pt" for index in range(len(targets))]
    argv = ["eval.py", "--gpus", "cpu", *(["--spec_head_ckpt", *heads] if heads else [])]
    assert complaint in error_line(argv, capsys, monkeypatch)
    alone = ["eval.py", "--method", "autoregressive"]
    assert "--base_model_path is missing: without a head" in error_line(alone, capsys, monkeypatch)


def test_every_combination_is_a_run(files, tmp_path, decoded, no_plots):
    """Guards against combinations that are left out, share a file, or run the baseline once more each."""
    flags = ["--temperature", "0", "0.7", "--draft_top_k", "1", "3", "1", "--prompts_per_dataset", "1"]
    assert evaluate(files, tmp_path, *flags, "--num_stages", "2", heads=["head"]) == 0
    assert evaluate(files, tmp_path, "--num_stages", "2", "4", "--prompts_per_dataset", "1", heads=["deep.pt"]) == 0
    names = [path.name.split("__")[1::2] for path in (tmp_path / "summary").glob("*__summary.json")]
    assert sorted(names) == [
        ["deep", "n2_W1_T0"],
        ["deep", "n4_W1_T0"],
        ["head", "n2_W1_T0"],
        ["head", "n2_W1_T0.7"],
        ["head", "n2_W3_T0"],
        ["head", "n2_W3_T0.7"],
    ]
    stages = [stages for stages, _ in decoded]
    # Each run warms up once; the baseline ran once a temperature, and not at all in the second evaluation.
    assert (stages.count(1), stages.count(2), stages.count(4)) == (2 * 3, 5 * 3, 3)
    table = (tmp_path / "summary" / "pipeline_eval__table.md").read_text()
    assert len(re.findall(r"^\| SPD (?:head|deep), n = [24], W = [13], T = 0(?:\.7)? \| [\d.]+x /", table, re.M)) == 6


def test_flags_reach_the_decoder(files, tmp_path, monkeypatch):
    """Guards against a flag that is recorded, but does not change what is run."""
    seen = []
    generate = Decoder.generate

    def record(self, prompt, max_new_tokens):
        seen.append((self, max_new_tokens, self.seed))
        return generate(self, prompt, max_new_tokens)

    monkeypatch.setattr(Decoder, "generate", record)
    flags = ["--temperature", "0.5", "--top_k", "7", "--top_p", "0.9", "--no-use_deepest", "--dtype", "bfloat16"]
    assert (
        evaluate(files, tmp_path, *flags, "--seed", "3", "--max_new_tokens", "5", "--attn_implementation", "eager") == 0
    )
    assert {decoder.sampling for decoder, _, _ in seen} == {Sampling(0.5, 7, 0.9)}
    assert max(limit for _, limit, _ in seen) == 5
    samples = [Sample(name, index, "", ()) for name, prompts in SETS.items() for index in range(len(prompts))]
    seeds = Counter(seed for _, _, seed in seen)
    assert all(seeds[sample_seed(3, sample)] >= 2 for sample in samples)  # the baseline and the pipeline
    decoder = seen[-1][0]
    assert decoder.drafter.use_deepest is False
    assert decoder.executor.target.dtype == torch.bfloat16
    assert decoder.executor.target.needs_float_mask
    assert (tmp_path / "summary" / "pipeline_eval__head__target__n2_W1_T0.5_no-use_deepest__summary.json").exists()


def test_without_a_baseline(files, tmp_path, decoded, no_plots):
    """Guards against a baseline that runs though it was turned off, and speed-ups over nothing."""
    assert evaluate(files, tmp_path, "--no-baseline") == 0
    assert {stages for stages, _ in decoded} == {2}
    assert not (tmp_path / "baseline_cache").exists()
    overall = summary_of(tmp_path)["overall"]
    assert (overall["compared_with_baseline"], overall["speedup_vs_baseline_pooled"]) == (0, None)


def test_samples_draw_the_same_in_any_company(files, tmp_path, no_plots):
    """Guards against random numbers that depend on which samples came before."""
    flags = ["--temperature", "1", "--no-baseline"]
    assert evaluate(files, tmp_path / "both", *flags) == 0
    assert evaluate(files, tmp_path / "one", *flags, "--datasets", "second") == 0
    assert evaluate(files, tmp_path / "seed", *flags, "--seed", "1") == 0
    both, one, other = (without_times(rows_of(tmp_path / name)) for name in ("both", "one", "seed"))
    assert one == {key: row for key, row in both.items() if key[0] == "second"}
    assert all(both[key]["output_ids"] != other[key]["output_ids"] for key in both)


def test_sampled_trees_are_compared(files, tmp_path, no_plots):
    """Guards against a tree that draws other tokens than the target alone with the same seed, unnoticed."""
    assert evaluate(files, tmp_path, "--temperature", "1", "--draft_top_k", "3") == 0
    rows = rows_of(tmp_path)
    assert {row["equal_to_baseline"] for row in rows.values()} == {True}
    greedy = hf_greedy(Target.load(str(files / "target")).model, [1, 9, 2], 8)
    assert rows["second", 0]["output_ids"] != greedy
    assert evaluate(files, tmp_path / "chain", "--temperature", "1") == 0
    assert {row["equal_to_baseline"] for row in rows_of(tmp_path / "chain").values()} == {None}


def test_sample_seeds_differ():
    """Guards against samples, or seeds, that draw the same numbers; and seeds that no generator takes."""
    samples = [Sample(dataset, index, "", (1,)) for dataset in ("a", "b") for index in range(20)]
    seeds = {sample_seed(seed, sample) for seed in (0, 1, -5) for sample in samples}
    assert len(seeds) == 120
    for seed in seeds:
        torch.Generator().manual_seed(seed)


def test_differences_from_the_baseline_are_listed(files, tmp_path, monkeypatch, capsys):
    """Guards against a broken verification that the evaluation does not notice."""
    monkeypatch.setattr(
        pipeline_inference,
        "verify",
        lambda logits, candidates, *_: Verdict(candidates[0], 0) if candidates else Verdict(int(logits.argmax()), None),
    )
    assert evaluate(files, tmp_path) == 1  # in float32 a difference is a defect
    summary, rows = summary_of(tmp_path), rows_of(tmp_path)
    assert summary["overall"]["equal_to_baseline"] < summary["overall"]["compared_with_baseline"] == 5
    assert len(summary["first_differences"]) == 5 - summary["overall"]["equal_to_baseline"]
    difference = summary["first_differences"][0]
    row = rows[difference["dataset"], difference["question_id"]]
    target = tiny_target("llama")
    prompt = [1, *(int(word[1:]) for word in SETS[row["dataset"]][row["question_id"]].split()), 2]
    right, at = hf_greedy(target.model, prompt, 8), difference["position"]
    assert row["output_ids"][:at] == right[:at]
    assert (difference["token"], difference["baseline_token"]) == (row["output_ids"][at], right[at])
    logits = target.model(torch.tensor([prompt + right[:at]])).logits[0, -1]
    assert difference["logit_gap"] == pytest.approx(float(logits[right[at]] - logits[row["output_ids"][at]]), abs=1e-3)
    captured = capsys.readouterr()
    assert "0/5 equal to the baseline" in captured.out
    assert "5 answers differ from the baseline in float32: that is a defect\n" in captured.err
    assert evaluate(files, tmp_path / "rounded", "--dtype", "bf16") == 0  # there rounding can do that


# ---------------------------------------------------------------------------------------------------------------------
# Kill, resume, failures
# ---------------------------------------------------------------------------------------------------------------------


def test_resume_after_a_kill_at_every_sample_gives_the_same_files(
    files, tmp_path, monkeypatch, ticking, decoded, no_plots
):
    """Guards against samples that are lost, run twice or counted twice, and rows of two runs that do not fit."""
    assert evaluate(files, tmp_path / "whole") == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole" / "summary").iterdir()}
    evaluate_task = Evaluator.evaluate

    for killed_at in range(10):  # five samples of the baseline, five of the pipeline
        calls = count()

        def dies(self, task, calls=calls, killed_at=killed_at):
            if next(calls) == killed_at:
                raise KeyboardInterrupt
            return evaluate_task(self, task)

        output = tmp_path / f"killed_{killed_at}"
        monkeypatch.setattr(Evaluator, "evaluate", dies)
        with pytest.raises(KeyboardInterrupt):
            evaluate(files, output)
        monkeypatch.setattr(Evaluator, "evaluate", evaluate_task)
        for log in output.glob("*/*.jsonl"):  # the kill came while a row was being written
            log.write_bytes(log.read_bytes() + b'{"dataset": "first", "quest')
        decoded.clear()
        assert evaluate(files, output, "--resume") == 0
        missing = 10 - killed_at
        assert len(decoded) == missing + (2 if killed_at < 5 else 1)  # and a warm-up for each method that ran
        assert {path.name: path.read_bytes() for path in (output / "summary").iterdir()} == expected
        assert len(rows_of(output)) == len(read_rows(next((output / "raw").glob("*.jsonl")))) == 5

    decoded.clear()
    assert evaluate(files, output, "--resume") == 0  # nothing is left to do
    assert decoded == []
    assert {path.name: path.read_bytes() for path in (output / "summary").iterdir()} == expected


def processes_below(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_two_processes_give_the_rows_of_one_and_a_kill_leaves_none_behind(files, tmp_path):
    """Guards against rows that depend on the worker, workers that outlive a killed run, and rows lost by SIGKILL."""
    assert evaluate(files, tmp_path / "one") == 0
    expected = without_times(rows_of(tmp_path / "one"))
    flags = ["--gpus", "cpu,cpu", "--baseline_cache_dir", str(tmp_path / "one" / "baseline_cache")]
    command = [sys.executable, eval.__file__, *arguments(files, tmp_path / "two", *flags)]
    with subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        log = tmp_path / "two" / "raw" / "pipeline_eval__head__target__n2_W1_T0__per_sample.jsonl"
        wait_until(lambda: process.poll() is not None or (log.exists() and log.read_bytes().count(b"\n") >= 3))
        below = processes_below(process.pid)
        process.send_signal(signal.SIGKILL)
    assert len(below) >= 2 or process.returncode == 0  # it may have been faster than this test
    wait_until(lambda: not any(map(is_running, below)))
    kept = without_times(rows_of(tmp_path / "two"))
    assert len(kept) >= 3
    assert kept.items() <= expected.items()
    assert evaluate(files, tmp_path / "two", *flags, "--gpus", "cpu", "--resume") == 0
    assert without_times(rows_of(tmp_path / "two")) == expected


def test_a_worker_that_dies_is_reported(files, tmp_path, monkeypatch, capsys):
    """Guards against a run that waits for a dead worker forever."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = tmp_path / "output"
    message = refusal(files, output, capsys, monkeypatch, "--gpus", "cpu", "cpu")
    assert "the worker process on cpu died (out of memory?): its finished rows are kept, --resume goes on" in message
    assert not output.exists()


def fails_on(monkeypatch, broken, stages):
    """Generations with this many stages fail on a prompt."""
    generate = Decoder.generate

    def sometimes(self, prompt, max_new_tokens):
        if len(self.executor.stage_sizes) == stages and tuple(prompt) == broken:
            raise RuntimeError("CUDA out of memory\nTried to allocate")
        return generate(self, prompt, max_new_tokens)

    monkeypatch.setattr(Decoder, "generate", sometimes)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_failed_sample_is_recorded_and_tried_again(files, tmp_path, monkeypatch, capsys, ticking, stages, no_plots):
    """Guards against one bad prompt that ends a long run, exit code 0 after it, or an error that stays for good."""
    assert evaluate(files, tmp_path / "whole") == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        fails_on(patch, (1, 8, 2, 2), stages)
        assert evaluate(files, tmp_path / "failing") == 1
    captured = capsys.readouterr()
    assert "failed: first, question 1: RuntimeError: CUDA out of memory\n" in captured.err
    assert captured.err.endswith("1 samples failed: their errors are in the rows, --resume tries them again\n")
    summary = summary_of(tmp_path / "failing")
    entry = {"dataset": "first", "question_id": 1, "error": "RuntimeError: CUDA out of memory"}
    assert summary["baseline_failed" if stages == 1 else "failed"] == [entry]
    assert summary["failed" if stages == 1 else "baseline_failed"] == []
    assert summary["samples"] == (5 if stages == 1 else 4)
    assert summary["overall"]["compared_with_baseline"] == 4
    logs = (tmp_path / "failing").glob("*/*.jsonl")
    assert any("in sometimes" in row.get("traceback", "") for log in logs for row in read_rows(log))
    assert evaluate(files, tmp_path / "failing", "--resume") == 0
    assert summary_of(tmp_path / "failing") == summary_of(tmp_path / "whole")


def test_resume_with_other_settings_is_refused(files, tmp_path, capsys, monkeypatch, no_plots):
    """Guards against rows of two settings in one file."""
    shutil.copytree(files, tmp_path / "files")
    files, output = tmp_path / "files", tmp_path / "output"
    assert evaluate(files, output) == 0
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    message = refusal(files, output, capsys, monkeypatch)
    assert "__per_sample.jsonl' is there already: go on with --resume, or choose another --output_dir" in message
    for flags, complaint in [
        (["--max_new_tokens", "9"], "has max_new_tokens 8, this run 9"),
        (["--seed", "1"], "has seed 0, this run 1"),
        (["--dtype", "bfloat16"], "has dtype float32, this run bfloat16"),
        (["--no_chat_template"], "has chat_template True, this run False"),
        (["--no-baseline"], "has baseline True, this run False"),
    ]:
        message = refusal(files, output, capsys, monkeypatch, "--resume", *flags)
        assert complaint in message
        assert message.endswith("resume with the same settings, or choose another --output_dir\n")
    save_head(tiny_head(tiny_target("llama"), (2, 2), num_spec_layers=1), files / "head" / CHECKPOINT_NAME)
    assert "has head_sha256 " in refusal(files, output, capsys, monkeypatch, "--resume")
    save_target(files / "target", seed=1)
    assert "has target_fingerprint " in refusal(files, output, capsys, monkeypatch, "--resume")
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_resume_with_other_prompts_runs_what_is_new(files, tmp_path, decoded, ticking, no_plots):
    """Guards against a run that has to begin again for more prompts, and against rows of prompts that have changed."""
    shutil.copytree(files, tmp_path / "files")
    files, output, alone = tmp_path / "files", tmp_path / "output", ["--no-baseline", "--resume"]

    def new_prompts(*flags):
        """How many prompts a resumed run decodes, without the one that warms it up."""
        decoded.clear()
        assert evaluate(files, output, *alone, *flags) == 0
        return max(0, len(decoded) - 1)

    assert new_prompts("--prompts_per_dataset", "1", "--datasets", "first") == 1
    assert new_prompts("--prompts_per_dataset", "2") == 3
    assert new_prompts() == 1
    assert evaluate(files, tmp_path / "whole", "--no-baseline") == 0
    assert summary_of(output) == summary_of(tmp_path / "whole")
    assert new_prompts("--prompts_per_dataset", "1") == 0
    assert summary_of(output)["overall"]["samples"] == 2

    question = files / "data" / "first" / "question.jsonl"
    question.write_text(question.read_text().replace("w17", "w18"))
    assert new_prompts() == 1
    evaluate(files, tmp_path / "changed", "--no-baseline")
    assert summary_of(output) == summary_of(tmp_path / "changed")


def test_resume_needs_the_settings_file_and_whole_rows(files, tmp_path, capsys, monkeypatch):
    """Guards against resuming on trust, and against skipping a damaged line in the middle."""
    assert evaluate(files, tmp_path) == 0
    (log,) = (tmp_path / "raw").glob("*.jsonl")
    (record,) = (tmp_path / "raw").glob("*.json")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + b'{"dataset": 3\n' + lines[2])
    assert "line 2 is no row" in refusal(files, tmp_path, capsys, monkeypatch, "--resume")
    log.write_bytes(lines[0] + b'{"dataset": "first", "question_id": 9}\n')
    assert "line 2 is no row" in refusal(files, tmp_path, capsys, monkeypatch, "--resume")
    log.write_bytes(b"".join(lines))
    (baseline,) = (tmp_path / "baseline_cache").glob("*.jsonl")
    rows = baseline.read_bytes()
    baseline.write_bytes(b"x" + rows)
    monkeypatch.setattr(Evaluator, "__init__", lambda *_: pytest.fail("the target was loaded"))
    assert "baseline__target__T0__" in refusal(files, tmp_path, capsys, monkeypatch, "--resume")
    baseline.write_bytes(rows)
    (summary,) = (tmp_path / "summary").glob("*__summary.json")
    summary.write_text("{")
    assert "is no summary of an evaluation" in refusal(files, tmp_path, capsys, monkeypatch, "--resume")
    for damaged in ("[]", '{"settings": 3}'):
        record.write_text(damaged)
        assert "its settings, " in refusal(files, tmp_path, capsys, monkeypatch, "--resume")
    record.unlink()
    assert "its settings, " in refusal(files, tmp_path, capsys, monkeypatch, "--resume")


# ---------------------------------------------------------------------------------------------------------------------
# Baseline cache
# ---------------------------------------------------------------------------------------------------------------------


def test_what_changes_an_answer_never_shares_a_baseline(files, tmp_path, monkeypatch):
    """Guards against a baseline of other prompts or settings: chat template and thinking on and off above all."""
    shutil.copytree(files, tmp_path / "files")
    files, seen = tmp_path / "files", set()

    def is_new(*flags, heads=("head",)):
        """Whether this evaluation would look for its baseline where none before it has."""
        args = build_parser().parse_args(arguments(files, tmp_path / "output", *flags, heads=heads))
        (planned,) = Planner(args).plan().runs
        path = planned.baseline_rows.path
        known = path in seen
        seen.add(path)
        return not known

    assert is_new()
    assert not is_new()
    assert not is_new("--draft_top_k", "2")  # the baseline has no tree
    assert not is_new(heads=["deep.pt"])
    assert not is_new("--datasets", "second")  # rows know their prompt
    for flags in [
        ["--no_chat_template"],
        ["--enable_thinking"],
        ["--temperature", "0.5"],
        ["--temperature", "0.25"],
        ["--temperature", "0.5", "--seed", "1"],
        ["--temperature", "0.5", "--top_k", "5"],
        ["--temperature", "0.5", "--top_p", "0.5"],
        ["--max_new_tokens", "4"],
        ["--dtype", "bfloat16"],
        ["--attn_implementation", "eager"],
    ]:
        assert is_new(*flags), flags
        assert not is_new(*flags), flags
    config = files / "target" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 60}))
    assert is_new()
    save_target(files / "target", seed=1)  # other weights under the same name
    assert is_new()
    monkeypatch.setattr(evaluation_plan, "device_name", lambda *_: "another device")
    assert is_new()
    monkeypatch.setattr(evaluation_files, "DECODING_CODE", ("timeline.py",))
    assert is_new()


def test_a_fingerprint_sees_code_and_not_words():
    """Guards against rows that a comment makes useless, and rows of other code under the same fingerprint."""
    code = {
        "first": '"""About it."""\n\n\ndef f(x):\n    """Twice x."""\n    return 2 * x  # doubled\n',
        "words": '"""Else."""\ndef f(x):\n    """2x."""\n\n    return (2 * x)\n',
        "number": "def f(x):\n    return 3 * x\n",
    }
    marks = {name: evaluation_files.statements(text) for name, text in code.items()}
    assert marks["first"] == marks["words"] != marks["number"]


def test_thinking_and_template_change_the_prompt(files, tmp_path, decoded, no_plots):
    """Guards against caches that differ while the prompts are the same."""
    expected = {(): [1, 9, 2], ("--enable_thinking",): [1, 9, 2, 3], ("--no_chat_template",): [9]}
    for index, (flags, prompt) in enumerate(expected.items()):
        decoded.clear()
        few = ["--datasets", "second", "--prompts_per_dataset", "1"]
        assert evaluate(files, tmp_path / str(index), *few, *flags) == 0
        assert {ids for _, ids in decoded} == {tuple(prompt)}


def test_cached_baselines_are_used_and_can_be_forced(files, tmp_path, decoded, no_plots):
    """Guards against a cache that is never read, rows of edited prompts, and --force that does nothing."""
    shutil.copytree(files, tmp_path / "files")
    files, cache = tmp_path / "files", tmp_path / "cache"
    flags = ["--baseline_cache_dir", str(cache)]

    def baseline_runs(output, *more):
        decoded.clear()
        assert evaluate(files, tmp_path / output, *flags, *more) == 0
        return max(0, [stages for stages, _ in decoded].count(1) - 1)  # less the warm-up

    assert baseline_runs("a") == 5
    assert baseline_runs("b") == 0
    assert baseline_runs("c", "--force_baseline_recompute") == 5
    (log,) = cache.glob("*.jsonl")
    assert len(read_rows(log)) == 5
    log.write_bytes(log.read_bytes()[:-20])  # a killed writer
    assert baseline_runs("d") == 1
    question = files / "data" / "first" / "question.jsonl"
    question.write_text(question.read_text().replace("w17", "w18"))
    assert baseline_runs("e") == 1
    rows = rows_of(tmp_path / "e")
    assert all(row["equal_to_baseline"] for row in rows.values())


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


def refusal(files, output, capsys, monkeypatch, *flags, **kwargs):
    """`error_line` of a small run."""
    return error_line(["eval.py", *arguments(files, output, *flags, **kwargs)], capsys, monkeypatch)


def error_line(argv, capsys, monkeypatch):
    """The one line on standard error of a run that must end with exit code 2, progress bars aside."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as caught:
        run_script(main, build_parser())
    assert caught.value.code == 2
    written = capsys.readouterr().err.splitlines(keepends=True)
    lines = [line for line in written if line.strip() and "prompt/s" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("eval.py: error: ")
    return lines[0]


BAD_FLAGS = [
    (["--datasets", "third"], "no data set 'third'"),
    (["--datasets", "broken"], "broken/question.jsonl', line 2: "),
    (["--datasets", "empty"], "data set 'empty' is empty"),
    (["--data_dir", "/nowhere"], "no data set 'first'"),
    (
        ["--max_new_tokens", "252"],
        "(question_id 2): --max_new_tokens is 252: with a prompt of 6 tokens, that many pass the target's limit",
    ),
    (["--max_new_tokens", "0"], "max_new_tokens is 0"),
    (["--temperature", "0", "-1"], "temperature is -1.0"),
    (["--top_k", "-1"], "top_k is -1"),
    (["--top_p", "0"], "top_p is 0.0"),
    (["--draft_top_k", "1", "0"], "draft_top_k is 0"),
    (["--draft_top_k", "2", "--attn_implementation", "flash_attention_2"], "use --attn_implementation sdpa"),
    (["--num_stages", "3"], "head': --num_stages is 3, but the head was trained for 2"),
    (["--gpus", "99"], "--gpus has 99, but this machine has"),
    (["--gpus", "first"], "--gpus has 'first': give GPU ids (0 1 2), cpu, or auto alone"),
    (["--gpus", "-1"], "--gpus has '-1'"),
    (["--gpus", ","], "--gpus lists nothing"),
    (["--gpus", ""], "argument --gpus: the value is empty"),
    (["--datasets", "half"], "half/question.jsonl', line 1: 'w1 \\ud83d' has half a character"),
    (["--datasets", "deep"], "deep/question.jsonl', line 1: maximum recursion depth"),
    (["--enable_thinking", "--no_chat_template"], "cannot go with --no_chat_template"),
    (["--force_baseline_recompute", "--resume"], "would mix two baselines"),
    (["--force_baseline_recompute", "--no-baseline"], "leaves nothing to do"),
    (["--base_model_path", "/nowhere"], "no target model at '/nowhere'"),
    (["--spec_head_ckpt", "/nowhere"], "no head checkpoint at '/nowhere'"),
    (["--dtype", "float8"], "float8"),
]


@pytest.fixture(scope="module")
def bad_files(files, tmp_path_factory):
    """The files, and data sets that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("bad") / "files"
    shutil.copytree(files, folder)
    good = (folder / "data" / "first" / "question.jsonl").read_text().splitlines()
    for name, lines in {"broken": [good[0], good[1][:-5]], "empty": []}.items():
        (folder / "data" / name).mkdir()
        (folder / "data" / name / "question.jsonl").write_text("\n".join(lines))
    for name, line in {"half": '{"turns": ["w1 \\ud83d"]}', "deep": "[" * 100_000}.items():
        (folder / "data" / name).mkdir()
        (folder / "data" / name / "question.jsonl").write_text(line)
    save_head(tiny_head(tiny_target("llama", vocab_size=67), (2, 2)), folder / "vocabulary.pt")
    payload = torch.load(folder / "head" / CHECKPOINT_NAME, weights_only=True)
    payload["state_dict"].pop("lm_head.weight")
    torch.save(payload, folder / "lacking.pt")
    return folder


@pytest.mark.parametrize(("flags", "complaint"), BAD_FLAGS, ids=[" ".join(flags) for flags, _ in BAD_FLAGS])
def test_bad_input_is_refused_in_one_line(bad_files, tmp_path, capsys, monkeypatch, flags, complaint):
    """Guards against tracebacks, exit codes 0 and 1, and files of a run that did not happen."""
    assert complaint in refusal(bad_files, tmp_path / "new" / "output", capsys, monkeypatch, *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("heads", "complaint"),
    [
        (["vocabulary.pt"], "vocab_size 67"),
        (["lacking.pt"], "the checkpoint lacks weight lm_head.weight"),
        (["head", f"head/{CHECKPOINT_NAME}"], "twice"),
        (["deep.pt", "target/model.safetensors"], "is not a head checkpoint"),
    ],
)
def test_bad_heads_are_refused_before_anything_runs(
    bad_files, tmp_path, capsys, monkeypatch, decoded, heads, complaint
):
    """Guards against an hour of baseline before a head that does not fit is noticed."""
    assert complaint in refusal(bad_files, tmp_path / "output", capsys, monkeypatch, heads=heads)
    assert decoded == []
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written_is_refused(files, tmp_path, capsys, monkeypatch, decoded):
    """Guards against losing a run at its first row."""
    (tmp_path / "file").write_text("")
    assert "is no folder" in refusal(files, tmp_path / "file" / "output", capsys, monkeypatch)
    for name in ("raw", "summary"):
        output = tmp_path.with_name(f"{tmp_path.name}_{name}")
        output.mkdir()
        (output / name).write_text("")
        assert f"{output}/{name}" in refusal(files, output, capsys, monkeypatch)
    flags = ["--baseline_cache_dir", str(tmp_path / "file")]
    assert "is no folder" in refusal(files, tmp_path / "output", capsys, monkeypatch, *flags)
    assert decoded == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_one_line(files, tmp_path, capsys, monkeypatch, no_plots):
    """Guards against a traceback hours into a run, and against rows lost that were there."""

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = refusal(files, tmp_path, capsys, patch)
    assert "cannot be written (No space left on device): --resume goes on from here" in message
    assert evaluate(files, tmp_path, "--resume") == 0


def test_devices(monkeypatch):
    """Guards against a GPU that is used twice, kinds that are mixed, and a default that needs a GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A" if index < 2 else "B")
    assert parse_devices(["0", "1"]) == parse_devices(["0,1"]) == parse_devices(["0, 1"]) == ["cuda:0", "cuda:1"]
    assert parse_devices(["cpu", "cpu"]) == ["cpu", "cpu"]
    for available, expected in [(True, ["cuda:0"]), (False, ["cpu"])]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert parse_devices(["auto"]) == expected
    for names, complaint in [
        (["3"], "--gpus has 3, but this machine has 3 GPUs"),
        (["1", "1"], "a GPU named twice"),
        (["0", "2"], "--gpus lists A, B"),
        (["0", "cpu"], "--gpus lists A, cpu"),
        (["auto", "0"], "--gpus has 'auto'"),
    ]:
        with pytest.raises(ValueError, match=re.escape(complaint)):
            parse_devices(names)


def test_names_too_long_for_a_file_are_refused(files, tmp_path, capsys, monkeypatch):
    """Guards against a run that ends at its first row, as a head's long name makes file names that no disk takes."""
    long = f"{'a' * 240}.pt"
    shutil.copy(files / "deep.pt", tmp_path / long)
    message = refusal(files, tmp_path / "output", capsys, monkeypatch, heads=[tmp_path / long])
    assert "__per_sample.jsonl' would pass 240 bytes: give the checkpoint or the target's folder a shorter" in message


def test_uneven_splits_are_named():
    """Guards against two splits that look the same in the table."""
    assert split_name((5, 5)) == "n = 2"
    assert split_name((1, 2, 1)) == "n = 3 (1;2;1)"


def test_heads_with_the_same_file_name_are_told_apart():
    """Guards against two runs in one file: released checkpoints are all named alike."""
    paths = ["runs/a/speculation_head_final.pt", "runs/b/speculation_head_final.pt", "other/a.pt"]
    assert evaluation_files.checkpoint_labels(paths[:2]) == {paths[0]: "a", paths[1]: "b"}
    labels = evaluation_files.checkpoint_labels(paths)
    assert list(labels.values()) == ["runs-a", "runs-b", "other-a"]
    with pytest.raises(ValueError, match="differ in nothing that a file name can hold"):
        evaluation_files.checkpoint_labels(["runs/a.pt", "runs/a.bin"])
