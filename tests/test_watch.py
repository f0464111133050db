"""Who is alive and who is to blame: whoever waits ends, with the name of the rank that is at fault."""

import contextlib
import json
import os
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from distributed_inference import startup, watch
from distributed_inference.connections import LostRank
from distributed_inference.startup import MEETING, Environment, Group
from distributed_inference.watch import Complaint, Verdict, Watch, to_blame

SOON = timedelta(seconds=10)


# ---------------------------------------------------------------------------------------------------------------------
# Whose fault it is
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "waits_for", "silent", "at_fault"),
    [
        (1, {1: None}, (), 1),  # it hangs
        (3, {3: 2, 2: 1, 1: None}, (), 1),  # the whole pipeline waits for the first stage
        (3, {3: 2, 2: 1, 1: 0}, (2,), 2),  # a frozen one last said that it waits: nobody knows whether it does
        (3, {3: None}, (3,), 3),
        (3, {}, (), 3),  # it has not said anything so far
        (2, {2: 1, 1: 2}, (), 2),  # a circle: rank 0 itself is not in it
    ],
)
def test_ranks_that_wait_are_not_to_blame(about, waits_for, silent, at_fault):
    """Guards against the neighbour who waited a moment less long than the one that complains."""
    assert to_blame(Complaint(0, about, "did not answer", is_late=True), waits_for, silent) == at_fault


def test_a_circle_is_the_draft_ranks_fault():
    """Guards against a draft that hangs while its other thread waits for logits: all the others wait for rank 0."""
    waits_for = {0: 2, 1: 0, 2: 1}
    assert to_blame(Complaint(1, 0, "did not answer", is_late=True), waits_for, ()) == 0


def test_a_closed_connection_is_its_ranks_own_fault():
    """Guards against a rank that is gone and for which another one is blamed, as it last waited for that one."""
    assert to_blame(Complaint(0, 2, "closed its connection", is_late=False), {2: 1, 1: None}, ()) == 2


def test_verdicts_are_sentences():
    describe = "rank {} (role)".format
    lost = Verdict(2, "did not answer for 4 s", lost_by=0)
    assert lost.text(describe) == "rank 0 (role) lost rank 2 (role): it did not answer for 4 s"
    assert Verdict(1, "failed with RuntimeError: x").text(describe) == "rank 1 (role) failed with RuntimeError: x"


# ---------------------------------------------------------------------------------------------------------------------
# Watches of several ranks, joined by real connections
# ---------------------------------------------------------------------------------------------------------------------


class Rank(Watch):
    """A watch whose verdict can be asked for, and which can stop as a frozen process does."""

    def __init__(self, rank):
        self.verdict, self.is_over = None, threading.Event()
        self.thaw = threading.Event()
        self.thaw.set()
        super().__init__(rank, self._end)

    def _end(self, verdict):
        self.verdict = verdict
        self.is_over.set()

    def _beat(self):
        self.thaw.wait()
        super()._beat()

    def ends_with(self):
        assert self.is_over.wait(5), f"rank {self.rank} has not ended"
        return self.verdict


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks; a beat takes 40 ms instead of a second, and twelve are silence."""
    monkeypatch.setattr(watch, "BEAT", 0.04)
    monkeypatch.setattr(watch, "SILENCE", 12)
    monkeypatch.setattr(watch, "LAST_BEATS", 8)
    watches, connections = [Rank(rank) for rank in range(3)], []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rank in (1, 2):
            connections.append(socket.create_connection(server.getsockname()))
            watches[rank].add(0, connections[-1])
            connections.append(server.accept()[0])
            watches[0].add(rank, connections[-1])
    yield watches
    for one in watches:
        one.thaw.set()
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # ends the watches
    for one in watches:
        one.is_over.wait(5)
    for connection in connections:
        connection.close()


def close_line(of, to=0):
    of._lines[to]._socket.shutdown(socket.SHUT_WR)


def waiting_for(peer, overdue=None):
    return SimpleNamespace(waits_for=lambda: peer, overdue=lambda: overdue)


def test_nothing_happens_while_all_are_well(ranks):
    """Guards against beats that are not counted as words."""
    time.sleep(0.5)
    assert not any(one.is_over.is_set() for one in ranks)


def test_values_are_gathered_by_rank(ranks):
    found = [None] * 3
    threads = [
        threading.Thread(target=lambda rank=rank: found.__setitem__(rank, ranks[rank].gather({"r": rank}, SOON)))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [[{"r": 0}, {"r": 1}, {"r": 2}]] * 3


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_rank_is_noticed_and_named_by_all(ranks, frozen):
    """Guards against a machine that is switched off: no connection breaks, and who waits without a limit stays."""
    ranks[frozen].thaw.clear()
    for rank in {0, 1, 2} - {frozen}:
        verdict = ranks[rank].ends_with()
        assert (verdict.rank, "did not answer for" in verdict.reason) == (frozen, True)
    ranks[frozen].thaw.set()
    if frozen:  # back again, it is told that it is given up
        assert ranks[frozen].ends_with().rank == frozen


def test_who_was_stopped_does_not_blame_the_others(ranks):
    """Guards against Ctrl-Z and fg: clocks went on, and a process that counts seconds has heard nobody for minutes."""
    for one in ranks:
        one.thaw.clear()
    time.sleep(watch.BEAT * watch.SILENCE * 2)
    for one in ranks:
        one.thaw.set()
    time.sleep(0.3)
    assert not any(one.is_over.is_set() for one in ranks)


@pytest.mark.parametrize("ended", [0, 2])
def test_an_ended_rank_is_named_by_all_at_once(ranks, ended):
    close_line(ranks[ended], 1 if ended == 0 else 0)
    if ended == 0:
        close_line(ranks[0], 2)
    for rank in {0, 1, 2} - {ended}:
        verdict = ranks[rank].ends_with()
        assert (verdict.rank, "closed its connection" in verdict.reason) == (ended, True)


def test_a_rank_that_hangs_is_named_by_all(ranks):
    """Guards against survivors that name whoever they waited for, each another one; stage 0 is at fault here."""
    ranks[2].watch_waits(waiting_for(1))
    ranks[0].watch_waits(waiting_for(2))
    time.sleep(0.2)
    for rank, about in ((0, 2), (2, 1)):
        threading.Thread(target=ranks[rank].complain, args=(LostRank.late(about, SOON),), daemon=True).start()
    for one in ranks:
        assert (one.ends_with().rank, one.verdict.reason) == (1, "did not answer for 10 s")


def test_a_call_without_a_limit_ends(ranks):
    """Guards against a first NCCL message that waits for ever, in every rank's main thread, so that none complains."""
    ranks[2].watch_waits(waiting_for(1, overdue=LostRank.late(1, SOON)))
    assert [one.ends_with().rank for one in ranks] == [1, 1, 1]


