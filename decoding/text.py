"""Text as it streams out of a generation, and in color where a terminal shows any."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase


class TextStream:
    """The text of tokens, as they come: every character once, with the token that completes it.

    A token is decoded after the one before it, not alone, as it could lose a blank at its border or half a character.
    The text before those is not decoded again. (`tokenizers.DecodeStream` does as much, but fails for bytes that never
    become a character, which a model may well sample.)
    """

    MOST_HELD = 64  # tokens without text; past so many bytes are no half of a character

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._special = frozenset(tokenizer.all_special_ids)
        self._tokens: list[int] = []  # the newest that gave text, then those that are held back
        self._shown = 0  # how many of these gave text

    def put(self, token: int) -> str:
        """What one more token completes of the text: nothing after half a character, or for a special token."""
        if token in self._special:
            return ""
        self._tokens.append(token)
        text, held = self._new_text(), len(self._tokens) - self._shown
        if (not text or text.endswith("\N{REPLACEMENT CHARACTER}")) and held < self.MOST_HELD:
            return ""
        return self._show(text)

    def end(self) -> str:
        """What was held back: half a character, as replacement characters."""
        return self._show(self._new_text())

    def _new_text(self) -> str:
        shown, text = self._decode(self._tokens[: self._shown]), self._decode(self._tokens)
        if text.startswith(shown):
            return text[len(shown) :]
        # Bytes that are no character can change what the bytes before them decode to. What was shown stays.
        return self._decode(self._tokens[self._shown :])

    def _show(self, text: str) -> str:
        del self._tokens[: self._shown]
        self._shown = len(self._tokens)
        return text


def pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token completes of the text, as it streams."""
    text = TextStream(tokenizer)
    texts = [text.put(token) for token in tokens]
    return [*texts[:-1], texts[-1] + text.end()] if texts else []


def paint(text: str, style: str) -> str:
    """Text in the style of a terminal that shows any: drafts green, corrections yellow, or bold."""
    codes = {"bold": "1", "draft": "32", "correction": "33"}
    colored = text and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\033[{codes[style]}m{text}\033[0m" if colored else text
