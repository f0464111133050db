"""Which template writes a prompt: the flags are the same in all scripts, and training and decoding agree."""

import json
import re

import pytest

import eval as evaluation
import pipeline_inference
import train
from baselines import train_baseline
from distributed_inference import eval_mp_pipeline_dataset, example_mp_pipeline_generate
from draft_vocab import build_draft_vocab
from eval_data import download
from loading.chat_template import add_template_flags, read_template, use_template
from loading.tokenizer import encode_prompt
from script_utils import Parser
from tests.test_conversation_data import CHATML, QWEN3, make_tokenizer
from training import generate_answers
from training.chat_format import ChatFormat

SWITCH = CHATML.replace(  # the generation prompt of Qwen3: an empty block closes the thinking
    "'<|im_start|>assistant\n'",
    "'<|im_start|>assistant\n' + ('' if enable_thinking | default(true) else '<think>\n\n</think>\n\n')",
)
EMPTY = "<think>\\n\\n</think>\\n\\n"
SWITCHED_QWEN3 = QWEN3.replace("= ''", f"= '{EMPTY}' if enable_thinking is false else ''", 1)
SCRIPTS = {
    "pipeline_inference": (pipeline_inference, "--base_model_path M --prompt hi"),
    "eval": (evaluation, "--base_model_path M --spec_head_ckpt H"),
    "example": (example_mp_pipeline_generate, "--base_model_path M --spec_head_ckpt H --prompt hi"),
    "eval_mp": (eval_mp_pipeline_dataset, "--base_model_path M --spec_head_ckpt H"),
    "generate": (generate_answers, "--model_name M --data_path D --output o.jsonl"),
    "train": (train, "--model_name M --data_path D --num_stages 2 --output_dir O"),
    "train_baseline": (train_baseline, "--model_name M --data_path D --method eagle3 --output_dir O"),
    "build_draft_vocab": (build_draft_vocab, "--tokenizer M --data_path D --output o.json"),
}


def flags(*typed):
    parser = Parser()
    add_template_flags(parser.add_argument_group("text"))
    return parser.parse_args(typed)


def spell(tokenizer, ids):
    """The text of ids; these tokenizers' own decoding puts blanks between words."""
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def prompt_text(tokenizer, *typed, prompt="hi"):
    args = flags(*typed)
    use_template(tokenizer, args)
    return spell(tokenizer, encode_prompt(tokenizer, prompt, enable_thinking=args.enable_thinking))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_the_same_flags(script):
    """A user who found a flag in one script and had it refused by the next, or a prompt rendered otherwise there."""
    module, required = SCRIPTS[script]
    parse = module.build_parser().parse_args
    args = parse(required.split())
    assert (args.enable_thinking, args.chat_template, args.no_chat_template) == (False, None, False)
    for spelling in ("--no_chat_template", "--no-chat_template", "--no-chat-template"):
        assert parse([*required.split(), spelling]).no_chat_template
    args = parse([*required.split(), "--enable_thinking", "--chat_template", "folder"])
    assert (args.enable_thinking, args.chat_template) == (True, "folder")
    assert not parse([*required.split(), "--no-enable_thinking"]).enable_thinking


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_empty_path_is_refused(script, capsys):
    """An unset variable: "" was the current folder; its .json files were trained on, results written into it."""
    module, required = SCRIPTS[script]
    parser, names = module.build_parser(), re.findall(r"--(?:\w*(?:path|dir|output|name|ckpt|tokenizer))\b", required)
    for name in [*names, "--chat_template"]:
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args([*required.split(), name, ""])
        assert stopped.value.code == 2
        assert f"argument {name}: the value is empty" in capsys.readouterr().err


def test_an_empty_path_is_refused_by_other_scripts(capsys):
    """The same for a flag with a default, of a script without a required path."""
    with pytest.raises(SystemExit):
        download.build_parser().parse_args(["--set", "gsm8k", "--output_dir", " "])
    assert "argument --output_dir: the value is empty" in capsys.readouterr().err


