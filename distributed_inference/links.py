"""Messages between two ranks, one direction each: a small header on the host, and a payload of hidden states or logits.

Receives are posted ahead and all buffers are allocated once, so that a message that arrives while the receiver computes
is there when it is asked for. Two ways for the payload:

    host   header and payload in one buffer, one gloo message. CPUs, and several ranks on one GPU (pinned memory)
    NCCL   the header over gloo, the payload from device to device. It is sent when the stream gets there and received
           as soon as the header says how large it is: the host never waits for a device

NCCL knows no tags and runs what two ranks send each other in the order of the calls, so every kind of link has its own
process group there. With gloo a kind of link is a tag. Messages go through the groups' own methods: `dist.isend` and
`dist.irecv` do the same with checks that take longer than the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

RING = 3  # buffers of a link: one in use, two ahead
FOREVER = timedelta(days=365)


class Link(IntEnum):
    """Kinds of links between ranks; between two ranks there is at most one of a kind and direction."""

    FORWARD = 0  # draft rank -> stage 0 -> ... -> last stage: hidden states, and every control message
    UP = 1  # stage -> draft rank: anchors, and what the last stage computes
    SCATTER = 2  # last stage -> all: normed h_L, for a split lm_head
    GATHER = 3  # all -> draft rank: their rows of the logits


class LostRank(RuntimeError):
    """A rank did not answer: it is gone, or too slow."""

    def __init__(self, rank: int, reason: str):
        super().__init__(reason)
        self.rank = rank


@dataclass(frozen=True)
class Wires:
    """The process groups that links use, and the device of this rank's payloads."""

    device: torch.device
    dtype: torch.dtype
    gloo: dist.ProcessGroup
    nccl: dict[Link, dist.ProcessGroup] | None = None  # None: payloads go through the host


class _Buffer:
    """Memory of one message: the host's part in one piece, and views of it."""

    def __init__(self, wires: Wires, header_size: int, payload_size: int):
        self._payload_at = header_size * 8
        itemsize = wires.dtype.itemsize
        on_host = 0 if wires.nccl else payload_size * itemsize
        pinned = wires.device.type == "cuda"
        self.bytes = torch.zeros(self._payload_at + on_host, dtype=torch.uint8, pin_memory=pinned)
        self._itemsize = itemsize if wires.nccl is None else 0
        self.header = self.bytes[: self._payload_at].view(torch.int64).numpy()
        if wires.nccl is None:
            self.payload = self.bytes[self._payload_at :].view(wires.dtype)
        else:
            self.payload = torch.zeros(payload_size, dtype=wires.dtype, device=wires.device)
        self.works: list[dist.Work] = []

    def message(self, size: int) -> Tensor:
        """What gloo transports of a message whose payload has `size` elements."""
        return self.bytes[: self._payload_at + size * self._itemsize]


