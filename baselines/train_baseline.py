"""Trains a baseline's drafter, EAGLE-3 or PPSD, with the data, steps and files of train.py.

    python baselines/train_baseline.py --method eagle3 --model_name Qwen/Qwen3-4B --data_path sharegpt.json \\
        --draft_vocab_json draft_vocab/sharegpt_qwen3_top_32k.json --output_dir runs/eagle3

    python baselines/train_baseline.py --method ppsd --num_stages 8 ...

With the same seed, data and steps every drafter meets the same tokens in the same order as a speculation head.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from baselines.common import BaselineConfig
from baselines.eagle3 import Eagle3Config, eagle3_anchors, unrolled_loss
from baselines.ppsd import PPSDConfig
from pipeline_model import (
    ATTN_IMPLEMENTATIONS,
    LossTerms,
    Target,
    TrainingLoss,
    new_head,
    parse_stage_layers,
    split_layers,
)
from script_utils import Parser, quiet_libraries, run_script

DEFAULTS = {  # of the flags that only one method has
    "eagle3": {"unroll_steps": 7, "step_decay": 0.8},
    "ppsd": {"num_stages": None, "stage_layers": None, "num_spec_layers": 1},
}


def build_parser() -> Parser:
    parser = Parser(prog="train_baseline.py", description="Train the drafter of a baseline for a frozen target model.")
    train.add_target_flags(parser, ATTN_IMPLEMENTATIONS)
    train.add_data_flags(parser)
    drafter = parser.add_argument_group("drafter")
    drafter.add_argument("--method", required=True, choices=list(DEFAULTS), help="which baseline")
    train.add_draft_vocab_flag(drafter)
    drafter.add_argument("--unroll_steps", type=train.COUNT, help="eagle3: steps of the training-time test; 7")
    drafter.add_argument(
        "--step_decay", type=train.POSITIVE, help="eagle3: step i weighs so much to the power of i; 0.8"
    )
    drafter.add_argument("--num_stages", type=train.COUNT, help="ppsd: n, required")
    drafter.add_argument("--stage_layers", help='ppsd: uneven split, layers per stage: "4;6;6;4"')
    drafter.add_argument("--num_spec_layers", type=train.COUNT, help="ppsd: layers of the drafter; 1")
    train.add_optimisation_flags(parser)
    train.add_run_flags(parser)
    # A baseline has no fills to train on: its rows look the same however full the pipeline is.
    parser.set_defaults(trained_with_use_deepest=False, fill_alpha=None)
    return parser


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the method's own defaults. ValueError for a flag of the other method, or a missing one."""
    for method, defaults in DEFAULTS.items():
        for name in defaults:
            if method != args.method and getattr(args, name) is not None:
                raise ValueError(f"--{name} belongs to --method {method}: leave it out with {args.method}")
    if args.method == "ppsd" and args.num_stages is None:
        raise ValueError("--method ppsd needs --num_stages, the n of its pipeline")
    missing = {name: default for name, default in DEFAULTS[args.method].items() if getattr(args, name) is None}
    return argparse.Namespace(**vars(args) | missing)


def head_config(args: argparse.Namespace, target: PreTrainedConfig) -> BaselineConfig:
    """The drafter that the arguments describe. ValueError for one that cannot be."""
    args = with_defaults(args)
    raw = {"version": args.method, "trained_with_use_deepest": False, **train.target_entries(args, target)}
    num_layers = target.num_hidden_layers
    if args.method == "eagle3":
        anchors = eagle3_anchors(num_layers)
        return Eagle3Config.parse(raw | {"num_stages": 1, "num_spec_layers": 1, "aggr_feature_bound": anchors})
    stage_layers = parse_stage_layers(args.stage_layers)
    first = split_layers(num_layers, args.num_stages, stage_layers)[0]
    return PPSDConfig.parse(
        raw
        | {
            "num_stages": args.num_stages,
            "stage_layers": stage_layers,
            "num_spec_layers": args.num_spec_layers,
            "aggr_feature_bound": (0, first),
        }
    )


class Eagle3Loss(train.HeadLoss):
    """The unrolled training forward; settings are those of `unrolled_loss`."""

    def forward(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int = 0
    ) -> TrainingLoss:
        return unrolled_loss(self.head, self.target, **teacher, **self.settings)

    @property
    def identity(self) -> dict[str, object]:
        return {"--unroll_steps": self.settings["steps"], "--step_decay": self.settings["decay"]}


def make_loss(args: argparse.Namespace, config: BaselineConfig, target: Target) -> train.HeadLoss:
    head, terms = new_head(config, target, seed=args.seed), LossTerms(temperature=args.temperature)
    if args.method == "ppsd":
        return train.HeadLoss(head, target, terms=terms)
    return Eagle3Loss(head, target, steps=args.unroll_steps, decay=args.step_decay, terms=terms)


def main(args: argparse.Namespace) -> int:
    """Train; returns the exit code of `Trainer.run`. ValueError, in one line, for what the user has to mend."""
    quiet_libraries()
    train.check_launch(args)
    args = with_defaults(args)
    target = train.target_config(args)
    config = head_config(args, target)
    config.check_target(target)
    train.start_all_processes()
    return train.run_training(args, target, lambda loaded: make_loss(args, config, loaded))


if __name__ == "__main__":
    run_script(main, build_parser())
