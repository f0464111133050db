"""From per-sample rows to a summary and its tables: pure functions, whatever ran the samples.

A row is one line of a `*__per_sample.jsonl`: the counts and seconds of one generation (`sample_row`), what the baseline
did with the same prompt (`compare_with_baseline`), and every metric of METRICS for this sample alone. A summary is a
pure function of the rows and the run's settings; tables and plots are pure functions of summaries.

    pooled   a metric of the summed counts: long generations weigh more
    mean     the mean of the samples' own values: every prompt weighs the same
    ci95     95% bootstrap interval over prompts, resampled within each data set
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from decoding.metrics import Costs, accept_length, alpha, closed_form, theoretical_speedup
from decoding.result import GenerationResult, shared_length
from evaluation.prompts import OFFICIAL_SETS, Sample
from script_utils import first_line, markdown_table
from timeline import Timings, time_table

Row = dict[str, Any]
Key = tuple[str, str]  # of a sample: data set and question
RESAMPLES = 1000
BOOTSTRAP_SEED = 0


class Metric(NamedTuple):
    """A metric as a function of counts: those of one row, or sums over rows, or arrays of either."""

    name: str
    columns: tuple[str, ...]  # the row's fields that it needs
    formula: Callable  # (costs, *columns) -> value


METRICS = (
    Metric("alpha", ("n_accepted", "n_verified"), lambda _, *counts: alpha(*counts)),
    Metric("acceptance_rate", ("new_tokens", "decode_loop_steps"), lambda _, tokens, cycles: tokens / cycles),
    Metric(
        "equivalent_accept_length",
        ("new_tokens", "decode_loop_steps"),
        lambda costs, *counts: accept_length(costs.factor, *counts),
    ),
    Metric("theoretical_speedup", ("new_tokens", "decode_loop_steps"), theoretical_speedup),
    Metric("prefill_tok_s", ("prompt_tokens", "prefill_sec"), lambda _, tokens, seconds: tokens / seconds),
    Metric("pipeline_decode_tok_s", ("new_tokens", "decode_wall_sec"), lambda _, tokens, seconds: tokens / seconds),
    Metric("ideal_decode_tok_s", ("new_tokens", "ideal_decode_wall_sec"), lambda _, tokens, seconds: tokens / seconds),
    Metric(
        "speedup_vs_baseline",
        ("new_tokens", "decode_wall_sec", "baseline_new_tokens", "baseline_decode_wall_sec"),
        lambda _, tokens, seconds, base_tokens, base_seconds: tokens * base_seconds / (seconds * base_tokens),
    ),
    Metric(
        "ideal_speedup_vs_baseline",
        ("new_tokens", "ideal_decode_wall_sec", "baseline_new_tokens", "baseline_decode_wall_sec"),
        lambda _, tokens, seconds, base_tokens, base_seconds: tokens * base_seconds / (seconds * base_tokens),
    ),
)
# Fields that a summary adds up.
SUMMED = (
    "prompt_tokens",
    "new_tokens",
    "decode_loop_steps",
    "n_verified",
    "n_accepted",
    "prefill_sec",
    "decode_wall_sec",
    "wall_time_sec",
    "ideal_decode_wall_sec",
    "draft_sec",
    "verify_sec",
    "rollbacks",
    "rollback_sec",
)


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def sample_row(sample: Sample, result: GenerationResult, costs: Costs) -> Row:
    """The row of a finished generation, without a baseline."""
    timings = result.timings
    row = identity_of(sample) | {
        "stop_reason": result.stop_reason,
        "prompt_tokens": len(sample.prompt_ids),
        "new_tokens": result.new_tokens,
        "decode_loop_steps": result.cycles,
        "n_verified": result.n_verified,
        "n_accepted": result.n_accepted,
        "verified_by_fill": result.verified_by_fill,
        "accepted_by_fill": result.accepted_by_fill,
        "accepted_runs": result.accepted_runs,
        "prefill_sec": timings.prefill,
        "decode_wall_sec": timings.decode,
        "wall_time_sec": timings.prefill + timings.decode,
        "ideal_decode_wall_sec": timings.ideal_decode,
        "stage_sec": timings.stages,
        "draft_sec": timings.draft,
        "verify_sec": timings.verify,
        "rollbacks": timings.rollbacks,
        "rollback_sec": timings.rollback,
        "baseline_new_tokens": None,
        "baseline_decode_wall_sec": None,
        "equal_to_baseline": None,
        "first_difference": None,
        "output_ids": result.tokens,
    }
    return row | metrics_of(row, costs)


def failed_row(sample: Sample, error: Exception) -> Row:
    """The row of a sample that could not be decoded. It takes no part in any metric."""
    trace = "".join(traceback.format_exception(error))
    return identity_of(sample) | {"error": f"{type(error).__name__}: {first_line(error)}", "traceback": trace}


def identity_of(sample: Sample) -> Row:
    """The fields that say which sample a row is of."""
    return {
        "dataset": sample.dataset,
        "question_id": sample.question_id,
        "category": sample.category,
        "question": sample.prompt,
        "prompt_sha256": sample.prompt_sha256,
    }


def row_key(row: Mapping[str, Any]) -> Key:
    """`Sample.key` of a row."""
    return row["dataset"], str(row["question_id"])


def check_row(row: Row) -> Row:
    """The row as it is. KeyError when it lacks what others are compared with."""
    missing = {"prompt_sha256"} - row.keys()
    if "error" not in row:
        missing |= {"new_tokens", "decode_wall_sec", "output_ids"} - row.keys()
    if missing:
        raise KeyError(*sorted(missing))
    return row


def is_whole(row: Mapping[str, Any], sample: Sample) -> bool:
    """Whether a stored row answers this sample's prompt, without a failure: then it need not run again."""
    return row["prompt_sha256"] == sample.prompt_sha256 and "error" not in row and "baseline_error" not in row


