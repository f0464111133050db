"""Speculative Pipeline Decoding: the decode loop.

One loop serves everything: the chain (W = 1), the draft tree (W > 1), single-process and distributed stages, and the
autoregressive baseline (no drafter). Each cycle is draft, run the stages, verify, commit or roll back:

    executor   runs the target's stages: begin a cycle, finish a cycle, roll back     LocalExecutor
    drafter    drafts from features that exist before the cycle                       SPDDrafter, or None
    verify     a pure function: the target's logits and the candidates -> a verdict   decoding/sampling.py
    TokenTree  the newest tokens and all candidates that continue them                decoding/tree.py
    Decoder    the loop; it only moves tokens along and keeps score

The symbols are those of pipeline_model.py. Run this file to see the pipeline beside standard generation.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import operator
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from decoding.chat import Chat, Conversation
from decoding.compiled import compiled_logits
from decoding.nodes import CHECKPOINT, CachePlan, HostCopies, Kept, NodeBatch, NodeBoard
from decoding.result import GenerationResult, TokenEvent, shared_length
from decoding.sampling import NEUTRAL, Sampling, Verdict, draw, verify
from decoding.stage import partition
from decoding.static_head import DraftRows, StaticHead
from decoding.text import TextStream, paint
from decoding.tree import Node, TokenTree, living
from loading.chat_template import add_template_flags, check_template_flags, use_template
from loading.flags import (
    add_compile_flag,
    add_device_flag,
    add_dtype_flag,
    add_loading_flags,
    add_quantization_flag,
    add_sampling_flags,
    resolve_device,
    resolve_dtype,
)
from loading.target_config import LINEAR, default_target_path, load_target_config
from loading.target_files import check_attention_kernels, check_compiled
from loading.tokenizer import encode_prompt, load_tokenizer, print_unused_settings, token_ids
from pipeline_model import HeadCache, SpeculationHead, Target, read_checkpoint, read_head
from script_utils import Parser, Switch, check_output_file, prompt_bar, quiet_libraries, run_script
from timeline import DRAFT, VERIFY, WAIT, Span, Timeline, stage_index, stage_row, time_table, write_trace
from viewer.page import Setting, run_of, write_page
from viewer.recording import Recorder, Recording, RowsSeen

T = TypeVar("T")
SHOWN_ALTERNATIVES = 3  # a recording keeps so many of the tokens that the head finds likeliest

# ---------------------------------------------------------------------------------------------------------------------
# Executors: who runs the stages
# ---------------------------------------------------------------------------------------------------------------------


class Turn:
    """A generation's turn on its executor and its drafter, which keep its state and so serve one generation at a time.

    Whoever starts takes the turn, also from a generation that was left half-way: nobody has to say that it will not go
    on. Should it go on all the same, that is a RuntimeError, and so is a start in the middle of another one's step, by
    another thread.
    """

    _holders: ClassVar[WeakKeyDictionary[object, int]] = WeakKeyDictionary()  # executor or drafter -> whose turn it is
    _working: ClassVar[set[int]] = set()  # turns that are in a step
    _numbers = itertools.count()
    _lock = threading.Lock()

    def __init__(self, *shared: object):
        self._number, self._shared = next(self._numbers), shared

    @property
    def is_held(self) -> bool:
        """Whether nobody else has taken the turn since."""
        return all(self._holders.get(shared) == self._number for shared in self._shared)

    def take(self) -> None:
        with self._lock:
            if any(self._holders.get(shared) in self._working for shared in self._shared):
                raise RuntimeError("another thread is decoding on this executor: one generation at a time")
            self._holders.update(dict.fromkeys(self._shared, self._number))

    def __enter__(self) -> None:
        """A step begins."""
        with self._lock:
            if not self.is_held:
                raise RuntimeError(
                    "this generation cannot go on: a later one has started on its executor or drafter, "
                    "which serve one generation at a time"
                )
            self._working.add(self._number)

    def __exit__(self, *_: object) -> None:
        self._working.discard(self._number)


class PromptOutput(NamedTuple):
    """What a prompt of P tokens leaves behind."""

    logits: Tensor  # [V], the target's, after the last token
    features: Tensor  # [P - kept, m, H], the anchors of every token that ran


class Captured(NamedTuple):
    """Anchors that one stage captured in a cycle."""

    nodes: Tensor  # [w] node ids
    hidden: dict[int, Tensor]  # b -> h_b [w, H]


class Logits:
    """The target's logits after w nodes, [w, V]: where the lm_head runs, and when.

    `row` maps a row to its logits [V], and may compute them only then: most candidates are never asked for theirs.
    """

    def __init__(self, row: Callable[[int], Tensor]):
        self.row = row

    @classmethod
    def of_each(cls, logits: Callable[[Tensor], Tensor], hidden: Tensor) -> Logits:
        """Final norm and lm_head, as `logits`, of h_L [w, H]: of each row when it is asked for."""
        return cls(lambda row: logits(hidden[row]))

    @classmethod
    def of_all(cls, compute: Callable[[], Tensor]) -> Logits:
        """All of them at once, [w, V], when the first one is asked for."""
        once = cache(compute)
        return cls(lambda row: once()[row])

    def at(self, rows: Sequence[int]) -> Logits:
        """Those of some rows, in this order."""
        return Logits(lambda row: self.row(rows[row]))


class Completed(NamedTuple):
    """The nodes that left the last stage in a cycle: all of one position, or a chain."""

    ids: tuple[int, ...]
    logits: Logits


class Executor(Protocol):
    """Runs the target's n stages, locally or on other ranks. One generation at a time: see `Turn`.

    The executor decides where logits come from and when it waits for a stage: nobody asks for anything earlier than it
    is needed.
    """

    stage_sizes: tuple[int, ...]
    anchors: tuple[int, ...]
    device: torch.device
    vocab_size: int
    has_states: bool  # whether some layers are linear attention, which keeps states of a few tokens alone
    is_undisturbed: bool  # whether its last generation was the last one in the stages' memory

    def start(self, prompt: Sequence[int], root: int, plan: CachePlan, timeline: Timeline) -> PromptOutput:
        """Have memory, run what is not kept of the prompt; `root` is the node id of its last token."""

    def begin_cycle(self, position: int, entering: Sequence[Node]) -> Tensor | None:
        """Start a cycle; the entering nodes go into stage 0. Returns their h_0 [w, H], None when nothing enters.

        Called once per cycle; where chains are drafted, once more for each of their tokens.
        """

    def finish_cycle(self) -> tuple[Iterable[Captured], Completed | None]:
        """Every stage has run its tokens. The anchors are asked for once, after the verdict, before the next draft."""

    def roll_back(self, dead: set[int]) -> None:
        """Drop the in-flight nodes with these ids."""

    def finish(self) -> None:
        """The generation has ended. All stage times are in the timeline afterwards."""


class LocalExecutor:
    """All stages in this process, on one device, one after the other."""

    PREFILL_CHUNK = 4096  # prompt tokens that a stage runs at once: bounds the memory of long prompts
    is_undisturbed = True  # nobody else has these stages

    def __init__(
        self, target: Target, stage_sizes: Sequence[int], anchors: Sequence[int] = (0,), *, compiled: bool = False
    ):
        """`compiled`: as for `Stage`."""
        self.target, self.stage_sizes, self.anchors = target, tuple(stage_sizes), tuple(anchors)
        self.device, self.vocab_size = target.device, target.config.vocab_size
        self.has_states = LINEAR in target.layer_types
        self.stages = partition(target, stage_sizes, compiled=compiled)
        self._compiled, self._logits = compiled, target.logits
        self._inputs: list[tuple[NodeBatch, Tensor] | None] = []  # what each stage runs next, [w, H]
        self._board = NodeBoard(self.device, target.window)
        self._copies = HostCopies(self.device)
        self._timeline: Timeline | None = None

    def start(self, prompt: Sequence[int], root: int, plan: CachePlan, timeline: Timeline) -> PromptOutput:
        self._inputs = [None] * len(self.stages)
        self._timeline = timeline
        self._board.start(plan, len(prompt), root)
        for stage in self.stages:
            stage.start(plan, root, self.anchors)
        if self._compiled:
            self._logits = compiled_logits(self.target)
        tokens = torch.tensor(prompt, device=self.device)
        features = []
        chunks = list(plan.kept.chunks(len(prompt), self.PREFILL_CHUNK))
        with prompt_bar(chunks) as bar:
            for chunk in chunks:
                hidden = self.target.embed(tokens[chunk.start : chunk.stop])
                captured = {0: hidden}
                for stage in self.stages:
                    hidden, anchors = stage.prefill(hidden, chunk.start)
                    captured |= anchors
                    bar.update(len(chunk) / len(self.stages))
                features.append(torch.stack([captured[b] for b in self.anchors], dim=1))
        return PromptOutput(self._logits(hidden[-1]), torch.cat(features))

    def begin_cycle(self, position: int, entering: Sequence[Node]) -> Tensor | None:
        if not entering:
            return None
        batch = self._board.enter(position, [node.row for node in entering])
        hidden = self.target.embed(batch.tokens)
        self._inputs[0] = batch, hidden
        return hidden

    def finish_cycle(self) -> tuple[list[Captured], Completed | None]:
        captured, completed = [], None
        last = len(self.stages) - 1
        for index in range(last, -1, -1):  # last stage first: each output takes the place of an input already used
            if self._inputs[index] is None:
                continue
            batch, hidden = self._inputs[index]
            with self._timeline.span(stage_row(index)):
                hidden, anchors = self.stages[index].run(batch, hidden)
            if anchors:
                captured.append(Captured(batch.nodes, anchors))
            self._inputs[index] = None
            if index == last:
                completed = Completed(batch.ids, Logits.of_each(self._logits, hidden))
            else:
                self._inputs[index + 1] = batch, hidden
        return captured, completed

    def roll_back(self, dead: set[int]) -> None:
        kept: dict[int, list[int]] = {}  # by stage: rows that stay, where others do not
        for index, item in enumerate(self._inputs):
            if item is None:
                continue
            rows = [row for row, node in enumerate(item[0].ids) if node not in dead]
            if not rows:
                self._inputs[index] = None
            elif len(rows) < len(item[0].ids):
                kept[index] = rows
        for (index, rows), at_rows in zip(kept.items(), self._copies.copy_each(kept.values()), strict=True):
            batch, hidden = self._inputs[index]
            self._inputs[index] = batch.keep(rows, at_rows), hidden.index_select(0, at_rows)

    def finish(self) -> None:
        """The times are in the timeline already."""


# ---------------------------------------------------------------------------------------------------------------------
# Drafters
# ---------------------------------------------------------------------------------------------------------------------


class Drafter(Protocol):
    """Drafts the next position from what was computed before the cycle."""

    draft_token_ids: Tensor | None  # [V_d] target id of each draft id; None: V_d = V

    def start(self, plan: CachePlan, features: Tensor, path: Sequence[Node]) -> None:
        """Take in the prompt: features [P, m, H] of all its tokens; `path` are the nodes of its last ones.

        An `SPDDrafter` can do without the features of the first tokens, if it still has their rows.
        """

    def enter(self, nodes: Sequence[Node], h0: Tensor) -> None:
        """New nodes enter the pipeline, with their h_0 [w, H]."""

    def draft(self, tree: TokenTree) -> Tensor:
        """Logits over the draft vocabulary for the position after each frontier node, [F, V_d]."""

    def observe(self, captured: Iterable[Captured]) -> None:
        """The stages captured these anchors in the previous cycle."""


class SPDDrafter:
    """The speculation head at work (method.md section 5): one forward per cycle, over all in-flight nodes at once.

    The head's cache keeps one row per token for good, with the deepest type. Every other row is fed anew each cycle,
    with the type of its distance x to the newest position: f(min(n, x)). In flight and with a full pipeline that is
    the token's depth. With `use_deepest` a completed token has the deepest type at any distance, and stays.
    """

    PREFILL_CHUNK = 256  # prompt tokens that the head takes in at once: its masks are as wide as the whole prompt

    def __init__(
        self,
        head: SpeculationHead,
        target: Target,
        stage_sizes: Sequence[int],
        use_deepest: bool | None = None,
        *,
        compiled: bool = False,
    ):
        """`compiled`: a cycle's step goes through compiled functions, on CUDA as one graph; prompts run as ever."""
        self.head, self.target = head, target
        self.draft_token_ids = head.draft_token_ids
        self.use_deepest = head.config.trained_with_use_deepest if use_deepest is None else use_deepest
        self._anchors = head.config.anchors
        self._types = head.depth_types(stage_sizes)
        self._stage_sizes, self._num_stages = stage_sizes, len(stage_sizes)
        self._compiled = compiled
        self._static: StaticHead | None = None  # of compiled steps, as large as the largest generation so far
        self._cache: HeadCache | None = None
        self._features: Tensor | None = None  # [nodes, m, H] anchors of the live nodes
        self._anchor_features: dict[int, Tensor] = {}  # b -> h_b of the live nodes, [nodes, H]: views of these
        self._rows: Tensor | None = None  # [D, nodes, H] `shown_rows` of the live nodes ...
        self._row_types: list[int | None] = []  # ... and their type; None: not computed for this node yet
        self._copies = HostCopies(target.device)
        self._entered: tuple[list[int], Tensor] | None = None  # ids and h_0 of nodes that the next draft takes in

    def start(self, plan: CachePlan, features: Tensor, path: Sequence[Node]) -> None:
        prompt_length = path[-1].position + 1
        kept = prompt_length - len(features)
        self._allocate(plan, kept)
        self._anchor_features = dict(zip(self._anchors, self._features.unbind(1), strict=True))
        self._row_types = [None] * plan.nodes
        for node in path:
            self._features[node.id] = features[node.position - kept]
        # The last token of the prompt stands at distance 1 when the first generated one is the newest.
        staying = prompt_length if self.use_deepest else max(0, prompt_length - self._num_stages + 1)
        for begin in range(kept, staying, self.PREFILL_CHUNK):
            part = slice(begin, min(begin + self.PREFILL_CHUNK, staying))
            rows = self.head.shown_rows(self._types[-1], features[part.start - kept : part.stop - kept])
            self.head.forward_rows(rows, self.target.rope(part.stop, part.start), self._cache)
            self._cache.length = part.stop

    def _allocate(self, plan: CachePlan, kept: int) -> None:
        """Memory for a generation, with the first `kept` rows: new, but for compiled steps, which keep theirs."""
        before, self._cache = self._cache if kept else None, None
        if self._compiled:
            plan, static = plan.in_steps(), self._static
            if static is None or not static.plan.fits(plan) or static.plan.width != plan.width:
                plan = plan if static is None else plan.joined(static.plan)
                self._static = static = None  # its memory can be used again
                self._static = StaticHead(self.head, self.target, self._stage_sizes, plan)
            self._cache, self._features, self._rows = self._static.cache, self._static.features, self._static.shown
            self._cache.clear(kept if self._cache is before else 0)
            if kept and self._cache is not before:
                self._cache.take(before, kept)
            return
        # Rows of in-flight nodes follow the rows that stay; a chain has at most n + 1 of them, a tree `nodes`.
        self._cache = HeadCache(self.head, plan.slots + plan.nodes)
        if kept:
            self._cache.take(before, kept)
        like, hidden = {"dtype": self.target.dtype, "device": self.target.device}, self.target.config.hidden_size
        self._features = torch.zeros(plan.nodes, len(self._anchors), hidden, **like)
        depth = len(self.head.spec_layers) if self.head.fixed_rows else 1
        self._rows = torch.zeros(depth, plan.nodes, hidden, **like)

    def settle(self, tree: TokenTree) -> int:
        """A generation is over: take in what has completed. Returns how many tokens have rows for the next one."""
        if self._entered is not None:  # after the last draft
            ids, h0 = self._entered
            self._anchor_features[0][ids] = h0
        nodes = [node for node in tree.path if self._cache.length <= node.position < tree.completed]
        if nodes and nodes[0].position == self._cache.length:
            rows = self.head.shown_rows(self._types[-1], self._features[[node.id for node in nodes]])
            part = slice(nodes[0].position, nodes[-1].position + 1)
            self.head.forward_rows(rows, self.target.rope(part.stop, part.start), self._cache)
            self._cache.length = part.stop
        return min(self._cache.length, tree.completed)

    def enter(self, nodes: Sequence[Node], h0: Tensor) -> None:
        for node in nodes:
            self._row_types[node.id] = None
        self._entered = [node.id for node in nodes], h0

    def observe(self, captured: Iterable[Captured]) -> None:
        # A row of a node that has died since may land on a new node with its id: an anchor that the new node will reach
        # later, and overwrite.
        for nodes, hidden in captured:
            for anchor, states in hidden.items():
                self._anchor_features[anchor].index_copy_(0, nodes, states)

    def draft(self, tree: TokenTree) -> Tensor:
        frontier = tree.frontier
        newest = frontier[0].position
        if not self.use_deepest:  # after a rollback, rows that were far enough to stay may be near again
            self._cache.length = min(self._cache.length, max(0, newest - self._num_stages + 1))
        nodes = [node for node in tree.path if node.position >= self._cache.length]
        staying = sum(self._stays(node, newest) for node in nodes)
        for level in tree.levels:
            nodes.extend(level)
        entered, h0 = self._entered or ([], None)
        self._entered = None
        branched = len(nodes) > newest + 1 - nodes[0].position
        rows = DraftRows(
            nodes=[node.id for node in nodes],
            positions=[node.position for node in nodes],
            seen=_ancestors(nodes) if branched else None,
            frontier=len(frontier),
            changed=self._changed(nodes, newest),
            entered=entered,
        )
        logits = self._run(rows, h0) if self._static is None else self._static.draft(rows, h0)
        self._cache.length += staying
        return logits

    def _run(self, rows: DraftRows, h0: Tensor | None) -> Tensor:
        """The step as it comes: logits [F, V_d]."""
        # All that the device has to know of this cycle, in one copy.
        seen = [] if rows.seen is None else rows.seen.ravel().tolist()
        lists = [rows.entered, rows.nodes, rows.positions, *rows.changed.values(), seen]
        at_entered, at_rows, at_positions, *at_changed, seen = self._copies.copy_each(lists)
        if h0 is not None:
            self._anchor_features[0].index_copy_(0, at_entered, h0)
        for kind, at_kind in zip(rows.changed, at_changed, strict=True):
            self._rows.index_copy_(1, at_kind, self.head.shown_rows(kind, self._features.index_select(0, at_kind)))

        cos, sin = self.target.rope(rows.positions[-1] + 1)
        hidden = self.head.forward_rows(
            self._rows.index_select(1, at_rows),
            (cos.index_select(1, at_positions), sin.index_select(1, at_positions)),
            self._cache,
            None if rows.seen is None else self._tree_mask(seen.view(len(rows.nodes), -1)),
            outputs=rows.frontier,
        )
        return self.head.lm_head(self.target.norm(hidden))

    def rows_seen(self, tree: TokenTree) -> RowsSeen:
        """What the last draft saw; to be asked before the tree changes."""
        nodes = [node for node in tree.path if node.position >= self._cache.length]
        nodes.extend(itertools.chain.from_iterable(tree.levels))
        fed = [(node.position, self._row_types[node.id]) for node in nodes]
        return RowsSeen(self._cache.length, self._types[-1], fed)

    def _stays(self, node: Node, newest: int) -> bool:
        """Whether this row has the deepest type for good, whatever is accepted or rejected later."""
        distance = newest - node.position
        # The newest row is g_0, the only type that drafts, even if a lagged verdict finds it completed already.
        return node.completed and distance > 0 if self.use_deepest else distance >= self._num_stages

    def _changed(self, nodes: Sequence[Node], newest: int) -> dict[int, list[int]]:
        """Ids of the nodes whose type is another than in the last cycle, by their new type."""
        changed: dict[int, list[int]] = {}
        for node in nodes:
            kind = self._types[-1 if self._stays(node, newest) else newest - node.position]
            if self._row_types[node.id] != kind:
                self._row_types[node.id] = kind
                changed.setdefault(kind, []).append(node.id)
        return changed

    def _tree_mask(self, seen: Tensor) -> Tensor:
        """[R, length + R] bool from [R, R]: a row sees the cached ones, its ancestors and itself."""
        cached = torch.ones(len(seen), self._cache.length, dtype=torch.bool, device=seen.device)
        return torch.cat([cached, seen.bool()], dim=1)


