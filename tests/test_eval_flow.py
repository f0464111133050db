"""From published files to a table, as a user does it: eval_data/download.py, then eval.py, in a folder of one's own."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import eval
from pipeline_model import save_head
from tests.tiny import save_target, tiny_head, tiny_target

WORDS = "w5 w9 w{}"


@pytest.fixture
def download():
    """The script, loaded from its folder, which is no package."""
    path = Path(eval.__file__).parent / "eval_data" / "download.py"
    spec = importlib.util.spec_from_file_location("download", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["download"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["download"]


def published_files(folder):
    """MT-Bench, GSM8K and HumanEval as their authors publish them, with words that the tiny tokenizer knows."""
    folder.mkdir()
    tables = {
        "question.jsonl": [
            {"question_id": 81 + i, "category": "writing", "turns": [WORDS.format(i % 50), "w1"]} for i in range(80)
        ],
        "test.jsonl": [{"question": WORDS.format(i % 50), "answer": "w1"} for i in range(1319)],
        "HumanEval.jsonl": [
            {"task_id": f"HumanEval/{i}", "prompt": WORDS.format(i % 50), "canonical_solution": "w1"}
            for i in range(164)
        ],
    }
    for name, entries in tables.items():
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.mark.parametrize("place", ["in the folder", "elsewhere"])
def test_download_and_evaluate_from_a_users_folder(download, tmp_path, monkeypatch, place):
    """Guards against paths that hold in the repository's own folder alone, or break at a space.

    A user lost the run that was started from another folder than the data's, or from "My Documents".
    """
    home = tmp_path / "my own work"
    published_files(tmp_path / "down loads")
    save_target(home / "a target")
    save_head(tiny_head(tiny_target("llama"), (2, 2), base_model_path=str(home / "a target")), home / "a head.pt")
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(home if place == "in the folder" else tmp_path / "else where")
    here = Path() if place == "in the folder" else home

    source, data, output = tmp_path / "down loads", here / "eval data", here / "the output"
    download.main(download.build_parser().parse_args(["--source", str(source), "--output_dir", str(data)]))
    flags = ["--spec_head_ckpt", str(here / "a head.pt"), "--data_dir", str(data), "--output_dir", str(output)]
    flags += ["--gpus", "cpu", "--max_new_tokens", "3", "--prompts_per_dataset", "1"]
    assert eval.main(eval.build_parser().parse_args(flags)) == 0

    (summary,) = (home / "the output" / "summary").glob("*__summary.json")
    found = json.loads(summary.read_text())
    assert list(found["datasets"]) == ["gsm8k", "humaneval", "mt_bench"]
    assert found["overall"]["equal_to_baseline"] == 3
    (rows,) = (home / "the output" / "raw").glob("*__per_sample.jsonl")
    asked = {row["dataset"]: row["question"] for row in map(json.loads, rows.read_text().splitlines())}
    # Rows 0, 30 and 52 of the published files: the first that seed 42 draws of the two last sets.
    assert asked == {"mt_bench": "w5 w9 w0", "gsm8k": "w5 w9 w30", "humaneval": "Complete the code I provided.w5 w9 w2"}
    assert sorted(path.name for path in home.iterdir()) == ["a head.pt", "a target", "eval data", "the output"]
    assert not any((tmp_path / "else where").iterdir())
