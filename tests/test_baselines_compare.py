"""The comparison: one command from nothing to a report, that goes on where it stopped, and what the report says."""

import json
import re

import pytest

from baselines import train_baseline
from benchmarks import compare_methods
from benchmarks.comparison_report import Cell, Results, claims, results_table, verdict
from pipeline_model import Target
from tests.test_train import make_tokenizer, write_language
from tests.tiny import VOCAB, tiny_model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny target, conversations and prompts in its language, a draft vocabulary."""
    folder = tmp_path_factory.mktemp("compare")
    tiny_model("llama").save_pretrained(folder / "target")
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
    runs = ["autoregressive", "prompt lookup, m = 10", "EAGLE-3, m = 1", "EAGLE-3, m = 3", "PPSD, n = 2"]
    runs += ["SPD, n = 2, W = 1", "SPD, n = 2, W = 2"]
    table = text[text.index("## Temperature 0") :].split("\n\n")[1].splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in table[2:]] == runs
    devices = [line.split(" | ")[3] for line in table[2:]]
    assert devices == ["1", "1", "1", "1", "2", "3", "3"]
    assert all(line.endswith("| 2/2 |") for line in table[2:])
    tokens = {line.split(" | ")[2] for line in table[4:]}
    assert len(tokens) == 1  # every trained drafter's
    assert text.count("python eval.py ") == 5
    assert text.count("python train.py ") == 1
    assert text.count("python baselines/train_baseline.py ") == 2

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
    flags += ["--feature_cache", tmp_path / "cache"]
    args = compare_methods.build_parser().parse_args(list(map(str, flags)))
    first, *others = compare_methods.training_commands(args).values()
    assert first.module.main(first.arguments) == 0
    monkeypatch.setattr(Target, "forward", lambda *_: pytest.fail("the target ran"))
    assert len(others) == 3
    assert [command.module.main(command.arguments) for command in others] == [0, 0, 0]


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


def summary(method, label, value, *, stages=1, width=1, chain=0, temperature=0.0, alpha=0.5):
    """A run's summary with one value for every metric, plus or minus 0.1."""
    metrics = ("equivalent_accept_length", "theoretical_speedup", "ideal_speedup_vs_baseline")
    part = {f"{name}_pooled": value for name in metrics} | {"alpha_pooled": alpha}
    part |= {f"{name}_pooled_ci95": [value - 0.1, value + 0.1] for name in metrics}
    part |= {"alpha_pooled_ci95": None if alpha is None else [alpha - 0.01, alpha + 0.01]}
    settings = {"method": method, "label": f"{label}, T = {temperature:g}", "temperature": temperature}
    settings |= {"head": f"{method}-n{stages}", "stage_sizes": [1] * stages, "draft_top_k": width, "draft_chain": chain}
    return {
        "settings": settings,
        "devices_in_theory": stages,
        "overall": part | {"compared_with_baseline": 0, "equal_to_baseline": 0},
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


def test_claims_are_judged_by_their_intervals():
    """Guards against a claim that is called right because one number is larger than another, and against the wrong
    pair of runs."""
    found = {(c.text, c.run["settings"]["label"]): c.line()[1:] for c in claims(Results(RUNS, {}), 0.0)}
    best = "SPD b, n = 6, W = 4, T = 0"
    theory = "SPD is faster than {}, the best of each, in theory"
    assert found[theory.format("EAGLE-3"), best] == [
        "0",
        "SPD, n = 6, W = 4: 2.35 [2.25, 2.45]",
        "EAGLE-3, m = 7: 2.20 [2.10, 2.30]",
        "undecided: the intervals overlap",
    ]
    assert found[theory.format("PPSD"), best][3] == "does not hold"
    assert found["SPD's drafts are accepted more often than PPSD's", "SPD a, n = 3, W = 1, T = 0"][3] == "holds"
    assert found["a deeper pipeline is faster, in theory", "SPD b, n = 6, W = 1, T = 0"][3] == "holds"
    assert found["a draft tree is faster than a chain, in theory", best][3].startswith("undecided")
    assert not any("prompt lookup" in text for text, _ in found)  # was not run
    assert verdict(Cell(2.0), Cell(1.0, 0.9, 1.1)) == "no intervals"
    assert not list(claims(Results(RUNS, {}), 1.0))


def test_the_table_has_what_a_reader_needs():
    """Guards the columns and their order, and a drafter's size and training beside its figures."""
    trained = {"spd-n3": {"head_parameters": 12_340_000, "supervised_tokens": 56_789}}
    lines = results_table(Results(RUNS, trained), 0.0).splitlines()
    assert re.split(r" \| ", lines[0].strip("| ")) == [
        "method",
        "trained parameters",
        "training tokens",
        "devices",
        "alpha",
        "tau or L_acc",
        "theory",
        "ideal, measured",
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
    assert lines[2].split(" | ")[1:5] == ["–", "–", "1", "–"]
    assert lines[6].split(" | ")[1:6] == ["12.3 M", "56,789", "3", "0.70 [0.69, 0.71]", "2.00 [1.90, 2.10]"]
