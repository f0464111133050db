"""Messages between two ranks, one direction each: a small header on the host, and a payload of hidden states or logits.

All buffers are allocated once. A message that arrives while the receiver computes is there when it is asked for. Two
ways for the payload:

    host   after the header, on the same connection. CPUs, and several ranks on one GPU (pinned memory)
    NCCL   from device to device. It is sent when the stream gets there and received as soon as the header says how
           large it is: the stream waits for it, and the host for nothing (`Work.wait` with a time limit would make it
           look every millisecond). A payload that does not come is noticed by the watch

NCCL knows no tags and runs what two ranks send each other in the order of the calls, so every kind of link has its own
process group there. Messages go through the groups' own methods: `dist.isend` and `dist.irecv` do the same with checks
that take longer than the message.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_inference.connections import Connections, LostRank, Route, host_bytes
from distributed_inference.layout import DRAFT_RANK, Layout

RING = 3  # payloads of a link that NCCL may have under way


class Link(IntEnum):
    """Kinds of links between ranks; between two ranks there is at most one of a kind and direction."""

    FORWARD = 0  # draft rank -> stage 0 -> ... -> last stage: hidden states, and every control message
    UP = 1  # stage -> draft rank: anchors, and what the last stage computes
    SCATTER = 2  # last stage -> all: normed h_L, for a split lm_head
    GATHER = 3  # all -> draft rank: their rows of the logits


def routes(layout: Layout) -> list[Route]:
    """Every link of a pipeline."""
    last, between = layout.last_rank, range(DRAFT_RANK + 1, layout.last_rank)
    found = [Route(Link.FORWARD, rank, rank + 1) for rank in range(last)]
    found += [Route(Link.UP, rank, DRAFT_RANK) for rank in (*between, last)]
    if layout.lm_head == "split":
        found += [Route(Link.SCATTER, last, rank) for rank in between]
        found += [Route(Link.GATHER, rank, DRAFT_RANK) for rank in between]
    return found


@dataclass(frozen=True)
class Wires:
    """What links send through, and the device of this rank's payloads."""

    device: torch.device
    dtype: torch.dtype
    connections: Connections
    nccl: dict[Link, dist.ProcessGroup] | None = None  # None: payloads go through the host


class _Buffer:
    """A payload's memory on this rank: on the device for NCCL, otherwise on the host, where the device reaches it."""

    def __init__(self, wires: Wires, size: int):
        on_device = wires.nccl is not None
        self.payload = torch.zeros(
            size,
            dtype=wires.dtype,
            device=wires.device if on_device else "cpu",
            pin_memory=wires.device.type == "cuda" and not on_device,
        )
        self.work: dist.Work | None = None  # NCCL's, while it may read the memory


class Outbox:
    """Sends to one rank.

    header_size: most integers of a header; payload_size: most elements of a payload; timeout: for a message to leave.
    """

    def __init__(self, wires: Wires, route: Route, header_size: int, payload_size: int, timeout: timedelta):
        self._wires, self._peer, self._timeout = wires, route.receiver, timeout
        self._sender = wires.connections.senders[route]
        self._nccl = wires.nccl[route.link] if wires.nccl else None
        self._header = array("q", bytes(8 * (1 + header_size)))
        self._header_bytes = memoryview(self._header).cast("B")
        # A CPU sends hidden states from where they are.
        count = 0 if wires.device.type == "cpu" else RING if wires.nccl else 1
        self._buffers = [_Buffer(wires, payload_size) for _ in range(count)]
        self._next = 0
        self._bulk: list[tuple[dist.Work, Tensor]] = []  # NCCL's sends under way, with their memory

    def send(self, header: Sequence[int], parts: Sequence[Tensor] = ()) -> None:
        """Send a header and tensors of the payload's dtype, which arrive flat and in one piece. Does not wait.

        LostRank when the receiver is gone.
        """
        message, size = [self._header_bytes], 0
        if parts:
            size = sum(part.numel() for part in parts)
            message += self._payload(parts, size)
        self._header[: 1 + len(header)] = array("q", (size, *header))
        self._sender.send(message)

    def _payload(self, parts: Sequence[Tensor], size: int) -> list[memoryview]:
        """What follows the header on the connection. Nothing if NCCL has it: that has begun then."""
        if not self._buffers:
            return [host_bytes(part) for part in parts]
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        self._finish(buffer)
        payload = buffer.payload[:size]
        for part, place in zip(parts, payload.split([part.numel() for part in parts]), strict=True):
            place.view(part.shape).copy_(part, non_blocking=True)  # from the device to the host, without NCCL
        if self._nccl is None:
            torch.cuda.current_stream(self._wires.device).synchronize()  # the payload is on the host now
            return [host_bytes(payload)]
        buffer.work = self._nccl_send(payload)
        return []

    def send_bulk(self, tensor: Tensor) -> None:
        """Send a tensor of any size, whose shape and dtype the receiver knows. Does not wait."""
        if self._nccl is not None and tensor.device.type == "cuda":
            tensor = tensor.contiguous()
            self._bulk.append((self._nccl_send(tensor), tensor))
        else:
            self._sender.send([host_bytes(tensor.cpu())])

    def flush(self) -> None:
        """Wait until everything is out."""
        self._sender.flush(self._timeout)
        for buffer in self._buffers:
            self._finish(buffer)
        for work, _ in self._bulk:
            work.wait()  # the stream: its memory may be used again
        self._bulk.clear()

    def _nccl_send(self, tensor: Tensor) -> dist.Work:
        try:
            with self._wires.connections.call(self._peer, self._timeout):  # the first one makes NCCL's connection
                return self._nccl.send([tensor], self._peer, 0)
        except RuntimeError as error:
            raise lost_rank(self._peer, error) from error

    def _finish(self, buffer: _Buffer) -> None:
        """From here on the stream may write to the buffer."""
        if buffer.work is not None:
            buffer.work.wait()
            buffer.work = None


