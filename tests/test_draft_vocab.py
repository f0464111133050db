"""The draft vocabulary: what is counted, what is kept, what is written."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draft_vocab import build_draft_vocab
from draft_vocab.build_draft_vocab import choose_tokens, coverage

FOLDER = Path(build_draft_vocab.__file__).parent
WORDS = [
    "[UNK]",
    " ",
    "\n",
    "user",
    "assistant",
    "a",
    "b",
    "c",
    "d",
    "rare",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
]
IDS = {word: index for index, word in enumerate(WORDS)}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer_folder(tmp_path):
    backend = Tokenizer(models.WordLevel(IDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\w+"), "isolated")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in WORDS[-3:]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", unk_token="[UNK]")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "tiny-tokenizer")
    return tmp_path / "tiny-tokenizer"


@pytest.fixture
def data_file(tmp_path):
    """Two conversations; the assistant writes a x5, b x3, c x2, a blank x8, and an end of turn x2."""
    replies = ["a a a b c", "a a b b c"]
    rows = [[{"from": "human", "value": "d rare"}, {"from": "gpt", "value": reply}] for reply in replies]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def build(tmp_path, tokenizer_folder, data_file):
    def build(*extra):
        output = tmp_path / "list.json"
        common = ["--tokenizer", tokenizer_folder, "--data_path", data_file, "--cache_dir", tmp_path / "cache"]
        arguments = [*common, "--output", output, *extra]
        build_draft_vocab.main(build_draft_vocab.build_parser().parse_args([str(argument) for argument in arguments]))
        return json.loads(output.read_text())

    return build


def test_choose_tokens_against_a_plain_loop():
    """Tokens that were never seen, ties broken by chance, always-kept tokens that make the list too long."""
    rng = np.random.default_rng(0)
    for size in (3, 7, 20, 40):
        counts = rng.integers(0, 5, size=40)
        always = {39, 11}
        expected = list(always)
        for count in range(4, 0, -1):
            expected += [t for t in range(40) if counts[t] == count and t not in always]
        assert choose_tokens(counts, size, always).tolist() == sorted(expected[:size])
    with pytest.raises(ValueError, match="--size is 1, but 2 tokens"):
        choose_tokens(counts, 1, always)


def test_coverage():
    """Positions and tokens taken for one another."""
    assert coverage(np.array([6, 3, 1, 0]), np.array([0, 3])) == 0.6


def test_assistant_tokens_are_counted(build):
    """User text or headers that get into the list, an end token that falls out of it, keys that readers rely on."""
    content = build("--size", 5)
    assert content == {
        "tokenizer_name": "tiny-tokenizer",
        "data": ["chats.jsonl"],
        "mask_assistant": True,
        "vocab_size": len(WORDS),
        "draft_vocab_size": 5,
        "token_ids": [IDS[word] for word in (" ", "a", "b", "<|endoftext|>", "<|im_end|>")],
        "total_positions_counted": 20,
        "topk_mass_ratio": 18 / 20,
    }


def test_all_tokens_are_counted_without_mask(build):
    """--no-mask_assistant that still masks: the user's words are missing."""
    content = build("--size", 20, "--no-mask_assistant")
    assert not content["mask_assistant"]
    assert {IDS["d"], IDS["rare"], IDS["<|im_start|>"]} <= set(content["token_ids"])


def test_size_is_capped_at_the_tokens_seen(build, capsys):
    """A list padded with tokens that were never seen, without a word."""
    content = build("--size", 1000)
    assert content["token_ids"] == [IDS[word] for word in (" ", "a", "b", "c", "<|endoftext|>", "<|im_end|>")]
    assert "--size is 1,000, but the data has only 6" in capsys.readouterr().err


