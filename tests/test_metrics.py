"""Metrics, summaries, tables and plots, from rows alone."""

import json
import math
import time

import numpy as np
import pytest

from decoding.metrics import (
    iid_accept_length,
    spd_costs,
)
from decoding.result import GenerationResult
from evaluation.files import MP_PREFIX, RowLog, RunFiles, read_summaries
from evaluation.metrics import (
    METRICS,
    aggregate,
    bootstrap_picks,
    compare_with_baseline,
    failed_row,
    first_difference,
    head_results,
    is_whole,
    markdown,
    profile_table,
    results_line,
    sample_row,
    summarise,
)
from evaluation.plots import plot_summary
from evaluation.prompts import Sample
from pipeline_inference import LocalExecutor
from script_utils import write_json
from tests.tiny import hf_greedy, oracle, random_prompt, scripted_decoder, tiny_target
from timeline import Timings

SETTINGS = {
    "target": "target",
    "dtype": "float32",
    "device": "a CPU",
    "max_new_tokens": 12,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "temperature": 0.0,
    "label": "SPD head, n = 4, W = 1, T = 0",
    "placement": "all stages on one device",
}
COSTS = spd_costs((5, 5, 5, 5), 10)  # a head of two stages' depth: a cycle is half a target step


def sample(dataset="a", question_id=1):
    return Sample(dataset, question_id, "chat", (5, 17, 3), "a prompt")


def result(tokens, cycles, accepted, *, decode, ideal, stop="length", fills=(0, 0, 0, 1)):
    """A generation whose drafts were all made at full pipeline, unless `fills` spreads them."""
    flags = [True] + [index < accepted for index in range(tokens)]
    return GenerationResult(
        stage_sizes=(5, 5, 5, 5),
        tokens=list(range(tokens + 1)),
        accepted=flags,
        cycles=cycles,
        verified_by_fill=[tokens * share for share in fills],
        accepted_by_fill=[accepted * share for share in fills],
        stop_reason=stop,
        timings=Timings(
            prefill=0.5,
            decode=decode,
            stages=[1.0, 2.0, 3.0, 4.0],
            draft=0.25,
            verify=0.75,
            ideal_decode=ideal,
            rollbacks=2,
            rollback=0.125,
        ),
    )


def hand_made_rows():
    """Two data sets of two samples each; the numbers are chosen so that pooled and mean values differ."""
    table = [  # data set, id, new tokens, cycles, accepted, seconds, ideal seconds, the baseline's tokens and seconds
        ("a", 1, 10, 20, 8, 4.0, 2.0, 10, 5.0),
        ("a", 2, 30, 40, 15, 6.0, 3.0, 30, 15.0),
        ("b", 1, 20, 20, 20, 5.0, 2.5, 20, 5.0),
        ("b", 2, 40, 120, 10, 15.0, 12.5, 40, 25.0),
    ]
    rows = []
    for dataset, question_id, tokens, cycles, accepted, decode, ideal, base_tokens, base_seconds in table:
        row = sample_row(
            sample(dataset, question_id), result(tokens, cycles, accepted, decode=decode, ideal=ideal), COSTS
        )
        baseline = {"new_tokens": base_tokens, "decode_wall_sec": base_seconds, "output_ids": row["output_ids"]}
        rows.append(compare_with_baseline(row, baseline, COSTS, same_draws=True))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def test_metrics_of_one_row():
    """Guards against a metric with the wrong numerator or denominator; every value is worked out by hand."""
    row = hand_made_rows()[0]
    assert {metric.name: row[metric.name] for metric in METRICS} == {
        "alpha": 8 / 10,
        "acceptance_rate": 10 / 20,
        "equivalent_accept_length": 4 * 10 / 20,
        "theoretical_speedup": 10 / 20 * 2,  # a cycle is half a step of the target
        "prefill_tok_s": 3 / 0.5,
        "pipeline_decode_tok_s": 10 / 4.0,
        "ideal_decode_tok_s": 10 / 2.0,
        "speedup_vs_baseline": 5.0 / 4.0,
        "ideal_speedup_vs_baseline": 5.0 / 2.0,
    }
    assert (row["prefill_sec"], row["decode_wall_sec"], row["wall_time_sec"]) == (0.5, 4.0, 4.5)
    assert (row["stage_sec"], row["draft_sec"], row["verify_sec"]) == ([1, 2, 3, 4], 0.25, 0.75)
    assert (row["rollbacks"], row["rollback_sec"], row["question"]) == (2, 0.125, "a prompt")
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(("sizes", "spec_layers"), [((5, 5, 5, 5), 2), ((5, 5, 5, 5), 10), ((2, 5, 3), 4), ((7,), 0)])
def test_costs_agree_with_the_decoders_own_figures(sizes, spec_layers):
    """Guards against two definitions of L_acc or of the theoretical speed-up, and splits taken to be even."""
    costs = spd_costs(sizes, spec_layers)
    done = GenerationResult(sizes, list(range(31)), [True] * 31, 44, [30], [12])
    row = sample_row(sample(), done, costs)
    assert row["equivalent_accept_length"] == pytest.approx(done.equivalent_accept_length)
    assert row["theoretical_speedup"] == pytest.approx(done.theoretical_speedup(spec_layers))
    assert row["alpha"] == done.alpha
    assert costs.factor == pytest.approx(sum(sizes) / max(sizes))


