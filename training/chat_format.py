"""Conversations as the text that decoding sees and writes, and which characters of it the assistant wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from loading.chat_template import RAW_TEMPLATE, template_of
from script_utils import first_line
from training.sources import SkipRecord

Message = dict[str, Any]  # role, content, and perhaps reasoning_content, tool_calls, tool_call_id, name
Span = tuple[int, int]  # [start, end), characters
PARTS = ("content", "reasoning_content", "thought")  # texts of a message; the last is thinking inside its content


@dataclass(frozen=True)
class Slot:
    """A place in a rendered conversation that holds a text of a message."""

    before: str  # what the template writes between the slot before and this one
    message: int  # index of the message
    part: str  # which of its texts, one of PARTS


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around the texts of a conversation with given roles."""

    slots: tuple[Slot, ...]
    tail: str


# Of each message of a conversation: role, parts, and all that is no text, as JSON. A key of the cache.
Shape = tuple[tuple[str, tuple[str, ...], str], ...]


@dataclass(frozen=True)
class Setting:
    """What else than its messages a template is told."""

    tools: str = ""  # JSON of the functions that the assistant may call
    thinking: bool = False
    prompt: bool = False  # whether the assistant's turn is to come: add_generation_prompt


def split_thinking(content: str) -> tuple[str, ...]:
    """`<think>a</think>b` -> (a, b); anything else is one part."""
    thinking, marker, answer = content.partition("</think>")
    if not marker or "</think>" in answer:
        return (content,)
    return thinking.rpartition("<think>")[2], answer


def is_cut_off(message: Message) -> bool:
    """Whether a reply ends inside its thinking: no answer and no call comes after it."""
    content = message["content"].lstrip()
    if content.startswith("<think>"):
        return "</think>" not in content
    return bool(message.get("reasoning_content")) and not content and not message.get("tool_calls")


def thinks(message: Message) -> bool:
    """Whether a reply was written with thinking on."""
    thought, *answer = split_thinking(message["content"])
    return bool(message.get("reasoning_content") or is_cut_off(message) or (answer and thought.strip()))


def trimmed(text: str) -> Iterator[str]:
    """The forms in which templates write a text."""
    yield text
    for characters in ("\n", None):
        yield text.strip(characters)
        yield text.lstrip(characters)
        yield text.rstrip(characters)


def texts_of(message: Message, split: bool) -> dict[str, str]:
    """The texts of a message by the names of their parts, blank ones left out.

    With `split`, thinking inside an assistant's content is a part of its own.
    """
    texts = {"reasoning_content": message.get("reasoning_content", ""), "content": message["content"]}
    pair = split_thinking(message["content"])
    if split and message["role"] == "assistant" and len(pair) == 2:
        texts["thought"], texts["content"] = pair
    return {part: text for part, text in texts.items() if text.strip()}


