"""The executor of the draft rank: the decode loop of pipeline_inference.py runs over it unchanged.

What a stage sends is waited for when it is needed and not earlier: the last stage's output when the verdict is due, the
anchors before the next draft. In between the stages go on, so that verification does not stop the pipeline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from decoding.nodes import CachePlan, HostCopies, NodeBoard
from decoding.stage import Stage
from decoding.tree import Node
from distributed_inference.emulation import REAL, Pace, at_least, sleep_until
from distributed_inference.layout import DRAFT_RANK
from distributed_inference.links import Link
from distributed_inference.messages import Batch, Kind, Start
from distributed_inference.stages import PREFILL_CHUNK, SPAN_FIELDS, Setup, reported_spans
from loading.target_config import LINEAR
from pipeline_inference import Captured, Completed, Logits, PromptOutput
from pipeline_model import Target
from script_utils import prompt_bar
from timeline import WAIT, Timeline, stage_row


class Pipeline:
    """The draft rank's connections to the other ranks, and `stage`, the first one, where that is here.

    It outlives generations.
    """

    def __init__(self, setup: Setup, target: Target, stage: Stage | None):
        layout, config = setup.layout, target.config
        self.setup, self.target, self.stage = setup, target, stage
        self.board = NodeBoard(target.device, None if stage is None else target.window)
        self.outbox = setup.outbox(Link.FORWARD, DRAFT_RANK + 1, config.hidden_size)
        self.inboxes = {
            stage: setup.inbox(Link.UP, layout.rank_of(stage), setup.up_payload(stage, target))
            for stage in range(int(layout.colocated), layout.num_stages)
        }
        between = range(1, layout.last_rank) if layout.lm_head == "split" else ()
        self.gather = [
            setup.inbox(Link.GATHER, rank, len(layout.vocabulary_rows(rank, config.vocab_size))) for rank in between
        ]
        self.running: RemoteExecutor | None = None
        self.last: RemoteExecutor | None = None  # whose generation is in the stages' memory

    def finish(self) -> None:
        """Let the stages run empty if a generation is still running."""
        if self.running is not None:
            self.running.finish()

    def stop(self) -> None:
        """Send the other ranks home."""
        self.finish()
        self.outbox.send([Kind.STOP])
        self.outbox.flush()


class _Flight:
    """The nodes of one batch on their way through the stages."""

    def __init__(self, cycle: int, ids: tuple[int, ...], nodes: Tensor):
        self.cycle, self.ids = cycle, ids
        self.nodes = nodes  # [w] the ids again, on the device
        self.alive = list(range(len(ids)))  # rows whose nodes nobody has rolled back

    @property
    def is_partly_alive(self) -> bool:
        return 0 < len(self.alive) < len(self.ids)

    def roll_back(self, dead: set[int]) -> None:
        self.alive = [row for row in self.alive if self.ids[row] not in dead]


class _Arrival:
    """What one stage has of one batch: another rank's message, received once, when somebody first needs it."""

    def __init__(self, stage: int, flight: _Flight, anchors: Sequence[Tensor] | None = None):
        self.stage, self.flight = stage, flight
        self.anchors = anchors  # h_b [w, H] of the anchors that the stage captures; None: not received yet
        self.logits: Logits  # of the last stage


