"""Conversations as they are found: templates of every kind, thinking, tools, folders, compressed files, encodings.

Templates are written in the style of the families that they stand for. Rows are shown as in test_conversation_data.py.
"""

import bz2
import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import train
from evaluation.prompts import read_questions
from loading.tokenizer import encode_prompt
from script_utils import run_record, write_json
from tests.test_conversation_data import (
    CHATML,
    MARKED,
    NO_SYSTEM,
    QWEN3,
    QWEN35,
    assistant,
    load,
    make_tokenizer,
    show,
    user,
)
from tests.test_conversation_data import system as system_turn
from training import generate_answers as gen
from training import sources as conversation_sources
from training.chat_format import ChatFormat
from training.conversations import clean_conversation, hold_out
from training.sources import Counters, find_sources, folder_lines
from training.trainer import spread

__all__ = ["load"]  # a fixture

INST = (  # Llama 2, Mistral: nothing is written for a reply that is still to come
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|head|> ' + m.content + ' <|endhead|>' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
INST_TRIMMED = INST.replace("m.content", "(m.content | trim)").replace("+ eos_token", "+ ' ' + eos_token")
INST_MARKED = INST.replace(
    "{{ ' ' + m.content + eos_token }}",
    "{{ ' ' }}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}",
)
SWITCH = CHATML.replace(  # the prompt gets an empty thinking block, the turns of a conversation do not
    "'<|im_start|>assistant\n'",
    "'<|im_start|>assistant\n' + ('' if enable_thinking | default(true) else '<think>\n\n</think>\n\n')",
)
TOOLS = (  # Qwen3: thinking in a field of its own, calls, results
    "{% if tools %}{{ '<|im_start|>system\n' + tools[0].name + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<|eot|>' + call.function.name + ' ' + ARGUMENTS }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OBJECT_TOOLS = TOOLS.replace("ARGUMENTS", "(call.function.arguments.values() | join(' '))")
TEXT_TOOLS = TOOLS.replace("ARGUMENTS", "call.function.arguments")
HEAD = "<|im_start|> user ⏎ hi <|im_end|> ⏎ <|im_start|> assistant ⏎ "


@pytest.fixture
def row(load, tmp_path):
    """Loads one record; returns its row as text and what was counted as repaired."""

    def row(template, record, **options):
        path = tmp_path / "one.jsonl"
        path.write_text(json.dumps(record) + "\n")
        tokenizer = make_tokenizer(template)
        data = load(str(path), tokenizer, **options)
        return show(tokenizer, data.train[0]), data.counters.repaired

    return row


def chat(*turns, **more):
    return {"messages": list(turns)} | more


# ---------------------------------------------------------------------------------------------------------------------
# Templates


@pytest.mark.parametrize("template", [INST, INST_MARKED])
def test_first_token_of_a_reply_without_generation_prompt(row, template):
    """[INST] templates: the first word of every reply was left out, one of a single word kept its end token only."""
    shown, _ = row(template, chat(user("hi"), assistant("yo"), user("a"), assistant("b c")))
    assert shown == "<s> <|head|> ␣ hi ␣ <|endhead|> [␣ yo </s>] <|head|> ␣ a ␣ <|endhead|> [␣ b ␣ c </s>]"


def test_trimmed_texts_without_generation_prompt(row):
    """The same where the template trims texts and puts a blank before its end token."""
    shown, _ = row(INST_TRIMMED, chat(user(" hi"), assistant(" yo\n")))
    assert shown == "<s> <|head|> ␣ hi ␣ <|endhead|> [␣ yo ␣ </s>]"


@pytest.mark.parametrize("template", [INST, INST_MARKED, CHATML, MARKED, QWEN3, QWEN35, SWITCH, OBJECT_TOOLS, None])
@pytest.mark.parametrize("thinking", [False, True])
def test_unsupervised_start_is_the_prompt_of_decoding(load, tmp_path, template, thinking):
    """A last reply that is supervised after another text than the prompt which decoding would give the target."""
    (tmp_path / "one.jsonl").write_text(json.dumps(chat(user("hi"), assistant(" yo"))) + "\n")
    tokenizer = make_tokenizer(template)
    (found,) = load(str(tmp_path / "one.jsonl"), tokenizer, enable_thinking=thinking).train
    prompt = "".join(tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, "hi", enable_thinking=thinking)))
    unsupervised = [token for token, label in zip(found["input_ids"], found["labels"], strict=True) if label == -100]
    text = "".join(tokenizer.convert_ids_to_tokens(unsupervised))
    assert text.startswith(prompt) or prompt.startswith(text.rstrip("\n"))  # line breaks may be one token
    if template == SWITCH:
        assert prompt.endswith("assistant\n" if thinking else "</think>\n\n")