class ChatFormat:
    """A tokenizer's chat template: renders conversations and finds the assistant's spans, as characters.

    A span begins where the prompt of decoding ends: all that the template writes in front of a reply that is still to
    come is the prompt's, all after it the assistant's. Spans come from the first of these that works:
    1. the template's skeleton: the same roles rendered once with place holders give the exact text around every
       message, and walking along it finds every message, whatever its text says (a user may quote the template's
       headers). A template that edits thinking blocks gets a skeleton with place holders inside them. Skeletons are
       cached by roles, so this costs one rendering per conversation. Prefix rendering alone would fail here: Qwen3 adds
       an empty thinking block to the LAST assistant turn only, so a prefix of the conversation does not render to a
       prefix of its text;
    2. the template's own `{% generation %}` markers;
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
        self.enable_thinking = enable_thinking
        self.adds_special_tokens = self.template == RAW_TEMPLATE  # of encoding: other templates write them
        self.marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self.skeleton = lru_cache(maxsize=4096)(self._skeleton)
        try:
            self.generation_prompt = self._generation_prompt()
            self.end_of_turn = self._end_of_turn({"role": "assistant", "content": "!"})
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} cannot render a question and its answer: "
                f"{first_line(error)}"
            ) from error

    # Rendering

    def render(self, messages: Sequence[Message], setting: Setting | None = None) -> str:
        return self._render(messages, setting or Setting(thinking=self.enable_thinking))[0][0]

    def render_prompt(self, messages: Sequence[Message], tools: str = "") -> str:
        """What decoding gets. Raises SkipRecord when the template refuses it."""
        try:
            return self.render(messages, Setting(tools, self.enable_thinking, prompt=True))
        except (TemplateError, TypeError) as error:
            raise SkipRecord(f"chat template: {first_line(error)}") from error

    def _render(self, messages, setting: Setting, **kwargs) -> tuple[list[str], list[list[Span]]]:
        kwargs |= self.tokenizer.special_tokens_map | {"chat_template": self.template}
        kwargs |= {"add_generation_prompt": setting.prompt, "enable_thinking": setting.thinking}
        tools = json.loads(setting.tools) if setting.tools else None
        try:
            return render_jinja_template([messages], tools=tools, **kwargs)
        except TypeError:  # some templates want the arguments of a call as a text
            if not any("tool_calls" in message for message in messages):
                raise
            return render_jinja_template([[arguments_as_text(m) for m in messages]], tools=tools, **kwargs)

    def render_with_spans(self, messages: Sequence[Message], setting: Setting | None = None) -> tuple[str, list[Span]]:
        """Returns the text and the characters that the assistant writes. Raises SkipRecord."""
        setting = setting or Setting(thinking=self.enable_thinking)
        text = self.render(messages, setting)
        for split in (False, True):
            found = self._spans_by_skeleton(text, messages, setting, split)
            if found is not None:
                return found
        if self.marks_generation:
            _, (spans,) = self._render(messages, setting, return_assistant_tokens_mask=True)
            return text, [(start, self._past_end_of_turn(text, end)) for start, end in spans]
        spans = self._spans_by_prefixes(text, messages, setting)
        if spans is None:
            raise SkipRecord("assistant text not found in the rendered conversation")
        return text, spans

    def render_as_written(
        self, messages: Sequence[Message], setting: Setting, finished: bool
    ) -> tuple[str, list[Span]]:
        """The same for a last reply that stands in the text as the target wrote it, after the prompt that it saw.

        Without `finished` it was cut off, and no end of turn comes after it.
        """
        *before, reply = messages
        setting = Setting(setting.tools, setting.thinking, prompt=True)
        prompt, spans = self.render(before, setting), []
        if any(message["role"] == "assistant" for message in before):
            prompt, spans = self.render_with_spans(before, setting)
        written = reply["content"]
        if reply.get("reasoning_content"):
            answer = f"\n</think>\n\n{written}" if written else ""
            written = f"<think>\n{reply['reasoning_content']}{answer}"
        if prompt.rstrip().endswith("<think>") and written.lstrip().startswith("<think>"):
            written = written.lstrip().removeprefix("<think>").lstrip("\n")
        text = prompt + written + (self.end_of_turn.strip() if finished else "")
        return text, [*spans, (len(prompt), len(text))]

    # What the template has a place for

    @cached_property
    def reasoning_place(self) -> str | None:
        """Where reasoning goes: into its "field", between the marks of thinking in the "content", or nowhere."""
        mark, turn = "\ue000", {"role": "assistant", "content": "!"}
        in_content = turn | {"content": f"<think>\n{mark}\n</think>\n\n!"}
        knows_marks = "</think>" in self.template or "</think>" in self.tokenizer.get_vocab()
        for place, reply in [("field", turn | {"reasoning_content": mark}), ("content", in_content)]:
            try:
                text = self.render([{"role": "user", "content": "?"}, reply], Setting(thinking=True))
            except (TemplateError, TypeError):
                continue
            if mark in text and (place == "field" or knows_marks):
                return place
        return None

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template writes calls of functions and their results."""
        call, result = "\ue000", "\ue001"
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [tool_call(call)]},
            {"role": "tool", "content": result, "name": call, "tool_call_id": "000000000"},
            {"role": "assistant", "content": "!"},
        ]
        try:
            text = self.render(messages)
        except (TemplateError, TypeError):
            return False
        return call in text and result in text

    def fit(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages with their reasoning where the template has a place for it, and how often it has none."""
        fitted, lost = [], 0
        for message in messages:
            reasoning = message.get("reasoning_content")
            if reasoning and self.reasoning_place != "field":
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
                if self.reasoning_place is None:
                    lost += 1
                else:
                    closed = message["content"] or message.get("tool_calls")
                    end = f"\n</think>\n\n{message['content']}" if closed else ""
                    message["content"] = f"<think>\n{reasoning}{end}"
            fitted.append(message)
        return fitted, lost

    # Around a reply

    def _generation_prompt(self) -> str:
        """What the template writes in front of a reply that is still to come; "" when it writes nothing."""
        question = [{"role": "user", "content": "?"}]
        without = self.render(question)
        prompt = self.render(question, Setting(thinking=self.enable_thinking, prompt=True))
        return prompt[len(without) :] if prompt.startswith(without) else ""

    def _end_of_turn(self, reply: Message) -> str:
        """The special token, with blanks before it, that the template writes after a reply; "" when there is none."""
        messages = [{"role": "user", "content": "?"}, reply]
        tail = self.skeleton(shape_of(messages, False), Setting(thinking=self.enable_thinking)).tail
        tokens = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        # A call ends somewhere in the tail, an answer ends where the tail begins.
        if "tool_calls" in reply:
            return max((token for token in tokens if tail.rstrip().endswith(token)), key=len, default="")
        blanks = len(tail) - len(tail.lstrip())
        # the longest, where a token is the beginning of another one
        token = max((token for token in tokens if tail.startswith(token, blanks)), key=len, default="")
        return tail[:blanks] + token if token else ""

    @cached_property
    def end_of_call(self) -> str:
        """The special token after a turn that calls a function; "" when there is none."""
        return self._end_of_turn({"role": "assistant", "content": "", "tool_calls": [tool_call("f")]})

    def _past_end_of_turn(self, text: str, end: int) -> int:
        """`end`, moved after the end-of-turn token when that comes next."""
        return end + len(self.end_of_turn) if text.startswith(self.end_of_turn, end) else end

    # Spans

    def _skeleton(self, shape: Shape, setting: Setting) -> Skeleton:
        """Renders place holders for messages of a shape."""
        holders = [place_holders(index, *key) for index, key in enumerate(shape)]
        pieces = re.split("\ue000(\\d+)\\.(\\d)\ue001", self.render(holders, setting))
        slots = [Slot(pieces[i], int(pieces[i + 1]), PARTS[int(pieces[i + 2])]) for i in range(0, len(pieces) - 1, 3)]
        return Skeleton(tuple(slots), pieces[-1])

    def _spans_by_skeleton(self, text, messages, setting: Setting, split: bool) -> tuple[str, list[Span]] | None:
        """Walks along the skeleton; None when the text does not follow it.

        Also returns the text. A template may give decoding a longer prompt than the header that it writes in front of
        a finished reply, such as an empty thinking block: the last reply of the text gets that, too.
        """
        shape = shape_of(messages, split)
        skeleton = self.skeleton(shape, setting)
        places = walk(text, skeleton, [texts_of(message, split) for message in messages])
        if places is None:
            return None
        spans, missing = [], ""
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                own, first, after = neighbours(skeleton.slots, index)
                header, missing = self._header(shape[:index], skeleton, first, setting)
                start = (places[first - 1][1] if first else 0) + header
                written = places[own[-1]][1] if own else start
                limit = places[after][0] if after < len(places) else len(text)
                next_has_text = after == len(places) or skeleton.slots[after].message == index + 1
                end = self._end(text, message, written, limit, next_has_text)
                if end is None:
                    return None
                spans.append((start, end))
        if missing and messages[-1]["role"] == "assistant":
            text = text[:start] + missing + text[start:]
            spans[-1] = (start + len(missing), end + len(missing))
        return text, spans

    def _header(self, shape: Shape, skeleton: Skeleton, first: int, setting: Setting) -> tuple[int, str]:
        """How much of the text before slot `first` is the prompt's, and what the prompt of decoding has after that.

        The rest of it (empty thinking, a blank) is the assistant's. shape: of the messages before the reply.
        """
        before = skeleton.slots[first].before if first < len(skeleton.slots) else skeleton.tail
        prompt_end = self._prompt_end(shape, skeleton.slots[first - 1] if first else None, setting)
        if prompt_end is not None and before.startswith(prompt_end):
            return len(prompt_end), ""
        if prompt_end is not None and prompt_end.startswith(before):
            return len(before), prompt_end[len(before) :]
        if prompt_end is not None:  # <think> in the one, <tool_call> in the other: they part in front of the word
            same = next(index for index, (a, b) in enumerate(zip(before, prompt_end, strict=False)) if a != b)
            return len(re.sub(r"\S+\Z", "", before[:same])), ""
        found = before.rfind(self.generation_prompt) if self.generation_prompt else -1
        return (len(before) if found < 0 else found + len(self.generation_prompt)), ""

    def _prompt_end(self, shape: Shape, before: Slot | None, setting: Setting) -> str | None:
        """What a prompt of this shape has after the text in slot `before`; None where it ends with another text."""
        try:
            skeleton = self.skeleton(shape, Setting(setting.tools, setting.thinking, prompt=True))
        except (TemplateError, TypeError):
            return None
        last = skeleton.slots[-1] if skeleton.slots else None
        same = (last and (last.message, last.part)) == (before and (before.message, before.part))
        return skeleton.tail if same else None

    def _end(self, text: str, message: Message, written: int, limit: int, next_has_text: bool) -> int | None:
        """Where a reply ends whose text ends at `written`; calls come after it, but not past `limit`.

        With `next_has_text` no whole turn stands before `limit`, so that the last end token there is the reply's: the
        arguments of a call may quote one.
        """
        if "tool_calls" not in message:
            return self._past_end_of_turn(text, written)
        find = text.rfind if next_has_text else text.find
        found = find(self.end_of_call, written, limit) if self.end_of_call else -1
        return None if found < 0 else found + len(self.end_of_call)

    def _spans_by_prefixes(self, text, messages, setting: Setting) -> list[Span] | None:
        """Renders the conversation up to every reply and past it; None when one of these is not how the text begins."""
        spans = []
        ahead = Setting(setting.tools, setting.thinking, prompt=True)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:index], ahead)
            turn = self.render(messages[: index + 1], Setting(setting.tools, setting.thinking))
            if not (text.startswith(turn) and turn.startswith(prompt)):
                return None
            token = self.end_of_call if "tool_calls" in message else self.end_of_turn
            end = turn.rfind(token, len(prompt)) if token else -1
            spans.append((len(prompt), len(turn) if end < 0 else end + len(token)))
        return spans


def walk(text: str, skeleton: Skeleton, texts: Sequence[Mapping[str, str]]) -> list[Span] | None:
    """Where the text of every slot stands; None when `text` does not follow the skeleton.

    texts: those of each message, by part.
    """
    literals = [slot.before for slot in skeleton.slots] + [skeleton.tail]
    places, position = [], 0
    for slot, after in zip(skeleton.slots, literals[1:], strict=True):
        if not text.startswith(slot.before, position):
            return None
        position += len(slot.before)
        forms = trimmed(texts[slot.message][slot.part])
        form = next(
            (f for f in forms if text.startswith(f, position) and text.startswith(after, position + len(f))), None
        )
        if form is None:
            return None
        places.append((position, position + len(form)))
        position += len(form)
    return places if text[position:] == skeleton.tail else None


def neighbours(slots: Sequence[Slot], message: int) -> tuple[list[int], int, int]:
    """The slots of a message, the one that its turn begins with, and the one that comes after it.

    A turn without a text begins with the next message's slot.
    """
    own = [index for index, slot in enumerate(slots) if slot.message == message]
    if own:
        return own, own[0], own[-1] + 1
    behind = next((index for index, slot in enumerate(slots) if slot.message > message), len(slots))
    return own, behind, behind


def shape_of(messages: Sequence[Message], split: bool) -> Shape:
    """All of the messages but their texts."""
    shape = []
    for message in messages:
        rest = {key: message[key] for key in message if key not in ("role", *PARTS)}
        shape.append((message["role"], tuple(texts_of(message, split)), json.dumps(rest)))
    return tuple(shape)


def place_holders(index: int, role: str, parts: tuple[str, ...], rest: str) -> Message:
    """A message of a shape with place holders for its texts."""
    holders = {part: f"\ue000{index}.{PARTS.index(part)}\ue001" for part in parts}  # private use: in no template
    content = holders.get("content", "")
    if "thought" in holders:
        content = f"<think>\n{holders['thought']}\n</think>\n\n{content}"
    message = {"role": role, "content": content} | json.loads(rest)
    if "reasoning_content" in holders:
        message["reasoning_content"] = holders["reasoning_content"]
    return message


def tool_call(name: str) -> Message:
    """A call of a function without arguments, for trying a template."""
    return {"type": "function", "id": "000000000", "function": {"name": name, "arguments": {}}}


def arguments_as_text(message: Message) -> Message:
    """The message with the arguments of its calls as JSON texts."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(call | {"function": function | {"arguments": text}})
    return message | {"tool_calls": calls}
