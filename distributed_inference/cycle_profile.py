"""Where the time of a distributed cycle goes: medians by fill depth, from the spans of one or more generations."""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from script_utils import run_record, write_json
from timeline import DRAFT, VERIFY, WAIT, Timeline, stage_index, write_trace

COLUMNS = ("cycle", "draft", "slowest_stage", "wait", "verify", "rest")


class Cycle(NamedTuple):
    """One cycle of the draft rank, in seconds. `rest` is messages and bookkeeping."""

    fill: int  # tokens in flight
    cycle: float
    draft: float
    slowest_stage: float
    wait: float
    verify: float
    rest: float
    stages: Mapping[str, float]  # row -> seconds, of the stages that ran


def cycles(timeline: Timeline, fills: Sequence[int], own_stage: str | None) -> list[Cycle]:
    """The cycles of a finished generation, all but the first, whose begin is the prefill's end.

    own_stage: the row of the stage that the draft rank runs itself, if it runs one.
    """
    rows: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.spans:
        rows[span.cycle][span.row] += span.seconds
    found = []
    for index in range(1, len(fills)):
        seconds, total = rows[index], timeline.cycle_ends[index] - timeline.cycle_ends[index - 1]
        parts = {name: seconds.pop(name, 0.0) for name in (DRAFT, WAIT, VERIFY)}
        own = seconds.get(own_stage, 0.0) if own_stage else 0.0
        slowest = max(seconds.values(), default=0.0)
        rest = total - sum(parts.values()) - own
        found.append(Cycle(fills[index], total, parts[DRAFT], slowest, parts[WAIT], parts[VERIFY], rest, seconds))
    return found


def by_fill(found: Iterable[Cycle]) -> list[dict[str, float]]:
    """Median milliseconds of the cycles of each fill depth."""
    groups: dict[int, list[Cycle]] = defaultdict(list)
    for cycle in found:
        groups[cycle.fill].append(cycle)
    return [
        {"fill": fill, "cycles": len(group)}
        | {f"{name}_ms": round(median(getattr(cycle, name) for cycle in group) * 1e3, 4) for name in COLUMNS}
        for fill, group in sorted(groups.items())
    ]


def by_stage(found: Iterable[Cycle]) -> list[dict[str, float]]:
    """Median milliseconds of each stage, over the cycles in which it ran."""
    groups: dict[int, list[float]] = defaultdict(list)
    for cycle in found:
        for row, seconds in cycle.stages.items():
            groups[stage_index(row)].append(seconds)
    return [
        {"stage": stage, "cycles": len(group), "median_ms": round(median(group) * 1e3, 4)}
        for stage, group in sorted(groups.items())
    ]


def table(rows: Sequence[dict[str, float]]) -> str:
    """The breakdown as it is printed."""
    heads = ["fill", "cycles", *(f"{name.replace('_', ' ')} ms" for name in COLUMNS)]
    lines = ["".join(f"{head:>18}" for head in heads)]
    for row in rows:
        cells = [str(row["fill"]), str(row["cycles"]), *(f"{row[f'{name}_ms']:.2f}" for name in COLUMNS)]
        lines.append("".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def write_reports(args: argparse.Namespace, profiles: Mapping[str, Sequence[Cycle]], traces: Mapping) -> None:
    """What --profile_timing and --trace ask for: the breakdown on screen and in its file, the trace in its own.

    profiles: the cycles of each run, by its label.
    """
    if args.profile_timing:
        by_run = {label: by_fill(found) for label, found in profiles.items()}
        for label, rows in by_run.items():
            print(f"\n{label}" * (len(by_run) > 1) + f"\n{table(rows)}")
        together = list(itertools.chain.from_iterable(profiles.values()))
        report = {"by_fill": by_fill(together), "by_stage": by_stage(together), "by_run": by_run}
        write_json(args.profile_timing, report | run_record(args))
    if traces:
        write_trace(args.trace, traces)
        print(f"\nTrace written to {args.trace}: open it at ui.perfetto.dev")
