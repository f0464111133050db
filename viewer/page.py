"""One self-contained HTML page of recorded runs: a template, its style and scripts, and the runs as JSON.

The page loads nothing and its policy lets no script run but its own, so that a model's text is never more than text.
"""

from __future__ import annotations

import hashlib
import html
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp
from pathlib import Path
from string import Template
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.text import pieces
from script_utils import atomic_open
from timeline import DRAFT, VERIFY, WAIT, ideal_seconds, stage_row
from viewer.recording import Draft, Fate, Recording, Token, by_cycle, staircase, tokens_of

FOLDER = Path(__file__).parent
DIGITS = 7  # of seconds: tenths of a microsecond

Run = dict[str, Any]  # what the page knows of one prompt


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
    sizes = result.stage_sizes
    return {
        "prompt": prompt,
        "stages": sizes,
        "tokens": _columns(tokens, tokenizer),
        "cells": staircase(tokens, len(sizes), result.cycles),
        "drafts": by_cycle(tokens, "drafted", result.cycles),
        "heads": [_head(draft, tokenizer) for draft in recorder.drafts],
        "verdicts": by_cycle(tokens, "emitted", result.cycles),
        "seconds": _cycle_seconds(pipeline, setting.verify_lag),
        "lanes": _lanes(standard, pipeline, setting, tokenizer),
        "fills": {"verified": result.verified_by_fill, "accepted": result.accepted_by_fill},
        "acceptedRuns": result.accepted_runs,
        "metrics": {
            "tokens": len(result.tokens),
            "cycles": result.cycles,
            "accepted": result.n_accepted,
            "verified": result.n_verified,
            "alpha": result.alpha,
            "acceptLength": result.equivalent_accept_length,
            "theory": result.theoretical_speedup(setting.num_spec_layers),
            "equal": standard.result.tokens == result.tokens,
        },
    }


def counts(tokens: Sequence[Token]) -> dict[str, int]:
    """How many tokens had each fate."""
    return {fate: sum(token.fate == fate for token in tokens) for fate in Fate}


def _columns(tokens: Sequence[Token], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    """Tokens as one list a field, with -1 for none: shorter than an object each."""
    names = ("position", "parent", "fill", "drafted", "entered", "died", "emitted")
    columns: dict[str, list] = {
        name: [-1 if getattr(token, name) is None else getattr(token, name) for token in tokens] for name in names
    }
    columns["text"] = [tokenizer.decode([token.id]) for token in tokens]
    columns["fate"] = [token.fate for token in tokens]
    columns["probability"] = [None if token.probability is None else round(token.probability, 4) for token in tokens]
    return columns


def _head(draft: Draft, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the head saw in a cycle, and what else it found likely."""
    shown: dict[str, Any] = {} if draft.rows is None else {"rows": draft.rows._asdict()}
    if draft.best is not None:
        ids, log_probabilities = draft.best
        texts = [tokenizer.decode([token]) for token in ids.tolist()]
        shown["best"] = [
            [text, round(exp(value), 4)] for text, value in zip(texts, log_probabilities.tolist(), strict=True)
        ]
    return shown


def _cycle_seconds(recording: Recording, verify_lag: int) -> dict[str, list]:
    """Seconds of each cycle: of the whole, of its parts, and with a device a stage."""
    num_stages, whole = len(recording.result.stage_sizes), recording.recorder.seconds
    rows = [*recording.cycles, *({} for _ in whole)][: len(whole)]
    names = {DRAFT: DRAFT, VERIFY: VERIFY, WAIT: WAIT} | {stage_row(stage): stage for stage in range(num_stages)}
    parts = {key: [round(row.get(name, 0.0), DIGITS) for row in rows] for name, key in names.items()}
    return {
        "cycle": [round(seconds, DIGITS) for seconds in whole],
        "ideal": [round(ideal_seconds(row, verify_lag), DIGITS) for row in rows],
        "stages": [parts.pop(stage) for stage in range(num_stages)],
        **parts,
    }


def _lanes(
    standard: Recording, pipeline: Recording, setting: Setting, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The race: who writes which piece of text when, in seconds since the prompt was read."""
    ideal = _cycle_seconds(pipeline, setting.verify_lag)["ideal"]
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
