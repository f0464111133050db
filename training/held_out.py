"""What decoding would verify and accept of the held-out answers, and when training has brought its best.

`HeldOutTraces` counts a validation's answers. `EarlyStopping` follows their acceptance from validation to validation,
and keeps the head that had the highest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline_model import SpeculationHead, save_head
from training.head_loss import DraftLoss
from training.replay import TraceCounts

BEST_NAME = "speculation_head_best.pt"


class HeldOutTraces:
    """What decoding would verify and accept of the held-out answers, for each n and temperature of the texts."""

    def __init__(self, splits: Mapping[int, tuple[int, ...]]):
        self._splits = splits
        self._counts: dict[tuple[int, float], TraceCounts] = {}  # of this process

    def add(self, loss: DraftLoss, teacher: dict[str, Tensor], number: int) -> None:
        """Count a batch's answers; nothing for heads that have no replay."""
        for n, stage_sizes in self._splits.items():
            for temperature, counts in loss.held_out(teacher, stage_sizes, number).items():
                _add(self._counts, (n, temperature), counts)

    def figures(self, gather: Callable[[list], list]) -> list[dict[str, Any]]:
        """For the log: alpha, alpha by fill and temperature, L_acc of each n. Empty without events.

        gather: makes one list of those of all processes.
        """
        total: dict[tuple[int, float], TraceCounts] = {}
        for key, counts in gather(list(self._counts.items())):
            _add(total, key, counts)
        traces = []
        for n in self._splits:
            parts = {temperature: total[key] for key in sorted(total) for temperature in key[1:] if key[0] == n}
            if parts:
                counts = reduce(add, parts.values())
                names = ("verified", "alpha", "alpha_by_fill", "accept_length")
                by_temperature = {f"{temperature:g}": part.alpha for temperature, part in parts.items()}
                figures = {name: getattr(counts, name) for name in names}
                traces.append({"num_stages": n} | figures | {"alpha_by_temperature": by_temperature})
        return traces


def _add(counts: dict[tuple[int, float], TraceCounts], key: tuple[int, float], more: TraceCounts) -> None:
    counts[key] = counts[key] + more if key in counts else more


def in_words(traces: Sequence[Mapping[str, Any]]) -> str:
    """The acceptance of `HeldOutTraces.figures`, for the user."""
    parts = []
    for trace in traces:
        by_temperature = trace["alpha_by_temperature"].items()
        parts.append(f"{trace['alpha']:.4f} at n = {trace['num_stages']}")
        if len(by_temperature) > 1:
            parts[-1] += f" ({', '.join(f'{alpha:.4f} at T = {temperature}' for temperature, alpha in by_temperature)})"
    return f"held-out drafts accepted: {', '.join(parts)}"


@dataclass
class EarlyStopping:
    """Ends a run whose held-out acceptance has not risen for `patience` validations (method.md section 11.5).

    All processes hold the same numbers, so they agree without a word. The best head is a file in the run's folder, and
    in each of its checkpoints as it was then.
    """

    patience: int
    alpha: float = -1.0  # accepted / verified drafts of the held-out answers, all n together: the highest so far
    step: int = -1  # when
    since: int = 0  # validations after that
    validation: Sequence[Mapping[str, Any]] = ()  # its other figures

    @property
    def is_over(self) -> bool:
        return self.since >= self.patience

    def judge(self, step: int, traces: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]) -> bool:
        """Take a validation in; whether it is the best so far. ValueError where there was nothing to accept."""
        verified = sum(trace["verified"] for trace in traces)
        if not verified:
            raise ValueError("--stop_on trace_alpha: the held-out examples have no answer of two tokens or more")
        alpha = sum(trace["alpha"] * trace["verified"] for trace in traces) / verified
        if alpha <= self.alpha:
            self.since += 1
            return False
        self.alpha, self.step, self.since, self.validation = alpha, step, 0, validation
        return True

    def state(self) -> dict[str, Any]:
        """What a continued run needs, besides the file."""
        return {name: value for name, value in asdict(self).items() if name != "patience"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


def keep_best(head: SpeculationHead, folder: Path) -> None:
    """Write the head as the best one of a run."""
    save_head(head, folder / BEST_NAME)


def copy_best(source: Path, folder: Path) -> None:
    """The best head of one folder as that of another, which has none where the first has none."""
    if (source / BEST_NAME).exists():
        shutil.copyfile(source / BEST_NAME, folder / BEST_NAME)
    else:
        (folder / BEST_NAME).unlink(missing_ok=True)