class Outbox:
    """Sends to one rank.

    header_size: most integers of a header; payload_size: most elements of a payload; timeout: for a message to leave.
    """

    def __init__(self, wires: Wires, link: Link, peer: int, header_size: int, payload_size: int, timeout: timedelta):
        self._wires, self._link, self._peer, self._timeout = wires, link, peer, timeout
        self._buffers = [_Buffer(wires, header_size + 1, payload_size) for _ in range(RING)]
        self._next = 0
        self._bulk: list[tuple[dist.Work, Tensor]] = []  # sends under way, with their memory

    def send(self, header: Sequence[int], parts: Sequence[Tensor] = ()) -> None:
        """Send a header and tensors of the payload's dtype, which arrive flat and in one piece. Does not wait.

        LostRank when the receiver of an earlier message is gone.
        """
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % RING
        self._finish(buffer.works)
        size = 0
        for part in parts:
            buffer.payload[size : size + part.numel()].view(part.shape).copy_(part, non_blocking=True)
            size += part.numel()
        buffer.header[0] = size
        buffer.header[1 : 1 + len(header)] = header
        try:
            if size and self._wires.nccl is not None:
                buffer.works.append(self._wires.nccl[self._link].send([buffer.payload[:size]], self._peer, 0))
            elif size and self._wires.device.type == "cuda":
                torch.cuda.current_stream(self._wires.device).synchronize()  # the payload is on the host now
            buffer.works.append(self._wires.gloo.send([buffer.message(size)], self._peer, 2 * self._link))
        except RuntimeError as error:
            raise lost_rank(self._peer, error) from error

    def send_bulk(self, tensor: Tensor) -> None:
        """Send a tensor of any size, whose shape and dtype the receiver knows. Does not wait."""
        tensor = tensor.contiguous()
        try:
            if self._wires.nccl is not None and tensor.device.type == "cuda":
                work = self._wires.nccl[self._link].send([tensor], self._peer, 0)
            else:
                tensor = tensor.cpu()
                work = self._wires.gloo.send([tensor.view(-1).view(torch.uint8)], self._peer, 2 * self._link + 1)
        except RuntimeError as error:
            raise lost_rank(self._peer, error) from error
        self._bulk.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything is out; the memory of bulk messages is free then."""
        for buffer in self._buffers:
            self._finish(buffer.works)
        self._finish([work for work, _ in self._bulk])
        self._bulk.clear()

    def _finish(self, works: list[dist.Work]) -> None:
        """Wait for sends, each once: gloo would wait for another one."""
        try:
            while works:
                works.pop(0).wait(self._timeout)
        except RuntimeError as error:
            raise lost_rank(self._peer, error, self._timeout) from error


class Inbox:
    """Receives from one rank. Sizes as for its `Outbox`; `post` before the first message."""

    def __init__(self, wires: Wires, link: Link, peer: int, header_size: int, payload_size: int):
        self._wires, self._link, self._peer = wires, link, peer
        self._buffers = [_Buffer(wires, header_size + 1, payload_size) for _ in range(RING)]
        self._next = 0
        for buffer in self._buffers[: RING - 1]:
            self._post(buffer)

    def _post(self, buffer: _Buffer) -> None:
        try:
            buffer.works = [self._wires.gloo.recv([buffer.bytes], self._peer, 2 * self._link)]
        except RuntimeError as error:
            raise lost_rank(self._peer, error) from error

    def receive(self, timeout: timedelta) -> tuple[list[int], Tensor]:
        """The next message: its header (with zeros behind it), and its payload, flat, which is valid until the next
        call. LostRank when it does not come in time, or cannot come any more.
        """
        buffer = self._buffers[self._next]
        self._post(self._buffers[self._next - 1])  # used up by now
        self._next = (self._next + 1) % RING
        self._wait(buffer.works[0], timeout)
        header = buffer.header.tolist()
        payload = buffer.payload[: header[0]]
        if self._wires.nccl is not None:
            if header[0]:
                work = self._wires.nccl[self._link].recv([payload], self._peer, 0)
                self._wait(work, timeout)  # the stream waits, not the host
        elif self._wires.device.type == "cuda":
            payload = payload.to(self._wires.device)
        return header[1:], payload

    def receive_bulk(self, shape: Sequence[int], timeout: timedelta, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor sent by `send_bulk`: of the payload's dtype on this rank's device, or of another one on the host."""
        on_device = dtype is None and self._wires.nccl is not None
        tensor = torch.empty(
            *shape, dtype=dtype or self._wires.dtype, device=self._wires.device if on_device else "cpu"
        )
        if on_device:
            work = self._wires.nccl[self._link].recv([tensor], self._peer, 0)
        else:
            work = self._wires.gloo.recv([tensor.view(-1).view(torch.uint8)], self._peer, 2 * self._link + 1)
        self._wait(work, timeout)
        return tensor if dtype is not None else tensor.to(self._wires.device)

    def _wait(self, work: dist.Work, timeout: timedelta) -> None:
        try:
            work.wait(timeout)
        except RuntimeError as error:
            raise lost_rank(self._peer, error, timeout) from error


def lost_rank(peer: int, error: RuntimeError, timeout: timedelta | None = None) -> LostRank:
    """What gloo's complaint means: a peer that is too slow, or one whose connection is gone."""
    if timeout is not None and "timed out" in str(error).lower():
        return LostRank(peer, f"did not answer for {timeout.total_seconds():g} s")
    return LostRank(peer, "closed its connection: it was killed, or ended with an error of its own")
