"""A chat in the terminal: the conversation as prompts, and the loop that reads, answers and can be stopped."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from decoding.result import GenerationResult, TokenEvent, shared_length
from loading.tokenizer import encode_turns

HELP = "[chat] /reset begins anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


class Prompt(NamedTuple):
    """A conversation as it is given to the target."""

    ids: list[int]
    stable: int  # so many of the ids will begin the next prompt as well, unless turns are dropped
    dropped: int  # turns that had to go


class Conversation:
    """Turns of user and assistant, oldest first, and the prompt that they make."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, longest: int, *, enable_thinking: bool = False):
        """longest: tokens of a prompt at most; older turns are dropped for it."""
        self._tokenizer, self._longest, self._enable_thinking = tokenizer, longest, enable_thinking
        self.turns: list[dict[str, str]] = []

    def prompt(self, question: str) -> Prompt:
        """The prompt for one more question, without the oldest turns where it would be too long.

        ValueError where the question is too long by itself, and as `encode_turns`. The conversation is as before then.
        """
        kept = [*self.turns, {"role": "user", "content": question}]
        while len(ids := self._encode(kept)) > self._longest:
            if len(kept) == 1:
                raise ValueError(
                    f"the question has {len(ids)} tokens with its template, but only {self._longest} leave room for "
                    "an answer: shorten it, or lower --max_new_tokens"
                )
            del kept[:2]  # a question with its answer
        dropped = len(self.turns) + 1 - len(kept)
        self.turns = kept[:-1]
        return Prompt(ids, shared_length(ids, self._encode(kept, asked=False)), dropped)

    def add(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        self.turns = []

    def _encode(self, turns: Sequence[dict[str, str]], *, asked: bool = True) -> list[int]:
        return encode_turns(self._tokenizer, turns, asked=asked, enable_thinking=self._enable_thinking)


class Answer(Protocol):
    """A generation, as a chat knows it."""

    result: GenerationResult

    def __iter__(self) -> Iterator[TokenEvent]: ...

    def stop(self) -> None: ...


class Chat:
    """The loop over a conversation.

    start       begins a generation: as `Decoder.start`
    show        prints the text of the events it iterates over
    describe    one line about a result
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: PreTrainedTokenizerBase,
        *,
        start: Callable[..., Answer],
        show: Callable[[Iterable[TokenEvent]], None],
        describe: Callable[[GenerationResult], str],
    ):
        self.conversation, self._tokenizer = conversation, tokenizer
        self._start, self._show, self._describe = start, show, describe
        self._last: Answer | None = None  # whose caches the next answer goes on from
        self._answering = self._stopped = False

    def run(self, max_new_tokens: int) -> int:
        """Read and answer until the user leaves, by /quit, by the end of the input or by Ctrl-C. Returns 0."""
        print(HELP, flush=True)
        while (line := self._read()) not in (None, "/quit"):
            if line == "/reset":
                self.conversation.reset()
                print("[chat] the conversation begins anew", flush=True)
            elif line.startswith("/"):
                print(f"[chat] {line.split()[0]} is no command: there are /reset and /quit", flush=True)
            elif line:
                self._answer(line, max_new_tokens)
        return 0

    def interrupt(self) -> bool:
        """Ctrl-C: stop the answer, or leave. False when the answer was told to stop already. For any thread."""
        if self._answering:
            first, self._stopped = not self._stopped, True
            return first
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # which waits for the user
        return True

    def _read(self) -> str | None:
        """What the user types next; None: the user leaves."""
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # ranks block it elsewhere
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                return input("> ").strip()
            line = sys.stdin.readline()
            if line:
                print(f"> {line.strip()}", flush=True)
            return line.strip() if line else None
        except EOFError:
            print(flush=True)
            return None
        except KeyboardInterrupt:
            print(flush=True)
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _answer(self, question: str, max_new_tokens: int) -> None:
        try:
            prompt = self.conversation.prompt(question)
        except ValueError as error:
            print(f"[chat] {error}", flush=True)
            return
        if prompt.dropped:
            print(f"[chat] the {prompt.dropped} oldest turns are dropped: no more positions are left", flush=True)
        answer = self._start(prompt.ids, max_new_tokens, after=self._last, checkpoint=prompt.stable)
        with self._interruptible():
            self._show(self._until_stopped(answer))
        self._last = answer
        self.conversation.add(question, self._tokenizer.decode(answer.result.tokens, skip_special_tokens=True))
        print(self._describe(answer.result), flush=True)

    def _until_stopped(self, answer: Answer) -> Iterator[TokenEvent]:
        for event in answer:
            yield event
            if self._stopped:
                answer.stop()

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C stops the answer at its next token; a second one ends the program."""

        def stop(*_: Any) -> None:
            if not self.interrupt():
                raise KeyboardInterrupt

        self._answering, self._stopped = True, False
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            self._answering = False
            signal.signal(signal.SIGINT, before)
