"""The state of a training run: what a step is made of, counters, checkpoints, the log and its plot, the wish to stop.

A checkpoint is a folder `checkpoint-{step}` with the head in the released format, which decodes as it is, and
`training_state.pt` with all else that a continued run needs to go on as if it had never stopped.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from loading.checkpoint_files import CHECKPOINT_NAME
from pipeline_model import DraftHead, save_head
from script_utils import append_text, atomic_open, first_line, json_lines, save_figure, shown

STATE_NAME = "training_state.pt"
LOG_NAME = "log.jsonl"
CURVE_NAME = "training_curve.png"


# ---------------------------------------------------------------------------------------------------------------------
# What a step is made of: functions of seed and step alone


class DataOrder:
    """Which examples each micro-batch holds.

    A run is one stream of examples, epoch after epoch, each in a random order of its own; an optimiser step takes the
    next `micro_batches * batch_size`. Inside a step they are sorted by length, longest first: micro-batches that run
    side by side get examples of similar length and little padding. As all tokens of a step weigh the same, sorting
    changes nothing else. torch's samplers draw from a generator as they go: they would have to be run from the start of
    the epoch to go on at a step, and could not sort a step that several processes share.
    """

    def __init__(self, lengths: np.ndarray, batch_size: int, micro_batches: int, seed: int):
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.step_size = batch_size * micro_batches
        self._epoch: tuple[int, np.ndarray] | None = None

    def epoch(self, epoch: int) -> np.ndarray:
        """All examples, in the order of an epoch."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, np.random.default_rng((self.seed, 0, epoch)).permutation(len(self.lengths))
        return self._epoch[1]

    def step(self, step: int) -> list[np.ndarray]:
        """The micro-batches of a step, all processes together; each is an array of row numbers."""
        positions = np.arange(step * self.step_size, (step + 1) * self.step_size)
        epochs, places = np.divmod(positions, len(self.lengths))
        rows = np.concatenate([self.epoch(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs)])
        rows = rows[np.argsort(-self.lengths[rows], kind="stable")]
        return list(rows.reshape(-1, self.batch_size))

    def steps(self, epochs: float) -> int:
        """Optimiser steps that see the data so many times; the last one is filled up from the next epoch."""
        return max(1, math.ceil(epochs * len(self.lengths) / self.step_size))


def example_lengths(rows: datasets.Dataset) -> np.ndarray:
    """Tokens of each example."""
    tables = rows.select_columns("input_ids").with_format("arrow").iter(batch_size=4096)
    return np.concatenate([pyarrow.compute.list_value_length(table["input_ids"]).to_numpy() for table in tables])


def draw_fill(
    num_stages: Sequence[int], use_deepest: bool, alpha: float | None, seed: int, micro_batch: int
) -> tuple[int, int]:
    """Pipeline depth n and fill F of a micro-batch, numbered from the start of the run.

    n is uniform. Without `alpha` half of the micro-batches have F = n, the others F uniform in 1 .. n-1 (method.md
    section 4). With it F has weight alpha^(F-1), and F = n that of all that would follow: a draft made with F tokens in
    flight is verified only if the F-1 before it were accepted: these are the fills whose drafts decide the acceptance.
    """
    random = np.random.default_rng((seed, 1, micro_batch))
    depth = int(random.choice(num_stages))
    if not use_deepest or depth == 1:
        return depth, depth
    if alpha is not None:
        weights = fill_weights(depth, alpha)
        return depth, int(random.choice(depth, p=weights)) + 1
    return depth, depth if random.random() < 0.5 else int(random.integers(1, depth))


def fill_weights(num_stages: int, alpha: float) -> np.ndarray:
    """Shares of the verified drafts that were made with 1 .. n tokens in flight, at acceptance `alpha`: [n]."""
    weights = alpha ** np.arange(num_stages)
    if alpha < 1:
        weights[-1] /= 1 - alpha  # the pipeline stays full until a rejection
        return weights / weights.sum()
    return np.eye(num_stages)[-1]


# ---------------------------------------------------------------------------------------------------------------------
# Counters and checkpoints


