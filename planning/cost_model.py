"""Which split of a target into pipeline stages is the fastest: predictions from a handful of times. Pure functions.

All times are milliseconds of one token: S_s of stage s (the sum of its layers), D of the head, V of final norm and
lm_head, c of one message between two ranks. With a device a stage and one for the head a full pipeline has three kinds
of loops, and a cycle lasts as long as the slowest:

    draft rank   D + V + c                       each cycle it drafts, waits for the last stage, verifies
    stage s      S_s + c                         each cycle it runs one token
    a token      (S_0 + ... + V + (n + 1) c)/n   from its entry to its verdict there are n cycles

A stage does not wait for a verdict, so V is no part of every cycle. With the lm_head on the last stage V counts there
and not on the draft rank; a draft rank that runs stage 0 itself adds S_0, and there is one message less.

After a rejection the corrected token needs n cycles, while the head drafts after it. The stages do not know of it:
they run what is in front of that token to its end, and it has to wait behind that at the slowest stage.

    refill       max(S_0 + ... + V + (n + 1) c, n (D + c) + V, n (slowest S_s + c))

An accepted draft costs a cycle, a rejected one a refill.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from decoding.metrics import accept_length, alpha, cycles_a_step, iid_accept_length
from script_utils import first_line, json_lines

LM_HEAD_PLACES = ("draft", "last")  # the rank that computes the target's logits


@dataclass(frozen=True)
class Times:
    """What the parts take, in milliseconds."""

    layers: tuple[float, ...]  # each layer of the target
    head: Mapping[int, float]  # n -> D; the head of a deeper pipeline has more rows
    verify: float  # V
    message: float  # c

    @property
    def autoregressive(self) -> float:
        """One token of the target alone, on one device."""
        return sum(self.layers) + self.verify


def read_times(path: str | Path, most_stages: int) -> Times:
    """Times from a JSON file: `layers_ms` (a list), `head_ms` (a number, or one an n), `verify_ms`, `message_ms`.

    ValueError that names the file and what is wrong with it.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--timings {str(path)!r} cannot be read: {first_line(error)}") from None
    names = ("layers_ms", "head_ms", "verify_ms", "message_ms")
    if not isinstance(raw, dict) or any(name not in raw for name in names):
        raise ValueError(f"--timings {str(path)!r} must hold {', '.join(names)}")
    layers, head = raw["layers_ms"], raw["head_ms"]
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"--timings {str(path)!r}: layers_ms must list a time for each layer")
    stages = range(1, min(most_stages, len(layers)) + 1)
    if not isinstance(head, dict):
        head = dict.fromkeys(map(str, stages), head)
    for n in stages:
        if str(n) not in head:
            raise ValueError(f"--timings {str(path)!r}: head_ms lacks n = {n}: give one number, or one for each n")
    values = {f"layers_ms[{index}]": value for index, value in enumerate(layers)}
    values |= {f"head_ms[{n}]": head[str(n)] for n in stages}
    values |= {name: raw[name] for name in names[2:]}
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise ValueError(f"--timings {str(path)!r}: {name} is {value!r}: it must be a number of milliseconds")
    return Times(tuple(layers), {n: head[str(n)] for n in stages}, raw["verify_ms"], raw["message_ms"])