def compare_with_baseline(row: Row, baseline: Mapping[str, Any], costs: Costs, *, same_draws: bool) -> Row:
    """The row with the baseline's counts and speed-ups.

    same_draws: the ids must be the baseline's, so the row also says whether they are, and if not, where they part.
    A baseline that failed leaves its error in `baseline_error`.
    """
    if "error" in baseline:
        return row | {"baseline_error": baseline["error"]}
    row = row | {
        "baseline_new_tokens": baseline["new_tokens"],
        "baseline_decode_wall_sec": baseline["decode_wall_sec"],
    }
    if same_draws:
        difference = first_difference(row["output_ids"], baseline["output_ids"])
        row |= {"equal_to_baseline": difference is None, "first_difference": difference}
    return row | metrics_of(row, costs)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> dict[str, int | None] | None:
    """Where two id lists part: index and both ids, None for a list that has ended; None when they are equal."""
    if list(ours) == list(theirs):
        return None
    at = shared_length(ours, theirs)
    token, baseline_token = (ids[at] if at < len(ids) else None for ids in (ours, theirs))
    return {"position": at, "token": token, "baseline_token": baseline_token}


def metrics_of(row: Mapping[str, Any], costs: Costs) -> dict[str, float | None]:
    """Every metric of one row; None where its counts are missing or its denominator is 0."""
    values = {}
    for metric in METRICS:
        counts = [_numbers([row], name)[0] for name in metric.columns]
        with np.errstate(divide="ignore", invalid="ignore"):
            values[metric.name] = _number(metric.formula(costs, *counts))
    return values


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """One field of all rows, [N] float; nan where it is None."""
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=float)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


# ---------------------------------------------------------------------------------------------------------------------
# Summaries
# ---------------------------------------------------------------------------------------------------------------------


