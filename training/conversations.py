"""Conversations in every usual form -> supervised training examples.

    data = load_conversations(["sharegpt.json", "owner/name:train"], tokenizer, max_length=2048, num_proc=4)
    loader = DataLoader(data.train, batch_size=8, shuffle=True, collate_fn=PadCollator(tokenizer.pad_token_id))

Sources are `.parquet`, `.jsonl` (or `.ndjson`) and `.json` files, the last two also as `.gz`, `.bz2` or `.xz` and in
UTF-8, UTF-16 or UTF-32; folders of them; folders that `save_to_disk` of `datasets` wrote; and hub data sets, written
`owner/name:split` or `owner/name:config:split`. A record keeps its turns in `conversations` or `messages`, as a list,
as its JSON text, or as columns; a turn is `role`/`content` or `from`/`value`. Beside the turns may stand a system
prompt (`system`, `system_prompt`, `system_message`) and `tools`; in an assistant's turn reasoning (`reasoning_content`,
`reasoning`, `thinking`) and `tool_calls`. A `.json` file may be an array, one record, or records one after the other.

What is not as it should be is repaired or skipped by these rules, from top to bottom, and counted; nothing aborts the
run as long as one usable conversation remains:

    found                                                    done
    -------------------------------------------------------  ----------------------------------------------------------
    broken record (cut-off file, damaged line)               left out, place reported; whole records after it are used
    record that is no object or has neither column           record skipped
    turns null, empty, or not a list                         record skipped
    unknown role                                             conversation ends before it: later turns build on its text
    call of a tool, or its result, and the chat template     conversation ends before it
      has no place for it; a result without a call
    reasoning, and the chat template has no place for it     left out
    system prompt beside the turns and as a turn             the turn stays
    turn that is no object; content null, blank or not text  turn dropped (a list of text parts is text: parts joined)
    half of a surrogate pair, or bytes that are no UTF-8     becomes U+FFFD
    system turn after the first user or assistant turn       turn dropped
    assistant turns before the first user turn               turns dropped: what they answer is missing
    same role again (but results of tools)                   joined to one turn, a blank line between
    thinking that does not end                               conversation ends with it
    user or system turns after the last assistant turn       turns dropped: nothing answers them
    no assistant turn left                                   record skipped
    chat template raises an error                            record skipped
    assistant text not found in the rendered text            record skipped (only with `mask_assistant`)
    longer than `max_length`                                 overflow policy, see `Options`
    shorter than `min_length`, or nothing supervised         example left out; record skipped when no example remains

What is supervised. The rendered conversation is tokenised once, exactly as `apply_chat_template` does it: the template
writes every special token, the tokenizer adds none, so BOS is never doubled. Labels are set where the assistant writes:
from the end of the prompt (all that decoding puts in front of a reply) through the end-of-turn token, thinking blocks
and calls of tools included. The line break that many templates put after the end-of-turn token is never generated and
not supervised. A reply that was cut off (thinking without an end, or `finish` is "length"), and every answer that
training/generate_answers.py wrote, stands after the prompt as the target wrote it; one that was cut off has no end of
turn. A reply that thinks was written with thinking on; for others `enable_thinking` says.
"""

import hashlib
import json
import math
import os
import re
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from script_utils import first_line
from training.chat_format import ChatFormat, Message, Setting, Span, is_cut_off, thinks
from training.sources import (
    Conversation,
    Counters,
    SkipRecord,
    find_sources,
    first_of,
    folder_lines,
    read_all,
)

IGNORE_INDEX = -100
TOOL_ROLES = ("tool", "function", "observation", "ipython", "tool_response", "tool_result")
ROLE_ALIASES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(TOOL_ROLES, "tool"),
}
OVERFLOW_POLICIES = ("discard", "truncate", "split")

