"""The comparison: one command from nothing to a report, that goes on where it stopped, and what the report says."""

import json
import re

import numpy as np
import pytest

from baselines import train_baseline
from benchmarks import compare_methods
from benchmarks.comparison_report import Results, claims, results_table, short_name
from benchmarks.published import RANKINGS, published_table, rankings_table, read_published, support
from evaluation.metrics import Estimate
from pipeline_model import Target
from tests.test_train import make_tokenizer, write_language
from tests.tiny import VOCAB, tiny_model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny target, conversations and prompts in its language, a draft vocabulary."""
    folder = tmp_path_factory.mktemp("compare")
    tiny_model("llama", layers=8).save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    write_language(folder / "data.jsonl", [10])
    (folder / "draft.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": list(range(0, VOCAB, 2))}))
    (folder / "data" / "set").mkdir(parents=True)
    lines = [{"question_id": index, "category": "chat", "turns": [f"s{index + 1} 4"]} for index in range(3)]
    (folder / "data" / "set" / "question.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def run(files, work, *more):
    flags = ["--work_dir", work, "--output", work / "REPORT.md", "--base_model_path", files / "target"]
    flags += ["--draft_vocab_json", files / "draft.json", "--data_path", files / "data.jsonl", "--max_length", 64]
    flags += ["--max_steps", 2, "--warmup_steps", 1, "--spd_stages", 2, "--ppsd_stages", 2, "--num_steps", 1, 3]
    flags += ["--mask_token", VOCAB - 1, "--block_size", 3, "--opd_block_size", 3, "--opd_steps", 1]
    flags += ["--draft_top_k", 1, 2, "--data_dir", files / "data", "--datasets", "set", "--prompts_per_dataset", 2]
    flags += ["--max_new_tokens", 8, "--temperature", 0, "--gpus", "cpu", *more]
    return compare_methods.main(compare_methods.build_parser().parse_args(list(map(str, flags))))


def test_one_command_makes_the_report_and_goes_on_where_it_stopped(files, tmp_path, monkeypatch, capsys):
    """Guards the whole comparison: every drafter trained alike, every method evaluated, nothing done twice, a run that
    is stopped in training goes on, and other settings are not mixed in."""
    monkeypatch.setattr("eval.plot_summary", lambda summary, path: None)
    with monkeypatch.context() as patch:
        patch.setattr(train_baseline, "main", lambda args: 143)  # SIGTERM, noted and obeyed
        assert run(files, tmp_path) == 143
    assert not (tmp_path / "REPORT.md").exists()
    assert run(files, tmp_path) == 0
    assert (tmp_path / "docs" / "comparison.png").stat().st_size > 1000
    text = (tmp_path / "REPORT.md").read_text()
    runs = ["autoregressive", "prompt lookup, m = 10", "EAGLE-3, m = 1", "EAGLE-3, m = 3"]
    runs += ["DFlash, B = 3", "DFlash opd, B = 3", "PPSD, n = 2"]
    runs += ["SPD, n = 2, W = 1", "SPD, n = 2, W = 2", "SPD replay, n = 2, W = 1", "SPD replay, n = 2, W = 2"]
    table = text[text.index("## Temperature 0") :].split("\n\n")[1].splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in table[2:]] == runs
    devices = [line.split(" | ")[4] for line in table[2:]]
    assert devices == ["1"] * 6 + ["2"] + ["3"] * 4
    assert all(line.endswith("| 2/2 |") for line in table[2:])
    tokens = {line.split(" | ")[0].strip("| "): line.split(" | ")[2] for line in table[2:]}
    assert tokens["EAGLE-3, m = 1"] == tokens["PPSD, n = 2"] == tokens["SPD, n = 2, W = 1"] != "–"
    assert text.count("python eval.py ") == 6
    assert text.count("python train.py ") == 2
    assert text.count("python baselines/train_baseline.py ") == 4

    capsys.readouterr()
    (tmp_path / "notes.md").write_text("## Reading\n\nWords.")
    monkeypatch.setattr(train_baseline, "main", lambda args: pytest.fail("trained again"))
    assert run(files, tmp_path, "--notes", tmp_path / "notes.md") == 0
    assert "generate" not in capsys.readouterr().err
    again = (tmp_path / "REPORT.md").read_text()
    assert again.replace("## Reading\n\nWords.\n\n", "") == text
    assert run(files, tmp_path, "--report_only") == 0
    assert (tmp_path / "REPORT.md").read_text() == text
    with pytest.raises(ValueError, match="was trained with --max_steps 2, this comparison has 3: choose another"):
        run(files, tmp_path, "--max_steps", 3)


def test_one_pass_of_the_target_serves_all_drafters(files, tmp_path, monkeypatch):
    """Guards --feature_cache: the first training's pass leaves what the others read, each of them other layers."""
    flags = ["--work_dir", tmp_path / "runs", "--base_model_path", files / "target"]
    flags += ["--data_path", files / "data.jsonl", "--draft_vocab_json", files / "draft.json", "--max_length", 64]
    flags += ["--max_steps", 2, "--warmup_steps", 1, "--spd_stages", 2, 4, "--ppsd_stages", 2, "--num_steps", 3]
    flags += ["--feature_cache", tmp_path / "cache", "--mask_token", VOCAB - 1, "--block_size", 3, "--opd_block_size"]
    args = compare_methods.build_parser().parse_args(list(map(str, flags)))
    first, *others = compare_methods.training_commands(args).values()
    assert first.module.main(first.arguments) == 0
    monkeypatch.setattr(Target, "forward", lambda *_: pytest.fail("the target ran"))
    assert len(others) == 6
    assert [command.module.main(command.arguments) for command in others] == [0] * 6