def test_model_vocabulary_and_kept_tokens(build, tokenizer_folder):
    """A model with more rows than its tokenizer; end tokens of the generation config; tokens asked for by name."""
    (tokenizer_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [12, 3]}))
    content = build("--size", 5, "--vocab_size", 64, "--always", "rare", "--tokenizer_name", "owner/tiny")
    assert (content["vocab_size"], content["tokenizer_name"]) == (64, "owner/tiny")
    assert content["token_ids"] == [IDS[word] for word in (" ", "user", "rare", "<|endoftext|>", "<|im_end|>")]


def test_the_vocabulary_is_the_models(build, tokenizer_folder):
    """A model whose vocabulary is padded past its tokenizer: the list named the tokenizer's and was refused."""
    for config in (
        {"model_type": "qwen3", "vocab_size": 64},
        {"model_type": "qwen3_5", "text_config": {"vocab_size": 64}},
    ):
        (tokenizer_folder / "config.json").write_text(json.dumps(config))
        assert build("--size", 5)["vocab_size"] == 64
    for unusable in ({"model_type": "never_heard_of"}, {"model_type": "qwen3", "vocab_size": 3}):
        (tokenizer_folder / "config.json").write_text(json.dumps(unusable))
        assert build("--size", 5)["vocab_size"] == len(WORDS)


def test_held_out_coverage_is_measured_on_other_conversations(build, capsys):
    """A held-out figure that is in-sample; or a written list that lacks the held-out part."""
    content = build("--size", 4, "--held_out", 0.5)
    printed = capsys.readouterr().out
    assert "counted on 1, measured on 1" in printed
    assert content["total_positions_counted"] == 20
    assert content["token_ids"] == build("--size", 4)["token_ids"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--size", "1"], "--size is 1, but 2 tokens are always kept"),
        (["--tokenizer", "no/such/folder"], "no tokenizer at 'no/such/folder'"),
        (["--tokenizer_name", "./tiny"], "'./tiny' is a local path"),
        (["--tokenizer_name", "/models/tiny"], "'/models/tiny' is a local path"),
        (["--data_path", "missing.json"], "missing.json: no such file"),
        (["--vocab_size", "8"], "--vocab_size is 8"),
        (["--always", "nothing"], "--always 'nothing' is no token"),
        (["--held_out", "1.5"], "val_fraction is 1.5"),
    ],
)
def test_user_errors_are_value_errors(build, extra, words):
    """Errors that come as a traceback of another module, or after the work is done."""
    with pytest.raises(ValueError, match=re.escape(words)):
        build(*extra)


def test_errors_end_in_one_line_and_exit_code_2(tmp_path):
    """A traceback for a wrong path; and that the script finds its modules from any folder."""
    command = [
        sys.executable,
        FOLDER / "build_draft_vocab.py",
        "--tokenizer",
        tmp_path,
        "--data_path",
        "x",
        "--output",
        "y",
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "--tokenizer" in result.stderr


LISTS = [
    ("sharegpt_smollm2_top_16k.json", 16384, 49152, [2]),
    ("sharegpt_qwen3_top_32k.json", 32000, 151936, [151643, 151645]),
    ("sharegpt_qwen3.5_top_32k.json", 32000, 248320, [248044, 248046]),
    ("sharegpt_qwen3.5_top_50k.json", 50000, 248320, [248044, 248046]),
]


@pytest.mark.parametrize(("name", "size", "vocab_size", "ends"), LISTS)
def test_shipped_lists(name, size, vocab_size, ends):
    """A shipped list with ids out of order, out of the vocabulary, without end tokens, or with a path in it."""
    content = json.loads((FOLDER / name).read_text())
    ids = content["token_ids"]
    assert content["draft_vocab_size"] == len(ids) == size
    assert all(a < b for a, b in pairwise(ids))
    assert content["vocab_size"] == vocab_size
    assert ids[0] >= 0
    assert ids[-1] < vocab_size
    assert set(ends) <= set(ids)
    assert content["mask_assistant"] is True
    assert 0.95 < content["topk_mass_ratio"] < 1
    assert all("/" not in source for source in content["data"])
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", content["tokenizer_name"])
