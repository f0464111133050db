"""The figures that the paper's authors publish, as a table, and what they say of the rankings that we find."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from script_utils import markdown_table

FILE = Path(__file__).with_name("published_results.json")
TITLES = {"eagle3": "EAGLE-3, m = {size}", "ppsd": "PPSD, n = {size}", "spd": "SPD, n = {size}, L_s = {layers}"}
SETS = ("overall", "mt_bench", "gsm8k", "humaneval")

Figures = dict[str, Any]  # a line of the file, by its columns


class Ranking(NamedTuple):
    """Two methods, of which the first is the faster one, says the claim."""

    text: str
    better: tuple[str, int | None]  # method, and its n or m; None: the best one
    worse: tuple[str, int | None]


RANKINGS = (
    Ranking("SPD is faster than EAGLE-3, the best of each", ("spd", None), ("eagle3", None)),
    Ranking("SPD is faster than PPSD, the best of each", ("spd", None), ("ppsd", None)),
    Ranking("EAGLE-3 is faster than PPSD, the best of each", ("eagle3", None), ("ppsd", None)),
    Ranking("SPD: 8 stages are faster than 4", ("spd", 8), ("spd", 4)),
    Ranking("SPD: 16 stages are faster than 8", ("spd", 16), ("spd", 8)),
    Ranking("EAGLE-3: 7 drafts are faster than 3", ("eagle3", 7), ("eagle3", 3)),
    Ranking("EAGLE-3: 15 drafts are faster than 7", ("eagle3", 15), ("eagle3", 7)),
    Ranking("PPSD: 8 stages are faster than 4", ("ppsd", 8), ("ppsd", 4)),
)


def read_published() -> tuple[str, list[Figures]]:
    """Where the figures come from, and the figures."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return data["source"], [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def published_table(rows: Sequence[Figures]) -> str:
    """Cells are theory / wall-clock."""
    lines = [
        [row["mix"], row["target"], f"{row['temperature']:g}", TITLES[row["method"]].format(**row)]
        + [f"{row[f'{name} theory']:.2f} / {row[f'{name} wall-clock']:.2f}" for name in SETS]
        for row in rows
    ]
    return markdown_table(["training mix", "target", "T", "method", *(name.replace("_", " ") for name in SETS)], lines)


def settings_of(rows: Sequence[Figures]) -> Iterator[list[Figures]]:
    """The rows of each training mix, target and temperature."""
    for _, group in groupby(rows, key=lambda row: (row["mix"], row["target"], row["temperature"])):
        yield list(group)


def support(rows: Sequence[Figures], ranking: Ranking, kind: str) -> tuple[int, int]:
    """In how many of the published settings with both methods the ranking holds; kind: "theory" or "wall-clock"."""
    holds = settings = 0
    for group in settings_of(rows):
        better, worse = (
            [row[f"overall {kind}"] for row in group if row["method"] == method and size in (None, row["size"])]
            for method, size in (ranking.better, ranking.worse)
        )
        if better and worse:
            settings += 1
            holds += max(better) > max(worse)
    return holds, settings


def rankings_table(rows: Sequence[Figures]) -> str:
    lines = []
    for ranking in RANKINGS:
        counts = (support(rows, ranking, kind) for kind in ("theory", "wall-clock"))
        lines.append([ranking.text, *(f"{holds} of {settings}" for holds, settings in counts)])
    return markdown_table(["published ranking", "in theory", "in wall-clock"], lines)
