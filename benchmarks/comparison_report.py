"""The report of a comparison: tables, what the paper's claims come to, a plot. Pure functions of summaries."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baselines.registry import METHODS
from benchmarks.published import published_table, rankings_table, read_published
from decoding.metrics import Costs
from evaluation.metrics import METRICS, Estimate, Key, Row, bootstrap_picks, pooled
from script_utils import markdown_table, save_figure

Summary = Mapping[str, Any]  # of one run, as eval.py writes it
PLOT = Path("docs/comparison.png")  # beside the report
ORDER = ("autoregressive", "prompt_lookup", "eagle3", "dflash", "ppsd", "spd")
THEORY, IDEAL = "theoretical_speedup", "ideal_speedup_vs_baseline"
COLUMNS = {  # metric -> heading
    "alpha": "alpha",
    "equivalent_accept_length": "tau or L_acc",
    THEORY: "theory",
    IDEAL: "ideal, measured",
}
COLOURS = {THEORY: "tab:blue", IDEAL: "tab:cyan"}
INTRODUCTION = """\
Every method decodes the same prompts with the same target, verification and loop (prompt lookup: the assisted
generation of `transformers`). Every trained drafter has seen the same tokens in the same order, with the same optimiser
and number of steps; PPSD is our re-implementation.

- *alpha*: accepted / verified drafts. *tau*: new tokens per pass of the target; *L_acc*, of pipelines: n x new tokens /
  cycles. The prefill's tokens are not counted.
- *theory*: the comparable speed-ups, in which layers count and nothing else does. SPD `L_acc (L/n) / max(L/n, L_s)`,
  PPSD `L_acc L / (L + n L_s)`, EAGLE-3 `tau L / (L + m L_s)`; *devices* is what each takes for that.
- *per device*: theory / devices, what each device adds. A single device that decodes alone has 1.
- *ideal, measured*: on as many devices, but with the times that stages, drafter and verification really took, over the
  target alone. Messages between devices are not in it.
- *seconds*: of training, beside other work. In brackets: 95% bootstrap intervals over prompts."""


class Cell(NamedTuple):
    """A pooled metric with its 95% interval over prompts; None where it is not defined."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, summary: Summary, metric: str) -> Cell:
        part = summary["overall"]
        return cls(part[f"{metric}_pooled"], *(part[f"{metric}_pooled_ci95"] or (None, None)))

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        return f"{self.value:.2f}" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")


class Axis(NamedTuple):
    """What tells the runs of a method and temperature apart, in the order of the table."""

    width: int  # W
    stages: int  # n
    chain: int  # m

    @classmethod
    def of(cls, summary: Summary) -> Axis:
        settings = summary["settings"]
        return cls(settings["draft_top_k"], len(settings["stage_sizes"]), settings["draft_chain"])


def recipe_of(summary: Summary) -> str:
    """How the head was trained, where a method has more ways than one: "spd_replay-n6" -> "replay"."""
    return (summary["settings"]["head"] or "").split("-")[0].partition("_")[2]


def short_name(summary: Summary) -> str:
    """A run's label without its head, temperature and compilation: "SPD replay, n = 6, W = 1"."""
    _, *axes, _ = summary["settings"]["label"].split(", ")
    title = METHODS[summary["settings"]["method"]].title
    return ", ".join([f"{title} {recipe_of(summary)}".strip(), *(axis for axis in axes if axis != "compiled")])


