"""How ranks find each other, agree, load their part and give up together.

Two rounds of agreement, before and after loading: every rank sends the draft rank what it has, or why it has nothing,
and gets back what all of them have, or the first reason why this run cannot work. So a mistake that one rank alone sees
ends them all within seconds, with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from distributed_inference.connections import FOREVER, Connections
from distributed_inference.layout import DRAFT_RANK, Layout
from distributed_inference.links import Link, Wires, lost_rank, routes
from evaluation_files import file_sha256, files_sha256
from script_utils import first_line

Kept = TypeVar("Kept")
FAILURE = "speculative_pipeline_failure"  # key of the first failure's reason in the store
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


class Group:
    """All ranks of the run: their common store, and messages of the start."""

    def __init__(self, environment: Environment, timeout: timedelta):
        """Meet the other ranks. ValueError when they cannot be met: a port in use, nobody there."""
        self.environment, self._timeout = environment, timeout
        try:
            self.store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            dist.init_process_group("gloo", store=self.store, rank=rank, world_size=world_size, timeout=timeout)
        except (RuntimeError, OSError) as error:  # DistNetworkError among them
            at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ValueError(
                f"rank {environment.rank} cannot meet the others at {at} ({first_line(error)}): "
                "is the port in use, or another rank missing? choose another --master_port"
            ) from None

    def wires(self, layout: Layout, device: torch.device, dtype: torch.dtype, backend: str) -> Wires:
        """What the links of all ranks go through. Every rank calls this."""
        connections, nccl = Connections(routes(layout), self._timeout), None
        if backend == "nccl":
            nccl = {link: dist.new_group(backend="nccl", timeout=FOREVER) for link in Link}
        return Wires(device, dtype, connections, nccl)

    def agree(self, compute: Callable[[], tuple[Kept, Any]]) -> tuple[Kept, list[Any]]:
        """Compute something on every rank: what this rank keeps, and what each rank tells all, by rank.

        ValueError on every rank with the first rank's reason when one of them raises ValueError. LostRank when one of
        them is gone.
        """
        kept = None
        try:
            kept, told = compute()
            outcome = True, told
        except ValueError as error:
            outcome = False, str(error)
        if self.environment.rank == DRAFT_RANK:
            others = range(1, self.environment.world_size)
            outcomes = [outcome, *(self._receive(rank) for rank in others)]
            for rank in others:
                self._send(outcomes, rank)
        else:
            self._send(outcome, DRAFT_RANK)
            outcomes = self._receive(DRAFT_RANK)
        errors = {rank: value for rank, (good, value) in enumerate(outcomes) if not good}
        if errors:
            rank, reason = next(iter(errors.items()))
            # A mistake in the flags is the same on every rank: nobody has to know who found it.
            raise ValueError(reason if len(errors) == len(outcomes) else f"rank {rank}: {reason}")
        return kept, [value for _, value in outcomes]

    def _send(self, value: Any, rank: int) -> None:
        try:
            dist.send_object_list([value], dst=rank)
        except RuntimeError as error:
            raise lost_rank(rank, error) from error

    def _receive(self, rank: int) -> Any:
        received = [None]
        try:
            dist.recv_object_list(received, src=rank)
        except RuntimeError as error:
            raise lost_rank(rank, error, self._timeout) from error
        return received[0]

    def first_failure(self, reason: str) -> str:
        """Record why this rank stops. Returns the reason of the rank that stopped first, which may be another one's."""
        try:
            return self.store.compare_set(FAILURE, "", reason).decode()
        except RuntimeError:  # the store was on a machine, or in a process, that is gone
            return reason


def check_same(facts: list[Mapping[str, str]], describe: Callable[[int], str]) -> None:
    """ValueError that names the first fact on which a rank differs from the draft rank, with both values."""
    for rank, theirs in enumerate(facts):
        for name, ours in facts[DRAFT_RANK].items():
            if theirs[name] != ours:
                raise ValueError(
                    f"{describe(rank)} has {name} {theirs[name]}, but {describe(DRAFT_RANK)} has {ours}: "
                    "start every rank with the same flags, files and code"
                )


def code_version() -> str:
    """A short hash of all code that decoding depends on."""
    root = Path(__file__).parents[1]
    files = [*root.glob("distributed_inference/*.py"), *root.glob("pipeline_*.py"), root / "timeline.py"]
    return files_sha256(files)[:SHOWN_HASH]


def short_sha256(path: Path) -> str:
    return file_sha256(path)[:SHOWN_HASH]
