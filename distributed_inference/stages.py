"""The ranks that run stages: wait for a header, run the layers, pass the result on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from decoding.compiled import compiled_logits
from decoding.nodes import CachePlan, NodeBoard
from decoding.stage import Stage
from distributed_inference.connections import Route
from distributed_inference.emulation import at_least
from distributed_inference.layout import DRAFT_RANK, Layout
from distributed_inference.links import Inbox, Link, Outbox, Wires
from distributed_inference.messages import Batch, Kind, Start, header_size
from pipeline_model import Target
from timeline import VERIFY, Span, Timeline, stage_row

PREFILL_CHUNK = 512  # prompt tokens that travel together: small enough that the stages overlap
UP_HEADER = 2  # integers of a header to the draft rank
SPAN_FIELDS = 4  # numbers of a reported span


@dataclass(frozen=True)
class Setup:
    """What every rank has to agree on, and what this one is."""

    layout: Layout
    rank: int
    wires: Wires
    width: int  # W, nodes of one position at most
    anchors: tuple[int, ...]  # layers whose output the head reads
    prefill_timeout: timedelta
    decode_timeout: timedelta
    idle_timeout: timedelta  # for the draft rank between two generations
    compiled: bool = False  # layers, and an lm_head that is on one rank

    def outbox(self, link: Link, peer: int, payload_rows: int) -> Outbox:
        timeout = max(self.prefill_timeout, self.decode_timeout)
        route = Route(link, self.rank, peer)
        return Outbox(self.wires, route, self.header_size(link), self.width * payload_rows, timeout)

    def inbox(self, link: Link, peer: int, payload_rows: int) -> Inbox:
        return Inbox(self.wires, Route(link, peer, self.rank), self.header_size(link), self.width * payload_rows)

    def header_size(self, link: Link) -> int:
        return header_size(len(self.anchors), self.width) if link is Link.FORWARD else UP_HEADER

    def captured_by(self, stage: int, anchors: Sequence[int]) -> tuple[int, ...]:
        """Those of the anchors that a stage captures, ascending."""
        layers = self.layout.layers(stage)
        return tuple(b for b in anchors if layers.start < b <= layers.stop)

    def logits(self, target: Target, width: int) -> Callable[[Tensor], Tensor]:
        """Final norm and lm_head of at most `width` rows: h_L [..., H] -> [..., V]. Width 0: of a prompt alone, eager.

        NotCompiled where they are to be compiled and cannot be.
        """
        return compiled_logits(target, width=width) if self.compiled and width else target.logits

    def up_payload(self, stage: int, target: Target) -> int:
        """Elements a node of what a stage sends to the draft rank: anchors, and the last stage's output."""
        size = len(self.captured_by(stage, self.anchors)) * target.config.hidden_size
        if stage == self.layout.num_stages - 1:
            size += self.output_size(target)
        return size

    def output_size(self, target: Target) -> int:
        """Elements a node of what the last stage computes for verification."""
        hidden, vocab = target.config.hidden_size, target.config.vocab_size
        own_rows = len(self.layout.vocabulary_rows(self.layout.last_rank, vocab))
        return {"draft": hidden, "last": vocab, "split": hidden + own_rows}[self.layout.lm_head]


