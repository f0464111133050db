"""Conversations to examples: what is read, repaired, supervised, cut and held out, with word-by-word tokenizers.

Expected rows are written as text: tokens with blanks between, ⏎ for a line break, ␣ for a blank, [ ] around what is
supervised.
"""

import json
import math

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from training import conversations as conversation_data
from training import sources as conversation_sources
from training.chat_format import ChatFormat
from training.conversations import IGNORE_INDEX, PadCollator, clean_conversation, load_conversations
from training.sources import Counters, SkipRecord, find_sources

WORDS = ["a", "b", "c", "d", "e", "hi", "yo", "sys", "hm", "x", "y", "HI", "YO"]
WORDS += ["user", "assistant", "system", "User", "Assistant", "System"]
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|endhead|>",
    "<|eot|>",
    "<think>",
    "</think>",
    "?",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|head|>' + m.role + '<|endhead|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|endhead|>\n\n' }}{% endif %}"
)
# Thinking is dropped from all turns but the last, which gets an empty block when it has none.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ answer }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + prompt_suffix }}{% endif %}"
)
QWEN3 = "{% set prompt_suffix = '' %}" + THINKING
QWEN35 = "{% set prompt_suffix = '<think>\n' %}" + THINKING
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOUTING = CHATML.replace("m.content", "m.content | upper")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


def make_tokenizer(template=CHATML, adds_bos=False):
    """A token per word, per blank and per run of line breaks; like Llama's, it can put BOS in front of plain text."""
    pieces = ["[UNK]", " ", "\n", "\n\n", ":", *WORDS]
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|\s|\w+|[^\w\s]"), "isolated")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if adds_bos:
        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="[UNK]")
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents):
    """u, a, u, a, ... in role/content form."""
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(contents)]


def write_jsonl(path, conversations, column="messages"):
    path.write_text("".join(json.dumps({column: conversation}) + "\n" for conversation in conversations))
    return str(path)


@pytest.fixture
def load(tmp_path):
    def load(data_path, tokenizer=None, **options):
        options = {"cache_dir": tmp_path / "cache", "verbose": False} | options
        return load_conversations(data_path, tokenizer or make_tokenizer(), **options)

    return load


def show(tokenizer, row):
    """A row as text, see the top of this file."""
    shown, inside = [], False
    names = {"\n": "⏎", "\n\n": "⏎⏎", " ": "␣"}
    for token_id, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (IGNORE_INDEX, token_id)
        token = tokenizer.convert_ids_to_tokens(token_id)
        if inside and label == IGNORE_INDEX:
            shown[-1] += "]"
        shown.append(("[" if label != IGNORE_INDEX and not inside else "") + names.get(token, token))
        inside = label != IGNORE_INDEX
    return " ".join(shown) + ("]" if inside else "")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("read_chars", [5, 64, 1 << 20])
def test_cut_off_json_gives_every_whole_record(load, tmp_path, monkeypatch, read_chars):
    """A reader that drops the file, or its last whole record, or that counts characters where it says bytes."""
    monkeypatch.setattr(conversation_sources, "READ_CHARS", read_chars)
    records = [{"id": "é \ue000 😀 [{", "conversations": turns("hi", "yo \\" * n)} for n in range(1, 6)]
    whole = json.dumps(records, ensure_ascii=False, indent=1).encode()
    start = whole.rindex(b'{\n  "id"')
    path = tmp_path / "cut.json"
    path.write_bytes(b"\xef\xbb\xbf" + whole[: start + 12])  # a byte order mark, and the cut inside the é
    counters = load(path).counters
    assert (counters.records, counters.conversations, counters.broken_records) == (4, 4, 1)
    assert f"byte {start + 3:,}," in counters.damage[0]
    assert "the file ends inside it" in counters.damage[0]


@pytest.mark.parametrize("read_chars", [5, 1 << 20])
def test_damage_inside_json_costs_one_record(load, tmp_path, monkeypatch, read_chars):
    """A reader that gives up at the first damage, or that takes a turn of the broken record for a record."""
    monkeypatch.setattr(conversation_sources, "READ_CHARS", read_chars)
    records = [json.dumps({"conversations": turns("a", "b", "c", word)}) for word in ("d", "e", "f")]
    path = tmp_path / "data.json"
    path.write_text("[" + ",".join([records[0], records[1].replace('"role"', "role", 1), records[2]]) + "]")
    data = load(path)
    assert (data.counters.records, data.counters.broken_records) == (2, 1)
    assert f"record at byte {len(records[0]) + 2}," in data.counters.damage[0]
    assert "the file ends" not in data.counters.damage[0]
    assert data.train["example_id"][:] == [f"{path}:0", f"{path}:1"]