def test_speed_up_compares_speeds_where_lengths_differ():
    """Guards against dividing the seconds of outputs that differ in length (sampling, rounding)."""
    row = sample_row(sample(), result(10, 20, 8, decode=4.0, ideal=2.0), COSTS)
    row = compare_with_baseline(
        row, {"new_tokens": 40, "decode_wall_sec": 8.0, "output_ids": [1]}, COSTS, same_draws=False
    )
    assert row["speedup_vs_baseline"] == (10 / 4.0) / (40 / 8.0)
    assert row["equal_to_baseline"] is None  # sampled outputs are not compared
    assert row["first_difference"] is None


def test_a_failed_baseline_leaves_its_error_and_no_speed_up():
    """Guards against a run that dies with its baseline, or a speed-up over nothing."""
    row = sample_row(sample(), result(10, 20, 8, decode=4.0, ideal=2.0), COSTS)
    row = compare_with_baseline(row, failed_row(sample(), MemoryError("full")), COSTS, same_draws=True)
    assert row["baseline_error"] == "MemoryError: full"
    assert row["speedup_vs_baseline"] is None
    assert row["alpha"] == 0.8


def test_end_token_of_the_prefill_gives_no_metrics():
    """Guards against a division by zero, or a zero that pulls means down, when the first token ends the text."""
    row = sample_row(sample(), result(0, 0, 0, decode=0.0, ideal=0.0, stop="eos"), COSTS)
    assert {row[metric.name] for metric in METRICS} == {None, 6.0}
    assert row["prefill_tok_s"] == 6.0
    assert row["accepted_runs"] == []
    part = aggregate([*hand_made_rows(), row], COSTS)
    assert (part["samples"], part["without_cycles"], part["stopped_at_end_token"]) == (5, 1, 1)
    assert part["acceptance_rate_mean"] == pytest.approx((0.5 + 0.75 + 1 + 1 / 3) / 4)


@pytest.mark.parametrize("end", [2, 7, 8, 9])
@pytest.mark.parametrize("width", [1, 3])
def test_an_end_token_in_the_window_is_not_over_counted(end, width):
    """Guards against counting the drafts after the end token, which were in flight but never verified."""
    target, prompt = tiny_target("llama"), random_prompt(5)
    tokens = hf_greedy(target.model, prompt, 40)
    end = next(index for index in range(end, 40) if tokens[index] not in tokens[:index])
    right = oracle(prompt + tokens, width=width)  # every draft is right: the pipeline is full when the end comes
    decoder = scripted_decoder(target, (1, 1, 1, 1), prompt, right, eos_token_ids=[tokens[end]], draft_top_k=width)
    row = sample_row(Sample("a", 1, "chat", tuple(prompt)), decoder.generate(prompt, 30), spd_costs((1, 1, 1, 1), 1))
    assert row["stop_reason"] == "eos"
    assert row["output_ids"] == tokens[: end + 1]
    assert row["new_tokens"] == row["n_verified"] == row["n_accepted"] == end  # the prefill's token is not counted
    assert row["accepted_runs"] == [end]
    assert row["decode_loop_steps"] == end + 3  # filling the pipeline, then a token a cycle


