"""PPSD (arXiv 2509.19368): a drafter behind the first pipeline stage, our re-implementation (METHOD section 9).

The pipeline and its flush rules are SPD's. The drafter is L_s layers, the target's final norm and an own lm_head on the
output of stage 0 for the newest token, with its own causal KV cache:

    cycle   stage 0 runs the newest token; the drafter continues from its output; beside them the other stages run

So it sees no deeper than one stage, and a cycle is L/n + L_s layers long. It trains with SPD's loss in one ordinary
causal pass, and needs no device of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedConfig

from baselines.common import BaselineConfig, PlainHead
from decoding.tree import Node, TokenTree
from pipeline_inference import Captured, Completed, Decoder, LocalExecutor, PromptOutput
from pipeline_model import CachePlan, HeadCache, NodeBatch, Target
from timeline import Timeline, stage_row


class PPSDHead(PlainHead):
    """L_s decoder layers and an lm_head; the rows are h_b, b the layers of stage 0."""

    def _add_projections(self) -> None:
        """It has none: the layers read the target's hidden states as they are."""

    @property
    def projections(self) -> list[list[nn.Linear]]:
        return [[]]

    def aggregate(self, kind: int, features: Tensor) -> Tensor:
        """h_b itself: [..., 2, H] -> [..., H]."""
        return features[..., 1, :]


@dataclass(frozen=True)
class PPSDConfig(BaselineConfig):
    method = "ppsd"
    head_class = PPSDHead

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        return 0, self.split(num_layers)[0]

    def check_target(self, target_config: PreTrainedConfig) -> None:
        if self.num_stages < 2:
            raise ValueError("num_stages is 1: PPSD drafts while the stages behind the first one run, give 2 or more")
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
    """The head at work behind stage 0: one row a cycle, which stays in the cache until its token is rolled back."""

    def __init__(self, head: PPSDHead, target: Target):
        self.head, self.target = head, target
        self.draft_token_ids = head.draft_token_ids
        self._cache: HeadCache | None = None
        self._newest: Tensor | None = None  # [1, H] stage 0's output for the newest token

    def start(self, plan: CachePlan, features: Tensor, path: Sequence[Node]) -> None:
        self._cache = HeadCache(self.head, plan.slots)
        self._run(self.head.aggregate(0, features), 0, outputs=0)

    def enter(self, nodes: Sequence[Node], early: Tensor) -> None:
        self._newest = early

    def observe(self, captured: Iterable[Captured]) -> None:
        """Nothing behind stage 0 is of use."""

    def draft(self, tree: TokenTree) -> Tensor:
        hidden = self._run(self._newest, tree.frontier[0].position, outputs=1)
        return self.head.lm_head(self.target.norm(hidden))

    def _run(self, rows: Tensor, first: int, outputs: int) -> Tensor:
        """Rows [R, H] at positions from `first` on; what the cache held there and beyond was rolled back."""
        self._cache.length, stop = first, first + len(rows)
        cos, sin = self.target.rope(stop)
        return self.head.forward_rows(
            rows[None], (cos[:, first:stop], sin[:, first:stop]), self._cache, outputs=outputs
        )


def ppsd_decoder(
    target: Target, head: PPSDHead, stage_sizes: Sequence[int], *, compiled: bool = False, **settings: object
) -> Decoder:
    """A decoder with this drafter; `compiled` as for `Stage`, settings as `Decoder`. One chain: draft_top_k is 1."""
    executor = FirstStageExecutor(target, stage_sizes, head.config.anchors, compiled=compiled)
    return Decoder(executor, PPSDDrafter(head, target), draft_in_line=True, **settings)
