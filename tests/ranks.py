"""Ranks as processes of their own, started as torchrun would, but without paying for the imports each time.

The processes are forked from a server that has imported everything once. What a rank prints goes to files.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.distributed import TCPStore

from distributed_inference import eval_mp_pipeline_dataset, example_mp_pipeline_generate

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.ranks"])


def _rank(rank: int, place: dict[str, str], folder: Path, function: Callable, args: Sequence) -> None:
    """Body of a rank's process."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY), descriptor)
    os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    function(*args)
    sys.stdout.flush()
    os._exit(0)  # without waiting for receives that nobody will answer


class Ranks:
    """Running ranks: their processes, and what they have printed so far."""

    def __init__(self, folder: Path, processes: list):
        self.folder, self.processes = folder, processes

    def out(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text()

    def err(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def wait_for(self, rank: int, text: str, timeout: float = 60) -> None:
        """Until a rank has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self.out(rank):
            assert time.monotonic() < deadline, f"rank {rank} has not printed {text!r}: {self.err(rank)}"
            time.sleep(0.02)

    def join(self, timeout: float = 60) -> list[int]:
        """Exit codes by rank (negative: the signal). Fails when a rank is still there after so many seconds."""
        deadline = time.monotonic() + timeout
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} is still running: {self.err(rank)}"
        return [process.exitcode for process in self.processes]


@contextmanager
def ranks(world_size: int, folder: Path, function: Callable, *args, port: int | None = None) -> Iterator[Ranks]:
    """Start `function(*args)` on every rank; kills what is left at the end.

    The ranks' common store is here, as it is in torchrun's own process; with a `port`, rank 0 has it there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        (folder / f"{rank}.out").write_text("")
        (folder / f"{rank}.err").write_text("")
    place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if port is None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = [
        CONTEXT.Process(target=_rank, args=(rank, place, folder, function, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield Ranks(folder, processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def generate(*flags: str) -> None:
    """The example script with these flags."""
    sys.argv = ["example_mp_pipeline_generate.py", *flags]
    example_mp_pipeline_generate.main()


def evaluate(*flags: str) -> None:
    """The evaluation script with these flags."""
    sys.argv = ["eval_mp_pipeline_dataset.py", *flags]
    eval_mp_pipeline_dataset.main()