# ---------------------------------------------------------------------------------------------------------------------
# Thinking


CUT = [
    (CHATML, "<think>\nx", HEAD + "[<think> ⏎ x]"),
    (QWEN3, "<think>\nx", HEAD + "[<think> ⏎ x]"),
    (QWEN35, "<think>\nx", HEAD + "<think> ⏎ [x]"),  # the prompt's own <think>, once
]


@pytest.mark.parametrize(("template", "reply", "expected"), CUT)
@pytest.mark.parametrize("finish", [{}, {"finish": "length"}, {"finish_reason": "length"}])
def test_thinking_cut_off(row, template, reply, expected, finish):
    """The row had an empty thinking block that the target never wrote, its thinking as the answer, and an end token."""
    assert row(template, chat(user("hi"), assistant(reply), **finish))[0] == expected


def test_answers_stand_behind_the_prompt_that_the_target_saw(row):
    """Answers of training/generate_answers.py: a blank that a template doubles, an end that a cut answer never had."""
    answer = chat(user("hi"), assistant(" yo"), enable_thinking=False)
    head = "<s> <|head|> ␣ hi ␣ <|endhead|> "
    assert row(INST, answer | {"finish": "eos"})[0] == head + "[␣ yo </s>]"
    assert row(INST, answer | {"finish": "length"})[0] == head + "[␣ yo]"
    thought = chat(user("hi"), assistant("x\n</think>\n\nyo"), finish="eos", enable_thinking=True)
    assert row(QWEN35, thought)[0] == HEAD + "<think> ⏎ [x ⏎ </think> ⏎⏎ yo <|im_end|>]"
    assert row(SWITCH, answer | {"finish": "length"})[0] == HEAD + "<think> ⏎⏎ </think> ⏎⏎ [␣ yo]"
    assert row(SWITCH, answer | {"finish": "length", "enable_thinking": True})[0] == HEAD + "[␣ yo]"


def test_replies_before_a_cut_one_are_supervised(row):
    """A conversation of several turns that lost all but its last, or that went on after half a thought."""
    shown, _ = row(CHATML, chat(user("hi"), assistant("yo"), user("a"), assistant("b"), finish="length"))
    assert shown == HEAD + "[yo <|im_end|>] ⏎ <|im_start|> user ⏎ a <|im_end|> ⏎ <|im_start|> assistant ⏎ [b]"
    shown, repaired = row(CHATML, chat(user("hi"), assistant("<think>x"), user("a"), assistant("b")))
    assert shown == HEAD + "[<think> x]"
    assert repaired["thinking without an end: conversation ended with it"] == 1


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field(row, field):
    """Dropped without a count; the row said '<think></think>' in front of an answer that was thought about."""
    reply = assistant("yo") | {field: "x"}
    thought = HEAD + "[<think> ⏎ x ⏎ </think> ⏎⏎ yo <|im_end|>] ⏎"
    assert row(OBJECT_TOOLS, chat(user("hi"), reply))[0] == thought  # the template knows the field
    assert row(QWEN3, chat(user("hi"), reply))[0] == thought  # it knows thinking in the content only
    assert row(QWEN35, chat(user("hi"), reply))[0] == thought.replace("[<think> ⏎ x", "<think> ⏎ [x")
    no_think = "{% set ns = namespace() %}" + CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    shown, repaired = row(no_think, chat(user("hi"), reply))
    assert shown == HEAD + "[yo <|im_end|>] ⏎"
    assert repaired == {"reasoning, no place in the chat template: left out": 1}
    assert row(OBJECT_TOOLS, chat(user("hi"), assistant(None) | {field: "x"}))[0] == HEAD + "[<think> ⏎ x]"


