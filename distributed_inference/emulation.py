"""Devices that are not there: ranks on a CPU that take as long as devices of a given speed would (--emulate_stage_ms).

Models, text and messages are real. Each rank does its work and then sleeps out the rest of the given time, so that
n + 1 ranks on a few cores behave as n + 1 devices, as long as the cores do all the work within that time.

    stage      the largest stage takes the given time; the others take less in proportion to their layers. A batch of
               W candidates takes as long as one, as on a device that spends its time on reading weights
    head       likewise: by its layers, unless its time is given
    target     alone on one device it takes the sum of the stages per token. The ranks run it without sleeping, and the
               draft rank sleeps out the sum, so that messages do not slow the baseline down
    prompt     it is not emulated: prefill times are those of the machine
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from decoding.tree import TokenTree
from distributed_inference.layout import Layout
from pipeline_inference import Decoder, Generation, SPDDrafter
from script_utils import Parser
from timeline import DRAFT, VERIFY, stage_row

PR_SET_TIMERSLACK = 29  # nanoseconds
LONGEST = 1e4  # milliseconds of a stage
LATE = 1.05  # a forward that takes so many times as long as it should is late
MOST_LATE = 0.01  # with a larger share of late forwards a run is not faithful


def exact_sleeps() -> None:
    """Linux lets a process oversleep by 50 us to save wake-ups: that would count as overhead, several times a cycle."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


def sleep_until(deadline: float) -> None:
    """deadline: on the clock of `time.perf_counter`."""
    remaining = deadline - time.perf_counter()
    if remaining > 0:
        time.sleep(remaining)


class at_least:
    """A block that takes so many seconds, or longer: what its work leaves of them is slept out."""

    __slots__ = ("_deadline", "_seconds")

    def __init__(self, seconds: float):
        self._seconds = seconds

    def __enter__(self) -> None:
        self._deadline = time.perf_counter() + self._seconds

    def __exit__(self, *_: object) -> None:
        if self._seconds:
            sleep_until(self._deadline)


class Pace(NamedTuple):
    """How long the parts of a generation take at least. 0: as long as this machine needs."""

    layer_us: int = 0  # microseconds of a layer of the target, on the ranks that run stages
    cycle: float = 0.0  # seconds of a cycle of the draft rank
    verify: float = 0.0  # seconds of final norm and lm_head


REAL = Pace()


