"""The training forward as a module: what a step's micro-batches compute, and what a trainer asks of it besides.

DraftLoss        what every drafter's training has: a baseline's is a subclass
HeadLoss         method.md section 4: the staircase, one pipeline depth and fill per micro-batch
ReplayLoss       method.md section 11: every draft that decoding verifies, each at its own fill
HeadReplayLoss   the same for speculation heads
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline_model import DraftHead, SpeculationHead, Target
from training.forward import training_loss
from training.loss import KL, TrainingLoss
from training.replay import TraceCounts
from training.replay_loss import Replay, ReplaySettings

HELD_OUT_REPEATS = 4  # of the replay of held-out answers: the first tokens are exact, the fills of the rest close
Shape = tuple[tuple[int, ...], int]  # stage sizes and fill of a micro-batch
Reduce = Callable[[Tensor], Tensor]  # the sum over all processes


class DraftLoss(nn.Module):
    """What a trainer needs to know of a drafter besides its weights: the loss of a batch, and some more, with defaults.

    A module, for DistributedDataParallel to wrap; its parameters are the drafter's alone. A method overrides
    `of_batch`.
    """

    has_fill = True  # whether a batch has one fill; False: every draft has its own

    def __init__(self, head: DraftHead, target: Target, **settings: Any):
        super().__init__()
        self.head = head
        self.target = target  # no nn.Module: not registered
        self.settings = settings  # the method's own

    def forward(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int = 0
    ) -> TrainingLoss:
        """teacher as `training_loss` takes it; `micro_batch` numbers it from the start of the run, for draws."""
        return self.touching_all(self.of_batch(teacher, stage_sizes, fill, micro_batch))

    def of_batch(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int
    ) -> TrainingLoss:
        """The sums of a batch, as `forward`: the teacher's features, hidden states, labels and attention mask."""
        raise NotImplementedError

    def texts(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, micro_batch: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What to train on in the place of a micro-batch's examples: likewise, right-padded [B, S] each."""
        return input_ids, labels, attention_mask

    def touching_all(self, loss: TrainingLoss) -> TrainingLoss:
        """The loss with a gradient, if zero, for every weight that learns.

        Processes have to agree on which gradients there are, and optimisers on which weights take part in a step.
        """
        touched = sum(weight.flatten()[0] for weight in self.head.parameters() if weight.requires_grad)
        return loss._replace(total=loss.total + 0.0 * touched)

    def end_step(self, shapes: Iterable[Shape], reduce: Reduce) -> Sequence[nn.Parameter]:
        """The weights that had no part in the step that ends, which had micro-batches of these shapes."""
        return ()

    @property
    def identity(self) -> dict[str, object]:
        """What else than the trainer's own flags has to be the same in a continued run."""
        return {}

    def figures(self) -> dict[str, Any]:
        """What the log says of the steps since the last call, besides the trainer's own figures."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a continued run needs of this module, besides the weights."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""

    def held_out_replay(self) -> Replay | None:
        """What replays the decoding of held-out texts with the drafter as it is; None where that cannot be done."""
        return None

    @property
    def has_traces(self) -> bool:
        """Whether decoding with this drafter can be replayed."""
        return self.held_out_replay() is not None

    def simulated_lengths(self, teacher: dict[str, Tensor]) -> Tensor:
        """Tokens that rounds of block drafts would emit on held-out texts, and the number of rounds: [2]."""
        return torch.zeros(2, device=self.target.device)

    def held_out(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], number: int
    ) -> dict[float, TraceCounts]:
        """What decoding would verify and accept of held-out texts, by temperature; empty where no replay says that.

        `number` of the batch seeds the draws that its replay begins with.
        """
        replay = self.held_out_replay()
        if replay is None:
            return {}
        trace, _ = replay.renewed(teacher, stage_sizes, np.random.default_rng((0, 5, number)), HELD_OUT_REPEATS)
        temperatures = replay.temperatures(teacher, trace)
        return {float(each): trace.only(temperatures == each).counts() for each in np.unique(temperatures)}


class HeadLoss(DraftLoss):
    """The staircase's loss of a speculation head; settings are those of `training_loss`."""

    head: SpeculationHead

    def of_batch(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int
    ) -> TrainingLoss:
        texts = {name: value for name, value in teacher.items() if name not in ("temperatures", "input_ids")}
        return training_loss(self.head, self.target, **texts, stage_sizes=stage_sizes, fill=fill, **self.settings)

    @property
    def identity(self) -> dict[str, object]:
        terms = self.settings.get("terms", KL)
        return {"--rows": "staircase", "--loss": terms.kind, "--loss_eta": terms.eta}

    def end_step(self, shapes: Iterable[Shape], reduce: Reduce) -> Sequence[nn.Parameter]:
        used: set[int] = set()
        for stage_sizes, fill in set(shapes):
            exact = self.settings.get("exact_fill", False)
            used |= self.head.staircase_plan(stage_sizes, fill, exact_fill=exact).keys()
        return unused_projections(self.head, used)

    def held_out_replay(self) -> Replay | None:
        trained = self.head.config.trained_with_use_deepest
        return Replay(self.head, self.target, ReplaySettings()) if trained else None


def unused_projections(head: SpeculationHead, types: set[int]) -> Sequence[nn.Parameter]:
    """Those of all other types: a short fill or a small n leaves types without rows."""
    others = (modules for kind, modules in enumerate(head.projections) if kind not in types)
    return [projection.weight for modules in others for projection in modules]


class ReplayLoss(DraftLoss):
    """The loss of every event of the micro-batch's texts, of the trace that the settings of a `Replay` make."""

    has_fill = False

    def __init__(self, replay: Replay):
        super().__init__(replay.head, replay.target)
        self.replay = replay
        self._step: dict[int, np.ndarray] = {}  # n -> [3, n]: verified and accepted by fill, events whose fill changed
        self._window: dict[int, np.ndarray] = {}  # the same since the last line of the log

    def of_batch(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int
    ) -> TrainingLoss:
        random = np.random.default_rng((self.replay.settings.seed, 3, micro_batch))
        trace, changed = self.replay.renewed(teacher, stage_sizes, random)
        loss, counts = self.replay.loss(teacher, stage_sizes, trace, random if self.training else None)
        if self.training:
            n, moved = len(stage_sizes), np.zeros(len(stage_sizes))
            moved[0] = changed
            counted = np.stack([counts.verified_by_fill, counts.accepted_by_fill, moved]).astype(float)
            self._step[n] = self._step.get(n, 0.0) + counted
        return loss

    @property
    def identity(self) -> dict[str, object]:
        settings, terms = self.replay.settings, self.replay.terms
        return {
            "--rows": "replay",
            "--loss": terms.kind,
            "--loss_eta": terms.eta,
            "--trace": settings.trace,
            "--trace_temperature": settings.sampling.temperature,
            "--reject_weight": settings.reject_weight,
            "--value_weight": settings.value_weight,
            "--flushed": settings.flushed or None,
        }

    def end_step(self, shapes: Iterable[Shape], reduce: Reduce) -> Sequence[nn.Parameter]:
        """Adds up what all processes verified and accepted, too."""
        verified = {}
        for stage_sizes in sorted({sizes for sizes, _ in shapes}):
            n = len(stage_sizes)
            mine = torch.from_numpy(np.asarray(self._step.pop(n, np.zeros((3, n)))))
            counts = reduce(mine.to(self.target.device)).cpu().numpy()
            self.replay.running.add(counts[:2])
            self._window[n] = self._window.get(n, 0.0) + counts
            verified[stage_sizes] = counts[0]
        return self.resting(verified)

    def resting(self, verified: Mapping[tuple[int, ...], np.ndarray]) -> Sequence[nn.Parameter]:
        """The weights that had no part in a step, from the events by fill, [n], of each split."""
        return ()

    def figures(self) -> dict[str, Any]:
        """Acceptance of the traces, pooled and by fill, and the share of events whose fill the last repeat changed."""
        figures = {}
        for n, (verified, accepted, changed) in sorted(self._window.items()):
            if events := verified.sum():
                counts = TraceCounts(verified, accepted, runs=0)  # runs are not summed up here, nor asked for
                figures[f"trace_n{n}"] = {
                    "alpha": counts.alpha,
                    "alpha_by_fill": counts.alpha_by_fill,
                    "mean_fill": float(verified @ np.arange(1, n + 1) / events),
                    "fills_changed": changed.sum() / events,
                }
        self._window = {}
        return figures

    def state(self) -> dict[str, Any]:
        return {"running": self.replay.running.state(), "window": {n: v.tolist() for n, v in self._window.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.replay.running.load(state["running"])
        self._window = {n: np.array(v) for n, v in state["window"].items()}

    def held_out_replay(self) -> Replay:
        replay = type(self.replay)(self.head, self.target, ReplaySettings(sampling=self.replay.settings.sampling))
        replay.running = self.replay.running
        return replay


class HeadReplayLoss(ReplayLoss):
    """`ReplayLoss` of a speculation head, whose projections rest where no event has a row of their type."""

    head: SpeculationHead

    def resting(self, verified: Mapping[tuple[int, ...], np.ndarray]) -> Sequence[nn.Parameter]:
        used: set[int] = set()
        for stage_sizes, by_fill in verified.items():
            n, seen, types = len(stage_sizes), np.flatnonzero(by_fill), self.head.depth_types(stage_sizes)
            if len(seen):
                deepest = n if self.replay.settings.flushed and n > 1 else seen[-1] + 1
                used |= {types[-1], *types[:deepest]}
        return unused_projections(self.head, used)
