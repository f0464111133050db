"""--chat: several turns in a terminal, on a pseudo-terminal and from a pipe."""

import os
import pty
import re
import select
import signal
import sys
import time

import pytest
import torch

from decoding.chat import Conversation
from loading.tokenizer import load_tokenizer
from pipeline_inference import build_parser, main
from pipeline_model import Target, save_head
from script_utils import run_script
from tests.ranks import CONTEXT, generate, ranks
from tests.tiny import hf_greedy, save_target, tiny_head

TURNS = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}a {% endif %}"
THINKS = TURNS.replace("a {% endif", "a w59 w58 {% endif")  # what the assistant begins with is not in later prompts


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    for name, family in (("target", "llama"), ("hybrid", "qwen3_5")):
        save_target(folder / name, family, chat_template=TURNS, max_position_embeddings=128)
        save_head(tiny_head(Target.load(str(folder / name)), (2, 2)), folder / f"{name}.pt")
    return folder


def flags(files, name="target", head=True, *more):
    shared = ["--chat", "--base_model_path", str(files / name), "--device", "cpu", "--dtype", "float32"]
    return [*shared, *(["--spec_head_ckpt", str(files / f"{name}.pt")] if head else []), *more]


# ---------------------------------------------------------------------------------------------------------------------
# From a pipe
# ---------------------------------------------------------------------------------------------------------------------


