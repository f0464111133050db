"""The template that writes prompts: the tokenizer's, another one, a plain one, or none; and the flags that choose it.

Every script that renders a prompt or training text has these flags from `add_template_flags` and applies them with
`use_template`, so that a head is trained on the text that decoding will show it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from script_utils import Switch, first_line, read_text

# For tokenizers without a chat template, in training and in decoding. The space in front of a reply is the
# assistant's, as byte-level BPE wants it.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}Assistant:"
    "{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# For --no_chat_template: the texts and nothing else. Encoding adds the special tokens that it adds to any plain text.
RAW_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")  # of a folder, first one first


def add_template_flags(group: argparse._ArgumentGroup) -> None:
    """How prompts are rendered; the same flags in all scripts."""
    group.add_argument(
        "--enable_thinking",
        action=Switch,
        default=False,
        help="let a chat template that has this switch ask for thinking; off as in the paper",
    )
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--chat_template",
        metavar="FILE_OR_FOLDER",
        help="use the template in this file, or of this model folder, instead of the tokenizer's",
    )
    which.add_argument(
        "--no_chat_template",
        "--no-chat-template",
        "--no-chat_template",
        action="store_true",
        help="no template: texts as they are",
    )


def check_template_flags(args: argparse.Namespace) -> None:
    """ValueError for flags that contradict each other, and for a file that holds no template."""
    if args.no_chat_template and args.enable_thinking:
        raise ValueError("--enable_thinking is a switch of chat templates: it cannot go with --no_chat_template")
    if args.chat_template is not None:
        read_template(args.chat_template)


def use_template(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> None:
    """Gives the tokenizer the template that the flags name; says so on stderr where there is only the plain one.

    ValueError for a file that holds no template.
    """
    check_template_flags(args)
    if args.no_chat_template:
        tokenizer.chat_template = RAW_TEMPLATE
    elif args.chat_template is not None:
        tokenizer.chat_template = read_template(args.chat_template)
    elif not tokenizer.chat_template:
        tokenizer.chat_template = template_of(tokenizer)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: turns are written as "
                "'User: ...', 'Assistant: ...', in training and in decoding (--no_chat_template: texts as they are)",
                file=sys.stderr,
            )


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template, or the plain one, with BOS in front where plain encoding puts it.

    ValueError where a tokenizer has several and none of them is the default.
    """
    if not tokenizer.chat_template:
        return ("{{ bos_token }}" if adds_bos(tokenizer) else "") + PLAIN_TEMPLATE
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has several chat templates ({names}) and no default: "
            "name a file with --chat_template"
        ) from None


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether plain encoding puts BOS in front."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def read_template(path: str) -> str:
    """The template in a file, a tokenizer_config.json or a model folder. ValueError names what is wrong with it."""
    named, file = f"--chat_template {path!r}", Path(path)
    if file.is_dir():
        found = [file / name for name in TEMPLATE_FILES if (file / name).is_file()]
        texts = [text for candidate in found if (text := template_in(candidate, named)) is not None]
        if not texts:
            raise ValueError(f"{named}: this folder has no template, neither {' nor '.join(TEMPLATE_FILES)}")
        text = texts[0]
    else:
        text = template_in(file, named)
        if text is None:
            raise ValueError(f"{named}: this file has no entry chat_template")
    check_template(text, named)
    return text


def template_in(file: Path, named: str) -> str | None:
    """The text of a template file, or the entry `chat_template` of a JSON file; None where it has none."""
    try:
        text = read_text(file)
        if file.suffix.lower() != ".json":
            return text
        entry = json.loads(text)["chat_template"]
    except KeyError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{named} cannot be read: {first_line(error)}") from None
    if isinstance(entry, list):  # several, each with its name
        entry = next((one.get("template") for one in entry if one.get("name") == "default"), None)
    return entry if isinstance(entry, str) else None


def check_template(text: str, named: str) -> None:
    """ValueError for a text that does not write what a user says."""
    turn = [{"role": "user", "content": "\ue000"}]  # a character that no template has
    try:
        (written,), _ = render_jinja_template(
            [turn], chat_template=text, add_generation_prompt=True, bos_token="", eos_token=""
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"{named} cannot render a question: {first_line(error)}") from None
    if "\ue000" not in written:
        raise ValueError(f"{named} is no chat template: it does not write the user's text")


def template_setting(args: argparse.Namespace) -> bool | str:
    """What a record of settings says: False for none, True for the tokenizer's, else the start of its SHA-256."""
    if args.chat_template is None:
        return not args.no_chat_template
    return hashlib.sha256(read_template(args.chat_template).encode()).hexdigest()[:16]
