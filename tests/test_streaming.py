"""Text that streams: every character once, with the token that completes it, whatever the tokenizer makes of bytes."""

import random
import re
import sys
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.text import TextStream
from pipeline_inference import build_parser, main
from pipeline_model import Target, save_head
from tests.tiny import hf_greedy, save_target, spd_decoder, tiny_head

TEXT = "aé€ b 好的\N{GRINNING FACE}, e\N{COMBINING ACUTE ACCENT}\n\t x"
HALF = "\N{REPLACEMENT CHARACTER}"


def byte_level():
    """One token a byte, as byte-level BPE without merges (Qwen, Llama 3)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return tokenizer


def byte_fallback():
    """SentencePiece style (Llama 2, Mistral): words with their blank, and bytes for what has no token."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"▁a": 256, "▁b": 257, "c": 258, "▁": 259, "<unk>": 260}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return tokenizer


def words():
    """A word's leading blank is part of its token, and is dropped where a text begins."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    return tokenizer


def streamed(tokenizer, tokens):
    """What each token shows, and what the end shows."""
    stream = TextStream(tokenizer)
    return [stream.put(token) for token in tokens] + [stream.end()]


def encoded(tokenizer, text):
    """A token a byte, in either kind of tokenizer."""
    if tokenizer.convert_tokens_to_ids("<0x00>") == 0:
        return list(text.encode())
    return tokenizer(text)["input_ids"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_characters_come_with_the_token_that_completes_them(make):
    """Guards against half characters on the screen, and characters that come late or never."""
    tokenizer = make()
    shown = streamed(tokenizer, encoded(tokenizer, TEXT))
    expected = []
    for character in TEXT:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert shown == [*expected, ""]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_half_a_character_at_the_end_is_shown_there(make):
    """Guards against text that the token limit cuts off in the middle of a character and that never shows it."""
    tokenizer = make()
    tokens = encoded(tokenizer, "a b好")[:-1]
    shown = streamed(tokenizer, tokens)
    assert shown[:-1] == ["a", " ", "b", "", ""]
    assert set(shown[-1]) == {HALF}
    assert "".join(streamed(tokenizer, tokens[-2:])) == tokenizer.decode(tokens[-2:])


def test_blanks_and_special_tokens():
    """Guards against a blank that is lost after a special token or at a token's border, and special tokens as text."""
    assert streamed(words(), [3, 0, 1, 3, 3, 2, 1, 3]) == ["", "a", " b", "", "", "c", " b", "", ""]
    tokenizer = byte_fallback()
    tokens = [256, 259, 258, 261, 259, 257, 0xE2, 0x82, 0xAC, 256]
    shown = streamed(tokenizer, tokens)
    assert "".join(shown) == tokenizer.decode(tokens, skip_special_tokens=True) == "a c  b€ a"
    assert shown[6:9] == ["", "", "€"]


def test_bytes_that_are_no_character_do_not_hide_what_follows():
    """Guards against a stream that stops, or fails, at bytes which a model may sample and which mean nothing."""
    tokenizer = byte_level()
    (x,) = encoded(tokenizer, "x")
    euro, bad = encoded(tokenizer, "€"), encoded(tokenizer, "€")[:1]
    for tokens in ([*euro, *bad, x], [*bad * 3, *euro], [*bad * 200, x, *euro]):
        assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens)
    # A run of fallback bytes is decoded as a whole: one bad byte makes all of them bad. What was shown stays.
    assert streamed(byte_fallback(), [*"€".encode(), 0xFF, 257]) == ["", "", "€", "", f"{HALF} b", ""]


@pytest.mark.parametrize("make", [byte_level, byte_fallback, words])
def test_any_tokens_join_to_the_text(make):
    """Guards against characters shown twice or never, over random words, whole characters and special tokens."""
    tokenizer, draw = make(), random.Random(0)
    pieces = [[token] for token in range(0 if make is words else 256, len(tokenizer))]
    if make is not words:
        pieces += [encoded(tokenizer, character) for character in TEXT]
    for _ in range(60):
        tokens = [token for _ in range(20) for token in draw.choice(pieces)]
        assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_cost_of_a_token_does_not_grow():
    """Guards against decoding the whole text for every token: minutes of a long answer."""
    tokenizer, decoded = byte_level(), []
    decode = tokenizer.decode
    tokenizer.decode = lambda tokens, **settings: decoded.append(len(tokens)) or decode(tokens, **settings)
    stream = TextStream(tokenizer)
    for token in encoded(tokenizer, "好的 " * 200):
        stream.put(token)
    assert max(decoded) <= 8


# ---------------------------------------------------------------------------------------------------------------------
# On a terminal
# ---------------------------------------------------------------------------------------------------------------------


class Terminal:
    """Standard output that notes what was written, and takes its time."""

    def __init__(self, seconds=0.0):
        self.written, self._seconds = [], seconds

    def isatty(self):
        return True

    def write(self, text):
        self.written.append(text)

    def flush(self):
        time.sleep(self._seconds)

    @property
    def text(self):
        return "".join(self.written)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_target(folder / "target")
    save_head(tiny_head(Target.load(str(folder / "target")), (1, 3)), folder / "head.pt")
    return folder


def on_terminal(files, monkeypatch, terminal):
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags = ["--base_model_path", str(files / "target"), "--spec_head_ckpt", str(files / "head.pt"), "--device", "cpu"]
    assert main(build_parser().parse_args([*flags, "--max_new_tokens", "12", "--prompt", "w5 w17 w3"])) == 0
    return terminal


def test_a_terminal_sees_each_token_as_it_is_verified(files, monkeypatch):
    """Guards against text that comes in one piece at the end, and against colours of other tokens."""
    text = on_terminal(files, monkeypatch, Terminal()).text
    target = Target.load(str(files / "target"))
    result = spd_decoder(target, tiny_head(target, (1, 3))).generate([5, 17, 3], 12)
    assert result.tokens == hf_greedy(target.model, [5, 17, 3], 12)
    colours = ["32" if accepted else "33" for accepted in result.accepted]
    runs = [(shown.strip(), colour) for colour, shown in re.findall(r"\033\[(3[23])m([^\033]*)\033\[0m", text)]
    assert runs == [(f"w{token}", colour) for token, colour in zip(result.tokens, colours, strict=True)]
    assert text.index("\033[32m") < text.index("[pipeline]") < text.index("[compare] ids are equal")


def test_printing_is_not_decoding(files, monkeypatch):
    """Guards against a slow terminal in the printed tokens/s."""
    text = on_terminal(files, monkeypatch, Terminal(seconds=0.1)).text
    speed = float(re.search(r"\[pipeline\] .*?, ([\d.]+) tokens/s", text)[1])
    assert speed > 1.5 / 0.1  # with a flush a token it would be below 10 tokens/s
