"""One self-contained HTML page of recorded runs: a template, its style and scripts, and the runs as JSON.

The page loads nothing and its policy lets no script run but its own, so that a model's text is never more than text.
"""

from __future__ import annotations

import hashlib
import html
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, exp
from pathlib import Path
from string import Template
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.result import GenerationResult
from decoding.text import pieces
from script_utils import atomic_open
from timeline import DRAFT, VERIFY, WAIT, ideal_seconds, stage_row
from viewer.recording import Draft, Fate, Recording, RowsSeen, Token, by_cycle, rejections, staircase, tokens_of

FOLDER = Path(__file__).parent
DIGITS = 7  # of seconds: tenths of a microsecond

Run = dict[str, Any]  # what the page knows of one prompt
Chart = dict[str, Any]  # upright bars: "rows" of (name, share of the height, text above), and a "note"


@dataclass(frozen=True)
class Setting:
    """What all runs of a page share."""

    title: str  # the target's name
    facts: Sequence[str]  # of target, head and settings, a phrase each
    placement: str  # where the pipeline's stages ran, as a phrase
    baseline: str  # where the target alone ran, likewise
    num_spec_layers: int  # of the head
    verify_lag: int = 0


def run_of(
    prompt: str, standard: Recording, pipeline: Recording, setting: Setting, tokenizer: PreTrainedTokenizerBase
) -> Run:
    """What the page shows of a prompt, decoded by the target alone and by the pipeline."""
    result, recorder = pipeline.result, pipeline.recorder
    tokens = tokens_of(recorder, result.accepted)
    sizes, cycles = result.stage_sizes, result.cycles
    ends = list(accumulate(sizes))
    drafted = by_cycle(tokens, "drafted", cycles)
    return {
        "prompt": prompt,
        "stages": sizes,
        "layers": [f"{end - size}–{end - 1}" for size, end in zip(sizes, ends, strict=True)],
        "tokens": _columns(tokens, tokenizer),
        "cells": staircase(tokens, len(sizes), cycles),
        "drafts": drafted,
        "heads": [
            _head(draft, {tokens[number].id for number in numbers}, tokenizer)
            for draft, numbers in zip(recorder.drafts, drafted, strict=True)
        ],
        "verdicts": by_cycle(tokens, "emitted", cycles),
        "totals": _totals(tokens, cycles),
        "rejections": rejections(tokens),
        "parts": _parts(pipeline, setting.verify_lag),
        "lanes": _lanes(standard, pipeline, setting, tokenizer),
        "charts": {"fill": _fill_chart(result), "run": _run_chart(result.accepted_runs)},
        "metrics": _metrics(result, setting, standard.result.tokens == result.tokens),
    }


def _totals(tokens: Sequence[Token], cycles: int) -> dict[str, list[int]]:
    """How many tokens had been accepted, corrected and flushed by the end of each cycle."""
    events = Counter((token.fate, token.died if token.fate == Fate.FLUSHED else token.emitted) for token in tokens)
    fates = (Fate.ACCEPTED, Fate.CORRECTED, Fate.FLUSHED)
    return {fate: list(accumulate(events[fate, cycle] for cycle in range(cycles))) for fate in fates}