def times_record(times: Times) -> dict[str, Any]:
    """What `read_times` reads."""
    return {
        "layers_ms": list(times.layers),
        "head_ms": {str(n): value for n, value in times.head.items()},
        "verify_ms": times.verify,
        "message_ms": times.message,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Splits and what they take
# ---------------------------------------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """Who does what beside the stages."""

    colocated: bool = False  # the draft rank runs stage 0 as well
    lm_head: str = "draft"  # one of LM_HEAD_PLACES


@dataclass(frozen=True)
class Plan:
    """A split, where the lm_head is, and the milliseconds that follow."""

    stage_layers: tuple[int, ...]
    placement: Placement
    stages: tuple[float, ...]  # S_s
    head: float  # D
    cycle: float  # of a full pipeline
    refill: float  # the n cycles after a rejection

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def devices(self) -> int:
        return self.num_stages + (not self.placement.colocated)

    @property
    def factor(self) -> float:
        return cycles_a_step(self.stage_layers)

    def accept_length(self, alpha: float) -> float:
        """L_acc in closed form, for drafts that are accepted independently of each other."""
        return iid_accept_length(alpha, self.num_stages, self.factor)

    def milliseconds_a_token(self, alpha: float) -> float:
        return alpha * self.cycle + (1 - alpha) * self.refill


def predict(times: Times, stage_layers: Sequence[int], placement: Placement) -> Plan:
    """Cycle and refill of a split."""
    n, bounds = len(stage_layers), [0, *accumulate(stage_layers)]
    stages = tuple(sum(times.layers[low:high]) for low, high in pairwise(bounds))
    alone, at_first, at_last = _beside(times, n, placement)
    busy = [stage + times.message for stage in stages]
    busy[0] += at_first
    busy[-1] += at_last
    way = sum(stages) + (n + 1 - placement.colocated) * times.message
    drafting = n * (times.head[n] + times.message + (stages[0] if placement.colocated else 0))
    cycle = max(alone, *busy, (way + times.verify) / n)
    on_draft_rank = times.verify if placement.lm_head == "draft" else 0
    # A co-located first stage is part of the drafting.
    refill = max(way + times.verify, drafting + on_draft_rank, n * max(busy[placement.colocated :], default=0))
    return Plan(tuple(stage_layers), placement, stages, times.head[n], cycle, refill)


def _beside(times: Times, num_stages: int, placement: Placement) -> tuple[float, float, float]:
    """What a cycle takes beside the stages: on a rank that runs none, on that of the first, on that of the last."""
    on_last = times.verify if placement.lm_head == "last" else 0.0
    draft_rank = times.head[num_stages] + times.verify - on_last
    if placement.colocated:
        return 0.0, draft_rank, on_last
    return draft_rank + times.message, 0.0, on_last


def best_split(times: Times, num_stages: int, placement: Placement) -> tuple[int, ...]:
    """Layers a stage such that the busiest rank is as idle as it can be; of those splits, the most even one."""
    total, bounds = len(times.layers), [0.0, *accumulate(times.layers)]
    _, at_first, at_last = _beside(times, num_stages, placement)

    def busy(stage: int, low: int, high: int) -> float:
        """Milliseconds of the rank that runs layers [low, high) as this stage; rounded, so that equals are equal."""
        return round(bounds[high] - bounds[low] + at_first * (stage == 0) + at_last * (stage == num_stages - 1), 6)

    def cuts(stage: int, low: int) -> range:
        """Where a stage that begins at a layer can end: every later one needs a layer. Large stages first."""
        last = stage == num_stages - 1
        return range(total, total - 1, -1) if last else range(total - (num_stages - 1 - stage), low, -1)

    @cache
    def least(stage: int, low: int) -> float:
        """The busiest of the ranks from this stage on, in the best split of the layers from `low` on."""
        if stage == num_stages:
            return 0.0
        return min(max(busy(stage, low, high), least(stage + 1, high)) for high in cuts(stage, low))

    limit = least(0, 0)

    @cache
    def evenest(stage: int, low: int) -> tuple[float, tuple[int, ...]]:
        """Sum of squares and sizes of the most even split from here on whose ranks keep to the limit."""
        if stage == num_stages:
            return 0.0, ()
        best = math.inf, ()
        for high in cuts(stage, low):
            here = busy(stage, low, high)
            if here > limit:
                continue
            behind, sizes = evenest(stage + 1, high)
            if round(here**2 + behind, 6) < best[0]:
                best = round(here**2 + behind, 6), (high - low, *sizes)
        return best

    return evenest(0, 0)[1]


def best_plan(times: Times, num_stages: int, placements: Iterable[Placement], alpha: float) -> Plan:
    """The plan with the fewest milliseconds a token at this acceptance; of equal ones, the first placement's."""
    plans = [predict(times, best_split(times, num_stages, placement), placement) for placement in placements]
    return min(plans, key=lambda plan: plan.milliseconds_a_token(alpha))


# ---------------------------------------------------------------------------------------------------------------------
# Recorded acceptance
# ---------------------------------------------------------------------------------------------------------------------


class Trace(NamedTuple):
    """Whether the draft at each position was accepted, in one recorded generation."""

    accepted: tuple[bool, ...]  # a flag a token that the cycles produced

    def cycles(self, num_stages: int, verify_lag: int = 0) -> int:
        """Cycles of a pipeline with n stages: n to the first verdict, then one after an accepted draft, else n again.

        With verify_lag 1 it is n + 1 each time.
        """
        refill = num_stages + verify_lag
        return refill + sum(1 if flag else refill for flag in self.accepted[:-1])

    def milliseconds(self, plan: Plan) -> float:
        return plan.refill + sum(plan.cycle if flag else plan.refill for flag in self.accepted[:-1])


def read_traces(path: str | Path) -> list[Trace]:
    """The traces in a `raw/*__per_sample.jsonl` of eval.py; samples that failed or made no draft are left out.

    ValueError, in one line, for another kind of file and for a draft tree's, whose cycles do not follow from the flags.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--trace {str(path)!r} cannot be read: {first_line(error)}") from None
    traces, broken = [], "is no sample's row: give a raw/*__per_sample.jsonl of eval.py"
    for number, row in json_lines(text, f"--trace {str(path)!r}", broken=broken):
        try:
            runs, cycles = ([], 0) if "error" in row else (row["accepted_runs"], row["decode_loop_steps"])
            num_stages = len(row["verified_by_fill"]) if runs else 0
        except (KeyError, TypeError):
            raise ValueError(f"--trace {str(path)!r}, line {number} {broken}") from None
        if not runs:
            continue
        trace = Trace(tuple(flag for run in runs for flag in (*[True] * run, False))[:-1])
        if trace.cycles(num_stages) != cycles:
            raise ValueError(
                f"--trace {str(path)!r}, line {number}: {cycles} cycles, where a chain has "
                f"{trace.cycles(num_stages)}: record it with --draft_top_k 1"
            )
        traces.append(trace)
    if not traces:
        raise ValueError(f"--trace {str(path)!r} has no sample with a verified draft: give one with a speculation head")
    return traces


def trace_alpha(traces: Sequence[Trace]) -> float:
    """Accepted / verified drafts of all traces together."""
    flags = [flag for trace in traces for flag in trace.accepted]
    return alpha(sum(flags), len(flags))


class Replay(NamedTuple):
    """Recorded acceptance on a plan."""

    accept_length: float  # L_acc
    milliseconds_a_token: float


def replay(traces: Sequence[Trace], plan: Plan) -> Replay:
    """What the recorded generations, all together, would have taken. Takes acceptance as the same for every n."""
    tokens = sum(len(trace.accepted) for trace in traces)
    cycles = sum(trace.cycles(plan.num_stages) for trace in traces)
    milliseconds = sum(trace.milliseconds(plan) for trace in traces)
    return Replay(accept_length(plan.factor, tokens, cycles), milliseconds / tokens)
