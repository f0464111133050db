"""What the scripts share: one-line errors with exit code 2, output files, switches, a run's record.

Output files are checked before anything is loaded (`check_output_file`, `check_output_folder`), are the old or the new
file and never half of one (`atomic_open`), and belong to one process at a time (`lock_folder`, `lock_file`).
"""

from __future__ import annotations

import argparse
import codecs
import errno
import fcntl
import io
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NoReturn

from huggingface_hub.utils import logging as hub_logging
from tqdm import tqdm
from transformers.utils import logging

PATIENCE = 3.0  # seconds before a bar is shown for work that is short most of the time
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy")
# What a disk can answer to a write, and a user can mend.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP}


# ---------------------------------------------------------------------------------------------------------------------
# Command lines
# ---------------------------------------------------------------------------------------------------------------------


SETTING = re.compile(r"(?<![\w'\"/.-])[a-z]+(?:_[a-z0-9]+)+\b(?!['\"/.=])")  # a name in a message, not quoted, no path


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
        """The message on one line, with the dashes of flags, if it begins with a setting, as in `top_k is -1`.

        Functions that serve Python callers too name it without them. A complaint about a file begins with its path.
        """
        message = " ".join(message.split())
        if len(message) > 1200:  # a value that nobody reads: what is wrong stands before it, the way out after it
            message = f"{message[:800]} [...] {message[-300:]}"
        flags = self._option_string_actions
        first = re.match(r"(?:an entry of )?(\w+_\w+|\w+(?= is | lists ))", message)
        if first is None or f"--{first[1]}" not in flags:
            return message
        text = message[: first.start(1)] + "--" + message[first.start(1) :]
        return SETTING.sub(lambda name: f"--{name[0]}" if f"--{name[0]}" in flags else name[0], text)


def is_text(text: str) -> bool:
    """Whether a string can be written in UTF-8. The system hands over bytes that cannot as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def not_empty(text: str) -> str:
    """An argparse type: text as typed, unless there is none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty (an unset shell variable?)")
    return text


WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Switch(argparse.Action):
    """A flag that is on or off: `--flag`, `--no-flag`, `--no_flag`, `--flag True`, `--flag False`."""

    def __init__(self, option_strings: list[str], dest: str, **settings: Any):
        off = [f"--no{mark}{name.removeprefix('--')}" for name in option_strings for mark in "-_"]
        super().__init__([*option_strings, *off], dest, nargs="?", metavar="True|False", **settings)
        self._off = off

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: str | None, option: str | None
    ) -> None:
        if value is not None and (option in self._off or value.lower() not in WORDS):
            raise argparse.ArgumentError(self, f"{value!r} is neither True nor False, or follows a --no-")
        setattr(namespace, self.dest, option not in self._off if value is None else WORDS[value.lower()])


class FileSwitch(Switch):
    """A switch that can name its file: `--flag` and `--flag True` mean the file `file`, `--no-flag` no file (None)."""

    def __init__(self, option_strings: list[str], dest: str, *, file: str, **settings: Any):
        super().__init__(option_strings, dest, **settings)
        self.metavar, self._file = "FILE", file

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: str | None, option: str | None
    ) -> None:
        if value is None or value.lower() in WORDS or option in self._off:
            super().__call__(parser, namespace, value, option)
            value = self._file if getattr(namespace, self.dest) else None
        setattr(namespace, self.dest, value)


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
    except OSError as error:
        of_a_path = isinstance(error, (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError))
        if error.filename is None or not (of_a_path or error.errno in DISK_ERRORS):  # a defect
            raise
        parser.error(f"{error.filename}: {error.strerror}; give another path{room_for(error)}")
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