@pytest.mark.parametrize("text", ['{"messages": T}', '{"messages": T}\n{"messages": T}\n', "[]", '[{"messages": T}]'])
def test_json_forms(load, tmp_path, text):
    """One object, objects one after the other under a .json name, an array, an empty array."""
    path = tmp_path / "data.json"
    path.write_text(text.replace("T", json.dumps(turns("hi", "yo"))))
    if text == "[]":
        with pytest.raises(ValueError, match="the data is empty"):
            load(path)
    else:
        assert load(path).counters.records == text.count("T")


def test_broken_jsonl_lines_are_reported_with_their_number(load, tmp_path):
    """A broken line or broken UTF-8 that aborts the run, or that is left out silently."""
    good = json.dumps({"messages": turns("hi", "yo")}).encode()
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join([good, good[:-3], b"", b'{"messages": "\xff"}', good]))
    data = load(path)
    assert (data.counters.records, data.counters.broken_records) == (2, 2)
    assert [place.split(": ")[1] for place in data.counters.damage] == ["line 2", "line 4"]
    assert data.train["example_id"][:] == [f"{path}:1", f"{path}:5"]


def test_mixed_sources(load, tmp_path, monkeypatch):
    """Sources of several kinds in one call: one that is lost, out of order, or whose examples cannot be told apart."""
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    rows = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a"}], "id": 1}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "deep" / "b.parquet")
    write_jsonl(folder / "a.jsonl", [turns("hi", "b")], column="conversations")
    (folder / "readme.md").write_text("not data")
    (tmp_path / "c.json").write_text(json.dumps([{"messages": turns("hi", "c"), "conversations": None}]))
    hub = datasets.Dataset.from_list([{"messages": turns("hi", "d"), "other": 1}])
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config, split: {("owner/name", None, "train"): hub}[name, config, split]
    )
    tokenizer = make_tokenizer()
    data = load([str(tmp_path / "c.json"), "owner/name:train", str(folder)], tokenizer)
    assert [row["example_id"].removeprefix(f"{tmp_path}/") for row in data.train] == [
        "c.json:0",
        "owner/name:train:0",
        "folder/a.jsonl:1",
        "folder/deep/b.parquet:0",
    ]
    assert ["cdba"[index] in show(tokenizer, row) for index, row in enumerate(data.train)] == [True] * 4


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("owner/name:train", ("owner/name", None, "train")),
        ("owner/name:train[:1%]", ("owner/name", None, "train[:1%]")),
        ("owner/name-1.0:all:test_sft", ("owner/name-1.0", "all", "test_sft")),
    ],
)
def test_hub_names(monkeypatch, name, parts):
    """A split or configuration that is read as part of the name."""
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda path, config, split: asked.append((path, config, split)))
    assert find_sources([name])[0].name == name
    assert asked == [parts]


