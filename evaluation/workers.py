"""Who runs the samples of an evaluation, by whichever method: one process a device, the target loaded once in each."""

from __future__ import annotations

import hashlib
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from baselines.method import Run
from decoding.compiled import NotCompiled
from evaluation.metrics import Row, compare_with_baseline, failed_row, sample_row
from evaluation.prompts import Sample
from pipeline_inference import Decoder, Executor, LocalExecutor, logit_gap
from pipeline_model import Target
from script_utils import no_loading_bar, quiet_libraries

WARMUP_PROMPT = 32  # prompt tokens of the unrecorded generation before a decoder's first sample


@dataclass(frozen=True)
class TargetOptions:
    """How every worker loads the target."""

    path: str
    dtype: torch.dtype
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    quantization: str | None = None
    threads: int = 1  # CPU threads of a worker


@dataclass(frozen=True)
class Task:
    """One sample of a run, and the baseline's row of the same sample, if there is a baseline."""

    run: Run
    sample: Sample
    baseline: Mapping[str, Any] | None = None


def sample_seed(seed: int, sample: Sample) -> int:
    """The seed of a sample's random draws: the same in any order and on any worker."""
    text = f"{seed}/{sample.dataset}/{sample.question_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def build_decoder(target: Target, run: Run) -> Decoder:
    """The decoder of a run's method on a loaded target. ValueError for a checkpoint that does not fit."""
    head = None
    if run.spec_head_ckpt is not None:
        head = run.method.config_class.load_head(run.spec_head_ckpt, target)
    settings = {
        "sampling": run.sampling,
        "eos_token_ids": target.eos_token_ids,
        "max_positions": target.config.max_position_embeddings,
    }
    return run.method.decoder(target, head, run, settings)


def compared(row: Row, task: Task, executor: Executor) -> Row:
    """The row with what the baseline did, and the target's logit gap where the two first differ.

    executor: runs the target for the gap. Without a baseline the row as it is.
    """
    if task.baseline is None:
        return row
    row = compare_with_baseline(row, task.baseline, task.run.costs, same_draws=task.run.draws_as_baseline)
    difference = row["first_difference"]
    if difference and None not in difference.values():
        prefix = [*task.sample.prompt_ids, *row["output_ids"][: difference["position"]]]
        difference["logit_gap"] = logit_gap(executor, prefix, difference["baseline_token"], difference["token"])
    return row


class Evaluator:
    """Decodes samples on one device: the target, and the decoder of the run at hand."""

    def __init__(self, options: TargetOptions, device: str):
        """ValueError when there is no such target."""
        torch.set_num_threads(options.threads)
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(device)  # some kernels run on the current device only
        self.target = Target.load(
            options.path,
            dtype=options.dtype,
            device=device,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
            quantization=options.quantization,
        )
        self._alone = LocalExecutor(self.target, (self.target.num_layers,))
        self._run: Run | None = None
        self._decoder: Decoder | None = None

    def evaluate(self, task: Task) -> Row:
        """The row of a sample, failed or not. ValueError for a head that does not fit the target, and NotCompiled."""
        run, sample = task.run, task.sample
        fresh = run != self._run
        if fresh:
            self._run = self._decoder = None  # the old head's memory is free before the new one is loaded
            self._decoder, self._run = build_decoder(self.target, run), run
        try:
            if fresh:
                self._warm_up(sample)
            self._decoder.seed = sample_seed(run.seed, sample)
            row = sample_row(sample, self._decoder.generate(sample.prompt_ids, run.max_new_tokens), run.costs)
            return compared(row, task, self._alone)
        except NotCompiled:
            raise
        except Exception as error:  # out of memory, a fault of one prompt: recorded, and the others go on
            return failed_row(sample, error)

    def _warm_up(self, sample: Sample) -> None:
        """A short unrecorded generation, so that no sample's times have allocations and kernel choices in them."""
        cycles = 2 * len(self._run.stage_sizes)
        self._decoder.generate(sample.prompt_ids[:WARMUP_PROMPT], min(self._run.max_new_tokens, cycles))


class Workers:
    """One process a device; a single device works in this process."""

    def __init__(self, options: TargetOptions, devices: Sequence[str]):
        self._options, self._devices = options, devices
        self._local: Evaluator | None = None
        self._processes = []
        self._connections: dict[Connection, str] = {}  # to the processes, with their devices

    def __enter__(self) -> Workers:
        if len(self._devices) == 1:
            self._local = Evaluator(self._options, self._devices[0])
            return self
        context = get_context("spawn")  # CUDA does not survive a fork
        for number, device in enumerate(self._devices):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._options, device, number == 0), daemon=True)
            process.start()
            theirs.close()  # so that a dead worker closes the pipe
            self._processes.append(process)
            self._connections[ours] = device
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def evaluate(self, tasks: Iterable[Task]) -> Iterator[Row]:
        """The rows of tasks, in the order in which they finish. ValueErrors of the workers are raised here.

        ValueError, too, when a worker's process dies.
        """
        if self._local is not None:
            yield from map(self._local.evaluate, tasks)
            return
        waiting, busy = deque(tasks), []
        for connection in self._connections:
            self._send(connection, waiting, busy)
        while busy:
            for connection in wait(busy):
                busy.remove(connection)
                try:
                    outcome = connection.recv()
                except (EOFError, OSError):
                    raise self._died(connection) from None
                if isinstance(outcome, ValueError):
                    raise outcome
                self._send(connection, waiting, busy)
                yield outcome

    def _send(self, connection: Connection, waiting: deque[Task], busy: list[Connection]) -> None:
        if not waiting:
            return
        try:
            connection.send(waiting.popleft())
        except OSError:
            raise self._died(connection) from None
        busy.append(connection)

    def _died(self, connection: Connection) -> ValueError:
        return ValueError(
            f"the worker process on {self._connections[connection]} died (out of memory?): "
            "its finished rows are kept, --resume goes on from there"
        )


def serve(connection: Connection, options: TargetOptions, device: str, shows_loading: bool) -> None:
    """A worker process: answers tasks until the other end of the pipe is gone, however it went.

    shows_loading: in a bar. All workers load the same target at the same time, so one of them will do.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    quiet_libraries()
    evaluator = None
    with suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                with no_loading_bar(hidden=not shows_loading):
                    evaluator = evaluator or Evaluator(options, device)
                outcome = evaluator.evaluate(task)
            except ValueError as error:
                outcome = error
            connection.send(outcome)
