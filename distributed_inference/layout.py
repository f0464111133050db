"""Who runs what: ranks, stages, and the part of the target that each rank loads. Pure functions.

rank 0          draft rank: embedding, head, final norm, verification, every decision
rank s + 1      stage s, or rank s with `colocated`: then rank 0 runs the first stage as well
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline_model import TargetPart, layers_available

DRAFT_RANK = 0
LM_HEAD_PLACES = ("draft", "last", "split")


@dataclass(frozen=True)
class Layout:
    """The ranks of a pipeline of n stages, counted as `torchrun` counts them."""

    stage_sizes: tuple[int, ...]  # layers of each stage
    colocated: bool = False  # the draft rank runs stage 0 as well
    lm_head: str = "draft"  # who computes the target's logits: the draft rank, the last stage, or all by rows

    @property
    def num_stages(self) -> int:
        return len(self.stage_sizes)

    @property
    def world_size(self) -> int:
        return self.num_stages + (not self.colocated)

    @property
    def last_rank(self) -> int:
        """The rank of the last stage."""
        return self.world_size - 1

    def rank_of(self, stage: int) -> int:
        return stage if self.colocated else stage + 1

    def stage_of(self, rank: int) -> int | None:
        """The stage that a rank runs; None for a draft rank that runs none."""
        stage = rank if self.colocated else rank - 1
        return stage if stage >= 0 else None

    def layers(self, stage: int) -> range:
        """Target layers of a stage, 0-based."""
        bounds = layers_available(self.stage_sizes)
        return range(bounds[stage], bounds[stage + 1])

    def vocabulary_rows(self, rank: int, vocab_size: int) -> range:
        """Rows of the lm_head that a rank multiplies with."""
        if self.lm_head == "split":
            return range(vocab_size * rank // self.world_size, vocab_size * (rank + 1) // self.world_size)
        owner = DRAFT_RANK if self.lm_head == "draft" else self.last_rank
        return range(vocab_size if rank == owner else 0)

    def part(self, rank: int, vocab_size: int) -> TargetPart:
        """What a rank loads of the target."""
        stage = self.stage_of(rank)
        layers = range(0) if stage is None else self.layers(stage)
        return TargetPart(layers, rank == DRAFT_RANK, self.vocabulary_rows(rank, vocab_size))

    def describe(self, rank: int) -> str:
        """A rank as messages name it, such as "rank 3 (stage 2)"."""
        stage = self.stage_of(rank)
        roles = ["draft"] * (rank == DRAFT_RANK) + ([] if stage is None else [f"stage {stage}"])
        return f"rank {rank} ({', '.join(roles)})"


def parse_gpus(text: str | None, world_size: int) -> Sequence[int] | None:
    """GPU of each rank from "0,1,2"; None where no list is given, or an empty one.

    ValueError for anything but numbers, and for a list whose length is not the number of ranks.
    """
    if text is None or not text.strip():
        return None
    entries = text.split(",")
    if not all(entry.strip().isdecimal() for entry in entries):
        raise ValueError(f"--rank_gpus is {text!r}: list one GPU a rank, as in 0,1,2")
    if len(entries) != world_size:
        raise ValueError(f"--rank_gpus lists {len(entries)} GPUs, but there are {world_size} ranks: list one per rank")
    return [int(entry) for entry in entries]
