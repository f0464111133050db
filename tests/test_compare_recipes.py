"""Heads judged without decoding, on the target's own text, and the comparison of ways of training made of it."""

import json
import re

import numpy as np
import pytest
import torch

from benchmarks import compare_recipes
from benchmarks.compare_recipes import ARMS, Figures
from decoding.sampling import Sampling
from evaluation.metrics import Estimate
from evaluation.prompts import Sample
from evaluation.replayed import ReplayedTexts, target_texts
from pipeline_model import read_checkpoint, save_head
from tests.test_train import make_tokenizer, write_language
from tests.tiny import VOCAB, random_prompt, spd_decoder, tiny_head, tiny_model, tiny_target
from training.replay_loss import Replay, ReplaySettings
from training.run_state import read_log


def samples(count):
    return [Sample("set", place, "", tuple(random_prompt(3 + place, seed=place))) for place in range(count)]


@pytest.mark.parametrize("sizes", [(3, 3), (2, 2, 2), (1,) * 6])
def test_counts_are_those_of_decoding(sizes, tmp_path):
    """Guards the figures of every arm: verified and accepted drafts by fill and cycles equal the decode loop's."""
    target = tiny_target("llama", layers=6)
    head = tiny_head(target, sizes, draft_vocab=4)
    # The target writes the four ids that the head drafts: often right by chance, and at each fill anew.
    written = torch.zeros(VOCAB, 1)
    written[list(head.config.draft_token_ids)] = 1
    target.lm_head.weight.data.mul_(written)
    texts = target_texts(target, samples(10), Sampling(), 40, 0, tmp_path / "texts.json")
    replay = Replay(head, target, ReplaySettings())
    found = ReplayedTexts(target, texts, head.config.anchors).counts(replay, sizes)
    decoder = spd_decoder(target, head)
    for sample, text, counts in zip(samples(10), texts, found, strict=True):
        result = decoder.generate(sample.prompt_ids, 40)
        assert result.tokens == list(text.answer_ids)
        assert counts.verified_by_fill.tolist() == result.verified_by_fill
        assert counts.accepted_by_fill.tolist() == result.accepted_by_fill
        assert counts.cycles == result.cycles
    assert sum((counts.accepted_by_fill > 0).sum() for counts in found) > 10


def test_texts_are_written_once(tmp_path):
    """Guards against another text per arm, and against old texts for other prompts."""
    target, path = tiny_target("llama"), tmp_path / "texts.json"
    first = target_texts(target, samples(2), Sampling(temperature=1.0), 6, 3, path)
    written = path.read_text()
    assert target_texts(None, samples(2), Sampling(temperature=1.0), 6, 3, path) == first
    assert len(target_texts(target, samples(3), Sampling(temperature=1.0), 6, 3, path)) == 3
    assert path.read_text() != written


def test_a_difference_is_paired():
    """Guards the verdicts: arms that differ a little on every text differ surely, however much texts differ."""
    hits = np.array([10, 40, 90, 20, 60, 80])
    result = {"datasets": ["a"] * 3 + ["b"] * 3, "num_stages": 2, "runs": [1] * 6}
    one, other = (
        Figures(result | {"verified_by_fill": [[100, 0]] * 6, "accepted_by_fill": [[int(h), 0] for h in hits + more]})
        for more in (3, 0)
    )
    assert one.alpha().value == pytest.approx(0.53)
    difference = one.alpha().minus(other.alpha())
    assert difference.value == pytest.approx(0.03)
    assert difference.verdict("helps", "hurts") == "helps"
    assert other.alpha().minus(one.alpha()).verdict("helps", "hurts") == "hurts"
    assert Estimate(0.1, np.array([-1.0, 1.0])).verdict("helps", "hurts") == "cannot be told"
    assert one.alpha_by_fill() == ".53 –"
    # 600 tokens in 600 + 6 cycles of half the target
    assert one.accept_length().value == pytest.approx(2 * 600 / 606)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    tiny_model("llama", layers=6).save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    write_language(folder / "greedy.jsonl", [12])
    (folder / "sampled.jsonl").write_text((folder / "greedy.jsonl").read_text())
    (folder / "data" / "set").mkdir(parents=True)
    lines = [{"question_id": index, "category": "chat", "turns": [f"s{index + 1} 4"]} for index in range(3)]
    (folder / "data" / "set" / "question.jsonl").write_text("\n".join(map(json.dumps, lines)))
    target = tiny_target("llama", layers=6)
    head = tiny_head(target, (2, 2, 2), draft_vocab=VOCAB // 2)
    save_head(head, folder / "start.pt")
    ids = list(head.config.draft_token_ids)
    (folder / "draft.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": ids}))
    return folder


