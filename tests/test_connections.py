"""Connections between ranks: bytes in order, nobody waits for a slow receiver, and a lost rank has a name."""

import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch

from distributed_inference import addresses, connections
from distributed_inference.addresses import LOOPBACK, check_reachable, own_address, public_addresses, seen_from
from distributed_inference.connections import HELLO, Connections, LostRank, Receiver, Route, Sender
from distributed_inference.layout import Layout
from distributed_inference.links import Inbox, Link, Outbox, Wires, lost_rank, routes
from distributed_inference.watch import Line

SHORT, LONG = timedelta(seconds=0.2), timedelta(seconds=20)
LARGE = 8_000_000  # bytes: more than any socket buffer


@pytest.fixture
def ends():
    """Sender to rank 1, receiver from rank 0, and their sockets."""
    left, right = socket.socketpair()
    with left, right:
        yield Sender(left, 1), Receiver(right, 0), left, right


def received(receiver, size):
    into = bytearray(size)
    receiver.receive(memoryview(into), LONG)
    return bytes(into)


def test_bytes_arrive_in_order_while_nobody_reads(ends):
    """Guards against sends that wait for the receiver, and against a small message that overtakes a large one."""
    sender, receiver, *_ = ends
    large = bytes(range(250)) * (LARGE // 250)
    sender.send([memoryview(b"head"), memoryview(large)])  # returns although nobody reads
    sender.send([memoryview(b"tail")])
    assert received(receiver, 4) == b"head"
    assert received(receiver, len(large)) == large
    assert received(receiver, 4) == b"tail"
    sender.flush(LONG)
    sender.send([memoryview(b"direct")])
    assert received(receiver, 6) == b"direct"


def test_what_waits_is_a_copy(ends):
    """Guards against a message that changes after it was sent, as its buffer is used again."""
    sender, receiver, *_ = ends
    buffer = bytearray(b"a" * LARGE)
    sender.send([memoryview(buffer)])
    buffer[:] = b"b" * LARGE
    assert received(receiver, LARGE) == b"a" * LARGE


def test_flush_does_not_wait_for_ever(ends):
    sender, *_ = ends
    sender.send([memoryview(bytes(LARGE))])
    with pytest.raises(LostRank, match=r"did not answer for 0\.2 s") as lost:
        sender.flush(SHORT)
    assert lost.value.rank == 1
    ends[3].close()  # ends the thread


def test_a_silent_sender_is_lost_in_time(ends):
    _, receiver, left, _ = ends
    left.send(b"1234")  # half a message
    begun = time.monotonic()
    with pytest.raises(LostRank, match=r"did not answer for 0\.2 s") as lost:
        receiver.receive(memoryview(bytearray(8)), SHORT)
    assert lost.value.rank == 0
    assert 0.1 < time.monotonic() - begun < 5


def test_a_timeout_can_be_changed(ends):
    """Guards against a first timeout that stays, such as the long one between generations."""
    sender, receiver, *_ = ends
    sender.send([memoryview(b"1")])
    assert received(receiver, 1) == b"1"
    with pytest.raises(LostRank, match=r"0\.2 s"):
        receiver.receive(memoryview(bytearray(1)), SHORT)
    threading.Timer(0.5, sender.send, [[memoryview(b"2")]]).start()
    assert received(receiver, 1) == b"2"


@pytest.mark.parametrize("half", [b"", b"12"])
def test_an_ended_sender_is_lost_at_once(ends, half):
    _, receiver, left, _ = ends
    left.send(half)
    left.close()
    with pytest.raises(LostRank, match="closed its connection"):
        receiver.receive(memoryview(bytearray(4)), LONG)


def test_an_ended_receiver_is_lost(ends):
    """Guards against a rank that sends into the void: directly, or in its thread."""
    sender, _, _, right = ends
    sender.send([memoryview(bytes(LARGE))])
    right.close()
    with pytest.raises(LostRank, match="closed its connection") as lost:
        sender.flush(LONG)
    assert lost.value.rank == 1
    with pytest.raises(LostRank, match="closed its connection"):
        sender.send([memoryview(b"more")])


# ---------------------------------------------------------------------------------------------------------------------
# Meeting
# ---------------------------------------------------------------------------------------------------------------------


def meet(world_size, wanted, before=lambda rank, addresses: None, seconds=2, host="127.0.0.1"):
    """`Connections` of threads that stand for ranks, or the errors that they end with."""
    barrier, shared, found = threading.Barrier(world_size), [None] * world_size, [None] * world_size

    def run(rank):
        def gather(own):
            shared[rank] = own
            barrier.wait(20)
            before(rank, shared)
            return shared

        try:
            found[rank] = Connections(rank, wanted, host, gather, timedelta(seconds=seconds))
        except LostRank as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.mark.parametrize("lm_head", ["draft", "split"])
def test_every_link_has_its_own_connection(lm_head):
    """Guards against two kinds of links between two ranks that share a connection or change places."""
    wanted = routes(Layout((1, 1, 1), lm_head=lm_head))
    ranks = meet(4, wanted)
    for number, route in enumerate(wanted):
        ranks[route.sender].senders[route].send([memoryview(bytes([number]))])
    for number, route in enumerate(wanted):
        assert received(ranks[route.receiver].receivers[route], 1) == bytes([number])
    assert sum(len(rank.senders) for rank in ranks) == len(wanted) == len(set(wanted))


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n", HELLO.pack(bytes(16), 0, 0), b"?"])
def test_strangers_are_sent_away(greeting):
    """Guards against a port scanner, or a rank of another run, that takes a rank's place."""

    def intrude(rank, addresses):
        if rank == 0:
            with socket.create_connection(addresses[1][:2]) as stranger:
                stranger.send(greeting)

    ranks = meet(2, [Route(0, 0, 1)], intrude)
    ranks[0].senders[Route(0, 0, 1)].send([memoryview(b"friend")])
    assert received(ranks[1].receivers[Route(0, 0, 1)], 6) == b"friend"


def test_silent_strangers_delay_nobody():
    """Guards against connections that are looked at one after the other: each silent one took the whole timeout."""
    strangers = []

    def intrude(rank, addresses):
        if rank == 0:
            strangers.extend(socket.create_connection(addresses[1][:2]) for _ in range(3))
            strangers[0].send(b"half a greeting"[:9])

    begun = time.monotonic()
    ranks = meet(2, [Route(0, 0, 1)], intrude, seconds=15)
    assert time.monotonic() - begun < 4
    ranks[0].senders[Route(0, 0, 1)].send([memoryview(b"friend")])
    assert received(ranks[1].receivers[Route(0, 0, 1)], 6) == b"friend"
    for stranger in strangers:
        assert stranger.recv(1) == b""  # nobody listens to them any more
        stranger.close()


def test_a_stranger_is_not_listened_to_for_long(monkeypatch):
    """Guards against strangers that keep their connections for as long as the ranks meet."""
    monkeypatch.setattr(connections, "GREETING_SECONDS", 0.1)
    with connections.listen("127.0.0.1") as server, socket.create_connection(server.getsockname()) as stranger:
        begun = time.monotonic()
        listening = threading.Thread(target=list, args=(connections.greetings(server, begun + 2.5),))
        listening.start()
        assert stranger.recv(1) == b""
        assert time.monotonic() - begun < 2
        listening.join()


def test_a_rank_that_does_not_connect_is_named(monkeypatch):
    monkeypatch.setattr(connections, "_connect", lambda *_: None)
    error = meet(2, [Route(0, 0, 1)])[1]
    assert (str(error), error.rank, error.is_late) == ("did not answer for 2 s", 0, True)


def test_a_rank_that_cannot_be_reached_has_a_reason():
    """Guards against "(None)": a timeout of the socket module has no strerror. And a closed port is no timeout."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        queued = [socket.socket() for _ in range(4)]  # they fill its queue: another one gets no answer
        for client in queued:
            client.setblocking(False)
            client.connect_ex(address)
        with pytest.raises(LostRank, match=r"cannot be reached at 127\.0\.0\.1:\d+ \(timed out\)") as lost:
            connections._connect(Route(0, 0, 1), address, bytes(16), SHORT)
        assert lost.value.rank == 1
        for client in queued:
            client.close()
    with pytest.raises(LostRank, match=r"\(Connection refused\)"):
        connections._connect(Route(0, 0, 1), address, bytes(16), SHORT)


def test_a_machine_that_is_switched_off_is_probed():
    """Guards against connections over which a dead machine is never noticed, as nothing is sent."""
    rank = meet(2, [Route(0, 0, 1)])
    for end in (rank[0].senders, rank[1].receivers):
        connection = end[Route(0, 0, 1)]._socket
        seconds = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        seconds += connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) * connection.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT
        )
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert seconds <= 60
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_a_line_whose_peer_takes_nothing_in_ends():
    """Guards against a line over which a beat to a dead machine is sent again for a quarter of an hour."""
    with connections.listen(LOOPBACK) as server, connections.connect(server.getsockname(), b"", SHORT) as ours:
        Line(ours)
        milliseconds = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert 5_000 <= milliseconds <= 60_000


def test_whom_a_process_waits_for_is_known():
    """Guards against a rank that waits, and takes the blame for the one that it waits for."""
    wanted = [Route(0, 0, 1), Route(1, 0, 1)]
    ours = meet(2, wanted)
    assert ours[1].waits_for() is None
    waiting = threading.Thread(target=received, args=(ours[1].receivers[wanted[1]], 2))
    waiting.start()
    for part in (b"a", b"b"):
        deadline = time.monotonic() + 5
        while ours[1].waits_for() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ours[1].waits_for() == 0
        ours[0].senders[wanted[1]].send([memoryview(part)])
    waiting.join()
    assert ours[1].waits_for() is None
    with pytest.raises(LostRank):
        ours[1].receivers[wanted[0]].receive(memoryview(bytearray(1)), SHORT)
    assert ours[1].waits_for() == 0  # until it is decided whose fault it is


def test_a_librarys_call_has_a_limit():
    """Guards against NCCL's connection, which is made in the first message, and for which nobody counts the time."""
    ours = meet(2, [Route(0, 0, 1)])[1]
    work = SimpleNamespace(wait=lambda: over.wait(10), is_completed=lambda: True)
    group = SimpleNamespace(recv=lambda *_: work)
    over, route = threading.Event(), Route(0, 0, 1)
    inbox = Inbox(Wires(torch.device("cpu"), torch.float32, ours, {0: group}), route, 3, 100)
    waiting = threading.Thread(target=inbox.receive_bulk, args=((1, 1), SHORT))
    waiting.start()
    time.sleep(0.5)
    assert (ours.waits_for(), str(ours.overdue())) == (0, "did not answer for 0.2 s")
    over.set()
    waiting.join()
    assert (ours.waits_for(), ours.overdue()) == (None, None)


def test_a_payload_that_a_device_waits_for_has_a_limit():
    """Guards against a host that waits for a payload beside its device, and a payload that nobody misses."""
    ours = meet(2, [Route(0, 0, 1)])[1]
    arrived, route = threading.Event(), Route(0, 0, 1)
    work = SimpleNamespace(wait=lambda: None, is_completed=arrived.is_set)  # takes no time limit
    inbox = Inbox(
        Wires(torch.device("cpu"), torch.float32, ours, {0: SimpleNamespace(recv=lambda *_: work)}), route, 3, 100
    )
    inbox.receive_bulk((1, 1), SHORT)
    assert (ours.waits_for(), ours.overdue()) == (None, None)
    time.sleep(0.3)
    assert (ours.waits_for(), str(ours.overdue())) == (0, "did not answer for 0.2 s")
    arrived.set()
    assert (ours.waits_for(), ours.overdue()) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        "Watchdog caught collective operation timeout: WorkNCCL(OpType=SEND) ran for 600 ms before timing out",
        "Timed out waiting 1000ms for recv operation to complete",
    ],
)
def test_late_and_gone_are_told_apart(text):
    """Guards against a slow peer that is said to have been killed."""
    assert str(lost_rank(2, RuntimeError(text), LONG)) == "did not answer for 20 s"
    assert "closed its connection" in str(lost_rank(2, RuntimeError("Connection reset by peer"), LONG))