def test_a_rank_that_hangs_while_all_agree_is_named(ranks):
    """Guards against the rank that collects, which is late itself because of the one that hangs."""

    def wait():
        with contextlib.suppress(LostRank):
            ranks[2].receive(0, timedelta(seconds=0.1))

    waiting = threading.Thread(target=wait)
    waiting.start()
    with pytest.raises(LostRank) as lost:
        ranks[0].receive(1, timedelta(seconds=0.3))
    waiting.join()
    threading.Thread(target=ranks[2].complain, args=(LostRank.late(0, SOON),), daemon=True).start()
    assert [one.ends_with().rank for one in ranks] == [1, 1, 1]
    assert lost.value.rank == 1


def test_a_failed_rank_tells_all(ranks):
    """Guards against survivors that know only that somebody is gone; the line is closed just after the reason."""
    verdict = Verdict(1, "failed with RuntimeError: out of memory")
    ranks[1].tell(verdict)
    close_line(ranks[1])
    assert ranks[0].ends_with() == ranks[2].ends_with() == verdict


def test_a_rank_decides_alone_when_rank_0_is_frozen(ranks, monkeypatch):
    """Guards against a survivor that asks a frozen machine for the reason, and waits for the answer."""
    monkeypatch.setattr(watch, "SILENCE", 1000)
    ranks[0].thaw.clear()
    time.sleep(0.1)
    begun = time.monotonic()
    verdict = ranks[2].complain(LostRank.late(1, SOON))
    assert (verdict.rank, verdict.lost_by, time.monotonic() - begun < 2) == (0, 2, True)


def test_who_says_goodbye_is_not_missed(ranks):
    """Guards against a good end that is taken for a failure, since some end before others."""
    ranks[2].say_goodbye()
    close_line(ranks[2])
    time.sleep(0.3)
    assert not ranks[0].is_over.is_set()
    assert not ranks[1].is_over.is_set()


def test_a_rank_that_hangs_at_the_end_ends(ranks):
    """Guards against a stage that never gets the message to stop, as the one before it hangs."""
    ranks[0].say_goodbye()
    close_line(ranks[0], 1)
    assert "is not at its end" in ranks[1].ends_with().reason


def test_a_rank_ends_with_its_torchrun(ranks, monkeypatch):
    """Guards against ranks that decode for hours after torchrun was killed, and hold their GPUs."""
    ranks[1]._parent = os.getppid()
    time.sleep(0.1)
    assert not ranks[1].is_over.is_set()
    ranks[1]._parent = -1
    assert [one.ends_with().rank for one in ranks] == [1, 1, 1]
    assert "the process that started it" in ranks[0].verdict.reason


