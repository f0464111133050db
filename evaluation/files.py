"""The files of an evaluation: their names, rows that survive a kill, and what tells one run from another.

    raw/pipeline_eval__RUN__per_sample.jsonl   one row a sample, appended as it finishes
    raw/pipeline_eval__RUN__run.json           settings, arguments, commit, versions
    summary/pipeline_eval__RUN__summary.json   beside it __plots.png; pipeline_eval__table.md for all runs there
    summary/pipeline_eval__HEAD__TARGET__results.json   one head's runs there: an entry a data set of each run
    BASELINE_CACHE/baseline__*__KEY.jsonl      rows of the target alone; KEY is a hash of all that changes them

RUN names head, target and settings: `SmolLM2-135M-Instruct_s6_l2__SmolLM2-135M-Instruct__n6_W1_T0`. The files of a
pipeline of ranks begin with `mp_pipeline_eval` instead, so both evaluations can share a folder.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evaluation.metrics import Row, check_row, row_key
from loading.checkpoint_files import CHECKPOINT_NAME, checkpoint_file
from script_utils import append_text, json_lines, lock_file, write_json

PREFIX = "pipeline_eval"  # of the files of eval.py
MP_PREFIX = "mp_pipeline_eval"  # of those of a pipeline of ranks
LONGEST_NAME = 240  # bytes of a file name: file systems take 255, and temporary files need some more
# The code that makes tokens and times: rows of two versions of it are not mixed.
DECODING_CODE = (
    "pipeline_model.py",
    "pipeline_inference.py",
    "timeline.py",
    "decoding/cache.py",
    "decoding/compiled.py",
    "decoding/nodes.py",
    "decoding/sampling.py",
    "decoding/stage.py",
    "decoding/static_head.py",
    "decoding/tree.py",
    "loading/chat_template.py",
    "loading/checkpoint_files.py",
    "loading/head_values.py",
    "loading/target_config.py",
    "loading/target_files.py",
    "loading/tokenizer.py",
)


# ---------------------------------------------------------------------------------------------------------------------
# What tells one run from another
# ---------------------------------------------------------------------------------------------------------------------


def code_fingerprint(more: Iterable[str] = ()) -> str:
    """A hash of the decoding code, and of more files that a method needs; comments and docstrings do not count.

    Rows with an older fingerprint are not reused: nobody can tell whether the change between the two versions changes
    their tokens or times.
    """
    folder = Path(__file__).parents[1]
    code = [(name, statements((folder / name).read_text(encoding="utf-8"))) for name in sorted({*DECODING_CODE, *more})]
    return hashlib.sha256(repr(code).encode()).hexdigest()


def statements(source: str) -> str:
    """Python code without its comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def device_name(device: torch.device, threads: int) -> str:
    """What times depend on: the GPU's name, or the CPU's and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.is_file() else None
    return f"{found[1].strip() if found else platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def settings_key(settings: Mapping[str, Any]) -> str:
    """A short hash of settings, for a file name."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def checkpoint_labels(paths: Sequence[str]) -> dict[str, str]:
    """A short name a head: its file's, its folder's for `speculation_head_final.pt`, more folders where these agree.

    ValueError when two paths are the same checkpoint.
    """
    files = {path: checkpoint_file(path).resolve() for path in paths}
    for path, file in files.items():
        if list(files.values()).count(file) > 1:
            raise ValueError(f"--spec_head_ckpt has {path!r} twice: give it once")
    named = {path: Path(os.path.abspath(checkpoint_file(path))) for path in paths}  # the hub's cache is full of links
    parts = {
        path: (file.parent if file.name == CHECKPOINT_NAME else file.with_suffix("")).parts
        for path, file in named.items()
    }
    for depth in range(1, max(map(len, parts.values())) + 1):
        labels = {path: safe_name("-".join(pieces[-depth:])) for path, pieces in parts.items()}
        if len(set(labels.values())) == len(labels):
            return labels
    raise ValueError(f"--spec_head_ckpt {', '.join(paths)}: their names differ in nothing that a file name can hold")