def test_generation_leaves_out_what_the_template_refuses(tmp_path, capsys):
    """One record with a system turn ended a whole run of training/generate_answers.py with a traceback."""
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(chat(system_turn("sys"), *TURNS)) + "\n" + LINE)
    flags = ["--model_name", "M", "--data_path", str(path), "--output", str(tmp_path / "o.jsonl")]
    prompts = gen.read_prompts(gen.build_parser().parse_args(flags), make_tokenizer(NO_SYSTEM))
    assert len(prompts) == 1
    assert "left out: 1 chat template: no system role" in capsys.readouterr().out


def test_the_blank_before_an_answer_is_kept():
    """Tokenizers that mark the beginnings of words lose it where the answer is decoded alone."""
    backend = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2, "<e>": 3}, unk_token="c"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<e>"]})
    assert tokenizer.decode([1, 2]) == "bc"
    assert gen.continuation(tokenizer, [0], [1, 2]) == " bc"
    assert gen.continuation(tokenizer, [0], [2, 3]) == "c<e>"
    assert gen.continuation(tokenizer, [0], []) == ""


# ---------------------------------------------------------------------------------------------------------------------
# Tools and system prompts

CALL = {"type": "function", "function": {"name": "a", "arguments": {"b": "c"}}}


@pytest.mark.parametrize("content", ["", None, "x"])
@pytest.mark.parametrize(
    "calls",
    [[CALL], json.dumps([CALL]), [CALL["function"]], [{"function": {"name": "a", "arguments": '{"b": "c"}'}}]],
)
def test_calls_of_tools(row, content, calls):
    """The call was dropped, with all turns after it, or its turn was supervised as if it had ended before the call."""
    turns = [user("hi"), assistant(content) | {"tool_calls": calls}, {"role": "tool", "content": "d"}, assistant("e")]
    shown, repaired = row(OBJECT_TOOLS, chat(*turns, tools=[{"name": "a"}]))
    said = f"{content} " if content else ""
    assert shown == (
        f"<|im_start|> system ⏎ a <|im_end|> ⏎ {HEAD}[{said}<|eot|> a ␣ c <|im_end|>] ⏎ <|im_start|> [UNK] ⏎ d "
        "<|im_end|> ⏎ <|im_start|> assistant ⏎ [e <|im_end|>] ⏎"
    )
    assert not repaired


def test_a_call_at_the_end_and_two_results(row):
    """A conversation that ends with a call; parallel calls whose results were joined."""
    results = [{"role": "tool", "content": text} for text in "de"]
    two = assistant("") | {"tool_calls": [CALL, CALL]}
    shown, _ = row(OBJECT_TOOLS, chat(user("hi"), two, *results, assistant("") | {"tool_calls": [CALL]}))
    tool = "<|im_start|> [UNK] ⏎ {} <|im_end|> ⏎ "
    assert shown == (
        f"{HEAD}[<|eot|> a ␣ c <|eot|> a ␣ c <|im_end|>] ⏎ {tool.format('d')}{tool.format('e')}"
        "<|im_start|> assistant ⏎ [<|eot|> a ␣ c <|im_end|>] ⏎"
    )


def test_calls_beside_an_empty_thinking_block():
    """'<t' was taken for the prompt's, as decoding's prompt goes on with '<think>' and the call with '<tool_call>'."""
    template = SWITCH.replace(
        "m.content + '<|im_end|>\n'", "m.content }}{{ '<tool>' if m.tool_calls }}{{ '<|im_end|>\n'"
    )
    turns = [user("hi"), assistant("") | {"tool_calls": [CALL]}, {"role": "tool", "content": "d"}, assistant("e")]
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    text, spans = ChatFormat(tokenizer).render_with_spans(turns)
    assert [text[start:end] for start, end in spans] == ["<tool><|im_end|>", "e<|im_end|>"]


