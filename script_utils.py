"""What the scripts share: one-line errors with exit code 2, files that are never half-written, a run's record."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}  # short -> long
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr, exit code 2, and whose help shows defaults.

    An empty value is refused, since an unset shell variable gives one and Path("") is the current folder. A flag for
    which it means something has `type=str`.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **kwargs)
        self.register("type", None, not_empty)
        self.register("type", Path, lambda text: Path(not_empty(text)))

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's. An argument that is no text is an error: no tokenizer and no JSON file could take it."""
        for argument in sys.argv[1:] if args is None else args:
            if not is_text(argument):
                self.error(f"the argument {argument!r} is not UTF-8: give it as text in UTF-8")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {self.as_typed(message)}\n")

    def as_typed(self, message: str) -> str:
        """The message on one line. The setting that it begins with is named as the user typed it: `--top_k is -1`.

        Functions that serve Python callers too name a setting without the dashes.
        """
        message = " ".join(message.split())
        setting = re.match(r"(\w+) (is|lists) ", message)
        return f"--{message}" if setting and f"--{setting[1]}" in self._option_string_actions else message


def is_text(text: str) -> bool:
    """Whether a string can be written in UTF-8. The system hands over bytes that cannot as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def dtype_name(text: str) -> str:
    """The name of a data type as flags have it, for `type=`: bf16 is bfloat16. Other texts are left to `choices=`."""
    return DTYPE_NAMES.get(text, text)


def add_dtype_argument(group: argparse._ArgumentGroup) -> None:
    """The flag --dtype, for `resolve_dtype`."""
    group.add_argument(
        "--dtype",
        type=dtype_name,
        default="auto",
        choices=["auto", *DTYPES],
        help="auto: float32 on a CPU, or bfloat16; fp32, bf16, fp16 and half work, too",
    )


def not_empty(text: str) -> str:
    """An argparse type: text as typed, unless there is none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty (an unset shell variable?)")
    return text


def run_script(main: Callable[[argparse.Namespace], int | None], parser: Parser) -> NoReturn:
    """Parse, run, exit. A ValueError, or a path of no use, is the user's to mend: one line, exit code 2.

    Ctrl-C: exit code 130. When nobody reads the output any more (`| head`): exit code 141, without a word.
    """
    show_what_can_be_shown()
    try:
        try:
            code = _run(main, parser)
        finally:
            sys.stdout.flush()  # now, where a closed pipe can be told from a defect
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        leave_quietly()
    sys.exit(code)


def _run(main: Callable[[argparse.Namespace], int | None], parser: Parser) -> int | None:
    args = parser.parse_args()
    try:
        return main(args)
    except ValueError as error:
        parser.error(str(error))
    except (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        if error.filename is None:  # not about a path: a defect
            raise
        parser.error(f"{error.filename}: {error.strerror}; give another path")
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted\n")


def show_what_can_be_shown() -> None:
    """Print a question mark for a character that the terminal cannot show, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def reader_is_gone() -> bool:
    """Whether standard output or standard error is a pipe that nobody reads any more."""
    poll = select.poll()
    for descriptor in _output_descriptors():
        poll.register(descriptor, 0)  # errors are reported without being asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))


def leave_quietly() -> NoReturn:
    """Exit as a program does that SIGPIPE ends. What is still to be written goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _output_descriptors():
        os.dup2(nowhere, descriptor)
    sys.exit(128 + signal.SIGPIPE)


def _output_descriptors() -> Iterator[int]:
    for stream in (sys.stdout, sys.stderr):
        with suppress(io.UnsupportedOperation):  # of a stream in memory
            yield stream.fileno()


def quiet_libraries() -> None:
    """Errors only from transformers and the hub; loading bars only where somebody watches."""
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def resolve_device(name: str) -> torch.device:
    """A torch device from a flag: "auto" is CUDA where there is one. ValueError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device is {name!r}: use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"--device is {name!r}, but this machine has {count} CUDA devices: use auto or cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The data type of a flag; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    automatic = "float32" if device.type == "cpu" else "bfloat16"
    return DTYPES[automatic if name == "auto" else name]


def first_line(error: Exception, most: int = 200) -> str:
    """The first line of an error's message, at most so many characters; the class name where there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]


def text_encoding(start: bytes) -> str:
    """The encoding of a JSON text by its first four bytes; a byte order mark stays in the text, as U+FEFF."""
    name = json.detect_encoding(start[:4]).removesuffix("-sig")
    if name in ("utf-16", "utf-32"):
        name += "-le" if start.startswith(codecs.BOM_UTF16_LE) else "-be"
    return name


def read_text(path: str | Path) -> str:
    """A text file in UTF-8, UTF-16 or UTF-32, without its byte order mark. UnicodeDecodeError for anything else."""
    content = Path(path).read_bytes()
    return content.decode(text_encoding(content)).removeprefix("\ufeff")


@contextmanager
def atomic_open(path: str | Path, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file beside `path` and rename it at the end: the old file or the new one, never half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        os.chmod(temporary, 0o644)  # mkstemp's files are private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def run_record(args: argparse.Namespace) -> dict[str, Any]:
    """What is saved beside every output: the resolved arguments, the git commit, package versions."""
    return {
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "commit": git_commit(),
        "versions": {name: version(name) for name in RECORDED_PACKAGES},
    }


def git_commit() -> str:
    """The commit of this code, with "+changes" when tracked files differ from it; "unknown" outside a checkout."""
    folder = Path(__file__).parent
    try:
        git = ["git", "-C", str(folder)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changed else "")


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically. Values that are not a number (nan, infinity) are refused: JSON has no name for them."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_open(path) as file:
        file.write(text + "\n")


def markdown_table(heads: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    """A Markdown table; its cells are whatever `str` makes of them."""
    heads = list(heads)
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows)