def safe_name(text: str) -> str:
    """The text with everything that troubles a file name replaced."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-")


def number_name(value: float) -> str:
    """A number as short as it can be written without loss: 0, 0.7, 1."""
    return str(value).removesuffix(".0")


# ---------------------------------------------------------------------------------------------------------------------
# Rows on disk
# ---------------------------------------------------------------------------------------------------------------------


class RowLog:
    """A file of rows, appended and synced one by one; the newest row of a sample counts.

    Nothing is written before the first row. Its settings stand in `record`, a JSON file with an entry "settings".
    """

    def __init__(self, path: Path, record: Path):
        self.path, self.record = path, record

    def check(self, settings: Mapping[str, Any], *, resume: bool) -> None:
        """ValueError when there are rows and they must not or cannot be continued; names the setting that differs."""
        if len(os.fsencode(self.path.name)) > LONGEST_NAME:
            raise ValueError(
                f"the file name {self.path.name!r} would pass {LONGEST_NAME} bytes: "
                "give the checkpoint or the target's folder a shorter name"
            )
        if not self.path.exists() and not self.record.exists():
            return
        if not resume:
            raise ValueError(
                f"{str(self.path)!r} is there already: go on with --resume, or choose another --output_dir"
            )
        try:
            theirs = dict(json.loads(self.record.read_text(encoding="utf-8"))["settings"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(
                f"{str(self.path)!r} cannot be resumed: its settings, {str(self.record)!r}, are missing or damaged; "
                "choose another --output_dir"
            ) from None
        ours = json.loads(json.dumps(settings))
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                raise ValueError(
                    f"{str(self.path)!r} has {name} {theirs.get(name)}, this run {ours.get(name)}: "
                    "resume with the same settings, or choose another --output_dir"
                )

    def read(self) -> dict[tuple[str, str], Row]:
        """The newest row of each sample. Half a line that a killed run left at the end does not count.

        ValueError names any other line that is broken.
        """
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        rows, broken = {}, "is no row: remove the line"
        for number, row in json_lines(data[:whole], repr(str(self.path)), broken=broken):
            try:
                rows[row_key(row)] = check_row(row)
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{str(self.path)!r}, line {number} {broken}") from None
        return rows

    def append(self, row: Row, record: Mapping[str, Any]) -> None:
        """Write one row so that a kill or a power cut cannot lose it; the first row writes the record, too."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            if not self.record.exists():
                write_json(self.record, record)
            append_text(self.path, line)
        except OSError as error:
            raise ValueError(
                f"{str(self.path)!r} cannot be written ({error.strerror}): --resume goes on from here"
            ) from None

    def lock(self, flag: str) -> AbstractContextManager[None]:
        """Keeps other processes from these rows. ValueError, which names the folder's flag, when one writes them."""
        return lock_file(flag, self.path)

    def clear(self) -> None:
        """Forget all rows."""
        self.path.unlink(missing_ok=True)
        self.record.unlink(missing_ok=True)


@dataclass(frozen=True)
class RunFiles:
    """Where a run's files are."""

    output_dir: Path
    name: str  # head, target and settings
    prefix: str = PREFIX

    @property
    def rows(self) -> RowLog:
        stem = self.output_dir / "raw" / f"{self.prefix}__{self.name}"
        return RowLog(Path(f"{stem}__per_sample.jsonl"), Path(f"{stem}__run.json"))

    @property
    def summary(self) -> Path:
        return self.output_dir / "summary" / f"{self.prefix}__{self.name}__summary.json"

    @property
    def plots(self) -> Path:
        return self.output_dir / "summary" / f"{self.prefix}__{self.name}__plots.png"

    def results(self, settings: Mapping[str, Any]) -> Path:
        """What the head of this run, or its method where it has no head, reached in all runs of the output folder."""
        owner = settings["head"] or settings["method"]
        return self.output_dir / "summary" / f"{self.prefix}__{owner}__{settings['target']}__results.json"

    @property
    def table(self) -> Path:
        """The Markdown table of all summaries in the output folder that have this prefix."""
        return self.output_dir / "summary" / f"{self.prefix}__table.md"


def read_runs(output_dir: Path, prefix: str = PREFIX) -> list[tuple[RunFiles, dict[str, Any]]]:
    """The files and the summary of every run with this prefix in an output folder, by name.

    ValueError names a summary that is none.
    """
    runs = []
    for path in sorted((output_dir / "summary").glob(f"{prefix}__*__summary.json")):
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            if not all(isinstance(summary[name], dict) for name in ("settings", "overall", "datasets")):
                raise TypeError
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{str(path)!r} is no summary of an evaluation: move it away") from None
        name = path.name.removeprefix(f"{prefix}__").removesuffix("__summary.json")
        runs.append((RunFiles(output_dir, name, prefix), summary))
    return runs


def read_summaries(output_dir: Path, prefix: str = PREFIX) -> list[dict[str, Any]]:
    """The summaries of `read_runs`."""
    return [summary for _, summary in read_runs(output_dir, prefix)]


def baseline_cache(folder: Path, settings: Mapping[str, Any]) -> RowLog:
    """The rows of the target alone under these settings, whichever evaluation made them."""
    temperature = number_name(settings["temperature"])
    stem = folder / f"baseline__{safe_name(settings['target'])}__T{temperature}__{settings_key(settings)}"
    return RowLog(Path(f"{stem}.jsonl"), Path(f"{stem}.json"))
