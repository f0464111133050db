"""docs/add_a_drafter.md, followed to the letter: its code is the drafter that is trained and evaluated here."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import eval
from baselines import train_baseline
from baselines.method import Run
from baselines.registry import METHODS
from decoding.sampling import Sampling
from evaluation.workers import build_decoder
from loading.checkpoint_files import CHECKPOINT_NAME
from pipeline_model import Target
from tests.test_eval import rows_of, summary_of
from tests.test_train import make_tokenizer, write_language
from tests.tiny import VOCAB, hf_greedy, random_prompt, tiny_model
from training.run_state import read_log

PAGE = Path(__file__).parents[1] / "docs" / "add_a_drafter.md"


@pytest.fixture
def bigram(tmp_path, monkeypatch):
    """The page's code as the module that it says, and registered as it says."""
    file = tmp_path / "bigram.py"
    file.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)))
    spec = importlib.util.spec_from_file_location("baselines.bigram", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "baselines.bigram", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.Bigram, "code", (str(file),))
    monkeypatch.setitem(METHODS, "bigram", module.Bigram())
    return module


@pytest.fixture
def folder(tmp_path):
    """A target, its tokenizer, conversations to learn from and questions to be asked."""
    tiny_model("llama").save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    write_language(tmp_path / "data.jsonl", [5, 12])
    (tmp_path / "draft.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": list(range(0, VOCAB, 2))}))
    (tmp_path / "questions" / "first").mkdir(parents=True)
    question = {"question_id": 1, "category": "chat", "turns": ["s1 4"]}
    (tmp_path / "questions" / "first" / "question.jsonl").write_text(json.dumps(question))
    return tmp_path


def train_it(folder, *more):
    flags = ["--method", "bigram", "--model_name", folder / "target", "--data_path", folder / "data.jsonl"]
    flags += ["--cache_dir", folder / "cache", "--output_dir", folder / "run", "--max_steps", 12, "--lr", 1e-2]
    flags += ["--warmup_steps", 1, "--log_interval", 1, "--val_fraction", 0.1, "--min_length", 2, *more]
    return train_baseline.main(train_baseline.build_parser().parse_args([str(flag) for flag in flags]))


@pytest.mark.parametrize("draft_vocab", [False, True], ids=["full", "reduced"])
def test_the_page_adds_a_drafter(bigram, folder, monkeypatch, draft_vocab):
    """Guards the page against the code, and the programs against knowing their methods by name: the new one learns, its
    file comes back, its output is the target's own, and eval.py counts, names and compares it like any other."""
    more = ["--draft_vocab_json", folder / "draft.json"] if draft_vocab else []
    assert train_it(folder, *more) == 0
    losses = [line["loss"] for line in read_log(folder / "run" / "log.jsonl") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]

    target = Target.load(str(folder / "target"))
    stored = torch.load(folder / "run" / CHECKPOINT_NAME, weights_only=True)
    assert stored["config"]["version"] == "bigram"
    head = bigram.BigramConfig.load_head(folder / "run", target)
    assert head.config.to_dict() == stored["config"]
    assert {name: tuple(weight.shape) for name, weight in head.named_parameters()} == {
        "proj.weight": (32, 32),
        "lm_head.weight": (31 if draft_vocab else VOCAB, 32),
    }
    run = Run(METHODS["bigram"], Sampling(), 20, 0, (4,), str(folder / "run"), draft_chain=3)
    result = build_decoder(target, run).generate(random_prompt(9), 20)
    assert result.tokens == hf_greedy(tiny_model("llama"), random_prompt(9), 20)

    monkeypatch.setattr(eval, "plot_summary", lambda summary, path: None)
    flags = ["--method", "bigram", "--spec_head_ckpt", folder / "run", "--num_steps", 3, "--max_new_tokens", 12]
    flags += [
        "--data_dir",
        folder / "questions",
        "--datasets",
        "first",
        "--gpus",
        "cpu",
        "--output_dir",
        folder / "out",
    ]
    assert eval.main(eval.build_parser().parse_args([str(flag) for flag in flags])) == 0
    (row,) = rows_of(folder / "out").values()
    assert row["equal_to_baseline"]
    assert summary_of(folder / "out")["settings"]["label"] == "bigram run, m = 3, T = 0"
    assert summary_of(folder / "out")["costs"]["cycle"] == 1  # a pass of the target: the drafter has no layers


def test_its_flags_are_its_own(bigram, folder):
    """Guards the shared parsers: a flag of another method is refused by name with the new one."""
    with pytest.raises(ValueError, match="--num_taps belongs to --method dflash: leave it out with bigram"):
        train_it(folder, "--num_taps", 3)
    assert not (folder / "run").exists()