class StageServer:
    """The loop of a rank that runs a stage and nothing else."""

    def __init__(self, setup: Setup, target: Target, stage: Stage):
        self._setup, self._target, self._stage = setup, target, stage
        self._board = NodeBoard(target.device, target.window)
        layout, hidden = setup.layout, target.config.hidden_size
        self._row = stage_row(layout.stage_of(setup.rank))
        self._layers = layout.stage_sizes[layout.stage_of(setup.rank)]
        self._seconds = 0.0  # that a forward takes at least
        self._is_last = setup.rank == layout.last_rank
        self._inbox = setup.inbox(Link.FORWARD, setup.rank - 1, hidden)
        self._up = setup.outbox(Link.UP, DRAFT_RANK, setup.up_payload(layout.stage_of(setup.rank), target))
        self._forward = None if self._is_last else setup.outbox(Link.FORWARD, setup.rank + 1, hidden)
        self._lm_head = _SplitLmHead(setup, target) if layout.lm_head == "split" else None
        self._logits: Callable[[Tensor], Tensor]  # final norm and lm_head, where they are here
        self._timeline: Timeline

    @torch.inference_mode()
    def serve(self) -> None:
        """Work until the draft rank says stop. LostRank when another rank is gone or does not answer."""
        timeout = self._setup.idle_timeout
        while True:
            header, payload = self._inbox.receive(timeout)
            kind = Kind(header[0])
            if kind is not Kind.BATCH and self._forward is not None:
                self._forward.send(header)
            if kind is Kind.STOP:
                if self._forward is not None:
                    self._forward.flush()
                return
            if kind is Kind.START:
                self._prefill(Start.parse(header))
                timeout = self._setup.prefill_timeout  # the draft rank takes the prompt in first
            elif kind is Kind.BATCH:
                self._cycle(header, payload)
                timeout = self._setup.decode_timeout
            else:
                self._report()
                timeout = self._setup.idle_timeout

    def _prefill(self, start: Start) -> None:
        self._timeline = Timeline(self._target.device, keep_spans=True)
        self._seconds = self._layers * start.layer_us / 1e6
        self._board.start(start.plan, start.prompt_length, start.root)
        self._stage.start(self._plan(start), start.root, start.anchors)
        if self._lm_head is not None:
            self._lm_head.start()
        elif self._is_last and self._setup.layout.lm_head == "last":
            self._logits = self._setup.logits(self._target, start.plan.width)
        hidden_size = self._target.config.hidden_size
        for chunk in start.plan.kept.chunks(start.prompt_length, PREFILL_CHUNK):
            hidden = self._inbox.receive_bulk((len(chunk), hidden_size), self._setup.prefill_timeout)
            hidden, anchors = self._stage.prefill(hidden, chunk.start)
            if self._forward is not None:
                self._forward.send_bulk(hidden)
            for anchor in anchors.values():
                self._up.send_bulk(anchor)
        if self._is_last:
            self._up.send([0, 1], self._output(hidden[-1:]))
        if self._lm_head is not None:
            self._lm_head.work(0, 1, self._setup.prefill_timeout)
        self._up.flush()
        if self._forward is not None:
            self._forward.flush()

    def _plan(self, start: Start) -> CachePlan:
        """The generation's memory, with the KV slots of kept tokens, which are passed on to the next stage."""
        if not start.moved_slots:
            return start.plan
        slots = self._inbox.receive_bulk((start.moved_slots,), self._setup.prefill_timeout, torch.int64)
        if self._forward is not None:
            self._forward.send_bulk(slots)
        return start.plan._replace(kept=start.plan.kept._replace(slots=tuple(slots.tolist())))

    def _cycle(self, header: list[int], payload: Tensor) -> None:
        """Run the batch, if there is one, and pass everything on; then this rank's rows of a split lm_head."""
        batch = Batch.parse(header)
        parts: list[Tensor] = []
        if batch.rows:
            hidden = payload.view(len(batch.rows), -1)
            with self._timeline.span(self._row), at_least(self._seconds):
                hidden, anchors = self._stage.run(self._board.enter(batch.position, batch.rows), hidden)
            parts = list(anchors.values())
        if self._forward is not None:
            self._forward.send(header, [hidden] if batch.rows else [])
        elif batch.rows:
            with self._timeline.span(VERIFY):
                parts = parts + self._output(hidden)
        if parts:
            self._up.send([batch.cycle, len(batch.rows)], parts)
        if self._lm_head is not None:
            with self._timeline.span(VERIFY):
                self._lm_head.cycle(batch, self._setup.decode_timeout)
        self._timeline.end_cycle()

    def _output(self, hidden: Tensor) -> list[Tensor]:
        """What the draft rank needs of h_L [w, H] to have logits. Last stage only."""
        if self._lm_head is not None:
            normed = self._target.norm(hidden)
            return [normed, self._lm_head.scatter(normed)]
        return [hidden if self._setup.layout.lm_head == "draft" else self._logits(hidden)]

    def _report(self) -> None:
        """Tell the draft rank when this stage was busy."""
        self._timeline.settle()
        spans = [
            (span.row == VERIFY, span.cycle, self._timeline.began + span.start, span.seconds)
            for span in self._timeline.spans
        ]
        self._up.send([len(spans), 0])
        if spans:
            self._up.send_bulk(torch.tensor(spans, dtype=torch.float64))
            self._up.flush()


class _SplitLmHead:
    """A stage rank's part of an lm_head whose vocabulary rows are split over all ranks.

    In each cycle a rank first runs its stage and then, if the last stage has finished some nodes, its rows of their
    logits. Which cycles have work is known from the headers that came through: no message says so.
    """

    def __init__(self, setup: Setup, target: Target):
        self._target, self._setup = target, setup
        layout, vocab = setup.layout, target.config.vocab_size
        self._cycles_to_last = layout.num_stages - 1 - layout.stage_of(setup.rank)
        self._counts: deque[int] = deque()  # nodes in this stage, in the one after it, ... in the last one
        if setup.rank == layout.last_rank:
            others = [rank for rank in range(layout.world_size) if rank not in (DRAFT_RANK, layout.last_rank)]
            self._scatter = [setup.outbox(Link.SCATTER, rank, target.config.hidden_size) for rank in others]
        else:
            self._inbox = setup.inbox(Link.SCATTER, layout.last_rank, target.config.hidden_size)
            self._gather = setup.outbox(Link.GATHER, DRAFT_RANK, len(layout.vocabulary_rows(setup.rank, vocab)))

    def start(self) -> None:
        """A new generation: the pipeline is empty."""
        self._counts = deque([0] * self._cycles_to_last)

    def scatter(self, normed: Tensor) -> Tensor:
        """Last stage: send [w, H] to the other stages' ranks; returns the logits of this rank's rows, [w, V_r]."""
        for outbox in self._scatter:
            outbox.send([0, len(normed)], [normed])
        return self._target.lm_head(normed)

    def cycle(self, batch: Batch, timeout: timedelta) -> None:
        """This rank's rows of the logits of the nodes that left the last stage in this cycle."""
        self._counts.appendleft(len(batch.rows))
        self.work(batch.cycle, self._counts.pop(), timeout)

    def work(self, cycle: int, count: int, timeout: timedelta) -> None:
        """Receive `count` nodes' normed h_L, send their logits. The last stage has done so already."""
        if self._cycles_to_last and count:
            _, normed = self._inbox.receive(timeout)
            self._gather.send([cycle, count], [self._target.lm_head(normed.view(count, -1))])


def reported_spans(rows: Sequence[Sequence[float]], stage: int, began: float) -> Iterator[Span]:
    """The spans of a stage's report on a timeline that began at the wall-clock time `began`."""
    for is_verify, cycle, start, seconds in rows:
        # The stage counts the batches it gets: in the cycle in which one enters the pipeline it is `stage` cycles away.
        yield Span(VERIFY if is_verify else stage_row(stage), int(cycle) + stage, start - began, seconds)
