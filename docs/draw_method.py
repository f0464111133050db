"""Draws docs/method.svg, the picture of the README: tokens at their depths, and what a rejection costs.

    python docs/draw_method.py

The background is drawn, so that the picture is readable on light and dark pages. The right half is simulated, not drawn
by hand: `schedule` follows the rules of docs/method.md, section 5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from script_utils import Parser, atomic_open, run_script

STAGES = 4
KNOWN, RUNNING, HEAD, FLUSHED, CORRECTED, INK = "#9ecae1", "#fdd49e", "#c7e9c0", "#e0e0e0", "#fdae6b", "#222222"


class Cell(NamedTuple):
    """What a stage runs in a cycle."""

    token: int
    corrected: bool
    flushed: bool


def schedule(cycles: int, rejected: int) -> list[list[Cell | None]]:
    """What each stage runs, cycle by cycle, in a full pipeline where one draft is rejected: [cycles][stages].

    The first cycle has token STAGES - 1 in stage 0 and token 0 in the last one. A token that leaves the last stage
    verifies the next one.
    """
    stages: list[int | None] = list(reversed(range(STAGES)))
    next_token, corrected, table = STAGES, -1, []
    for _ in range(cycles):
        wrong = stages[-1] == rejected - 1 and corrected < 0
        table.append(
            [
                None if token is None else Cell(token, token == corrected, wrong and token >= rejected)
                for token in stages
            ]
        )
        if wrong:
            stages, next_token, corrected = [rejected, *[None] * (STAGES - 1)], rejected + 1, rejected
        else:
            stages, next_token = [next_token, *stages[:-1]], next_token + 1
    return table


def box(axes: Axes, x: float, y: float, text: str, color: str, *, width: float = 0.84, height: float = 0.78, **style):
    """A rounded box around (x, y) with a text in it."""
    corner = (x - width / 2, y - height / 2)
    shape = {"boxstyle": "round,pad=0,rounding_size=0.08", "edgecolor": INK, "linewidth": 0.8} | style
    axes.add_patch(FancyBboxPatch(corner, width, height, facecolor=color, **shape))
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], curve: float = 0.0) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 0.9, "color": INK}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={curve}", shrinkA=0, shrinkB=0, **style))


def draw_depths(axes: Axes) -> None:
    """One cycle: what is known of each token, what each stage runs, what the head reads and drafts."""
    axes.set_title("One cycle: every stage runs, the head drafts, one token is verified", fontsize=9.5, color=INK)
    tokens = range(6, 11)
    for x, token in enumerate(tokens):
        depth = min(STAGES, 10 - token)
        for stage in range(depth):
            box(axes, x, stage, f"stage {stage}", KNOWN)
        if depth < STAGES:
            box(axes, x, depth, f"stage {depth}", RUNNING, linestyle="--")
        axes.text(x, -0.75, f"token {token}", ha="center", fontsize=8.5, color=INK)
        row = STAGES + 0.95
        top = depth - 0.58 if depth else -0.58
        side = 0.0 if depth == STAGES else 0.47
        bottom = top if depth == STAGES else top + 0.2
        axes.plot([x + side, x + side], [bottom, row], color=INK, lw=0.7, ls=":", zorder=0)
        axes.text(x + 0.06 + side / 2, row - 0.32, f"g{min(depth, 3)}", ha="center", fontsize=8.5, color=INK)
    box(axes, 2, STAGES + 1.3, "speculation head: reads the hidden states that are known", HEAD, width=5.0, height=0.7)
    box(axes, 5.3, 0, "draft", HEAD, linestyle="--")
    axes.text(5.3, -0.75, "token 11", ha="center", fontsize=8.5, color=INK)
    arrow(axes, (4.55, STAGES + 1.3), (5.3, 0.45), curve=-0.25)
    arrow(axes, (1.1, STAGES - 0.55), (1.75, 2.45), curve=-0.4)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.text(1.62, STAGES - 0.4, "its logits verify\ntoken 8", fontsize=8, color=INK, va="center", bbox=paper)
    box(axes, 0.1, -1.45, "known", KNOWN, width=0.9, height=0.45)
    box(axes, 1.7, -1.45, "runs in this cycle", RUNNING, width=1.9, height=0.45, linestyle="--")
    axes.set(xlim=(-0.7, 6.0), ylim=(-1.85, STAGES + 1.9))


def draw_schedule(axes: Axes) -> None:
    """Cycles across, stages down: a rejection flushes what is newer, and the pipeline refills."""
    axes.set_title("A rejection flushes newer tokens, and the pipeline refills", fontsize=9.5, color=INK)
    table = schedule(cycles=8, rejected=2)  # drawn as tokens 7, 8, ...: the last stage begins with 7
    for cycle, stages in enumerate(table):
        for stage, cell in enumerate(stages):
            if cell is None:
                box(axes, cycle, -stage, "", "white", linewidth=0.4)
                continue
            color = FLUSHED if cell.flushed else CORRECTED if cell.corrected else KNOWN
            box(axes, cycle, -stage, f"{cell.token + 7}" + ("'" if cell.corrected else ""), color)
            if cell.flushed:
                axes.plot([cycle - 0.35, cycle + 0.35], [-stage - 0.3, -stage + 0.3], color="#b2182b", lw=1.2)
        axes.text(cycle, 0.65, f"{cycle + 1}", ha="center", fontsize=8, color=INK)
    for stage in range(STAGES):
        axes.text(-0.6, -stage, f"stage {stage}", ha="right", va="center", fontsize=8.5, color=INK)
    axes.text(-0.6, 0.65, "cycle", ha="right", fontsize=8, color=INK)
    axes.text(
        3.5,
        -STAGES - 0.35,
        "Cycle 2: token 8 leaves, and says that the draft 9 is wrong.\n9, 10, 11 are flushed, the correction 9' enters "
        "alone:\na rejection costs n cycles, an accepted draft one.",
        ha="center",
        va="center",
        fontsize=8.5,
        color=INK,
    )
    axes.set(xlim=(-1.9, 7.6), ylim=(-STAGES - 1.2, 1.3))


def main(args: argparse.Namespace) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "method"  # so that the same drawing is the same file
    figure = Figure(figsize=(11, 4.3), facecolor="white", layout="constrained")
    depths, cycles = figure.subplots(1, 2, width_ratios=(1, 1.05))
    draw_depths(depths)
    draw_schedule(cycles)
    for axes in (depths, cycles):
        axes.axis("off")
    kind = args.output.suffix.removeprefix(".")
    with atomic_open(args.output, "wb") as file:
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)


def build_parser() -> Parser:
    parser = Parser(description="Draw the picture of the method.")
    default = Path(__file__).with_name("method.svg")
    parser.add_argument("--output", type=Path, default=default, help="file to write, .svg or .png")
    return parser


if __name__ == "__main__":
    run_script(main, build_parser())