@dataclass
class Progress:
    """Counters of a run, all processes together. Those of the window start anew with each line of the log."""

    step: int = 0  # optimiser steps done, skipped ones included: the next step's number and data position
    supervised: int = 0  # positions with a supervised next token, seen so far
    validated: int = 0  # the step of the last validation
    skipped: int = 0  # steps dropped because loss or gradients were not finite
    skipped_in_row: int = 0
    seconds: float = 0.0  # in training steps, validation and checkpoints not counted
    window_loss: float = 0.0  # sum of KL * tau^2
    window_counted: float = 0.0  # positions in that sum, or the sum of their weights
    window_supervised: int = 0
    window_agreed: float = 0.0
    window_start: float = 0.0  # `seconds` when the window began

    def add(self, loss: float, counted: float, supervised: int, agreed: float) -> None:
        """One step that was applied."""
        self.supervised += supervised
        self.skipped_in_row = 0
        self.window_loss += loss
        self.window_counted += counted
        self.window_supervised += supervised
        self.window_agreed += agreed

    def close_window(self) -> dict[str, float | None]:
        """Mean loss per counted position, agreement, and tokens/s since the last call; None where nothing was seen."""
        seconds = self.seconds - self.window_start
        means = {
            "loss": self.window_loss / self.window_counted if self.window_counted else None,
            "agreement": self.window_agreed / self.window_supervised if self.window_supervised else None,
            "tokens_per_s": self.window_supervised / seconds if seconds else None,
        }
        self.window_loss, self.window_start = 0.0, self.seconds
        self.window_counted, self.window_supervised, self.window_agreed = 0.0, 0, 0.0
        return means