@pytest.mark.parametrize("width", [1, 3])
def test_rollbacks_are_counted_and_timed(width, monkeypatch):
    """Guards against a profile that does not show what rejections cost, or counts the accepted drafts among them."""
    target, prompt = tiny_target("llama"), random_prompt(5)
    tokens = hf_greedy(target.model, prompt, 20)
    dropped = []
    roll_back = LocalExecutor.roll_back

    def slow(self, dead):
        dropped.append(dead)
        time.sleep(0.002)
        roll_back(self, dead)

    monkeypatch.setattr(LocalExecutor, "roll_back", slow)
    misses = {8, 11, 20}  # positions whose drafts are all wrong
    rank = lambda position: -1 if position in misses else 0  # noqa: E731
    decoder = scripted_decoder(
        target, (1, 1, 1, 1), prompt, oracle(prompt + tokens, rank=rank, width=width), draft_top_k=width
    )
    row = sample_row(sample(), decoder.generate(prompt, 20), spd_costs((1, 1, 1, 1), 1))
    assert row["n_verified"] - row["n_accepted"] == 3
    if width == 1:
        assert row["rollbacks"] == 3
    assert row["rollbacks"] == len(dropped)  # a tree also drops the candidates that lost
    assert row["rollback_sec"] > 0.002 * len(dropped)

    right = scripted_decoder(target, (1, 1, 1, 1), prompt, oracle(prompt + tokens))
    timings = right.generate(prompt, 20).timings
    assert (timings.rollbacks, timings.rollback) == (0, 0.0)


def test_accepted_runs_are_cut_by_rejections():
    """Guards against runs that are joined, lost at the end, or shifted by the prefill's token."""
    for flags, runs in (([True, True, False, False, True], [2, 0, 1]), ([False], [0, 0])):
        done = GenerationResult((1,), accepted=[True, *flags], verified_by_fill=[len(flags)])
        assert done.accepted_runs == runs
    assert GenerationResult((1,), accepted=[True]).accepted_runs == []
    row = sample_row(sample(), result(10, 20, 8, decode=4.0, ideal=2.0), COSTS)
    assert row["accepted_runs"] == [8, 0, 0]
    assert sum(row["accepted_runs"]) == row["n_accepted"]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 4, 3], (1, 2, 4)),
        ([1, 2], [1, 2, 3], (2, None, 3)),
        ([1, 2], [1], (1, 2, None)),
    ],
)
def test_first_difference(ours, theirs, expected):
    """Guards against a prefix that counts as equal, and a position that is one off."""
    names = ("position", "token", "baseline_token")
    assert first_difference(ours, theirs) == (expected and dict(zip(names, expected, strict=True)))


def test_rows_of_another_prompt_or_with_an_error_are_not_whole():
    """Guards against resuming with the row of an edited question, or never trying a failed sample again."""
    row = hand_made_rows()[0]
    assert is_whole(row, sample())
    assert not is_whole(row, Sample("a", 1, "chat", (5, 17, 4)))
    assert not is_whole(failed_row(sample(), ValueError("x")), sample())
    assert not is_whole(row | {"baseline_error": "x"}, sample())


# ---------------------------------------------------------------------------------------------------------------------
# Summaries
# ---------------------------------------------------------------------------------------------------------------------


