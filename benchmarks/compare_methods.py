"""Every method on the same prompts: trains all drafters alike, evaluates them, writes BENCHMARK_RESULTS.md.

    python benchmarks/compare_methods.py --work_dir runs/compare --data_path conversations.jsonl

Each trained drafter gets the same data, tokens in the same order, optimiser and number of steps. What is finished is
not done again: a run that was stopped goes on with the same command. --report_only rewrites the report.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))

import eval as evaluation
import train
from baselines import train_baseline
from baselines.registry import METHODS
from benchmarks.commands import Command, as_flags, layers_read, run_all
from benchmarks.comparison_report import PLOT, Results, plot, report
from evaluation.files import read_runs
from loading.flags import COUNT, NATURAL, POSITIVE, add_compile_flag
from script_utils import (
    Parser,
    atomic_open,
    check_output_file,
    check_output_folder,
    git_commit,
    quiet_libraries,
    run_script,
)
from training.flags import PRECISIONS


def build_parser() -> Parser:
    parser = Parser(prog="compare_methods.py", description="Train, evaluate and report SPD and its baselines.")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder of heads and rows; a stopped run goes on")
    parser.add_argument("--output", type=Path, default=Path("BENCHMARK_RESULTS.md"), help="the report")
    parser.add_argument("--notes", type=Path, help="Markdown to put after the tables, for what a person has to add")
    parser.add_argument("--report_only", action="store_true", help="neither train nor evaluate")
    target = parser.add_argument_group("target")
    target.add_argument("--base_model_path", default="checkpoints/SmolLM2-135M-Instruct", help="folder or hub id")
    target.add_argument(
        "--draft_vocab_json", default="draft_vocab/sharegpt_smollm2_top_16k.json", help="draft vocabulary of all"
    )
    drafters = parser.add_argument_group("methods")
    drafters.add_argument("--spd_stages", type=int, nargs="*", default=[3, 6, 10], help="n of SPD, a head each")
    drafters.add_argument("--spd_layers", type=COUNT, default=2, help="L_s of SPD; it hides behind a stage")
    drafters.add_argument("--draft_top_k", type=int, nargs="+", default=[1, 4], help="W of SPD")
    drafters.add_argument("--ppsd_stages", type=int, nargs="*", default=[3, 6, 10], help="n of PPSD, a drafter each")
    drafters.add_argument(
        "--recipe",
        default="--rows replay",
        help="SPD a second time, with these flags of train.py; empty: once",
    )
    drafters.add_argument("--num_steps", type=int, nargs="*", default=[3, 7, 15], help="m of EAGLE-3, one drafter")
    drafters.add_argument("--block_size", type=int, nargs="*", default=[4, 8, 16], help="B of DFlash, a drafter each")
    drafters.add_argument("--opd_block_size", type=int, nargs="*", default=[8], help="B of those for Draft-OPD")
    drafters.add_argument("--mask_token", help="of DFlash, as in train_baseline.py; known for SmolLM2, Qwen, Llama 3")
    training = parser.add_argument_group("training, the same for all")
    training.add_argument("--data_path", action="append", required=True, help="as in train.py; repeatable")
    training.add_argument("--max_steps", type=COUNT, default=400, help="optimiser steps")
    training.add_argument("--opd_steps", type=COUNT, default=100, help="steps of Draft-OPD, after the others")
    training.add_argument("--batch_size", type=COUNT, default=4, help="examples per micro-batch")
    training.add_argument("--gradient_accumulation_steps", type=COUNT, default=2, help="micro-batches per step")
    training.add_argument("--max_length", type=COUNT, default=512, help="tokens of an example at most")
    training.add_argument("--optimizer", default="muon", choices=["adamw", "muon"], help="as in train.py")
    training.add_argument("--lr", type=POSITIVE, default=1e-3, help="peak learning rate")
    training.add_argument("--warmup_steps", type=NATURAL, default=50, help="of linear warm-up")
    training.add_argument("--mixed_precision", default="auto", choices=PRECISIONS, help="as in train.py")
    training.add_argument("--save_interval", type=COUNT, default=100, help="steps between checkpoints")
    training.add_argument(
        "--feature_cache", type=Path, help="folder for the target's hidden states: one pass of the target for all"
    )
    prompts = parser.add_argument_group("evaluation, the same for all")
    prompts.add_argument("--data_dir", type=Path, help="folder of data sets; unset: eval_data")
    prompts.add_argument("--datasets", nargs="+", default=["mt_bench", "gsm8k", "humaneval"], help="folders there")
    prompts.add_argument("--prompts_per_dataset", type=COUNT, default=10, help="the first so many of each")
    prompts.add_argument("--max_new_tokens", type=COUNT, default=128, help="new tokens at most")
    prompts.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="a table each")
    prompts.add_argument("--gpus", nargs="+", default=["auto"], help="as in eval.py")
    add_compile_flag(prompts)
    parser.add_argument("--seed", type=NATURAL, default=0, help="of training and evaluation")
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# Training and evaluation: commands that anyone could type
# ---------------------------------------------------------------------------------------------------------------------


def training_commands(args: argparse.Namespace) -> dict[str, Command]:
    """How each drafter is trained, by name."""
    shared = {
        "model_name": args.base_model_path,
        "batch_size": args.batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "max_length": args.max_length,
        "max_length_overflow": "truncate",
        "min_length": 2,
        "optimizer": args.optimizer,
        "weight_decay": 0.01,
        "warmup_steps": args.warmup_steps,
        "mixed_precision": args.mixed_precision,
        "save_interval": args.save_interval,
        "seed": args.seed,
        "draft_vocab_json": args.draft_vocab_json,
        "cache_dir": args.work_dir / "data",
        "resume_from": "auto",
    }
    flags = as_flags(shared)
    flags += [text for path in args.data_path for text in ("--data_path", path)]
    schedule = ["--max_steps", args.max_steps, "--lr", args.lr]
    commands: dict[str, Command] = {}

    def add(name: str, script: str, module: ModuleType, *own: object, schedule: Sequence[object] = schedule) -> None:
        folder = ("--output_dir", args.work_dir / name)
        commands[name] = Command(script, module, [*map(str, (*own, *schedule, *folder)), *flags])

    baseline = ("baselines/train_baseline.py", train_baseline)
    if args.num_steps:
        add("eagle3", *baseline, "--method", "eagle3")
    for n in args.ppsd_stages:
        add(f"ppsd-n{n}", *baseline, "--method", "ppsd", "--num_stages", n)
    mask = () if args.mask_token is None else ("--mask_token", args.mask_token)
    for size in args.block_size:
        add(f"dflash-b{size}", *baseline, "--method", "dflash", "--block_size", size, *mask)
    for n in args.spd_stages:
        own = ("--num_stages", n, "--num_spec_layers", args.spd_layers)
        add(f"spd-n{n}", "train.py", train, *own)
        if args.recipe:
            add(f"spd_replay-n{n}", "train.py", train, *own, *shlex.split(args.recipe))
    if args.feature_cache is not None:
        layers = ",".join(map(str, layers_read(commands.values(), args.base_model_path)))
        for each in commands.values():
            each.flags.extend(["--feature_cache", str(args.feature_cache), "--feature_cache_layers", layers])
    for size in args.opd_block_size:  # half the learning rate, as its authors have it; its texts are new: no cache
        start = (*mask, "--block_size", size, "--opd", "--init_head", args.work_dir / f"dflash-b{size}")
        rest = ("--max_steps", args.opd_steps, "--lr", args.lr / 2)
        add(f"dflash_opd-b{size}", *baseline, "--method", "dflash", *start, schedule=rest)
    return commands


def evaluation_commands(args: argparse.Namespace, drafters: Sequence[str]) -> list[Command]:
    """One evaluation per method; each has its several runs."""
    shared = ["--base_model_path", args.base_model_path, "--datasets", *args.datasets]
    shared += [] if args.data_dir is None else ["--data_dir", str(args.data_dir)]
    shared += ["--prompts_per_dataset", str(args.prompts_per_dataset), "--max_new_tokens", str(args.max_new_tokens)]
    shared += ["--temperature", *map(str, args.temperature), "--seed", str(args.seed), "--gpus", *args.gpus]
    shared += ["--output_dir", str(args.work_dir / "eval"), "--resume"]
    own = {
        "autoregressive": [],
        "prompt_lookup": [],
        "eagle3": ["--num_steps", *map(str, args.num_steps)],
        "dflash": [],
        "ppsd": [],
        "spd": ["--draft_top_k", *map(str, args.draft_top_k)],
    }
    commands = []
    for method, flags in own.items():
        heads = [str(args.work_dir / name) for name in drafters if name.split("-")[0].split("_")[0] == method]
        if heads or METHODS[method].config_class is None:
            heads = ["--spec_head_ckpt", *heads] if heads else []
            compiled = ["--compile"] if args.compile and METHODS[method].compiles else []
            commands.append(Command("eval.py", evaluation, ["--method", method, *heads, *flags, *shared, *compiled]))
    return commands


def read_results(args: argparse.Namespace, trainings: Mapping[str, Command]) -> Results:
    """ValueError when there is nothing to report."""
    runs = read_runs(args.work_dir / "eval")
    if not runs:
        raise ValueError(f"{str(args.work_dir / 'eval')!r} has no summaries: run without --report_only")
    records = {name: args.work_dir / name / "run.json" for name in trainings}
    trained = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in records.items() if path.exists()}
    rows = {summary["settings"]["label"]: files.rows.read() for files, summary in runs}
    return Results([summary for _, summary in runs], trained, rows)


def main(args: argparse.Namespace) -> int:
    """Exit code of the first training or evaluation that fails; 0 with the report written."""
    quiet_libraries()
    if args.notes is not None and not args.notes.is_file():
        raise ValueError(f"--notes {str(args.notes)!r} is no file")
    check_output_file("--output", args.output)
    check_output_folder("--output", (args.output.parent / PLOT).parent)
    check_output_folder("--work_dir", args.work_dir)
    commit = git_commit()  # before anything is written
    trainings = training_commands(args)
    evaluations = evaluation_commands(args, list(trainings))
    if not args.report_only:
        code = run_all(trainings.values(), evaluations)
        if code:
            return code
    results = read_results(args, trainings)
    plot(results, args.output.parent / PLOT)
    training = (
        f"{args.max_steps:,} steps of {args.batch_size * args.gradient_accumulation_steps} examples of at most "
        f"{args.max_length} tokens, {args.optimizer}, learning rate {args.lr:g}"
    )
    notes = "" if args.notes is None else args.notes.read_text(encoding="utf-8")
    with atomic_open(args.output) as file:
        file.write(report(results, commit, training, notes, list(map(str, (*trainings.values(), *evaluations)))))
    print(f"\n{args.output}")
    return 0


if __name__ == "__main__":
    run_script(main, build_parser())
