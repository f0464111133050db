"""Stage forwards through `torch.compile`: inductor on a CPU, CUDA graphs as well on a GPU.

Nothing changes its shape or its address from cycle to cycle: a batch is always W nodes wide (the first one stands in
for missing ones), attention always sees all KV slots under a mask, and the caches stay where they are, from generation
to generation, until a longer one needs more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from distributed_inference.messages import Batch, Start
from distributed_inference.stages import StageRunner
from pipeline_model import CachePlan, NodeBatch, Stage, Target, TreeMask

SLOT_STEP, NODE_STEP = 512, 32  # capacities grow by these, so that few generations compile anew
WARM_UP_RUNS = 3  # compile, record CUDA graphs, replay


def capacity(plan: CachePlan, spare: int) -> CachePlan:
    """A plan that this one fits into, with `spare` slots and one node that no generation uses."""
    slots = -(-(plan.slots + spare) // SLOT_STEP) * SLOT_STEP
    return CachePlan(slots, -(-(plan.nodes + 1) // NODE_STEP) * NODE_STEP, tree=True)


class CompiledStageRunner(StageRunner):
    """A stage whose forward of a batch is compiled when the first generation starts. Prompts run as ever.

    A chain is a tree of one branch here: its slots are its positions.
    """

    def __init__(self, target: Target, layers: range, width: int):
        super().__init__(target, layers)
        self._width = width
        self._plan = CachePlan(0, 0, tree=True)
        self._anchors: tuple[int, ...] | None = None
        config, device = target.config, target.device
        self._hidden = torch.zeros(width, 1, config.hidden_size, dtype=target.dtype, device=device)
        self._rope = tuple(row[:, :1].clone() for row in target.rope(1))
        self._batch: NodeBatch

    def start(self, start: Start) -> None:
        plan = capacity(start.plan, self._width)
        if plan.slots > self._plan.slots or plan.nodes > self._plan.nodes or start.anchors != self._anchors:
            self._plan = CachePlan(max(plan.slots, self._plan.slots), max(plan.nodes, self._plan.nodes), tree=True)
            self._allocate(start.anchors)
        self._root = torch.tensor([start.root], device=self._target.device)
        self._tree_mask = TreeMask(self._plan, self._target.device, self._target.window, all_slots=True)
        self._tree_mask.start(start.prompt_length, start.root)

    def _allocate(self, anchors: tuple[int, ...]) -> None:
        """New caches and batch; compile the forward and try it in slots and with a node that nobody uses."""
        device = self._target.device
        self._anchors = anchors
        self._stage = Stage(self._target, self._layers, anchors)
        self._cache = self._stage.new_cache(self._plan)
        spare = torch.arange(self._plan.slots - self._width, self._plan.slots, device=device)
        node = torch.full((self._width,), self._plan.nodes - 1, device=device)
        mask = torch.zeros(self._width, self._plan.slots, dtype=torch.bool, device=device)
        mask[:, spare] = True
        window_mask = None if self._target.window is None else mask.clone()
        self._batch = NodeBatch(0, (), node, node, node.clone(), spare, mask, window_mask)
        self._cache.enter(self._batch)
        for tensor in self._fixed():
            torch._dynamo.mark_static_address(tensor)
        graphs = device.type == "cuda"
        self._forward = torch.compile(self._run_layers, dynamic=False, mode="reduce-overhead" if graphs else None)
        for _ in range(WARM_UP_RUNS):
            self._step()

    def _fixed(self) -> Iterator[Tensor]:
        """Everything that keeps its address."""
        yield from (self._hidden, *self._rope, *self._batch.tensors())
        yield from self._cache.tensors()

    def _run_layers(self) -> tuple[Tensor, dict[int, Tensor]]:
        masks, anchors = self._batch.masks, self._stage.anchors
        return self._target.apply_layers(self._layers, self._hidden, self._rope, masks, anchors, self._cache)

    def _step(self) -> tuple[Tensor, dict[int, Tensor]]:
        torch.compiler.cudagraph_mark_step_begin()  # the last outputs have been sent: their memory is free
        return self._forward()

    def run(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        count = len(batch.rows)
        nodes = NodeBatch.of(batch.position, batch.rows, self._target.device)
        nodes = self._tree_mask.enter(nodes, [row.slot for row in batch.rows])
        for fixed, ours in zip(self._batch.tensors(), nodes.tensors(), strict=True):
            fixed[:count] = ours
            fixed[count:] = ours[:1]
        self._hidden[:count] = hidden[:, None]
        self._hidden[count:] = hidden[:1, None]
        for fixed, table in zip(self._rope, self._target.rope(batch.position + 1), strict=True):
            fixed.copy_(table[:, batch.position : batch.position + 1])
        self._cache.enter(self._batch)
        output, captured = self._step()
        return output[:count, 0], [captured[b][:count, 0] for b in sorted(captured)]