def test_summary_of_a_hand_made_per_sample_file(tmp_path):
    """Guards against pooled and mean values that are mixed up, wrong sums, and data sets that run into each other."""
    path = tmp_path / "per_sample.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in hand_made_rows()))
    summary = summarise(RowLog(path, tmp_path / "run.json").read().values(), SETTINGS, COSTS, 5)
    overall, first, second = summary["overall"], summary["datasets"]["a"], summary["datasets"]["b"]

    assert (overall["samples"], first["samples"], second["samples"]) == (4, 2, 2)
    assert overall["totals"]["new_tokens"] == 100
    assert overall["totals"]["decode_wall_sec"] == 30.0
    assert overall["totals"]["prefill_sec"] == 2.0
    assert overall["totals"]["prompt_tokens"] == 12
    assert overall["alpha_pooled"] == 53 / 100
    assert overall["alpha_mean"] == pytest.approx((0.8 + 0.5 + 1.0 + 0.25) / 4)
    assert overall["acceptance_rate_pooled"] == 100 / 200
    assert overall["acceptance_rate_mean"] == pytest.approx((0.5 + 0.75 + 1 + 1 / 3) / 4)
    assert overall["equivalent_accept_length_pooled"] == 4 * 100 / 200
    assert overall["theoretical_speedup_pooled"] == 100 / 200 * 2
    assert overall["prefill_tok_s_pooled"] == 12 / 2.0
    assert overall["pipeline_decode_tok_s_pooled"] == 100 / 30
    assert (overall["totals"]["rollbacks"], overall["totals"]["rollback_sec"]) == (8, 0.5)
    assert overall["speedup_vs_baseline_pooled"] == 50 / 30
    assert overall["speedup_vs_baseline_mean"] == pytest.approx((5 / 4 + 15 / 6 + 5 / 5 + 25 / 15) / 4)
    assert overall["ideal_speedup_vs_baseline_pooled"] == 50 / 20
    assert overall["equivalent_accept_length_iid"] == pytest.approx(4 / (1 + 3 * 0.47))
    assert overall["verified_by_fill"] == [0, 0, 0, 100]
    assert overall["alpha_by_fill"] == [None, None, None, 0.53]
    assert overall["stage_sec"] == [4, 8, 12, 16]
    assert overall["accepted_run_lengths"][:1] == [2 + 15 + 0 + 30]
    assert [overall["accepted_run_lengths"][length] for length in (8, 10, 15, 20)] == [1, 1, 1, 1]
    assert first["alpha_pooled"] == 23 / 40
    assert second["speedup_vs_baseline_pooled"] == 30 / 20
    assert (overall["compared_with_baseline"], overall["equal_to_baseline"]) == (4, 4)
    assert summary["devices_in_theory"] == 5
    json.dumps(summary, allow_nan=False)


def test_order_of_the_rows_does_not_matter():
    """Guards against a summary that depends on which worker was faster, also in its random intervals."""
    rows = hand_made_rows()
    summaries = [summarise(order, SETTINGS, COSTS, 5) for order in (rows, rows[::-1], [rows[i] for i in (2, 0, 3, 1)])]
    assert json.dumps(summaries[0]) == json.dumps(summaries[1]) == json.dumps(summaries[2])


def test_failed_samples_are_listed_and_take_no_part():
    """Guards against errors that vanish from the summary, or count as zeros."""
    rows = hand_made_rows()
    failed = [failed_row(sample("b", 3), RuntimeError("out of memory\nmore")), failed_row(sample("c", 1), KeyError())]
    rows[0] |= {"baseline_error": "RuntimeError: x"}
    summary = summarise(rows + failed, SETTINGS, COSTS, 5)
    assert [(entry["dataset"], entry["question_id"], entry["error"]) for entry in summary["failed"]] == [
        ("b", 3, "RuntimeError: out of memory"),
        ("c", 1, "KeyError: KeyError"),
    ]
    assert summary["baseline_failed"] == [{"dataset": "a", "question_id": 1, "error": "RuntimeError: x"}]
    assert summary["samples"] == summary["overall"]["samples"] == 4
    assert set(summary["datasets"]) == {"a", "b"}


