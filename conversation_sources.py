"""Where conversations come from: records of files and hub data sets, damaged ones included, and what became of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from script_utils import first_line

CONVERSATION_COLUMNS = ("conversations", "messages")
READ_CHARS = 1 << 20  # characters read at a time from a .json file


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

    def add(self, other: Counters) -> None:
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
    def load(cls, path: Path) -> Counters:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: Counter(value) if isinstance(value, dict) else value for name, value in saved.items()})


class SkipRecord(Exception):
    """A record that gives no example; the message is the reason in the table."""


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
