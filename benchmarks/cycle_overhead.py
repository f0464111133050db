"""What messages, headers and bookkeeping cost a cycle of distributed decoding: real processes, sleeping models.

n + 1 processes decode with the real loop, ranks and messages. A stage forward, a head forward and a verification each
sleep for as long as the flags say; every draft is accepted, so that the pipeline stays full.

    cycle        median time between two tokens
    mean         their mean, which is the throughput: where the verdict is what the pipeline waits for, tokens come in
                 bursts of up to n, and the median of a burst says little
    ideal        max(stage, draft) + verify; with --verify_lag 1 max(stage, draft, verify)
    overhead     cycle - ideal. It can be below 0: stages go on while the draft rank verifies
    efficiency   ideal / cycle
    bound        no schedule can beat this one: max(stage, draft + verify), as draft and verdict depend on each other;
                 with --verify_lag 1 the same as ideal
    host         processor time of rank 0, for a cycle: what its Python costs, and the bytes it sends and receives

With --single_process the same loop runs all stages in one process, one after the other, without messages: what the
decode loop itself costs. Its ideal and its bound are n * stage + draft + verify.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from distributed_inference.layout import DRAFT_RANK, Layout
from distributed_inference.remote import Pipeline, RemoteExecutor
from distributed_inference.stages import Setup, StageServer
from distributed_inference.startup import Group
from pipeline_inference import Decoder, Generation, LocalExecutor
from pipeline_model import CachePlan, NodeBatch, auto_anchors, layers_available
from script_utils import Parser, git_commit, markdown_table, run_script

VOCAB = 1000
TOKEN = 7  # what everybody drafts, and the target confirms
PROMPT = [1, 2, 3]
TIMEOUT = timedelta(seconds=60)
PR_SET_TIMERSLACK = 29  # nanoseconds


def build_parser() -> Parser:
    parser = Parser(description="Overhead of a distributed cycle; the last line of the output is one JSON object.")
    parser.add_argument("--num_stages", type=int, nargs="+", default=[8], help="n; the JSON's main figures: the first")
    parser.add_argument("--stage_ms", type=float, default=4.2, help="sleep of a stage forward")
    parser.add_argument("--draft_ms", type=float, default=3.5, help="sleep of a head forward")
    parser.add_argument("--verify_ms", type=float, default=1.2, help="sleep of a verification")
    parser.add_argument("--verify_lag", type=int, nargs="+", default=[0], choices=[0, 1], help="0, 1, or both")
    parser.add_argument("--single_process", action="store_true", help="all stages in one process: the loop alone")
    parser.add_argument("--hidden_size", type=int, default=2560, help="H, of the payloads (float32)")
    parser.add_argument("--cycles", type=int, default=300, help="timed cycles")
    return parser


class SleepingTarget:
    """Stands for the target on every rank: hidden states are zeros, and logits take their time."""

    device, window = torch.device("cpu"), None

    def __init__(self, args: argparse.Namespace):
        self.config = SimpleNamespace(hidden_size=args.hidden_size, vocab_size=VOCAB)
        self._args, self._seconds = args, args.verify_ms / 1e3
        self._embedding = torch.zeros(VOCAB, args.hidden_size)
        self._logits = torch.nn.functional.one_hot(torch.tensor(TOKEN), VOCAB).float()

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return self._logits.expand(*hidden.shape[:-1], VOCAB)


class SleepingStage:
    """Stands for the layers of a stage: its output and its anchors are its input."""

    def __init__(self, args: argparse.Namespace, anchors: Iterable[int] = ()):
        self._seconds, self._anchors = args.stage_ms / 1e3, tuple(anchors)

    def start(self, plan: CachePlan, root: int, anchors: Iterable[int] = ()) -> None:
        pass

    def prefill(self, hidden: Tensor, start: int) -> tuple[Tensor, dict[int, Tensor]]:
        return hidden, dict.fromkeys(self._anchors, hidden)

    def run(self, batch: NodeBatch, hidden: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        if self._seconds:
            time.sleep(self._seconds)
        return hidden, dict.fromkeys(self._anchors, hidden)


class SleepingDrafter:
    """Stands for the head: takes in every anchor, drafts the one token."""

    draft_token_ids = None

    def __init__(self, args: argparse.Namespace, anchors: tuple[int, ...]):
        self._seconds, self._anchors = args.draft_ms / 1e3, anchors
        self._logits = torch.nn.functional.one_hot(torch.tensor([TOKEN]), VOCAB).float()

    def start(self, plan, features, path) -> None:
        self._features = features.new_zeros(plan.nodes, *features.shape[1:]).unbind(1)

    def enter(self, nodes, h0) -> None:
        self._features[0][nodes[0].id] = h0[0]

    def observe(self, captured) -> None:
        for nodes, hidden in captured:
            for anchor, states in hidden.items():
                self._features[self._anchors.index(anchor)].index_copy_(0, nodes, states)

    def draft(self, tree) -> Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return self._logits


def rank_main(args: argparse.Namespace, num_stages: int, lag: int, rank: int, port: int, results: Connection) -> None:
    """One process: rank 0 decodes and sends the cycles' seconds, the others are stages."""
    torch.set_num_threads(1)
    exact_sleeps()
    layout = Layout((2,) * num_stages)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": layout.world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    group = Group.of_process(TIMEOUT)
    anchors = auto_anchors(layout.stage_sizes)
    wires = group.wires(layout, torch.device("cpu"), torch.float32, "gloo")
    setup = Setup(layout, rank, wires, 1, anchors, TIMEOUT, TIMEOUT, TIMEOUT)
    target = SleepingTarget(args)
    if rank == DRAFT_RANK:
        pipeline = Pipeline(setup, target, None)
        executor = RemoteExecutor(pipeline, anchors, verify_lag=lag)
        decoder = Decoder(executor, SleepingDrafter(args, anchors), verify_lag=lag)
        results.send(timed_cycles(decoder.start(PROMPT, args.cycles + 4 * num_stages), args.cycles))
        pipeline.stop()
    else:
        stage = layout.stage_of(rank)
        StageServer(setup, target, SleepingStage(args, setup.captured_by(stage, anchors))).serve()
    group.barrier()


