"""How ranks find each other, agree and load their part.

They meet at rank 0, whose address is in torchrun's store, and stay connected to it (watch.py). A rank asks the store
again until rank 0 answers: after a restart the store still has the address of the first attempt.

Two rounds of agreement, before and after loading: every rank sends the draft rank what it has, or why it has nothing,
and gets back what all of them have, or the first reason why this run cannot work. So a mistake that one rank alone sees
ends them all within seconds, with its reason.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from distributed_inference.addresses import (
    INTERFACES,
    is_link_local,
    local_address,
    own_address,
    seen_from,
    without_interface,
)
from distributed_inference.connections import (
    GREETING_SECONDS,
    HELLO,
    Connections,
    LostRank,
    Route,
    connect,
    greetings,
    listen,
    reason_of,
)
from distributed_inference.layout import DRAFT_RANK, Layout
from distributed_inference.links import Link, Wires, routes
from distributed_inference.watch import Verdict, Watch
from loading.checksums import file_sha256, files_sha256
from script_utils import first_line

Kept = TypeVar("Kept")
MEETING = "speculative_pipeline_meeting"  # key of rank 0's address in the store
WATCH = -1  # the link of a rank's line to rank 0, in its greeting
AGAIN_SECONDS = 0.2  # until a rank that got no answer asks again
NO_LIMIT = timedelta(days=365)  # of NCCL's own: messages have theirs
SHOWN_HASH = 12  # characters


@dataclass(frozen=True)
class Environment:
    """What `torchrun` tells a process."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def read(cls) -> Environment:
        """ValueError outside torchrun."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} not set, but other variables of torchrun are: start this script with plain "
                "python where none is, or with torchrun --standalone --nproc_per_node=N, N = number of stages + 1"
            )
        return cls(*(int(os.environ[name]) for name in names[:3]))


class Refused(ValueError):
    """A mistake of the user's that every rank knows of: no rank has to tell the others."""


