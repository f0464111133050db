"""Evaluates speculation heads and other methods on MT-Bench, GSM8K and HumanEval, beside the target alone.

    python eval.py --spec_head_ckpt speculation_head_final.pt --base_model_path Qwen/Qwen3-4B \\
        --datasets mt_bench gsm8k humaneval --prompts_per_dataset 80

Every combination of head, temperature, draft-tree width and number of stages is one run, with its own rows in raw/ and
its own summary in summary/ (evaluation/files.py). Several GPUs share a run's samples. A killed run goes on with
--resume. What the numbers mean stands in evaluation/metrics.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from baselines.registry import METHODS, add_method_flags
from evaluation.files import RowLog, read_runs, read_summaries
from evaluation.metrics import (
    Key,
    Row,
    head_results,
    is_whole,
    markdown,
    profile_table,
    results_line,
    row_key,
    summarise,
)
from evaluation.plan import PlannedEvaluation, PlannedRun, Planner
from evaluation.plots import plot_summary
from evaluation.prompts import digest_prompts
from evaluation.summary_page import write_summary_page
from evaluation.workers import Task, Workers
from loading.chat_template import add_template_flags
from loading.flags import (
    COUNT,
    add_compile_flag,
    add_dtype_flag,
    add_loading_flags,
    add_quantization_flag,
    add_sampling_flags,
)
from loading.tokenizer import print_unused_settings
from script_utils import (
    Parser,
    Switch,
    atomic_open,
    check_output_file,
    lock_folder,
    quiet_libraries,
    run_record,
    run_script,
    write_json,
)


def build_parser() -> Parser:
    parser = Parser(description="Acceptance, speed-ups and times of decoding methods on data sets of prompts.")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--base_model_path", help="target: a folder or a hub id; unset: the one of the heads' checkpoints"
    )
    model.add_argument("--method", default="spd", choices=list(METHODS), help="how to decode")
    model.add_argument("--spec_head_ckpt", nargs="+", default=[], help="its head checkpoints, files or folders")
    add_dtype_flag(model)
    add_loading_flags(model)
    add_quantization_flag(model)
    add_compile_flag(model)
    data = parser.add_argument_group("data")
    data.add_argument("--data_dir", type=Path, default=Path(__file__).parent / "eval_data", help="data sets")
    data.add_argument("--datasets", nargs="+", help="folders there; unset: the official sets, or else the demo's")
    data.add_argument("--prompts_per_dataset", type=COUNT, help="the first so many prompts of each; unset: all")
    add_template_flags(data)
    decoding = parser.add_argument_group("decoding (* takes several values: one run for every combination)")
    decoding.add_argument("--max_new_tokens", type=int, default=512, help="new tokens at most")
    add_sampling_flags(decoding, nargs="+", temperature="* 0: greedy")
    own = parser.add_argument_group("flags of some methods (* as above)")
    add_method_flags(own, "decoding_flags")
    baseline = parser.add_argument_group("baseline: the target alone")
    baseline.add_argument("--baseline", action=Switch, default=True, help="run it and compare")
    baseline.add_argument("--baseline_cache_dir", type=Path, help="unset: baseline_cache in the output folder")
    baseline.add_argument("--force_baseline_recompute", action="store_true", help="run it again though it is cached")
    run = parser.add_argument_group("run")
    run.add_argument("--output_dir", type=Path, default=Path("eval_output"), help="folder of raw/ and summary/")
    run.add_argument("--gpus", nargs="+", default=["auto"], help="a process each: 0 1 2, or cpu; auto: GPU 0, or cpu")
    run.add_argument("--profile_timing", action=Switch, default=False, help="print where each run's time went")
    run.add_argument("--html", metavar="FILE", help="write a page of all runs of the output folder and their answers")
    run.add_argument("--resume", action="store_true", help="go on with the runs in the output folder")
    return parser


class Progress:
    """A bar over the samples of a run, with running acceptance and speed."""

    def __init__(self, title: str, done: Sequence[Row], total: int):
        self._rows, self._failed = list(done), 0
        pause = 0.1 if sys.stderr.isatty() else 30
        self._bar = tqdm(total=total, initial=len(done), desc=title, unit="prompt", mininterval=pause)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, row: Row) -> None:
        if "error" in row:
            self._failed += 1
            tqdm.write(f"failed: {row['dataset']}, question {row['question_id']}: {row['error']}", file=sys.stderr)
        else:
            self._rows.append(row)
        self._bar.set_postfix_str(self._figures(), refresh=False)
        self._bar.update()

    def _figures(self) -> str:
        sums = {
            name: sum(row[name] for row in self._rows)
            for name in ("n_accepted", "n_verified", "new_tokens", "decode_wall_sec")
        }
        figures = [f"alpha {sums['n_accepted'] / sums['n_verified']:.2f}"] if sums["n_verified"] else []
        if sums["decode_wall_sec"]:
            figures.append(f"{sums['new_tokens'] / sums['decode_wall_sec']:.1f} tokens/s")
        return ", ".join(figures + ([f"{self._failed} failed"] if self._failed else []))


class Evaluation:
    """Runs a plan: for each run the missing baselines, the missing samples, then summary and plots."""

    def __init__(self, args: argparse.Namespace, plan: PlannedEvaluation, workers: Workers):
        self.args, self.plan, self.workers = args, plan, workers
        self.record = run_record(args)
        self._baselines: dict[Path, dict[Key, Row]] = {}  # by file: runs that differ in the head alone share one

    def run(self) -> int:
        """Returns the exit code: 1 when a sample failed, or differs from the baseline where it must not."""
        failed = differing = 0
        for number, planned in enumerate(self.plan.runs, start=1):
            title = f"run {number}/{len(self.plan.runs)}"
            baseline = self.baseline(planned, title) if self.args.baseline else {}
            tasks = [Task(planned.run, sample, baseline.get(sample.key)) for sample in self.plan.samples]
            rows = self.collect(title, planned.files.rows, planned.settings, tasks)
            # A resumed run may have other prompts than the rows in its file: they are the summary's, not the rows'.
            settings = dict(planned.settings) | {"prompts": digest_prompts(self.plan.samples)}
            summary = summarise(rows.values(), settings, planned.run.costs, planned.run.num_devices)
            write_json(planned.files.summary, summary)
            plot_summary(summary, planned.files.plots)
            self.write_overviews(planned)
            print(f"[{title}] {results_line(summary)}\n    {planned.files.summary}")
            if self.args.profile_timing:
                print(f"\n{profile_table(summary['overall'])}\n")
            failed += len(summary["failed"]) + len(summary["baseline_failed"])
            if planned.settings["dtype"] == "float32" and planned.settings.get("verify_drafts", True):
                differing += len(summary["first_differences"])
        print(f"\nTable: {self.plan.runs[0].files.table}")
        if self.args.html:
            runs = read_runs(self.args.output_dir, self.plan.runs[0].files.prefix)
            write_summary_page(self.args.html, self.args.output_dir.resolve().name, runs)
        if failed:
            print(f"{failed} samples failed: their errors are in the rows, --resume tries them again", file=sys.stderr)
        if differing:
            print(f"{differing} answers differ from the baseline in float32: that is a defect", file=sys.stderr)
        return int(failed > 0 or differing > 0)

    def write_overviews(self, planned: PlannedRun) -> None:
        """The table of all runs in the output folder, and the results of this run's head there."""
        summaries = read_summaries(self.args.output_dir, planned.files.prefix)
        with atomic_open(planned.files.table) as file:
            file.write(markdown(summaries))
        write_json(planned.files.results(planned.settings), head_results(summaries, planned.settings))

    def baseline(self, planned: PlannedRun, title: str) -> dict[Key, Row]:
        """The rows of the target alone, from the cache where they are there."""
        log = planned.baseline_rows
        if log.path not in self._baselines:
            if self.args.force_baseline_recompute:
                log.clear()
            tasks = [Task(planned.baseline, sample) for sample in self.plan.samples]
            self._baselines[log.path] = self.collect(f"{title}, baseline", log, planned.baseline_settings, tasks)
        return self._baselines[log.path]

    def collect(self, title: str, log: RowLog, settings: Mapping[str, Any], tasks: Sequence[Task]) -> dict[Key, Row]:
        """The row of every task: from the log where it is whole, else from the workers, appended as it finishes."""
        rows, todo = {}, []
        stored = log.read()
        for task in tasks:
            row = stored.get(task.sample.key)
            if row is not None and is_whole(row, task.sample):
                rows[task.sample.key] = row
            else:
                todo.append(task)
        record = {"settings": dict(settings)} | self.record
        with Progress(title, list(rows.values()), len(tasks)) as progress:
            for row in self.workers.evaluate(todo):
                if "output_ids" in row:
                    row["text"] = self.plan.tokenizer.decode(row["output_ids"], skip_special_tokens=True)
                log.append(row, record)
                rows[row_key(row)] = row
                progress.add(row)
        return rows


@contextmanager
def lock_baselines(args: argparse.Namespace, plan: PlannedEvaluation) -> Iterator[None]:
    """Keep other evaluations, which may share a cache, from the baseline rows that this one will write."""
    logs = {planned.baseline_rows.path: planned.baseline_rows for planned in plan.runs} if args.baseline else {}
    with ExitStack() as locks:
        for log in logs.values():
            stored = log.read()
            whole = (s.key in stored and is_whole(stored[s.key], s) for s in plan.samples)
            if not all(whole) or args.force_baseline_recompute:
                locks.enter_context(log.lock("--baseline_cache_dir"))
        yield


def main(args: argparse.Namespace) -> int:
    """Exit code as `Evaluation.run`."""
    quiet_libraries()
    check_output_file("--html", args.html)
    planner = Planner(args)
    with lock_folder("--output_dir", args.output_dir):
        plan = planner.plan()
        with lock_baselines(planner.args, plan):
            print(plan.note)
            print_unused_settings(planner.args.base_model_path)
            with Workers(plan.options, plan.devices) as workers:
                return Evaluation(planner.args, plan, workers).run()


if __name__ == "__main__":
    run_script(main, build_parser())