class PacedDrafter(SPDDrafter):
    """A head whose forward takes so many seconds at least."""

    def __init__(self, seconds: float, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        self.seconds = seconds

    def draft(self, tree: TokenTree) -> torch.Tensor:
        with at_least(self.seconds):
            return super().draft(tree)


def milliseconds(text: str) -> float:
    """The value of a flag, for `type=`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of milliseconds from 0 to {LONGEST:,.0f}")
    return value


def add_emulation_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("emulated devices, on a CPU: ranks sleep out the rest of the given times")
    group.add_argument("--emulate_stage_ms", type=milliseconds, help="of the largest stage; others by their layers")
    group.add_argument("--emulate_head_ms", type=milliseconds, help="of the head; unset: by its layers, as a stage")
    group.add_argument("--emulate_verify_ms", type=milliseconds, help="of a verification; unset: as long as it takes")


@dataclass(frozen=True)
class Emulation:
    """The devices that the ranks stand for. False where they stand for themselves."""

    stage_sizes: tuple[int, ...]  # layers of each stage
    stage_ms: float  # of the largest stage; 0: nothing is emulated
    head_ms: float | None = None
    verify_ms: float = 0.0

    @classmethod
    def of(cls, args: argparse.Namespace, stage_sizes: tuple[int, ...]) -> Emulation:
        return cls(stage_sizes, args.emulate_stage_ms or 0.0, args.emulate_head_ms, args.emulate_verify_ms or 0.0)

    def __bool__(self) -> bool:
        return self.stage_ms > 0

    def check(self, layout: Layout, device: torch.device) -> None:
        """ValueError for what cannot be emulated."""
        if not self:
            if self.head_ms is not None or self.verify_ms:
                raise ValueError("--emulate_head_ms and --emulate_verify_ms need --emulate_stage_ms: add it")
            return
        if device.type != "cpu":
            raise ValueError(
                f"--emulate_stage_ms is for ranks on a CPU, these are on {device}: add --rank_gpus cpu, or leave it out"
            )
        if layout.lm_head != "draft":
            raise ValueError(
                f"--emulate_stage_ms has verification on the draft rank, but --lm_head is {layout.lm_head}: use draft"
            )

    @property
    def layer_seconds(self) -> float:
        return self.stage_ms / 1e3 / max(self.stage_sizes)

    def stage_seconds(self, stage: int) -> float:
        return self.layer_seconds * self.stage_sizes[stage]

    def head_seconds(self, num_spec_layers: int) -> float:
        return self.layer_seconds * num_spec_layers if self.head_ms is None else self.head_ms / 1e3

    @property
    def token_seconds(self) -> float:
        """A token of the target alone: all stages; and the verification, where that is emulated."""
        return self.layer_seconds * sum(self.stage_sizes) + self.verify_ms / 1e3

    @property
    def pipeline(self) -> Pace:
        return Pace(layer_us=round(self.layer_seconds * 1e6), verify=self.verify_ms / 1e3)

    @property
    def alone(self) -> Pace:
        """The target on one device: its token passes a stage of the average length per cycle."""
        average = sum(self.stage_sizes) / len(self.stage_sizes)
        return Pace(cycle=self.layer_seconds * average, verify=self.verify_ms / 1e3)

    @property
    def file_name(self) -> str:
        """In the names of files: `emulated60-24-10`; `emulated60-layers-0` where only the first time is given."""
        head = "layers" if self.head_ms is None else f"{self.head_ms:g}"
        return f"emulated{self.stage_ms:g}-{head}-{self.verify_ms:g}"

    def describe(self) -> str:
        """The three times, for tables and the page."""
        head = "head by its layers" if self.head_ms is None else f"head {self.head_ms:g} ms"
        verify = f"verification {self.verify_ms:g} ms" if self.verify_ms else "verification as long as it takes"
        return f"stage {self.stage_ms:g} ms, {head}, {verify}"


@dataclass
class Faithfulness:
    """How often a rank was too slow for the device that it stands for."""

    emulation: Emulation
    forwards: int = 0
    late: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by what was late

    def add(self, decoder: Decoder, generation: Generation) -> None:
        """Count the forwards of a generation that has ended."""
        if not self.emulation:
            return
        if decoder.drafter is None:
            result = generation.result
            self.forwards += result.new_tokens
            if result.timings.decode > LATE * result.new_tokens * self.emulation.token_seconds:
                self.late["the target alone"] += result.new_tokens
            return
        limits = self._limits(decoder)
        for seconds in generation.timeline.cycles:
            for row in limits.keys() & seconds.keys():
                self.forwards += 1
                if seconds[row] > LATE * limits[row]:
                    self.late[row] += 1

    def _limits(self, decoder: Decoder) -> Mapping[str, float]:
        """Seconds that a row of the timeline should take."""
        emulation = self.emulation
        limits = {stage_row(stage): emulation.stage_seconds(stage) for stage in range(len(emulation.stage_sizes))}
        limits[DRAFT] = decoder.drafter.seconds
        if not decoder.verify_lag:  # with a lag the row is what was left to wait for
            limits[VERIFY] = emulation.verify_ms / 1e3
        return {row: seconds for row, seconds in limits.items() if seconds}

    def report(self) -> None:
        """Print what was emulated, and a warning where the times do not stand for such devices."""
        if not self.emulation:
            return
        late, times = sum(self.late.values()), self.emulation.describe()
        print(f"\n[emulated] {times}: {late} of {self.forwards} forwards took over 5% longer", flush=True)
        if late > MOST_LATE * self.forwards:
            which = ", ".join(f"{name} {count}" for name, count in sorted(self.late.items()))
            print(
                f"warning: {late} of {self.forwards} forwards took longer than on the emulated devices ({which}): this "
                "run is not faithful; raise --emulate_stage_ms and the other times, or free the cores",
                file=sys.stderr,
                flush=True,
            )
