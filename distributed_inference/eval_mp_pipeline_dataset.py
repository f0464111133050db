"""Evaluates a speculation head over a pipeline of ranks, on data sets of prompts: what eval.py does on one device.

    python distributed_inference/eval_mp_pipeline_dataset.py --spec_head_ckpt s4.pt s8.pt \\
        --rank_gpus 0,1,2,3,4,5,6,7,8 --datasets mt_bench gsm8k humaneval --prompts_per_dataset 80 \\
        --temperature 0 1 --draft_top_k 1 4

It starts its ranks itself, anew for heads with other stages; under torchrun all heads share the ranks that are there.
Rows, summaries, plots and tables are eval.py's, in the same folders; the files begin with `mp_pipeline_eval`. The
baseline is the target on the same stages without drafts, one token in the whole pipeline at a time, or the rows that
eval.py has made of the target on one device (--baseline_rows).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import eval as evaluation
from baselines.method import Run
from distributed_inference.cycle_profile import Cycle, cycles, write_reports
from distributed_inference.launch import Checked, Lead, RankParser, add_arguments
from distributed_inference.one_device_baseline import choose_baseline
from distributed_inference.self_launch import run
from evaluation.files import MP_PREFIX, RunFiles, device_name
from evaluation.metrics import Row, sample_row
from evaluation.plan import PlannedRun, Planner
from evaluation.prompts import Sample
from evaluation.workers import WARMUP_PROMPT, Task, compared, sample_seed
from loading.flags import COUNT
from loading.tokenizer import print_unused_settings
from pipeline_inference import Decoder, Generation
from script_utils import Switch, lock_folder
from timeline import stage_row


def build_parser() -> RankParser:
    parser = RankParser(description="Evaluation of a pipeline with a rank a stage; python or torchrun starts it.")
    data = parser.add_argument_group("data")
    data.add_argument("--data_dir", type=Path, default=Path(__file__).parents[1] / "eval_data", help="data sets")
    data.add_argument("--datasets", nargs="+", help="folders there; unset: the official sets, or else the demo's")
    data.add_argument("--prompts_per_dataset", type=COUNT, help="the first so many prompts of each; unset: all")
    run = parser.add_argument_group("run")
    run.add_argument("--output_dir", type=Path, default=Path("eval_output"), help="folder of raw/ and summary/")
    run.add_argument("--resume", action="store_true", help="go on with the run in the output folder")
    run.add_argument("--baseline", action=Switch, default=True, help="run the target alone and compare")
    run.add_argument("--force_baseline_recompute", action="store_true", help="run it again though it is cached")
    run.add_argument(
        "--baseline_rows",
        nargs="+",
        metavar="FILE",
        help="compare with the target on one device instead: rows of eval.py's baseline, a file a temperature",
    )
    add_arguments(parser, nargs="+")
    parser.set_defaults(max_new_tokens=512)  # as in eval.py
    return parser


def evaluation_arguments(args: argparse.Namespace, checked: Checked) -> argparse.Namespace:
    """The arguments of eval.py that say the same; its defaults where this script has no flag."""
    ours = {
        "gpus": ["cpu" if checked.device.type == "cpu" else str(checked.device.index)],
        "base_model_path": checked.base_model_path,
    }
    return argparse.Namespace(**vars(evaluation.build_parser().parse_args([])) | vars(args) | ours)


class PipelinePlanner(Planner):
    """Plans eval.py's runs on the ranks of this one."""

    def __init__(self, args: argparse.Namespace, checked: Checked):
        self._checked = checked
        super().__init__(args)

    def target_settings(self) -> dict[str, Any]:
        layout, emulation = self._checked.layout, self._checked.emulation
        split = ";".join(map(str, layout.stage_sizes))
        device = device_name(self._checked.device, self.args.threads)
        return super().target_settings() | {
            "device": f"EMULATED devices ({emulation.describe()}) on {device}" if emulation else device,
            "threads": self.args.threads,
            "placement": f"{layout.world_size} ranks, {self._checked.backend}, stages {split}",
            "stage_sizes": layout.stage_sizes,
            "lm_head": layout.lm_head,
            "colocated": layout.colocated,
        }

    def shapes(self, path: str) -> list[dict[str, Any]]:
        return [shape | {"stage_sizes": self._checked.layout.stage_sizes} for shape in super().shapes(path)]

    def planned(self, shared: Mapping[str, Any], *values: Any) -> PlannedRun:
        planned, args, layout = super().planned(shared, *values), self.args, self._checked.layout
        decoding = {"placement": shared["placement"], "verify_lag": args.verify_lag, "verify_drafts": args.verify}
        name = f"{planned.files.name}__mp{layout.world_size}_{args.lm_head}_lag{args.verify_lag}"
        if emulation := self._checked.emulation:
            decoding["label"] = f"{planned.settings['label']}, emulated"
            name += f"_{emulation.file_name}"
        planned = replace(
            planned,
            settings=dict(planned.settings) | decoding,
            files=RunFiles(args.output_dir, name, MP_PREFIX),
            baseline=replace(planned.baseline, stage_sizes=layout.stage_sizes),
        )
        return self._with_given_baseline(planned) if args.baseline_rows else planned

    def _with_given_baseline(self, planned: PlannedRun) -> PlannedRun:
        """The run, compared with --baseline_rows."""
        args, temperature = self.args, planned.run.sampling.temperature
        rows = choose_baseline(args.baseline_rows, temperature, args.temperature)
        rows.check_rows(planned.baseline_settings, self.samples)
        device = rows.settings["device"]
        placement = f"{planned.settings['placement']}, baseline on one device ({device})"
        compared_with = {"placement": placement, "baseline_code_fingerprint": rows.settings.get("code_fingerprint")}
        return replace(planned, settings=dict(planned.settings) | compared_with, baseline_rows=rows)