def summarise(rows: Iterable[Row], settings: Mapping[str, Any], costs: Costs, num_devices: int) -> dict[str, Any]:
    """The summary of a run, overall and per data set. The order of the rows does not matter.

    num_devices: how many devices the theory assumes.
    """
    rows = sorted(rows, key=lambda row: (row["dataset"], isinstance(row["question_id"], str), row["question_id"]))
    done = [row for row in rows if "error" not in row]
    by_set = {name: list(group) for name, group in groupby(done, key=lambda row: row["dataset"])}
    keyed = [(row, {"dataset": row["dataset"], "question_id": row["question_id"]}) for row in rows]
    return {
        "settings": dict(settings),
        "costs": asdict(costs),
        "devices_in_theory": num_devices,
        "bootstrap": {"resamples": RESAMPLES, "seed": BOOTSTRAP_SEED, "resampled": "prompts, within each data set"},
        "samples": len(done),
        "failed": [key | {"error": row["error"]} for row, key in keyed if "error" in row],
        "baseline_failed": [key | {"error": row["baseline_error"]} for row, key in keyed if "baseline_error" in row],
        "first_differences": [key | row["first_difference"] for row, key in keyed if row.get("first_difference")],
        "overall": aggregate(done, costs),
        "datasets": {name: aggregate(group, costs) for name, group in by_set.items()},
    }


def aggregate(rows: Sequence[Row], costs: Costs) -> dict[str, Any]:
    """Sums, metrics (pooled and mean, with intervals) and distributions of some finished rows."""
    picks = bootstrap_picks([row["dataset"] for row in rows])
    estimates: dict[str, Any] = {}
    for metric in METRICS:
        estimates |= estimate(metric, rows, costs, picks)
    verified, accepted = (_summed_lists(rows, name) for name in ("verified_by_fill", "accepted_by_fill"))
    runs = Counter(length for row in rows for length in row["accepted_runs"])
    return {
        "samples": len(rows),
        "stopped_at_end_token": sum(row["stop_reason"] == "eos" for row in rows),
        "without_cycles": sum(row["decode_loop_steps"] == 0 for row in rows),  # the prefill's token was the last
        "compared_with_baseline": sum(row["equal_to_baseline"] is not None for row in rows),
        "equal_to_baseline": sum(row["equal_to_baseline"] is True for row in rows),
        "totals": {name: sum(row[name] for row in rows) for name in SUMMED},
        **estimates,
        "equivalent_accept_length_iid": closed_form(estimates["alpha_pooled"], len(verified), costs),
        "verified_by_fill": verified,
        "accepted_by_fill": accepted,
        "alpha_by_fill": [
            alpha(hits, tries) if tries else None for hits, tries in zip(accepted, verified, strict=True)
        ],
        "accepted_run_lengths": [runs[length] for length in range(max(runs, default=-1) + 1)],  # index: length
        "stage_sec": _summed_lists(rows, "stage_sec"),
    }


def _summed_lists(rows: Sequence[Row], name: str) -> list:
    return [sum(values) for values in zip(*(row[name] for row in rows), strict=True)]


