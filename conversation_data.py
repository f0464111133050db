"""Conversations in every usual form -> supervised training examples.

    data = load_conversations(["sharegpt.json", "owner/name:train"], tokenizer, max_length=2048, num_proc=4)
    loader = DataLoader(data.train, batch_size=8, shuffle=True, collate_fn=PadCollator(tokenizer.pad_token_id))

Sources are `.parquet`, `.jsonl` and `.json` files, directories of them, and hub data sets written `owner/name:split` or
`owner/name:config:split`. A record keeps its turns in `conversations` or `messages`; a turn is `role`/`content` or
`from`/`value`. A `.json` file may be an array, one record, or records one after the other.

What is not as it should be is repaired or skipped by these rules, from top to bottom, and counted; nothing aborts the
run as long as one usable conversation remains:

    found                                                    done
    -------------------------------------------------------  ----------------------------------------------------------
    broken record (cut-off file, damaged line)               left out, place reported; whole records after it are used
    record that is no object or has neither column           record skipped
    turns null, empty, or not a list                         record skipped
    unknown role (tool, function, ...)                       conversation ends before it: later turns build on its text
    turn that is no object; content null, blank or not text  turn dropped (a list of text parts is text: parts joined)
    half of a surrogate pair in a text                       becomes U+FFFD
    system turn after the first user or assistant turn       turn dropped
    assistant turns before the first user turn               turns dropped: what they answer is missing
    same role again                                          joined to one turn, a blank line between
    user or system turns after the last assistant turn       turns dropped: nothing answers them
    no assistant turn left                                   record skipped
    chat template raises an error                            record skipped
    assistant text not found in the rendered text            record skipped (only with `mask_assistant`)
    longer than `max_length`                                 overflow policy, see `Options`
    shorter than `min_length`, or nothing supervised         example left out; record skipped when no example remains

What is supervised. The rendered conversation is tokenised once, exactly as `apply_chat_template` does it: the template
writes every special token, the tokenizer adds none, so BOS is never doubled. Labels are set where the assistant writes:
from the end of the generation prompt (all that decoding puts in front of a reply) through the end-of-turn token,
thinking blocks that the template keeps or adds included. The line break that many templates put behind the end-of-turn
token is never generated and not supervised.
"""

import hashlib
import json
import os
import re
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from script_utils import first_line

IGNORE_INDEX = -100
CONVERSATION_COLUMNS = ("conversations", "messages")
ROLE_ALIASES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
OVERFLOW_POLICIES = ("discard", "truncate", "split")

# For tokenizers without a chat template. The space in front of a reply is the assistant's, as byte-level BPE wants it.
FALLBACK_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}Assistant:"
    "{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)

