"""Evaluates a speculation head over a pipeline of ranks, on data sets of prompts: what eval.py does on one device.

    torchrun --standalone --nproc_per_node=5 distributed_inference/eval_mp_pipeline_dataset.py \\
        --spec_head_ckpt speculation_head_final.pt --base_model_path Qwen/Qwen3-4B --rank_gpus 0,1,2,3,4 \\
        --datasets mt_bench gsm8k humaneval --prompts_per_dataset 80

Rows, summaries, plots and tables are eval.py's, in the same folders; the files begin with `mp_pipeline_eval`. The
baseline is the target on the same stages without drafts: one token in the whole pipeline at a time.
"""

from __future__ import annotations

import argparse
import sys
from argparse import BooleanOptionalAction
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import eval as evaluation
from distributed_inference.cycle_profile import Cycle, cycles, write_reports
from distributed_inference.launch import Checked, Lead, RankParser, add_arguments, run_rank
from evaluation_files import MP_PREFIX, RunFiles, baseline_cache, check_writable
from evaluation_metrics import Row, sample_row
from evaluation_plan import Plan, PlannedRun, Planner, baseline_folder
from evaluation_workers import WARMUP_PROMPT, Task, compared, sample_seed
from timeline import stage_row


def build_parser() -> RankParser:
    parser = RankParser(description="Evaluation of a pipeline with a rank a stage; start it with torchrun.")
    data = parser.add_argument_group("data")
    data.add_argument("--data_dir", type=Path, default=Path(__file__).parents[1] / "eval_data", help="data sets")
    data.add_argument("--datasets", nargs="+", help="folders there; unset: the official sets, or else the demo's")
    data.add_argument("--prompts_per_dataset", type=int, help="the first so many prompts of each; unset: all")
    run = parser.add_argument_group("run")
    run.add_argument("--output_dir", type=Path, default=Path("eval_output"), help="folder of raw/ and summary/")
    run.add_argument("--resume", action="store_true", help="go on with the run in the output folder")
    run.add_argument("--baseline", action=BooleanOptionalAction, default=True, help="run the target alone and compare")
    run.add_argument("--force_baseline_recompute", action="store_true", help="run it again though it is cached")
    add_arguments(parser)
    return parser


def evaluation_arguments(args: argparse.Namespace, checked: Checked) -> argparse.Namespace:
    """The arguments of eval.py that say the same; its defaults where this script has no flag."""
    required = ["--base_model_path", args.base_model_path, "--spec_head_ckpt", args.spec_head_ckpt]
    ours = {
        "gpus": ["cpu" if checked.device.type == "cpu" else str(checked.device.index)],
        "spec_head_ckpt": [args.spec_head_ckpt],
        "temperature": [args.temperature],
        "draft_top_k": [args.draft_top_k],
        "num_stages": None if args.num_stages is None else [args.num_stages],
    }
    return argparse.Namespace(**vars(evaluation.build_parser().parse_args(required)) | vars(args) | ours)


class DistributedEvaluation:
    """One head, one setting, all prompts."""

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def prepare(self, checked: Checked) -> None:
        arguments = evaluation_arguments(self.args, checked)
        planner = Planner(arguments)
        for sample in planner.samples:
            checked.check_prompt(sample.prompt_ids)
        settings = planner.target_settings() | {"threads": self.args.threads}
        planned = planner.planned(
            settings, self.args.spec_head_ckpt, self.args.temperature, self.args.draft_top_k, self.args.num_stages, 0
        )
        self.plan = Plan(
            [self._placed(planned, checked, arguments)],
            planner.samples,
            planner.options,
            planner.devices,
            planner.tokenizer,
            planner.note,
        )
        for folder in (self.args.output_dir, baseline_folder(arguments)):
            check_writable(folder)
        self.plan.runs[0].files.rows.check(self.plan.runs[0].settings, resume=self.args.resume)
        self.arguments = arguments

    def _placed(self, planned: PlannedRun, checked: Checked, arguments: argparse.Namespace) -> PlannedRun:
        """A run of eval.py, on the ranks of this one."""
        args, layout = self.args, checked.layout
        split = ";".join(map(str, layout.stage_sizes))
        ranks = {
            "placement": f"{layout.world_size} ranks, {checked.backend}, stages {split}",
            "stage_sizes": layout.stage_sizes,
            "lm_head": layout.lm_head,
            "colocated": layout.colocated,
        }
        decoding = {"verify_lag": args.verify_lag, "verify_drafts": args.verify}
        name = f"{planned.files.name}__mp{layout.world_size}_{args.lm_head}_lag{args.verify_lag}"
        baseline_settings = dict(planned.baseline_settings) | ranks
        return replace(
            planned,
            run=replace(planned.run, stage_sizes=layout.stage_sizes),
            settings=dict(planned.settings) | ranks | decoding,
            files=RunFiles(args.output_dir, name, MP_PREFIX),
            baseline=replace(planned.baseline, stage_sizes=layout.stage_sizes),
            baseline_settings=baseline_settings,
            baseline_rows=baseline_cache(baseline_folder(arguments), baseline_settings),
        )

    def run(self, lead: Lead) -> int:
        print(self.plan.note, flush=True)
        workers = PipelineWorker(lead, keep_trace=self.args.trace is not None)
        decoders = [lead.speculative] + [lead.alone] * self.args.baseline
        lead.warm_up(self.plan.samples[0].prompt_ids[:WARMUP_PROMPT], *decoders)
        failed = evaluation.Evaluation(self.arguments, self.plan, workers).run()
        write_reports(self.args, workers.profile, workers.traces)
        return int(failed > 0)

    def last_words(self) -> None:
        print("[stopped] finished rows are kept: --resume goes on from there", flush=True)


class PipelineWorker:
    """Decodes samples over the pipeline, one after the other, in the place of eval.py's workers."""

    def __init__(self, lead: Lead, *, keep_trace: bool):
        self._lead, self._keep_trace = lead, keep_trace
        self.profile: list[Cycle] = []
        self.traces = {}

    def evaluate(self, tasks: Iterable[Task]) -> Iterator[Row]:
        """The rows of tasks. A fault of a rank ends the run, as no other sample could be decoded after it."""
        return map(self._evaluate, tasks)

    def _evaluate(self, task: Task) -> Row:
        sample, run = task.sample, task.run
        decoder = self._lead.alone if run.spec_head_ckpt is None else self._lead.speculative
        decoder.seed = sample_seed(run.seed, sample)
        generation = decoder.start(sample.prompt_ids, run.max_new_tokens)
        row = sample_row(sample, generation.finish(), run.costs)
        if decoder is self._lead.speculative:
            own_stage = stage_row(0) if self._lead.layout.colocated else None
            self.profile += cycles(generation.timeline, decoder.executor.fills, own_stage)
            if self._keep_trace:
                self.traces[f"{sample.dataset} {sample.question_id}"] = [
                    (span, {}) for span in generation.timeline.spans
                ]
        return compared(row, task, self._lead.alone.executor)


def main() -> NoReturn:
    run_rank(DistributedEvaluation, build_parser())


if __name__ == "__main__":
    main()