class RemoteExecutor:
    """Runs the target's stages on other ranks, and the first one here where the layout says so.

    anchors: layers whose outputs are captured; (0,) for the target alone. With verify_lag 1 logits are computed beside
    the next draft. pace: of the devices that the ranks stand for.
    """

    def __init__(self, pipeline: Pipeline, anchors: Sequence[int] = (0,), *, verify_lag: int = 0, pace: Pace = REAL):
        self.stage_sizes, self.anchors = pipeline.setup.layout.stage_sizes, tuple(anchors)
        self.device, self.vocab_size = pipeline.target.device, pipeline.target.config.vocab_size
        self._pipeline, self._setup, self._target = pipeline, pipeline.setup, pipeline.target
        self._last = len(self.stage_sizes) - 1
        self._pace, self._cycle_due = pace, 0.0
        self._captured_by = [self._setup.captured_by(stage, self.anchors) for stage in range(len(self.stage_sizes))]
        self._side_stream = _SideStream(self.device) if verify_lag else None
        self._logits: Callable[[Tensor], Tensor]  # final norm and lm_head, where that is here
        self._copies = HostCopies(self.device)
        self._flights: deque[_Flight | None] = deque()  # by stage: what is there in this cycle
        self._arrivals: list[_Arrival] = []  # of the last finished cycle
        self._own_anchors: list[Tensor] = []  # of stage 0 in this cycle, where it is here
        self._cycle = 0
        self._timeline: Timeline
        self.fills: list[int] = []  # tokens in flight in each cycle of the last generation

    @property
    def has_states(self) -> bool:
        return LINEAR in self._target.layer_types

    @property
    def is_undisturbed(self) -> bool:
        return self._pipeline.last is self

    def start(self, prompt: Sequence[int], root: int, plan: CachePlan, timeline: Timeline) -> PromptOutput:
        self._pipeline.finish()  # the last generation may have been left before its end
        self._pipeline.running = self._pipeline.last = self
        self._flights = deque([None] * len(self.stage_sizes), maxlen=len(self.stage_sizes))
        self._timeline, self._cycle, self._arrivals, self.fills = timeline, 0, [], []
        start = Start(len(prompt), root, plan, self.anchors, self._pace.layer_us)
        self._pipeline.outbox.send(start.header())
        if plan.kept.slots:
            self._pipeline.outbox.send_bulk(torch.tensor(plan.kept.slots))
        # Without a stage here nobody needs masks.
        own_stage = self._pipeline.stage
        self._pipeline.board.start(plan if own_stage is not None else plan._replace(tree=False), len(prompt), root)
        if own_stage is not None:
            own_stage.start(plan, root, self.anchors)
        if self._setup.layout.lm_head == "draft":
            # Without a lane rows are asked for one by one.
            self._logits = self._setup.logits(self._target, plan.width if self._side_stream else min(plan.width, 1))
        tokens = torch.tensor(prompt, device=self.device)
        chunks, features = list(plan.kept.chunks(len(prompt), PREFILL_CHUNK)), []
        with prompt_bar(chunks) as bar:
            sent = [self._send_chunk(tokens, chunk) for chunk in chunks]
            for chunk, captured in zip(chunks, sent, strict=True):
                features.append(self._receive_anchors(len(chunk), captured))
                bar.update(len(chunk))
        last_token = _Flight(0, (root,), torch.tensor([root], device=self.device))
        output = _Arrival(self._last, last_token)
        self._receive(output, captured=())
        logits = output.logits.row(0)
        self._pipeline.outbox.flush()
        return PromptOutput(logits, torch.cat(features))

    def _send_chunk(self, tokens: Tensor, chunk: range) -> dict[int, Tensor]:
        """Send a chunk of the prompt on its way. Returns the anchors that this rank has, {b: h_b [q, H]}."""
        hidden = self._target.embed(tokens[chunk.start : chunk.stop])
        captured = {0: hidden}
        if self._pipeline.stage is not None:
            hidden, anchors = self._pipeline.stage.prefill(hidden, chunk.start)
            captured |= anchors
        self._pipeline.outbox.send_bulk(hidden)
        return captured

    def _receive_anchors(self, count: int, captured: dict[int, Tensor]) -> Tensor:
        """All anchors of a chunk of `count` tokens, [q, m, H]; `captured` has those that are here."""
        shape = count, self._target.config.hidden_size
        for stage, inbox in self._pipeline.inboxes.items():
            for anchor in self._captured_by[stage]:
                captured[anchor] = inbox.receive_bulk(shape, self._setup.prefill_timeout)
        return torch.stack([captured[anchor] for anchor in self.anchors], dim=1)

    def begin_cycle(self, position: int, entering: Sequence[Node]) -> Tensor | None:
        if self._pipeline.running is not self:
            raise RuntimeError("this generation cannot go on: another executor has begun one on the same ranks")
        self._cycle_due = time.perf_counter() + self._pace.cycle
        message = Batch(self._cycle, position, [node.row for node in entering])
        batch = self._pipeline.board.enter(position, message.rows) if entering else None
        # The oldest flight falls out after the last stage.
        self._flights.appendleft(None if batch is None else _Flight(self._cycle, batch.ids, batch.nodes))
        self.fills.append(sum(flight is not None and bool(flight.alive) for flight in self._flights))
        if batch is None:
            self._pipeline.outbox.send(message.header())
            return None
        h0 = hidden = self._target.embed(batch.tokens)
        if self._pipeline.stage is not None:
            seconds = self.stage_sizes[0] * self._pace.layer_us / 1e6
            with self._timeline.span(stage_row(0)), at_least(seconds):
                hidden, anchors = self._pipeline.stage.run(batch, h0)
            self._own_anchors = list(anchors.values())
        self._pipeline.outbox.send(message.header(), [hidden])
        return h0

    def finish_cycle(self) -> tuple[Iterator[Captured], Completed | None]:
        self._settle(self._arrivals)
        self._arrivals = [
            _Arrival(stage, flight, None if stage in self._pipeline.inboxes else self._own_anchors)
            for stage, flight in enumerate(self._flights)
            if flight is not None and (self._captured_by[stage] or stage == self._last)
        ]
        completed = None
        flight = self._flights[self._last]
        if flight is not None:
            output = self._arrivals[-1]
            if self._side_stream is None:
                self._settle([output])
            if flight.alive:
                ids = tuple(flight.ids[row] for row in flight.alive)
                completed = Completed(ids, Logits(partial(self._row_logits, output)).at(tuple(flight.alive)))
        self._cycle += 1
        if self._pace.cycle:
            sleep_until(self._cycle_due)
        return self._captured(self._arrivals), completed

    def _captured(self, arrivals: Sequence[_Arrival]) -> Iterator[Captured]:
        """Anchors of one cycle."""
        self._settle(arrivals)
        partly_alive = [arrival.flight.alive for arrival in arrivals if arrival.flight.is_partly_alive]
        at_alive = iter(self._copies.copy_each(partly_alive))
        for arrival in arrivals:
            flight = arrival.flight
            captured = zip(self._captured_by[arrival.stage], arrival.anchors, strict=True)
            if flight.is_partly_alive:
                alive = next(at_alive)
                yield Captured(flight.nodes[alive], {b: hidden[alive] for b, hidden in captured})
            elif flight.alive:
                yield Captured(flight.nodes, dict(captured))

    def roll_back(self, dead: set[int]) -> None:
        for flight in self._flights:
            if flight is not None:
                flight.roll_back(dead)

    def finish(self) -> None:
        """Let the stages run empty, and collect their times."""
        cycles = self._cycle
        while any(self._flights):
            self.begin_cycle(-1, ())
            self.finish_cycle()
        self._settle(self._arrivals)
        self._pipeline.running = None
        self._pipeline.outbox.send([Kind.END])
        del self.fills[cycles:]
        for stage, inbox in self._pipeline.inboxes.items():
            (count, _), _ = inbox.receive(self._setup.decode_timeout)
            if count:
                rows = inbox.receive_bulk((count, SPAN_FIELDS), self._setup.decode_timeout, torch.float64)
                for span in reported_spans(rows.tolist(), stage, self._timeline.began):
                    if span.cycle < cycles:  # what ran empty after the last token is nobody's cost
                        self._timeline.add(span)

    # -----------------------------------------------------------------------------------------------------------------
    # Messages of the stages
    # -----------------------------------------------------------------------------------------------------------------

    def _settle(self, arrivals: Sequence[_Arrival]) -> None:
        """Receive what some stages sent, unless it is here; the deepest stage's first, which was ready first."""
        missing = [arrival for arrival in reversed(arrivals) if arrival.anchors is None]
        if missing:
            with self._timeline.span(WAIT):
                for arrival in missing:
                    self._receive(arrival, self._captured_by[arrival.stage])

    def _row_logits(self, arrival: _Arrival, row: int) -> Tensor:
        self._settle([arrival])
        return arrival.logits.row(row)

    def _receive(self, arrival: _Arrival, captured: Sequence[int]) -> None:
        """Wait for a stage's message: its anchors, as many as `captured`, and the last stage's output after them."""
        stage, count = arrival.stage, len(arrival.flight.ids)
        header, payload = self._pipeline.inboxes[stage].receive(self._setup.decode_timeout)
        assert header == [arrival.flight.cycle, count], f"stage {stage} sent {header} for cycle {arrival.flight.cycle}"
        if stage == self._last:
            size = len(captured) * count * self._target.config.hidden_size
            arrival.logits = self._logits_of(payload[size:], count)
            payload = payload[:size]
        arrival.anchors = payload.view(len(captured), count, -1).unbind() if captured else ()

    def _logits_of(self, output: Tensor, count: int) -> Logits:
        """The logits of the nodes that the last stage's output is of, wherever the lm_head is."""
        if self._side_stream is not None:
            output = output.clone()  # the next message would overwrite it
        place = self._setup.layout.lm_head
        if place == "last":
            return Logits(output.view(count, -1).__getitem__)
        if place == "draft" and self._side_stream is None:
            return Logits.of_each(self._target_logits, output.view(count, -1))
        compute = partial(self._all_rows if place == "split" else self._all_nodes, output, count)
        if self._side_stream is not None:
            return Logits.of_all(self._side_stream.submit(compute, output))
        # At once, whether somebody will ask or not: the other ranks have sent their rows of these nodes.
        return Logits(compute().__getitem__)

    def _all_nodes(self, output: Tensor, count: int) -> Tensor:
        """Logits [w, V] from h_L, all computed here."""
        return self._target_logits(output.view(count, -1))

    def _target_logits(self, hidden: Tensor) -> Tensor:
        """Logits [.., V] from h_L [.., H]."""
        with at_least(self._pace.verify):
            return self._logits(hidden)

    def _all_rows(self, output: Tensor, count: int) -> Tensor:
        """Logits [w, V] from normed h_L and the last rank's rows: this rank's rows and the other ranks' join them."""
        size = count * self._target.config.hidden_size
        normed, last = output.split([size, len(output) - size])
        rows = [self._target.lm_head(normed.view(count, -1))]
        rows += [inbox.receive(self._setup.decode_timeout)[1].view(count, -1) for inbox in self._pipeline.gather]
        return torch.cat([*rows, last.view(count, -1)], dim=1)


class _SideStream:
    """Computes logits beside the draft: in a thread, and on a CUDA device in a stream of its own."""

    def __init__(self, device: torch.device):
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verify")
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, compute: Callable[[], Tensor], reads: Tensor) -> Callable[[], Tensor]:
        """Start computing logits [w, V] from a tensor of this stream. Returns what waits for them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            reads.record_stream(self._stream)  # its memory must not be used again while the lm_head reads it
        future = self._pool.submit(self._run, compute)

        def logits() -> Tensor:
            computed = future.result()
            if self._stream is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_stream(self._stream)
                computed.record_stream(stream)
            return computed

        return logits

    @torch.inference_mode()
    def _run(self, compute: Callable[[], Tensor]) -> Tensor:
        with torch.cuda.stream(self._stream):
            return compute()
