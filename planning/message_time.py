"""What one message between two processes takes: hidden states sent to and fro. Imports little, so it starts fast."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from distributed_inference.addresses import LOOPBACK
from distributed_inference.connections import Connections, Route, host_bytes

WARM_UP = 10  # round trips
PATIENCE = timedelta(minutes=5)  # for the other process to start


def message_ms(device: torch.device, hidden: Tensor, rounds: int) -> float:
    """Milliseconds of a hidden state's way from one process to another: half of the median round trip.

    From GPU to GPU where there are two, otherwise through the host's memory, as distributed decoding does.
    """
    direct = device.type == "cuda" and torch.cuda.device_count() > 1
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    settings = direct, device.type, hidden.cpu(), rounds
    other = multiprocessing.get_context("spawn").Process(target=_join, args=(store.port, *settings), daemon=True)
    other.start()
    seconds = _exchange(0, store, *settings)
    other.join()
    return statistics.median(seconds) / 2 * 1e3


def _join(port: int, *settings) -> None:
    """The other process."""
    _exchange(1, dist.TCPStore("127.0.0.1", port, 2), *settings)


def _exchange(rank: int, store: dist.Store, direct: bool, device_type: str, hidden: Tensor, rounds: int) -> list[float]:
    """Both processes at once: send a hidden state from rank 0 to rank 1 and back. Seconds of each round trip."""
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank if direct else 0)
    on_device = hidden.to(device)
    send, receive = _nccl(rank, store, on_device) if direct else _host(rank, store, on_device)
    seconds = []
    for _ in range(WARM_UP + rounds):
        begun = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                send()
            else:
                receive()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    if direct:
        dist.destroy_process_group()
    return seconds[WARM_UP:]


def _nccl(rank: int, store: dist.Store, on_device: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """How a rank sends the hidden state to the other one, and how it receives it."""
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    return partial(dist.send, on_device, 1 - rank), partial(dist.recv, on_device, 1 - rank)


def _host(rank: int, store: dist.Store, on_device: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same through the host's memory, over the connections that decoding uses."""
    there, back = Route(0, rank, 1 - rank), Route(0, 1 - rank, rank)

    def gather(value: list) -> list[list]:
        store.set(str(rank), json.dumps(value))
        return [json.loads(store.get(str(one))) for one in range(2)]

    connections = Connections(rank, [there, back], LOOPBACK, gather, PATIENCE)
    message = torch.empty_like(on_device, device="cpu")
    where = host_bytes(message)

    def send() -> None:
        message.copy_(on_device)
        connections.senders[there].send([where])

    def receive() -> None:
        connections.receivers[back].receive(where, PATIENCE)
        on_device.copy_(message)

    return send, receive