CHUNK_CONVERSATIONS = 64  # conversations a worker encodes at a time
CACHE_VERSION = 3  # raise when the same input would give other rows
ROWS_SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),
        "example_id": pa.string(),
        "temperature": pa.float64(),
    },
)


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
    enable_thinking: bool = False  # for chat templates that have this switch

    def __post_init__(self):
        if self.overflow not in OVERFLOW_POLICIES:
            raise ValueError(f"overflow is {self.overflow!r}; it has to be one of {', '.join(OVERFLOW_POLICIES)}")
        if self.min_length < 1:
            raise ValueError(f"min_length is {self.min_length}; it has to be at least 1")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(
                f"max_length is {self.max_length}, below min_length, {self.min_length}: no example could satisfy both"
            )


# ---------------------------------------------------------------------------------------------------------------------
# From turns as found to clean messages


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
        repaired["half surrogate, or no UTF-8, in a text: replaced"] += 1
        content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return content


def as_turns(turns: object) -> list:
    """The list of turns behind the forms in which files keep one. Raises SkipRecord for what is none.

    These are the list itself; its JSON text; columns, {"role": [...], "content": [...]}, which `datasets` makes of it;
    and in the list, instead of an object, its JSON text or its pairs, which a parquet map gives.
    """
    if isinstance(turns, str):
        turns = parsed(turns)
    if isinstance(turns, dict) and turns and all(isinstance(column, list) for column in turns.values()):
        turns = [dict(zip(turns, values, strict=False)) for values in zip(*turns.values(), strict=False)]
    if not isinstance(turns, list):
        raise SkipRecord("no turns" if turns is None else f"turns are not a list but {type(turns).__name__}")
    if not turns:
        raise SkipRecord("no turns")
    turns = [parsed(turn) if isinstance(turn, str) else turn for turn in turns]
    return [dict(turn) if is_pairs(turn) else turn for turn in turns]


