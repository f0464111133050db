"""Where conversations come from: records of files and hub data sets, damaged ones included, and what became of them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from script_utils import first_line, read_text, text_encoding
from training.written_features import SUFFIX

CONVERSATION_COLUMNS = ("conversations", "messages")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
# What else of a record matters; "finish", "enable_thinking" and "temperature" are training/generate_answers.py's.
MORE_COLUMNS = (*SYSTEM_COLUMNS, "tools", "finish", "finish_reason", "enable_thinking", "temperature")
Report = Callable[[int], object]  # is told how many bytes of a source have been read
READ_CHARS = 1 << 16  # characters read at a time from a .json file; the price of an error grows with it


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
    """A sliding piece of a text file, with a cursor; memory is one record or `READ_CHARS`, whichever is larger.

    Streaming parsers such as ijson end at the first damage; here the whole records after it are still found.
    """

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
        return self.offset + len(self.text[:position].encode(self.handle.encoding, self.handle.errors))

    def ends_too_soon(self, error: json.JSONDecodeError) -> bool:
        """Whether `error` may be only the end of the window: an open string, or an error in the last few characters.

        16 characters hold the longest thing that is reported where it begins, "\\uXXXX" twice or "-Infinity".
        """
        return error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16


# Between records of an array, of concatenated records, and of records a line. U+FEFF is a byte order mark.
SEPARATORS = re.compile(r"[\s,\[\]\ufeff]*")
RECORD_START = re.compile(r'\{\s*(?:"|\Z)')  # where a file is damaged, the next thing that may be an object
BLANKS = " \t\r\n\ufeff"  # around the JSON of a line
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def open_text(file: BinaryIO) -> TextIO:
    """The JSON text of a file, perhaps compressed, in UTF-8, UTF-16 or UTF-32; its lines end at \\n only.

    What UTF-8 cannot decode survives as half surrogates, so that characters map back to bytes exactly.
    """
    file.seek(0)
    opener = OPENERS.get(Path(file.name).suffix.lower())
    content = file if opener is None else opener(file)
    encoding = text_encoding(content.read(4))
    content.seek(0)
    errors = "surrogateescape" if encoding == "utf-8" else "replace"
    return TextIOWrapper(content, encoding=encoding, errors=errors, newline="\n")


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
        found = RECORD_START.search(window.text, window.position + 1)
        if found is None:
            window.position = len(window.text)
            if not window.grow():
                return
            window.position = -1
            continue
        window.position = found.start()
        try:
            value, end = decode_next(window, decoder)
        except json.JSONDecodeError:
            continue
        if any(column in value for column in CONVERSATION_COLUMNS):
            return
        window.position = end - 1  # a turn of the broken record; there is no record inside it


def read_json(file: BinaryIO, counters: Counters) -> Iterator[tuple[int, object]]:
    """Yields (index, record). Broken records are counted with their byte offset and do not get an index."""
    decoder = json.JSONDecoder()
    index = 0
    with open_text(file) as handle:
        window = TextWindow(handle)
        while window.skip(SEPARATORS):
            try:
                record, window.position = decode_next(window, decoder)
            except json.JSONDecodeError as error:
                start, stop = window.byte(window.position), window.byte(error.pos)
                cut = " (the file ends inside it)" if window.at_end and window.ends_too_soon(error) else ""
                counters.broken(f"{file.name}: record at byte {start:,}, error at byte {stop:,}: {error.msg}{cut}")
                move_to_next_record(window, decoder)
                continue
            yield index, record
            index += 1


def read_jsonl(file: BinaryIO, counters: Counters) -> Iterator[tuple[int | str, object]]:
    """Yields (line number, record), lines counted from 1. Broken lines are counted with their number.

    A line that is an array of records gives each of them. A file that is one array over many lines is read as such.
    """
    if not has_a_record_a_line(file):
        yield from read_json(file, counters)
        return
    with open_text(file) as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip(BLANKS):
                continue
            try:
                line.encode()  # what is no UTF-8 was read as half surrogates
                record = json.loads(line.strip(BLANKS))
            except UnicodeEncodeError:
                counters.broken(f"{file.name}: line {number:,}: not UTF-8")
            except (ValueError, RecursionError) as error:  # broken JSON, brackets without end
                counters.broken(f"{file.name}: line {number:,}: {error}")
            else:
                if is_list_of_records(record):
                    yield from ((f"{number}.{index}", item) for index, item in enumerate(record))
                else:
                    yield number, record


def has_a_record_a_line(file: BinaryIO) -> bool:
    """Whether the first line of a .jsonl file is more than the beginning of an array or of an object."""
    handle = open_text(file)
    first = next((line.strip(BLANKS) for line in handle if line.strip(BLANKS)), "")
    handle.detach()  # the file stays open
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return first != "{" and not first.startswith("[")
    return True


def is_list_of_records(value: object) -> bool:
    """Whether a line's value is an array of records, not one of turns."""
    return isinstance(value, list) and all(
        isinstance(item, dict) and any(column in item for column in CONVERSATION_COLUMNS) for item in value
    )


