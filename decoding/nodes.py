"""Tree nodes on their way through the stages: what the host tells the device of them, and what each of them sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline_model import Masks, oldest_seen


class NodeRow(NamedTuple):
    """A node as the host knows it: what has to be told to whoever runs the stages."""

    token: int
    id: int
    parent: int  # node id of the parent
    slot: int  # KV slot


class NodeBatch(NamedTuple):
    """The w candidate tokens of one position, which enter stage 0 together and travel together (w = 1 in a chain).

    A batch says all that a stage needs, rollback included: a node sees what its parent sees, and itself. Dropping
    every batch of rejected nodes is the whole rollback; nothing in a stage has to be restored.
    """

    position: int  # of every node in the batch
    ids: tuple[int, ...]  # the w node ids, on the host
    rows: Tensor  # [w, 4] on the device: a NodeRow for each node
    mask: Tensor | None = None  # [w, used] bool, the KV slots each node sees; None in a chain: all up to its own
    window_mask: Tensor | None = None  # [w, used] bool, those within the window; None where the target has no window

    @property
    def tokens(self) -> Tensor:
        return self.rows[:, 0]

    @property
    def nodes(self) -> Tensor:
        """The node ids, [w]: rows of every memory that has one per node."""
        return self.rows[:, 1]

    @property
    def parents(self) -> Tensor:
        return self.rows[:, 2]

    @property
    def slots(self) -> Tensor:
        return self.rows[:, 3]

    def keep(self, rows: Sequence[int], at_rows: Tensor) -> NodeBatch:
        """The batch with only the given rows, which the device has in `at_rows`."""
        masks = (None if mask is None else mask[at_rows] for mask in (self.mask, self.window_mask))
        return NodeBatch(self.position, tuple(self.ids[row] for row in rows), self.rows[at_rows], *masks)

    @property
    def masks(self) -> Masks:
        """The masks as decoder layers take them, each [w, 1, 1, used]."""
        return Masks(*(None if mask is None else mask[:, None, None] for mask in (self.mask, self.window_mask)))


SLOT_STEP, NODE_STEP = 512, 32  # capacities of compiled stages grow by these


CHECKPOINT = 0  # node id that no token has: its linear-attention states are those after a part of the prompt


class Kept(NamedTuple):
    """What of a prompt is in memory already, from the generation before it. By default nothing is."""

    length: int = 0  # tokens at the start of the prompt that all caches hold
    node: int = CHECKPOINT  # node id whose linear-attention states are those after the kept tokens
    slots: tuple[int, ...] = ()  # KV slots of the newest kept tokens, where these are not their positions
    checkpoint: int = 0  # for the next generation: states after so many tokens of the prompt stay under CHECKPOINT

    def chunks(self, prompt_length: int, size: int) -> Iterator[range]:
        """Positions of the tokens to run, at most `size` at once; a chunk ends at the checkpoint."""
        start = self.length
        while start < prompt_length:
            end = self.checkpoint if start < self.checkpoint else prompt_length
            yield range(start, min(start + size, end))
            start = min(start + size, end)


class CachePlan(NamedTuple):
    """How much memory one generation needs, and what it finds there; nothing grows after it is allocated."""

    slots: int  # KV slots: prompt + new tokens, and in a tree one for each live node
    nodes: int  # node ids that can be alive at once
    tree: bool  # False: a chain, slot = position, no masks
    width: int = 1  # nodes that run at once, at most: W, or the tokens of a drafted chain; 0: the prompt alone
    kept: Kept = Kept()

    def fits(self, other: CachePlan) -> bool:
        """Whether memory made for this plan serves the other one as well."""
        return self.slots >= other.slots and self.nodes >= other.nodes

    def joined(self, other: CachePlan) -> CachePlan:
        """A plan for either."""
        return self._replace(slots=max(self.slots, other.slots), nodes=max(self.nodes, other.nodes))

    def in_steps(self) -> CachePlan:
        """The same, rounded up, so that few generations need another size."""
        return self._replace(
            slots=-(-self.slots // SLOT_STEP) * SLOT_STEP, nodes=-(-self.nodes // NODE_STEP) * NODE_STEP
        )


class HostCopies:
    """Brings integers to the device, each list in one copy that the host does not wait for.

    On CUDA they leave from pinned memory. Lists as indices, and tensors that are made on the device from a list, would
    do the same with a wait for the whole device.
    """

    RING = 4  # copies that may be under way

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[tuple[Tensor, torch.cuda.Event] | None] = [None] * self.RING
        self._next = 0

    def copy(self, numbers: Sequence | np.ndarray, into: Tensor | None = None) -> Tensor:
        """The numbers, int64, in new memory on the device, or in the memory of `into`."""
        tensor = torch.from_numpy(np.array(numbers, dtype=np.int64))  # several times as fast as torch.tensor
        if self._device.type == "cuda":
            return self._through_pinned(tensor, into)
        return tensor if into is None else into.copy_(tensor)

    def copy_each(self, lists: Iterable[Sequence[int]]) -> Sequence[Tensor]:
        """Several lists, each as a tensor, in one copy; nothing is copied where there are none."""
        lists = list(lists)
        if not lists:
            return ()
        return self.copy(list(chain.from_iterable(lists))).split([len(numbers) for numbers in lists])

    def _through_pinned(self, tensor: Tensor, into: Tensor | None) -> Tensor:
        place = self._next = (self._next + 1) % self.RING
        if self._buffers[place] is not None:
            self._buffers[place][1].synchronize()  # an earlier copy from this buffer: long done
        if self._buffers[place] is None or self._buffers[place][0].numel() < tensor.numel():
            size = max(256, 2 * tensor.numel())
            self._buffers[place] = torch.empty(size, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()
        buffer, copied = self._buffers[place]
        pinned = buffer[: tensor.numel()].copy_(tensor.flatten()).view(tensor.shape)
        if into is None:
            into = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        into.copy_(pinned, non_blocking=True)
        copied.record()
        return into


class NodeBoard:
    """Brings nodes to the device, one copy per batch; for a tree it also says which KV slots each node sees."""

    def __init__(self, device: torch.device, window: int | None = None):
        """`window`: the target's sliding window, in tokens, if it has one."""
        self._device, self._window, self._copies = device, window, HostCopies(device)
        self._used = 0  # KV slots in use so far, from slot 0 up
        self._visible: Tensor | None = None  # [nodes, slots] bool: row i is node i's own view; None in a chain
        self._positions: Tensor  # [slots] of the token in each slot
        self._range: Tensor  # [W] 0, 1, 2 ...

    def start(self, plan: CachePlan, prompt_length: int, root: int) -> None:
        """A generation begins: its prompt fills the first slots, `root` is the node id of its last token."""
        self._visible, self._used = None, prompt_length
        if plan.tree:
            self._visible = torch.zeros(plan.nodes, plan.slots, dtype=torch.bool, device=self._device)
            self._visible[root, :prompt_length] = True
            self._positions = torch.arange(plan.slots, device=self._device)
            self._range = torch.arange(plan.width, device=self._device)

    def enter(self, position: int, rows: Sequence[NodeRow]) -> NodeBatch:
        """The batch of some nodes at one position: each sees what its parent sees, and its own slot."""
        batch = NodeBatch(position, tuple(row.id for row in rows), self._copies.copy(rows))
        if self._visible is None:
            return batch
        self._used = max(self._used, *(row.slot + 1 for row in rows))
        visible = self._visible[batch.parents]
        visible[self._range[: len(rows)], batch.slots] = True
        self._visible[batch.nodes] = visible
        mask = visible[:, : self._used]
        if self._window is None:
            return batch._replace(mask=mask)
        self._positions[batch.slots] = position
        recent = self._positions[: self._used] >= oldest_seen(position, self._window)
        return batch._replace(mask=mask, window_mask=mask & recent)