def test_first_differences_are_listed():
    """Guards against a lossless claim that hides where the ids part."""
    row = hand_made_rows()[2]
    ids = [*row["output_ids"][:3], 99, *row["output_ids"][4:]]
    baseline = {"new_tokens": 20, "decode_wall_sec": 5.0, "output_ids": ids}
    rows = [*hand_made_rows()[:2], compare_with_baseline(row, baseline, COSTS, same_draws=True)]
    summary = summarise(rows, SETTINGS, COSTS, 5)
    assert summary["first_differences"] == [
        {"dataset": "b", "question_id": 1, "position": 3, "token": 3, "baseline_token": 99}
    ]
    assert (summary["overall"]["equal_to_baseline"], summary["overall"]["compared_with_baseline"]) == (2, 3)


def test_without_a_baseline_there_are_no_speed_ups():
    """Guards against a baseline that is taken to be infinitely fast, or missing rows that count."""
    bare = sample_row(sample("b", 9), result(10, 20, 8, decode=4.0, ideal=2.0), COSTS)
    part = aggregate([bare], COSTS)
    assert part["speedup_vs_baseline_pooled"] is part["ideal_speedup_vs_baseline_mean"] is None
    assert part["compared_with_baseline"] == 0
    mixed = aggregate([*hand_made_rows(), bare], COSTS)  # a pair counts on both sides or on none
    assert mixed["speedup_vs_baseline_pooled"] == pytest.approx(50 / 30)


@pytest.mark.parametrize(("stages", "expected"), [(4, 2.5), (8, 10 / 3), (16, 4.0)])
def test_iid_accept_length(stages, expected):
    """Guards against a cost of a rejection other than n cycles (method.md section 7 has these numbers)."""
    assert iid_accept_length(0.8, stages) == pytest.approx(expected)
    assert iid_accept_length(1, stages) == stages
    assert iid_accept_length(0, stages) == 1


def test_iid_accept_length_is_what_random_acceptance_gives():
    """Guards against a check that does not describe this pipeline: cycles are counted draft by draft."""
    rng, stages, alpha, drafts = np.random.default_rng(0), 6, 0.7, 200_000
    rejected = int((rng.random(drafts) >= alpha).sum())
    cycles = drafts + (stages - 1) * rejected  # a token a cycle; after a rejection n cycles until the next
    assert stages * drafts / cycles == pytest.approx(iid_accept_length(alpha, stages), rel=0.01)


def test_intervals_resample_prompts_within_their_data_set():
    """Guards against resampling across data sets, whose sizes are the study's choice and not chance."""
    rows = []
    for dataset, accepted in (("a", 10), ("b", 20)):
        for question_id in range(5):
            done = result(20, 20, accepted, decode=1.0, ideal=1.0)
            rows.append(sample_row(sample(dataset, question_id), done, COSTS))
    part = aggregate(rows, COSTS)
    assert part["alpha_mean_ci95"] == part["alpha_pooled_ci95"] == [0.75, 0.75]  # no spread within a data set
    picks = bootstrap_picks([row["dataset"] for row in rows])
    assert picks.shape == (1000, 10)
    assert (picks[:, :5] < 5).all()
    assert (picks[:, 5:] >= 5).all()


def test_interval_has_the_width_that_theory_gives():
    """Guards against an interval of another level, or of the samples instead of their mean."""
    rng = np.random.default_rng(1)
    rows = [
        sample_row(sample("a", index), result(100, 100, int(hits), decode=1.0, ideal=1.0), COSTS)
        for index, hits in enumerate(rng.binomial(100, 0.6, 200))
    ]
    low, high = aggregate(rows, COSTS)["alpha_mean_ci95"]
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.6 * 0.4 / 100 / 200), rel=0.15)
    assert low < 0.6 < high


def test_one_sample_has_no_interval():
    """Guards against an interval of width 0 that looks like certainty."""
    part = aggregate(hand_made_rows()[:1], COSTS)
    assert part["alpha_pooled"] == part["alpha_mean"] == 0.8
    assert part["alpha_pooled_ci95"] is part["alpha_mean_ci95"] is None


# ---------------------------------------------------------------------------------------------------------------------
# Tables and plots
# ---------------------------------------------------------------------------------------------------------------------


