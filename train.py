"""Trains a speculation head for a frozen target, with Accelerate.

    accelerate launch --num_processes 8 train.py --model_name Qwen/Qwen3-4B --data_path sharegpt.json \\
        --draft_vocab_json draft_vocab/sharegpt_qwen3_top_32k.json --num_stages 8 --num_spec_layers 4 \\
        --output_dir runs/qwen3

    python train.py ...                                              one process, on a GPU or a CPU
    accelerate launch --num_processes 2 train.py ...                 two processes; without GPUs they meet over gloo

Three properties hold whatever the number of processes and micro-batches, and are what training/trainer.py is arranged
around: every supervised token of an optimiser step weighs the same; the examples of a step, their order, and the
pipeline depth and fill drawn for each micro-batch follow from seed and step alone; so does the learning rate. The
position of a run is therefore one number, its step, and a run that was stopped goes on as if it had not been.

`output_dir` receives speculation_head_final.pt, checkpoint-STEP/, run.json, log.jsonl and training_curve.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from transformers import PreTrainedConfig

from loading.chat_template import check_template_flags
from loading.flags import ATTN_IMPLEMENTATIONS, COUNT, POSITIVE, bounded, integers
from loading.head_values import parse_shallow_layers, parse_stage_layers
from loading.target_files import quantization_of
from pipeline_model import HeadConfig, SpeculationHead, Target, auto_anchors, auto_shallow_layers, split_layers
from script_utils import Parser, Switch, quiet_libraries, run_script
from training.flags import add_data_flags, add_draft_vocab_flag, add_optimisation_flags, add_run_flags, add_target_flags
from training.head_loss import DraftLoss, HeadLoss, HeadReplayLoss
from training.launch import check_launch, start_all_processes
from training.loss import LOSS_KINDS, LossTerms
from training.new_head import check_base_layers, late_layers, new_head
from training.replay_loss import ROWS, TRACES, Replay, ReplaySettings, check_replay_flags
from training.run import run_training
from training.start import start_from, target_config, target_entries

HEAD_INITS = ("random", "identity", "late_layers", "identity+late_layers")
TRAINING_ATTENTION = (*ATTN_IMPLEMENTATIONS, "flex_attention")  # the last: the head's, with sdpa for the target


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def build_parser() -> Parser:
    parser = Parser(prog="train.py", description="Train a speculation head for a frozen target model.")
    add_target_flags(parser, TRAINING_ATTENTION)
    add_data_flags(parser)
    add_head_flags(parser)
    add_optimisation_flags(parser)
    add_run_flags(parser)
    return parser


def add_head_flags(parser: Parser) -> None:
    head = parser.add_argument_group("head")
    head.add_argument(
        "--num_stages", type=integers, required=True, help="n; several (2,3,6) for one head that fits all"
    )
    head.add_argument("--num_spec_layers", type=COUNT, default=4, help="layers of the head")
    head.add_argument(
        "--version", type=int, default=11, choices=[10, 11], help="of the head; 12 is 11 with --stage_layers"
    )
    head.add_argument("--stage_layers", help='uneven split, layers per stage: "4;6;6;4"')
    head.add_argument(
        "--aggr_feature_bound",
        type=lambda text: "auto" if text.lower() in ("", "none") else text,
        default="auto",
        help='layers whose output the head reads: "0,5,15,29"; "" and none are auto',
    )
    head.add_argument(
        "--shallow_hidden_layer_indices", default="auto", help='version 10: what g_n, .., g_1 read: "0,1,3;0,1,2;0,1"'
    )
    add_draft_vocab_flag(head)
    head.add_argument(
        "--spec_intermediate_size_fallback",
        type=COUNT,
        default=HeadConfig.spec_intermediate_size_fallback,
        help="MLP width of the head's layers where the target's config has none (mixtures of experts)",
    )
    head.add_argument("--spec_init_from_base_layers", type=integers, help="target layers (0 ..) to start from: 13,14")
    head.add_argument(
        "--head_init",
        choices=HEAD_INITS,
        help="identity: projections pass on the deepest state they read; late_layers: layers start from the target's "
        "last ones; default: random",
    )
    head.add_argument("--init_head", help="checkpoint whose weights to start from, for more training on other data")
    head.add_argument(
        "--trained_with_use_deepest",
        action=Switch,
        default=True,
        help="also train on partly filled pipelines, where completed tokens show their deepest features",
    )

    head.add_argument(
        "--fill_alpha",
        type=bounded(float, 0, 1, above=True),
        help="train on fills F as decoding meets them: drawn with weight alpha^(F-1), counted from the newest token; "
        "default: the paper's, half full, half even, counted from each row",
    )

    add_replay_flags(parser)


def add_replay_flags(parser: Parser) -> None:
    rows = parser.add_argument_group("rows and loss")
    rows.add_argument(
        "--rows",
        default="staircase",
        choices=ROWS,
        help="staircase: the paper's training; replay: every draft that decoding verifies, at its own fill",
    )
    rows.add_argument("--trace", choices=TRACES, help="replay: which drafts count as accepted; default: replay")
    rows.add_argument(
        "--trace_temperature",
        type=bounded(float, 0),
        help="replay: of texts that do not say theirs; default: 0, greedy",
    )
    rows.add_argument("--reject_weight", type=POSITIVE, help="replay: weight of rejected drafts; default: 1")
    rows.add_argument("--value_weight", action=Switch, help="replay: weigh drafts by what accepting them adds")
    rows.add_argument(
        "--flushed",
        type=COUNT,
        help="replay: learn also from the drafts after so many rejected ones of each example, by reverse KL; default: "
        "none",
    )
    rows.add_argument("--loss", default="kl", choices=LOSS_KINDS, help="tv: 1 - acceptance; lk: between the two")
    rows.add_argument("--loss_eta", type=bounded(float, 0), help="lk: the larger, the sooner tv takes over; default: 3")


def check_head_flags(args: argparse.Namespace) -> None:
    """ValueError for flags of the head that contradict each other."""
    for name in ("spec_init_from_base_layers", "head_init"):
        if args.init_head is not None and getattr(args, name) is not None:
            raise ValueError(f"--init_head brings all weights: leave --{name} out")
    if "late_layers" in (args.head_init or "") and args.spec_init_from_base_layers is not None:
        raise ValueError(
            f"--head_init {args.head_init} takes the target's last layers: leave --spec_init_from_base_layers out, or "
            "use it without late_layers"
        )
    other_version = "shallow_hidden_layer_indices" if args.version == 11 else "aggr_feature_bound"
    if getattr(args, other_version) != "auto":
        raise ValueError(f"--{other_version} does not belong to --version {args.version}: leave one of them out")
    if args.fill_alpha is not None and not args.trained_with_use_deepest:
        raise ValueError("--fill_alpha needs --trained_with_use_deepest: without it the pipeline is always full")
    check_rows_flags(args)


def check_rows_flags(args: argparse.Namespace) -> None:
    """ValueError for flags of rows and loss that contradict others."""
    check_replay_flags(args)
    if args.rows == "replay" and not args.trained_with_use_deepest:
        raise ValueError("--rows replay needs --trained_with_use_deepest: without it every draft sees a full pipeline")
    if args.rows == "replay" and args.fill_alpha is not None:
        raise ValueError("--rows replay takes its fills from traces: leave --fill_alpha out")
    if args.flushed is not None and max(args.num_stages) == 1:
        raise ValueError(
            "--flushed needs --num_stages of 2 or more: a single stage drafts nothing after a rejected draft"
        )
    if args.loss != "lk" and args.loss_eta is not None:
        raise ValueError("--loss_eta belongs to --loss lk: leave it out")


# ---------------------------------------------------------------------------------------------------------------------
# Head and target


def read_layers(args: argparse.Namespace, stage_sizes: Sequence[int]) -> dict[str, object]:
    """The entry of a head's configuration that lists the hidden states it reads. ValueError for no such list."""
    if args.version == 10:
        text = args.shallow_hidden_layer_indices
        automatic = auto_shallow_layers(sum(stage_sizes), len(stage_sizes))
        return {"shallow_hidden_layer_indices": automatic if text == "auto" else parse_shallow_layers(text)}
    if args.aggr_feature_bound == "auto":
        return {"aggr_feature_bound": auto_anchors(stage_sizes)}
    try:
        return {"aggr_feature_bound": integers(args.aggr_feature_bound)}
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--aggr_feature_bound {error}") from None