# ---------------------------------------------------------------------------------------------------------------------
# Meeting
# ---------------------------------------------------------------------------------------------------------------------


class Store:
    """torchrun's, as far as ranks use it."""

    def __init__(self):
        self.values, self.changed, self.seconds = {}, threading.Condition(), 5.0

    def set_timeout(self, timeout):
        self.seconds = timeout.total_seconds()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, self.seconds):
                raise RuntimeError("wait timeout")
            return self.values[key]


def meet(monkeypatch, store, ranks, world_size=3, seconds=10, delays=()):
    """Threads that stand for ranks meet: their groups, or errors, by rank."""
    monkeypatch.setattr(startup, "rendezvous", lambda *_, **__: iter([(store, None, None)]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    found = {}

    def run(rank):
        time.sleep(dict(delays).get(rank, 0))
        watching = Watch(rank, lambda _: None)
        try:
            found[rank] = Group(Environment(rank, rank, world_size), watching, timedelta(seconds=seconds))
        except ValueError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_ranks_meet_at_rank_0_and_agree(monkeypatch):
    """Guards against ranks that take each other's place, in whatever order they come."""
    found = meet(monkeypatch, Store(), range(3), delays={0: 0.3, 2: 0.1}.items())
    told = {}
    threads = [
        threading.Thread(target=lambda rank=rank: told.update({rank: found[rank].agree(lambda: ("own", rank), SOON)}))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert told == dict.fromkeys(range(3), ("own", [0, 1, 2]))


@pytest.mark.parametrize("answers", [False, True], ids=["a closed port", "somebody else's port"])
def test_a_restarted_job_does_not_meet_where_the_first_attempt_did(monkeypatch, answers):
    """Guards against the first attempt's address, which torchrun's store still has when a job is started again."""
    monkeypatch.setattr(startup, "GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        store = Store()
        store.set(MEETING, json.dumps([*earlier.getsockname(), bytes(16).hex()]))
        if not answers:
            earlier.close()
        found = meet(monkeypatch, store, range(3), delays={0: 0.3}.items())
    assert all(isinstance(group, Group) for group in found.values()), found


def test_strangers_at_the_meeting_delay_nobody(monkeypatch):
    """Guards against a port scanner that takes a rank's place, or time from all."""
    store, strangers = Store(), []

    def intrude():
        host, port, _ = json.loads(store.get(MEETING))
        for greeting in (b"", bytes(32), b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n"):
            strangers.append(socket.create_connection((host, port)))
            strangers[-1].sendall(greeting)

    stranger = threading.Thread(target=intrude)
    stranger.start()
    begun = time.monotonic()
    found = meet(monkeypatch, store, range(3), delays={1: 0.5, 2: 0.5}.items())
    stranger.join()
    assert all(isinstance(group, Group) for group in found.values()), found
    assert time.monotonic() - begun < 4
    for connection in strangers:
        connection.close()


def test_who_does_not_come_is_named(monkeypatch):
    """Guards against ranks that wait half an hour for one that never started, and do not know which."""
    found = meet(monkeypatch, Store(), [0], seconds=0.5)
    assert found[0].startswith("ranks 1, 2 did not come to 127.0.0.1 within 0.5 s")
    assert "--meet_timeout_sec" in found[0]


@pytest.mark.parametrize("stale", [False, True])
def test_a_rank_without_rank_0_gives_up(monkeypatch, stale):
    """Guards against a rank that waits without a limit where rank 0 cannot be reached; the reason is said."""
    store = Store()
    if stale:
        with socket.create_server(("127.0.0.1", 0)) as earlier:
            store.set(MEETING, json.dumps([*earlier.getsockname(), bytes(16).hex()]))
    found = meet(monkeypatch, store, [1], seconds=0.5)
    assert ("Connection refused" if stale else "wait timeout") in found[1]


def test_a_rank_that_waits_for_the_others_ends_with_rank_0(monkeypatch):
    """Guards against a rank that has met rank 0 and waits on when that gives up, or dies."""
    store, verdicts = Store(), []
    watching = Watch(1, lambda verdict: verdicts.append(verdict))
    monkeypatch.setattr(startup, "rendezvous", lambda *_, **__: iter([(store, None, None)]))
    environment = Environment(1, 1, 3)

    def join():
        with contextlib.suppress(LostRank):  # its process would have ended before
            Group(environment, watching, timedelta(seconds=0.5))

    threading.Thread(target=join, daemon=True).start()
    hub = Watch(0, lambda _: None)
    with pytest.raises(ValueError, match="rank 2 did not come"):
        Group(Environment(0, 0, 3), hub, timedelta(seconds=0.5))
    hub.tell(Verdict(0, "cannot go on: rank 2 did not come", code=2))
    deadline = time.monotonic() + 5
    while not verdicts and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [verdict.code for verdict in verdicts] == [2]