def test_arguments_that_quote_the_end_of_a_turn(row):
    """The supervised call ended inside its arguments."""
    call = {"function": {"name": "a", "arguments": {"b": "<|im_end|> c"}}}
    turns = [user("hi"), assistant("") | {"tool_calls": [call]}, {"role": "tool", "content": "d"}, assistant("e")]
    shown, _ = row(OBJECT_TOOLS, chat(*turns))
    assert "[<|eot|> a ␣ <|im_end|> ␣ c <|im_end|>] ⏎" in shown


def test_templates_that_want_arguments_as_text(row):
    """A template that joins texts, given an object: the record was lost to a TypeError."""
    shown, _ = row(TEXT_TOOLS, chat(user("hi"), assistant("") | {"tool_calls": [CALL]}))
    assert shown.startswith(HEAD + "[<|eot|> a ␣ [UNK]")
    assert shown.endswith("<|im_end|>] ⏎")


def test_tools_without_a_place_are_counted(row):
    """A template without tools: the conversation ends before the call, and the table says so."""
    turns = [user("hi"), assistant("yo"), user("a"), assistant("b") | {"tool_calls": [CALL]}, assistant("c")]
    shown, repaired = row(CHATML, chat(*turns))
    assert shown == HEAD + "[yo <|im_end|>] ⏎"
    assert repaired["call of a tool, no place in the chat template: conversation ended before it"] == 1
    shown, repaired = row(OBJECT_TOOLS, chat(*turns[:3], assistant("b") | {"tool_calls": "call me"}))
    assert (shown, repaired["tool_calls is no list of calls: conversation ended before it"]) == (
        HEAD + "[yo <|im_end|>] ⏎",
        1,
    )


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
def test_system_prompt_beside_the_turns(row, column):
    """Dropped without a count; the template's default system turn took its place."""
    start = "<|im_start|> system ⏎ sys <|im_end|> ⏎ "
    turns = [user("hi"), assistant("yo")]
    shown, repaired = row(CHATML, chat(*turns) | {column: "sys"})
    assert (shown, repaired) == (start + HEAD + "[yo <|im_end|>] ⏎", {})
    assert row(CHATML, chat(system_turn("sys"), *turns) | {column: "sys"}) == (shown, {})  # once
    assert row(CHATML, chat(*turns) | {column: ""})[0] == HEAD + "[yo <|im_end|>] ⏎"
    shown, repaired = row(CHATML, chat(system_turn("sys"), *turns) | {column: "x"})
    assert (shown, len(repaired)) == (start + HEAD + "[yo <|im_end|>] ⏎", 1)


# ---------------------------------------------------------------------------------------------------------------------
# Forms of turns

TURNS = [user("hi"), assistant("yo")]
COLUMNS = {"role": ["user", "assistant"], "content": ["hi", "yo"]}


@pytest.mark.parametrize(
    "turns", [json.dumps(TURNS), COLUMNS, [json.dumps(t) for t in TURNS], [list(t.items()) for t in TURNS]]
)
def test_turns_in_other_forms(turns):
    """JSON texts, columns, pairs: 'turns are not a list', or turns that were dropped unnamed."""
    assert clean_conversation(turns, Counters()) == TURNS


@pytest.mark.parametrize(
    "text",
    [
        "[{M}, {M}]",
        "[\n{M},\n{M}\n]\n",
        "{M}\n{M}",
        "[{T}]\n[{T}]\n",
        '{\n "messages": [{T}]\n}\n{\n "messages": [{T}]\n}\n',
        "\ufeff{M}\r\n\r\n{M}\r\n",
    ],
)
def test_forms_of_jsonl(load, tmp_path, text):
    """Arrays, on one line or many, lines that are lists of turns, objects over several lines, a byte order mark."""
    turns = ", ".join(map(json.dumps, TURNS))
    text = text.replace("{M}", f'{{"messages": [{turns}]}}').replace("{T}", turns)
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    data = load(str(tmp_path / "a.jsonl"))
    assert (data.counters.records, data.counters.conversations, data.counters.damage) == (2, 2, [])
    assert len(set(data.train["example_id"])) == 2


