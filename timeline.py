"""Where the time of a cycle goes: spans on the CPU clock or CUDA events, their totals, and a Perfetto trace."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from script_utils import atomic_open, markdown_table

DRAFT, VERIFY, WAIT = "draft", "verify", "wait"
# Spans of this many cycles are left unread: by then reading CUDA events never waits.
EVENT_LAG = 4


def stage_row(stage: int) -> str:
    """The row of a stage in totals and traces."""
    return f"stage {stage}"


def stage_index(row: str) -> int:
    """The stage of a `stage_row`."""
    return int(row.rsplit(" ", 1)[1])


class Span(NamedTuple):
    """One slice of a trace: `row` was busy in `cycle` from `start` for `seconds` (of the timeline's own clock)."""

    row: str
    cycle: int
    start: float
    seconds: float


@dataclass
class Timings:
    """Seconds of one generation, and its rollbacks. All but the two wall-clock times are sums over its cycles."""

    prefill: float = 0.0  # wall-clock
    decode: float = 0.0  # wall-clock, all cycles
    stages: list[float] = field(default_factory=list)  # one sum a stage
    draft: float = 0.0
    verify: float = 0.0
    wait: float = 0.0  # for stages on other ranks; 0 in one process
    # What the decode would take with a device a stage and one for the head: per cycle the slowest stage or the head,
    # plus verification; or, with verify_lag 1, the slowest of the three. A draft in line adds to stage 0.
    ideal_decode: float = 0.0
    rollbacks: int = 0  # verdicts that dropped tokens in flight: rejections and, with a tree, losing candidates too
    rollback: float = 0.0  # on the host's clock: dropping is bookkeeping, as nothing has to be restored


class _OpenSpan:
    """A span while it lasts. A class, as a generator's context would cost more than what short spans measure."""

    __slots__ = ("_row", "_start", "_timeline")

    def __init__(self, timeline: Timeline, row: str):
        self._timeline, self._row = timeline, row

    def __enter__(self) -> None:
        self._start = self._timeline._now()

    def __exit__(self, *_: object) -> None:
        self._timeline._open.append((self._row, self._start, self._timeline._now()))


class Timeline:
    """Collects the spans of one generation: a few numbers a cycle, and the spans themselves if `keep_spans` is set."""

    def __init__(self, device: torch.device, *, keep_spans: bool = False):
        self._cuda = device.type == "cuda"
        self._now: Callable[[], Any] = self._event if self._cuda else time.perf_counter
        self._device = device
        self._keep_spans = keep_spans
        self._cycle = 0
        self._open: list[tuple[str, object, object]] = []
        self._unread: deque[tuple[int, list]] = deque()
        self.began = time.time()  # wall-clock time from which spans count
        self._host_origin = time.perf_counter()
        self._origin = self._now()
        self.cycles: list[dict[str, float]] = []  # row -> seconds, of each cycle that has been read
        self.spans: list[Span] = []
        self.cycle_ends: list[float] = []  # seconds on the host's clock
        self._rollbacks: list[float] = []  # seconds, likewise

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def span(self, row: str) -> _OpenSpan:
        """Time a block of this cycle. A row may be entered more than once per cycle."""
        return _OpenSpan(self, row)

    @contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Count a rollback, and time it on the host's clock."""
        begun = time.perf_counter()
        yield
        self._rollbacks.append(time.perf_counter() - begun)

    def end_cycle(self) -> None:
        """Close the running cycle; the next span belongs to the next one."""
        self.cycle_ends.append(time.perf_counter() - self._host_origin)
        self._unread.append((self._cycle, self._open))
        self._cycle, self._open = self._cycle + 1, []
        if len(self._unread) > EVENT_LAG:
            self._read(*self._unread.popleft())

    def add(self, span: Span) -> None:
        """A span that another process measured, on this timeline's clock."""
        self._seconds_of(span.cycle)[span.row] += span.seconds
        if self._keep_spans:
            self.spans.append(span)

    def finish(
        self, *, prefill: float, decode: float, num_stages: int, verify_lag: int, draft_in_line: bool = False
    ) -> Timings:
        """The totals of the generation; `prefill` and `decode` are wall-clock seconds.

        draft_in_line: stage 0 waits for the draft, or the draft for stage 0.
        """
        self.settle()
        totals: dict[str, float] = defaultdict(float)
        for seconds in self.cycles:
            for row, value in seconds.items():
                totals[row] += value
        return Timings(
            prefill=prefill,
            decode=decode,
            stages=[totals[stage_row(stage)] for stage in range(num_stages)],
            draft=totals[DRAFT],
            verify=totals[VERIFY],
            wait=totals[WAIT],
            ideal_decode=sum(ideal_seconds(each, verify_lag, draft_in_line) for each in self.cycles),
            rollbacks=len(self._rollbacks),
            rollback=sum(self._rollbacks),
        )

    def settle(self) -> None:
        """Read the spans of all finished cycles."""
        while self._unread:
            self._read(*self._unread.popleft())

    def _seconds_of(self, cycle: int) -> dict[str, float]:
        """The sums of a cycle, by row."""
        while len(self.cycles) <= cycle:
            self.cycles.append(defaultdict(float))
        return self.cycles[cycle]

    def _read(self, cycle: int, records: list) -> None:
        if self._cuda and records:
            records[-1][2].synchronize()
        sums = self._seconds_of(cycle)
        for row, start, end in records:
            seconds = self._between(start, end)
            sums[row] += seconds
            if self._keep_spans:
                self.spans.append(Span(row, cycle, self._between(self._origin, start), seconds))

    def _between(self, start: Any, end: Any) -> float:
        """Seconds between two of `_now`'s times."""
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start


def ideal_seconds(seconds: Mapping[str, float], verify_lag: int, draft_in_line: bool = False) -> float:
    """What a cycle takes with a device a stage and one for the head (`Timings.ideal_decode`). seconds: by row."""
    beside = {row: value for row, value in seconds.items() if row not in (VERIFY, WAIT)}
    if draft_in_line:
        beside[stage_row(0)] = beside.get(stage_row(0), 0.0) + beside.pop(DRAFT, 0.0)
    longest, verify = max(beside.values(), default=0.0), seconds.get(VERIFY, 0.0)
    return max(longest, verify) if verify_lag else longest + verify


def time_table(timings: Timings, cycles: int) -> str:
    """Where the time of so many cycles went: a line for the head, each stage, verification, and the rollbacks.

    In one process the parts follow each other; with a rank a stage they overlap, and `wait` is the draft rank's.
    `ideal` is `Timings.ideal_decode`.
    """
    parts = {"draft": timings.draft}
    parts |= {stage_row(stage): seconds for stage, seconds in enumerate(timings.stages)}
    parts |= {"verify": timings.verify} | ({"wait": timings.wait} if timings.wait else {})
    parts |= {f"{timings.rollbacks} rollbacks": timings.rollback, f"all {cycles} cycles": timings.decode}
    parts["ideal"] = timings.ideal_decode
    lines = [
        [name, f"{seconds:.3f}", f"{seconds / cycles * 1e3:.3f}" if cycles else "–"] for name, seconds in parts.items()
    ]
    return markdown_table(["part", "seconds", "ms per cycle"], lines)


def write_trace(path: str | Path, processes: Mapping[str, Iterable[tuple[Span, dict]]]) -> None:
    """Write a Chrome/Perfetto trace (open it at ui.perfetto.dev), atomically.

    `processes` maps a heading to its spans, each with what to show of it: `name` becomes the slice's label, the other
    entries its arguments.
    """
    events = []
    for pid, (heading, spans) in enumerate(processes.items()):
        spans = list(spans)
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": heading}})
        rows = sorted({span.row for span, _ in spans}, key=_row_order)
        for tid, row in enumerate(rows):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row}})
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        for span, shown in spans:
            arguments = {"cycle": span.cycle} | {key: value for key, value in shown.items() if key != "name"}
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": rows.index(span.row),
                    "ts": span.start * 1e6,
                    "dur": span.seconds * 1e6,
                    "name": shown.get("name", span.row),
                    "args": arguments,
                }
            )
    with atomic_open(path) as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _row_order(row: str) -> tuple[int, int]:
    """Draft on top, the stages in order, verification and waiting below."""
    fixed = {DRAFT: (0, 0), VERIFY: (2, 0), WAIT: (2, 1)}
    return fixed[row] if row in fixed else (1, stage_index(row))
