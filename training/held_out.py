"""What decoding would verify and accept of the held-out answers, and when training has brought its best.

`HeldOutTraces` counts a validation's answers. `EarlyStopping` follows their acceptance from validation to validation,
and keeps the head that had the highest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline_model import SpeculationHead, save_head
from training.head_loss import HeadLoss
from training.replay import TraceCounts

BEST_NAME = "speculation_head_best.pt"


class HeldOutTraces:
    """What decoding would verify and accept of the held-out answers, for each n."""

    def __init__(self, splits: Mapping[int, tuple[int, ...]], device: torch.device):
        self._splits = splits
        self._sums = {n: torch.zeros(2 * n + 1, dtype=torch.float64, device=device) for n in splits}

    def add(self, loss: HeadLoss, teacher: dict[str, Tensor], number: int) -> None:
        """Count a batch's answers; nothing for heads that have no replay."""
        for n, stage_sizes in self._splits.items():
            counts = loss.held_out(teacher, stage_sizes, number)
            if counts is not None:
                values = [*counts.verified_by_fill, *counts.accepted_by_fill, counts.runs]
                self._sums[n] += self._sums[n].new_tensor(values)

    def figures(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, list[dict[str, Any]]]:
        """`traces`, for the log: alpha, alpha by fill, L_acc of each n. Empty without events."""
        traces = []
        for n, sums in self._sums.items():
            values = reduce(sums).cpu().numpy()
            counts = TraceCounts(values[:n], values[n : 2 * n], int(values[-1]))
            if counts.verified:
                names = ("verified", "alpha", "alpha_by_fill", "accept_length")
                traces.append({"num_stages": n} | {name: getattr(counts, name) for name in names})
        return {"traces": traces} if traces else {}


@dataclass
class EarlyStopping:
    """Ends a run whose held-out acceptance has not risen for `patience` validations (METHOD section 11.5).

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