def _ancestors(nodes: Sequence[Node]) -> np.ndarray:
    """For each of R nodes, whether it sees each of them: 1 for itself and its ancestors, [R, R]."""
    row_of = {node.id: row for row, node in enumerate(nodes)}
    seen = np.eye(len(nodes), dtype=int)
    for row, node in enumerate(nodes):
        parent = row_of.get(node.parent.id) if node.parent is not None else None
        if parent is not None:
            seen[row] |= seen[parent]
    return seen


# ---------------------------------------------------------------------------------------------------------------------
# The decoder
# ---------------------------------------------------------------------------------------------------------------------


def check_limits(max_new_tokens: int, draft_top_k: int) -> None:
    """ValueError for limits that no generation can run with; cheap, so that scripts can call it before they load."""
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: it must be a whole number, at least 1")
    if not isinstance(draft_top_k, Integral) or draft_top_k < 1:
        raise ValueError(f"draft_top_k is {draft_top_k}: the draft tree must be at least 1 wide")


def check_length(prompt_length: int, max_new_tokens: int, max_positions: int) -> None:
    """ValueError for a generation past the target's position limit. The last new token is never run: it needs none."""
    if prompt_length + max_new_tokens - 1 > max_positions:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}: with a prompt of {prompt_length} tokens, that many pass the target's "
            f"limit of {max_positions} positions (the last one needs none): shorten the prompt or lower it"
        )