def conversation_columns(source: str, columns: Iterable[str]) -> list[str]:
    """Those of `columns` that are read. Raises ValueError when none holds conversations."""
    columns = list(columns)
    known = [name for name in columns if name in CONVERSATION_COLUMNS]
    if not known:
        raise ValueError(
            f"{source}: no conversation in columns {', '.join(sorted(columns))}; "
            f"known are {' and '.join(CONVERSATION_COLUMNS)}: rename the column that holds the list of turns, "
            "or leave the file out"
        )
    return known + [name for name in columns if name in MORE_COLUMNS]


def read_parquet(file: BinaryIO, counters: Counters) -> Iterator[tuple[int, object]]:
    """Yields (row index, record). Raises ValueError for a file that is not a whole parquet file.

    Arrow reads the file by its path. The cursor of `file` follows the rows, as whoever shows progress looks at it.
    """
    path = Path(file.name)
    try:
        table = pq.ParquetFile(path)
        columns = conversation_columns(path.as_posix(), table.schema_arrow.names)
        rows = (row for batch in table.iter_batches(batch_size=256, columns=columns) for row in batch.to_pylist())
        row_bytes = path.stat().st_size / max(1, table.metadata.num_rows)
        for index, row in enumerate(rows):
            file.seek(int((index + 1) * row_bytes))
            yield index, row
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet ({first_line(error)}); fetch the file again") from error


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".ndjson": read_jsonl, ".json": read_json}
KNOWN = f"{', '.join(READERS)} (the last three also {', '.join(OPENERS)})"


def kind_of(path: Path) -> str | None:
    """The suffix in READERS that a file's name ends with, compressed or not; None for any other file."""
    name = Path(path.name.lower())
    if name.suffix in OPENERS:
        name = name.with_suffix("")
        return name.suffix if name.suffix in READERS and name.suffix != ".parquet" else None
    return name.suffix if name.suffix in READERS else None


