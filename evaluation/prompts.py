"""The prompts of an evaluation: data sets on disk, checked line by line, and their token ids.

A data set is a folder with `question.jsonl`, one question a line: {"question_id", "category", "turns": [...]}. The
first turn is the prompt; without an id a question has the number of its line, without a category "".
`eval_data/download.py` brings the official sets; `eval_data/demo` is this project's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from loading.tokenizer import encode_prompt
from pipeline_inference import check_length
from script_utils import is_text, json_lines, read_text

QUESTION_FILE = "question.jsonl"
OFFICIAL_SETS = ("mt_bench", "gsm8k", "humaneval")  # in the order of the paper's tables
MORE_SETS = ("math500", "mbpp", "alpaca")  # `eval_data/download.py` brings these, too
DEMO_SET = "demo"


@dataclass(frozen=True)
class Question:
    """One line of a data set, and where it stands."""

    dataset: str
    question_id: int | str
    category: str
    prompt: str  # the first turn
    line: int  # counted from 1


@dataclass(frozen=True)
class Sample:
    """A question as the target gets it."""

    dataset: str
    question_id: int | str
    category: str
    prompt_ids: tuple[int, ...]
    prompt: str = ""  # as text, before any template

    @property
    def key(self) -> tuple[str, str]:
        """What identifies its row in the files of an evaluation."""
        return self.dataset, str(self.question_id)

    @property
    def prompt_sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.prompt_ids).encode()).hexdigest()


def choose_data_sets(data_dir: Path, names: Sequence[str] | None) -> tuple[tuple[str, ...], str]:
    """The data sets to run and one line that says why; without names the official sets, or else the demo's.

    ValueError when one is not there.
    """
    found = tuple(sorted(path.parent.name for path in data_dir.glob(f"*/{QUESTION_FILE}")))
    listed = f"{str(data_dir)!r} has {', '.join(found) or 'none'}"
    if names is not None:
        for name in names:
            if name not in found:
                known = name in OFFICIAL_SETS + MORE_SETS
                way = f"python eval_data/download.py --set {name}" if known else "give one of these"
                raise ValueError(f"no data set {name!r} ({listed}): {way}")
        return tuple(dict.fromkeys(names)), f"data sets: {', '.join(dict.fromkeys(names))}"
    official = tuple(name for name in OFFICIAL_SETS if name in found)
    if official:
        missing = [name for name in OFFICIAL_SETS if name not in found]
        return official, f"data sets: {', '.join(official)}" + (f" ({', '.join(missing)} missing)" if missing else "")
    if DEMO_SET not in found:
        raise ValueError(f"no data set ({listed}): run python eval_data/download.py, or give another --data_dir")
    return (DEMO_SET,), (
        f"data sets: demo, this project's own prompts: the official sets are not in {str(data_dir)!r} "
        "(python eval_data/download.py brings them)"
    )


def read_questions(data_dir: Path, name: str, limit: int | None = None) -> list[Question]:
    """The questions of a data set, at most the first `limit`.

    ValueError names the file and the line that is broken or repeats a question_id; for an unreadable or empty set too.
    """
    path = data_dir / name / QUESTION_FILE
    questions: list[Question] = []
    lines_of: dict[str, int] = {}
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error})") from None
    for number, entry in json_lines(text, repr(str(path))):
        try:
            question = parse_question(entry, name, number)
        except ValueError as error:
            raise ValueError(f"{str(path)!r}, line {number}: {error}") from None
        before = lines_of.setdefault(str(question.question_id), number)
        if before != number:
            raise ValueError(
                f"{str(path)!r}, line {number}: question_id {question.question_id} is on line {before} too"
            )
        questions.append(question)
    if not questions:
        raise ValueError(f"data set {name!r} is empty: {str(path)!r} has no question")
    return questions[:limit]


def parse_question(entry: Any, dataset: str, line: int) -> Question:
    """One line's JSON, checked. ValueError says what is wrong with it."""
    if not isinstance(entry, Mapping):
        raise ValueError("it must be a JSON object")
    if "turns" not in entry:
        raise ValueError("it lacks turns")
    given = {name: value for name, value in entry.items() if value is not None}
    question_id, category, turns = given.get("question_id", line), given.get("category", ""), entry["turns"]
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise ValueError(f"question_id is {question_id!r}: it must be an integer or a string")
    if not isinstance(category, str):
        raise ValueError(f"category is {category!r}: it must be a string")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise ValueError("turns must be a list that starts with a text")
    for text in (str(question_id), category, turns[0]):
        if not is_text(text):
            raise ValueError(
                f"{text!r} has half a character (a lone surrogate), which no file can hold: write it whole"
            )
    return Question(dataset, question_id, category, turns[0], line)


def encode_questions(
    questions: Iterable[Question],
    tokenizer: PreTrainedTokenizerBase,
    *,
    enable_thinking: bool,
    max_new_tokens: int,
    max_positions: int,
) -> list[Sample]:
    """Token ids of every question. ValueError names one whose prompt leaves no room for `max_new_tokens`."""
    samples = []
    for question in questions:
        where = f"data set {question.dataset!r}, line {question.line} (question_id {question.question_id})"
        try:
            ids = encode_prompt(tokenizer, question.prompt, enable_thinking=enable_thinking)
        except ValueError as error:  # a template that refuses it
            raise ValueError(f"{where}: {error}") from None
        try:
            check_length(len(ids), max_new_tokens, max_positions)
        except ValueError as error:
            raise ValueError(f"{where}: --{error}") from None
        samples.append(Sample(question.dataset, question.question_id, question.category, tuple(ids), question.prompt))
    return samples


def digest_prompts(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Count and SHA-256 of the prompts of each data set: equal exactly when every prompt id is."""
    digests = {}
    for name in dict.fromkeys(sample.dataset for sample in samples):
        keyed = [[*sample.key, sample.prompt_sha256] for sample in samples if sample.dataset == name]
        digests[name] = {"prompts": len(keyed), "sha256": hashlib.sha256(json.dumps(keyed).encode()).hexdigest()}
    return digests