class DistributedEvaluation:
    """Every combination of head, n, temperature and width, on all prompts."""

    interactive = False

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def prepare(self, checked: Checked) -> None:
        if self.args.baseline_rows and not self.args.baseline:
            raise ValueError("--baseline_rows is a baseline to compare with, --no-baseline asks for none: drop one")
        if self.args.baseline_rows and self.args.force_baseline_recompute:
            raise ValueError("--force_baseline_recompute runs a baseline, --baseline_rows has one: drop one of the two")
        if self.args.baseline_rows and checked.emulation:
            raise ValueError("--baseline_rows has times of a real device, --emulate_stage_ms emulates them: drop one")
        self.arguments = evaluation_arguments(self.args, checked)
        self.plan = PipelinePlanner(self.arguments, checked).plan()

    @contextmanager
    def claim(self) -> Iterator[None]:
        with lock_folder("--output_dir", self.args.output_dir), evaluation.lock_baselines(self.arguments, self.plan):
            yield

    def run(self, lead: Lead) -> int:
        print(self.plan.note, flush=True)
        print_unused_settings(lead.checked.base_model_path)
        labels = {planned.run: planned.settings["label"] for planned in self.plan.runs}
        workers = PipelineWorker(lead, labels, keep_trace=self.args.trace is not None)
        code = evaluation.Evaluation(self.arguments, self.plan, workers).run()
        write_reports(self.args, workers.profiles, workers.traces)
        lead.faithfulness.report()
        return code

    def interrupted(self) -> bool:
        return False

    def last_words(self) -> None:
        print("[stopped] finished rows are kept: --resume goes on from there", flush=True)


class PipelineWorker:
    """Decodes samples over the pipeline, one after the other, in the place of eval.py's workers."""

    def __init__(self, lead: Lead, labels: Mapping[Run, str], *, keep_trace: bool):
        """labels: of the runs with a head, for profiles and traces."""
        self._lead, self._labels, self._keep_trace = lead, labels, keep_trace
        self._run: Run | None = None
        self._decoder: Decoder | None = None
        self.profiles: dict[str, list[Cycle]] = {}
        self.traces = {}

    def evaluate(self, tasks: Iterable[Task]) -> Iterator[Row]:
        """The rows of tasks. A fault of a rank ends the run, as no other sample could be decoded after it."""
        return map(self._evaluate, tasks)

    def _evaluate(self, task: Task) -> Row:
        sample, run = task.sample, task.run
        if run != self._run:
            self._begin(run, sample)
        self._decoder.seed = sample_seed(run.seed, sample)
        generation = self._decoder.start(sample.prompt_ids, run.max_new_tokens)
        row = sample_row(sample, generation.finish(), run.costs)
        self._lead.faithfulness.add(self._decoder, generation)
        if run.spec_head_ckpt is not None:
            self._record(generation, sample)
        return compared(row, task, self._lead.target_executor)

    def _begin(self, run: Run, sample: Sample) -> None:
        """The decoder of a run, warmed up."""
        self._decoder, self._run = None, run  # the old head's memory is free before the new one is loaded
        if run.spec_head_ckpt is None:
            self._decoder = self._lead.alone(run.sampling)
        else:
            self._decoder = self._lead.speculative(run.spec_head_ckpt, run.sampling, run.draft_top_k)
        self._lead.warm_up(sample.prompt_ids[:WARMUP_PROMPT], self._decoder)

    def _record(self, generation: Generation, sample: Sample) -> None:
        label, own_stage = self._labels[self._run], stage_row(0) if self._lead.layout.colocated else None
        found = cycles(generation.timeline, self._decoder.executor.fills, own_stage)
        self.profiles.setdefault(label, []).extend(found)
        if self._keep_trace:
            spans = [(span, {}) for span in generation.timeline.spans]
            self.traces[f"{label}: {sample.dataset} {sample.question_id}"] = spans


def main() -> NoReturn:
    run(DistributedEvaluation, build_parser())


if __name__ == "__main__":
    main()