@dataclass(frozen=True)
class FileSource:
    """One file; `name` is its path as the caller wrote it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.as_posix()

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size

    def records(self, counters: Counters, report: Report) -> Iterator[tuple[int | str, object]]:
        """Yields (index, record), and reports bytes read. What a compressed file has before it breaks off is used."""
        try:
            with open(self.path, "rb") as file:
                for item in READERS[kind_of(self.path)](file, counters):
                    report(file.tell())
                    yield item
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # about the path, not about what is in the file
                raise
            counters.broken(f"{self.path}: {first_line(error)}: the rest is not read")

    def fingerprint(self) -> list:
        state = self.path.stat()
        return [self.name, str(self.path.resolve()), state.st_size, state.st_mtime_ns]


@dataclass(frozen=True)
class DatasetSource:
    """One split of a data set, from the hub (`owner/name:split`, `owner/name:config:split`) or of `save_to_disk`."""

    name: str
    rows: datasets.Dataset

    @property
    def nbytes(self) -> int:
        return self.rows.data.nbytes

    def records(self, counters: Counters, report: Report) -> Iterator[tuple[int, object]]:
        """Yields (index, record), and reports bytes read, as if all rows were of one size."""
        rows = self.rows.select_columns(conversation_columns(self.name, self.rows.column_names))
        row_bytes = self.nbytes / max(1, len(rows))
        for index, row in enumerate(rows):
            report(int((index + 1) * row_bytes))
            yield index, row

    def fingerprint(self) -> list:
        return [
            self.name,
            self.rows.num_rows,
            [FileSource(Path(f["filename"])).fingerprint() for f in self.rows.cache_files],
        ]


HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?:(?P<split>\w+(\[[^\]]*\])?)")


def open_hub_source(name: re.Match) -> DatasetSource:
    """Loads the hub data set that HUB_NAME matched. Raises OSError when it cannot be had."""
    try:
        rows = datasets.load_dataset(name["repository"], name["config"], split=name["split"])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise OSError(
            f"hub data set {name[0]!r} cannot be loaded ({first_line(error)}); "
            "check its name and split, or give local files"
        ) from error
    return DatasetSource(name[0], rows)


def open_saved(folder: Path) -> DatasetSource:
    """A data set that `save_to_disk` wrote. Raises ValueError when it cannot be read, or is several splits."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise ValueError(f"{folder}: this data set has the splits {', '.join(splits)}: name one, {folder / splits[0]}")
    try:
        return DatasetSource(folder.as_posix(), datasets.load_from_disk(str(folder)))
    except (OSError, ValueError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{folder}: cannot be read as a saved data set ({first_line(error)})") from error


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of a data set, or of several splits, wrote a folder."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def is_run_record(path: Path) -> bool:
    """Whether a file is what a program of ours wrote about a run, beside its output."""
    if not path.name.endswith("run.json"):
        return False
    try:
        record = json.loads(read_text(path))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and {"arguments", "commit", "versions"} <= set(record)


@dataclass(frozen=True)
class Folder:
    """What a folder and those below it hold; hidden files and folders are passed over."""

    path: str  # as the caller wrote it
    read: list[Path]  # data files and folders of `save_to_disk`, by name
    left_out: list[str]  # names, and why where that is not the suffix

    @property
    def line(self) -> str:
        """One line: what is read and what is not."""
        read = listed([file.relative_to(self.path).as_posix() for file in self.read])
        return f"{self.path}: read {read}" + (f"; not read: {listed(self.left_out)}" if self.left_out else "")


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names with commas; of a long list the first ones and a count."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def list_folder(path: str) -> Folder:
    """Raises ValueError for a folder without data."""
    folder = Folder(path, [], [])
    for place, folders, files in os.walk(path):
        here = Path(place)
        if is_saved(here):
            folder.read.append(here)
            folders.clear()
            continue
        states = [(here / name).relative_to(path).as_posix() for name in folders if name.endswith(SUFFIX)]
        folder.left_out.extend(f"{name} (hidden states)" for name in states)
        folders[:] = sorted(name for name in folders if not is_hidden(name) and not name.endswith(SUFFIX))
        for name in filter(lambda name: not is_hidden(name), [*folders, *files]):
            file, shown = here / name, (here / name).relative_to(path).as_posix()
            if name in folders:
                if file.is_symlink():
                    folder.left_out.append(f"{shown} (a link to a folder: name it itself)")
            elif kind_of(file) is None or not file.is_file():
                folder.left_out.append(shown)
            elif is_run_record(file):
                folder.left_out.append(f"{shown} (the record of a run)")
            else:
                folder.read.append(file)
    folder.read.sort()
    folder.left_out.sort()
    if not folder.read:
        found = f"; it holds {listed(folder.left_out)}" if folder.left_out else ""
        raise ValueError(f"{path}: no {KNOWN} file in this directory{found}")
    return folder


def is_hidden(name: str) -> bool:
    """Copies that editors, notebooks, download tools and macOS keep beside the files of a user."""
    return name.startswith(".") or name == "__MACOSX"


def folder_lines(data_path: Sequence[str]) -> list[str]:
    """A line for every folder among the entries: what is read of it and what is not."""
    return [list_folder(str(entry)).line for entry in data_path if Path(entry).is_dir() and not is_saved(Path(entry))]


def find_sources(data_path: Sequence[str]) -> list[FileSource | DatasetSource]:
    """Files, directories and hub names -> sources, in the order given, the files of a directory by name.

    Raises FileNotFoundError for what does not exist and ValueError for a file or directory without a known form.
    """
    sources = []
    for entry in data_path:
        path = Path(entry)
        if not str(entry).strip():
            raise ValueError("the path of the data is empty")
        if path.is_dir():
            files = [path] if is_saved(path) else list_folder(str(entry)).read
            sources += [open_saved(file) if file.is_dir() else FileSource(file) for file in files]
        elif path.is_file():
            if kind_of(path) is None:
                raise ValueError(f"{entry}: unknown suffix {path.suffix!r}; known are {KNOWN}")
            sources.append(FileSource(path))
        elif hub_name := HUB_NAME.fullmatch(str(entry)):
            sources.append(open_hub_source(hub_name))
        else:
            raise FileNotFoundError(f"{entry}: no such file or directory (a hub data set is written owner/name:split)")
    if not sources:
        raise ValueError("no data: give at least one file, directory or hub data set")
    return sources


@dataclass(frozen=True)
class Conversation:
    """What a record says, as found."""

    turns: object
    system: object = None  # a system prompt beside the turns
    tools: object = None  # functions that the assistant may call
    finish: object = None  # how the last reply ended; "length": it was cut off
    enable_thinking: object = None  # what the target was told that wrote it
    temperature: object = None  # at which the target wrote it; 0: greedy


def read_all(
    sources: Sequence[FileSource | DatasetSource], counters: Counters, *, show_progress: bool
) -> Iterator[tuple[str, Conversation]]:
    """As `read_conversations`, of one source after the other, with a progress bar on stderr by bytes read."""
    total = sum(source.nbytes for source in sources)
    with tqdm(desc="conversations", total=total, unit="B", unit_scale=True, disable=not show_progress) as bar:
        for source in sources:
            start = bar.n
            yield from read_conversations(
                source, counters, lambda place, start=start: bar.update(start + place - bar.n)
            )
            bar.update(start + source.nbytes - bar.n)


def read_conversations(
    source: FileSource | DatasetSource, counters: Counters, report: Report = lambda nbytes: None
) -> Iterator[tuple[str, Conversation]]:
    """Yields (example_id, conversation as found) of every record that has a conversation column.

    Raises ValueError when the source has records, but no record with such a column.
    """
    columns, has_known = set(), False
    for index, record in source.records(counters, report):
        counters.records += 1
        if isinstance(record, list):  # of turns, without a record around it
            record = {"messages": record}
        if not isinstance(record, dict):
            counters.skipped["record is not an object"] += 1
            continue
        found = [column for column in CONVERSATION_COLUMNS if column in record]
        if not found:
            columns.update(record)
            counters.skipped["no conversation column"] += 1
            continue
        has_known = True
        yield (
            f"{source.name}:{index}",
            Conversation(
                turns=first_of(record, found),
                system=first_of(record, SYSTEM_COLUMNS),
                tools=record.get("tools"),
                finish=first_of(record, ("finish", "finish_reason")),
                enable_thinking=record.get("enable_thinking"),
                temperature=record.get("temperature"),
            ),
        )
    if columns and not has_known:
        conversation_columns(source.name, columns)


def first_of(record: Mapping[str, object], names: Sequence[str]) -> object:
    """The first of these entries that is there and not null."""
    return next((record[name] for name in names if record.get(name) is not None), None)