class Results:
    """The summaries of a comparison, and how each drafter was trained."""

    def __init__(
        self,
        summaries: Sequence[Summary],
        trained: Mapping[str, Mapping[str, Any]],
        rows: Mapping[str, Mapping[Key, Row]],
    ):
        """trained: run.json by the name of a head; rows: by the label of a run."""
        order = {id(run): (ORDER.index(run["settings"]["method"]), recipe_of(run), Axis.of(run)) for run in summaries}
        self.summaries = sorted(summaries, key=lambda run: order[id(run)])
        self.trained, self.rows = trained, rows

    def difference(self, metric: str, run: Summary, other: Summary) -> Estimate:
        """How much larger a pooled metric is in one run than in another, on the prompts that both have."""
        ours, theirs = (self.rows[summary["settings"]["label"]] for summary in (run, other))
        shared = [key for key in ours if key in theirs and "error" not in ours[key] and "error" not in theirs[key]]
        picks = bootstrap_picks([dataset for dataset, _ in shared])
        (found,) = (each for each in METRICS if each.name == metric)

        def value(summary: Summary, rows: Mapping[Key, Row]) -> Estimate:
            counts = np.array([[rows[key][name] for key in shared] for name in found.columns], dtype=float)
            return pooled(partial(found.formula, Costs(**summary["costs"])), counts, picks)

        return value(run, ours).minus(value(other, theirs))

    @property
    def temperatures(self) -> list[float]:
        return sorted({run["settings"]["temperature"] for run in self.summaries})

    def runs(self, temperature: float, *methods: str) -> list[Summary]:
        """The runs at a temperature, of all methods or of some."""
        return [
            run
            for run in self.summaries
            if run["settings"]["temperature"] == temperature and run["settings"]["method"] in (methods or ORDER)
        ]

    def best(self, temperature: float, method: str, metric: str) -> Summary | None:
        """A method's run with the largest metric; None where it has none."""
        runs = [run for run in self.runs(temperature, method) if Cell.of(run, metric).value is not None]
        return max(runs, key=lambda run: Cell.of(run, metric).value, default=None)


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def results_table(results: Results, temperature: float) -> str:
    heads = ["method", "parameters", "tokens", "seconds", "devices", *COLUMNS.values(), "per device", "equal ids"]
    lines = []
    for run in results.runs(temperature):
        trained, part = results.trained.get(run["settings"]["head"]), run["overall"]
        parameters = "–" if trained is None else f"{trained['head_parameters'] / 1e6:.1f} M"
        tokens = "–" if trained is None else f"{trained['supervised_tokens']:,}"
        seconds = "–" if trained is None else f"{trained['training_seconds']:,.0f}"
        compared = part["compared_with_baseline"]
        equal = f"{part['equal_to_baseline']}/{compared}" if compared else "–"
        cells = [str(Cell.of(run, metric)) for metric in COLUMNS]
        devices, theory = run["devices_in_theory"], Cell.of(run, THEORY).value
        cells.append("–" if theory is None else f"{theory / devices:.2f}")
        lines.append([short_name(run), parameters, tokens, seconds, str(devices), *cells, equal])
    return markdown_table(heads, lines)


class Claim(NamedTuple):
    """A statement that one run has a larger metric than another."""

    text: str
    metric: str
    run: Summary
    other: Summary

    def line(self, results: Results) -> list[str]:
        ours, theirs = (Cell.of(run, self.metric) for run in (self.run, self.other))
        difference = results.difference(self.metric, self.run, self.other)
        temperature = self.run["settings"]["temperature"]
        return [
            self.text,
            f"{temperature:g}",
            f"{short_name(self.run)}: {ours.value:.2f}",
            f"{short_name(self.other)}: {theirs.value:.2f}",
            f"{difference:+.2f}",
            difference.verdict("holds", "does not hold"),
        ]


def claims(results: Results, temperature: float) -> Iterator[Claim]:
    """The paper's claims, as far as there are runs that bear on them."""
    for method in ("eagle3", "dflash", "ppsd", "prompt_lookup"):
        for metric, kind in ((THEORY, "in theory"), (IDEAL, "ideal, measured")):
            run, other = (results.best(temperature, name, metric) for name in ("spd", method))
            if run and other:
                yield Claim(f"SPD is faster than {METHODS[method].title}, the best of each, {kind}", metric, run, other)
    chains = [run for run in results.runs(temperature, "spd") if Axis.of(run).width == 1]
    for run in chains:
        for other in results.runs(temperature, "ppsd"):
            if Axis.of(other).stages == Axis.of(run).stages:
                yield Claim("SPD's drafts are accepted more often than PPSD's", "alpha", run, other)
    for shallow, deep in pairwise(chains):
        if recipe_of(shallow) == recipe_of(deep):
            yield Claim("a deeper pipeline is faster, in theory", THEORY, deep, shallow)
    for chain in chains:
        for tree in results.runs(temperature, "spd"):
            same = Axis.of(tree).stages == Axis.of(chain).stages and recipe_of(tree) == recipe_of(chain)
            if same and Axis.of(tree).width > 1:
                yield Claim("a draft tree is faster than a chain, in theory", THEORY, tree, chain)
    for plain in results.runs(temperature, "spd", "dflash"):
        for learned in results.runs(temperature, plain["settings"]["method"]):
            if Axis.of(plain) == Axis.of(learned) and not recipe_of(plain) and recipe_of(learned):
                text = f"learning where decoding verifies ({recipe_of(learned)}) is worth its tokens"
                yield Claim(text, "equivalent_accept_length", learned, plain)