def check_seed(seed: int) -> None:
    """ValueError for a seed that no generator takes."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}: it must fit 64 bits")


def check_attention(attn_implementation: str, draft_top_k: int, compiled: bool = False) -> None:
    """ValueError for attention kernels that are not installed, or lack the masks of a tree or of compiled stages."""
    if attn_implementation.startswith("flash") and (draft_top_k > 1 or compiled):
        flag = f"--draft_top_k {draft_top_k}" if draft_top_k > 1 else "--compile"
        raise ValueError(f"{flag} needs masks that flash attention lacks: use --attn_implementation sdpa")
    check_attention_kernels(attn_implementation)


class Decoder:
    """Decodes one sequence at a time through an executor, with or without a drafter.

    draft_top_k     W, candidates a position: 1 is the chain
    draft_chain     0: a cycle drafts one position, beside the stages, for the next cycle. m: it drafts m positions in a
                    row, before the only stage, which then runs them all (EAGLE-3); W = 1, no lag
    sample_drafts   a chain's drafts, when sampling: True: from the drafter's distribution, and the ratio test decides.
                    False: its argmax, kept where the target draws the same
    draft_in_line   whether a cycle lasts longer by the draft: stage 0 waits for it, or it for stage 0
    verify_lag      0: a verdict ends its cycle. 1: it arrives one cycle later, off the critical path
    verify_drafts   False accepts every draft unseen, for debugging: the output is the drafter's, not the target's
    keep_trace      the generation keeps its spans, and a `recorder` of what moves in each cycle
    keep_head       the recorder also has what the head saw and how likely it found its drafts
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter | None = None,
        *,
        sampling: Sampling = NEUTRAL,
        draft_top_k: int = 1,
        draft_chain: int = 0,
        sample_drafts: bool = True,
        draft_in_line: bool = False,
        verify_lag: int = 0,
        verify_drafts: bool = True,
        eos_token_ids: Sequence[int] = (),
        max_positions: int | None = None,
        seed: int = 0,
        keep_trace: bool = False,
        keep_head: bool = False,
    ):
        check_limits(1, draft_top_k)
        check_seed(seed)
        if verify_lag not in (0, 1):
            raise ValueError(f"verify_lag is {verify_lag}: it must be 0 or 1")
        if draft_chain and (len(executor.stage_sizes), draft_top_k, verify_lag) != (1, 1, 0):
            raise ValueError(f"draft_chain is {draft_chain}: it needs one stage, draft_top_k 1 and verify_lag 0")
        self.executor, self.drafter, self.sampling = executor, drafter, sampling
        self.draft_chain, self.draft_in_line = draft_chain, draft_in_line or draft_chain > 0
        self.draft_top_k, self.verify_lag, self.verify_drafts = draft_top_k, verify_lag, verify_drafts
        self.eos_token_ids, self.max_positions = frozenset(eos_token_ids), max_positions
        self.seed, self.keep_trace, self.keep_head = seed, keep_trace, keep_head
        self.sample_drafts = sample_drafts

    def generate(self, prompt: Sequence[int] | Tensor | np.ndarray, max_new_tokens: int) -> GenerationResult:
        """Decode to the end. Arguments and errors as `start`."""
        return self.start(prompt, max_new_tokens).finish()

    def start(
        self,
        prompt: Sequence[int] | Tensor | np.ndarray,
        max_new_tokens: int,
        *,
        after: Generation | None = None,
        checkpoint: int = 0,
    ) -> Generation:
        """A generation to iterate over (it streams TokenEvents) or to `finish`.

        prompt: token ids, as `token_ids` takes them. Stops after exactly `max_new_tokens`, or with the first end token.
        ValueError as `check`. A generation that was left half-way cannot go on once the next one has begun (`Turn`).

        after: the last generation of this decoder. The tokens with which both begin are not run again, as far as the
        caches still have them. checkpoint: so many tokens of this prompt, at least, will begin the next one; targets
        with linear attention keep their state after these.
        """
        return Generation(self, self.check(prompt, max_new_tokens), max_new_tokens, after, checkpoint)

    def check(self, prompt: Sequence[int] | Tensor | np.ndarray, max_new_tokens: int) -> list[int]:
        """The prompt as a list of ids.

        ValueError as `token_ids`, for max_new_tokens < 1, and for a generation past the target's position limit.
        """
        ids = token_ids(prompt, self.executor.vocab_size)
        check_limits(max_new_tokens, self.draft_top_k)
        if self.max_positions is not None:
            check_length(len(ids), max_new_tokens, self.max_positions)
        return ids


