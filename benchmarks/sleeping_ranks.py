"""Decoding without models: the real loop, ranks and messages, with sleeps for stages, head and verification.

The target confirms one token everywhere. The drafter drafts it where the given trace has an accepted draft, and another
one where it has a rejected draft, so acceptance, rollbacks and refills are as the trace says.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.nodes import CachePlan, NodeBatch
from decoding.result import GenerationResult
from decoding.tree import TokenTree
from distributed_inference.emulation import exact_sleeps
from distributed_inference.layout import DRAFT_RANK, Layout
from distributed_inference.remote import Pipeline, RemoteExecutor
from distributed_inference.stages import Setup, StageServer
from distributed_inference.startup import Group
from pipeline_inference import Decoder, LocalExecutor
from pipeline_model import auto_anchors, layers_available

VOCAB = 1000
TOKEN, WRONG = 7, 8  # what the target confirms, and what it never does
PROMPT = [1, 2, 3]
TIMEOUT = timedelta(seconds=60)

Flags = Sequence[bool]  # whether the draft of each new token after the first one is accepted


class Sleeps(NamedTuple):
    """What the parts of a cycle take, in milliseconds, and the size of the messages."""

    stage: float
    draft: float
    verify: float
    hidden_size: int  # H, float32


class Decoded(NamedTuple):
    """One generation."""

    result: GenerationResult
    cycle_ends: list[float]  # seconds since the prompt
    host: float  # processor seconds of this process


def sleep_ms(milliseconds: float) -> None:
    if milliseconds:
        time.sleep(milliseconds / 1e3)


class SleepingTarget:
    """Stands for the target on every rank: hidden states are zeros, and logits take their time."""

    device, window = torch.device("cpu"), None
    layer_types = ("full_attention",)

    def __init__(self, sleeps: Sleeps):
        self.config = SimpleNamespace(hidden_size=sleeps.hidden_size, vocab_size=VOCAB)
        self._verify_ms = sleeps.verify
        self._embedding = torch.zeros(VOCAB, sleeps.hidden_size)
        self._logits = torch.nn.functional.one_hot(torch.tensor(TOKEN), VOCAB).float()

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        sleep_ms(self._verify_ms)
        return self._logits.expand(*hidden.shape[:-1], VOCAB)


class SleepingStage:
    """Stands for the layers of a stage: its output and its anchors are its input."""

    def __init__(self, milliseconds: float, anchors: Iterable[int] = ()):
        self._milliseconds, self._anchors = milliseconds, tuple(anchors)

    def start(self, plan: CachePlan, root: int, anchors: Iterable[int] = ()) -> None:
        pass

    def prefill(self, hidden: Tensor, start: int) -> tuple[Tensor, dict[int, Tensor]]:
        return hidden, dict.fromkeys(self._anchors, hidden)

    def run(self, batch: NodeBatch, hidden: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        sleep_ms(self._milliseconds)
        return hidden, dict.fromkeys(self._anchors, hidden)


class SleepingDrafter:
    """Stands for the head: takes in every anchor, drafts what the flags of the generation say."""

    draft_token_ids = None

    def __init__(self, milliseconds: float, anchors: tuple[int, ...]):
        self._milliseconds, self._anchors = milliseconds, anchors
        self._logits = torch.eye(VOCAB)[[WRONG, TOKEN]]
        self.flags: Flags = ()

    def start(self, plan, features, path) -> None:
        self._features = features.new_zeros(plan.nodes, *features.shape[1:]).unbind(1)

    def enter(self, nodes, h0) -> None:
        self._features[0][nodes[0].id] = h0[0]

    def observe(self, captured) -> None:
        for nodes, hidden in captured:
            for anchor, states in hidden.items():
                self._features[self._anchors.index(anchor)].index_copy_(0, nodes, states)

    def draft(self, tree: TokenTree) -> Tensor:
        sleep_ms(self._milliseconds)
        behind = tree.frontier[0].position - len(PROMPT)  # the prefill's token stands at len(PROMPT), without a draft
        return self._logits[int(self.flags[behind])][None]


def decode(decoder: Decoder, traces: Sequence[Flags]) -> list[Decoded]:
    """One generation a trace."""
    decoded = []
    for flags in traces:
        decoder.drafter.flags = flags
        begun, generation = time.process_time(), decoder.start(PROMPT, len(flags) + 1)
        result = generation.finish()
        decoded.append(Decoded(result, generation.timeline.cycle_ends, time.process_time() - begun))
        assert result.accepted[1:] == list(flags), "the pipeline accepted other drafts than it was told to"
    return decoded


def decode_over_ranks(sleeps: Sleeps, num_stages: int, verify_lag: int, traces: Sequence[Flags]) -> list[Decoded]:
    """Start n + 1 processes, decode a generation a trace."""
    context = get_context("fork")  # nothing here has threads yet, and the imports are done
    receiver, sender = context.Pipe(duplex=False)
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, port, sleeps, num_stages, verify_lag, traces, sender), daemon=True)
        for rank in range(num_stages + 1)
    ]
    for process in ranks:
        process.start()
    sender.close()
    try:
        decoded = receiver.recv()
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()
    return decoded


def _rank(
    rank: int,
    port: int,
    sleeps: Sleeps,
    num_stages: int,
    verify_lag: int,
    traces: Sequence[Flags],
    results: Connection,
) -> None:
    """One process: rank 0 decodes and sends what it did, the others are stages."""
    torch.set_num_threads(1)
    exact_sleeps()
    layout = Layout((2,) * num_stages)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": layout.world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    group = Group.of_process(TIMEOUT)
    anchors = auto_anchors(layout.stage_sizes)
    wires = group.wires(layout, torch.device("cpu"), torch.float32, "gloo")
    setup = Setup(layout, rank, wires, 1, anchors, TIMEOUT, TIMEOUT, TIMEOUT)
    target = SleepingTarget(sleeps)
    if rank == DRAFT_RANK:
        pipeline = Pipeline(setup, target, None)
        executor = RemoteExecutor(pipeline, anchors, verify_lag=verify_lag)
        drafter = SleepingDrafter(sleeps.draft, anchors)
        results.send(decode(Decoder(executor, drafter, verify_lag=verify_lag), traces))
        pipeline.stop()
    else:
        captured = setup.captured_by(layout.stage_of(rank), anchors)
        StageServer(setup, target, SleepingStage(sleeps.stage, captured)).serve()
    group.barrier()


def decode_in_one_process(sleeps: Sleeps, num_stages: int, verify_lag: int, traces: Sequence[Flags]) -> list[Decoded]:
    """The same generations, the stages one after the other, without messages."""
    exact_sleeps()
    sizes = (2,) * num_stages
    anchors, bounds = auto_anchors(sizes), pairwise(layers_available(sizes))
    executor = LocalExecutor(SleepingTarget(sleeps), sizes, anchors)
    executor.stages = [SleepingStage(sleeps.stage, [b for b in anchors if lo < b <= hi]) for lo, hi in bounds]
    drafter = SleepingDrafter(sleeps.draft, executor.anchors)
    return decode(Decoder(executor, drafter, verify_lag=verify_lag), traces)


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