class Group:
    """All ranks of the run, met at rank 0, whose `watch` has a line to each of them."""

    def __init__(self, environment: Environment, watch: Watch, timeout: timedelta):
        """Meet the other ranks. ValueError when they cannot be met: a port in use, nobody there."""
        self.environment, self._watch, self._timeout = environment, watch, timeout
        try:
            self._store, _, _ = next(rendezvous("env://", timeout=timeout))
            meet = self._host if environment.rank == DRAFT_RANK else self._join
            self.host = meet(time.monotonic() + timeout.total_seconds())
        except LostRank:  # it was there
            raise
        except (RuntimeError, OSError) as error:  # DistNetworkError among them
            at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ValueError(
                f"rank {environment.rank} cannot meet the others at {at} ({first_line(error)}): "
                "is the port in use, or another rank missing? choose another --master_port"
            ) from None

    @classmethod
    def of_process(cls, timeout: timedelta) -> Group:
        """For programs that have no last words: when the run is over, they end with its reason and exit code 1."""

        def ended(verdict: Verdict) -> None:
            print(verdict.text("rank {}".format), file=sys.stderr, flush=True)
            os._exit(verdict.code)

        environment = Environment.read()
        return cls(environment, Watch(environment.rank, ended), timeout)

    def barrier(self) -> None:
        """Wait until every rank is here, and may end."""
        self._watch.gather(None, self._timeout)
        self._watch.say_goodbye()

    def _host(self, deadline: float) -> str:
        """Rank 0: wait for the others. Returns its address."""
        host, token = own_address(os.environ), secrets.token_bytes(16)
        missing = set(range(1, self.environment.world_size))
        with listen(host) as server, closing(greetings(server, deadline)) as arrivals:
            self._store.set(MEETING, json.dumps([without_interface(host), server.getsockname()[1], token.hex()]))
            while missing:
                connection, (found, _, rank) = next(arrivals, (None, (b"", 0, 0)))
                if connection is None:
                    raise ValueError(
                        f"{names(sorted(missing))} did not come to {host} within {self._timeout.total_seconds():g} s: "
                        "did it end, did it never start, or can it not reach this address? (--meet_timeout_sec)"
                    )
                if not (secrets.compare_digest(found, token) and 0 < rank < self.environment.world_size):
                    connection.close()
                    continue
                connection.sendall(token)
                self._watch.add(rank, connection)
                missing.discard(rank)
        self._run_id = token.hex()
        self._watch.gather(None, self._timeout)
        return host

    def _join(self, deadline: float) -> str:
        """The other ranks: look for rank 0 until it answers. Returns this rank's address."""
        reason = "it did not say where it is"
        while time.monotonic() < deadline:
            try:
                self._store.set_timeout(timedelta(seconds=max(0.1, deadline - time.monotonic())))
                theirs, port, token = json.loads(self._store.get(MEETING))
                connection = self._connect((self._seen(theirs), port), bytes.fromhex(token))
            except OSError as error:
                reason = f"{theirs}:{port}: {reason_of(error)}"
                time.sleep(AGAIN_SECONDS)
                continue
            self._run_id = token
            self._watch.add(DRAFT_RANK, connection)
            self._watch.gather(None, 2 * self._timeout)  # rank 0 waits for the others
            return own_address(os.environ) if INTERFACES in os.environ else local_address(connection)
        raise ValueError(
            f"rank {self.environment.rank} cannot reach rank 0 ({reason}) within {self._timeout.total_seconds():g} s: "
            "let the ranks' ports through the firewall, or name the network interface in GLOO_SOCKET_IFNAME"
        )

    def _seen(self, host: str) -> str:
        """Rank 0's address as this machine must write it."""
        return seen_from(own_address(os.environ), host) if is_link_local(host) else host

    def _connect(self, address: tuple[str, int], token: bytes) -> socket.socket:
        """A connection to rank 0, which has answered with its token. OSError for one that does not."""
        patience = timedelta(seconds=GREETING_SECONDS)
        connection = connect(address, HELLO.pack(token, WATCH, self.environment.rank), patience)
        connection.settimeout(GREETING_SECONDS)
        try:
            if connection.recv(len(token), socket.MSG_WAITALL) != token:
                raise ConnectionError("somebody else answers there")
        except OSError:
            connection.close()
            raise
        connection.settimeout(None)
        return connection

    def wires(self, layout: Layout, device: torch.device, dtype: torch.dtype, backend: str) -> Wires:
        """What the links of all ranks go through. Every rank calls this."""
        rank, nccl = self.environment.rank, None
        connections = self.connections(routes(layout))
        if backend == "nccl":
            store = dist.PrefixStore(self._run_id, self._store)  # after a restart it has the keys of the first attempt
            dist.init_process_group("nccl", store=store, rank=rank, world_size=layout.world_size, timeout=self._timeout)
            nccl = {link: dist.new_group(backend="nccl", timeout=NO_LIMIT) for link in Link}
        return Wires(device, dtype, connections, nccl)

    def connections(self, wanted: Sequence[Route]) -> Connections:
        """The connections between the ranks; every rank calls this with the same routes."""
        rank, gather = self.environment.rank, lambda value: self._watch.gather(value, self._timeout)
        connections = Connections(rank, wanted, self.host, gather, self._timeout)
        self._watch.watch_waits(connections)
        return connections

    def agree(self, compute: Callable[[], tuple[Kept, Any]], timeout: timedelta) -> tuple[Kept, list[Any]]:
        """Compute something on every rank: what this rank keeps, and what each rank tells all, by rank.

        What is told must be something that JSON can hold. Refused on every rank with the first rank's reason when one
        of them raises ValueError. LostRank when one of them does not tell anything in time.
        """
        kept = None
        try:
            kept, told = compute()
            outcome = True, told
        except ValueError as error:
            outcome = False, str(error)
        outcomes = self._watch.gather(outcome, timeout)
        errors = {rank: value for rank, (good, value) in enumerate(outcomes) if not good}
        if errors:
            rank, reason = next(iter(errors.items()))
            # A mistake in the flags is the same on every rank: nobody has to know who found it.
            raise Refused(reason if len(errors) == len(outcomes) else f"rank {rank}: {reason}")
        return kept, [value for _, value in outcomes]


def names(ranks: Sequence[int]) -> str:
    """Ranks in a message: "rank 3", "ranks 3, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def check_same(facts: list[Mapping[str, str]], describe: Callable[[int], str]) -> None:
    """Refused, which names the first fact on which a rank differs from the draft rank, with both values."""
    for rank, theirs in enumerate(facts):
        for name, ours in facts[DRAFT_RANK].items():
            if theirs[name] != ours:
                raise Refused(
                    f"{describe(rank)} has {name} {theirs[name]}, but {describe(DRAFT_RANK)} has {ours}: "
                    "start every rank with the same flags, files and code"
                )


def code_version() -> str:
    """A short hash of all code that decoding depends on."""
    root = Path(__file__).parents[1]
    files = [
        *root.glob("distributed_inference/*.py"),
        *root.glob("pipeline_*.py"),
        root / "timeline.py",
        root / "loading/target_files.py",
    ]
    return files_sha256(files)[:SHOWN_HASH]


def short_sha256(path: Path) -> str:
    return file_sha256(path)[:SHOWN_HASH]
