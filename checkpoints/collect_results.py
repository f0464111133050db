"""Writes checkpoints/results.json from the summaries of eval.py: what the shipped head reaches.

    python eval.py --base_model_path checkpoints/SmolLM2-135M-Instruct \\
        --spec_head_ckpt checkpoints/SmolLM2-135M-Instruct_s6_l2.pt --datasets mt_bench gsm8k humaneval \\
        --prompts_per_dataset 20 --max_new_tokens 128 --num_stages 2 3 5 6 --output_dir runs/demo_eval
    python checkpoints/collect_results.py --eval_output runs/demo_eval
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from evaluation.files import read_summaries
from script_utils import Parser, check_output_file, run_script, write_json

SETTINGS = (
    "target",
    "head",
    "head_sha256",
    "dtype",
    "compile",
    "max_new_tokens",
    "seed",
    "torch",
    "transformers",
    "code_fingerprint",
)
FIGURES = ("alpha", "equivalent_accept_length", "theoretical_speedup")


def build_parser() -> Parser:
    parser = Parser(prog="collect_results.py", description="Collect the summaries of eval.py in one file.")
    parser.add_argument("--eval_output", type=Path, required=True, help="--output_dir of eval.py")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results.json", help="file to write")
    return parser


def figures(part: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and pooled metrics of one data set, or of all, with their 95% intervals."""
    counts = {
        "prompts": part["samples"],
        "new_tokens": part["totals"]["new_tokens"],
        "cycles": part["totals"]["decode_loop_steps"],
        "alpha_by_fill": part["alpha_by_fill"],
    }
    names = [f"{figure}_pooled{suffix}" for figure in FIGURES for suffix in ("", "_ci95")]
    return counts | {name: part[name] for name in names}


def main(args: argparse.Namespace) -> None:
    check_output_file("--output", args.output)
    summaries = read_summaries(args.eval_output)
    if not summaries:
        raise ValueError(f"--eval_output {str(args.eval_output)!r} holds no summary: give the --output_dir of eval.py")
    runs = []
    for summary in summaries:
        settings = summary["settings"]
        runs.append(
            {
                "num_stages": len(settings["stage_sizes"]),
                "draft_top_k": settings["draft_top_k"],
                "temperature": settings["temperature"],
                **{name: settings[name] for name in SETTINGS},
                "overall": figures(summary["overall"]),
                "datasets": {name: figures(part) for name, part in summary["datasets"].items()},
            }
        )
    runs.sort(key=lambda run: (run["num_stages"], run["draft_top_k"], run["temperature"]))
    write_json(args.output, {"runs": runs})
    print(f"{len(runs)} runs in {args.output}")


if __name__ == "__main__":
    run_script(main, build_parser())
