"""TCP connections between ranks: one for each kind of link, sender and receiver, open for the whole run.

The messages of a cycle are small and many. A process group hands each of them from a thread of its own to the one that
waits, which on a machine with fewer cores than ranks takes longer than everything else between two forwards; here the
waiting thread sleeps in the kernel until its bytes are there, which the kernel takes in while it computes.

Why not a message library: the same decode loop over pyzmq, whose messages go through a thread of its own as well, had
an overhead of 0.41 to 0.64 ms per cycle at n = 8 and lag 0, where these sockets have 0.12 to 0.19 ms; at lag 1 its
efficiency was .70 to .72 instead of .78 to .90 (benchmarks/cycle_overhead.py, two cores, the same run). What a library
does beside that is done here: many connections are accepted beside each other, a stranger delays nobody, a machine that
is gone is noticed (watch.py), IPv6, and every failure has a reason.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed_inference.addresses import check_reachable, seen_from, without_interface

HELLO = struct.Struct("=16sqq")  # first bytes of a connection: the receiver's token, the link, the sender
GREETING_SECONDS = 5.0  # a connection that has not said by then what it is for is a stranger's
CONNECT_SECONDS = 20.0  # to reach a rank that is known to listen
PROBE_AFTER, PROBE_EVERY, PROBES = 10, 5, 4  # seconds, seconds, count: a silent machine is probed, and gone after 30 s


class LostRank(RuntimeError):
    """A rank did not answer: it is gone, or (`is_late`) too slow."""

    def __init__(self, rank: int, reason: str, *, is_late: bool = False):
        super().__init__(reason)
        self.rank, self.is_late = rank, is_late

    @classmethod
    def gone(cls, rank: int) -> LostRank:
        return cls(rank, "closed its connection: it was killed, or ended with an error of its own")

    @classmethod
    def late(cls, rank: int, timeout: timedelta) -> LostRank:
        return cls(rank, f"did not answer for {timeout.total_seconds():g} s", is_late=True)


class Route(NamedTuple):
    """What a connection is for."""

    link: int  # kind of link
    sender: int  # ranks
    receiver: int


class Sender:
    """The sending end of a connection to rank `peer`. Sends never wait for the receiver."""

    def __init__(self, connection: socket.socket, peer: int):
        self._socket, self._peer = connection, peer
        self.waits_for: int | None = None  # the receiver's rank, while `flush` waits for it
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
        if sent < sum(map(len, parts)):
            self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix=f"to rank {self._peer}")
            self._queue.append(self._writer.submit(self._socket.sendall, b"".join(parts)[sent:]))

    def flush(self, timeout: timedelta) -> None:
        """Wait until the kernel has everything. LostRank when the receiver is gone, or does not take it in time."""
        self.waits_for = self._peer
        wait(self._queue, timeout.total_seconds())
        self._reap()
        if self._queue:
            raise LostRank.late(self._peer, timeout)
        self.waits_for = None

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
        self.waits_for: int | None = None  # the sender's rank, while `receive` waits for it, and after it gave up
        self._timeout: timedelta | None = None

    def receive(self, into: memoryview, timeout: timedelta) -> None:
        """Fill `into`. LostRank when the sender is gone, or sends nothing for `timeout`."""
        if timeout != self._timeout:
            seconds = timeout.total_seconds()
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            )
            self._timeout = timeout
        self.waits_for = self._peer
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
        self.waits_for = None


class Connections:
    """All connections of this rank, by route. Every rank makes one.

    rank: this one; routes: those of the whole run; host: this machine's address; gather: what every rank calls with a
    value, and returns the values of all of them, by rank; timeout: for the other ranks to connect.
    ValueError for addresses that cannot be reached, LostRank when a rank does not connect.
    """

    def __init__(
        self,
        rank: int,
        routes: Iterable[Route],
        host: str,
        gather: Callable[[Any], list[Any]],
        timeout: timedelta,
    ):
        with listen(host) as server:
            token = secrets.token_bytes(16)  # tells our ranks from strangers
            addresses = gather([without_interface(host), server.getsockname()[1], token.hex()])
            self.hosts: list[str] = [address[0] for address in addresses]  # by rank
            check_reachable(self.hosts)
            limit = min(timeout, timedelta(seconds=CONNECT_SECONDS))
            self._calls: dict[int, tuple[int, timedelta, float]] = {}  # by thread: peer, limit, when it is reached
            self._payloads: dict[Hashable, tuple[int, timedelta, float, Callable[[], bool]]] = {}  # and: is it here?
            self.senders: dict[Route, Sender] = {}
            for route in routes:
                if route.sender == rank:
                    theirs, port, their_token = addresses[route.receiver]
                    connection = _connect(route, (seen_from(host, theirs), port), bytes.fromhex(their_token), limit)
                    self.senders[route] = Sender(connection, route.receiver)
            self.receivers = _accept(server, token, [route for route in routes if route.receiver == rank], timeout)

    def waits_for(self) -> int | None:
        """The rank that some thread of this process waits for at this moment, or has given up on."""
        waiting = [end.waits_for for end in (*self.receivers.values(), *self.senders.values())]
        waiting += [peer for peer, *_ in list(self._calls.values())]
        waiting += [peer for peer, _ in self._overdue_payloads()]
        return next((peer for peer in waiting if peer is not None), None)

    @contextmanager
    def call(self, peer: int, timeout: timedelta) -> Iterator[None]:
        """Around a library's call that waits for a rank, for how long only the library knows: see `overdue`."""
        thread = threading.get_ident()
        self._calls[thread] = peer, timeout, time.monotonic() + timeout.total_seconds()
        yield
        del self._calls[thread]

    def expect(self, link: Hashable, peer: int, timeout: timedelta, is_here: Callable[[], bool]) -> None:
        """A device waits for a payload, the newest one over a link, and the host does not: see `overdue`."""
        self._payloads[link] = peer, timeout, time.monotonic() + timeout.total_seconds(), is_here

    def overdue(self) -> LostRank | None:
        """The rank that such a call, or a device, has waited for longer than it may."""
        now = time.monotonic()
        late = [(peer, limit) for peer, limit, until in list(self._calls.values()) if until < now]
        late += self._overdue_payloads()
        return LostRank.late(*late[0]) if late else None

    def _overdue_payloads(self) -> list[tuple[int, timedelta]]:
        """Peers whose payload a device waits for too long, and for how long it may."""
        now, expected = time.monotonic(), list(self._payloads.values())
        return [(peer, limit) for peer, limit, until, is_here in expected if until < now and not is_here()]


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host, without a copy if they lie in one piece."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def listen(host: str) -> socket.socket:
    """A server on any free port of one of this machine's addresses, and of no other."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]  # with its interface's number
    return socket.create_server(address, family=family, backlog=1024)


def greetings(server: socket.socket, deadline: float) -> Iterator[tuple[socket.socket, tuple[bytes, int, int]]]:
    """New connections with their HELLO: token, link and sender. Ends at the deadline (of `time.monotonic`).

    All are listened to beside each other, so one that says nothing delays nobody; it is closed after GREETING_SECONDS.
    """
    heard: dict[socket.socket, tuple[bytearray, float]] = {}  # what each has said, and until when it may speak
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def send_away(connection: socket.socket) -> None:
            del heard[connection]
            selector.unregister(connection)
            connection.close()

        try:
            while (now := time.monotonic()) < deadline:
                for key, _ in selector.select(min(deadline - now, 0.5)):
                    if key.fileobj is server:
                        if (connection := _next_connection(server)) is not None:
                            heard[connection] = bytearray(), now + GREETING_SECONDS
                            selector.register(connection, selectors.EVENT_READ)
                    elif not _hear(connection := key.fileobj, heard[connection][0]):
                        send_away(connection)
                    elif len(heard[connection][0]) == HELLO.size:
                        hello = HELLO.unpack(heard.pop(connection)[0])
                        selector.unregister(connection)
                        connection.setblocking(True)
                        yield connection, hello
                for connection in [one for one, (_, until) in heard.items() if until < time.monotonic()]:
                    send_away(connection)
        finally:
            for connection in heard:
                connection.close()


def _next_connection(server: socket.socket) -> socket.socket | None:
    """The next one that somebody has made, ready to be listened to; None if it is gone again."""
    try:
        connection = server.accept()[0]
    except OSError:
        return None
    connection.setblocking(False)
    _tune(connection)
    return connection


def _hear(connection: socket.socket, said: bytearray) -> bool:
    """Add to what a connection has said so far. False when it has ended."""
    try:
        more = connection.recv(HELLO.size - len(said))
    except BlockingIOError:
        return True
    except OSError:
        return False
    said += more
    return bool(more)


def connect(address: tuple[str, int], hello: bytes, timeout: timedelta) -> socket.socket:
    """A connection that has said what it is for. OSError when that cannot be done in time."""
    connection = socket.create_connection(address, timeout.total_seconds())
    try:
        _tune(connection)
        connection.sendall(hello)
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def _tune(connection: socket.socket) -> None:
    """Small messages leave at once, and the kernel notices a machine that has been switched off.

    TCP_USER_TIMEOUT is for the lines of watch.py alone: the kernel would also end a connection whose receiver is alive
    and does not read, such as a rank that compiles its stage while a long prompt waits in its buffers.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def reason_of(error: OSError) -> str:
    """Why something failed. An error of the socket module may have no `strerror`, a timeout for one."""
    return error.strerror or str(error) or type(error).__name__


def _connect(route: Route, address: tuple[str, int], token: bytes, timeout: timedelta) -> socket.socket:
    try:
        return connect(address, HELLO.pack(token, route.link, route.sender), timeout)
    except OSError as error:
        place = f"{address[0]}:{address[1]}"
        raise LostRank(route.receiver, f"cannot be reached at {place} ({reason_of(error)})") from error


def _accept(server: socket.socket, token: bytes, routes: Sequence[Route], timeout: timedelta) -> dict[Route, Receiver]:
    """Take the connections of all routes to this rank. Strangers, whose token is another one, are sent away."""
    receivers: dict[Route, Receiver] = {}
    missing = {(route.link, route.sender): route for route in routes}
    with closing(greetings(server, time.monotonic() + timeout.total_seconds())) as arrivals:
        while missing:
            connection, (found, link, sender) = next(arrivals, (None, (b"", 0, 0)))
            if connection is None:
                raise LostRank.late(min(missing.values()).sender, timeout)
            if (link, sender) in missing and secrets.compare_digest(found, token):
                receivers[missing.pop((link, sender))] = Receiver(connection, sender)
            else:
                connection.close()
    return receivers
