"""PPSD (arXiv 2509.19368): a drafter after the first pipeline stage, our re-implementation (method.md section 9).

The pipeline and its flush rules are SPD's. The drafter is L_s layers, the target's final norm and an own lm_head on the
output of stage 0 for the newest token, with its own causal KV cache:

    cycle   stage 0 runs the newest token; the drafter continues from its output; beside them the other stages run

So the drafter sees one stage deep, a cycle is L/n + L_s layers long, and no device is needed beside the stages. It
trains with SPD's loss in one ordinary causal pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig

from baselines.method import Flag, Method, Run
from decoding.metrics import Costs, ppsd_costs
from decoding.nodes import CachePlan, NodeBatch
from decoding.tree import Node, TokenTree
from loading.flags import COUNT, POSITIVE, bounded
from loading.head_values import parse_stage_layers
from pipeline_inference import Captured, Completed, Decoder, LocalExecutor, PromptOutput
from pipeline_model import (
    DraftConfig,
    DraftHead,
    HeadCache,
    Target,
    new_spec_layers,
    split_layers,
)
from script_utils import Switch
from timeline import Timeline, stage_row
from training.head_loss import DraftLoss, ReplayLoss
from training.loss import LossTerms, TrainingLoss, distillation_loss, supervised_places
from training.replay import Trace
from training.replay_loss import ROWS, TRACES, Replay, ReplaySettings, check_replay_flags


class PPSDHead(DraftHead):
    """L_s decoder layers and an lm_head. The rows are h_b itself, b the layers of stage 0."""

    def __init__(self, config: PPSDConfig, target_config: PreTrainedConfig):
        super().__init__(config, target_config)
        self.spec_layers = new_spec_layers(config, target_config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)


@dataclass(frozen=True, kw_only=True)
class PPSDConfig(DraftConfig):
    version = "ppsd"
    head_class = PPSDHead

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        return 0, self.split(num_layers)[0]

    def check_target(self, target_config: PreTrainedConfig) -> None:
        if self.num_stages < 2:
            raise ValueError("num_stages is 1: PPSD drafts while the stages after the first one run, give 2 or more")
        super().check_target(target_config)


class FirstStageExecutor(LocalExecutor):
    """A pipeline that runs stage 0 as a cycle begins, and hands over its output in the place of h_0."""

    def start(self, prompt: Sequence[int], root: int, plan: CachePlan, timeline: Timeline) -> PromptOutput:
        self._early: tuple[NodeBatch, Tensor] | None = None  # through stage 0 in this cycle, for stage 1 in the next
        return super().start(prompt, root, plan, timeline)

    def begin_cycle(self, position: int, entering: Sequence[Node]) -> Tensor | None:
        if super().begin_cycle(position, entering) is None:
            return None
        batch, hidden = self._inputs[0]
        with self._timeline.span(stage_row(0)):
            hidden, _ = self.stages[0].run(batch, hidden)
        self._inputs[0], self._early = None, (batch, hidden)
        return hidden

    def finish_cycle(self) -> tuple[list[Captured], Completed | None]:
        finished = super().finish_cycle()
        self._inputs[1], self._early = self._early, None
        return finished


class PPSDDrafter:
    """The head at work after stage 0: one row per cycle, which stays in the cache until its token is rolled back."""

    def __init__(self, head: PPSDHead, target: Target):
        self.head, self.target = head, target
        self.draft_token_ids = head.draft_token_ids
        self._cache: HeadCache | None = None
        self._newest: Tensor | None = None  # [1, H] stage 0's output for the newest token

    def start(self, plan: CachePlan, features: Tensor, path: Sequence[Node]) -> None:
        self._cache = HeadCache(self.head, plan.slots)
        self._run(features[:, 1], 0, outputs=0)

    def enter(self, nodes: Sequence[Node], early: Tensor) -> None:
        self._newest = early

    def observe(self, captured: Iterable[Captured]) -> None:
        """It needs nothing from the stages after the first."""

    def draft(self, tree: TokenTree) -> Tensor:
        hidden = self._run(self._newest, tree.frontier[0].position, outputs=1)
        return self.head.lm_head(self.target.norm(hidden))

    def _run(self, rows: Tensor, first: int, outputs: int) -> Tensor:
        """Rows [R, H] at positions from `first` on; what the cache held there and beyond was rolled back."""
        self._cache.length, stop = first, first + len(rows)
        return self.head.forward_rows(rows[None], self.target.rope(stop, first), self._cache, outputs=outputs)


def ppsd_decoder(
    target: Target, head: PPSDHead, stage_sizes: Sequence[int], *, compiled: bool = False, **settings: object
) -> Decoder:
    """A decoder with this drafter; `compiled` as for `Stage`, settings as `Decoder`. One chain: draft_top_k is 1."""
    executor = FirstStageExecutor(target, stage_sizes, head.config.anchors, compiled=compiled)
    return Decoder(executor, PPSDDrafter(head, target), draft_in_line=True, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# The method, for eval.py and train_baseline.py
# ---------------------------------------------------------------------------------------------------------------------


class PPSDReplay(Replay):
    """Replay of PPSD's decoding. Its rows do not depend on what is in flight: a single repeat gives all flags."""

    def outputs(self, teacher: Mapping[str, Tensor], stage_sizes: Sequence[int], trace: Trace) -> Tensor:
        features = teacher["features"][:, :, 1]
        newest = (torch.from_numpy(index).to(features.device) for index in (trace.sequences, trace.positions))
        return causal_outputs(self.head, self.target, features, tuple(newest))