def test_table_has_the_papers_layout():
    """Guards against columns out of order, theory and wall-clock swapped, and runs of two targets in one table."""
    rows = hand_made_rows()
    names = {"a": "humaneval", "b": "mt_bench"}
    rows = [row | {"dataset": names[row["dataset"]]} for row in rows]
    summary = summarise(rows, SETTINGS, COSTS, 5)
    bare = summarise(rows[:2], SETTINGS | {"label": "SPD head, n = 4, W = 4, T = 0.7"}, COSTS, 5)
    for part in (bare["overall"], *bare["datasets"].values()):
        part["speedup_vs_baseline_pooled"] = None
    other = summarise(rows, SETTINGS | {"target": "another", "placement": "a rank a stage"}, COSTS, 6)
    text = markdown([summary, other, bare])
    first, second = text.split("\n## ")[1:]
    sampling = "at most 12 new tokens, top-k 0, top-p 1, seed 0\n"
    assert first.startswith(f"another, float32, a CPU, a rank a stage, {sampling}")
    assert second.startswith(f"target, float32, a CPU, all stages on one device, {sampling}")
    assert "| SPD head, n = 4, W = 1, T = 0 | 1.00x / 1.67x |" in first
    assert "| SPD head, n = 4, W = 1, T = 0 | 6 | overall | 4 |" in first
    assert second.split("\n\n")[1].splitlines() == [
        "| method | overall | mt bench | humaneval |",
        "| --- | --- | --- | --- |",
        "| SPD head, n = 4, W = 1, T = 0 | 1.00x / 1.67x | 0.86x / 1.50x | 1.33x / 2.00x |",
        "| SPD head, n = 4, W = 4, T = 0.7 | 1.33x / – | – | 1.33x / – |",
    ]
    detail = second.split("\n\n")[2].splitlines()
    assert len(detail) == 2 + 3 + 2
    assert detail[3].startswith(
        "| SPD head, n = 4, W = 1, T = 0 | 5 | mt_bench | 2 | 60 | 0.50 [0.25, 1.00] | 1.71 [1.33, 4.00] |"
    )
    assert detail[3].endswith("| 3.00 | 2.00x | 2/2 |")


def test_ranks_and_one_device_share_a_folder(tmp_path):
    """Guards against a run over ranks that overwrites the same run on one device, or its table."""
    ours, ranks = RunFiles(tmp_path, "head__target__n2"), RunFiles(tmp_path, "head__target__n2", MP_PREFIX)
    first, second = ({"settings": {"placement": name}, "overall": {}, "datasets": {}} for name in ("one", "ranks"))
    write_json(ours.summary, first)
    write_json(ranks.summary, second)
    assert read_summaries(tmp_path) == [first]
    assert read_summaries(tmp_path, ranks.prefix) == [second]
    owner = {"head": "head", "target": "target"}
    paths = [
        path
        for files in (ours, ranks)
        for path in (files.rows.path, files.rows.record, files.plots, files.table, files.results(owner))
    ]
    assert len(set(paths)) == 10
    assert all(path.name.startswith("mp_pipeline_eval__") for path in paths[5:])


def test_a_head_has_one_file_of_results():
    """Guards against results of two heads in one list, and entries that do not say what they were measured with."""
    head = {"method": "spd", "head": "h", "head_sha256": "1", "num_spec_layers": 2, "target_fingerprint": "2"}
    settings = SETTINGS | head | {"draft_top_k": 1, "stage_sizes": [5, 5, 5, 5]}
    summaries = [
        summarise(hand_made_rows(), settings, COSTS, 5),
        summarise(hand_made_rows()[:2], settings | {"draft_top_k": 4, "temperature": 0.7}, COSTS, 5),
        summarise(hand_made_rows(), settings | {"head_sha256": "another"}, COSTS, 5),
    ]
    found = head_results(summaries, settings)
    assert {name: found[name] for name in head} == head
    shown = ("dataset", "temperature", "draft_top_k", "num_stages", "alpha_pooled")
    assert [tuple(entry[name] for name in shown) for entry in found["results"]] == [
        ("a", 0.0, 1, 4, 23 / 40),
        ("b", 0.0, 1, 4, 30 / 60),
        ("a", 0.7, 4, 4, 23 / 40),
    ]
    json.dumps(found, allow_nan=False)