def parsed(text: str) -> object:
    """The value of a JSON text; other texts as they are."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def is_pairs(turn: object) -> bool:
    """Whether a turn is a list of (key, value)."""
    return isinstance(turn, list) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) for pair in turn
    )


def clean_calls(calls: object) -> list[dict] | None:
    """The calls of a turn as templates want them, arguments as objects; None for what is no list of calls."""
    calls = parsed(calls) if isinstance(calls, str) else calls
    if not isinstance(calls, list):
        return None
    cleaned = []
    for call in calls:
        function = call.get("function") or call if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments")
        arguments = parsed(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        cleaned.append(named | {"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return cleaned


def clean_message(role: str, turn: dict, repaired: Counter) -> Message:
    """A turn as a message; its content is "" when it has no text. Raises ValueError for calls that are none."""
    content = turn.get("value") if turn.get("content") is None else turn["content"]
    message = {"role": role, "content": clean_text(content, repaired) or ""}
    if role == "assistant":
        reasoning = first_of(turn, ("reasoning_content", "reasoning", "thinking"))
        if text := clean_text(reasoning, repaired):
            message["reasoning_content"] = text
        if turn.get("tool_calls"):
            message["tool_calls"] = clean_calls(turn["tool_calls"])
            if message["tool_calls"] is None:
                raise ValueError("tool_calls is no list of calls")
    if role == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    return message


def known_turns(turns: list, counters: Counters, tools: bool) -> Iterator[Message]:
    """Yields messages up to the first one that no template, or not this one, has a place for."""
    repaired, last = counters.repaired, None
    for turn in turns:
        if not isinstance(turn, dict):
            repaired["turn is not an object: dropped"] += 1
            continue
        name = turn.get("role") or turn.get("from")
        role = ROLE_ALIASES.get(str(name).strip().lower())
        if role is None or (role == "tool" and not (tools and last in ("assistant", "tool"))):
            counters.unknown_roles["(missing)" if name is None else str(name)[:40]] += 1
            why = "unknown role" if role is None else "result of a tool without a call that the template writes"
            repaired[f"{why}: conversation ended before it"] += 1
            return
        if role == "assistant" and turn.get("tool_calls") and not tools:
            repaired["call of a tool, no place in the chat template: conversation ended before it"] += 1
            return
        try:
            message = clean_message(role, turn, repaired)
        except ValueError as error:
            repaired[f"{error}: conversation ended before it"] += 1
            return
        if message.keys() == {"role", "content"} and not message["content"]:
            repaired["turn without text (empty, an image, ...): dropped"] += 1
            continue
        last = role
        yield message


def clean_messages(turns: object, counters: Counters, *, system: object = None, tools: bool = False) -> list[Message]:
    """Applies the rules of the module's table to the turns of one record, but those about unanswered turns.

    system: a system prompt that stands beside the turns. tools: whether the chat template writes calls and results.
    Returns messages, at least `{"role", "content"}`: an optional system message, then user and assistant in turn, with
    results of tools between calls and answers. Raises SkipRecord.
    """
    repaired = counters.repaired
    messages = []
    for message in known_turns(as_turns(turns), counters, tools):
        role, last = message["role"], messages[-1]["role"] if messages else None
        if role == "system" and last not in (None, "system"):
            repaired["late system turn: dropped"] += 1
        elif role in ("assistant", "tool") and last in (None, "system"):
            repaired["assistant turn before any user turn: dropped"] += 1
        elif role == last and role != "tool":
            repaired["same role again: joined"] += 1
            join(messages[-1], message)
        else:
            messages.append(message)
    if system is None:
        return messages
    text = clean_text(system, repaired)
    if text is None:
        repaired["system prompt beside the turns is no text: left out"] += 1
    elif not messages or messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text})
    elif messages[0]["content"] != text:
        repaired["system prompt beside the turns, and another one as a turn: left out"] += 1
    return messages


def join(message: Message, other: Message) -> None:
    """Makes one message of two: their texts with a blank line between, their calls one after the other."""
    for key in ("content", "reasoning_content"):
        texts = [text for text in (message.get(key), other.get(key)) if text]
        if texts:
            message[key] = "\n\n".join(texts)
    if "tool_calls" in other:
        message["tool_calls"] = message.get("tool_calls", []) + other["tool_calls"]


def clean_conversation(
    turns: object, counters: Counters, *, system: object = None, tools: bool = False
) -> list[Message]:
    """The messages of one record, an assistant message last. Arguments as above. Raises SkipRecord."""
    messages = clean_messages(turns, counters, system=system, tools=tools)
    for index, message in enumerate(messages[:-1]):
        if message["role"] == "assistant" and is_cut_off(message):
            counters.repaired["thinking without an end: conversation ended with it"] += 1
            del messages[index + 1 :]
            break
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
        counters.repaired["unanswered turn at the end: dropped"] += 1
    if not messages:
        raise SkipRecord("no user turn with an answer")
    return messages


def first_prompt(found: Conversation, counters: Counters) -> list[Message]:
    """The first user message of one record, and the system message before it. Raises SkipRecord."""
    messages = clean_messages(found.turns, counters, system=found.system)
    for index, message in enumerate(messages):
        if message["role"] == "user":
            return messages[: index + 1]
    raise SkipRecord("no user turn")


def tools_of(found: Conversation) -> str:
    """The functions that the assistant may call, as JSON; "" for none. Raises SkipRecord for another form."""
    tools = parsed(found.tools) if isinstance(found.tools, str) else found.tools
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SkipRecord("tools are not a list of objects")
    return json.dumps(tools)


def as_temperature(found: object) -> float | None:
    """The temperature at which a target wrote a record; None where that is not said."""
    known = isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < math.inf
    return float(found) if known else None


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
    """Turns a chunk of (example_id, conversation) into a record batch of examples and its counters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Options):
        self.chat = ChatFormat(tokenizer, options.enable_thinking)
        self.tokenizer = tokenizer
        self.options = options

    def __call__(self, chunk: list[tuple[str, Conversation]]) -> tuple[pa.RecordBatch, Counters]:
        counters = Counters()
        rendered = []  # (example_id, text, spans)
        temperatures = {example_id: as_temperature(found.temperature) for example_id, found in chunk}
        for example_id, found in chunk:
            try:
                rendered.append((example_id, *self._render(found, counters)))
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
                columns["temperature"].append(temperatures[example_id])
                counters.examples += 1
                counters.tokens += len(piece_ids)
                counters.supervised_tokens += int((piece_labels != IGNORE_INDEX).sum())
        return pa.record_batch(columns, schema=ROWS_SCHEMA), counters

    def _render(self, found: Conversation, counters: Counters) -> tuple[str, list[Span]]:
        """The text of a conversation and what the assistant wrote of it. Raises SkipRecord."""
        chat = self.chat
        messages = clean_conversation(found.turns, counters, system=found.system, tools=chat.knows_tools)
        messages, lost = chat.fit(messages)
        if lost:
            counters.repaired["reasoning, no place in the chat template: left out"] += lost
        reply = messages[-1]
        thinking = found.enable_thinking
        if not isinstance(thinking, bool):
            thinking = self.options.enable_thinking or thinks(reply)
        setting = Setting(tools_of(found), thinking)
        cut_off = is_cut_off(reply) or found.finish == "length"
        try:
            if "tool_calls" not in reply and (cut_off or found.finish == "eos"):
                return chat.render_as_written(messages, setting, finished=not cut_off)
            if self.options.mask_assistant:
                return chat.render_with_spans(messages, setting)
            return chat.render(messages, setting), []
        except (TemplateError, TypeError) as error:
            raise SkipRecord(f"chat template: {first_line(error)}") from error

    def _tokenise(self, rendered) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yields (example_id, ids [S], labels [S])."""
        if not rendered:
            return
        example_ids, texts, spans = zip(*rendered, strict=True)
        # A template writes BOS and all other special tokens; adding them again would double them.
        special = self.chat.adds_special_tokens
        encoded = self.tokenizer(list(texts), add_special_tokens=special, return_offsets_mapping=True, verbose=False)
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
    """Writes `rows.arrow` and `counters.json`. Raises ValueError when no example comes out.

    `datasets.Dataset.map` has no way for a chunk's counters to come back beside its rows, and its cache goes by
    pickles, in which a tokenizer that has been used differs from a new one.
    """
    counters = Counters()
    found = read_all(sources, counters, show_progress=show_progress)
    chunks = iter(lambda: list(islice(found, CHUNK_CONVERSATIONS)), [])
    with pa.ipc.new_stream(folder / "rows.arrow", ROWS_SCHEMA) as stream:
        for batch, batch_counters in encode_chunks(chunks, tokenizer, options, num_proc):
            stream.write_batch(batch)
            counters.add(batch_counters)
    if counters.examples == 0:
        roles = {f"unknown role {role}": count for role, count in counters.unknown_roles.most_common(5)}
        reasons = {**counters.skipped, **counters.repaired, **roles}
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
    after a split `#piece` at its end; `temperature` at which the target wrote the text, null where that is not known.
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
    enable_thinking: bool = False,
    val_fraction: float = 0.0,
    seed: int = 0,
    num_proc: int = 1,
    cache_dir: str | Path | None = None,
    rebuild: bool = False,
    verbose: bool = True,
) -> ConversationData:
    """Reads, repairs and tokenises conversations; the rows lie in an Arrow file and are mapped, not loaded.

    data_path: files, directories and hub data sets, mixed in the order given.
    max_length, overflow, min_length, mask_assistant, enable_thinking: see `Options`; lengths in tokens.
    val_fraction: share of the conversations (not of pieces) held out. Which ones depends only on `seed`, file name and
        record index, so runs with another tokenizer, length or folder hold out (nearly) the same ones.
    num_proc: processes that tokenise; the rows do not depend on it.
    cache_dir: folder of the Arrow files, by default inside the cache of `datasets`. A file is used again when sources
        (path, size, time), tokenizer and options are the same.
    rebuild: tokenise again what is there.
    verbose: progress bar on stderr, table on stdout; set it on one rank only.

    Several processes may call this at once with the same arguments; each returns the same rows.
    Raises OSError for a source that is missing or cannot be loaded, ValueError for an option out of range, a file of
    unknown form, and data without one usable conversation; always one line.
    """
    options = Options(max_length, overflow, min_length, mask_assistant, enable_thinking)
    if not 0.0 <= val_fraction < 1.0:
        raise ValueError(f"val_fraction is {val_fraction}; it has to lie in [0, 1)")
    if num_proc < 1:
        raise ValueError(f"num_proc is {num_proc}; it has to be at least 1")
    data_path = [data_path] if isinstance(data_path, (str, Path)) else data_path
    sources = find_sources(data_path)
    root = Path(cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "conversation_data")
    folder = root / cache_key(sources, tokenizer, options)
    if rebuild or not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            built = Path(scratch, "built")
            built.mkdir()
            write_rows(built, sources, tokenizer, options, num_proc, show_progress=verbose)
            if rebuild and folder.exists():
                folder.rename(Path(scratch, "old"))
            try:
                built.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster and wrote the same rows
                    raise
    counters = Counters.load(folder / "counters.json")
    if verbose:
        print("\n".join([*folder_lines(data_path), counters.table()]), flush=True)
    rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    return ConversationData(*hold_out(rows, val_fraction, seed), counters)


def hold_out(rows: datasets.Dataset, fraction: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Splits by conversation: of every file the `fraction` whose hashes are smallest is held out, at least one in all.

    Raises ValueError when nothing would be left to train on.
    """
    if fraction == 0.0:
        return rows, None
    conversation_of = [re.sub(r"#\d+$", "", example_id) for example_id in rows["example_id"]]
    files: dict[str, list[str]] = {}  # file -> its conversations, smallest hash first
    for name in sorted(set(conversation_of), key=lambda name: (hash_of(name, seed), name)):
        files.setdefault(name.rpartition(":")[0], []).append(name)
    held_out, seen = set(), 0
    for _, conversations in sorted(files.items()):
        count = round(fraction * (seen + len(conversations))) - round(fraction * seen)
        held_out.update(conversations[:count])
        seen += len(conversations)
    if not held_out:
        held_out.add(max(files.values(), key=len)[0])
    if len(held_out) == seen:
        raise ValueError(
            f"val_fraction is {fraction}: of {seen} conversations it leaves none to train on; give more data or 0"
        )
    is_val = np.fromiter((name in held_out for name in conversation_of), dtype=bool, count=len(conversation_of))
    return rows.select(np.flatnonzero(~is_val)), rows.select(np.flatnonzero(is_val))


