"""DFlash as a method: its training losses, Draft-OPD's included, and its flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

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
    DFlashHead,
    accepted_slots,
    block_loss,
    check_block_size,
    default_gamma,
    dflash_anchors,
    dflash_decoder,
    mask_token_id,
)
from baselines.draft_opd import RolloutSettings, opd_loss, padded, roll_out
from baselines.method import Flag, Method, Run
from decoding.metrics import Costs, block_costs
from decoding.sampling import Sampling
from loading.flags import COUNT, POSITIVE, bounded
from loading.tokenizer import load_tokenizer
from pipeline_inference import Decoder
from pipeline_model import Target
from script_utils import Switch
from training.head_loss import DraftLoss
from training.loss import TrainingLoss


class DFlashLoss(DraftLoss):
    """Blocks at anchors that are drawn anew in every pass; settings: `terms`, `num_anchors` of an example, `seed`."""

    def of_batch(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int
    ) -> TrainingLoss:
        blocks = self.blocks(teacher["labels"], micro_batch + 1 if self.training else 0)
        if not len(blocks.anchors):
            return self.nothing()
        return block_loss(self.head, self.target, **teacher, blocks=blocks, terms=self.settings["terms"])

    def blocks(self, labels: Tensor, number: int) -> Blocks:
        random = np.random.default_rng((self.settings["seed"], number))
        return Blocks.drawn(labels.cpu().numpy(), self.settings["num_anchors"], random)

    def nothing(self) -> TrainingLoss:
        """The loss of examples without a block."""
        return TrainingLoss(*torch.zeros(4, device=self.target.device).unbind())

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

    def of_batch(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int
    ) -> TrainingLoss:
        if not self.training:  # held-out text is as it is
            return super().of_batch(teacher, stage_sizes, fill, micro_batch)
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


OPD_FLAGS = (
    Flag("opd", "Draft-OPD: decode each example's first question anew, and learn there", False, {"action": Switch}),
    Flag("opd_rejected", "with --opd: learn from the drafts after a rejected one, too", True, {"action": Switch}),
    Flag("opd_tokens", "with --opd: tokens of a reply at most", 256, {"type": bounded(int, 2)}),
    Flag("opd_temperature", "with --opd: of the target's replies; 0 is greedy", 0.0, {"type": bounded(float, 0)}),
)


class DFlash(Method):
    name, title = "dflash", "DFlash"
    code = ("baselines/eagle3.py", "baselines/dflash.py")
    config_class = DFlashConfig
    trained_here = True
    training_flags = (
        Flag("block_size", "B, a known token and those drafted at once", BLOCK_SIZE, {"type": bounded(int, 2)}),
        Flag("num_spec_layers", "layers of the drafter", NUM_LAYERS, {"type": COUNT}),
        Flag("num_taps", "C, hidden states of the target that a token shows", NUM_TAPS, {"type": COUNT}),
        Flag("num_anchors", "A, blocks per example and pass at most", NUM_ANCHORS, {"type": COUNT}),
        Flag(
            "slot_weights",
            "by place, or D-PACE: by what a slot adds to the expected length",
            "decay",
            {"choices": WEIGHTS},
        ),
        Flag("gamma", "of decay: slots fade by exp(-1 / gamma); 4, 5, 7 by B", settings={"type": POSITIVE}),
        Flag("loss", "ce: on the text's own tokens, if the target wrote them", "kl", {"choices": LOSSES}),
        Flag("mask_token", "token or id that no text has; known for SmolLM2, Qwen, Llama 3"),
        Flag("learned_mask", "learn the mask's embedding", False, {"action": Switch}),
        Flag("train_lm_head", "learn an lm_head, instead of using the target's", False, {"action": Switch}),
        Flag("init_head", "checkpoint whose weights to start from"),
        *OPD_FLAGS,
    )
    decoding_flags = (
        Flag("block_size", "B, at most as trained; unset: as trained", settings={"type": int, "nargs": "+"}),
        Flag("sample_drafts", "draw drafts when sampling, not their argmax", False, {"action": Switch}),
    )

    def check_training_flags(self, args: argparse.Namespace) -> None:
        given = {flag.name for flag in self.training_flags if getattr(args, flag.name) not in (None, flag.default)}
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

    def entries(self, args: argparse.Namespace, target: PreTrainedConfig) -> dict[str, Any]:
        tokenizer = load_tokenizer(args.model_name, args.trust_remote_code)
        names = ("num_spec_layers", "block_size", "learned_mask", "train_lm_head")
        return {name: getattr(args, name) for name in names} | {
            "num_stages": 1,
            "aggr_feature_bound": dflash_anchors(target.num_hidden_layers, args.num_taps),
            "mask_token_id": mask_token_id(tokenizer, args.mask_token, target.vocab_size),
        }

    def loss(self, args: argparse.Namespace, config: DFlashConfig, target: Target) -> DFlashLoss:
        head = config.new_head(target, args.seed)
        gamma = default_gamma(args.block_size) if args.gamma is None else args.gamma
        terms = BlockTerms(args.loss, args.slot_weights, gamma, args.temperature)
        settings = {"terms": terms, "num_anchors": args.num_anchors, "seed": args.seed}
        if not args.opd:
            return DFlashLoss(head, target, **settings)
        rollout = RolloutSettings(args.opd_tokens, Sampling(args.opd_temperature), args.max_length)
        return DraftOPDLoss(head, target, rollout=rollout, rejected=args.opd_rejected, **settings)

    def check_decoding_flags(self, args: argparse.Namespace) -> None:
        super().check_decoding_flags(args)
        smallest = min(args.block_size or [2])
        if smallest < 2:
            raise ValueError(f"--block_size is {smallest}: a block has a known token and at least one draft")

    def runs(self, args: argparse.Namespace, config: DFlashConfig, num_layers: int) -> Iterator[dict[str, Any]]:
        for size in dict.fromkeys(args.block_size or [config.block_size]):
            check_block_size(config, size)
            drafts = {"draft_chain": size - 1, "sample_drafts": args.sample_drafts}
            yield self.shape(config, num_layers) | drafts

    def costs(self, run: Run) -> Costs:
        return block_costs(sum(run.stage_sizes), run.num_spec_layers, run.draft_chain)

    def axes(self, run: Run) -> dict[str, str]:
        size = run.draft_chain + 1
        return {f"B = {size}": f"B{size}"} | ({"sampled drafts": "sampled"} if run.sample_drafts else {})

    def decoder(self, target: Target, head: DFlashHead, run: Run, settings: Mapping[str, Any]) -> Decoder:
        blocks = {"block_size": run.draft_chain + 1, "sample_drafts": run.sample_drafts, "compiled": run.compiled}
        return dflash_decoder(target, head, **blocks, **settings)