def test_source_errors_are_one_clear_line(load, tmp_path, monkeypatch):
    """An error that does not name the value, or that does not say the way out."""

    def no_hub(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", no_hub)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "alpaca.json").write_text('[{"instruction": "hi", "output": "yo"}]')
    pq.write_table(pa.Table.from_pylist([{"prompt": "hi"}]), tmp_path / "prompt.parquet")
    for entry, kind, words in [
        ("missing.jsonl", FileNotFoundError, ["missing.jsonl", "no such file"]),
        ("notes.txt", ValueError, ["notes.txt", "'.txt'", ".jsonl"]),
        ("empty", ValueError, ["empty", ".parquet"]),
        ("bad.parquet", ValueError, ["bad.parquet", "parquet"]),
        ("alpaca.json", ValueError, ["alpaca.json", "instruction, output", "conversations and messages"]),
        ("prompt.parquet", ValueError, ["prompt.parquet", "prompt", "conversations and messages"]),
    ]:
        with pytest.raises(kind) as error:
            load(str(tmp_path / entry))
        assert all(word in str(error.value) for word in words)
        assert "\n" not in str(error.value)
    with pytest.raises(OSError, match=r"'owner/name:train' cannot be loaded \(Couldn't reach the hub\)"):
        load("owner/name:train")
    with pytest.raises(ValueError, match="no data"):
        load([])


# ---------------------------------------------------------------------------------------------------------------------
# Repair


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
IMAGE = [{"type": "image"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("found", "expected", "repair"),
    [
        ([system("s"), user("a"), assistant("b")], [system("s"), user("a"), assistant("b")], None),
        (
            [assistant("x"), user("a"), assistant("b")],
            [user("a"), assistant("b")],
            "assistant turn before any user turn",
        ),
        (
            [system("s"), assistant("x"), user("a"), assistant("b")],
            [system("s"), user("a"), assistant("b")],
            "before any",
        ),
        ([user("a"), user("c"), assistant("b")], [user("a\n\nc"), assistant("b")], "joined"),
        ([user("a"), assistant("b"), assistant("c")], [user("a"), assistant("b\n\nc")], "joined"),
        ([user("a"), assistant("b"), user("c")], [user("a"), assistant("b")], "unanswered turn"),
        ([user("a"), assistant("b"), user("c"), assistant(None)], [user("a"), assistant("b")], "turn without text"),
        ([system(""), user("a"), user(" \n"), assistant("b")], [user("a"), assistant("b")], "turn without text"),
        ([user("a"), system("s"), user("c"), assistant("b")], [user("a\n\nc"), assistant("b")], "late system turn"),
        ([None, user("a"), "text", assistant("b")], [user("a"), assistant("b")], "not an object"),
        ([user(PARTS), assistant("b")], [user("ab"), assistant("b")], None),
        ([user("a"), user(IMAGE), user(7), assistant("b")], [user("a"), assistant("b")], "turn without text"),
        ([user("a"), assistant("\ud83d b")], [user("a"), assistant("\ufffd b")], "half surrogate"),
        ([user("a"), assistant("\ud83d\ude00")], [user("a"), assistant("\U0001f600")], "half surrogate"),
        (
            [user("a"), assistant("b"), {"role": "tool", "content": "c"}, assistant("d")],
            [user("a"), assistant("b")],
            "result of a tool",
        ),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], [user("a"), assistant("b")], None),
        # Arrow gives every turn all keys
        ([user("a") | {"from": None, "value": None}, assistant("b")], [user("a"), assistant("b")], None),
    ],
)
def test_repair_rules(found, expected, repair):
    """Each rule of the module's table; nothing else may be counted as repaired when a conversation is whole."""
    counters = Counters()
    assert clean_conversation(found, counters) == expected
    assert (repair is None and not counters.repaired) or any(repair in name for name in counters.repaired)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "no turns"),
        ([], "no turns"),
        ("hi", "not a list"),
        ({"role": "user"}, "not a list"),
        ([system("s")], "no user turn with an answer"),
        ([user("a")], "no user turn with an answer"),
        ([assistant("a")], "no user turn with an answer"),
        ([user(None), assistant(None)], "no user turn with an answer"),
        ([{"role": "tool", "content": "a"}, user("b"), assistant("c")], "no user turn with an answer"),
        ([{"content": "a"}, {"content": "b"}], "no user turn with an answer"),
    ],
)
def test_records_without_a_conversation_are_skipped(found, reason):
    """Rows that real data has and that crash a plain loop over turns."""
    with pytest.raises(SkipRecord, match=reason):
        clean_conversation(found, Counters())


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("human", "gpt"),
        ("user", "assistant"),
        ("User", " GPT "),
        ("prompter", "chatgpt"),
        ("human", "bing"),
        ("human", "bard"),
    ],
)
def test_role_aliases(question, answer):
    """A role that ShareGPT exports use and that is taken for unknown."""
    messages = clean_conversation([{"from": question, "value": "a"}, {"from": answer, "value": "b"}], Counters())
    assert messages == [user("a"), assistant("b")]


