"""TCP connections between ranks: one for each kind of link, sender and receiver, open for the whole run.

The messages of a cycle are small and many. A process group hands each of them from a thread of its own to the one that
waits, which on a machine with fewer cores than ranks takes longer than everything else between two forwards; here the
waiting thread sleeps in the kernel until its bytes are there, which the kernel takes in while it computes. The process
group is needed for the start alone.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

FOREVER = timedelta(days=365)
HELLO = struct.Struct("=16sqq")  # first bytes of a connection: the receiver's token, the link, the sender
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class LostRank(RuntimeError):
    """A rank did not answer: it is gone, or too slow."""

    def __init__(self, rank: int, reason: str):
        super().__init__(reason)
        self.rank = rank

    @classmethod
    def gone(cls, rank: int) -> LostRank:
        return cls(rank, "closed its connection: it was killed, or ended with an error of its own")

    @classmethod
    def late(cls, rank: int, timeout: timedelta) -> LostRank:
        return cls(rank, f"did not answer for {timeout.total_seconds():g} s")


class Route(NamedTuple):
    """What a connection is for."""

    link: int  # kind of link
    sender: int  # ranks
    receiver: int


class Sender:
    """The sending end of a connection to rank `peer`. Sends never wait for the receiver."""

    def __init__(self, connection: socket.socket, peer: int):
        self._socket, self._peer = connection, peer
        self._writer: ThreadPoolExecutor | None = None  # one thread: what the kernel did not take at once
        self._queue: list[Future] = []

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send bytes in order. What does not fit into the kernel's buffers is copied, and goes out in a thread.

        LostRank when the receiver is gone.
        """
        sent = 0
        if self._queue:
            self._reap()
        try:
            if not self._queue:
                sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            raise LostRank.gone(self._peer) from error
        if sent < sum(part.nbytes for part in parts):
            self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix=f"to rank {self._peer}")
            self._queue.append(self._writer.submit(self._socket.sendall, b"".join(parts)[sent:]))

    def flush(self, timeout: timedelta) -> None:
        """Wait until the kernel has everything. LostRank when the receiver is gone, or does not take it in time."""
        wait(self._queue, timeout.total_seconds())
        self._reap()
        if self._queue:
            raise LostRank.late(self._peer, timeout)

    def _reap(self) -> None:
        try:
            while self._queue and self._queue[0].done():
                self._queue.pop(0).result()
        except OSError as error:
            raise LostRank.gone(self._peer) from error


class Receiver:
    """The receiving end of a connection from rank `peer`."""

    def __init__(self, connection: socket.socket, peer: int):
        self._socket, self._peer = connection, peer
        self._timeout: timedelta | None = None

    def receive(self, into: memoryview, timeout: timedelta) -> None:
        """Fill `into`. LostRank when the sender is gone, or sends nothing for `timeout`."""
        if timeout != self._timeout:
            seconds = timeout.total_seconds()
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            )
            self._timeout = timeout
        while into.nbytes:
            try:
                count = self._socket.recv_into(into)
            except BlockingIOError as error:
                raise LostRank.late(self._peer, timeout) from error
            except OSError as error:
                raise LostRank.gone(self._peer) from error
            if not count:
                raise LostRank.gone(self._peer)
            into = into[count:]


class Connections:
    """All connections of this rank, by route. Every rank makes one: they meet in the default process group.

    routes: those of the whole run; timeout: for the other ranks to connect. LostRank when one does not.
    """

    def __init__(self, routes: Iterable[Route], timeout: timedelta):
        rank, host = dist.get_rank(), own_address(os.environ)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=1024) as server:
            server.settimeout(timeout.total_seconds())
            token = secrets.token_bytes(16)  # tells our ranks from strangers
            addresses = [None] * dist.get_world_size()
            dist.all_gather_object(addresses, (server.getsockname()[:2], token))
            check_reachable([address[0] for address, _ in addresses])
            self.senders = {
                route: Sender(_connect(route, *addresses[route.receiver], timeout), route.receiver)
                for route in routes
                if route.sender == rank
            }
            self.receivers: dict[Route, Receiver] = {}
            missing = {route for route in routes if route.receiver == rank}
            while missing:
                try:
                    connection = server.accept()[0]
                except TimeoutError as error:
                    raise LostRank.late(min(missing).sender, timeout) from error
                route = _greeting(connection, token, rank, timeout)
                if route in missing:
                    self.receivers[route] = Receiver(connection, route.sender)
                    missing.remove(route)
                else:
                    connection.close()


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host, without a copy if they lie in one piece."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _connect(route: Route, address: tuple[str, int], token: bytes, timeout: timedelta) -> socket.socket:
    try:
        connection = socket.create_connection(address, timeout.total_seconds())
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HELLO.pack(token, route.link, route.sender))
    except OSError as error:
        raise LostRank(route.receiver, f"cannot be reached at {address[0]}:{address[1]} ({error.strerror})") from error
    return connection


def _greeting(connection: socket.socket, token: bytes, rank: int, timeout: timedelta) -> Route | None:
    """The route that the other end wants this connection for; None for a stranger."""
    hello = bytearray(HELLO.size)
    try:
        Receiver(connection, peer=-1).receive(memoryview(hello), timeout)
    except LostRank:
        return None
    found, link, sender = HELLO.unpack(hello)
    return Route(link, sender, rank) if secrets.compare_digest(found, token) else None


def own_address(environment: Mapping[str, str]) -> str:
    """This machine's address on the way to the other ranks.

    That of the interface GLOO_SOCKET_IFNAME, if set, and otherwise the one that packets to MASTER_ADDR leave from.
    ValueError when there is none.
    """
    name, master = environment.get("GLOO_SOCKET_IFNAME"), environment.get("MASTER_ADDR", "127.0.0.1")
    try:
        if name:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                request = struct.pack("256s", name.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        family, kind, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        what = f"GLOO_SOCKET_IFNAME is {name!r}" if name else f"MASTER_ADDR is {master!r}"
        raise ValueError(f"{what}: no address of this machine follows from it ({error.strerror})") from None


def check_reachable(hosts: Sequence[str]) -> None:
    """ValueError when a rank has an address that only its own machine knows, and others are elsewhere."""
    inside = [ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts]
    if any(inside) and not all(inside):
        rank = inside.index(True)
        raise ValueError(
            f"rank {rank} has the address {hosts[rank]}, which other machines cannot reach: give --master_addr as a "
            "number, or name the network interface in GLOO_SOCKET_IFNAME"
        )