def test_parquet_columns(load, tmp_path):
    """A map for every turn, and a struct of lists, as `datasets` writes a sequence of dicts; other columns are read."""
    pairs = pa.array([[list(turn.items()) for turn in TURNS]], pa.list_(pa.map_(pa.string(), pa.string())))
    pq.write_table(pa.table({"messages": pairs, "system": ["sys"]}), tmp_path / "map.parquet")
    pq.write_table(pa.table({"messages": pa.array([COLUMNS])}), tmp_path / "lists.PARQUET")
    data = load([str(tmp_path / "map.parquet"), str(tmp_path / "lists.PARQUET")])
    with_system, without = (show(make_tokenizer(), found) for found in data.train)
    assert with_system == "<|im_start|> system ⏎ sys <|im_end|> ⏎ " + without


def test_nothing_usable_names_what_was_dropped(load, tmp_path):
    """'no user turn with an answer' alone, where every turn was dropped for a reason."""
    (tmp_path / "a.jsonl").write_text(json.dumps(chat([1], [2])) + "\n")
    with pytest.raises(ValueError, match="turn is not an object: dropped: 2"):
        load(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": "hello"}) + "\n")
    with pytest.raises(ValueError, match="turns are not a list but str"):
        load(str(tmp_path / "a.jsonl"))


# ---------------------------------------------------------------------------------------------------------------------
# Folders and files

LINE = json.dumps(chat(*TURNS)) + "\n"


def test_folder_says_what_it_reads(load, tmp_path, capsys):
    """Files that were passed over without a word, copies in hidden folders that were read, a record taken for data."""
    folder = tmp_path / "data"
    for hidden in (".ipynb_checkpoints", "__MACOSX", ".cache"):
        (folder / hidden).mkdir(parents=True)
        (folder / hidden / "x-checkpoint.jsonl").write_text(LINE)
    (folder / "._x.jsonl").write_bytes(b"\0\5\26\7")
    (folder / "x.jsonl").write_text(LINE)
    (folder / "UPPER.JSONL").write_text(LINE)
    (folder / "other.ndjson").write_text(LINE)
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(LINE.encode()))
    (folder / "list.json.bz2").write_bytes(bz2.compress(b"[" + LINE.encode() + b"]"))
    (folder / "notes.txt").write_text("")
    (folder / "t.parquet.gz").write_text("")
    (folder / "link").symlink_to(folder / ".cache")
    write_json(folder / "own.run.json", run_record(train.build_parser().parse_args(REQUIRED)))
    data = load(str(folder), verbose=True)
    assert data.counters.conversations == data.counters.records == 5
    line = capsys.readouterr().out.splitlines()[0]
    assert line == (
        f"{folder}: read UPPER.JSONL, list.json.bz2, more.jsonl.gz, other.ndjson, x.jsonl; not read: link (a link to "
        "a folder: name it itself), notes.txt, own.run.json (the record of a run), t.parquet.gz"
    )
    for index in range(20):
        (folder / f"n{index}.csv").write_text("")
    assert "and 12 more" in folder_lines([str(folder)])[0]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"no .*file in this directory; it holds notes\.txt"):
        load(str(tmp_path / "none"))


REQUIRED = ["--model_name", "M", "--data_path", "D", "--num_stages", "2", "--output_dir", "O"]


def test_saved_data_sets(load, tmp_path):
    """save_to_disk: its dataset_info.json was taken for data."""
    rows = datasets.Dataset.from_list([chat(*TURNS)])
    rows.save_to_disk(tmp_path / "data" / "saved")
    (tmp_path / "data" / "x.jsonl").write_text(LINE)
    assert load(str(tmp_path / "data" / "saved")).counters.conversations == 1
    assert load(str(tmp_path / "data")).counters.conversations == 2
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"splits: this data set has the splits test, train: name one"):
        load(str(tmp_path / "splits"))
    assert load(str(tmp_path / "splits" / "train")).counters.conversations == 1