def test_what_cannot_be_compiled_is_not(files, tmp_path):
    """Guards --compile: it reaches every method but the one that runs the library's loop, which would refuse it."""
    flags = ["--work_dir", tmp_path, "--data_path", files / "data.jsonl", "--compile"]
    args = compare_methods.build_parser().parse_args(list(map(str, flags)))
    commands = compare_methods.evaluation_commands(args, ["eagle3", "ppsd-n3", "dflash-b8", "spd-n3", "spd_replay-n3"])
    compiled = {command.flags[1]: "--compile" in command.flags for command in commands}
    assert compiled.pop("prompt_lookup") is False
    assert compiled == dict.fromkeys(["autoregressive", "eagle3", "dflash", "ppsd", "spd"], True)


def test_nothing_to_report_is_one_line(files, tmp_path):
    """Guards against an empty report, and hours of work before a missing file is noticed."""
    with pytest.raises(ValueError, match="has no summaries: run without --report_only"):
        run(files, tmp_path, "--report_only")
    with pytest.raises(ValueError, match=r"notes.md' is no file"):
        run(files, tmp_path / "new", "--notes", tmp_path / "notes.md")
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------------------------------------------------------------
# What the report says
# ---------------------------------------------------------------------------------------------------------------------


def summary(method, label, value, *, stages=1, width=1, chain=0, temperature=0.0, alpha=0.5, recipe=""):
    """A run's summary with one value for every metric, plus or minus 0.1."""
    metrics = ("equivalent_accept_length", "theoretical_speedup", "ideal_speedup_vs_baseline")
    part = {f"{name}_pooled": value for name in metrics} | {"alpha_pooled": alpha}
    part |= {f"{name}_pooled_ci95": [value - 0.1, value + 0.1] for name in metrics}
    part |= {"alpha_pooled_ci95": None if alpha is None else [alpha - 0.01, alpha + 0.01]}
    settings = {"method": method, "label": f"{label}, T = {temperature:g}", "temperature": temperature}
    settings |= {"head": f"{method}{recipe}-n{stages}", "stage_sizes": [1] * stages}
    return {
        "settings": settings | {"draft_top_k": width, "draft_chain": chain},
        "devices_in_theory": stages,
        "costs": {"factor": 1.0, "cycle": 1.0, "chain": 0},
        "overall": part | {"compared_with_baseline": 0, "equal_to_baseline": 0},
    }


def rows(*speedups):
    """A row per prompt, of a method with these speed-ups: its tokens in 100 cycles."""
    shared = {"decode_loop_steps": 100, "n_verified": 100, "ideal_decode_wall_sec": 1.0, "decode_wall_sec": 1.0}
    shared |= {"baseline_new_tokens": 100, "baseline_decode_wall_sec": 1.0}
    return {
        ("set", str(place)): shared | {"new_tokens": 100 * value, "n_accepted": 10 * value}
        for place, value in enumerate(speedups)
    }


RUNS = [
    summary("spd", "SPD a, n = 3, W = 1", 2.0, stages=3, alpha=0.7),
    summary("spd", "SPD b, n = 6, W = 1", 2.3, stages=6, alpha=0.6),
    summary("spd", "SPD b, n = 6, W = 4", 2.35, stages=6, width=4, alpha=0.6),
    summary("ppsd", "PPSD c, n = 3", 2.6, stages=3, alpha=0.65),
    summary("eagle3", "EAGLE-3 d, m = 7", 2.2, chain=7),
    summary("eagle3", "EAGLE-3 d, m = 3", 1.9, chain=3),
    summary("autoregressive", "autoregressive", 1.0, alpha=None),
]


ROWS = {
    "SPD a, n = 3, W = 1": rows(1, 2, 3),
    "SPD b, n = 6, W = 1": rows(1.2, 2.2, 3.2),
    "SPD b, n = 6, W = 4": rows(2.35, 2.3, 2.4),
    "PPSD c, n = 3": rows(2.6, 2.5, 2.7),
    "EAGLE-3 d, m = 7": rows(3.2, 1.9, 1.5),
    "EAGLE-3 d, m = 3": rows(1.9, 1.9, 1.9),
    "autoregressive": rows(1, 1, 1),
}