# ---------------------------------------------------------------------------------------------------------------------
# Plot and report
# ---------------------------------------------------------------------------------------------------------------------


def plot(results: Results, path: Path) -> None:
    """Speed-ups of every run, in theory and ideal as measured: a panel a temperature, written as PNG, atomically."""
    temperatures = results.temperatures
    figure = Figure(figsize=(7 * len(temperatures), 7), layout="constrained")  # without pyplot: no display needed
    for axis, temperature in zip(figure.subplots(1, len(temperatures), squeeze=False)[0], temperatures, strict=True):
        plot_speedups(axis, results.runs(temperature))
        axis.set(title=f"temperature {temperature:g}", xlabel="speed-up over the target alone, 95% intervals")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save_figure(figure, path)


def plot_speedups(axis: Axes, runs: Sequence[Summary]) -> None:
    """Two bars a run, the first run on top."""
    places = np.arange(len(runs))[::-1]
    for offset, (metric, colour) in zip((0.2, -0.2), COLOURS.items(), strict=True):
        cells = [Cell.of(run, metric) for run in runs]
        values = np.array([cell.value or 0.0 for cell in cells])
        bounds = np.array([(cell.low or value, cell.high or value) for cell, value in zip(cells, values, strict=True)])
        style = {"label": COLUMNS[metric], "color": colour, "capsize": 2, "ecolor": "0.3"}
        bars = axis.barh(places + offset, values, 0.4, xerr=np.abs(bounds.T - values), **style)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=3)
    axis.axvline(1, color="0.4", lw=1, ls="--")
    axis.set_yticks(places, [short_name(run) for run in runs])
    axis.margins(x=0.12)


def report(results: Results, commit: str, training: str, notes: str, commands: Sequence[str]) -> str:
    """The whole text; `training` says how much, `notes` is what a person adds, `commands` are what was run."""
    settings = results.summaries[0]["settings"]
    prompts = ", ".join(f"{found['prompts']} of {name}" for name, found in settings["prompts"].items())
    compiled = any(run["settings"].get("compile") for run in results.summaries)
    layers = ", compiled layers (not of prompt lookup and its baseline)" if compiled else ""
    card = (
        f"{settings['target']}, {settings['dtype']}, {settings['device']}{layers}; torch {settings['torch']}, "
        f"transformers {settings['transformers']}; commit {commit}; {datetime.datetime.now(datetime.UTC).date()}. "
        f"Prompts: {prompts}; at most {settings['max_new_tokens']} new tokens. Training of each drafter: {training}."
    )
    sections = ["# Benchmark results", INTRODUCTION, card]
    for temperature in results.temperatures:
        sections += [f"## Temperature {temperature:g}", results_table(results, temperature)]
    sections.append(f"![Speed-ups of all methods]({PLOT.as_posix()})")
    found = [claim.line(results) for temperature in results.temperatures for claim in claims(results, temperature)]
    heads = ["claim", "T", "larger, says the claim", "smaller", "difference", "here"]
    sections += [
        "## The paper's claims at this scale",
        "Differences are paired: both runs decoded the same prompts. A claim holds, or does not, when the 95% interval "
        "of the difference leaves out 0.",
        markdown_table(heads, found),
    ]
    if notes:
        sections.append(notes.strip())
    source, published = read_published()
    sections += [
        "## Published figures",
        f"{source} Cells are theory / wall-clock speed-ups.",
        published_table(published),
    ]
    sections += ["In how many of the published settings a ranking holds:", rankings_table(published)]
    listed = "\n\n".join(commands)
    sections += ["## Commands", f"`benchmarks/compare_methods.py` ran these, in this order:\n\n```\n{listed}\n```"]
    return "\n\n".join(sections) + "\n"