def head_config(args: argparse.Namespace, target: PreTrainedConfig) -> HeadConfig:
    """The head that the arguments describe. ValueError for one that cannot be."""
    stages = tuple(sorted(set(args.num_stages)))
    stage_layers = parse_stage_layers(args.stage_layers)
    if stage_layers is not None and len(stages) > 1:
        raise ValueError(f"--stage_layers describes one split, but --num_stages lists {len(stages)}: give one n")
    sizes = split_layers(target.num_hidden_layers, stages[-1], stage_layers)
    split_layers(target.num_hidden_layers, stages[0])
    base_layers = base_layers_of(args, target)
    raw = {
        "version": args.version if stage_layers is None or args.version == 10 else 12,
        **target_entries(args, target),
        "num_stages": stages[-1],
        "num_spec_layers": args.num_spec_layers,
        **read_layers(args, sizes),
        "trained_with_use_deepest": args.trained_with_use_deepest,
        "stage_layers": stage_layers,
        "spec_init_from_base_layers": base_layers,
        "spec_init_first_layer": None if base_layers is None else 0,
        "spec_intermediate_size_fallback": args.spec_intermediate_size_fallback,
        "trained_num_stages": stages if len(stages) > 1 else None,
    }
    config = HeadConfig.parse(raw)
    config.check_target(target)
    if base_layers is not None:
        if args.quantization is not None or quantization_of(target) is not None:
            flag = "spec_init_from_base_layers" if args.head_init is None else f"head_init {args.head_init}"
            raise ValueError(f"--{flag} copies weights of the target, but this one is quantised: leave it out")
        check_base_layers(base_layers, config.num_spec_layers, target)
    return config