# ---------------------------------------------------------------------------------------------------------------------
# Addresses
# ---------------------------------------------------------------------------------------------------------------------


def interface(*found):
    return [SimpleNamespace(family=socket.AF_INET6 if ":" in one else socket.AF_INET, address=one) for one in found]


def test_addresses():
    assert own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert own_address({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "10.0.0.1"}) == "127.0.0.1"
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME is 'nothere'"):
        own_address({"GLOO_SOCKET_IFNAME": "nothere"})
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'no\.such\.host\.invalid'"):
        own_address({"MASTER_ADDR": "no.such.host.invalid"})


def test_ranks_of_one_machine_stay_inside():
    """Guards against ranks that listen where other machines reach them, though none of theirs is elsewhere."""
    place = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "no.such.host.invalid"}
    assert own_address(place) == "127.0.0.1"


def test_interfaces_by_name(monkeypatch):
    """Guards against lists, and interfaces with IPv6 addresses alone, which gloo takes and these ranks refused."""
    known = {
        "down": [],
        "six": interface("fe80::1%six", "fd77:1::2"),
        "both": interface("fe80::3%both", "10.0.0.3"),
        "link": interface("fe80::4%link"),
    }
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: known)
    wanted = {
        "six": "fd77:1::2",
        "both": "10.0.0.3",
        "link": "fe80::4%link",
        "down,both,six": "10.0.0.3",
        "no, six": "fd77:1::2",
    }
    for names, address in wanted.items():
        assert own_address({"GLOO_SOCKET_IFNAME": names}) == address
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME is 'down,no'.*both, down, link, six"):
        own_address({"GLOO_SOCKET_IFNAME": "down,no"})