CHUNK_CONVERSATIONS = 64  # conversations a worker encodes at a time
READ_CHARS = 1 << 20  # characters read at a time from a .json file
CACHE_VERSION = 1  # raise when the same input would give other rows
ROWS_SCHEMA = pa.schema(
    {"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32()), "example_id": pa.string()},
)


# ---------------------------------------------------------------------------------------------------------------------
# Counters and options


@dataclass
class Counters:
    """What became of the records. `records == conversations + sum(skipped.values())` holds at the end."""

    records: int = 0  # whole records read
    broken_records: int = 0  # records, or stretches of a file, that could not be parsed
    conversations: int = 0  # records that gave at least one example
    examples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0  # labels that are set
    skipped: Counter = field(default_factory=Counter)  # reason -> records
    repaired: Counter = field(default_factory=Counter)  # repair -> times
    overflow: Counter = field(default_factory=Counter)  # what overflow did -> times
    unknown_roles: Counter = field(default_factory=Counter)  # role -> times
    damage: list[str] = field(default_factory=list)  # where the broken records are

    def add(self, other: "Counters") -> None:
        """Adds the counts of another part of the data to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def broken(self, place: str) -> None:
        self.broken_records += 1
        self.damage.append(place)

    def table(self, max_damage: int = 10) -> str:
        """Text table of all counts; of the damaged places the first `max_damage`."""
        rows = [("records read", self.records), ("broken records, left out", self.broken_records)]
        rows += [(f"skipped: {reason}", count) for reason, count in self.skipped.most_common()]
        rows += [(f"repaired: {repair}", count) for repair, count in self.repaired.most_common()]
        rows += [(f"unknown role: {role}", count) for role, count in self.unknown_roles.most_common(10)]
        rows += [("conversations used", self.conversations)]
        rows += [(f"overflow: {what}", count) for what, count in self.overflow.most_common()]
        rows += [("examples", self.examples), ("tokens", self.tokens), ("supervised tokens", self.supervised_tokens)]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {count:>15,}" for name, count in rows]
        lines += [f"  damage: {place}" for place in self.damage[:max_damage]]
        if len(self.damage) > max_damage:
            lines.append(f"  damage: and {len(self.damage) - max_damage:,} more places")
        return "\n".join(["conversations", *lines])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Counters":
        saved = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: Counter(value) if isinstance(value, dict) else value for name, value in saved.items()})


@dataclass(frozen=True)
class Options:
    """How conversations become examples; everything here changes the rows.

    Overflow of `max_length`: `discard` leaves the conversation out, `truncate` keeps its first `max_length` tokens,
    `split` cuts it into consecutive pieces of `max_length` tokens. Pieces keep ids and labels as they are and do not
    overlap; a later piece has no header and no context from the piece before, and its first token is never predicted
    (the loss shifts by one), so one target is lost per border.
    """

    max_length: int | None = 2048  # tokens; None: no limit
    overflow: str = "truncate"  # one of OVERFLOW_POLICIES
    min_length: int = 2  # tokens; shorter examples are left out
    mask_assistant: bool = True  # supervise assistant text only; False: every token

    def __post_init__(self):
        if self.overflow not in OVERFLOW_POLICIES:
            raise ValueError(f"overflow is {self.overflow!r}; it has to be one of {', '.join(OVERFLOW_POLICIES)}")
        if self.min_length < 1:
            raise ValueError(f"min_length is {self.min_length}; it has to be at least 1")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(
                f"max_length {self.max_length} is below min_length {self.min_length}: no example could satisfy both"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Reading records


class TextWindow:
    """A sliding piece of a text file, with a cursor; memory is one record or `READ_CHARS`, whichever is larger."""

    def __init__(self, handle):
        self.handle = handle
        self.text = ""
        self.position = 0
        self.offset = 0  # bytes of the file before `text`
        self.at_end = False

    def grow(self) -> bool:
        """Drops what lies before the cursor and reads on, at least doubling the rest; False at the end of the file."""
        rest = self.text[self.position :]
        more = self.handle.read(max(READ_CHARS, len(rest)))
        if not more:
            self.at_end = True
            return False
        self.offset = self.byte(self.position)
        self.text, self.position = rest + more, 0
        return True

    def skip(self, pattern: re.Pattern) -> bool:
        """Moves over `pattern`; False when the file ends there."""
        self.position = pattern.match(self.text, self.position).end()
        while self.position == len(self.text) and self.grow():
            self.position = pattern.match(self.text, self.position).end()
        return self.position < len(self.text)

    def byte(self, position: int) -> int:
        """Byte offset in the file of a character of `text`."""
        return self.offset + len(self.text[:position].encode("utf-8", "surrogateescape"))

    def ends_too_soon(self, error: json.JSONDecodeError) -> bool:
        """Whether `error` may be only the end of the window: an open string, or an error in the last few characters.

        16 characters hold the longest thing that is reported where it begins, "\\uXXXX" twice or "-Infinity".
        """
        return error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16


# Between records of an array, of concatenated records, and of records a line. U+FEFF is a byte order mark.
SEPARATORS = re.compile(r"[\s,\[\]\ufeff]*")


def decode_next(window: TextWindow, decoder: json.JSONDecoder) -> tuple[object, int]:
    """Decodes the value at the cursor, reading on as needed; returns it and where it ends, the cursor stays.

    Raises json.JSONDecodeError when the value is broken or the file ends inside it.
    """
    while True:
        try:
            return decoder.raw_decode(window.text, window.position)
        except json.JSONDecodeError as error:
            if not (window.ends_too_soon(error) and window.grow()):
                raise


def move_to_next_record(window: TextWindow, decoder: json.JSONDecoder) -> None:
    """Moves the cursor to the next object that is a whole record, else to the end of the file."""
    while True:
        window.position = window.text.find("{", window.position + 1)
        if window.position < 0:
            window.position = len(window.text)
            if not window.grow():
                return
            window.position = -1
            continue
        try:
            value, end = decode_next(window, decoder)
        except json.JSONDecodeError:
            continue
        if any(column in value for column in CONVERSATION_COLUMNS):
            return
        window.position = end - 1  # a turn of the broken record; there is no record inside it


def read_json(path: Path, counters: Counters) -> Iterator[tuple[int, object]]:
    """Yields (index, record). Broken records are counted with their byte offset and do not get an index."""
    decoder = json.JSONDecoder()
    index = 0
    # surrogateescape and newline="": what cannot be decoded survives, and characters map back to bytes exactly.
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as handle:
        window = TextWindow(handle)
        while window.skip(SEPARATORS):
            try:
                record, window.position = decode_next(window, decoder)
            except json.JSONDecodeError as error:
                start, stop = window.byte(window.position), window.byte(error.pos)
                cut = " (the file ends inside it)" if window.at_end and window.ends_too_soon(error) else ""
                counters.broken(f"{path}: record at byte {start:,}, error at byte {stop:,}: {error.msg}{cut}")
                move_to_next_record(window, decoder)
                continue
            yield index, record
            index += 1


def read_jsonl(path: Path, counters: Counters) -> Iterator[tuple[int, object]]:
    """Yields (line number, record), lines counted from 1. Broken lines are counted with their number."""
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # broken JSON, broken UTF-8, brackets without end
                counters.broken(f"{path}: line {number:,}: {error}")
                continue
            yield number, record


def conversation_columns(source: str, columns: Iterable[str]) -> list[str]:
    """Those of `columns` that hold conversations. Raises ValueError when there is none."""
    known = [name for name in columns if name in CONVERSATION_COLUMNS]
    if not known:
        raise ValueError(
            f"{source}: no conversation in columns {', '.join(sorted(columns))}; "
            f"known are {' and '.join(CONVERSATION_COLUMNS)}: rename the column that holds the list of turns, "
            "or leave the file out"
        )
    return known


def read_parquet(path: Path, counters: Counters) -> Iterator[tuple[int, object]]:
    """Yields (row index, record). Raises ValueError for a file that is not a whole parquet file."""
    try:
        table = pq.ParquetFile(path)
        columns = conversation_columns(path.as_posix(), table.schema_arrow.names)
        rows = (row for batch in table.iter_batches(batch_size=256, columns=columns) for row in batch.to_pylist())
        yield from enumerate(rows)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet ({first_line(error)}); fetch the file again") from error


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".json": read_json}


@dataclass(frozen=True)
class FileSource:
    """One file; `name` is its path as the caller wrote it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.as_posix()

    def records(self, counters: Counters) -> Iterator[tuple[int, object]]:
        return READERS[self.path.suffix](self.path, counters)

    def fingerprint(self) -> list:
        state = self.path.stat()
        return [self.name, str(self.path.resolve()), state.st_size, state.st_mtime_ns]


@dataclass(frozen=True)
class HubSource:
    """One split of a hub data set, `owner/name:split` or `owner/name:config:split`."""

    name: str
    rows: datasets.Dataset

    def records(self, counters: Counters) -> Iterator[tuple[int, object]]:
        return enumerate(self.rows.select_columns(conversation_columns(self.name, self.rows.column_names)))

    def fingerprint(self) -> list:
        return [
            self.name,
            self.rows.num_rows,
            [FileSource(Path(f["filename"])).fingerprint() for f in self.rows.cache_files],
        ]


HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?:(?P<split>\w+(\[[^\]]*\])?)")


