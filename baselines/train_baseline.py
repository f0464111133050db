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

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from baselines.common import BaselineConfig
from baselines.dflash import (
    BLOCK_SIZE,
    LOSSES,
    NUM_ANCHORS,
    NUM_LAYERS,
    NUM_TAPS,
    WEIGHTS,
    Blocks,
    BlockTerms,
    DFlashConfig,
    accepted_slots,
    block_loss,
    default_gamma,
    dflash_anchors,
    mask_token_id,
    new_dflash_head,
)
from baselines.draft_opd import RolloutSettings, opd_loss, padded, roll_out
from baselines.eagle3 import Eagle3Config, eagle3_anchors, unrolled_loss
from baselines.ppsd import PPSDConfig
from decoding.sampling import Sampling
from loading.head_values import parse_stage_layers
from loading.tokenizer import load_tokenizer
from pipeline_model import ATTN_IMPLEMENTATIONS, Target, new_head, split_layers
from script_utils import Parser, Switch, quiet_libraries, run_script
from training.head_loss import HeadLoss
from training.loss import LossTerms, TrainingLoss

DEFAULTS = {  # of the flags that not all methods have; None: nobody has to give it, or a rule finds it
    "eagle3": {"unroll_steps": 7, "step_decay": 0.8},
    "ppsd": {"num_stages": None, "stage_layers": None, "num_spec_layers": 1},
    "dflash": {
        "block_size": BLOCK_SIZE,
        "num_spec_layers": NUM_LAYERS,
        "num_taps": NUM_TAPS,
        "num_anchors": NUM_ANCHORS,
        "slot_weights": "decay",
        "gamma": None,
        "loss": "kl",
        "mask_token": None,
        "learned_mask": False,
        "train_lm_head": False,
        "init_head": None,
        "opd": False,
        "opd_rejected": True,
        "opd_tokens": 256,
        "opd_temperature": 0.0,
    },
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
    drafter.add_argument("--num_spec_layers", type=train.COUNT, help="ppsd, dflash: layers of the drafter; 1, 2")
    add_dflash_flags(parser)
    train.add_optimisation_flags(parser)
    train.add_run_flags(parser)
    # A baseline has no fills to train on: its rows look the same however full the pipeline is.
    parser.set_defaults(trained_with_use_deepest=False, fill_alpha=None)
    return parser


def add_dflash_flags(parser: Parser) -> None:
    blocks = parser.add_argument_group("dflash")
    blocks.add_argument("--block_size", type=train.number(int, 2), help="B, a known token and those drafted at once; 8")
    blocks.add_argument("--num_taps", type=train.COUNT, help="C, hidden states of the target that a token shows; 5")
    blocks.add_argument("--num_anchors", type=train.COUNT, help="A, blocks of an example and pass at most; 64")
    blocks.add_argument(
        "--slot_weights", choices=WEIGHTS, help="by place, or D-PACE: by what a slot adds to the expected length; decay"
    )
    blocks.add_argument("--gamma", type=train.POSITIVE, help="of decay: slots fade by exp(-1 / gamma); 4, 5, 7 by B")
    blocks.add_argument("--loss", choices=LOSSES, help="ce: on the text's own tokens, if the target wrote them; kl")
    blocks.add_argument("--mask_token", help="token or id that no text has; known for SmolLM2, Qwen, Llama 3")
    blocks.add_argument("--learned_mask", action=Switch, help="learn the mask's embedding; off")
    blocks.add_argument("--train_lm_head", action=Switch, help="learn an lm_head, instead of using the target's; off")
    blocks.add_argument("--init_head", help="checkpoint whose weights to start from")
    opd = parser.add_argument_group("dflash: Draft-OPD, learning from its own decoding of the data's questions")
    opd.add_argument("--opd", action=Switch, help="decode each example's first question anew, and learn there; off")
    opd.add_argument("--opd_rejected", action=Switch, help="learn from the drafts behind a rejected one, too; on")
    opd.add_argument("--opd_tokens", type=train.number(int, 2), help="tokens of a reply at most; 256")
    opd.add_argument("--opd_temperature", type=train.number(float, 0), help="of the target's replies; 0: greedy")


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the method's own defaults. ValueError for a flag of another method, or a missing one."""
    own = DEFAULTS[args.method]
    for name in {name: None for defaults in DEFAULTS.values() for name in defaults if name not in own}:
        if getattr(args, name) is not None:
            owners = " and ".join(method for method, defaults in DEFAULTS.items() if name in defaults)
            raise ValueError(f"--{name} belongs to --method {owners}: leave it out with {args.method}")
    if args.method == "ppsd" and args.num_stages is None:
        raise ValueError("--method ppsd needs --num_stages, the n of its pipeline")
    if args.method == "dflash":
        check_dflash_flags(args)
    missing = {name: default for name, default in own.items() if getattr(args, name) is None}
    return argparse.Namespace(**vars(args) | missing)


def check_dflash_flags(args: argparse.Namespace) -> None:
    """ValueError for flags of DFlash that contradict each other."""
    given = {name for name, default in DEFAULTS["dflash"].items() if getattr(args, name) not in (None, default)}
    needing = given & {"opd_rejected", "opd_tokens", "opd_temperature"}
    if needing and not args.opd:
        raise ValueError(f"--{min(needing)} needs --opd")
    if args.gamma is not None and args.slot_weights == "dpace":
        raise ValueError("--gamma belongs to --slot_weights decay: leave it out with dpace")
    if not args.opd:
        return
    for name in sorted(given & {"num_anchors", "slot_weights", "gamma", "loss"}):
        raise ValueError(f"--{name} does not belong to --opd: anchors and weights are those of decoding")
    if args.init_head is None:
        raise ValueError("--opd needs --init_head: a drafter that knows nothing has nothing to learn from itself")
    if args.feature_cache is not None:
        raise ValueError("--feature_cache cannot go with --opd: its texts are new each time")


def head_config(args: argparse.Namespace, target: PreTrainedConfig) -> BaselineConfig:
    """The drafter that the arguments describe. ValueError for one that cannot be."""
    args = with_defaults(args)
    raw = {"version": args.method, "trained_with_use_deepest": False, **train.target_entries(args, target)}
    num_layers = target.num_hidden_layers
    if args.method == "eagle3":
        anchors = eagle3_anchors(num_layers)
        return Eagle3Config.parse(raw | {"num_stages": 1, "num_spec_layers": 1, "aggr_feature_bound": anchors})
    if args.method == "dflash":
        return DFlashConfig.parse(raw | dflash_entries(args, target))
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


def dflash_entries(args: argparse.Namespace, target: PreTrainedConfig) -> dict[str, object]:
    """The entries of a DFlash drafter's configuration."""
    tokenizer = load_tokenizer(args.model_name, args.trust_remote_code)
    names = ("num_spec_layers", "block_size", "learned_mask", "train_lm_head")
    return {name: getattr(args, name) for name in names} | {
        "num_stages": 1,
        "aggr_feature_bound": dflash_anchors(target.num_hidden_layers, args.num_taps),
        "mask_token_id": mask_token_id(tokenizer, args.mask_token, target.vocab_size),
    }


class Eagle3Loss(HeadLoss):
    """The unrolled training forward; settings are those of `unrolled_loss`."""

    def forward(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int = 0
    ) -> TrainingLoss:
        return unrolled_loss(self.head, self.target, **teacher, **self.settings)

    @property
    def identity(self) -> dict[str, object]:
        return {"--unroll_steps": self.settings["steps"], "--step_decay": self.settings["decay"]}


class DFlashLoss(HeadLoss):
    """Blocks at anchors that are drawn anew in every pass; settings: `terms`, `num_anchors` of an example, `seed`."""

    def forward(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int = 0
    ) -> TrainingLoss:
        blocks = self.blocks(teacher["labels"], micro_batch + 1 if self.training else 0)
        if not len(blocks.anchors):
            return self.nothing()
        return block_loss(self.head, self.target, **teacher, blocks=blocks, terms=self.settings["terms"])

    def blocks(self, labels: Tensor, draw: int) -> Blocks:
        random = np.random.default_rng((self.settings["seed"], draw))
        return Blocks.drawn(labels.cpu().numpy(), self.settings["num_anchors"], random)

    def nothing(self) -> TrainingLoss:
        """The loss of examples without a block: every weight has a gradient all the same, of zeros."""
        touched = sum(weight.flatten()[0] for weight in self.head.parameters())
        return TrainingLoss(0.0 * touched, *torch.zeros(3, device=touched.device).unbind())

    def simulated_lengths(self, teacher: dict[str, Tensor]) -> Tensor:
        blocks = self.blocks(teacher["labels"], 0)
        if not len(blocks.anchors):
            return super().simulated_lengths(teacher)
        rest = {name: value for name, value in teacher.items() if name != "attention_mask"}
        lengths = 1 + accepted_slots(self.head, self.target, **rest, blocks=blocks)
        return torch.stack([lengths.sum(), lengths.new_tensor(len(lengths))])

    @property
    def identity(self) -> dict[str, object]:
        terms, anchors = self.settings["terms"], self.settings["num_anchors"]
        return {"--loss": terms.loss, "--slot_weights": terms.weights, "--gamma": terms.gamma, "--num_anchors": anchors}


class DraftOPDLoss(DFlashLoss):
    """Blocks where the drafter's own decoding has put them; more settings: `rollout`, `rejected`."""

    def texts(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, micro_batch: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first question of each example, with a reply that is decoded now."""
        firsts = (labels >= 0).int().argmax(dim=1).clamp(min=1).tolist()
        prompts = [row[:first] for row, first in zip(input_ids.tolist(), firsts, strict=True)]
        seed = np.random.SeedSequence((self.settings["seed"], micro_batch)).generate_state(1)[0]
        self.rollouts = roll_out(self.head, self.target, prompts, self.settings["rollout"], int(seed))
        return padded(self.rollouts, input_ids.device)

    def forward(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int = 0
    ) -> TrainingLoss:
        if not self.training:  # held-out text is as it is
            return super().forward(teacher, stage_sizes, fill, micro_batch)
        if not any(rollout.rounds for rollout in self.rollouts):
            return self.nothing()
        settings = {"rejected": self.settings["rejected"], "temperature": self.settings["terms"].temperature}
        return opd_loss(self.head, self.target, **teacher, rollouts=self.rollouts, **settings)

    @property
    def identity(self) -> dict[str, object]:
        rollout = self.settings["rollout"]
        return {
            "--opd": True,
            "--opd_rejected": self.settings["rejected"],
            "--opd_tokens": rollout.max_new_tokens,
            "--opd_temperature": rollout.sampling.temperature,
        }


def dflash_loss(args: argparse.Namespace, config: DFlashConfig, target: Target) -> DFlashLoss:
    """The drafter, new or from `--init_head`, and its loss."""
    head = new_dflash_head(config, target, seed=args.seed)
    if args.init_head is not None:
        train.start_from(head, args.init_head)
    gamma = default_gamma(args.block_size) if args.gamma is None else args.gamma
    terms = BlockTerms(args.loss, args.slot_weights, gamma, args.temperature)
    settings = {"terms": terms, "num_anchors": args.num_anchors, "seed": args.seed}
    if not args.opd:
        return DFlashLoss(head, target, **settings)
    rollout = RolloutSettings(args.opd_tokens, Sampling(args.opd_temperature), args.max_length)
    return DraftOPDLoss(head, target, rollout=rollout, rejected=args.opd_rejected, **settings)


def make_loss(args: argparse.Namespace, config: BaselineConfig, target: Target) -> HeadLoss:
    if args.method == "dflash":
        return dflash_loss(args, config, target)
    head, terms = new_head(config, target, seed=args.seed), LossTerms(temperature=args.temperature)
    if args.method == "ppsd":
        return HeadLoss(head, target, terms=terms)
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