def save_checkpoint(folder: Path, step: int, head: DraftHead, state: Mapping[str, Any], keep: int, *more: Path) -> Path:
    """Write `checkpoint-{step}` whole or not at all, then drop all but the newest `keep` up to this step.

    Copies of the files `more` go into it, too.
    """
    final = folder / f"checkpoint-{step}"
    with TemporaryDirectory(dir=folder, prefix=".checkpoint-") as scratch:
        new = Path(scratch, "new")
        save_head(head, new / CHECKPOINT_NAME)
        with atomic_open(new / STATE_NAME, "wb") as file:
            torch.save(dict(state), file)
        for extra in more:
            shutil.copy(extra, new)
        if final.exists():  # half of one: without its state it could not be continued
            final.rename(Path(scratch, "old"))
        new.rename(final)
    line = [path for path in list_checkpoints(folder) if checkpoint_step(path) <= step]
    for old in line[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def is_complete(checkpoint: Path) -> bool:
    return (checkpoint / CHECKPOINT_NAME).is_file() and (checkpoint / STATE_NAME).is_file()


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(filter(is_complete, found), key=checkpoint_step)


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed run left behind while it was writing a checkpoint."""
    for scratch in folder.glob(".checkpoint-*"):
        shutil.rmtree(scratch, ignore_errors=True)


def find_checkpoint(resume_from: str | None, output_dir: Path) -> Path | None:
    """The checkpoint to continue from, or None to start anew.

    `auto` takes the newest complete one in `output_dir`, if any. ValueError for a path that is not a checkpoint, and
    for a run that would mix its files with another's: a new one in the folder of an older, one that goes back to an
    earlier checkpoint than the folder's newest, one that comes from another folder.
    """
    present, folder = list_checkpoints(output_dir), f"--output_dir {str(output_dir)!r}"
    if resume_from not in (None, "auto"):
        chosen = Path(resume_from)
        if not is_complete(chosen):
            raise ValueError(
                f"--resume_from {resume_from!r} is not a complete checkpoint: give a folder checkpoint-STEP that holds "
                f"{CHECKPOINT_NAME} and {STATE_NAME}, or auto"
            )
        if present and not present[-1].samefile(chosen):
            raise ValueError(
                f"{folder} goes on to {present[-1].name}, --resume_from is {resume_from!r}: go on with --resume_from "
                "auto, or name another --output_dir for a run that branches off there"
            )
        if present or not (output_dir / CHECKPOINT_NAME).exists():
            return chosen
    elif resume_from == "auto" and present:
        return present[-1]
    elif present:
        raise ValueError(
            f"{folder} holds {present[-1].name} of an earlier run: continue it with --resume_from auto, or choose "
            "another folder"
        )
    if (output_dir / CHECKPOINT_NAME).exists():
        raise ValueError(f"{folder} holds a finished head, {CHECKPOINT_NAME}: choose another folder")
    return None


def read_state(checkpoint: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The training state of a checkpoint. ValueError when it is damaged or is another run's: `identity` differs."""
    try:
        state = torch.load(checkpoint / STATE_NAME, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = first_line(error, most=120)
        raise ValueError(f"{str(checkpoint / STATE_NAME)!r} cannot be read ({reason}): resume from another") from None
    for name, ours in identity.items():
        theirs = state["identity"].get(name)
        if theirs == ours:
            continue
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):  # the head's configuration
            entry = next(key for key in [*ours, *theirs] if ours.get(key) != theirs.get(key))
            name, ours, theirs = f"{name}: {entry}", ours.get(entry), theirs.get(entry)
        differing = f"{shown(theirs)}, this one has {shown(ours)}"
        if shown(theirs) == shown(ours):  # long lists of the same length
            differing = f"{shown(theirs)}, this one has another"
        raise ValueError(
            f"{str(checkpoint)!r} belongs to a run with {name} {differing}: resume with the same settings and data"
        )
    return state


# ---------------------------------------------------------------------------------------------------------------------
# The log


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that a killed run left unfinished is ignored. No file: no lines."""
    data = path.read_bytes() if path.exists() else b""
    return [line for _, line in json_lines(data[: data.rfind(b"\n") + 1], repr(str(path)))]


def write_log(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with atomic_open(path) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def append_log(path: Path, line: Mapping[str, Any]) -> None:
    append_text(path, json.dumps(line, allow_nan=False) + "\n")


def plot_log(path: Path) -> Path:
    """Loss and agreement against supervised tokens, validation by pipeline depth and fill; `training_curve.png`."""
    lines = read_log(path)
    curves: dict[str, list[tuple[float, float, float]]] = {}  # name -> (tokens, loss, agreement)
    for line in lines:
        for entry in line.get("validation", [line | {"name": "training"}]):
            name = entry.get("name") or f"validation, n = {entry['num_stages']}, fill {entry['fill']}"
            if entry["loss"] is not None:
                curves.setdefault(name, []).append((line["supervised_tokens"], entry["loss"], entry["agreement"]))
    figure = Figure(figsize=(12, 4.5), layout="constrained")  # without pyplot there is no display to need
    axes = figure.subplots(1, 2, sharex=True)
    shades = iter(colormaps["viridis"](np.linspace(0.0, 0.9, len(curves))))
    for name, points in curves.items():
        tokens, *values = zip(*points, strict=True)
        style = {"color": "0.7", "zorder": 1} if name == "training" else {"color": next(shades), "marker": "o", "ms": 3}
        for axis, series in zip(axes, values, strict=True):
            axis.plot(np.array(tokens) / 1e6, series, label=name, lw=1.2, **style)
    for axis, title in zip(axes, ("loss (KL per position)", "top-1 agreement with the target"), strict=True):
        axis.set(xlabel="supervised tokens, millions", title=title)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(0, 1)
    if curves:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    target = path.with_name(CURVE_NAME)
    save_figure(figure, target)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Stopping


def started_by_nohup() -> bool:
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal is closed


class StopSignals:
    """SIGTERM, SIGHUP and Ctrl-C are noted, for the run to stop after its step; a second Ctrl-C stops at once.

    A launcher may pass Ctrl-C on as SIGTERM on top of the terminal's own: that one must not stop the saving.
    """

    def __init__(self):
        self.received: int | None = None  # the first signal

    def __enter__(self) -> StopSignals:
        wanted = [number for number in STOPPING if number != signal.SIGHUP or not started_by_nohup()]
        self._before = {number: signal.signal(number, self._note) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        if number == self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number