class Generation:
    """The state of one generation, and its steps: prefill, then cycles of draft, stages, verify, commit.

    Iterating runs it and streams its tokens; `result` is complete when the iteration ends.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: list[int],
        max_new_tokens: int,
        after: Generation | None = None,
        checkpoint: int = 0,
    ):
        self._settings = decoder
        self._executor, self._drafter, self._sampling = decoder.executor, decoder.drafter, decoder.sampling
        self._after, self._checkpoint = after, 0
        if checkpoint and self._executor.has_states:
            self._checkpoint = min(checkpoint, len(prompt) - 1)  # the last token's states are those of its node
        self._turn = Turn(self._executor, *([] if self._drafter is None else [self._drafter]))
        self._prompt, self._max_new_tokens = prompt, max_new_tokens
        self._end = len(prompt) + max_new_tokens  # no token stands here or beyond
        num_stages, width = len(decoder.executor.stage_sizes), decoder.draft_top_k
        tree = decoder.drafter is not None and width > 1
        in_flight = max(num_stages, decoder.draft_chain)
        # Live candidates fill n levels, one more is drafted before the oldest is verified; and the emitted path.
        candidates = (in_flight + 1 + decoder.verify_lag) * width
        self._plan = CachePlan(
            slots=self._end + (candidates if tree else 0),
            nodes=candidates + num_stages + 4,  # one of them is CHECKPOINT
            tree=tree,
            width=width if tree else decoder.draft_chain + 1,
        )
        self.tree = TokenTree(self._plan, prompt, num_stages)
        self._entering: list[Node] = []  # enter stage 0 in the next cycle
        self._captured: Iterable[Captured] = ()  # by the stages, in the previous cycle
        self._due: dict[Node, tuple[Logits, int]] = {}  # completed nodes, and where their logits are: to verify with
        self._generator = torch.Generator(decoder.executor.device).manual_seed(decoder.seed)
        self._q: Tensor | None = None  # [nodes, V_d] what each in-flight draft was sampled from
        self.timeline = Timeline(decoder.executor.device, keep_spans=decoder.keep_trace)
        self._events = self._run()
        self.recorder = Recorder() if decoder.keep_trace else None
        self.result = GenerationResult(
            decoder.executor.stage_sizes, verified_by_fill=[0] * in_flight, accepted_by_fill=[0] * in_flight
        )

    def __iter__(self) -> Iterator[TokenEvent]:
        """The rest of the generation: a second iteration goes on where the first one is."""
        return self._events

    def _run(self) -> Iterator[TokenEvent]:
        self._find_kept()
        self._turn.take()
        event, prefill = self._timed(self._prefill)
        yield event
        decode = 0.0
        while not self.result.stop_reason:
            events, seconds = self._timed(self._cycle)
            decode += seconds
            if self.recorder is not None:
                self.recorder.seconds.append(seconds)
            yield from events
        self._timed(self._executor.finish)
        self.result.timings = self.timeline.finish(
            prefill=prefill,
            decode=decode,
            num_stages=len(self.result.stage_sizes),
            verify_lag=self._settings.verify_lag,
            draft_in_line=self._settings.draft_in_line,
        )

    def _timed(self, step: Callable[[], T]) -> tuple[T, float]:
        """What a step gives, and its seconds. What the caller does between two steps is not decoding."""
        with self._turn:
            begun = time.perf_counter()
            return step(), time.perf_counter() - begun

    def finish(self) -> GenerationResult:
        """Run to the end."""
        for _ in self:
            pass
        return self.result

    def stop(self) -> None:
        """End here, between two tokens: whoever iterates gets no further one, and the times are complete."""
        self.result.stop_reason = self.result.stop_reason or "stopped"

    @torch.inference_mode()
    def kept_for(self, prompt: Sequence[int]) -> Kept:
        """What this generation has left in the caches for another one with this prompt, if nothing ran since.

        The last n + 1 tokens of a prompt always run: the drafter needs their anchors.
        """
        if not (self.result.tokens and self._turn.is_held and self._executor.is_undisturbed):
            return Kept()
        shared = shared_length(self._prompt + self.result.tokens, prompt)
        most = max(0, min(shared, self.tree.completed, len(prompt) - self.tree.keep))
        if self._drafter is not None:
            most = min(most, self._settle_drafter())
        length, node, behind_prompt = most, CHECKPOINT, len(self._prompt)
        if self._executor.has_states:
            known = [node for node in self.tree.path if node.completed and node.position + 1 >= behind_prompt]
            states = {0: CHECKPOINT, self._plan.kept.checkpoint: CHECKPOINT}
            states |= {node.position + 1: node.id for node in known}
            length, node = max(state for state in states.items() if state[0] <= most)
        slots = self.tree.slots[: max(0, length - behind_prompt)] if self._plan.tree else ()
        return Kept(length, node, tuple(slots))

    def _settle_drafter(self) -> int:
        """How many tokens the drafter has rows of, once it knows all that has been computed."""
        if not isinstance(self._drafter, SPDDrafter):
            return 0
        captured, self._captured = self._captured, ()
        self._drafter.observe(captured)
        return self._drafter.settle(self.tree)

    def _find_kept(self) -> None:
        """Plan what need not run of the prompt, and where a linear-attention state is to stay."""
        after, self._after = self._after, None
        kept, wanted = Kept(), self._checkpoint
        if after is not None and (after._executor, after._drafter) == (self._executor, self._drafter):
            kept = after.kept_for(self._prompt)
        if wanted <= kept.length:  # that state is not to be had any more, but an earlier one may be there
            earlier = 0 if after is None else after._plan.kept.checkpoint
            wanted = earlier if earlier <= kept.length else 0
        self._plan = self._plan._replace(kept=kept._replace(checkpoint=wanted))
        self.result.kept_tokens = kept.length

    @torch.inference_mode()
    def _prefill(self) -> TokenEvent:
        output = self._executor.start(self._prompt, self.tree.root.id, self._plan, self.timeline)
        if self._drafter is not None:
            self._drafter.start(self._plan, output.features, self.tree.path)
        token = self._sampling.draw(output.logits, self._generator)
        return self._emit(Verdict(token, None), accepted=True)

    @torch.inference_mode()
    def _cycle(self) -> list[TokenEvent]:
        """One cycle. Returns the tokens it emitted: none while the pipeline fills, several of an accepted chain."""
        self._begin_cycle()
        drafted = self._draft_chain() if self._settings.draft_chain else self._draft()
        self._captured, completed = self._executor.finish_cycle()
        before, self._due = self._due, self._complete(completed)
        self._entering = [] if self._settings.draft_chain else drafted
        self.result.cycles += 1
        events, due = [], before if self._settings.verify_lag else self._due
        while self.tree.root in due and not self.result.stop_reason:  # once, but for a chain
            events.append(self._verify(*due[self.tree.root]))
        self.timeline.end_cycle()
        return events

    def _begin_cycle(self) -> None:
        if self.recorder is not None:
            self.recorder.begin_cycle()
        self._enter(self._entering)
        if self._drafter is not None:
            self._drafter.observe(self._captured)

    def _enter(self, nodes: list[Node]) -> None:
        """Candidates of one position go into stage 0."""
        h0 = self._executor.begin_cycle(nodes[0].position if nodes else -1, nodes)
        if self._drafter is not None and nodes:
            self._drafter.enter(nodes, h0)
        if self.recorder is not None:
            self.recorder.enter(nodes)

    def _draft_chain(self) -> list[Node]:
        """Draft several positions, one from the other, all for this cycle."""
        chain = []
        for _ in range(self._settings.draft_chain):
            drafted = self._draft()
            if drafted:
                self._enter(drafted)
            chain.extend(drafted)
        return chain

    def _draft(self) -> list[Node]:
        """New candidates after the frontier: the best W chains. None at the end of the generation."""
        if self._drafter is None or self.tree.frontier[0].position + 1 >= self._end:
            return []
        with self.timeline.span(DRAFT):
            logits = self._drafter.draft(self.tree).float()
            drafted = [self._draft_one(logits[0])] if self._settings.draft_top_k == 1 else self._draft_best(logits)
        if self.recorder is not None:
            self._record_draft(drafted, logits)
        self.tree.levels.append(drafted)
        return drafted

    def _record_draft(self, drafted: list[Node], logits: Tensor) -> None:
        """Note what was drafted from logits [F, V_d]; nothing here waits for the device."""
        keep_head = self._settings.keep_head
        seen = keep_head and isinstance(self._drafter, SPDDrafter)
        self.recorder.draft(drafted, self._drafter.rows_seen(self.tree) if seen else None)
        if not keep_head or self._settings.draft_top_k > 1:  # a tree's nodes have their scores
            return
        log_probabilities, ids = logits[0].log_softmax(dim=-1), self._drafter.draft_token_ids
        best = log_probabilities.topk(min(SHOWN_ALTERNATIVES, len(log_probabilities)))
        [node] = drafted
        others = torch.arange(len(logits[0]), device=logits.device) if ids is None else ids
        self.recorder.log_probabilities[node] = log_probabilities.masked_fill(others != node.token, -torch.inf).amax()
        self.recorder.drafts[-1].best = self._target_ids(best.indices), best.values

    def _draft_one(self, logits: Tensor) -> Node:
        """Continue the chain: the drafter's argmax, or a sample from its distribution q, which is kept."""
        sampled = self._settings.sample_drafts and not self._sampling.greedy
        q = self._sampling.probabilities(logits) if sampled else None
        draft_id = logits.argmax() if q is None else draw(q, self._generator)
        token = int(self._target_ids(draft_id))
        node = self.tree.new_node(token, self.tree.frontier[0], fill=self.tree.fill)
        if q is not None:
            if self._q is None:
                self._q = q.new_zeros(self._plan.nodes, len(q))
            self._q[node.id] = q
        return node

    def _draft_best(self, logits: Tensor) -> list[Node]:
        """The W best continuations of all frontier nodes, by summed log-probability. logits [F, V_d]."""
        fill, width = self.tree.fill, self._settings.draft_top_k
        best = logits.log_softmax(dim=-1).topk(min(width, logits.shape[-1]), dim=-1)
        # To the host in one copy: a double holds every token id, and every float32, exactly.
        tokens, values = torch.stack([self._target_ids(best.indices).double(), best.values.double()]).tolist()
        continuations = [
            (parent.score + value, int(token), parent)
            for parent, *row in zip(self.tree.frontier, tokens, values, strict=True)
            for token, value in zip(*row, strict=True)
        ]
        chosen = heapq.nlargest(width, continuations, key=operator.itemgetter(0))
        return [self.tree.new_node(token, parent, score, fill) for score, token, parent in chosen]

    def _target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of draft ids, on their device: only the result has to reach the host."""
        ids = self._drafter.draft_token_ids
        return draft_ids if ids is None else ids[draft_ids]

    def _complete(self, completed: Completed | None) -> dict[Node, tuple[Logits, int]]:
        """Mark the nodes that have left the last stage; returns them, each with its row of their logits."""
        if completed is None:
            return {}
        row_of = {node: row for row, node in enumerate(completed.ids)}
        done = {
            node: (completed.logits, row_of[node.id])
            for node in (self.tree.root, *itertools.chain.from_iterable(self.tree.levels))
            if node.id in row_of
        }
        for node in done:
            node.completed = True
        return done

    def _verify(self, logits: Logits, row: int) -> TokenEvent:
        """Let the completed root verify the position after it, by its row of logits; commit the verdict, roll back."""
        candidates = self.tree.levels[0] if self.tree.levels else []
        with self.timeline.span(VERIFY):
            verdict = self._judge(logits.row(row), candidates)
        if candidates:
            self.result.verified_by_fill[candidates[0].fill - 1] += 1
            self.result.accepted_by_fill[candidates[0].fill - 1] += verdict.accepted is not None
        return self._emit(verdict, accepted=verdict.accepted is not None)

    def _judge(self, logits: Tensor, candidates: list[Node]) -> Verdict:
        if not self._settings.verify_drafts and candidates:
            return Verdict(candidates[0].token, 0)
        q = None
        if self._q is not None and candidates:
            q, ids = self._q[candidates[0].id], self._drafter.draft_token_ids
            if ids is not None:
                q = torch.zeros_like(logits, dtype=q.dtype).scatter_(0, ids, q)
        return verify(logits, [node.token for node in candidates], q, self._sampling, self._generator)

    def _emit(self, verdict: Verdict, *, accepted: bool) -> TokenEvent:
        """Commit a verdict to the tree, roll back what disagrees, record the token."""
        dead = self.tree.commit(verdict)
        if dead:
            with self.timeline.rolling_back():
                self._executor.roll_back(dead)
        node = self.tree.root
        self._entering = [node] if verdict.accepted is None else living(self._entering)

        if self.recorder is not None:
            self.recorder.emit(node)

        result = self.result
        result.tokens.append(node.token)
        result.accepted.append(accepted)
        if node.token in self._settings.eos_token_ids:
            result.stop_reason = "eos"
        elif len(result.tokens) == self._max_new_tokens:
            result.stop_reason = "length"
        return TokenEvent(node.token, node.position, accepted, result.cycles)

    @property
    def recording(self) -> Recording:
        """What `keep_trace` kept of a generation that has ended."""
        return Recording(self.result, self.recorder, self.timeline.cycles)

    def trace(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Span, dict]]:
        """What the stages, the head and the verification did in each cycle, for `write_trace`. Needs `keep_trace`."""
        emitted = {len(self._prompt) + index: flag for index, flag in enumerate(self.result.accepted)}
        for span in self.timeline.spans:
            if span.row == DRAFT:
                nodes = self.recorder.drafts[span.cycle].nodes
            elif span.row in (VERIFY, WAIT):
                nodes = []
            else:
                entered = span.cycle - stage_index(span.row)
                nodes = self.recorder.entered[entered] if entered >= 0 else []
            if not nodes:
                yield span, {}
                continue
            position = nodes[0].position
            kept = [node for node in nodes if node.alive and position in emitted]
            fate = "flushed" if not kept else "accepted" if emitted[position] else "corrected"
            text = " | ".join(tokenizer.decode([node.token]) for node in kept or nodes)
            yield span, {"name": text, "position": position, "candidates": len(nodes), "outcome": fate}


# ---------------------------------------------------------------------------------------------------------------------
# Command line: the pipeline beside standard generation
# ---------------------------------------------------------------------------------------------------------------------


PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain what a prime number is.",
)
ONE_PROCESS = (
    "[note] All {} stages run in this one process, one after the other, so the pipeline is slower here than the target "
    "alone; the ideal speed-up is what this run's timers give with a device per stage and one for the head."
)
WARMUP_PROMPT, WARMUP_CYCLES = 32, 12  # prompt tokens and new tokens of the unrecorded generation before the first


def add_model_arguments(parser: Parser) -> argparse._ArgumentGroup:
    """The target's flags. Returns their group, for more of them."""
    model = parser.add_argument_group("model")
    model.add_argument("--base_model_path", help="target: a folder or a hub id; unset: the head's own")
    add_dtype_flag(model)
    add_loading_flags(model)
    add_compile_flag(model)
    return model