def test_thinking_is_off_unless_asked_for():
    """The paper's setting; templates without the switch are unaffected and never refused."""
    off = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert prompt_text(make_tokenizer(SWITCH)) == off
    assert prompt_text(make_tokenizer(SWITCH), "--enable_thinking") == off.removesuffix("<think>\n\n</think>\n\n")
    for template in (CHATML, QWEN3):
        assert prompt_text(make_tokenizer(template), "--enable_thinking") == prompt_text(make_tokenizer(template))


@pytest.mark.parametrize("typed", [(), ("--no_chat_template",)])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [None, CHATML, SWITCHED_QWEN3])
def test_training_and_decoding_have_one_form(template, typed, adds_bos, capsys):
    """A base model whose head was trained on 'User: ...' and then drafted after raw prompts."""
    tokenizer = make_tokenizer(template, adds_bos)
    prompt = prompt_text(tokenizer, *typed)
    chat = ChatFormat(tokenizer)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yo"}]
    ids = tokenizer(chat.render(turns), add_special_tokens=chat.adds_special_tokens)["input_ids"]
    assert spell(tokenizer, ids).startswith(prompt)
    assert ("has no chat template" in capsys.readouterr().err) == (template is None and not typed)
    if typed:
        assert prompt == ("<s>hi" if adds_bos else "hi")


def test_another_template_is_read_from_every_form(tmp_path):
    """--chat_template: a .jinja file, a text file, a tokenizer_config.json, a folder that holds either."""
    (tmp_path / "t.jinja").write_text(CHATML)
    (tmp_path / "t.txt").write_text("\ufeff" + CHATML)
    for name, entry in [("one", CHATML), ("list", [{"name": "rag"}, {"name": "default", "template": CHATML}])]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "folder" / "tokenizer_config.json").write_text("{}")
    for name in ("t.jinja", "t.txt", "one", "one/tokenizer_config.json", "list", "folder"):
        assert read_template(str(tmp_path / name)) == CHATML
    assert prompt_text(make_tokenizer(None), "--chat_template", str(tmp_path / "folder")).endswith("assistant\n")


def test_what_is_no_template_is_refused(tmp_path, capsys):
    """A wrong file whose text was sent instead of the prompt, or a traceback of the template engine."""
    files = {"plain.txt": "Hello", "broken.jinja": "{% for", "config.json": "{}", "half.json": '{"chat', "b": "\xff"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    (tmp_path / "empty").mkdir()
    for name, words in [
        ("plain.txt", "does not write the user's text"),
        ("broken.jinja", "cannot render a question"),
        ("config.json", "no entry chat_template"),
        ("half.json", "cannot be read"),
        ("b", "cannot be read"),
        ("empty", "no template, neither chat_template.jinja"),
        ("missing", "cannot be read"),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            use_template(make_tokenizer(), flags("--chat_template", str(tmp_path / name)))
        assert f"--chat_template {str(tmp_path / name)!r}" in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="--enable_thinking is a switch of chat templates"):
        use_template(make_tokenizer(), flags("--no_chat_template", "--enable_thinking"))
    with pytest.raises(SystemExit):
        flags("--no_chat_template", "--chat_template", "x")


def test_several_templates_without_a_default():
    """A tokenizer with named templates alone: a traceback, or whichever comes first."""
    tokenizer = make_tokenizer({"rag": CHATML, "tools": CHATML})
    with pytest.raises(ValueError, match=r"several chat templates \(rag, tools\).*--chat_template"):
        encode_prompt(tokenizer, "hi")
    assert prompt_text(make_tokenizer({"default": CHATML, "tools": QWEN3})).endswith("assistant\n")


def test_a_template_that_refuses_a_prompt_is_one_line():
    """A traceback of the template engine."""
    with pytest.raises(ValueError, match="the chat template cannot render the prompt: not you"):
        encode_prompt(make_tokenizer("{{ raise_exception('not you') }}"), "hi")