def hash_of(conversation: str, seed: int) -> bytes:
    """A hash of a conversation, in the place of a random number. The folder of its file does not enter."""
    return hashlib.blake2b(f"{seed}:{conversation.rpartition('/')[2]}".encode(), digest_size=8).digest()


def cache_key(sources, tokenizer: PreTrainedTokenizerBase, options: Options) -> str:
    """Names everything that the rows depend on."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    backend.pop("truncation", None)  # set anew by every call, so no property of the tokenizer
    backend.pop("padding", None)
    parts = [CACHE_VERSION, [source.fingerprint() for source in sources], asdict(options), backend]
    parts += [tokenizer.chat_template, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def known_or_nan(number: float | None) -> float:
    return math.nan if number is None else number


class PadCollator:
    """Pads a list of examples on the right to the longest.

    Returns `input_ids`, `labels` and `attention_mask` (1 at real tokens), int64 [B, S], `example_id`, B strings, and
    `temperature`, float64 [B], nan where it is not known.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor | list[str]]:
        ids, labels = ([torch.as_tensor(row[name]).long() for row in rows] for name in ("input_ids", "labels"))
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "example_id": [row["example_id"] for row in rows],
            "temperature": torch.tensor([known_or_nan(row["temperature"]) for row in rows], dtype=torch.float64),
        }