def add_decoding_arguments(parser: Parser, nargs: int | str | None = None) -> argparse._ArgumentGroup:
    """The flags of one decoding, beside its prompt. Returns the group of those about the pipeline.

    nargs: as argparse has it, of --temperature and --draft_top_k; None: one value, and no list.
    """
    width = {"default": 1} if nargs is None else {"default": [1], "nargs": nargs}
    text = parser.add_argument_group("text")
    add_template_flags(text)
    text.add_argument("--max_new_tokens", type=int, default=100, help="new tokens at most")
    sampling = parser.add_argument_group("sampling (neutral by default; the same with and without a head)")
    add_sampling_flags(sampling, nargs)
    spd = parser.add_argument_group("pipeline")
    spd.add_argument("--draft_top_k", type=int, help="W, width of the draft tree; 1: a chain", **width)
    spd.add_argument("--verify_lag", type=int, default=0, choices=[0, 1], help="1: verify beside the next cycle")
    spd.add_argument("--verify", action=Switch, default=True, help="off: accept every draft (debugging)")
    spd.add_argument("--use_deepest", action=Switch, help="as the head was trained, unless set")
    return spd


def find_target(
    path: str | None, checkpoint: str | None, trust_remote_code: bool = False
) -> tuple[str, PreTrainedConfig]:
    """Where the target is, and its configuration: at `path`, or else where the head's checkpoint says.

    ValueError, which names the checkpoint where that was asked, as `default_target_path` and `load_target_config`.
    """
    if path:
        return path, load_target_config(path, trust_remote_code)
    if not checkpoint:
        raise ValueError("--base_model_path is missing: without --spec_head_ckpt, nothing else names the target")
    config, _ = read_checkpoint(checkpoint, mapped=True)
    try:
        path = default_target_path(config.base_model_path)
        return path, load_target_config(path, trust_remote_code)
    except ValueError as error:
        raise ValueError(f"--base_model_path is missing, and {str(checkpoint)!r} does not help: {error}") from None