def _columns(tokens: Sequence[Token], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    """Tokens as one list per field, with -1 for none: shorter than an object for each."""
    names = ("position", "parent", "died")
    columns: dict[str, list] = {
        name: [-1 if getattr(token, name) is None else getattr(token, name) for token in tokens] for name in names
    }
    columns["text"] = [tokenizer.decode([token.id]) for token in tokens]
    columns["fate"] = [token.fate for token in tokens]
    columns["probability"] = [None if token.probability is None else round(token.probability, 4) for token in tokens]
    columns["origin"] = [_origin(token) for token in tokens]
    columns["outcome"] = [_outcome(token) for token in tokens]
    return columns


def _origin(token: Token) -> str:
    """Where a token came from: the same for all tokens of a cell."""
    drafted = f", drafted in cycle {token.drafted} (tokens in flight then: {token.fill})"
    entry = ", never in a stage" if token.entered is None else f", entered in cycle {token.entered}"
    return f"Position {token.position}{'' if token.drafted is None else drafted}{entry}."


def _outcome(token: Token) -> str:
    """What became of a token."""
    return {
        Fate.FIRST: "the prompt's first new token",
        Fate.ACCEPTED: f"accepted in cycle {token.emitted}",
        Fate.CORRECTED: f"the target's own, since cycle {token.emitted}",
        Fate.FLUSHED: f"flushed in cycle {token.died}",
        Fate.OPEN: "not judged before the end",
    }[token.fate]


def _head(draft: Draft, drafted: Collection[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    """What the head saw in a cycle, and what else than its drafts it found likely, as (text, probability, no fate)."""
    ids, log_probabilities = ([], []) if draft.best is None else (values.tolist() for values in draft.best)
    best = zip(ids, log_probabilities, strict=True)
    others = [(tokenizer.decode([token]), round(exp(value), 4), "") for token, value in best if token not in drafted]
    return {"rows": [] if draft.rows is None else _spans(draft.rows), "others": others}


def _spans(rows: RowsSeen) -> list[tuple[str, int]]:
    """Rows that the head saw, as (positions, type): neighbours of one type together."""
    spans: list[list[int]] = []  # first position, last position, type, number of rows
    for position, kind in sorted(rows.fed):
        if spans and spans[-1][2] == kind and position - spans[-1][1] <= 1:
            spans[-1][1] = position
            spans[-1][3] += 1
        else:
            spans.append([position, position, kind, 1])
    shown = [
        (positions(first, last) + (f" ({count} rows)" if count > last - first + 1 else ""), kind)
        for first, last, kind, count in spans
    ]
    cached = [(f"{positions(0, rows.cached - 1)}, cached", rows.deepest)] if rows.cached else []
    return cached + shown


def positions(first: int, last: int) -> str:
    """A range of positions in words."""
    return f"position {first}" if first == last else f"positions {first}–{last}"


def _parts(recording: Recording, verify_lag: int) -> list[dict[str, Any]]:
    """Seconds of each cycle, part by part in the order of the staircase's rows, and of the whole; `kind` is a style."""
    stages = range(len(recording.result.stage_sizes))
    rows = _cycle_rows(recording)
    named = [(DRAFT, "head", "drafting")]
    named += [(stage_row(stage), f"stage {stage}", "odd-stage" if stage % 2 else "even-stage") for stage in stages]
    named += [(VERIFY, "verification", "verification"), (WAIT, "waiting for stages", "")]
    parts = [(name, kind, [row.get(key, 0.0) for row in rows]) for key, name, kind in named]
    parts.append(("whole cycle, as measured", "", recording.recorder.seconds))
    parts.append(("ideal: a device per stage", "ideal", [ideal_seconds(row, verify_lag) for row in rows]))
    return [
        {
            "name": name,
            "kind": kind,
            "mean": sum(seconds) / max(1, len(seconds)),
            "seconds": [round(value, DIGITS) for value in seconds],
        }
        for name, kind, seconds in parts
    ]


def _cycle_rows(recording: Recording) -> list[Mapping[str, float]]:
    """The timeline's seconds of every cycle, by row: none of a cycle that it has not."""
    whole = recording.recorder.seconds
    return [*recording.cycles, *({} for _ in whole)][: len(whole)]


def _fill_chart(result: GenerationResult) -> Chart:
    """Acceptance by tokens in flight."""
    pairs = list(zip(result.accepted_by_fill, result.verified_by_fill, strict=True))
    rows = [
        (str(fill), accepted / max(1, verified), f"{accepted / verified:.2f}" if verified else "–")
        for fill, (accepted, verified) in enumerate(pairs, start=1)
    ]
    counted = ", ".join(f"{fill}: {accepted}/{verified}" for fill, (accepted, verified) in enumerate(pairs, start=1))
    return {"rows": rows, "note": f"Accepted / verified drafts: {counted}."}


def _run_chart(lengths: Sequence[int]) -> Chart:
    """How often accepted runs of each length came; every name under the bars has room."""
    counted, longest = Counter(lengths), max(lengths, default=0)
    most, every = max(counted.values(), default=1), ceil((longest + 1) / 20)
    rows = [
        ("" if length % every else str(length), counted[length] / most, str(counted[length] or ""))
        for length in range(longest + 1)
    ]
    return {"rows": rows, "note": f"{len(lengths)} runs, the longest {longest}."}


def _metrics(result: GenerationResult, setting: Setting, equal: bool) -> list[tuple[str, str, str, str]]:
    """The tiles at the top: id of the term, name, value, note."""
    theory = result.theoretical_speedup(setting.num_spec_layers)
    return [
        ("alpha", "alpha", figure(result.alpha), f"{result.n_accepted} of {result.n_verified} drafts"),
        ("accept-length", "L_acc", figure(result.equivalent_accept_length), f"at most {len(result.stage_sizes)}"),
        ("accept-length", "theoretical speed-up", figure(theory, " ×"), ""),
        ("cycle", "cycles", str(result.cycles), ""),
        ("", "tokens", str(len(result.tokens)), "the same as standard's" if equal else "others than standard's"),
    ]


def figure(value: float | None, unit: str = "") -> str:
    """Two digits after the point; a dash for what is not known."""
    return "–" if value is None else f"{value:.2f}{unit}"


def _lanes(
    standard: Recording, pipeline: Recording, setting: Setting, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The race: who writes which piece of text when, in seconds since the prompt was read."""
    ideal = [ideal_seconds(row, setting.verify_lag) for row in _cycle_rows(pipeline)]
    alone, written = pieces(standard.result.tokens, tokenizer), pieces(pipeline.result.tokens, tokenizer)
    return [
        _lane("standard", setting.baseline, standard, standard.recorder.seconds, alone),
        _lane("pipeline, as measured", setting.placement, pipeline, pipeline.recorder.seconds, written),
        _lane(
            "pipeline, ideal",
            "a device a stage and one for the head; computed from this run's own timers, not measured",
            pipeline,
            ideal,
            written,
        ),
    ]


def _lane(name: str, note: str, recording: Recording, seconds: Sequence[float], written: list[str]) -> dict[str, Any]:
    """seconds: of each cycle. The prefill's token is there from the start."""
    ends = [0.0, *accumulate(seconds)]
    times = [round(ends[cycle + 1], DIGITS) for _, cycle in recording.recorder.emitted]
    new_tokens, total = recording.result.new_tokens, ends[-1]
    return {
        "name": name,
        "note": note,
        "pieces": written,
        "times": times,
        "fates": ["accepted" if flag else "corrected" for flag in recording.result.accepted],
        "speed": new_tokens / total if total else None,
    }


def as_json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it closes the element or opens another one."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def page(setting: Setting, runs: Sequence[Run]) -> str:
    """The page of recorded runs."""
    return render("page", setting.title, {"title": setting.title, "facts": setting.facts, "runs": runs})


def render(name: str, title: str, data: Mapping[str, Any]) -> str:
    """A whole page from its template and script, the style and helpers that all pages share, and its data."""
    template, style, *scripts = (
        (FOLDER / file).read_text(encoding="utf-8") for file in (f"{name}.html", "page.css", "common.js", f"{name}.js")
    )
    script = "".join(scripts)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(template).substitute(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        title=html.escape(title),
        style=style,
        script=script,
        data=as_json(data),
    )


def write_page(path: str | Path, setting: Setting, runs: Sequence[Run]) -> None:
    """Write the page of recorded runs, atomically, and say so."""
    write(path, page(setting, runs))


def write(path: str | Path, text: str) -> None:
    """Write a page, atomically, and say so."""
    with atomic_open(path) as file:
        file.write(text)
    print(f"\nPage written to {path}: open it in a browser", flush=True)