def test_a_machines_own_name_may_be_a_loopback_address(monkeypatch):
    """Guards against Debian's hosts file, which gives a machine's own name the address 127.0.1.1, unknown elsewhere."""
    towards = {"debian": "127.0.1.1", "localhost": "127.0.0.1", "127.0.0.2": "127.0.0.2", "::1": "::1"}
    monkeypatch.setattr(addresses, "_source_towards", lambda host: towards.get(host, "10.0.0.7"))
    place = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}
    assert own_address(place | {"MASTER_ADDR": "debian"}) == "10.0.0.7"
    for meant in ("localhost", "127.0.0.2", "::1"):  # all machines are this one, as in a trial
        assert own_address(place | {"MASTER_ADDR": meant}) == towards[meant]


def test_link_local_addresses_go_through_the_own_interface():
    """Guards against another machine's interface name in an address: this one's has another."""
    assert seen_from("fe80::1%eth0", "fe80::2") == "fe80::2%eth0"
    assert seen_from("fd77::1", "fd77::2") == "fd77::2"


def test_link_local_connections():
    """Guards against an interface that is in the address, and is lost where the socket is bound."""
    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    hosts = [entry.address for entry in entries if entry.family == socket.AF_INET6 and "%" in entry.address]
    if not hosts:
        pytest.skip("this machine has no link-local address")
    ranks = meet(2, [Route(0, 0, 1)], host=hosts[0])
    ranks[0].senders[Route(0, 0, 1)].send([memoryview(b"near")])
    assert received(ranks[1].receivers[Route(0, 0, 1)], 4) == b"near"