class Inbox:
    """Receives from one rank. Sizes as for its `Outbox`."""

    def __init__(self, wires: Wires, route: Route, header_size: int, payload_size: int):
        self._wires, self._route, self._peer = wires, route, route.sender
        self._receiver = wires.connections.receivers[route]
        self._nccl = wires.nccl[route.link] if wires.nccl else None
        self._header = array("q", bytes(8 * (1 + header_size)))
        self._header_bytes = memoryview(self._header).cast("B")
        self._buffer = _Buffer(wires, payload_size).payload
        self._views: dict[int, tuple[Tensor, memoryview | None]] = {}  # by payload size, of which there are few

    def receive(self, timeout: timedelta) -> tuple[list[int], Tensor]:
        """The next message: its header (with anything after it), and its payload, flat, which is valid until the next
        call. LostRank when it does not come in time, or cannot come any more.
        """
        self._receiver.receive(self._header_bytes, timeout)
        size, *header = self._header.tolist()
        payload, where = self._views.get(size) or self._view(size)
        if size and where is None:
            self._nccl_receive(payload, timeout)
        elif size:
            self._receiver.receive(where, timeout)
            if self._wires.device.type == "cuda":
                payload = payload.to(self._wires.device)
        return header, payload

    def _view(self, size: int) -> tuple[Tensor, memoryview | None]:
        """A payload of this size, and where its bytes go on the host."""
        payload = self._buffer[:size]
        self._views[size] = payload, host_bytes(payload) if size and self._nccl is None else None
        return self._views[size]

    def receive_bulk(self, shape: Sequence[int], timeout: timedelta, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor sent by `send_bulk`: of the payload's dtype on this rank's device, or of another one on the host."""
        wires = self._wires
        if dtype is None and self._nccl is not None:
            tensor = torch.empty(*shape, dtype=wires.dtype, device=wires.device)
            self._nccl_receive(tensor, timeout)
            return tensor
        tensor = torch.empty(*shape, dtype=dtype or wires.dtype)
        self._receiver.receive(host_bytes(tensor), timeout)
        return tensor if dtype is not None else tensor.to(wires.device)

    def _nccl_receive(self, tensor: Tensor, timeout: timedelta) -> None:
        """The stream waits, not the host."""
        try:
            with self._wires.connections.call(self._peer, timeout):  # the first one makes NCCL's connection
                work = self._nccl.recv([tensor], self._peer, 0)
                work.wait()
        except RuntimeError as error:
            raise lost_rank(self._peer, error, timeout) from error
        self._wires.connections.expect(self._route, self._peer, timeout, work.is_completed)


def lost_rank(peer: int, error: RuntimeError, timeout: timedelta | None = None) -> LostRank:
    """What a process group's complaint means: a peer that is too slow, or one whose connection is gone."""
    if timeout is not None and re.search(r"timed? ?out|timing out", str(error), re.IGNORECASE):
        return LostRank.late(peer, timeout)
    return LostRank.gone(peer)