def test_nothing_becomes_the_text_none_and_the_counts_add_up(load, tmp_path):
    """Null contents that str() turns into "None"; records that vanish without being counted."""
    bad = [None, [], [user(None), assistant("a")], [user("a"), assistant(None)], [{"from": None, "value": None}]]
    tool = [user("a"), assistant("b"), {"role": "tool", "content": "c"}]
    path = write_jsonl(tmp_path / "data.jsonl", [*bad, tool, turns("hi", None, "hi", "yo")])
    with open(path, "a") as file:
        file.write('7\n{"text": "no conversation"}\n')
    tokenizer = make_tokenizer()
    data = load(path, tokenizer)
    unknown = tokenizer.unk_token_id
    assert all(unknown not in row["input_ids"] for row in data.train)
    counters = data.counters
    assert counters.records == 9 == counters.conversations + sum(counters.skipped.values())
    assert counters.skipped == {
        "no turns": 2,
        "no user turn with an answer": 3,
        "record is not an object": 1,
        "no conversation column": 1,
    }
    assert counters.unknown_roles == {"tool": 1, "(missing)": 1}
    assert counters.tokens == sum(len(row["input_ids"]) for row in data.train)
    for line in ("records read", "skipped: no turns", "unknown role: tool", "supervised tokens"):
        assert line in counters.table()


def test_no_usable_conversation_is_an_error_with_reasons(load, tmp_path):
    """An empty data set that is returned as if it were one; and an error that leaves a cache entry behind."""
    path = write_jsonl(tmp_path / "data.jsonl", [[], [{"role": "narrator", "content": "a"}]])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no usable conversation in .*2 records read .*no turns: 1.*narrator: 1"):
            load(path)


# ---------------------------------------------------------------------------------------------------------------------
# What is supervised


HELLO = turns("hi", "yo a", "b", "c")


