"""What the ranks tell each other: headers of a few integers, which travel beside the hidden states.

In every cycle the draft rank sends one header, even if no token enters, and every stage passes it on. So every rank
counts the same cycles without a barrier, and a late result is known by its cycle: the draft rank still has the list of
nodes that entered with it, and which of them are alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from decoding.nodes import CachePlan, Kept, NodeRow


class Kind(IntEnum):
    """First integer of every header that goes through the stages."""

    START = 0
    BATCH = 1
    END = 2
    STOP = 3


class Start(NamedTuple):
    """A generation begins; what is not kept of its prompt follows in chunks.

    The slots in `plan.kept`, which may be many, follow the header: `moved_slots` is how many.
    """

    prompt_length: int
    root: int  # node id of the prompt's last token
    plan: CachePlan
    anchors: tuple[int, ...]  # layers whose output somebody wants
    layer_us: int = 0  # microseconds that a layer takes at least (emulation.py)
    moved_slots: int = 0

    def header(self) -> list[int]:
        *plan, kept = self.plan
        plan += [kept.length, kept.node, kept.checkpoint, len(kept.slots)]
        return [Kind.START, self.prompt_length, self.root, *plan, self.layer_us, len(self.anchors), *self.anchors]

    @classmethod
    def parse(cls, header: Sequence[int]) -> Start:
        """What `header` says; the slots are still to be received."""
        _, prompt_length, root, slots, nodes, tree, width, *rest = header
        length, node, checkpoint, moved, layer_us, count, *anchors = rest
        plan = CachePlan(slots, nodes, bool(tree), width, Kept(length, node, (), checkpoint))
        return cls(prompt_length, root, plan, tuple(anchors[:count]), layer_us, moved)


class Batch(NamedTuple):
    """The nodes that entered in one cycle, all of one position; none in a cycle in which nothing entered.

    A rejection needs no message of its own. Nodes name their parent and their slot, so a stage neither restores nor
    crops anything: what the corrected token and its successors overwrite was read by stale nodes alone, which are ahead
    of them in every stage.
    """

    cycle: int
    position: int
    rows: list[NodeRow]

    def header(self) -> list[int]:
        numbers = [number for row in self.rows for number in row]
        return [Kind.BATCH, self.cycle, self.position, len(self.rows), *numbers]

    @classmethod
    def parse(cls, header: Sequence[int]) -> Batch:
        _, cycle, position, count, *numbers = header
        width = len(NodeRow._fields)
        rows = [NodeRow(*numbers[at : at + width]) for at in range(0, count * width, width)]
        return cls(cycle, position, rows)


def header_size(num_anchors: int, width: int) -> int:
    """Integers of the longest header, for at most so many anchors and nodes of one position."""
    empty = CachePlan(0, 0, tree=False)
    start = Start(0, 0, empty, (0,) * num_anchors)
    batch = Batch(0, 0, [NodeRow(0, 0, 0, 0)] * width)
    return max(len(start.header()), len(batch.header()))