def open_hub_source(name: re.Match) -> HubSource:
    """Loads the hub data set that HUB_NAME matched. Raises OSError when it cannot be had."""
    try:
        rows = datasets.load_dataset(name["repository"], name["config"], split=name["split"])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise OSError(
            f"hub data set {name[0]!r} cannot be loaded ({first_line(error)}); "
            "check its name and split, or give local files"
        ) from error
    return HubSource(name[0], rows)


def find_sources(data_path: Sequence[str]) -> list[FileSource | HubSource]:
    """Files, directories and hub names -> sources, in the order given, the files of a directory by name.

    Raises FileNotFoundError for what does not exist and ValueError for a file or directory without a known form.
    """
    sources = []
    known = ", ".join(READERS)
    for entry in data_path:
        path = Path(entry)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in READERS and file.is_file())
            if not files:
                raise ValueError(f"{entry}: no {known} file in this directory")
            sources += [FileSource(file) for file in files]
        elif path.is_file():
            if path.suffix not in READERS:
                raise ValueError(f"{entry}: unknown suffix {path.suffix!r}; known are {known}")
            sources.append(FileSource(path))
        elif hub_name := HUB_NAME.fullmatch(str(entry)):
            sources.append(open_hub_source(hub_name))
        else:
            raise FileNotFoundError(f"{entry}: no such file or directory (a hub data set is written owner/name:split)")
    if not sources:
        raise ValueError("no data: give at least one file, directory or hub data set")
    return sources