def chat_over_pipe(monkeypatch, capsys, lines, arguments):
    """What a chat answers to lines on its standard input: (line, answer, statistics) each, and all that was printed."""
    read, write = os.pipe()
    os.write(write, "".join(f"{line}\n" for line in lines).encode())
    os.close(write)
    with open(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(build_parser().parse_args(arguments)) == 0
    printed = capsys.readouterr().out
    return re.findall(r"^> (w.*)\n(?:\[chat\].*\n)*(.*)\n(\[(?:standard|pipeline)\].*)$", printed, re.M), printed


def ids(text):
    """Of the tiny tokenizer: w5 is 5, and an unknown word 0."""
    return [int(word[1:]) if re.fullmatch(r"w\d+", word) else 0 for word in text.split()]


@pytest.mark.parametrize(
    ("name", "head", "more"),
    [
        ("target", True, []),
        ("target", True, ["--draft_top_k", "4"]),
        ("target", False, []),
        ("hybrid", True, ["--draft_top_k", "4", "--verify_lag", "1"]),
        ("hybrid", False, []),
    ],
)
def test_every_answer_is_what_a_fresh_run_says(files, monkeypatch, capsys, name, head, more):
    """Guards against an answer that depends on what the caches kept, and turns that are run again."""
    questions = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9"]
    turns, _ = chat_over_pipe(monkeypatch, capsys, questions, flags(files, name, head, "--max_new_tokens", "9", *more))
    model, history, kept = Target.load(str(files / name)).model, "", 0
    assert [question for question, _, _ in turns] == questions
    for question, answer, statistics in turns:
        history += f"u {question} "
        assert ids(answer) == hf_greedy(model, ids(history + "a"), 9)
        shown = re.search(r", (\d+) tokens of the prompt were in memory", statistics)
        assert int(shown[1] if shown else 0) in range(kept, kept + 2)
        history += f"a {answer} "
        kept = len(ids(history)) - 1
        if head:
            assert re.search(r"9 tokens \(length\), [\d.]+ tokens/s, .* alpha .*, L_acc .*, theoretical", statistics)


def test_reset_quit_and_other_commands(files, monkeypatch, capsys):
    """Guards against a history that survives /reset, commands that are asked as questions, and lines after /quit."""
    lines = ["w1 w2", "/reset", "w1 w2", "/help", "", "/quit", "w3"]
    turns, printed = chat_over_pipe(monkeypatch, capsys, lines, flags(files, "target", True, "--max_new_tokens", "4"))
    assert len(turns) == 2
    assert turns[0][:2] == turns[1][:2]
    assert "[chat] the conversation begins anew" in printed
    assert "[chat] /help is no command: there are /reset and /quit" in printed


def test_a_history_too_long_loses_its_oldest_turns(files, monkeypatch, capsys):
    """Guards against a chat that ends at the position limit, and one that forgets more than it must."""
    words = " ".join(f"w{index}" for index in range(1, 31))
    arguments = flags(files, "target", True, "--max_new_tokens", "8")
    turns, printed = chat_over_pipe(monkeypatch, capsys, [words] * 4 + [" ".join([words] * 5)], arguments)
    model = Target.load(str(files / "target")).model
    assert printed.count("[chat] the 2 oldest turns are dropped: no more positions are left") == 1
    assert "the question has 152 tokens with its template, but only 121 leave room" in printed
    history = "".join(f"u {question} a {answer} " for question, answer, _ in turns[1:3])
    assert ids(turns[3][1]) == hf_greedy(model, ids(f"{history}u {words} a"), 8)


def test_a_template_that_changes_earlier_turns(files, monkeypatch, capsys):
    """Guards against caches of what the assistant began with, where the next prompt no longer has it."""
    for name, expected in (("target", 6), ("hybrid", 6)):
        template = files / "thinks.jinja"
        template.write_text(THINKS)
        arguments = flags(files, name, True, "--max_new_tokens", "5", "--chat_template", str(template))
        turns, _ = chat_over_pipe(monkeypatch, capsys, ["w1 w2 w3 w4", "w5"], arguments)
        model = Target.load(str(files / name)).model
        prompt = ids(f"u w1 w2 w3 w4 a {turns[0][1]} u w5 a w59 w58")
        assert ids(turns[1][1]) == hf_greedy(model, prompt, 5)
        kept = int(re.search(r", (\d+) tokens of the prompt were in memory", turns[1][2])[1])
        assert kept in (expected - 1, expected)  # a state is kept for what is sure to come again: without "a"


def test_a_sampled_chat(files, monkeypatch, capsys):
    """Guards against draws that depend on the caches: the same lines give the same chat."""
    more = ["--temperature", "0.9", "--max_new_tokens", "6", "--draft_top_k", "4"]
    chats = [
        chat_over_pipe(monkeypatch, capsys, ["w1 w2", "w3"], flags(files, "target", head, *more))[0] for head in (1, 0)
    ]
    assert [turn[:2] for turn in chats[0]] == [turn[:2] for turn in chats[1]]


@pytest.mark.parametrize(
    "other", [["--prompt", "w1"], ["--html", "x.html"], ["--trace", "x.json"], ["--pipeline_first"]]
)
def test_flags_that_cannot_go_with_it(files, other):
    """Guards against flags that a chat would ignore."""
    with pytest.raises(ValueError, match=f"cannot go with {other[0]}"):
        main(build_parser().parse_args([*flags(files), *other]))


def test_a_question_that_is_no_text_leaves_the_conversation_alone(files):
    """Guards against bytes that are no text in every later prompt."""
    conversation = Conversation(load_tokenizer(str(files / "target")), 50)
    conversation.add("w1", "w2")
    with pytest.raises(ValueError, match="UTF-8"):
        conversation.prompt("\udcff")
    assert [turn["content"] for turn in conversation.turns] == ["w1", "w2"]


# ---------------------------------------------------------------------------------------------------------------------
# On a terminal
# ---------------------------------------------------------------------------------------------------------------------


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(self, body, *args):
        self._own, theirs = pty.openpty()
        self._process = CONTEXT.Process(target=at_terminal, args=(os.ttyname(theirs), body, args), daemon=True)
        self._process.start()
        self._theirs, self.text = theirs, ""

    def wait_for(self, pattern, seconds=60):
        """Until the program has printed it, after what was waited for before; returns what it printed until then."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            if select.select([self._own], [], [], 0.1)[0]:
                self.text += os.read(self._own, 65536).decode(errors="replace")
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def type(self, text):
        os.write(self._own, text.encode())

    def code(self, seconds=60):
        """The program's exit code."""
        self._process.join(seconds)
        return self._process.exitcode

    def code_after_ctrl_c(self, seconds=60):
        """The exit code once Ctrl-C has ended the program, pressed once per second as a user would.

        Python overlooks one that comes after input() has printed its prompt and before it waits for a key.
        """
        for _ in range(seconds):
            self.type("\x03")
            if (code := self.code(1)) is not None:
                return code
        return None


def at_terminal(name, body, args):
    """In a process of its own: the terminal is standard input and output, and Ctrl-C comes from it."""
    os.setsid()
    descriptor = os.open(name, os.O_RDWR)  # the first terminal of a session without one becomes its own
    for standard in (0, 1, 2):
        os.dup2(descriptor, standard)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    body(*args)


def slow_chat(arguments):
    """The script with a target that takes its time, so that a Ctrl-C comes in the middle of an answer."""
    forward = Target.run_layers
    Target.run_layers = lambda *args: time.sleep(0.01) or forward(*args)
    sys.argv = ["pipeline_inference.py", *arguments]
    os.environ.pop("NO_COLOR", None)
    run_script(main, build_parser())


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(files):
    """Guards against a Ctrl-C that ends the chat or is lost, and a cut answer that is forgotten, or run again."""
    terminal = Terminal(slow_chat, flags(files, "target", True, "--max_new_tokens", "60"))
    terminal.wait_for(r"/quit.*leaves[^>]*> ")
    terminal.type("w1 w2 w3\n")
    terminal.wait_for(r"(\033\[3[23]m w?\d*.*?){4}")
    terminal.type("\x03")
    statistics = terminal.wait_for(r"\[pipeline\] .*\n")
    count = int(re.search(r"(\d+) tokens \(stopped\), [\d.]+ tokens/s", statistics)[1])
    assert 4 <= count < 60
    terminal.wait_for("> ")
    terminal.type("w4\n")
    statistics = terminal.wait_for(r"\[pipeline\] .*\n")
    kept = int(re.search(r", (\d+) tokens of the prompt were in memory", statistics)[1])
    assert kept in (5 + count - 1, 5 + count)
    terminal.wait_for("> ")
    assert terminal.code_after_ctrl_c() == 0  # at the prompt: leave


def test_the_end_of_the_input_leaves(files):
    """Guards against a terminal that cannot be left by Ctrl-D."""
    terminal = Terminal(slow_chat, flags(files, "target", False))
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.code() == 0


# ---------------------------------------------------------------------------------------------------------------------
# With a rank per stage
# ---------------------------------------------------------------------------------------------------------------------


def chat_rank(lines, *arguments):
    """The example script on a rank; the draft rank reads the pipe at `lines`."""
    if os.environ["RANK"] == "0":
        sys.stdin = open(lines)  # noqa: SIM115
        run_layers = Target.run_layers
        Target.run_layers = lambda *args: time.sleep(0.02) or run_layers(*args)
    generate(*arguments)


def test_ranks_chat_and_ctrl_c_stops_an_answer(files, tmp_path):
    """Guards against ranks that run a turn again or answer otherwise, and a Ctrl-C that ends them."""
    lines = tmp_path / "lines"
    os.mkfifo(lines)
    arguments = [argument for argument in flags(files) if argument not in ("--device", "cpu")]
    more = ["--rank_gpus", "cpu", "--colocate_draft", "--draft_top_k", "4", "--max_new_tokens", "40"]
    with ranks(2, tmp_path / "out", chat_rank, str(lines), *arguments, *more) as running:
        with open(lines, "w", buffering=1) as typed:
            typed.write("w1 w2 w3\n")
            running.wait_for(0, "> w1 w2 w3")
            time.sleep(0.3)
            os.kill(running.processes[0].pid, signal.SIGINT)
            running.wait_for(0, "tokens (stopped)")
            typed.write("w4\n")
            running.wait_for(0, "were in memory")
        assert running.join() == [0, 0], running.err(0)
        turns = re.findall(r"^> (w.*)\n(.*)\n+(\[pipeline\].*)$", running.out(0), re.M)
    model = Target.load(str(files / "target")).model
    first, second = (answer for _, answer, _ in turns)
    count = len(ids(first))
    assert 0 < count < 40
    assert ids(first) == hf_greedy(model, ids("u w1 w2 w3 a"), count)
    assert ids(second) == hf_greedy(model, ids(f"u w1 w2 w3 a {first} u w4 a"), 40)
    kept = int(re.search(r", (\d+) tokens of the prompt were in memory", turns[1][2])[1])
    assert kept in (5 + count - 1, 5 + count)