def bootstrap_picks(datasets: Sequence[str]) -> np.ndarray:
    """Row indices of every resample, [RESAMPLES, N]: as many rows of each data set as there are, with replacement."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    names = np.array(datasets)
    parts = [
        rng.choice(np.flatnonzero(names == name), (RESAMPLES, np.count_nonzero(names == name)))
        for name in dict.fromkeys(datasets)
    ]
    return np.concatenate(parts, axis=1) if parts else np.zeros((RESAMPLES, 0), dtype=int)


class Estimate(NamedTuple):
    """A metric of summed counts, and the same of each bootstrap resample of the prompts."""

    value: float
    resampled: np.ndarray  # [R]; empty where there are too few prompts to tell

    @property
    def ci95(self) -> list[float] | None:
        return interval(self.resampled)

    def minus(self, other: Estimate) -> Estimate:
        """The difference from an estimate on the same prompts and resamples."""
        return Estimate(self.value - other.value, self.resampled - other.resampled)

    def verdict(self, larger: str, smaller: str) -> str:
        """What a difference comes to: one of the words, where its interval leaves out 0."""
        if self.ci95 is None:
            return "no interval"
        low, high = self.ci95
        return larger if low > 0 else smaller if high < 0 else "cannot be told"

    def __format__(self, form: str) -> str:
        """For a table, each number in that form; "+.2f": "+0.15 [-0.02, +0.31]"."""
        bounds = "" if self.ci95 is None else f" [{', '.join(format(bound, form) for bound in self.ci95)}]"
        return f"{self.value:{form}}{bounds}"


def pooled(formula: Callable[..., Any], counts: np.ndarray, picks: np.ndarray) -> Estimate:
    """A formula of counts [columns, N], summed over all prompts, and over the picks [R, N] of each resample."""
    enough = counts.shape[1] > 1
    with np.errstate(divide="ignore", invalid="ignore"):
        value, resampled = formula(*counts.sum(axis=1)), formula(*counts[:, picks].sum(axis=2))
    return Estimate(value, resampled if enough else np.array([]))


def estimate(metric: Metric, rows: Sequence[Row], costs: Costs, picks: np.ndarray) -> dict[str, Any]:
    """A metric over rows: pooled and mean, each with its 95% interval; None where no row has the counts.

    Rows that lack a count (no baseline) are left out of both; rows whose denominator is 0, of the mean.
    """
    counts = np.stack([_numbers(rows, name) for name in metric.columns])  # [columns, N]
    usable = ~np.isnan(counts).any(axis=0)
    counts = np.where(usable, counts, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = metric.formula(costs, *counts)
        defined = np.isfinite(values)
        values = np.where(defined, values, 0.0)
        mean = Estimate(
            values.sum() / np.float64(defined.sum()), values[picks].sum(axis=1) / defined[picks].sum(axis=1)
        )
    estimates = {"pooled": pooled(partial(metric.formula, costs), counts, picks), "mean": mean}
    enough = {"pooled": usable.sum() > 1, "mean": defined.sum() > 1}
    result: dict[str, Any] = {}
    for kind, found in estimates.items():
        result[f"{metric.name}_{kind}"] = _number(found.value)
        result[f"{metric.name}_{kind}_ci95"] = found.ci95 if enough[kind] else None
    return result


def interval(resampled: np.ndarray) -> list[float] | None:
    """The middle 95% of resampled values [R]; None when none is defined."""
    finite = resampled[np.isfinite(resampled)]
    return [float(bound) for bound in np.percentile(finite, [2.5, 97.5])] if finite.size else None


# What an entry of `head_results` takes from its run's settings.
RESULT_SETTINGS = (
    "label",
    "temperature",
    "draft_top_k",
    "draft_chain",
    "stage_sizes",
    "placement",
    "device",
    "dtype",
    "max_new_tokens",
    "top_k",
    "top_p",
    "seed",
)
HEAD_SETTINGS = ("method", "head", "head_sha256", "num_spec_layers", "target", "target_fingerprint")


def head_results(summaries: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What one head reached in all its runs: in `results` an entry for each data set of each run, flat.

    settings: of any run of this head; the summaries of other heads and targets are left out.
    """
    head = {name: settings[name] for name in HEAD_SETTINGS}
    results = []
    for summary in summaries:
        run = summary["settings"]
        if any(run.get(name) != value for name, value in head.items()):
            continue
        shared = {name: run.get(name) for name in RESULT_SETTINGS} | {"num_stages": len(run["stage_sizes"])}
        names = data_set_order(summary["datasets"])
        results += [{"dataset": name} | shared | summary["datasets"][name] for name in names]
    return head | {"results": results}


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def results_line(summary: Mapping[str, Any]) -> str:
    """The main figures of a run in one line, pooled."""
    part = summary["overall"]
    figures = [
        f"{part['samples']} prompts",
        f"alpha {_with_interval(part, 'alpha_pooled')}",
        f"L_acc {_with_interval(part, 'equivalent_accept_length_pooled')}",
        f"theory {_times(part['theoretical_speedup_pooled'])}",
    ]
    if part["speedup_vs_baseline_pooled"] is not None:
        figures.append(f"wall-clock {_times(part['speedup_vs_baseline_pooled'])}")
        figures.append(f"ideal {_times(part['ideal_speedup_vs_baseline_pooled'])}")
    if part["compared_with_baseline"]:
        figures.append(f"{part['equal_to_baseline']}/{part['compared_with_baseline']} equal to the baseline")
    return f"{summary['settings']['label']}: {', '.join(figures)}"