@contextmanager
def no_loading_bar(hidden: bool = True) -> Iterator[None]:
    """Hides the bar in which `transformers` counts the weights that it loads. A download keeps its own bar."""
    if not hidden:
        yield
        return
    before = logging.set_tqdm_hook(lambda bar, args, settings: bar(*args, **settings | {"disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def prompt_bar(chunks: Iterable[range]) -> tqdm:
    """A bar for a long prompt's way through the target, on a terminal; `update` takes tokens, also parts of them."""
    tokens = sum(map(len, chunks))
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    settings = {"delay": PATIENCE, "leave": False, "disable": None, "bar_format": form}
    return tqdm(total=tokens, desc=f"prompt of {tokens:,} tokens", **settings)


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


def json_lines(text: str | bytes, where: str, *, broken: str = "") -> Iterator[tuple[int, Any]]:
    """The value of each line of JSON, with the line's number from 1; blank lines have none.

    Lines end with a line feed alone, as texts may have U+2028 in them. ValueError names the line that is no JSON, and
    says `broken` of it, or what the parser says.
    """
    for number, line in enumerate(text.split("\n" if isinstance(text, str) else b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}, line {number}{f' {broken}' if broken else f': {error}'}") from None
        yield number, value


def shown(value: object, most: int = 80) -> str:
    """A value as a message may hold it: long text is cut, of long lists there is the length."""
    text = str(value)
    if len(text) <= most:
        return text
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"{text[: most - 3]}..."


def room_for(error: OSError, then: str = ", or make room") -> str:
    """What else helps against this error than another path, for the end of a message: nothing for most errors."""
    return then if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first names in their order, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---------------------------------------------------------------------------------------------------------------------
# Output files
# ---------------------------------------------------------------------------------------------------------------------


def check_output_file(flag: str, path: str | Path | None) -> None:
    """ValueError that names the flag unless a file can be written there; no path is fine. What it tries out goes again.

    Character devices and named pipes are written to as they are. Folders, block devices, sockets, and paths in a
    missing or read-only folder are refused.
    """
    if path is None:
        return
    try:
        _try_file(path)
    except OSError as error:
        raise ValueError(
            f"{flag} {str(path)!r} cannot be written ({error.strerror}): give another path{room_for(error)}"
        ) from None


def check_output_folder(flag: str, folder: str | Path | None) -> None:
    """ValueError that names the flag unless files can be written in a folder, which need not exist yet. Makes nothing.

    No path is fine.
    """
    if folder is None:
        return
    existing = next(
        path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.lexists(path)
    )
    try:
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{str(existing)!r} is no folder")
        _try_folder(existing)
    except OSError as error:
        raise ValueError(
            f"{flag} {str(folder)!r} cannot be written ({error.strerror}): give another folder{room_for(error)}"
        ) from None


def _try_file(path: str | Path) -> None:
    """OSError with a reason that a user understands, if a file cannot be written there."""
    descriptor = own_descriptor(path)
    if descriptor is not None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise PermissionError(errno.EACCES, "it is not open for writing")
        return
    real = Path(os.path.realpath(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not real.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {str(real.parent)!r}") from None
        _try_folder(real.parent)
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise OSError(errno.EINVAL, "it is a disk or a socket, no file")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "no permission")
    if stat.S_ISREG(mode):
        _try_folder(real.parent)


def _try_folder(folder: Path) -> None:
    """OSError if no file can be made in a folder that is there. Trying is the only way to know, for root above all."""
    trial = folder / f".{secrets.token_hex(6)}.trial"
    os.close(os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    trial.unlink()


def own_descriptor(path: str | Path) -> int | None:
    """N where a path, or what it links to, is a name for this process's open file N: /dev/stdout, /dev/fd/N."""
    for _ in range(40):  # as many links as Linux follows
        path = os.path.abspath(path)
        found = re.fullmatch(rf"(?:/dev/fd|/proc/(?:self|thread-self|{os.getpid()})/fd)/(\d+)", path)
        if found:
            return int(found[1])
        if not os.path.islink(path):
            return None
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return None


class _RawFile(io.FileIO):
    """A file that remembers why a write failed: `torch.save` turns the reason into an error of its own."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def atomic_open(path: str | Path, mode: str = "w") -> Iterator[IO]:
    """Open a file to write that is the old one or the new one, never half of it: a temporary file takes its place.

    A link stays and its target is replaced. Devices, named pipes and open files (/dev/stdout) are written to directly:
    a rename would take them away from everyone else. Missing folders are made. OSError names `path`.
    """
    encoding = None if "b" in mode else "utf-8"
    descriptor = own_descriptor(path)
    if descriptor is None and (not os.path.exists(path) or os.path.isfile(path)):
        with _replacing(Path(path), mode) as file:
            yield file
        return
    print(end="", flush=True)  # what was printed before comes before
    with naming(path), open(path if descriptor is None else os.dup(descriptor), mode, encoding=encoding) as file:
        yield file


@contextmanager
def _replacing(path: Path, mode: str) -> Iterator[IO]:
    """`atomic_open` for a regular file, or one that is not there yet."""
    real = Path(os.path.realpath(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    temporary = real.with_name(f".{real.name[:40]}.{secrets.token_hex(6)}")
    with naming(path):
        raw = _RawFile(temporary, "x")
    buffer = io.BufferedWriter(raw)
    file = buffer if "b" in mode else io.TextIOWrapper(buffer, encoding="utf-8")
    try:
        yield file
        with naming(path):
            file.flush()
            os.fsync(raw.fileno())  # a file that is renamed before its content is on disk can be empty after a crash
            file.close()
            if real.exists():
                shutil.copymode(real, temporary)
            os.replace(temporary, real)
    except BaseException:
        with suppress(OSError):
            file.close()
        temporary.unlink(missing_ok=True)
        if raw.failure is not None:
            raise OSError(raw.failure.errno, raw.failure.strerror, str(path)) from None
        raise


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """OSErrors of the block get the name of the file that it writes: those of `write` and `flush` have none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def append_text(path: Path, text: str) -> None:
    """Append whole lines so that neither a kill nor a power cut loses them, nor a full disk leaves half of one.

    Half a line that a killed process left at the end is cut off before. OSError names `path`.
    """
    with naming(path), path.open("ab+") as file:
        end = whole_lines(file)
        file.truncate(end)
        try:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # it closes with what it could not write
                file.close()
            os.truncate(path, end)
            raise


def whole_lines(file: IO[bytes]) -> int:
    """Bytes of a file up to the end of its last whole line."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - 65536)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


@contextmanager
def lock_folder(flag: str, folder: Path) -> Iterator[None]:
    """Make a folder, and let no other process write there while the block runs. ValueError when one does already.

    The lock is the system's (flock) on `.lock` in the folder and ends with the process, however that ends. A folder
    that is still empty afterwards goes again.
    """
    with _making(folder), _lock(folder / ".lock", f"{flag} {str(folder)!r}"):
        yield


@contextmanager
def lock_file(flag: str, path: Path) -> Iterator[None]:
    """`lock_folder` for one file."""
    real = Path(os.path.realpath(path))
    with _making(real.parent), _lock(real.with_name(f".{real.name}.lock"), f"{flag} {str(path)!r}"):
        yield


@contextmanager
def _making(folder: Path) -> Iterator[None]:
    """Make a folder; what of it is still empty afterwards goes again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


@contextmanager
def _lock(path: Path, output: str) -> Iterator[None]:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ValueError(f"{output} is in use: {holder} writes there; wait for it, or choose another") from None
        except OSError as error:
            print(f"{output}: no lock against a second process ({error.strerror})", file=sys.stderr)
            break
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)  # the process before us has just removed it
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    try:
        yield
    finally:
        with suppress(OSError):  # before the lock goes: nobody else can have it yet
            path.unlink()
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------


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


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a matplotlib figure as PNG, atomically."""
    with atomic_open(path, "wb") as file:
        figure.savefig(file, dpi=120, format="png")


def markdown_table(heads: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    """A Markdown table; its cells are whatever `str` makes of them."""
    heads = list(heads)
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows)