def base_layers_of(args: argparse.Namespace, target: PreTrainedConfig) -> tuple[int, ...] | None:
    """The target layers that the head's layers start from; None for a random start."""
    if "late_layers" in (args.head_init or ""):
        return late_layers(args.num_spec_layers, target)
    return args.spec_init_from_base_layers


# ---------------------------------------------------------------------------------------------------------------------
# The run


def main(args: argparse.Namespace) -> int:
    """Train; returns the exit code of `Trainer.run`. ValueError, in one line, for what the user has to mend."""
    quiet_libraries()
    check_launch(args)
    check_template_flags(args)
    check_head_flags(args)
    config_of_target = target_config(args)
    config = head_config(args, config_of_target)
    start_all_processes()

    def make_loss(target: Target) -> DraftLoss:
        identity = "identity" in (args.head_init or "")
        layers = config.spec_init_from_base_layers
        head = new_head(config, target, layers, args.seed, identity_projections=identity)
        if args.init_head is not None:
            start_from(head, args.init_head)
        return head_loss(args, head, target)

    return run_training(args, config_of_target, make_loss)


def head_loss(args: argparse.Namespace, head: SpeculationHead, target: Target) -> DraftLoss:
    """The training forward that the flags of rows and loss ask for."""
    terms = LossTerms(args.loss, args.temperature, 3.0 if args.loss_eta is None else args.loss_eta)
    if args.rows == "staircase":
        attention = "flex_attention" if args.attn_implementation == "flex_attention" else "sdpa"
        return HeadLoss(head, target, terms=terms, exact_fill=args.fill_alpha is not None, attention=attention)
    return HeadReplayLoss(Replay(head, target, ReplaySettings.of(args), terms))


if __name__ == "__main__":
    run_script(main, build_parser())