def results(runs=RUNS, trained=()):
    return Results(runs, dict(trained), {f"{label}, T = 0": found for label, found in ROWS.items()})


def test_claims_are_judged_by_paired_differences():
    """Guards against a claim that is called right because one number is larger than another, against one that is called
    open because the prompts differ among themselves, and against the wrong pair of runs."""
    found = {(c.text, c.run["settings"]["label"]): c.line(results())[1:] for c in claims(results(), 0.0)}
    best = "SPD b, n = 6, W = 4, T = 0"
    theory = "SPD is faster than {}, the best of each, in theory"
    line = found[theory.format("EAGLE-3"), best]
    assert line[:3] == ["0", "SPD, n = 6, W = 4: 2.35", "EAGLE-3, m = 7: 2.20"]
    assert line[3].startswith("+0.15 [")
    assert line[4] == "cannot be told"
    assert found[theory.format("PPSD"), best][4] == "does not hold"
    # The intervals of the two overlap widely, but the deeper one is faster on every prompt.
    deeper = found["a deeper pipeline is faster, in theory", "SPD b, n = 6, W = 1, T = 0"]
    assert deeper[3:] == ["+0.20 [+0.20, +0.20]", "holds"]
    assert ("a draft tree is faster than a chain, in theory", best) in found
    assert not any("prompt lookup" in text for text, _ in found)  # was not run
    assert Estimate(2.0, np.array([])).verdict("holds", "does not hold") == "no interval"
    assert not list(claims(results(), 1.0))


def test_ways_of_training_are_told_apart():
    """Guards against a recipe's run that is shown, or compared, as the plain one."""
    plain, learned = (
        summary("spd", "SPD x, n = 3, W = 1", value, stages=3, recipe=recipe)
        for value, recipe in ((2.0, ""), (2.2, "_replay"))
    )
    learned["settings"]["label"] = "SPD y, n = 3, W = 1, compiled, T = 0"
    found = Results([learned, plain], {}, {})
    assert [short_name(run) for run in found.summaries] == ["SPD, n = 3, W = 1", "SPD replay, n = 3, W = 1"]
    (claim,) = (claim for claim in claims(found, 0.0) if "learning" in claim.text)
    assert (claim.run, claim.other) == (learned, plain)
    assert not any("deeper" in claim.text for claim in claims(found, 0.0))


def test_published_figures():
    """Guards the figures of others beside ours: a few cells as published, and in how many settings rankings hold."""
    source, published = read_published()
    assert "not measured here" in source
    assert len(published) == 64
    lines = published_table(published).splitlines()
    assert "| Default training mix | Qwen3.5-4B | 0 | SPD, n = 8, L_s = 3 | 3.39 / 2.53 |" in lines[2 + 8]
    assert "| Open-PerfectBlend" in lines[-1]
    by_text = {ranking.text: ranking for ranking in RANKINGS}
    best = by_text["SPD is faster than EAGLE-3, the best of each"]
    assert support(published, best, "theory") == (7, 8)  # all but Qwen3.5-9B, Open-PerfectBlend, T = 0: 3.86, 4.34
    assert support(published, best, "wall-clock") == (8, 8)
    assert support(published, by_text["SPD: 16 stages are faster than 8"], "wall-clock") == (0, 4)
    assert "| SPD: 16 stages are faster than 8 | 4 of 4 | 0 of 4 |" in rankings_table(published)


def test_the_table_has_what_a_reader_needs():
    """Guards the columns and their order, and a drafter's size and training beside its figures."""
    trained = {"spd-n3": {"head_parameters": 12_340_000, "supervised_tokens": 56_789, "training_seconds": 1234.5}}
    lines = results_table(results(trained=trained), 0.0).splitlines()
    assert re.split(r" \| ", lines[0].strip("| ")) == [
        "method",
        "parameters",
        "tokens",
        "seconds",
        "devices",
        "alpha",
        "tau or L_acc",
        "theory",
        "ideal, measured",
        "per device",
        "equal ids",
    ]
    names = [line.split(" | ")[0].strip("| ") for line in lines[2:]]
    assert names == [
        "autoregressive",
        "EAGLE-3, m = 3",
        "EAGLE-3, m = 7",
        "PPSD, n = 3",
        "SPD, n = 3, W = 1",
        "SPD, n = 6, W = 1",
        "SPD, n = 6, W = 4",
    ]
    assert lines[2].split(" | ")[1:6] == ["–", "–", "–", "1", "–"]
    assert lines[6].split(" | ")[1:5] == ["12.3 M", "56,789", "1,234", "3"]
    assert lines[6].split(" | ")[9] == "0.67"  # theory 2.0 on three devices
    assert lines[6].split(" | ")[5:7] == ["0.70 [0.69, 0.71]", "2.00 [1.90, 2.10]"]
