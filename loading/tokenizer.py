"""The tokenizer that comes with a target, and a prompt as its token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from loading.chat_template import RAW_TEMPLATE, template_of
from script_utils import first_line, is_text


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a target. ValueError, in one line, where there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        raise ValueError(f"no tokenizer at {path!r}: the target's folder must hold tokenizer.json") from None


def unused_settings(path: str) -> list[str]:
    """What a target's generation_config.json asks for and decoding does not do.

    Its end ids are used; sampling is what the caller says, for the target and the pipeline alike.
    """
    try:
        settings = GenerationConfig.from_pretrained(path).to_diff_dict()
    except (OSError, ValueError):
        return []
    known = re.compile(r"_.*|.*_token_id|transformers_version|use_cache")  # used, or nothing that changes the text
    return [name for name, value in settings.items() if value not in (None, False) and not known.fullmatch(name)]


def print_unused_settings(path: str) -> None:
    """Say in one line what `unused_settings` finds, if anything."""
    unused = unused_settings(path)
    if unused:
        print(f"[note] of the target's generation_config.json the end ids alone are used, not {', '.join(unused)}")


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat_template: bool = True, enable_thinking: bool = False
) -> list[int]:
    """Token ids of a prompt, as a user's turn, or as it is without `chat_template`.

    The turn is in the tokenizer's chat template, or in the plain one where it has none, as in training;
    `enable_thinking` is for templates that have this switch. ValueError for an empty prompt, and for one that the
    template refuses.
    """
    if not isinstance(prompt, str) or not is_text(prompt):
        raise ValueError(f"the prompt is {prompt!r}: give a text that UTF-8 can write")
    if chat_template and prompt.strip():
        return encode_turns(tokenizer, [{"role": "user", "content": prompt}], enable_thinking=enable_thinking)
    ids = tokenizer(prompt)["input_ids"]
    if not prompt.strip() or not ids:
        raise ValueError(f"the prompt {prompt!r} is empty: give at least one word")
    return ids


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, str]],
    *,
    asked: bool = True,
    enable_thinking: bool = False,
) -> list[int]:
    """Token ids of a conversation, turns with `role` and `content`; `asked`: the assistant is to go on.

    ValueError for a text that is not UTF-8, for no tokens, and for turns that the template refuses.
    """
    for turn in turns:
        if not is_text(turn["content"]):
            raise ValueError(f"the prompt is {turn['content']!r}: give a text that UTF-8 can write")
    settings = {"chat_template": template_of(tokenizer), "enable_thinking": enable_thinking}
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=asked, tokenize=False, **settings)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot render the prompt: {first_line(error)}") from None
    ids = tokenizer(text, add_special_tokens=tokenizer.chat_template == RAW_TEMPLATE)["input_ids"]
    if not ids:
        raise ValueError(f"the prompt {text!r} is empty: give at least one word")
    return ids


def token_ids(prompt: Sequence[int] | Tensor | np.ndarray, vocab_size: int) -> list[int]:
    """A prompt as a list of ids: from any sequence of integers, or from a tensor or an array, [S] or [1, S].

    ValueError for anything else, for an empty prompt, and for an id outside 0 .. vocab_size - 1.
    """
    try:
        ids = np.asarray(prompt.tolist() if isinstance(prompt, Tensor) else prompt)
    except ValueError:  # a list of lists of several lengths
        ids = np.asarray(None)
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim == 1 and not len(ids):
        raise ValueError("the prompt is empty: give at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"the prompt is a {type(prompt).__name__} that holds no plain row of token ids: give a list of integers, "
            "or a tensor of them, [S] or [1, S]; a text becomes one by encode_prompt"
        )
    foreign = ids[(ids < 0) | (ids >= vocab_size)]
    if len(foreign):
        raise ValueError(
            f"the prompt has token id {foreign[0]}, but the target's ids are 0 .. {vocab_size - 1}: "
            "use the tokenizer that comes with the target"
        )
    return ids.tolist()
