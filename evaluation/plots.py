"""One picture of a run's summary: speed-ups, acceptance by fill, accepted runs, and where a cycle's time goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.metrics import data_set_order
from script_utils import save_figure

SPEEDUPS = {  # metric -> legend and colour
    "theoretical_speedup": ("theory (counted cycles)", "tab:blue"),
    "ideal_speedup_vs_baseline": ("ideal (measured timers, a device a stage)", "tab:cyan"),
    "speedup_vs_baseline": ("wall-clock (measured)", "tab:orange"),
}


def plot_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a summary as PNG, atomically."""
    with rc_context({"text.parse_math": False}):  # a $ in a name is a dollar
        figure = draw_summary(summary)
        save_figure(figure, path)


def draw_summary(summary: Mapping[str, Any]) -> Figure:
    """The picture of a summary."""
    figure = Figure(figsize=(12, 8), layout="constrained")  # without pyplot there is no display to need
    settings = summary["settings"]
    figure.suptitle(
        f"{settings['label']}\n{settings['target']}, {settings['dtype']}, {settings['device']}, "
        f"{settings['placement']}, {summary['samples']} prompts, at most {settings['max_new_tokens']} new tokens",
        fontsize=11,
    )
    axes = figure.subplots(2, 2)
    plot_speedups(axes[0, 0], summary)
    plot_alpha_by_fill(axes[0, 1], summary["overall"])
    plot_accepted_runs(axes[1, 0], summary["overall"])
    plot_cycle_times(axes[1, 1], summary["overall"])
    for axis in axes.flat:
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    return figure


def plot_speedups(axis: Axes, summary: Mapping[str, Any]) -> None:
    """Bars a data set, pooled, with 95% intervals; the line at 1 is the target alone."""
    parts = {"overall": summary["overall"]}
    parts |= {name: summary["datasets"][name] for name in data_set_order(summary["datasets"])}
    shown = {
        metric: style
        for metric, style in SPEEDUPS.items()
        if any(part[f"{metric}_pooled"] is not None for part in parts.values())
    }
    width = 0.8 / max(1, len(shown))
    for index, (metric, (label, colour)) in enumerate(shown.items()):
        places = np.arange(len(parts)) + (index - (len(shown) - 1) / 2) * width
        heights, *reach = zip(*(_with_reach(part, metric) for part in parts.values()), strict=True)
        bars = axis.bar(places, heights, width, yerr=reach, label=label, color=colour, capsize=3, ecolor="0.3")
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axis.axhline(1, color="0.4", lw=1, ls="--")
    axis.set_xticks(range(len(parts)), [name.replace("_", " ") for name in parts])
    axis.set(title="speed-up over the target alone", ylabel="times")
    axis.margins(y=0.1)
    if shown:
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08))  # below: bars can be anywhere


def _with_reach(part: Mapping[str, Any], metric: str) -> tuple[float, float, float]:
    """A pooled metric, and how far its interval reaches below and above it; 0 where there is none."""
    value = part[f"{metric}_pooled"] or 0.0
    low, high = part[f"{metric}_pooled_ci95"] or (value, value)
    return value, max(0.0, value - low), max(0.0, high - value)


def plot_alpha_by_fill(axis: Axes, part: Mapping[str, Any]) -> None:
    """alpha of the drafts made with F tokens in flight; n is the full pipeline. The counts stand above the bars."""
    fills = range(1, len(part["alpha_by_fill"]) + 1)
    bars = axis.bar(fills, [alpha or 0.0 for alpha in part["alpha_by_fill"]], color="tab:green")
    axis.bar_label(bars, [f"{count:,}" for count in part["verified_by_fill"]], fontsize=8, padding=2)
    axis.set_xticks(fills)
    axis.set(title="alpha by fill (above: verified drafts)", xlabel="tokens in flight", ylabel="alpha", ylim=(0, 1.1))


def plot_accepted_runs(axis: Axes, part: Mapping[str, Any]) -> None:
    """How many drafts in a row were accepted before a rejection, or the end."""
    counts = part["accepted_run_lengths"]
    axis.bar(range(len(counts)), counts, width=0.9, color="tab:purple")
    axis.set(title="accepted runs", xlabel="drafts accepted in a row", ylabel="runs")
    axis.xaxis.get_major_locator().set_params(integer=True)


def plot_cycle_times(axis: Axes, part: Mapping[str, Any]) -> None:
    """Mean milliseconds a cycle of head, stages and verification, and of the whole cycle, measured and ideal."""
    totals, cycles = part["totals"], max(1, part["totals"]["decode_loop_steps"])
    seconds = {"draft": totals["draft_sec"]}
    seconds |= {f"stage {index}": value for index, value in enumerate(part["stage_sec"])}
    seconds["verify"] = totals["verify_sec"]
    colours = ["tab:red", *["tab:gray"] * len(part["stage_sec"]), "tab:olive"]
    axis.bar(range(len(seconds)), [value / cycles * 1e3 for value in seconds.values()], color=colours)
    for name, label, style in (
        ("decode_wall_sec", "measured", "-"),
        ("ideal_decode_wall_sec", "ideal, a device a stage", "--"),
    ):
        value = totals[name] / cycles * 1e3
        axis.axhline(value, color="black", ls=style, lw=1.2, label=f"whole cycle, {label}: {value:.3g} ms")
    axis.set_xticks(range(len(seconds)), seconds, rotation=45, ha="right")
    axis.set(title="mean time of a cycle (idle counts as 0)", ylabel="ms")
    axis.legend(fontsize=8)