def build_parser() -> Parser:
    parser = Parser(description="Speculative pipeline decoding beside standard generation, prompt by prompt.")
    model = add_model_arguments(parser)
    model.add_argument("--spec_head_ckpt", help="head checkpoint (file or folder); omitted: standard generation alone")
    add_device_flag(model)
    add_quantization_flag(model)
    pipeline = add_decoding_arguments(parser)
    pipeline.add_argument("--pipeline_first", action="store_true", help="run the pipeline before standard generation")
    pipeline.add_argument("--profile_timing", action=Switch, default=False, help="print where a cycle's time goes")
    pipeline.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto trace of the pipeline")
    pipeline.add_argument("--html", metavar="FILE", help="write a page that shows the pipeline at work")
    parser.add_argument(
        "--prompt", type=str, nargs="+", action="extend", help="one or more, repeatable; unset: three of our own"
    )
    add_chat_argument(parser)
    return parser


def add_chat_argument(parser: Parser) -> None:
    parser.add_argument("--chat", action="store_true", help="a conversation in the terminal, in place of prompts")


def check_chat(args: argparse.Namespace, *others: str) -> None:
    """ValueError for flags, among these, that cannot go with --chat."""
    for name in others:
        if args.chat and getattr(args, name):
            raise ValueError(f"--chat is a conversation in the terminal: it cannot go with --{name}")


