"""One HTML page of all runs of an evaluation's folder: their metrics to sort, their plots, every answer."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.files import RunFiles
from viewer.page import render, write

Shown = dict[str, Any]  # a run, a prompt, or a cell of a table, as the page knows it

# Columns that both tables can have: heading, name in a row of results, how a value is written.
METRICS = {
    "alpha": ("alpha", "{:.2f}"),
    "L_acc": ("equivalent_accept_length", "{:.2f}"),
    "theory": ("theoretical_speedup", "{:.2f} ×"),
    "ideal": ("ideal_speedup_vs_baseline", "{:.2f} ×"),
    "wall-clock": ("speedup_vs_baseline", "{:.2f} ×"),
}
RUN_HEADINGS = ("run", "prompts", *METRICS, "equal", "failed")
PROMPT_METRICS = ("alpha", "L_acc", "ideal", "wall-clock")
PROMPT_HEADINGS = ("data set", "question", "text", "tokens", *PROMPT_METRICS, "longest run")


def write_summary_page(path: str | Path, title: str, runs: Sequence[tuple[RunFiles, Mapping[str, Any]]]) -> None:
    """Write the page of some runs, each with its summary, atomically, and say so. ValueError for damaged rows."""
    data = {
        "title": title,
        "runHeadings": RUN_HEADINGS,
        "promptHeadings": PROMPT_HEADINGS,
        "runs": [_run(number, files, summary) for number, (files, summary) in enumerate(runs)],
    }
    write(path, render("summary", title, data))


def _run(number: int, files: RunFiles, summary: Mapping[str, Any]) -> Shown:
    settings, overall = summary["settings"], summary["overall"]
    names = ("target", "dtype", "device", "placement")
    plots, label = files.plots, settings["label"]
    equal, compared = overall["equal_to_baseline"], overall["compared_with_baseline"]
    rows = [row for _, row in sorted(files.rows.read().items(), key=lambda item: _order(item[0]))]
    return {
        "label": label,
        "settings": [
            *(str(settings[name]) for name in names if settings.get(name) is not None),
            f"at most {settings['max_new_tokens']} new tokens",
        ],
        "cells": [
            _cell(label, link=f"#run-{number}"),
            _cell(summary["samples"]),
            *(_metric(overall, heading, "_pooled") for heading in METRICS),
            _cell(equal, f"{equal} of {compared}" if compared else "–"),
            _cell(len(summary["failed"])),
        ],
        "plots": f"data:image/png;base64,{b64encode(plots.read_bytes()).decode()}" if plots.is_file() else None,
        "prompts": [_prompt(f"#run-{number}-prompt-{index}", row) for index, row in enumerate(rows)],
    }


def _order(key: tuple[str, str]) -> tuple:
    """Data set after data set; numbers of questions by their size."""
    dataset, question = key
    return (dataset, 0, int(question), "") if str(question).isdecimal() else (dataset, 1, 0, str(question))


def _prompt(link: str, row: Mapping[str, Any]) -> Shown:
    question, runs = row.get("question", ""), row.get("accepted_runs", [])
    return {
        "title": f"{row['dataset']}, question {row['question_id']}",
        "question": question,
        "text": row.get("text", ""),
        "outcome": _outcome(row),
        "acceptedRuns": runs,
        "cells": [
            _cell(row["dataset"]),
            _cell(row["question_id"], link=link),
            _cell(question, question[:70]),
            _cell(len(row["output_ids"]) if "output_ids" in row else None),
            *(_metric(row, heading) for heading in PROMPT_METRICS),
            _cell(max(runs, default=0)),
        ],
    }


def _outcome(row: Mapping[str, Any]) -> str:
    """How an answer ended, in words."""
    if row.get("error"):
        return f"Failed: {row['error']}"
    same = {True: "; the same as the target alone", False: "; NOT the same as the target alone"}
    tokens = len(row.get("output_ids", ()))
    return f"{tokens} tokens ({row.get('stop_reason')}){same.get(row.get('equal_to_baseline'), '')}"


def _metric(values: Mapping[str, Any], heading: str, end: str = "") -> Shown:
    """The cell of a metric, which can be missing. end: of its name."""
    name, written = METRICS[heading]
    value = values.get(f"{name}{end}")
    return _cell(value, None if value is None else written.format(value))


def _cell(value: Any, text: str | None = None, link: str | None = None) -> Shown:
    """A cell of a table: the value to sort by, its text (a dash for None), and where it leads."""
    shown = ("–" if value is None else str(value)) if text is None else text
    return {"value": value, "text": shown} | ({} if link is None else {"link": link})
