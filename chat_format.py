"""Chat templates: conversations as text, and which characters of it the assistant wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from chat_template import RAW_TEMPLATE, template_of
from conversation_sources import SkipRecord
from script_utils import first_line


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, enable_thinking: bool = False):
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no tokenizer.json: a fast tokenizer is needed for offsets"
            )
        self.tokenizer = tokenizer
        self.template = template_of(tokenizer)
        self.adds_special_tokens = self.template == RAW_TEMPLATE  # of encoding: other templates write them
        self.variables = dict(tokenizer.special_tokens_map) | {"enable_thinking": enable_thinking}
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
