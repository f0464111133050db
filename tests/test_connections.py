"""Connections between ranks: bytes in order, nobody waits for a slow receiver, and a lost rank has a name."""

import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from distributed_inference import connections
from distributed_inference.connections import (
    HELLO,
    Connections,
    LostRank,
    Receiver,
    Route,
    Sender,
    check_reachable,
    own_address,
)
from distributed_inference.layout import Layout
from distributed_inference.links import Inbox, Link, Outbox, Wires, routes

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


def meet(monkeypatch, world_size, wanted, before=lambda rank, addresses: None):
    """`Connections` of threads that stand for ranks."""
    barrier, shared, local = threading.Barrier(world_size), [None] * world_size, threading.local()
    found = [None] * world_size

    def gather(into, own):
        shared[local.rank] = own
        barrier.wait(20)
        into[:] = shared
        before(local.rank, into)

    group = SimpleNamespace(get_rank=lambda: local.rank, get_world_size=lambda: world_size, all_gather_object=gather)
    monkeypatch.setattr(connections, "dist", group)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def run(rank):
        local.rank = rank
        try:
            found[rank] = Connections(wanted, timedelta(seconds=2))
        except LostRank as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.mark.parametrize("lm_head", ["draft", "split"])
def test_every_link_has_its_own_connection(monkeypatch, lm_head):
    """Guards against two kinds of links between two ranks that share a connection or change places."""
    wanted = routes(Layout((1, 1, 1), lm_head=lm_head))
    ranks = meet(monkeypatch, 4, wanted)
    for number, route in enumerate(wanted):
        ranks[route.sender].senders[route].send([memoryview(bytes([number]))])
    for number, route in enumerate(wanted):
        assert received(ranks[route.receiver].receivers[route], 1) == bytes([number])
    assert sum(len(rank.senders) for rank in ranks) == len(wanted) == len(set(wanted))


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n", HELLO.pack(bytes(16), 0, 0), b"?"])
def test_strangers_are_sent_away(monkeypatch, greeting):
    """Guards against a port scanner, or a rank of another run, that takes a rank's place."""

    def intrude(rank, addresses):
        if rank == 0:
            with socket.create_connection(addresses[1][0]) as stranger:
                stranger.send(greeting)

    ranks = meet(monkeypatch, 2, [Route(0, 0, 1)], intrude)
    ranks[0].senders[Route(0, 0, 1)].send([memoryview(b"friend")])
    assert received(ranks[1].receivers[Route(0, 0, 1)], 6) == b"friend"


def test_a_rank_that_does_not_connect_is_named(monkeypatch):
    routes_of_one = [Route(0, 0, 1)]
    monkeypatch.setattr(connections, "_connect", lambda *_: None)
    assert str(meet(monkeypatch, 2, routes_of_one)[1]) == "did not answer for 2 s"


def test_addresses():
    assert own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert own_address({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "10.0.0.1"}) == "127.0.0.1"
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME is 'nothere'"):
        own_address({"GLOO_SOCKET_IFNAME": "nothere"})
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'no\.such\.host\.invalid'"):
        own_address({"MASTER_ADDR": "no.such.host.invalid"})


def test_a_loopback_address_is_no_use_to_other_machines():
    check_reachable(["127.0.0.1"] * 3)
    check_reachable(["10.0.0.1", "10.0.0.2", "fe80::1%eth0"])
    with pytest.raises(ValueError, match=r"rank 1 has the address 127\.0\.1\.1.*GLOO_SOCKET_IFNAME"):
        check_reachable(["10.0.0.1", "127.0.1.1"])


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
