"""The scripts that make the demo head's training text, without its target."""

import ast
import json
import random

import pytest

import train
from checkpoints import make_prompts, train_demo_head
from training.sources import Counters, find_sources, read_conversations


@pytest.fixture
def sharegpt(tmp_path):
    """A ShareGPT file of 3000 conversations; those with an odd number have no answer and are of no use."""
    path = tmp_path / "ShareGPT.json"
    records = [
        {
            "id": str(number),
            "conversations": [
                {"from": "human", "value": f"question {number}"},
                {"from": "gpt", "value": f"answer {number}"},
            ][: 2 - number % 2],
        }
        for number in range(3000)
    ]
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def dealt(folder):
    """The prompts of each file."""
    files = {}
    for path in sorted(folder.glob("*.jsonl")):
        (source,) = find_sources([str(path)])
        files[path.name] = [found.turns[0]["value"] for _, found in read_conversations(source, Counters())]
    return files


def test_every_conversation_is_dealt_once(sharegpt, tmp_path, monkeypatch):
    """Guards "text that no earlier run has seen": all conversations with an answer, each in one file; and a restart
    after a kill, with some files there, deals the same."""
    monkeypatch.setattr(train_demo_head, "CONVERSATIONS", {"conversations_1": 90, "conversations_2": 50})
    whole, again = tmp_path / "whole", tmp_path / "again"
    for folder in (whole, again):
        folder.mkdir()
        train_demo_head.deal_conversations(sharegpt, folder)
    files = dealt(whole)
    assert [len(files[f"conversations_{i}.jsonl"]) for i in (1, 2)] == [90, 50]
    assert sorted(prompt for prompts in files.values() for prompt in prompts) == sorted(
        f"question {number}" for number in range(0, 3000, 2)
    )
    sizes = [len(files[f"{name}_prompts.jsonl"]) for name in train_demo_head.ANSWERS]
    wanted = [flags["max_prompts"] for flags in train_demo_head.ANSWERS.values()]
    for size, count in zip(sizes, wanted, strict=True):
        assert size / sum(sizes) == pytest.approx(count / sum(wanted), abs=0.002)

    (again / "conversations_2.jsonl").unlink()
    (again / "answers_2_prompts.jsonl").unlink()
    train_demo_head.deal_conversations(sharegpt, again)
    assert dealt(again) == files


def test_runs_name_text_that_is_made():
    """Guards the table of runs: each file that a run trains on is made by one step, and no file serves two runs."""
    made = [*train_demo_head.CONVERSATIONS, *train_demo_head.EXCHANGES, *train_demo_head.ANSWERS]
    made += [*train_demo_head.LATER_TURNS, *train_demo_head.PROMPTED]
    made += [f"{name}_sampled" for name in train_demo_head.SAMPLED]
    used = [name for run in train_demo_head.RUNS for name in set(run.data)]
    assert sorted(used) == sorted(made)


def test_train_takes_the_flags_of_every_run(tmp_path):
    """Guards the table of runs: flags that train.py has and that do not contradict each other."""
    args = train_demo_head.build_parser().parse_args(["--work_dir", str(tmp_path)])
    for number, run in enumerate(train_demo_head.RUNS):
        flags = train_demo_head.training_flags(args, run, tmp_path / "out", tmp_path / "head" if number else None)
        parsed = train.build_parser().parse_args(train_demo_head.command_of(flags))
        train.check_head_flags(parsed)
        assert parsed.data_path == [str(tmp_path / f"{name}.jsonl") for name in run.data]


def test_exchanges_and_later_turns_by_hand():
    """Guards what run 8 reads of ShareGPT: short questions with long answers, in English, and later user messages."""

    def conversation(*texts):
        return [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]

    long, late = "answer " * 101, "a later question of fitting length"
    english = conversation("first", long, late, "too short an answer", "q" * 450, long, "third", long)
    chinese = conversation("问题" * 10, "答" * 800)
    found = list(train_demo_head.exchanges([english, chinese]))
    assert [[turn["value"] for turn in pair] for pair in found] == [["first", long], ["third", long]]
    again = conversation("x", "y", late, "y", "short", "y")
    assert train_demo_head.later_turns([english, again]) == [[{"from": "human", "value": late}]]


def test_exercises_are_python_with_right_examples():
    """Guards the exercises: source that compiles, with two examples, and answers as worked out by hand."""
    draw, documentations = random.Random(3), set()
    for _ in range(300):
        (function,) = ast.parse(make_prompts.exercise(draw)).body
        lines = ast.get_docstring(function).splitlines()
        assert len(lines) == 5
        assert all(line.startswith(f">>> {function.name}([") for line in lines[1::2])
        documentations.add(lines[0])
    assert len(documentations) > 200
    numbers, answer = exercise_of("Return the sum of the even numbers")
    assert answer == sum(number for number in numbers if number % 2 == 0)
    words, answer = exercise_of("Return a list of the reversed words that start with a vowel")
    assert answer == ["".join(reversed(word)) for word in words if word[0] in "aeiou"]


def exercise_of(doc):
    """(list, answer) of the first drawn exercise with this documentation."""
    draw = random.Random(5)
    while True:
        (function,) = ast.parse(make_prompts.exercise(draw)).body
        lines = ast.get_docstring(function).splitlines()
        if lines[0].startswith(doc + " in "):
            (call,) = ast.parse(lines[1].removeprefix(">>> ")).body
            return ast.literal_eval(call.value.args[0]), ast.literal_eval(lines[2])


def test_word_problems_are_filled_in():
    """Guards the templates: no name without its value, a question at the end, the same problems from the same seed."""
    first, second = ([make_prompts.word_problem(draw) for _ in range(500)] for draw in map(random.Random, (1, 1)))
    assert first == second
    assert len(set(first)) > 490
    for text in first:
        assert "{" not in text
        assert text.endswith(("?", "."))
        assert "?" in text
