"""Trains a baseline's drafter, EAGLE-3, PPSD or DFlash, with the data, steps and files of train.py.

    python baselines/train_baseline.py --method eagle3 --model_name Qwen/Qwen3-4B --data_path sharegpt.json \\
        --draft_vocab_json draft_vocab/sharegpt_qwen3_top_32k.json --output_dir runs/eagle3

    python baselines/train_baseline.py --method ppsd --num_stages 8 ...
    python baselines/train_baseline.py --method dflash --block_size 16 ...
    python baselines/train_baseline.py --method dflash --opd --init_head runs/dflash ...

With the same seed, data and steps every drafter meets the same tokens in the same order as a speculation head.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers import PreTrainedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from baselines.registry import METHODS, add_method_flags, check_owners, with_defaults
from loading.flags import ATTN_IMPLEMENTATIONS
from pipeline_model import DraftConfig, Target
from script_utils import Parser, quiet_libraries, run_script
from training.flags import add_data_flags, add_draft_vocab_flag, add_optimisation_flags, add_run_flags, add_target_flags
from training.head_loss import DraftLoss
from training.launch import check_launch, start_all_processes
from training.run import run_training
from training.start import start_from, target_config, target_entries


def build_parser() -> Parser:
    parser = Parser(prog="train_baseline.py", description="Train the drafter of a baseline for a frozen target model.")
    add_target_flags(parser, ATTN_IMPLEMENTATIONS)
    add_data_flags(parser)
    drafter = parser.add_argument_group("drafter")
    methods = [name for name, method in METHODS.items() if method.trained_here]
    drafter.add_argument("--method", required=True, choices=methods, help="which baseline")
    add_draft_vocab_flag(drafter)
    add_method_flags(parser.add_argument_group("flags of some methods"), "training_flags")
    add_optimisation_flags(parser)
    add_run_flags(parser)
    # A baseline has no fills to train on: its rows look the same however full the pipeline is.
    parser.set_defaults(trained_with_use_deepest=False, fill_alpha=None)
    return parser


def settled(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the method's own defaults. ValueError for a flag of another method, or a missing one."""
    check_owners(args, "training_flags")
    METHODS[args.method].check_training_flags(args)
    return with_defaults(args, "training_flags")


def head_config(args: argparse.Namespace, target: PreTrainedConfig) -> DraftConfig:
    """The drafter that the arguments describe. ValueError for one that cannot be."""
    args, method = settled(args), METHODS[args.method]
    raw = {"version": method.name, "trained_with_use_deepest": False, **target_entries(args, target)}
    return method.config_class.parse(raw | method.entries(args, target))


def make_loss(args: argparse.Namespace, config: DraftConfig, target: Target) -> DraftLoss:
    """A new drafter, or one with the weights of `--init_head`, and what it learns."""
    loss = METHODS[args.method].loss(args, config, target)
    if args.init_head is not None:
        start_from(loss.head, args.init_head)
    return loss


def main(args: argparse.Namespace) -> int:
    """Train; returns the exit code of `Trainer.run`. ValueError, in one line, for what the user has to mend."""
    quiet_libraries()
    check_launch(args)
    args = settled(args)
    target = target_config(args)
    config = head_config(args, target)
    config.check_target(target)
    start_all_processes()
    return run_training(args, target, lambda loaded: make_loss(args, config, loaded))


if __name__ == "__main__":
    run_script(main, build_parser())