def read_turns(source: FileSource | HubSource, counters: Counters) -> Iterator[tuple[str, object]]:
    """Yields (example_id, turns as found) of every record that has a conversation column.

    Raises ValueError when the source has records, but no record with such a column.
    """
    columns, has_known = set(), False
    for index, record in source.records(counters):
        counters.records += 1
        if not isinstance(record, dict):
            counters.skipped["record is not an object"] += 1
            continue
        found = [column for column in CONVERSATION_COLUMNS if column in record]
        if not found:
            columns.update(record)
            counters.skipped["no conversation column"] += 1
            continue
        has_known = True
        turns = next((record[column] for column in found if record[column] is not None), None)
        yield f"{source.name}:{index}", turns
    if columns and not has_known:
        conversation_columns(source.name, columns)


# ---------------------------------------------------------------------------------------------------------------------
# From turns as found to clean messages


class SkipRecord(Exception):
    """A record that gives no example; the message is the reason in the table."""


def clean_text(content: object, repaired: Counter) -> str | None:
    """The text of a turn, or None when there is none."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not content.strip():
        return None
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:  # tokenizers refuse half surrogates
        repaired["half surrogate in a text"] += 1
        content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return content


def known_turns(turns: list, counters: Counters) -> Iterator[tuple[str, object]]:
    """Yields (role, content) up to the first unknown role."""
    for turn in turns:
        if not isinstance(turn, dict):
            counters.repaired["turn is not an object: dropped"] += 1
            continue
        name = turn.get("role") or turn.get("from")
        role = ROLE_ALIASES.get(str(name).strip().lower())
        if role is None:
            counters.unknown_roles["(missing)" if name is None else str(name)[:40]] += 1
            counters.repaired["unknown role: conversation ended before it"] += 1
            return
        yield role, turn.get("value") if turn.get("content") is None else turn["content"]


def clean_messages(turns: object, counters: Counters) -> list[dict[str, str]]:
    """Applies the rules of the module's table to the turns of one record, but those about unanswered turns.

    Returns messages `{"role", "content"}`: an optional system message, then user and assistant in turn. Raises
    SkipRecord.
    """
    if not isinstance(turns, list):
        raise SkipRecord("no turns" if turns is None else "turns are not a list")
    if not turns:
        raise SkipRecord("no turns")
    repaired = counters.repaired
    messages = []
    for role, content in known_turns(turns, counters):
        text = clean_text(content, repaired)
        last = messages[-1]["role"] if messages else None
        if text is None:
            repaired["empty turn: dropped"] += 1
        elif role == "system" and last not in (None, "system"):
            repaired["late system turn: dropped"] += 1
        elif role == "assistant" and last in (None, "system"):
            repaired["assistant turn before any user turn: dropped"] += 1
        elif role == last:
            repaired["same role again: joined"] += 1
            messages[-1]["content"] += "\n\n" + text
        else:
            messages.append({"role": role, "content": text})
    return messages


def clean_conversation(turns: object, counters: Counters) -> list[dict[str, str]]:
    """The messages of one record, an assistant message last. Raises SkipRecord."""
    messages = clean_messages(turns, counters)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
        counters.repaired["unanswered turn at the end: dropped"] += 1
    if not messages:
        raise SkipRecord("no user turn with an answer")
    return messages


def first_prompt(turns: object, counters: Counters) -> list[dict[str, str]]:
    """The first user message of one record, and the system message before it. Raises SkipRecord."""
    messages = clean_messages(turns, counters)
    for index, message in enumerate(messages):
        if message["role"] == "user":
            return messages[: index + 1]
    raise SkipRecord("no user turn")


# ---------------------------------------------------------------------------------------------------------------------
# Rendering, and what the assistant wrote


@dataclass(frozen=True)
class Slot:
    """A place in a rendered conversation that holds the text of a message."""

    before: str  # what the template writes between the slot before and this one
    message: int  # index of the message
    part: int  # index of the part of its content


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around the texts of a conversation with given roles."""

    slots: tuple[Slot, ...]
    tail: str


def split_thinking(content: str) -> tuple[str, ...]:
    """`<think>a</think>b` -> (a, b); anything else is one part."""
    thinking, marker, answer = content.partition("</think>")
    if not marker or "</think>" in answer:
        return (content,)
    return thinking.rpartition("<think>")[2], answer


def trimmed(text: str) -> Iterator[str]:
    """The forms in which templates write a text."""
    yield text
    for characters in ("\n", None):
        yield text.strip(characters)
        yield text.lstrip(characters)
        yield text.rstrip(characters)