@pytest.mark.parametrize(
    ("template", "conversation", "expected"),
    [
        (
            CHATML,
            [system("sys"), *HELLO],
            "<|im_start|> system ⏎ sys <|im_end|> ⏎ <|im_start|> user ⏎ hi <|im_end|> ⏎ "
            "<|im_start|> assistant ⏎ [yo ␣ a <|im_end|>] ⏎ "
            "<|im_start|> user ⏎ b <|im_end|> ⏎ <|im_start|> assistant ⏎ [c <|im_end|>] ⏎",
        ),
        (
            LLAMA3,
            turns(" hi ", " yo", "b", "c\n"),
            "<s> <|head|> user <|endhead|> ⏎⏎ hi <|eot|> <|head|> assistant <|endhead|> ⏎⏎ [yo <|eot|>] "
            "<|head|> user <|endhead|> ⏎⏎ b <|eot|> <|head|> assistant <|endhead|> ⏎⏎ [c <|eot|>]",
        ),
        (
            QWEN3,  # no thinking in the data: the template adds an empty block to the last turn
            HELLO,
            "<|im_start|> user ⏎ hi <|im_end|> ⏎ <|im_start|> assistant ⏎ [yo ␣ a <|im_end|>] ⏎ "
            "<|im_start|> user ⏎ b <|im_end|> ⏎ "
            "<|im_start|> assistant ⏎ [<think> ⏎⏎ </think> ⏎⏎ c <|im_end|>] ⏎",
        ),
        (
            QWEN3,  # thinking in the data: dropped from the first turn, kept in the last
            turns("hi", "<think>\nhm\n</think>\n\nyo", "b", "<think>\nx\ny\n</think>\n\nc"),
            "<|im_start|> user ⏎ hi <|im_end|> ⏎ <|im_start|> assistant ⏎ [yo <|im_end|>] ⏎ "
            "<|im_start|> user ⏎ b <|im_end|> ⏎ "
            "<|im_start|> assistant ⏎ [<think> ⏎ x ⏎ y ⏎ </think> ⏎⏎ c <|im_end|>] ⏎",
        ),
        (
            QWEN35,  # decoding starts after <think>, so that token is the prompt's
            turns("hi", "<think>\nhm\n</think>\n\nyo", "b", "<think>\nx\n</think>\n\nc"),
            "<|im_start|> user ⏎ hi <|im_end|> ⏎ <|im_start|> assistant ⏎ [yo <|im_end|>] ⏎ "
            "<|im_start|> user ⏎ b <|im_end|> ⏎ "
            "<|im_start|> assistant ⏎ <think> ⏎ [x ⏎ </think> ⏎⏎ c <|im_end|>] ⏎",
        ),
        (
            MARKED,  # the markers leave the end-of-turn token out
            HELLO,
            "<|im_start|> user ⏎ hi <|im_end|> ⏎ <|im_start|> assistant ⏎ [yo ␣ a <|im_end|>] ⏎ "
            "<|im_start|> user ⏎ b <|im_end|> ⏎ <|im_start|> assistant ⏎ [c <|im_end|>] ⏎",
        ),
        (
            SHOUTING,  # changes the texts: found by prefixes
            HELLO,
            "<|im_start|> user ⏎ HI <|im_end|> ⏎ <|im_start|> assistant ⏎ [YO ␣ [UNK] <|im_end|>] ⏎ "
            "<|im_start|> user ⏎ [UNK] <|im_end|> ⏎ <|im_start|> assistant ⏎ [[UNK] <|im_end|>] ⏎",
        ),
        (
            None,  # no template: the plain format
            [system("sys"), *HELLO],
            "System : ␣ sys ⏎⏎ User : ␣ hi ⏎⏎ Assistant : [␣ yo ␣ a </s>] ⏎⏎ User : ␣ b ⏎⏎ Assistant : [␣ c </s>] ⏎⏎",
        ),
        (
            CHATML,  # a user who quotes headers, and a reply that is a word of the header
            turns("<|im_end|>\n<|im_start|>assistant\nx", "assistant", "assistant", "user"),
            "<|im_start|> user ⏎ <|im_end|> ⏎ <|im_start|> assistant ⏎ x <|im_end|> ⏎ "
            "<|im_start|> assistant ⏎ [assistant <|im_end|>] ⏎ "
            "<|im_start|> user ⏎ assistant <|im_end|> ⏎ <|im_start|> assistant ⏎ [user <|im_end|>] ⏎",
        ),
        (
            CHATML,  # the reply's line break merges with the header's into one token, which decoding cannot produce
            turns("hi", "\nyo"),
            "<|im_start|> user ⏎ hi <|im_end|> ⏎ <|im_start|> assistant ⏎⏎ [yo <|im_end|>] ⏎",
        ),
        (
            QWEN35,  # thinking that does not end, and begins with the prompt's own <think>
            turns("hi", "<think> a"),
            "<|im_start|> user ⏎ hi <|im_end|> ⏎ <|im_start|> assistant ⏎ <think> ⏎ [␣ a]",
        ),
    ],
)
def test_assistant_mask_token_by_token(load, tmp_path, template, conversation, expected):
    """Header, user or line-break tokens that are supervised; reply, thinking or end-of-turn tokens that are not."""
    tokenizer = make_tokenizer(template)
    data = load(write_jsonl(tmp_path / "data.jsonl", [conversation]), tokenizer)
    assert show(tokenizer, data.train[0]) == expected


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN3, QWEN35, MARKED])
def test_ids_are_those_of_the_chat_template(load, tmp_path, template):
    """Training on other tokens than decoding sees, a doubled BOS among them: this tokenizer adds one to plain text."""
    tokenizer = make_tokenizer(template, adds_bos=True)
    (row,) = load(write_jsonl(tmp_path / "data.jsonl", [HELLO]), tokenizer).train
    assert row["input_ids"] == tokenizer.apply_chat_template(HELLO)["input_ids"]
    assert row["input_ids"].count(tokenizer.bos_token_id) == (template == LLAMA3)


def test_fallback_format_has_one_bos(load, tmp_path):
    """The format for tokenizers without a template: BOS where plain encoding puts it, once."""
    tokenizer = make_tokenizer(None, adds_bos=True)
    (row,) = load(write_jsonl(tmp_path / "data.jsonl", [turns("hi", "yo")]), tokenizer).train
    assert show(tokenizer, row) == "<s> User : ␣ hi ⏎⏎ Assistant : [␣ yo </s>] ⏎⏎"


def test_every_token_supervised_without_mask(load, tmp_path):
    """mask_assistant=False that still masks."""
    (row,) = load(write_jsonl(tmp_path / "data.jsonl", [HELLO]), mask_assistant=False).train
    assert row["labels"] == row["input_ids"]


def test_template_that_refuses_a_conversation_costs_that_record(load, tmp_path):
    """A template without a system role that ends the run, or a template that can render nothing and says so late."""
    path = write_jsonl(tmp_path / "data.jsonl", [[system("sys"), *HELLO], HELLO])
    counters = load(path, make_tokenizer(NO_SYSTEM)).counters
    assert counters.skipped == {"chat template: no system role": 1}
    with pytest.raises(ValueError, match="cannot render a question and its answer: nothing"):
        load(path, make_tokenizer("{{ raise_exception('nothing') }}"))


