"""One class runs decoder layers: local stages, ranks, the autoregressive baseline and every drafter use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby, pairwise

import torch
from torch import Tensor

from decoding.cache import StageCache
from decoding.compiled import compiled_layer, compiling, layers_of
from decoding.nodes import CHECKPOINT, CachePlan, Kept, NodeBatch
from loading.target_config import LINEAR, SLIDING, is_linear_attention
from pipeline_model import Masks, Target, layers_available


def partition(target: Target, stage_sizes: Sequence[int], *, compiled: bool = False) -> list[Stage]:
    """The stages of a split; `compiled` as for `Stage`."""
    bounds = pairwise(layers_available(stage_sizes))
    return [Stage(target, range(lo, hi), compiled=compiled) for lo, hi in bounds]


class Stage:
    """Decoder layers [lo, hi) of the target with their memory, which all the tokens at depth s run through in a cycle.

    The one class that runs layers: local stages, ranks, the autoregressive baseline (one stage) and all drafters use
    it. Hidden states are [q, H] or [w, H]; every call returns those that leave the stage and the anchors captured on
    the way: {b: h_b}, taken from the layers' outputs, before any final norm.
    """

    def __init__(self, target: Target, layers: range, *, compiled: bool = False):
        """`compiled`: batches of nodes go through compiled layers, on CUDA as one graph; prompts run as ever."""
        self._target, self.layers, self._compiled = target, layers, compiled
        self.anchors: frozenset[int] = frozenset()  # the b of the h_b that are captured
        self.cache: StageCache | None = None  # as large as the largest generation so far
        self._static: dict[tuple[int, bool], StaticForward] = {}  # of compiled batches, by width and whether of a tree
        self._forward: StaticForward  # of this generation
        self._kept: Kept
        self._state: Tensor  # [1] node id whose linear-attention states the rest of the prompt goes on from
        self._root: Tensor  # [1] node id of the prompt's last token
        self._checkpoint: Tensor  # [1] CHECKPOINT

    def start(self, plan: CachePlan, root: int, anchors: Iterable[int] = ()) -> None:
        """A generation begins: have memory for it, capture those of the anchors that these layers produce."""
        target, kept = self._target, plan.kept
        self.anchors = frozenset(b for b in anchors if self.layers.start < b <= self.layers.stop)
        if self._compiled:
            plan = plan.in_steps()
        if kept.slots:
            self.cache.move(kept.slots, kept.length)
        if self.cache is None or not self.cache.plan.fits(plan):
            self._make_room(plan)
        elif plan.tree or self._compiled:
            self.cache.clear(kept.length)
        self._kept = kept
        nodes = torch.tensor([kept.node, root, CHECKPOINT], device=target.device)
        self._state, self._root, self._checkpoint = nodes.split(1)
        if self._compiled and plan.width:
            kind = plan.width, plan.tree
            if kind not in self._static:
                self._static[kind] = StaticForward(target, self.layers, self.cache, *kind)
            self._forward = self._static[kind]
            self._forward.start(self.anchors)

    def _make_room(self, plan: CachePlan) -> None:
        """Have memory for a plan that does not fit; with what is in memory, where tokens are kept."""
        target = self._target
        self._static = {}
        plan = plan if self.cache is None else plan.joined(self.cache.plan)
        if plan.kept.length:
            self.cache.resize(plan)
        else:
            self.cache = None  # its memory can be used again
            self.cache = StageCache(target.config, self.layers, plan, target.dtype, target.device)

    def prefill(self, hidden: Tensor, start: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a chunk of the prompt, [q, H] at positions start .. start + q - 1: one of `Kept.chunks`."""
        length = len(hidden)
        node = self._checkpoint if start + length <= self._kept.checkpoint else self._root
        self.cache.prefill(start, length, self._state, node)
        self._state = node
        masks = self._target.prompt_masks(length, start, hidden.device)
        return _rows(*self._run(self.layers, hidden[None], slice(start, start + length), masks), 0)

    def run(self, batch: NodeBatch, hidden: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Run one position's nodes, [w, H]."""
        if self._compiled:
            return self._forward.run([batch], hidden)
        self.cache.enter(batch)
        position = slice(batch.position, batch.position + 1)
        return _rows(*self._run(self.layers, hidden[:, None], position, batch.masks), 1)

    def run_chain(self, batches: Sequence[NodeBatch], hidden: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a chain of q tokens at successive positions in one pass, [q, H].

        Linear-attention layers leave a state after every token only when they run one token at a time; the others run
        them all at once, as a prompt.
        """
        if self._compiled:
            return self._forward.run(batches, hidden)
        start, hidden, captured = batches[0].position, hidden[None], {}
        positions = slice(start, start + len(batches))
        masks = self._target.prompt_masks(len(batches), start, hidden.device)
        for one_by_one, group in groupby(self.layers, partial(is_linear_attention, self._target.config)):
            layers = list(group)
            layers = range(layers[0], layers[-1] + 1)
            if one_by_one:
                parts = []
                for row, batch in enumerate(batches):
                    self.cache.enter(batch)
                    place = slice(start + row, start + row + 1)
                    parts.append(self._run(layers, hidden[:, row : row + 1], place, Masks()))
                hidden = torch.cat([part for part, _ in parts], dim=1)
                captured |= {b: torch.cat([found[b] for _, found in parts], dim=1) for b in parts[0][1]}
            else:
                nodes = batches[-1].nodes
                self.cache.prefill(start, len(batches), nodes, nodes)
                hidden, found = self._run(layers, hidden, positions, masks)
                captured |= found
        return _rows(hidden, captured, 0)

    def _run(self, layers: range, hidden: Tensor, positions: slice, masks: Masks) -> tuple[Tensor, dict[int, Tensor]]:
        return self._target.run_layers(layers, hidden, positions, masks, self.anchors, self.cache)


def _rows(hidden: Tensor, captured: dict[int, Tensor], dim: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Hidden states and anchors without a dimension of size 1."""
    return hidden.squeeze(dim), {b: states.squeeze(dim) for b, states in captured.items()}


WARM_UP_RUNS = 2  # of compiled layers, before a generation's prompt


class StaticForward:
    """A stage's forward of a batch in shapes and addresses that never change, through compiled layers.

    W rows always run (the first one stands in for missing ones), and attention sees all KV slots under a mask. The rows
    are the nodes of one position, or the tokens of a chain, whose positions follow each other. Each kind of layer is
    compiled once and serves all layers of its kind. On CUDA the whole forward is captured as one graph, and what leaves
    it is copied, as the next replay writes to the same memory.
    """

    def __init__(self, target: Target, layers: range, cache: StageCache, width: int, tree: bool):
        self._target, self._layers, self._cache, self._tree = target, layers, cache, tree
        self._runs = [  # of each layer: what runs it, and its weights
            (compiled_layer(target, index), dict(target.layers[index].named_parameters())) for index in layers
        ]
        device, slots = target.device, cache.plan.slots
        self._range, self._slots = (torch.arange(count, device=device) for count in (width, slots))
        self._rows = torch.zeros(width, 4, dtype=torch.long, device=device)
        self._hidden = torch.zeros(width, 1, target.config.hidden_size, dtype=target.dtype, device=device)
        self._rope = tuple(table.repeat(width, 1, 1) for table in target.rope(1))
        window = None if target.window is None else torch.zeros(width, 1, 1, slots, dtype=torch.bool, device=device)
        self._masks = Masks(torch.zeros(width, 1, 1, slots, dtype=torch.bool, device=device), window)
        self._anchors: frozenset[int] = frozenset()
        self._ready_for: frozenset[int] | None = None  # the anchors that all is compiled and captured for
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, dict[int, Tensor]]  # of the graph

    def start(self, anchors: frozenset[int]) -> None:
        """A generation begins. Compiles, warms up and captures where that has not been done for these anchors.

        NotCompiled where a layer cannot be compiled.
        """
        for mask in self._masks:
            if mask is not None:
                mask.zero_()
        if anchors == self._ready_for:
            return
        self._anchors, self._ready_for, self._graph = anchors, None, None
        self._masks.full[..., 0] = True  # no row without a key
        if self._target.window is not None:
            self._masks.window[..., 0] = True
        with compiling(layers_of(self._target)), self._cache.restored():
            for _ in range(WARM_UP_RUNS):
                self._forward()
        if self._target.device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outputs = self._forward()
        self._ready_for = anchors

    def run(self, batches: Sequence[NodeBatch], hidden: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the nodes of a batch, [w, H], or of several batches that are a chain; returns as `Stage.run`."""
        count, first = len(hidden), batches[0]
        rows = first.rows if len(batches) == 1 else torch.cat([batch.rows for batch in batches])
        self._fill(self._rows, rows)
        self._fill(self._hidden, hidden[:, None])
        positions = slice(first.position, first.position + len(batches))
        for fixed, table in zip(self._rope, self._target.rope(positions.stop, positions.start), strict=True):
            self._fill(fixed, table[0, :, None])
        self._fill_masks(first, len(batches))
        if self._graph is None:
            output, captured = self._forward()
            return output[:count, 0], {b: states[:count, 0] for b, states in captured.items()}
        self._graph.replay()
        output, captured = self._outputs
        return output[:count, 0].clone(), {b: states[:count, 0].clone() for b, states in captured.items()}

    def _fill_masks(self, first: NodeBatch, length: int) -> None:
        """Those of a batch of a tree, or of a chain of so many tokens."""
        if first.mask is not None:
            for fixed, mask in zip(self._masks, first.masks, strict=True):
                if mask is not None:
                    self._fill(fixed[..., : mask.shape[-1]], mask)
            return
        ahead = (self._slots - self._range[:length, None])[:, None, None]  # of the first token's position, but for that
        past = ahead <= first.position
        self._fill(self._masks.full, past)
        if self._target.window is not None:
            self._fill(self._masks.window, past & (ahead > first.position - self._target.window))

    @staticmethod
    def _fill(fixed: Tensor, ours: Tensor) -> None:
        """Copy w rows into W, the first one into those that are missing as well."""
        fixed[: len(ours)] = ours
        if len(ours) < len(fixed):
            fixed[len(ours) :] = ours[:1]

    def _forward(self) -> tuple[Tensor, dict[int, Tensor]]:
        target, hidden, captured = self._target, self._hidden, {}
        masks = target.attention_masks(self._masks, hidden.dtype)
        for index, (run, weights) in zip(self._layers, self._runs, strict=True):
            kind, memory = target.layer_types[index], self._cache[index].tensors()
            if kind == LINEAR and not self._tree:  # a row starts from the state that the one before it leaves
                rows = (slice(row, row + 1) for row in range(len(hidden)))
                hidden = torch.cat([self._run(run, weights, hidden, None, memory, row) for row in rows])
            else:
                seen = None if kind == LINEAR else masks.window if kind == SLIDING else masks.full
                hidden = self._run(run, weights, hidden, seen, memory, slice(None))
            if index + 1 in self._anchors:
                captured[index + 1] = hidden
        return hidden, captured

    def _run(self, run, weights, hidden: Tensor, mask: Tensor | None, memory: tuple, rows: slice) -> Tensor:
        """One layer over some of the rows."""
        _, nodes, parents, slots = self._rows[rows].unbind(1)
        rope = tuple(table[rows] for table in self._rope)
        return run(weights, hidden[rows], rope, mask, *memory, nodes, parents, slots)