class ChatFormat:
    """A tokenizer's chat template: renders conversations and finds the assistant's spans, as characters.

    Spans come from the first of these that works:
    1. the template's own `{% generation %}` markers;
    2. the template's skeleton: the same roles rendered once with place holders give the exact text around every
       message, and walking along it finds every message, whatever its text says (a user may quote the template's
       headers). A template that edits thinking blocks gets a skeleton with place holders inside them. Skeletons are
       cached by roles, so this costs one rendering per conversation. Prefix rendering alone would fail here: Qwen3 adds
       an empty thinking block to the LAST assistant turn only, so a prefix of the conversation does not render to a
       prefix of its text;
    3. prefixes, rendered turn by turn, where each is a prefix of the whole: for templates that change texts otherwise.

    Raises ValueError when the template cannot render one question and its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no tokenizer.json: a fast tokenizer is needed for offsets"
            )
        self.tokenizer = tokenizer
        self.template = tokenizer.get_chat_template() if tokenizer.chat_template else FALLBACK_TEMPLATE
        self.variables = dict(tokenizer.special_tokens_map)
        if not tokenizer.chat_template and adds_bos(tokenizer):
            self.template = "{{ bos_token }}" + FALLBACK_TEMPLATE
        self.marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self.skeleton = lru_cache(maxsize=4096)(self._skeleton)
        try:
            self.generation_prompt = self._generation_prompt()
            self.end_of_turn = self._end_of_turn()
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} cannot render a question and its answer: "
                f"{first_line(error)}"
            ) from error

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        return self._render(messages, add_generation_prompt=add_generation_prompt)[0][0]

    def _render(self, messages, **kwargs) -> tuple[list[str], list[list[tuple[int, int]]]]:
        return render_jinja_template([messages], chat_template=self.template, **self.variables, **kwargs)

    def render_with_spans(self, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text and the [start, end) characters that the assistant writes. Raises SkipRecord."""
        if self.marks_generation:
            (text,), (spans,) = self._render(messages, return_assistant_tokens_mask=True)
            return text, [(start, self._past_end_of_turn(text, end)) for start, end in spans]
        text = self.render(messages)
        whole = [(message["content"],) for message in messages]
        spans = self._spans_by_skeleton(text, messages, whole)
        if spans is None:
            parts = [split_thinking(m["content"]) if m["role"] == "assistant" else (m["content"],) for m in messages]
            spans = self._spans_by_skeleton(text, messages, parts)
        if spans is None:
            spans = self._spans_by_prefixes(text, messages)
        if spans is None:
            raise SkipRecord("assistant text not found in the rendered conversation")
        return text, spans

    def _generation_prompt(self) -> str:
        """What the template writes in front of a reply that is still to come; "" when it writes nothing."""
        question = [{"role": "user", "content": "?"}]
        without, prompt = self.render(question), self.render(question, add_generation_prompt=True)
        return prompt[len(without) :] if prompt.startswith(without) else ""

    def _end_of_turn(self) -> str:
        """The special token, with blanks before it, that the template writes behind a reply; "" when there is none."""
        tail = self.skeleton((("user", 1), ("assistant", 1))).tail
        blanks = len(tail) - len(tail.lstrip())
        tokens = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        # the longest, where a token is the beginning of another one
        token = max((token for token in tokens if tail.startswith(token, blanks)), key=len, default="")
        return tail[:blanks] + token if token else ""

    def _past_end_of_turn(self, text: str, end: int) -> int:
        """`end`, moved behind the end-of-turn token when that comes next."""
        return end + len(self.end_of_turn) if text.startswith(self.end_of_turn, end) else end

    def _skeleton(self, shape: tuple[tuple[str, int], ...]) -> Skeleton:
        """Renders place holders for messages of the given (role, parts); two parts are thinking and answer."""
        messages = []
        for index, (role, parts) in enumerate(shape):
            holders = [f"\ue000{index}.{part}\ue001" for part in range(parts)]  # private use: in no template
            content = holders[0] if parts == 1 else f"<think>\n{holders[0]}\n</think>\n\n{holders[1]}"
            messages.append({"role": role, "content": content})
        pieces = re.split("\ue000(\\d+)\\.(\\d+)\ue001", self.render(messages))
        slots = [Slot(pieces[i], int(pieces[i + 1]), int(pieces[i + 2])) for i in range(0, len(pieces) - 1, 3)]
        return Skeleton(tuple(slots), pieces[-1])

    def _spans_by_skeleton(self, text, messages, parts) -> list[tuple[int, int]] | None:
        """Walks along the skeleton; None when the text does not follow it."""
        skeleton = self.skeleton(tuple((m["role"], len(p)) for m, p in zip(messages, parts, strict=True)))
        literals = [slot.before for slot in skeleton.slots] + [skeleton.tail]
        starts, ends = {}, {}  # message index -> character
        position = 0
        for slot, after in zip(skeleton.slots, literals[1:], strict=True):
            if not text.startswith(slot.before, position):
                return None
            starts.setdefault(slot.message, position + self._header_length(slot.before))
            position += len(slot.before)
            forms = trimmed(parts[slot.message][slot.part])
            form = next(
                (f for f in forms if text.startswith(f, position) and text.startswith(after, position + len(f))), None
            )
            if form is None:
                return None
            position += len(form)
            ends[slot.message] = self._past_end_of_turn(text, position)
        if text[position:] != skeleton.tail:
            return None
        return [(starts[i], ends[i]) for i in starts if messages[i]["role"] == "assistant"]

    def _header_length(self, before: str) -> int:
        """How much of the text before a reply is the prompt's; the rest (empty thinking) is the assistant's."""
        found = before.rfind(self.generation_prompt)
        return len(before) if found < 0 else found + len(self.generation_prompt)

    def _spans_by_prefixes(self, text, messages) -> list[tuple[int, int]] | None:
        """Renders the conversation up to every reply and past it; None when one of these is not how the text begins."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:index], add_generation_prompt=True)
            turn = self.render(messages[: index + 1])
            if not (text.startswith(turn) and turn.startswith(prompt)):
                return None
            end = turn.rfind(self.end_of_turn, len(prompt)) if self.end_of_turn else -1
            spans.append((len(prompt), len(turn) if end < 0 else end + len(self.end_of_turn)))
        return spans


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether plain encoding puts BOS in front."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def supervise(ids: np.ndarray, offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
    """Labels [S]: the ids of tokens that begin inside a span, else -100.

    A token that begins in the header and reaches into the reply is not supervised: decoding cannot produce it there.
    """
    starts = np.fromiter((start for start, _ in offsets), dtype=np.int64, count=len(offsets))
    labels = np.full_like(ids, IGNORE_INDEX)
    for first, last in np.searchsorted(starts, np.asarray(spans, dtype=np.int64).reshape(-1, 2)):
        labels[first:last] = ids[first:last]
    return labels


# ---------------------------------------------------------------------------------------------------------------------
# From messages to rows


class ChunkEncoder:
    """Turns a chunk of (example_id, turns) into a record batch of examples and its counters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Options):
        self.chat = ChatFormat(tokenizer)
        self.tokenizer = tokenizer
        self.options = options

    def __call__(self, chunk: list[tuple[str, object]]) -> tuple[pa.RecordBatch, Counters]:
        counters = Counters()
        rendered = []  # (example_id, text, spans)
        for example_id, turns in chunk:
            try:
                rendered.append((example_id, *self._render(clean_conversation(turns, counters))))
            except SkipRecord as reason:
                counters.skipped[str(reason)] += 1
        columns = {name: [] for name in ROWS_SCHEMA.names}
        for example_id, ids, labels in self._tokenise(rendered):
            try:
                pieces = self._fit(ids, labels, counters.overflow)
            except SkipRecord as reason:
                counters.skipped[str(reason)] += 1
                continue
            counters.conversations += 1
            for number, (piece_ids, piece_labels) in pieces:
                columns["input_ids"].append(piece_ids)
                columns["labels"].append(piece_labels)
                columns["example_id"].append(example_id if number is None else f"{example_id}#{number}")
                counters.examples += 1
                counters.tokens += len(piece_ids)
                counters.supervised_tokens += int((piece_labels != IGNORE_INDEX).sum())
        return pa.record_batch(columns, schema=ROWS_SCHEMA), counters

    def _render(self, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        try:
            if self.options.mask_assistant:
                return self.chat.render_with_spans(messages)
            return self.chat.render(messages), []
        except (TemplateError, TypeError) as error:
            raise SkipRecord(f"chat template: {first_line(error)}") from error

    def _tokenise(self, rendered) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yields (example_id, ids [S], labels [S])."""
        if not rendered:
            return
        example_ids, texts, spans = zip(*rendered, strict=True)
        # The template wrote BOS and all other special tokens; adding them again would double them.
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for index, example_id in enumerate(example_ids):
            ids = np.asarray(encoded["input_ids"][index], dtype=np.int32)
            if self.options.mask_assistant:
                yield example_id, ids, supervise(ids, encoded["offset_mapping"][index], spans[index])
            else:
                yield example_id, ids, ids

    def _fit(self, ids, labels, overflow: Counter) -> list[tuple[int | None, tuple[np.ndarray, np.ndarray]]]:
        """Applies the overflow policy and the lower limits; returns (piece number or None, (ids, labels))."""
        limit, policy = self.options.max_length, self.options.overflow
        if len(ids) < self.options.min_length:
            raise SkipRecord("shorter than min_length")
        if limit is None or len(ids) <= limit:
            pieces = [(None, (ids, labels))]
        elif policy == "discard":
            raise SkipRecord("longer than max_length")
        elif policy == "truncate":
            overflow["conversations truncated"] += 1
            pieces = [(None, (ids[:limit], labels[:limit]))]
        else:
            overflow["conversations split"] += 1
            borders = range(0, len(ids), limit)
            pieces = [(number, (ids[a : a + limit], labels[a : a + limit])) for number, a in enumerate(borders)]
        # Position 0 is nobody's target, so a label there alone supervises nothing.
        usable = [p for p in pieces if len(p[1][0]) >= self.options.min_length and (p[1][1][1:] != IGNORE_INDEX).any()]
        if not usable:
            raise SkipRecord("nothing supervised" if len(pieces) == 1 else "no piece long enough and supervised")
        if len(usable) < len(pieces):
            overflow["pieces left out: too short or nothing supervised"] += len(pieces) - len(usable)
        return usable


_chunk_encoder: ChunkEncoder  # of a worker process, set once when it starts


def _start_worker(tokenizer: PreTrainedTokenizerBase, options: Options) -> None:
    global _chunk_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _chunk_encoder = ChunkEncoder(tokenizer, options)


def _encode_in_worker(chunk):
    return _chunk_encoder(chunk)


def encode_chunks(
    chunks: Iterable, tokenizer, options: Options, num_proc: int
) -> Iterator[tuple[pa.RecordBatch, Counters]]:
    """Encodes chunks in order, in this process or in `num_proc` others, with few chunks in memory at a time."""
    encoder = ChunkEncoder(tokenizer, options)  # also with workers: a template that cannot work fails here, in one line
    if num_proc == 1:
        yield from map(encoder, chunks)
        return
    # A fork would copy this process's threads in whatever state they are; the server imports once and forks clean.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    workers = ProcessPoolExecutor(num_proc, context, _start_worker, (tokenizer, options))
    with workers:
        waiting = deque()
        for chunk in chunks:
            waiting.append(workers.submit(_encode_in_worker, chunk))
            if len(waiting) > 4 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def write_rows(folder: Path, sources, tokenizer, options: Options, num_proc: int, show_progress: bool) -> Counters:
    """Writes `rows.arrow` and `counters.json`. Raises ValueError when no example comes out."""
    counters = Counters()
    turns = (item for source in sources for item in read_turns(source, counters))
    turns = iter(tqdm(turns, desc="conversations", unit=" conv", disable=not show_progress))
    chunks = iter(lambda: list(islice(turns, CHUNK_CONVERSATIONS)), [])
    with pa.ipc.new_stream(folder / "rows.arrow", ROWS_SCHEMA) as stream:
        for batch, batch_counters in encode_chunks(chunks, tokenizer, options, num_proc):
            stream.write_batch(batch)
            counters.add(batch_counters)
    if counters.examples == 0:
        roles = {f"unknown role {role}": count for role, count in counters.unknown_roles.most_common(5)}
        reasons = {**counters.skipped, **roles}
        details = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
        damage = f"; first damage: {counters.damage[0]}" if counters.damage else ""
        raise ValueError(
            f"no usable conversation in {', '.join(source.name for source in sources)}: "
            f"{counters.records} records read ({details or 'the data is empty'}){damage}"
        )
    counters.save(folder / "counters.json")
    return counters


# ---------------------------------------------------------------------------------------------------------------------
# The way in


@dataclass(frozen=True)
class ConversationData:
    """Examples of all sources, in their order.

    Columns: `input_ids` [S]; `labels` [S], where label t is the token at t or -100 for not supervised (the shift by one
    happens in the loss); `example_id`, `file:record` counted from 0 (in jsonl files: the line, counted from 1), and
    after a split `#piece` behind it.
    """

    train: datasets.Dataset
    val: datasets.Dataset | None  # None without `val_fraction`
    counters: Counters


def load_conversations(
    data_path: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = 2048,
    overflow: str = "truncate",
    min_length: int = 2,
    mask_assistant: bool = True,
    val_fraction: float = 0.0,
    seed: int = 0,
    num_proc: int = 1,
    cache_dir: str | Path | None = None,
    verbose: bool = True,
) -> ConversationData:
    """Reads, repairs and tokenises conversations; the rows lie in an Arrow file and are mapped, not loaded.

    data_path: files, directories and hub data sets, mixed in the order given.
    max_length, overflow, min_length, mask_assistant: see `Options`; lengths in tokens.
    val_fraction: share of the conversations (not of pieces) held out. Which ones depends only on `seed`, file name and
        record index, so runs with another tokenizer, length or folder hold out (nearly) the same ones.
    num_proc: processes that tokenise; the rows do not depend on it.
    cache_dir: folder of the Arrow files, by default inside the cache of `datasets`. A file is used again when sources
        (path, size, time), tokenizer and options are the same.
    verbose: progress bar on stderr, table on stdout; set it on one rank only.

    Several processes may call this at once with the same arguments; each returns the same rows.
    Raises OSError for a source that is missing or cannot be loaded, ValueError for an option out of range, a file of
    unknown form, and data without one usable conversation; always one line.
    """
    options = Options(max_length, overflow, min_length, mask_assistant)
    if not 0.0 <= val_fraction < 1.0:
        raise ValueError(f"val_fraction is {val_fraction}; it has to lie in [0, 1)")
    if num_proc < 1:
        raise ValueError(f"num_proc is {num_proc}; it has to be at least 1")
    sources = find_sources([data_path] if isinstance(data_path, (str, Path)) else data_path)
    root = Path(cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "conversation_data")
    folder = root / cache_key(sources, tokenizer, options)
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            built = Path(scratch, "built")
            built.mkdir()
            write_rows(built, sources, tokenizer, options, num_proc, show_progress=verbose)
            try:
                built.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster and wrote the same rows
                    raise
    counters = Counters.load(folder / "counters.json")
    if verbose:
        print(counters.table(), flush=True)
    rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    return ConversationData(*hold_out(rows, val_fraction, seed), counters)


def hold_out(rows: datasets.Dataset, fraction: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Splits by conversation: the `fraction` whose hashes are smallest is held out, at least one.

    Raises ValueError when nothing would be left to train on.
    """
    if fraction == 0.0:
        return rows, None
    conversation_of = [re.sub(r"#\d+$", "", example_id) for example_id in rows["example_id"]]
    conversations = sorted(set(conversation_of), key=lambda name: (draw(name, seed), name))
    count = max(1, round(fraction * len(conversations)))
    if count == len(conversations):
        raise ValueError(
            f"val_fraction {fraction} of {count} conversations leaves none to train on; give more data or 0"
        )
    held_out = set(conversations[:count])
    is_val = np.fromiter((name in held_out for name in conversation_of), dtype=bool, count=len(conversation_of))
    return rows.select(np.flatnonzero(~is_val)), rows.select(np.flatnonzero(is_val))


def draw(conversation: str, seed: int) -> bytes:
    """A hash that stands for a random number; the folder of the file does not enter."""
    return hashlib.blake2b(f"{seed}:{conversation.rpartition('/')[2]}".encode(), digest_size=8).digest()


def cache_key(sources, tokenizer: PreTrainedTokenizerBase, options: Options) -> str:
    """Names everything that the rows depend on."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    backend.pop("truncation", None)  # set anew by every call, so no property of the tokenizer
    backend.pop("padding", None)
    parts = [CACHE_VERSION, [source.fingerprint() for source in sources], asdict(options), backend]
    parts += [tokenizer.chat_template, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


class PadCollator:
    """Pads a list of examples on the right to the longest.

    Returns `input_ids`, `labels` and `attention_mask` (1 at real tokens), int64 [B, S], and `example_id`, B strings.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor | list[str]]:
        longest = max(len(row["input_ids"]) for row in rows)
        input_ids = torch.full((len(rows), longest), self.pad_token_id)
        labels = torch.full((len(rows), longest), IGNORE_INDEX)
        attention_mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            input_ids[index, :length] = torch.as_tensor(row["input_ids"])
            labels[index, :length] = torch.as_tensor(row["labels"])
            attention_mask[index, :length] = 1
        return {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": attention_mask,
            "example_id": [row["example_id"] for row in rows],
        }