def test_compressed_file_that_breaks_off(load, tmp_path):
    """A download that was cut: a traceback; and a file that is not compressed at all."""
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress((LINE * 1000).encode(), compresslevel=0)[:-4000])
    data = load(str(path))
    assert data.counters.conversations > 800
    assert "the rest is not read" in data.counters.damage[-1]
    path.write_text(LINE)
    with pytest.raises(ValueError, match=r"no usable conversation.*Not a gzipped file"):
        load(str(path))


def test_empty_path(load):
    """An unset variable: the current folder was read."""
    for entry in ("", " "):
        with pytest.raises(ValueError, match="the path of the data is empty"):
            find_sources([entry])


# ---------------------------------------------------------------------------------------------------------------------
# Encodings

CODECS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_encodings(load, tmp_path, codec, name):
    """UTF-16, as Windows shells write it: records lost, codec errors, or nothing read after minutes."""
    turns = [user("hi \u2028 é"), assistant("yo \x85 a")]  # line ends for Python, not for JSON
    line = json.dumps(chat(*turns), ensure_ascii=False) + "\n"
    (tmp_path / name).write_bytes((line * 3).encode(codec))
    data = load(str(tmp_path / name))
    assert (data.counters.records, data.counters.conversations, data.counters.damage) == (3, 3, [])


@pytest.mark.parametrize("codec", CODECS)
def test_questions_by_the_json_standard(tmp_path, codec):
    """U+2028 and U+0085 inside a text cut the line in two; a byte order mark was refused."""
    (tmp_path / "mine").mkdir()
    lines = [{"question_id": 1, "turns": ["a\u2028b\x85c\x0cd"]}, {"question_id": 2, "turns": ["e"]}]
    text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "mine" / "question.jsonl").write_bytes(text.encode(codec))
    assert [q.prompt for q in read_questions(tmp_path, "mine")] == ["a\u2028b\x85c\x0cd", "e"]


def test_files_that_are_no_json_end_soon(load, tmp_path, monkeypatch):
    """Every { of a file was tried, at a price that grew with the text in front of it: minutes for 28 MB."""
    tried = []
    decode = conversation_sources.decode_next
    monkeypatch.setattr(conversation_sources, "decode_next", lambda *args: tried.append(1) or decode(*args))
    (tmp_path / "a.json").write_text(str(chat(*TURNS)) * 2000)  # with Python's quotes
    with pytest.raises(ValueError, match="no usable conversation"):
        load(str(tmp_path / "a.json"))
    assert len(tried) < 20


# ---------------------------------------------------------------------------------------------------------------------
# Held out


def test_held_out_examples_come_from_all_files():
    """Validation on the first file alone: its first examples were the first 128 that were held out."""
    sizes = {"a.jsonl": 300, "b.jsonl": 100, "c.jsonl": 4}
    ids = [f"{name}:{index}" for name, count in sizes.items() for index in range(count)]
    rows = datasets.Dataset.from_dict({"example_id": ids})
    rest, held_out = hold_out(rows, 0.25, seed=0)
    assert not set(rest["example_id"]) & set(held_out["example_id"])
    assert count_files(held_out["example_id"]) == {"a.jsonl": 75, "b.jsonl": 25, "c.jsonl": 1}
    used = [held_out[int(index)]["example_id"] for index in spread(len(held_out), 8)]
    assert count_files(used) == {"a.jsonl": 6, "b.jsonl": 2}
    assert spread(3, 8).tolist() == [0, 1, 2]
    assert len(hold_out(rows, 0.0001, seed=0)[1]) == 1  # at least one


def count_files(example_ids):
    counts = Counters().skipped
    counts.update(name.split(":")[0] for name in example_ids)
    return dict(counts)