def exact_sleeps() -> None:
    """Linux lets a process oversleep by 50 us to save wake-ups: that would count as overhead, several times a cycle."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


class Cycles(NamedTuple):
    """What a generation's cycles took."""

    seconds: list[float]  # of each timed one
    host: float  # processor seconds of a cycle, of this process


def timed_cycles(generation: Generation, count: int) -> Cycles:
    """The last `count` cycles; the pipeline has been full for some time."""
    begun = time.process_time()
    result = generation.finish()
    host = (time.process_time() - begun) / result.cycles
    assert result.n_accepted == result.n_verified, "a draft was rejected: the pipeline was not full"
    ends = generation.timeline.cycle_ends[-count - 1 :]
    return Cycles([end - begin for begin, end in pairwise(ends)], host)


def over_ranks(args: argparse.Namespace, num_stages: int, lag: int) -> Cycles:
    """Start the processes, wait for the cycles."""
    context = get_context("fork")  # nothing here has threads yet, and the imports are done
    receiver, sender = context.Pipe(duplex=False)
    port = free_port()
    ranks = [
        context.Process(target=rank_main, args=(args, num_stages, lag, rank, port, sender), daemon=True)
        for rank in range(num_stages + 1)
    ]
    for process in ranks:
        process.start()
    sender.close()
    try:
        cycles = receiver.recv()
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()
    return cycles


def in_one_process(args: argparse.Namespace, num_stages: int, lag: int) -> Cycles:
    """The same generation, its stages one after the other."""
    sizes = (2,) * num_stages
    anchors = auto_anchors(sizes)
    executor = LocalExecutor(SleepingTarget(args), sizes, anchors)
    bounds = pairwise(layers_available(sizes))
    executor.stages = [SleepingStage(args, [b for b in anchors if lo < b <= hi]) for lo, hi in bounds]
    decoder = Decoder(executor, SleepingDrafter(args, executor.anchors), verify_lag=lag)
    return timed_cycles(decoder.start(PROMPT, args.cycles + 4 * num_stages), args.cycles)


def row(args: argparse.Namespace, num_stages: int, lag: int) -> dict[str, float]:
    """The figures of one pipeline."""
    stage, draft, verify = args.stage_ms, args.draft_ms, args.verify_ms
    if args.single_process:
        cycles = in_one_process(args, num_stages, lag)
        ideal = bound = num_stages * stage + draft + verify
    else:
        cycles = over_ranks(args, num_stages, lag)
        ideal = max(stage, draft, verify) if lag else max(stage, draft) + verify
        bound = ideal if lag else max(stage, draft + verify)
    cycle = statistics.median(cycles.seconds) * 1e3
    return {
        "num_stages": num_stages,
        "verify_lag": lag,
        "cycle_ms": round(cycle, 3),
        "ideal_ms": ideal,
        "overhead_ms": round(cycle - ideal, 3),
        "efficiency": round(ideal / cycle, 4),
        "bound_ms": bound,
        "mean_ms": round(statistics.mean(cycles.seconds) * 1e3, 3),
        "p90_ms": round(statistics.quantiles(cycles.seconds, n=10)[-1] * 1e3, 3),
        "host_ms": round(cycles.host * 1e3, 3),
    }


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def main(args: argparse.Namespace) -> None:
    for name in ("stage_ms", "draft_ms", "verify_ms"):
        if not 0 <= getattr(args, name) < 1e4:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must lie in 0 .. 10000")
    if min(args.num_stages) < 1 or args.cycles < 2:
        raise ValueError(f"--num_stages is {args.num_stages} and --cycles {args.cycles}: at least 1 and 2 are needed")
    print(f"sleeps    stage {args.stage_ms} ms, draft {args.draft_ms} ms, verify {args.verify_ms} ms")
    messages = "none, one process" if args.single_process else "TCP"
    print(f"messages  {messages}, H = {args.hidden_size}, float32, {args.cycles} cycles")
    print(f"machine   {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs")
    print(f"versions  torch {torch.__version__}, commit {git_commit()}\n")
    exact_sleeps()
    rows = [row(args, num_stages, lag) for lag in args.verify_lag for num_stages in args.num_stages]
    print(markdown_table(rows[0], (row.values() for row in rows)))
    print(json.dumps(rows[0] | {"runs": rows}))


if __name__ == "__main__":
    run_script(main, build_parser())