def check_arguments(args: argparse.Namespace) -> None:
    """ValueError for flags that cannot work; cheap."""
    Sampling(args.temperature, args.top_k, args.top_p)
    check_limits(args.max_new_tokens, args.draft_top_k)
    check_template_flags(args)
    check_attention(args.attn_implementation, args.draft_top_k, args.compile)
    check_seed(args.seed)
    check_chat(args, "prompt", "trace", "html", "pipeline_first")
    for name in ("trace", "html", "pipeline_first", "profile_timing"):
        if getattr(args, name) and not args.spec_head_ckpt:
            raise ValueError(f"--{name} is about the pipeline: it needs --spec_head_ckpt")
    check_output_file("--trace", args.trace)
    check_output_file("--html", args.html)


class Demo:
    """The two generations of the command line, and how they are printed.

    Every mistake of the user is found before the target's weights are loaded.
    """

    def __init__(self, args: argparse.Namespace):
        check_arguments(args)
        self.args, device = args, resolve_device(args.device)
        dtype = resolve_dtype(args.dtype, device)
        self.base_model_path, config = find_target(args.base_model_path, args.spec_head_ckpt, args.trust_remote_code)
        check_compiled(args.compile, config, args.quantization, device)
        head = read_head(args.spec_head_ckpt, config) if args.spec_head_ckpt else None
        self.tokenizer = load_tokenizer(self.base_model_path, args.trust_remote_code)
        use_template(self.tokenizer, args)
        self.prompts = [(prompt, self.encode(prompt, config)) for prompt in args.prompt or PROMPTS]
        self.target = Target.load(
            self.base_model_path,
            dtype=dtype,
            device=device,
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
            quantization=args.quantization,
        )
        self.terminal = sys.stdout.isatty()
        alone = LocalExecutor(self.target, (self.target.num_layers,), compiled=args.compile)
        self.decoders = {"standard": self.decoder(alone)}
        self.spec_layers = 0
        if head is not None:
            self.spec_layers = head.config.num_spec_layers
            pipeline = {"pipeline": self.pipeline(head.to(device=device, dtype=self.target.dtype))}
            self.decoders = pipeline | self.decoders if args.pipeline_first else self.decoders | pipeline

    def encode(self, prompt: str, config: PreTrainedConfig) -> list[int]:
        """Token ids of a prompt, checked."""
        ids = encode_prompt(self.tokenizer, prompt, enable_thinking=self.args.enable_thinking)
        check_length(len(ids), self.args.max_new_tokens, config.max_position_embeddings)
        return token_ids(ids, config.vocab_size)

    def decoder(self, executor: LocalExecutor, drafter: SPDDrafter | None = None, **settings: Any) -> Decoder:
        return Decoder(
            executor,
            drafter,
            sampling=Sampling(self.args.temperature, self.args.top_k, self.args.top_p),
            eos_token_ids=self.target.eos_token_ids,
            max_positions=self.target.config.max_position_embeddings,
            seed=self.args.seed,
            keep_trace=self.args.trace is not None or self.args.html is not None,
            keep_head=self.args.html is not None,
            **settings,
        )

    def pipeline(self, head: SpeculationHead) -> Decoder:
        args, sizes = self.args, head.config.split(self.target.num_layers)
        return self.decoder(
            LocalExecutor(self.target, sizes, head.config.anchors, compiled=args.compile),
            SPDDrafter(head, self.target, sizes, args.use_deepest, compiled=args.compile),
            draft_top_k=args.draft_top_k,
            verify_lag=args.verify_lag,
            verify_drafts=args.verify,
        )

    def run(self) -> int:
        """Print every prompt's generations; write trace and page. Exit code 1 for a difference that must not be."""
        self.print_notes()
        self.warm_up()
        failed, traces, shown = False, {}, []
        for number, (prompt, ids) in enumerate(self.prompts, start=1):
            print(paint(f"\nPrompt {number}/{len(self.prompts)}: {prompt}", "bold"))
            generations = {name: self.generate(name, ids) for name in self.decoders}
            self.print_speeds({name: generation.result for name, generation in generations.items()})
            if "pipeline" not in generations:
                continue
            failed |= self.print_comparison(ids, generations["standard"].result, generations["pipeline"].result)
            if self.args.trace:
                traces[f"prompt {number}"] = generations["pipeline"].trace(self.tokenizer)
            if self.args.html:
                both = (generations[name].recording for name in ("standard", "pipeline"))
                shown.append(run_of(prompt, *both, self.setting(), self.tokenizer))
        if traces:
            write_trace(self.args.trace, traces)
            print(f"\nTrace written to {self.args.trace}: open it at ui.perfetto.dev")
        if shown:
            write_page(self.args.html, self.setting(), shown)
        return int(failed)

    def setting(self) -> Setting:
        """What the page says of all prompts."""
        device = f"{self.target.device}, {self.target.dtype}".replace("torch.", "")
        return Setting(
            title=page_title(self.base_model_path),
            facts=page_facts(self.args.spec_head_ckpt, self.decoders["pipeline"], device),
            placement="one process: the stages run one after the other, so it is slower than it will be on n devices",
            baseline="the target alone, in the same process",
            num_spec_layers=self.spec_layers,
            verify_lag=self.args.verify_lag,
        )

    def print_notes(self) -> None:
        """What to know before the first text."""
        print_unused_settings(self.base_model_path)
        if "pipeline" in self.decoders:
            print(ONE_PROCESS.format(len(self.decoders["pipeline"].executor.stage_sizes)))

    def warm_up(self) -> None:
        """A short unrecorded generation of each kind, so that no times have allocations and kernel choices in them."""
        prompt = self.prompts[0][1][:WARMUP_PROMPT]
        for decoder in self.decoders.values():
            decoder.generate(prompt, min(self.args.max_new_tokens, WARMUP_CYCLES))

    def generate(self, name: str, ids: list[int]) -> Generation:
        """Run one generation and print its text, which streams where somebody watches.

        Accepted drafts are green, the target's corrections yellow, and what no head drafted has no colour.
        """
        print(paint(f"{name}:", "bold"))
        generation = self.decoders[name].start(ids, self.args.max_new_tokens)
        self.show(name, generation)
        return generation

    def show(self, name: str, events: Iterable[TokenEvent]) -> None:
        """Print the text of tokens: as it comes where somebody watches, or when it is complete."""
        if not self.terminal:
            print(self.tokenizer.decode([event.token for event in events], skip_special_tokens=True))
            return
        text = TextStream(self.tokenizer)
        for event in events:
            piece = text.put(event.token)
            print(paint(piece, event.style) if name == "pipeline" else piece, end="", flush=True)
        print(text.end())

    def chat(self) -> int:
        """A conversation in the terminal, with the pipeline if there is a head. Returns the exit code."""
        args, name = self.args, "pipeline" if "pipeline" in self.decoders else "standard"
        self.decoders = {name: self.decoders[name]}
        self.print_notes()
        self.warm_up()
        longest = self.target.config.max_position_embeddings - args.max_new_tokens + 1
        chat = Chat(
            Conversation(self.tokenizer, longest, enable_thinking=args.enable_thinking),
            self.tokenizer,
            start=self.decoders[name].start,
            show=partial(self.show, name),
            describe=partial(answer_lines, name, self.spec_layers, args.profile_timing),
        )
        return chat.run(args.max_new_tokens)

    def print_speeds(self, results: Mapping[str, GenerationResult]) -> None:
        """The speed-up that the pipeline stands for, and then what each generation did."""
        if "pipeline" in results and results["pipeline"].cycles and results["standard"].cycles:
            print(paint(speedup_line(results["standard"], results["pipeline"]), "bold"))
        for name, result in results.items():
            print(result_line(name, result, self.spec_layers))
        if self.args.profile_timing:
            print(time_table(results["pipeline"].timings, results["pipeline"].cycles))

    def print_comparison(self, prompt: list[int], standard: GenerationResult, result: GenerationResult) -> bool:
        """Say whether the ids are equal. Returns True for a difference that must not be (float32, verified)."""
        sampling = self.decoders["standard"].sampling
        if not self.args.verify or not sampling.same_draws(self.args.draft_top_k):
            why = "a sampled chain differs by chance" if self.args.verify else "drafts were not verified"
            print(f"[compare] not compared ({why})")
            return False
        if standard.tokens == result.tokens:
            drawn = "" if sampling.greedy else ", drawn with the same seed"
            print(f"[compare] ids are equal ({len(result.tokens)} tokens{drawn})")
            return False
        at = shared_length(standard.tokens, result.tokens)
        if at == min(len(standard.tokens), len(result.tokens)):
            print("[compare] ids DIFFER in length only")
            return self.target.dtype == torch.float32
        prefix = prompt + standard.tokens[:at]
        gap = logit_gap(self.decoders["standard"].executor, prefix, standard.tokens[at], result.tokens[at])
        print(f"[compare] ids DIFFER from token {at}: logit gap {gap:.3g} between the two, {self.target.dtype}")
        return self.target.dtype == torch.float32


