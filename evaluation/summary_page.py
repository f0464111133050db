"""One HTML page of all runs of an evaluation's folder: their metrics to sort, their plots, every answer."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.files import RunFiles
from viewer.page import render, write

Shown = dict[str, Any]  # a run or a prompt, as the page knows it


def write_summary_page(path: str | Path, title: str, runs: Sequence[tuple[RunFiles, Mapping[str, Any]]]) -> None:
    """Write the page of some runs, each with its summary, atomically, and say so. ValueError for damaged rows."""
    data = {"title": title, "runs": [_run(files, summary) for files, summary in runs]}
    write(path, render("summary", title, data))


def _run(files: RunFiles, summary: Mapping[str, Any]) -> Shown:
    settings, overall = summary["settings"], summary["overall"]
    names = ("target", "dtype", "device", "placement")
    plots = files.plots
    return {
        "label": settings["label"],
        "settings": [
            *(str(settings[name]) for name in names if settings.get(name) is not None),
            f"at most {settings['max_new_tokens']} new tokens",
        ],
        "samples": summary["samples"],
        "failed": len(summary["failed"]),
        "compared": overall["compared_with_baseline"],
        "equal": overall["equal_to_baseline"],
        **_metrics(overall, "_pooled"),
        "plots": f"data:image/png;base64,{b64encode(plots.read_bytes()).decode()}" if plots.is_file() else None,
        "prompts": [_prompt(row) for _, row in sorted(files.rows.read().items(), key=lambda item: _order(item[0]))],
    }


def _order(key: tuple[str, str]) -> tuple:
    """Data set after data set; numbers of questions by their size."""
    dataset, question = key
    return (dataset, 0, int(question), "") if str(question).isdecimal() else (dataset, 1, 0, str(question))


def _prompt(row: Mapping[str, Any]) -> Shown:
    return {
        "dataset": row["dataset"],
        "id": row["question_id"],
        "question": row.get("question", ""),
        "text": row.get("text", ""),
        "error": row.get("error"),
        "tokens": len(row["output_ids"]) if "output_ids" in row else None,
        "stop": row.get("stop_reason"),
        "equal": row.get("equal_to_baseline"),
        "acceptedRuns": row.get("accepted_runs", []),
        **_metrics(row),
    }


def _metrics(values: Mapping[str, Any], end: str = "") -> dict[str, float | None]:
    """The metrics that both tables have; None for one that is missing. end: of their names."""
    names = {
        "alpha": "alpha",
        "acceptLength": "equivalent_accept_length",
        "theory": "theoretical_speedup",
        "ideal": "ideal_speedup_vs_baseline",
        "wallClock": "speedup_vs_baseline",
    }
    return {ours: values.get(f"{theirs}{end}") for ours, theirs in names.items()}