def profile_table(part: Mapping[str, Any]) -> str:
    """Where the time of the cycles went: a line for the head, each stage, the verification, and the rollbacks."""
    totals = part["totals"]
    timings = Timings(
        decode=totals["decode_wall_sec"],
        stages=part["stage_sec"],
        draft=totals["draft_sec"],
        verify=totals["verify_sec"],
        ideal_decode=totals["ideal_decode_wall_sec"],
        rollbacks=totals["rollbacks"],
        rollback=totals["rollback_sec"],
    )
    return time_table(timings, totals["decode_loop_steps"])


def data_set_order(names: Iterable[str]) -> list[str]:
    """The official sets in the order of the paper's tables, then the others."""
    rank = {name: index for index, name in enumerate(OFFICIAL_SETS)}
    return sorted(set(names), key=lambda name: (rank.get(name, len(rank)), name))


def markdown(summaries: Sequence[Mapping[str, Any]]) -> str:
    """All summaries as Markdown: one pair of tables for each target and its settings."""
    text = [
        "Cells are theory / wall-clock, both speed-ups over the target alone, pooled. Theory counts cycles and takes "
        "a device a stage and one for the head. Wall-clock is measured; the headings say where the stages ran."
    ]
    ordered = sorted(summaries, key=lambda summary: (_heading(summary), summary["settings"]["label"]))
    for heading, group in groupby(ordered, key=_heading):
        group = list(group)
        names = data_set_order(name for summary in group for name in summary["datasets"])
        text += [f"## {heading}", _speedup_table(group, names), _detail_table(group, names)]
    return "\n\n".join(text) + "\n"


def _heading(summary: Mapping[str, Any]) -> str:
    settings = summary["settings"]
    sampling = f"top-k {settings['top_k']}, top-p {settings['top_p']:g}, seed {settings['seed']}"
    return (
        f"{settings['target']}, {settings['dtype']}, {settings['device']}, "
        f"{settings['placement']}, at most {settings['max_new_tokens']} new tokens, {sampling}"
    )


def _speedup_table(summaries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    lines = []
    for summary in summaries:
        parts = [summary["overall"], *(summary["datasets"].get(name) for name in names)]
        lines.append([summary["settings"]["label"], *map(_speedup_cell, parts)])
    return markdown_table(["method", "overall", *(name.replace("_", " ") for name in names)], lines)


def _speedup_cell(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "–"
    return f"{_times(part['theoretical_speedup_pooled'])} / {_times(part['speedup_vs_baseline_pooled'])}"


def _detail_table(summaries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    heads = [
        "method",
        "devices",
        "data set",
        "prompts",
        "new tokens",
        "alpha",
        "L_acc",
        "tokens/s",
        "ideal",
        "equal ids",
    ]
    lines = []
    for summary in summaries:
        parts = {"overall": summary["overall"], **summary["datasets"]}
        for name in ("overall", *names):
            if name not in parts:
                continue
            part = parts[name]
            compared = part["compared_with_baseline"]
            lines.append(
                [
                    summary["settings"]["label"],
                    str(summary["devices_in_theory"]),
                    name,
                    str(part["samples"]),
                    str(part["totals"]["new_tokens"]),
                    _with_interval(part, "alpha_pooled"),
                    _with_interval(part, "equivalent_accept_length_pooled"),
                    _decimal(part["pipeline_decode_tok_s_pooled"]),
                    _times(part["ideal_speedup_vs_baseline_pooled"]),
                    f"{part['equal_to_baseline']}/{compared}" if compared else "–",
                ]
            )
    return markdown_table(heads, lines)


def _decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _with_interval(part: Mapping[str, Any], name: str) -> str:
    bounds = part[f"{name}_ci95"]
    return _decimal(part[name]) + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")