def test_ipv6_connections():
    """Guards against addresses that are taken apart as IPv4 ones are."""
    try:
        connections.listen("::1").close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    ranks = meet(2, [Route(0, 0, 1)], host="::1")
    ranks[0].senders[Route(0, 0, 1)].send([memoryview(b"six")])
    assert received(ranks[1].receivers[Route(0, 0, 1)], 3) == b"six"


def test_a_loopback_address_is_no_use_to_other_machines():
    check_reachable(["127.0.0.1"] * 3)
    check_reachable(["10.0.0.1", "10.0.0.2", "fe80::1"])
    with pytest.raises(ValueError, match=r"rank 1 has the address 127\.0\.1\.1.*GLOO_SOCKET_IFNAME"):
        check_reachable(["10.0.0.1", "127.0.1.1"])


def test_public_addresses_are_known():
    """Guards against ranks that the whole internet can reach, and nobody says so."""
    assert public_addresses(["10.0.0.1", "127.0.0.1", "fe80::1", "fd77::1", "192.168.3.4"]) == []
    assert public_addresses(["8.8.8.8", "10.0.0.1", "2600::1", "8.8.8.8"]) == ["2600::1", "8.8.8.8"]


# ---------------------------------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_of_any_size_follow_each_other(ends, dtype):
    """Guards against payloads that end up in the next message, and parts that are not in one piece in memory."""
    route = Route(Link.UP, 0, 1)
    wires = Wires(torch.device("cpu"), dtype, SimpleNamespace(senders={route: ends[0]}, receivers={route: ends[1]}))
    outbox, inbox = Outbox(wires, route, 3, 100, LONG), Inbox(wires, route, 3, 100)
    torch.manual_seed(0)
    for header, shapes in (([5], []), ([1, 2, 3], [(4, 5), (2, 1)]), ([7, 8], [(1, 100)]), ([9], []), ([4], [(3, 3)])):
        parts = [torch.randn(shape[::-1]).to(dtype).mT for shape in shapes]
        outbox.send(header, parts)
        bulk = torch.randn(300, 7).mT.to(dtype)
        outbox.send_bulk(bulk)
        got, payload = inbox.receive(LONG)
        assert got[: len(header)] == header
        assert torch.equal(payload, torch.cat([part.flatten() for part in parts]) if parts else torch.empty(0))
        assert torch.equal(inbox.receive_bulk((7, 300), LONG), bulk)
    outbox.flush()