def test_profile_has_a_line_a_stage():
    """Guards against a profile whose lines are not the run's seconds, by cycle."""
    lines = profile_table(summarise(hand_made_rows(), SETTINGS, COSTS, 5)["overall"]).splitlines()
    assert lines[2:] == [
        "| draft | 1.000 | 5.000 |",  # of 200 cycles
        "| stage 0 | 4.000 | 20.000 |",
        "| stage 1 | 8.000 | 40.000 |",
        "| stage 2 | 12.000 | 60.000 |",
        "| stage 3 | 16.000 | 80.000 |",
        "| verify | 3.000 | 15.000 |",
        "| 8 rollbacks | 0.500 | 2.500 |",
        "| all 200 cycles | 30.000 | 150.000 |",
        "| ideal | 20.000 | 100.000 |",
    ]


def test_damaged_summaries_are_named(tmp_path):
    """Guards against a table that fails after hours of a run, over a file of another one."""
    path = RunFiles(tmp_path, "head__target__n2").summary
    path.parent.mkdir()
    for text in ('{"settings": {}', "[]", '{"settings": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"__summary\.json' is no summary of an evaluation: move it away"):
            read_summaries(tmp_path)


def test_results_line():
    """Guards against a console line whose figures are not the summary's."""
    assert results_line(summarise(hand_made_rows()[:1], SETTINGS, COSTS, 5)) == (
        "SPD head, n = 4, W = 1, T = 0: 1 prompts, alpha 0.80, L_acc 2.00, theory 1.00x, wall-clock 1.25x, "
        "ideal 2.50x, 1/1 equal to the baseline"
    )


@pytest.mark.parametrize("kind", ["whole", "no baseline", "one sample", "all failed"])
def test_plots_are_drawn_from_any_summary(tmp_path, kind):
    """Guards against a run that ends in a traceback at its very end: no baseline, no interval, no sample."""
    rows = {
        "whole": hand_made_rows(),
        "no baseline": [sample_row(sample(), result(10, 20, 8, decode=4.0, ideal=2.0), COSTS)] * 2,
        "one sample": hand_made_rows()[:1],
        "all failed": [failed_row(sample(), ValueError("x"))],
    }[kind]
    path = tmp_path / "new" / "plots.png"
    plot_summary(summarise(rows, SETTINGS, COSTS, 5), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["plots.png"]


def test_names_with_dollars_are_drawn(tmp_path):
    """Guards against a data set's name that the plot takes for a formula, so that the run ends in a traceback."""
    rows = [row | {"dataset": r"a$\frac$"} for row in hand_made_rows()]
    plot_summary(summarise(rows, SETTINGS, COSTS, 5), tmp_path / "plots.png")
    assert (tmp_path / "plots.png").is_file()


def test_plotted_bars_are_the_summarys_figures(monkeypatch, tmp_path):
    """Guards against bars in another order than their labels, or heights of another metric."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    plot_summary(summarise(hand_made_rows(), SETTINGS, COSTS, 5), tmp_path / "plots.png")
    speedups, fills, runs, times = drawn[0].axes
    assert [label.get_text() for label in speedups.get_xticklabels()] == ["overall", "a", "b"]
    heights = [round(bar.get_height(), 3) for bar in speedups.patches]
    assert heights == [1.0, 1.333, 0.857, 2.5, 4.0, 2.0, 1.667, 2.0, 1.5]
    assert [bar.get_height() for bar in fills.patches] == [0, 0, 0, 0.53]
    assert sum(bar.get_height() for bar in runs.patches) == sum(len(row["accepted_runs"]) for row in hand_made_rows())
    assert [round(bar.get_height(), 6) for bar in times.patches] == [5, 20, 40, 60, 80, 15]  # ms of 200 cycles
    assert [line.get_ydata()[0] for line in times.lines] == [150, 100]
