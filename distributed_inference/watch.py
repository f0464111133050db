"""Who is alive, and whose fault it is when a run cannot go on: one decision, made by rank 0 and told to all.

Every rank but 0 has one more connection, to rank 0: its line. The ranks agree over it at the start. For the whole run a
second thread in every process sends a beat a second over it, with the rank that its main thread waits for. So nobody
waits for ever, and all ranks end with the same reason:

    a process that ended      its line is closed: noticed at once
    one that is frozen, or    no beat for SILENCE seconds: its process is stopped, its machine switched off, the
    cannot be reached         network down
    one that hangs            the rank that waits for it complains after its timeout. A rank that waits for another one
                              is not to blame: rank 0 follows who waits for whom to the one that waits for nobody
    rank 0                    the others miss its beats, or see its line closed: they need no decision
    torchrun                  this process has another parent than at its start

The cycles know nothing of this: a receiver notes whom it waits for, and the messages of the lines are not in their way.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from distributed_inference.connections import Connections, LostRank
from distributed_inference.layout import DRAFT_RANK

BEAT = 1.0  # seconds between beats
SILENCE = 30  # beats that a rank misses before it is given up
SETTLE = (
    3  # beats between a complaint and the decision: by then a closed line is known, and a frozen rank has missed some
)
PATIENCE = 6  # beats that a rank waits for rank 0's decision before it decides alone
LAST_BEATS = 30  # beats that a rank may take to end after rank 0 has ended well
MISSED = 2  # beats without a word after which a rank cannot be said to wait for another one


@dataclass(frozen=True)
class Verdict:
    """Why the run ends. `reason` continues "rank 2 (stage 1) ...", or "it ..." where another rank says it."""

    rank: int  # at fault
    reason: str
    lost_by: int | None = None  # the rank that has noticed; None: the one at fault says so itself
    code: int = 1  # every rank's exit code

    @property
    def said_by(self) -> int:
        return self.rank if self.lost_by is None else self.lost_by

    def text(self, describe: Callable[[int], str]) -> str:
        if self.lost_by is None:
            return f"{describe(self.rank)} {self.reason}"
        return f"{describe(self.lost_by)} lost {describe(self.rank)}: it {self.reason}"


@dataclass(frozen=True)
class Complaint:
    """A rank cannot go on for lack of another one."""

    by: int
    about: int
    reason: str
    is_late: bool  # it did not answer in time, and may itself have waited


def to_blame(complaint: Complaint, waits_for: Mapping[int, int | None], silent: Container[int]) -> int:
    """The rank that a complaint leads to: from one that waits to the one that it waits for, until one does not wait.

    waits_for: by rank, as far as known; silent: ranks that say nothing, so that nobody knows what they do.
    """
    rank, seen = complaint.about, set()
    while complaint.is_late and rank not in silent and waits_for.get(rank) is not None:
        seen.add(rank)
        rank = waits_for[rank]
        if rank in seen:
            # In a circle the draft rank is the one that can wait (for logits, in a thread) and hang (in its draft).
            return complaint.about if complaint.by == DRAFT_RANK else DRAFT_RANK
    return rank


class Line:
    """One end of the connection between a rank and rank 0: messages as JSON, one per line."""

    def __init__(self, connection: socket.socket):
        self._socket, self._sending, self._rest = connection, threading.Lock(), b""
        # What is sent is a few bytes and read at once: a peer that does not take it in is not there.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * BEAT * 1000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()  # values for the main thread
        self.is_awaited = False  # the main thread waits for one, or has given up
        self.waits_for: int | None = None  # the rank that the peer waited for when it last said so
        self.missed = 0  # beats since its last word
        self.is_closed = self.said_goodbye = False
        self._is_broken = False  # part of a message may be out: no other one can follow

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message. One that cannot be sent is not missed: the reader notices that the line is gone."""
        with self._sending:
            if self._is_broken:
                return
            try:
                self._socket.sendall(json.dumps([kind, value]).encode() + b"\n")
            except OSError:
                self._is_broken = True

    def read(self) -> list[tuple[str, Any]]:
        """The messages that are here. Closes the line at its end."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        self.is_closed, self.missed = not data, 0
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [tuple(json.loads(line)) for line in lines]


class Watch:
    """This process's watch over the run, in a thread of its own, from the start to the exit.

    ended: called once, in that thread, with the reason why the run is over; it is expected to end the process.
    """

    def __init__(self, rank: int, ended: Callable[[Verdict], Any]):
        self.rank, self._ended = rank, ended
        self._lines: dict[int, Line] = {}  # rank 0: to every other rank; the others: to rank 0
        self._selector = selectors.DefaultSelector()
        self._complaints: list[Complaint] = []  # on rank 0
        self._settled = 0  # beats since the first complaint
        self._verdict: Verdict | None = None  # told by another rank
        self._connections: Connections | None = None
        # Whoever starts ranks by hand may leave them alone. torchrun watches them, and has their store.
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    # -----------------------------------------------------------------------------------------------------------------
    # For the main thread
    # -----------------------------------------------------------------------------------------------------------------

    def add(self, rank: int, connection: socket.socket) -> None:
        """Watch a rank over this connection, instead of over an earlier one that got no answer."""
        if (earlier := self._lines.get(rank)) is not None and not earlier.is_closed:
            self._selector.unregister(earlier)
        self._lines[rank] = Line(connection)
        self._selector.register(self._lines[rank], selectors.EVENT_READ, rank)

    def watch_waits(self, connections: Connections) -> None:
        """From now on look there for the rank that this process waits for."""
        self._connections = connections

    def send(self, rank: int, value: Any) -> None:
        """Send a value that JSON can hold."""
        self._lines[rank].send("value", value)

    def receive(self, rank: int, timeout: timedelta, until: float | None = None) -> Any:
        """The next value that a rank sent to this one. LostRank when it does not come in time.

        until: when the time is over, where it began before this call.
        """
        line = self._lines[rank]
        line.is_awaited = True
        seconds = timeout.total_seconds() if until is None else max(0.0, until - time.monotonic())
        try:
            value = line.said.get(timeout=seconds)
        except queue.Empty:
            raise LostRank.late(rank, timeout) from None
        line.is_awaited = False
        return value

    def gather(self, value: Any, timeout: timedelta) -> list[Any]:
        """What every rank calls with a value of its own: the values of all, by rank. LostRank when one is too slow."""
        if self.rank != DRAFT_RANK:
            self.send(DRAFT_RANK, value)
            return self.receive(DRAFT_RANK, timeout)
        until = time.monotonic() + timeout.total_seconds()
        values = [value]
        for rank in sorted(self._lines):
            values.append(self.receive(rank, timeout, until))
        for rank in self._lines:
            self.send(rank, values)
        return values

    def tell(self, verdict: Verdict) -> None:
        """Tell all ranks why this one ends the run."""
        for line in list(self._lines.values()):
            line.send("verdict", asdict(verdict))

    def say_goodbye(self) -> None:
        """Tell all ranks that this one ends as it should."""
        for line in list(self._lines.values()):
            line.send("goodbye")

    def complain(self, error: LostRank) -> Verdict:
        """This rank cannot go on. Usually the process ends here, in the other thread, with rank 0's decision.

        Returns what this rank says by itself when there is none.
        """
        self._complain(error)
        time.sleep(PATIENCE * BEAT)
        if self.rank != DRAFT_RANK and (missed := self._lines[DRAFT_RANK].missed) > MISSED:
            return Verdict(DRAFT_RANK, f"did not answer for {missed * BEAT:g} s", lost_by=self.rank)
        return Verdict(error.rank, str(error), lost_by=self.rank)

    # -----------------------------------------------------------------------------------------------------------------
    # In the thread
    # -----------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic() + BEAT
        while True:
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                self._read(key.data)
            if time.monotonic() >= due:
                self._beat()
                due = time.monotonic() + BEAT
            if (verdict := self._decide()) is not None:
                self.tell(verdict)
                self._ended(verdict)
                return

    def _read(self, rank: int) -> None:
        line = self._lines[rank]
        for kind, value in line.read():
            if kind == "beat":
                line.waits_for = value
            elif kind == "value":
                line.said.put(value)
            elif kind == "complaint":
                self._complaints.append(Complaint(**value))
            elif kind == "verdict":
                self._verdict = self._verdict or Verdict(**value)
            else:
                line.said_goodbye = True
        if line.is_closed:
            self._selector.unregister(line)

    def _beat(self) -> None:
        """Time is counted in this thread's own beats: who was stopped itself (Ctrl-Z) does not blame the others."""
        self._settled += bool(self._complaints)
        waits_for = self._waits_for()
        if self._connections is not None and (error := self._connections.overdue()) is not None:
            self._complain(error)
        for line in list(self._lines.values()):
            line.missed += 1
            line.send("beat", waits_for)

    def _waits_for(self) -> int | None:
        """The rank that the main thread waits for."""
        awaited = (rank for rank, line in list(self._lines.items()) if line.is_awaited)
        return next(awaited, None if self._connections is None else self._connections.waits_for())

    def _complain(self, error: LostRank) -> None:
        complaint = Complaint(self.rank, error.rank, str(error), error.is_late)
        if self.rank == DRAFT_RANK:
            self._complaints.append(complaint)
        else:
            self._lines[DRAFT_RANK].send("complaint", asdict(complaint))

    def _decide(self) -> Verdict | None:
        """Why the run is over, if it is."""
        if self._verdict is not None:
            return self._verdict
        if self._parent not in (None, os.getppid()):
            return Verdict(self.rank, "has lost the process that started it")
        for rank, line in list(self._lines.items()):
            if line.said_goodbye:
                if rank == DRAFT_RANK and line.missed > LAST_BEATS:
                    return Verdict(self.rank, f"is not at its end, {LAST_BEATS * BEAT:g} s after rank 0 was")
            elif line.is_closed:
                gone = LostRank.gone(rank)
                return Verdict(rank, str(gone), lost_by=self.rank)
            elif line.missed > SILENCE:
                return Verdict(rank, f"did not answer for {SILENCE * BEAT:g} s", lost_by=self.rank)
        return self._answer() if self._settled >= SETTLE else None

    def _answer(self) -> Verdict:
        """Rank 0's decision on the complaints: first those that know a reason, then those that somebody is late."""
        complaint = min(self._complaints, key=lambda complaint: complaint.is_late)
        waits_for = {rank: line.waits_for for rank, line in self._lines.items()} | {self.rank: self._waits_for()}
        silent = [rank for rank, line in self._lines.items() if line.missed > MISSED]
        return Verdict(to_blame(complaint, waits_for, silent), complaint.reason, lost_by=complaint.by)
