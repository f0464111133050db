"""The speculation head's step under `--compile`: what `StaticForward` of decoding/stage.py is for a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decoding.compiled import compiled_head_layer, compiled_logits, compiled_projections, compiling, layers_of
from decoding.nodes import CachePlan, HostCopies
from decoding.stage import WARM_UP_RUNS
from pipeline_model import HeadCache, SpeculationHead, Target


class DraftRows(NamedTuple):
    """What a draft is made from, as the host knows it: R rows, the last F of which are the frontier's."""

    nodes: Sequence[int]  # [R] node ids
    positions: Sequence[int]  # [R]
    seen: np.ndarray | None  # [R, R] 0 or 1: which rows each of them sees, beside cached ones; None: all before it
    frontier: int  # F
    changed: Mapping[int, Sequence[int]]  # nodes that have another row than in the last cycle, by their new type
    entered: Sequence[int] = ()  # nodes that entered the pipeline in this cycle


class StaticHead:
    """The head's memory, and its step (rows by type, layers, lm_head) in shapes and addresses that never change.

    A step always has R rows, the last W of which are the frontier's, and looks at its whole cache under a mask. A row
    stands in for those that are missing, and no other row sees it there. W nodes of each type get a new row; a spare
    node, which no row shows, stands in for those that are missing. All that the device has to know of a cycle comes in
    one copy. The projections, each kind of layer and the lm_head are compiled; on CUDA the step is captured as a graph.
    """

    def __init__(self, head: SpeculationHead, target: Target, stage_sizes: Sequence[int], plan: CachePlan):
        """Compiles. NotCompiled where that is impossible."""
        self.plan, self._head, self._copies = plan, head, HostCopies(target.device)
        width, kinds = plan.width, max(head.depth_types(stage_sizes)) + 1
        # n positions are in flight, one more where verdicts lag; beside them, the tokens that completed last.
        count = (len(stage_sizes) + 1) * width + 2
        self.cache = HeadCache(head, plan.slots + count)
        zeros, hidden = partial(torch.zeros, dtype=target.dtype, device=target.device), target.config.hidden_size
        self.features = zeros(plan.nodes + 1, len(head.config.anchors), hidden)  # the last node is the spare one
        self.shown = zeros(len(head.spec_layers) if head.fixed_rows else 1, plan.nodes + 1, hidden)
        self._spare = plan.nodes

        shapes = (1,), (width,), (kinds, width), (count,), (count,), (count, count)
        sizes = [prod(shape) for shape in shapes]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.long, device=target.device)
        parts = (part.view(shape) for part, shape in zip(self._numbers.split(sizes), shapes, strict=True))
        self._length, self._entered, self._changed, self._nodes, self._positions, self._seen = parts
        self._seen.fill_diagonal_(1)  # no row without a key
        self._slots = torch.arange(plan.slots + count, device=target.device)
        self._rope = target.rope(plan.slots)

        self._project = compiled_projections(head)
        self._queries = [head.num_queries(index, count, width) for index in range(len(head.spec_layers))]
        self._layers = [compiled_head_layer(head, index, asked) for index, asked in enumerate(self._queries)]
        self._logits = compiled_logits(target, head, width)
        with compiling(layers_of(target)):
            for _ in range(WARM_UP_RUNS):
                self._stepped()
        self._run_projections, self._run_step = (
            prepared(step, target.device) for step in (self._projected, self._stepped)
        )

    def draft(self, rows: DraftRows, h0: Tensor | None) -> Tensor:
        """Logits [F, V_d] for the positions after the frontier, valid until the next call.

        h0 [w, H]: of the nodes that entered.
        """
        first, *more = self._rounds(rows.changed)
        self._copies.copy(self._listed(rows, first), into=self._numbers)
        if h0 is not None:
            self.features[:, 0].index_copy_(0, self._entered[: len(h0)], h0)
        for changed in more:  # after the prompt, or where a rejection has brought many tokens nearer
            self._run_projections()
            self._copies.copy(changed, into=self._changed)
        return self._run_step()[: rows.frontier]

    def _rounds(self, changed: Mapping[int, Sequence[int]]) -> list[np.ndarray]:
        """Nodes of each type whose rows are computed at once, [K, W]: as many times as it takes, at least once."""
        kinds, width = self._changed.shape
        count = max(1, -(-max(map(len, changed.values()), default=0) // width))
        rounds = np.full((count, kinds, width), self._spare)
        for kind, nodes in changed.items():
            for place, node in enumerate(nodes):
                rounds[place // width, kind, place % width] = node
        return list(rounds)

    def _listed(self, rows: DraftRows, changed: np.ndarray) -> np.ndarray:
        """The numbers of a cycle, in the order of their buffer."""
        count, width, real = len(self._nodes), len(self._entered), len(rows.nodes)
        others = real - rows.frontier
        assert others <= count - width, f"{real} rows, {rows.frontier} of the frontier, but the head has {count}"
        places = np.r_[:others, count - width : count - width + rows.frontier]
        nodes, positions = np.full(count, rows.nodes[0]), np.full(count, rows.positions[0])
        nodes[places], positions[places] = rows.nodes, rows.positions
        seen = np.eye(count, dtype=int)
        seen[np.ix_(places, places)] = np.tri(real) if rows.seen is None else rows.seen
        entered = np.full(width, self._spare)
        entered[: len(rows.entered)] = rows.entered
        return np.concatenate([[self.cache.length], entered, changed.ravel(), nodes, positions, seen.ravel()])

    def _projected(self) -> None:
        """New rows for the nodes that changed."""
        self.shown.index_copy_(1, self._changed.flatten(), self._project(self.features, self._changed))

    def _stepped(self) -> Tensor:
        """The step: logits [W, V_d]."""
        self._projected()
        head, count, width = self._head, len(self._nodes), len(self._entered)
        shown = self.shown.index_select(1, self._nodes)
        rope = tuple(table.index_select(1, self._positions) for table in self._rope)
        ahead = self._slots - self._length  # of the first row's slot
        own = self._seen.bool().index_select(1, ahead.clamp(0, count - 1)) & (ahead < count)
        mask, slots = own | (ahead < 0), self._slots[:count] + self._length
        rows = shown[:1]
        for index, (layer, asked) in enumerate(zip(self._layers, self._queries, strict=True)):
            rows = head.rows_into(index, rows, shown, width)
            rows = layer(rows, rope, mask[count - asked :], *self.cache.tensors(index), slots)
        return self._logits(rows[0]).float()


def prepared(step: Callable[[], Tensor | None], device: torch.device) -> Callable[[], Tensor | None]:
    """What runs a step: on CUDA the replay of a graph, whose output is in the same memory each time."""
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Tensor | None:
        graph.replay()
        return output

    return replay