def page_title(base_model_path: str) -> str:
    """The target's name, as the page has it."""
    return Path(base_model_path).name


def page_facts(spec_head_ckpt: str, decoder: Decoder, device: str) -> list[str]:
    """Head and settings of a pipeline, as the page lists them."""
    sampling = decoder.sampling
    drawn = (
        f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}, seed {decoder.seed}"
    )
    return [
        f"head {Path(spec_head_ckpt).name}",
        f"n = {len(decoder.executor.stage_sizes)} stages",
        f"W = {decoder.draft_top_k}",
        "greedy" if sampling.greedy else drawn,
        *(["verify_lag = 1"] if decoder.verify_lag else []),
        *([] if decoder.verify_drafts else ["drafts NOT verified"]),
        device,
    ]


def result_line(name: str, result: GenerationResult, num_spec_layers: int) -> str:
    """Counts and speeds of a generation in one line."""
    speed = f"{result.tokens_per_second:.1f} tokens/s" if result.cycles else "no decode step"
    line = f"[{name}] {len(result.tokens)} tokens ({result.stop_reason}), {speed}, {result.cycles} cycles"
    if result.alpha is None:
        return line
    return (
        f"{line}, n = {len(result.stage_sizes)}, alpha {result.alpha:.2f} ({result.n_accepted}/{result.n_verified}), "
        f"L_acc {result.equivalent_accept_length:.2f}, "
        f"theoretical speed-up {result.theoretical_speedup(num_spec_layers):.2f}x"
    )


def answer_lines(name: str, num_spec_layers: int, with_times: bool, result: GenerationResult) -> str:
    """What a chat says of an answer: one line, and where a cycle's time went if that is asked for."""
    line = result_line(name, result, num_spec_layers)
    if result.alpha is not None and result.cycles:
        line += f" ({result.ideal_tokens_per_second:.1f} tokens/s with a device per stage)"
    line += f", {result.kept_tokens} tokens of the prompt were in memory" if result.kept_tokens else ""
    return f"{line}\n{time_table(result.timings, result.cycles)}" if with_times and result.cycles else line


def speedup_line(standard: GenerationResult, result: GenerationResult) -> str:
    """Both speeds of the pipeline over the measured speed of the target alone."""
    alone = standard.tokens_per_second
    ideal, measured = result.ideal_tokens_per_second / alone, result.tokens_per_second / alone
    return f"[speed-up] {ideal:.2f}x ideal, with a device per stage; {measured:.2f}x measured, in this one process"


@torch.inference_mode()
def logit_gap(executor: Executor, prefix: Sequence[int], first: int, second: int) -> float:
    """How much the target prefers `first` to `second` after a prefix that two generations share."""
    Turn(executor).take()
    plan = CachePlan(len(prefix), 1, tree=False, width=0)  # the prompt alone: nothing to compile for it
    output = executor.start(prefix, 0, plan, Timeline(executor.device))
    logits = output.logits.float()
    return float(logits[first] - logits[second])


def main(args: argparse.Namespace) -> int:
    quiet_libraries()
    demo = Demo(args)
    return demo.chat() if args.chat else demo.run()


if __name__ == "__main__":
    run_script(main, build_parser())