class PPSDLoss(DraftLoss):
    """SPD's loss in one ordinary causal pass; settings: `terms`."""

    def of_batch(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int
    ) -> TrainingLoss:
        selected = supervised_places(teacher["labels"], teacher["attention_mask"])
        draft = causal_outputs(self.head, self.target, teacher["features"][:, :, 1], selected)
        best = teacher["teacher_best"][selected] if "teacher_best" in teacher else None
        return distillation_loss(
            self.head, self.target, draft, teacher["hidden"][selected], best, self.settings["terms"]
        )

    @property
    def identity(self) -> dict[str, object]:
        terms = self.settings["terms"]
        return {"--rows": "staircase", "--loss": terms.kind, "--loss_eta": terms.eta}  # as speculation heads have it

    def held_out_replay(self) -> PPSDReplay:
        return PPSDReplay(self.head, self.target, ReplaySettings())


def causal_outputs(head: PPSDHead, target: Target, rows: Tensor, selected: tuple[Tensor, Tensor]) -> Tensor:
    """The drafter's outputs before the final norm at the selected (batch, position) pairs: [B, S, H] -> [P, H]."""
    length = rows.shape[1]
    rope = target.rope(length, device=rows.device)
    for layer in head.spec_layers:
        normed = layer.input_layernorm(rows)
        keys, values = layer.keys_values(normed, rope)
        query, gate = layer.queries(normed, rope)
        scaling = layer.self_attn.scaling
        attended = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        if layer is head.spec_layers[-1]:  # nobody asks for its other rows
            attended = attended.transpose(1, 2)[selected].transpose(0, 1)[None]  # [1, heads, P, D]
            gate = None if gate is None else gate[selected][None]
            rows = rows[selected][None]
        rows = layer.finish(rows, attended, gate)
    return rows[0]


class PPSD(Method):
    name, title = "ppsd", "PPSD"
    code = ("baselines/ppsd.py",)
    config_class = PPSDConfig
    pipeline = True
    trained_here = True
    training_flags = (
        Flag("num_stages", "n, required", settings={"type": COUNT}),
        Flag("stage_layers", 'uneven split, layers per stage: "4;6;6;4"'),
        Flag("num_spec_layers", "layers of the drafter", 1, {"type": COUNT}),
        Flag("rows", "replay: learn from the drafts that decoding verifies", "staircase", {"choices": ROWS}),
        Flag("trace", "replay: which drafts count as accepted; replay", settings={"choices": TRACES}),
        Flag("trace_temperature", "replay: of texts that do not say theirs; 0", settings={"type": bounded(float, 0)}),
        Flag("reject_weight", "replay: weight of rejected drafts; 1", settings={"type": POSITIVE}),
        Flag("value_weight", "replay: weigh drafts by what accepting them adds", settings={"action": Switch}),
    )

    def check_training_flags(self, args: argparse.Namespace) -> None:
        check_replay_flags(args)
        if args.num_stages is None:
            raise ValueError("--method ppsd needs --num_stages, the n of its pipeline")

    def entries(self, args: argparse.Namespace, target: PreTrainedConfig) -> dict[str, Any]:
        stage_layers = parse_stage_layers(args.stage_layers)
        first = split_layers(target.num_hidden_layers, args.num_stages, stage_layers)[0]
        shape = {"num_stages": args.num_stages, "stage_layers": stage_layers, "num_spec_layers": args.num_spec_layers}
        return shape | {"aggr_feature_bound": (0, first)}

    def loss(self, args: argparse.Namespace, config: PPSDConfig, target: Target) -> DraftLoss:
        head, terms = config.new_head(target, args.seed), LossTerms(temperature=args.temperature)
        if args.rows == "replay":
            return ReplayLoss(PPSDReplay(head, target, ReplaySettings.of(args), terms))
        return PPSDLoss(head, target, terms=terms)

    def costs(self, run: Run) -> Costs:
        return ppsd_costs(run.stage_sizes, run.num_spec_layers)

    def decoder(self, target: Target, head: PPSDHead, run: Run, settings: Mapping[str, Any]) -> Decoder:
        return ppsd_decoder(target, head, run.stage_sizes, compiled=run.compiled, **settings)