def run(files, work, *more):
    flags = ["--work_dir", work, "--output", work / "REPORT.md", "--base_model_path", files / "target"]
    flags += ["--start", files / "start.pt", "--draft_vocab_json", files / "draft.json", "--num_stages", 3]
    flags += ["--greedy_answers", files / "greedy.jsonl", "--sampled_answers", files / "sampled.jsonl"]
    flags += ["--max_steps", 2, "--start_steps", 2, "--batch_size", 2, "--max_length", 64, "--data_dir", files / "data"]
    flags += ["--datasets", "set", "--prompts_per_dataset", 2, "--max_new_tokens", 8, *more]
    return compare_recipes.main(compare_recipes.build_parser().parse_args(list(map(str, flags))))


def test_one_command_makes_the_table_and_goes_on(files, tmp_path, monkeypatch):
    """Guards the evidence: arms trained on equal text, judged, compared; nothing is done twice."""
    arms = ["--arms", "start", "S1", "P2", "N-PPSD", "I-both"]
    assert run(files, tmp_path, *arms) == 0
    text = (tmp_path / "REPORT.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| S1 ", "| P2 "))]
    assert len(rows) == 4  # two temperatures
    staircase, replay = (int(row[2]) for row in rows[:2])
    assert staircase == replay + 4  # the first token of each of the four answers is the prefill's, and no draft
    assert "P2 - S1" in text
    assert text.count("python train.py") == 3
    validation = read_log(tmp_path / "I-both" / "log.jsonl")[-1]["validation"]
    cells = [f"{figure['agreement']:.3f}" for figure in validation if figure["fill"] in (1, 2, 3)]
    starts = text[text.index("## Starts") :].split("\n\n")[2].splitlines()
    assert starts[2:] == [f"| I-both | both | {' | '.join(cells)} |"]
    monkeypatch.setattr("train.main", lambda args: pytest.fail("trained again"))
    monkeypatch.setattr(compare_recipes, "Judge", lambda *_: pytest.fail("judged again"))
    assert run(files, tmp_path, *arms) == 0
    assert (tmp_path / "REPORT.md").read_text() == text


def test_every_arm_is_a_command_that_train_takes(files, tmp_path):
    """Guards against an arm that ends hours of work with a wrong flag; and against texts that do not fit."""
    flags = ["--work_dir", tmp_path, "--start", files / "start.pt", "--base_model_path", files / "target"]
    flags += ["--draft_vocab_json", files / "draft.json", "--greedy_answers", "g", "--sampled_answers", "s"]
    args = compare_recipes.build_parser().parse_args(list(map(str, flags)))
    commands = compare_recipes.training_commands(args, read_checkpoint(args.start, mapped=True)[0])
    assert [*commands] == [name for name in ARMS if name != "start"]
    for command in commands.values():
        assert command.arguments.max_steps in (100, 200)
    (tmp_path / "other.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}] * 2}) + "\n")
    args.greedy_answers, args.sampled_answers = [files / "greedy.jsonl"], [tmp_path / "other.jsonl"]
    with pytest.raises(ValueError, match="no prompt in common"):
        compare_recipes.write_texts(args)
    args.sampled_answers = args.greedy_answers
    compare_recipes.write_texts(args)
    (tmp_path / "text" / "mixed.jsonl").write_text("another text")
    with pytest.raises(ValueError, match="holds another text than the answers given"):
        compare_recipes.write_texts(args)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--greedy_answers", "none.jsonl"], "'none.jsonl' cannot be read"),
        (["--greedy_answers", "damaged.jsonl"], "damaged.jsonl', line 1"),
        (["--greedy_answers", "foreign.jsonl"], "line 1 has no messages: give what generate_answers.py wrote"),
        (["--datasets", "mt_bench"], "no data set 'mt_bench'"),
        (["--num_stages", "2"], "--num_stages is 2, but the head was trained for 3"),
        (["--report_only"], "has no figures: run without --report_only"),
    ],
)
def test_bad_input_is_one_line_before_any_training(files, tmp_path, monkeypatch, flags, words):
    """Guards against a traceback, and against hours of training before a wrong path is noticed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.main", lambda args: pytest.fail("trained"))
    (tmp_path / "damaged.jsonl").write_text("nonsense\n")
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=re.escape(words)):
        run(files, tmp_path, *flags)
    assert not (tmp_path / "text").exists()