def test_spans_that_cannot_be_found_cost_that_record(load, tmp_path):
    """Guessing where the assistant's text is, when the template reverses texts and adds something to the last turn."""
    template = QWEN3.replace("{{ answer }}", "{{ answer | reverse }}")
    path = write_jsonl(tmp_path / "data.jsonl", [turns("hi", "abc", "b", "abc"), turns("hi", "a")])
    counters = load(path, make_tokenizer(template)).counters
    assert counters.skipped == {"assistant text not found in the rendered conversation": 1}


def test_the_longest_end_token_is_found():
    """An end-of-turn token that another token begins: labels would stop inside it."""
    tokenizer = make_tokenizer(CHATML.replace("'<|im_end|>\n'", "'</s>more\n'"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>more"]})
    assert ChatFormat(tokenizer).end_of_turn == "</s>more"


# ---------------------------------------------------------------------------------------------------------------------
# Length, split, processes, cache


# ChatML, 30 tokens: 4 header and "hi", 2 end, 3 header, 8 reply and end (from 9 on), 1 break; 6; 3, 2 (from 27 on), 1
LONG = turns("hi", "a b c d", "b", "e")


def test_overflow_policies(load, tmp_path):
    """Pieces that lose or repeat tokens, labels that move, a truncation that keeps what should be discarded."""
    tokenizer = make_tokenizer()
    path = write_jsonl(tmp_path / "data.jsonl", [LONG, turns("hi", "yo")])
    long, short = load(path, tokenizer, max_length=None).train
    assert (len(long["input_ids"]), len(short["input_ids"])) == (30, 12)

    data = load(path, tokenizer, max_length=20, overflow="discard")
    assert [row["example_id"] for row in data.train] == [f"{path}:2"]
    assert data.counters.skipped == {"longer than max_length": 1}

    data = load(path, tokenizer, max_length=20, overflow="truncate")
    assert data.train[0]["input_ids"] == long["input_ids"][:20]
    assert data.train[0]["labels"] == long["labels"][:20]
    assert data.counters.overflow == {"conversations truncated": 1}

    data = load(path, tokenizer, max_length=14, overflow="split")
    assert [row["example_id"] for row in data.train] == [f"{path}:1#0", f"{path}:1#1", f"{path}:2"]
    assert data.train[0]["input_ids"] + data.train[1]["input_ids"] == long["input_ids"][:28]
    assert data.train[0]["labels"] + data.train[1]["labels"] == long["labels"][:28]
    left_out = {
        "pieces left out: too short or nothing supervised": 1
    }  # the last two: an end token at position 0, a break
    assert data.counters.overflow == {"conversations split": 1} | left_out


def test_temperature_of_a_text(load, tmp_path):
    """Greedy text that is taken for sampled, or the other way round: 0 is known, and what is no temperature is not."""
    found = [0, 1, 0.7, None, "0.7", True, -1, math.inf]
    records = [{"messages": turns("hi", f"a {index}"), "temperature": value} for index, value in enumerate(found)]
    path, longer = tmp_path / "data.jsonl", tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert load(path).train["temperature"][:] == [0.0, 1.0, 0.7, *[None] * 5]
    longer.write_text(json.dumps({"messages": LONG, "temperature": 0.5}))
    assert load(longer, max_length=14, overflow="split").train["temperature"][:] == [0.5, 0.5]


def test_lower_limits(load, tmp_path):
    """An example that gives no loss term: too short, truncated before the reply, or supervised at position 0 only."""
    path = write_jsonl(tmp_path / "data.jsonl", [turns("hi", "yo"), LONG])
    counters = load(path, min_length=13).counters
    assert counters.skipped == {"shorter than min_length": 1}
    counters = load(path, max_length=12).counters
    assert (counters.conversations, counters.skipped) == (2, {})
    with pytest.raises(ValueError, match="nothing supervised: 2"):
        load(path, max_length=9)
    # pieces of 9: the first of each has no reply; "yo" and the reply at 9 are at position 0, but more follows them
    data = load(path, max_length=9, overflow="split")
    assert [example_id.rpartition(":")[2] for example_id in data.train["example_id"]] == ["1#1", "2#1", "2#3"]
    # pieces of 10 of "yo": the second is its end token, at position 0, and a break
    data = load(path, max_length=10, overflow="split")
    assert [example_id.rpartition(":")[2] for example_id in data.train["example_id"]] == ["1#0", "2#0", "2#1", "2#2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overflow": "crop"}, "'crop'.*discard, truncate, split"),
        ({"min_length": 0}, "min_length is 0"),
        ({"min_length": 20, "max_length": 10}, "max_length is 10, below min_length, 20"),
        ({"val_fraction": 1.0}, r"val_fraction is 1.0.*\[0, 1\)"),
        ({"val_fraction": 0.9}, "leaves none to train on"),
        ({"num_proc": 0}, "num_proc is 0"),
    ],
)
def test_option_errors_name_the_value(load, tmp_path, options, words):
    """Impossible options that fail late, or with another module's message."""
    path = write_jsonl(tmp_path / "data.jsonl", [HELLO])
    with pytest.raises(ValueError, match=words):
        load(path, **options)


def test_held_out_split(load, tmp_path):
    """A conversation with pieces on both sides; a split that moves with length, folder or call, or ignores the seed."""
    (tmp_path / "other").mkdir()
    path = write_jsonl(tmp_path / "data.jsonl", [LONG] * 40)
    moved = write_jsonl(tmp_path / "other" / "data.jsonl", [LONG] * 40)

    def split(path, **options):
        data = load(path, val_fraction=0.2, **options)
        sides = [
            {example_id.split(":")[-1].split("#")[0] for example_id in part["example_id"]}
            for part in (data.train, data.val)
        ]
        assert not sides[0] & sides[1]
        assert (len(sides[0]), len(sides[1])) == (32, 8)
        return sides[1]

    whole = split(path)
    assert split(path, max_length=14, overflow="split") == whole
    assert split(moved) == whole
    assert split(path, seed=1) != whole
    assert load(path).val is None


def test_two_processes_give_the_rows_of_one(load, tmp_path):
    """Rows in the order in which workers finish; counters of workers that are lost."""
    contents = [turns("hi", "a b " * (index % 7 + 1)) if index % 5 else [] for index in range(200)]
    path = write_jsonl(tmp_path / "data.jsonl", contents)
    one = load(path, max_length=20, overflow="split", num_proc=1)
    two = load(path, max_length=20, overflow="split", num_proc=2, cache_dir=tmp_path / "cache2")
    assert one.train.to_list() == two.train.to_list()
    assert one.counters == two.counters


def test_cache_is_used_for_the_same_input_only(load, tmp_path, monkeypatch):
    """Tokenising again for every rank; or rows of an older file, template or option."""
    path = write_jsonl(tmp_path / "data.jsonl", [HELLO])
    first = load(path)
    calls = []
    write_rows = conversation_data.write_rows
    monkeypatch.setattr(conversation_data, "write_rows", lambda *a, **k: calls.append(1) or write_rows(*a, **k))
    again = load(path)
    assert (again.train.to_list(), again.counters, calls) == (first.train.to_list(), first.counters, [])
    load(path, mask_assistant=False)
    load(path, make_tokenizer(LLAMA3))
    write_jsonl(tmp_path / "data.jsonl", [HELLO, HELLO])
    assert load(path).train.num_rows == 2
    assert len(calls) == 3


def test_table_is_printed_at_the_end(load, tmp_path, capsys):
    """Repairs that nobody is told about."""
    path = write_jsonl(tmp_path / "data.jsonl", [HELLO, []])
    load(path, verbose=True)
    assert "skipped: no turns" in capsys.readouterr().out


def test_collator_pads_on_the_right():
    """Padding that is supervised or attended to, or that is longer than the batch needs."""
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "example_id": "x:0", "temperature": 0.7},
        {"input_ids": [8], "labels": [8], "example_id": "x:1", "temperature": None},
    ]
    batch = PadCollator(pad_token_id=3)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 3, 3]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["example_id"] == ["x:0", "x:1"]
    assert batch["temperature"][0] == 0.7
    assert batch["temperature"][1].isnan()
    assert {batch[name].dtype for name in ("input_ids", "labels", "attention_mask")} == {torch.int64}
