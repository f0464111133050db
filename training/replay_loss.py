"""The training forward of `--rows replay`: every answer token's draft, at the fill its own decoding gives it.

Per micro-batch: the flags of its texts from the head as it is (no gradient), then one packed pass with gradient. The
head's running acceptance, with which the flags of a new text begin, is the only state; it is part of a checkpoint.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from decoding.sampling import Sampling
from pipeline_model import SpeculationHead, Target
from training.flushed import Rejections, branch_loss, draft_tokens, follow
from training.loss import KL, LossTerms, TrainingLoss, distillation_loss
from training.replay import Trace, TraceCounts, bernoulli_flags, packed_rows, replay_flags, run_values

ROWS = ("staircase", "replay")
TRACES = ("replay", "bernoulli", "full")
REPLAY_FLAGS = ("trace", "trace_temperature", "reject_weight", "value_weight", "flushed")
FIRST_ALPHA = 0.5  # acceptance before anything was seen
ALPHA_MEMORY = 0.95  # share of the running counts that stays from step to step
MOST_ALPHA = 0.99  # of an acceptance whose runs are to have a finite length


@dataclass(frozen=True)
class ReplaySettings:
    """How the flags of a text come about, and what its events weigh (method.md sections 11.2 and 11.4)."""

    trace: str = "replay"  # "replay": of the head as it is; "bernoulli": drawn; "full": a full pipeline
    repeats: int = 1  # of the replay; after k the first k events of an answer are exact
    sampling: Sampling = field(default_factory=Sampling)  # the decoding that is replayed; a text's own temperature wins
    reject_weight: float = 1.0  # of events whose draft was rejected
    value_weight: bool = False  # weigh events by what their acceptance adds to a run
    flushed: int = 0  # rejected drafts of each text whose flushed drafts are learned, too
    seed: int = 0

    @classmethod
    def of(cls, args: argparse.Namespace) -> ReplaySettings:
        """What the flags of a trainer say; a method may lack some."""
        return cls(
            trace=args.trace or "replay",
            sampling=Sampling(args.trace_temperature or 0.0),
            reject_weight=args.reject_weight or 1.0,
            value_weight=bool(args.value_weight),
            flushed=getattr(args, "flushed", None) or 0,
            seed=args.seed,
        )


def check_replay_flags(args: argparse.Namespace) -> None:
    """ValueError for flags of a replay without one."""
    given = [name for name in REPLAY_FLAGS if getattr(args, name, None) is not None]
    if args.rows != "replay" and given:
        raise ValueError(f"--{given[0]} belongs to --rows replay: add it, or leave --{given[0]} out")


class RunningCounts:
    """Verified and accepted drafts by fill, of the last steps above all, for each number of stages n."""

    def __init__(self):
        self._sums: dict[int, np.ndarray] = {}  # n -> [2, n]

    def add(self, counts: np.ndarray) -> None:
        """counts [2, n] of one step."""
        n = counts.shape[1]
        self._sums[n] = ALPHA_MEMORY * self._sums.get(n, np.zeros((2, n))) + counts

    def alpha(self) -> float:
        """Accepted / verified, all n together."""
        verified, accepted = np.sum([sums.sum(axis=1) for sums in self._sums.values()] or [np.zeros(2)], axis=0)
        return float(accepted / verified) if verified else FIRST_ALPHA

    def alpha_by_fill(self, num_stages: int) -> np.ndarray:
        """[n]; where a fill was hardly seen, the pooled one."""
        verified, accepted = self._sums.get(num_stages, np.zeros((2, num_stages)))
        return np.minimum(MOST_ALPHA, (accepted + self.alpha()) / (verified + 1))

    def state(self) -> dict[int, list[list[float]]]:
        return {n: sums.tolist() for n, sums in self._sums.items()}

    def load(self, state: Mapping[int, list[list[float]]]) -> None:
        self._sums = {n: np.array(sums) for n, sums in state.items()}


class Replay:
    """Flags, packed pass and loss of micro-batches. `running` holds what the last steps accepted."""

    def __init__(self, head: SpeculationHead, target: Target, settings: ReplaySettings, terms: LossTerms = KL):
        self.head, self.target, self.settings, self.terms = head, target, settings, terms
        self.running = RunningCounts()

    def outputs(self, teacher: Mapping[str, Tensor], stage_sizes: Sequence[int], trace: Trace) -> Tensor:
        """The head's rows at every event, [E, H]; teacher as `training_loss` takes it."""
        features, lengths = teacher["features"], teacher["attention_mask"].sum(dim=1).cpu().numpy()
        rope = self.target.rope(features.shape[1], device=features.device)
        return packed_rows(self.head, features, lengths, rope, stage_sizes, trace)

    def renewed(
        self,
        teacher: Mapping[str, Tensor],
        stage_sizes: Sequence[int],
        random: np.random.Generator,
        repeats: int | None = None,
    ) -> tuple[Trace, int]:
        """The trace of a batch, and how many events' fill the last repeat changed (0 without repeats)."""
        settings = self.settings
        trace = Trace.of(teacher["labels"].cpu().numpy(), len(stage_sizes))
        if settings.trace == "full":
            return trace.full(), 0
        trace = trace.with_flags(bernoulli_flags(trace, self.running.alpha(), random))
        if settings.trace == "bernoulli" or not trace.num_events:
            return trace, 0
        changed = 0
        for _ in range(settings.repeats if repeats is None else repeats):
            trace, changed = self._repeated(teacher, stage_sizes, trace)
        return trace, changed

    def exact(self, teacher: Mapping[str, Tensor], stage_sizes: Sequence[int]) -> Trace:
        """The trace of decoding itself, without a guess to begin with: repeated until no fill changes any more."""
        trace, changed = Trace.of(teacher["labels"].cpu().numpy(), len(stage_sizes)), True
        while changed:
            trace, changed = self._repeated(teacher, stage_sizes, trace)
        return trace

    @torch.no_grad()
    def _repeated(self, teacher: Mapping[str, Tensor], stage_sizes: Sequence[int], trace: Trace) -> tuple[Trace, int]:
        """The trace whose flags the head has at the fills of this one, and how many events' fill that changes."""
        renewed = trace.with_flags(self._flags(teacher, trace, self.outputs(teacher, stage_sizes, trace)))
        return renewed, int((renewed.fills != trace.fills).sum())

    def temperatures(self, teacher: Mapping[str, Tensor], trace: Trace) -> np.ndarray:
        """At which each event's text was written, [E]; that of the settings where it is not known."""
        texts, default = teacher.get("temperatures"), self.settings.sampling.temperature
        if texts is None:
            return np.full(trace.num_events, default)
        texts = texts.cpu().numpy()
        return np.where(np.isnan(texts), default, texts)[trace.sequences]

    def _flags(self, teacher: Mapping[str, Tensor], trace: Trace, outputs: Tensor) -> np.ndarray:
        """Whether each event's draft is accepted, [E] bool, from the head's rows there, [E, H]."""
        labels, at = teacher["labels"], _places(trace, outputs.device)
        tokens, hidden = labels[at[0], at[1] + 1], teacher["hidden"][at]
        uniforms = text_uniforms(labels.cpu().numpy(), trace, self.settings.seed)
        uniforms = torch.from_numpy(uniforms).to(outputs.device)
        temperatures, flags = self.temperatures(teacher, trace), np.zeros(trace.num_events, dtype=bool)
        for temperature in np.unique(temperatures):
            mine = torch.from_numpy(temperatures == temperature).to(outputs.device)
            rows = outputs[mine], hidden[mine], tokens[mine]
            sampling = replace(self.settings.sampling, temperature=float(temperature))
            flags[temperatures == temperature] = replay_flags(self.head, self.target, *rows, sampling, uniforms[mine])
        return flags

    def loss(
        self,
        teacher: Mapping[str, Tensor],
        stage_sizes: Sequence[int],
        trace: Trace,
        random: np.random.Generator | None = None,
    ) -> tuple[TrainingLoss, TraceCounts]:
        """The loss of a trace's events, and what decoding verifies and accepts of them.

        With `random`, from which flushed drafts are drawn, also the loss of those, if the settings want it; teacher
        then has the `input_ids` [B, S], too.
        """
        at = _places(trace, teacher["labels"].device)
        best = teacher.get("teacher_best")
        best = None if best is None else best[at]
        outputs = self.outputs(teacher, stage_sizes, trace)
        loss = distillation_loss(
            self.head, self.target, outputs, teacher["hidden"][at], best, self.terms, self._weights(trace, at[0].device)
        )
        if random is not None and self.settings.flushed and len(stage_sizes) > 1:
            more = self._flushed(teacher, stage_sizes, trace, outputs.detach(), random)
            if more is not None:
                loss = loss._replace(total=loss.total + more.total, counted=loss.counted + more.counted)
        return loss, trace.counts()

    def _flushed(
        self,
        teacher: Mapping[str, Tensor],
        stage_sizes: Sequence[int],
        trace: Trace,
        outputs: Tensor,
        random: np.random.Generator,
    ) -> TrainingLoss | None:
        """The loss of drafts after some rejected ones; None where nothing was rejected. outputs [E, H] of the head."""
        head, target, labels = self.head, self.target, teacher["labels"]
        temperatures = self.temperatures(teacher, trace)
        rejections, events = Rejections.drawn(trace, temperatures, self.settings.flushed, random)
        sequences, positions = (index[events] for index in _places(trace, labels.device))
        hidden = teacher["hidden"][sequences, positions]
        drafted = draft_tokens(head, target, outputs[events], rejections.temperatures, random, hidden)
        wrong = drafted != labels[sequences, positions + 1]  # the flags may be of another fill
        rejections, drafted = rejections.only(wrong.cpu().numpy()), drafted[wrong]
        if not len(drafted):
            return None
        branches = follow(head, target, teacher, stage_sizes, rejections, drafted, random)
        return branch_loss(head, target, branches, stage_sizes, self.terms.temperature)

    def _weights(self, trace: Trace, device: torch.device) -> Tensor | None:
        """Weight of each event, [E]; None for ones."""
        settings = self.settings
        weights = np.ones(trace.num_events, dtype=np.float32)
        if settings.reject_weight != 1:
            weights[~trace.accepted] *= settings.reject_weight
        if settings.value_weight:
            rest = run_values(self.running.alpha_by_fill(trace.num_stages)).rest
            worth = rest[np.minimum(trace.fills, trace.num_stages - 1)]  # R of the fill after an acceptance
            weights *= worth / worth.mean() if len(worth) else 1
        return None if (weights == 1).all() else torch.from_numpy(weights).to(device)


def text_uniforms(labels: np.ndarray, trace: Trace, seed: int) -> np.ndarray:
    """Draws that decide whether sampled drafts are accepted, one per event: [E], uniform in [0, 1).

    They follow from seed, text (of labels [B, S]) and position alone: a draft that has become likelier is accepted
    wherever it was before.
    """
    draws = np.empty(trace.num_events)
    for sequence in np.unique(trace.sequences):
        mine, text = trace.sequences == sequence, labels[sequence]
        text = text[: np.flatnonzero(text >= 0)[-1] + 1]  # without padding
        random = np.random.default_rng((seed, 4, zlib.crc32(text.astype(np.int64).tobytes())))
        draws[mine] = random.random(len(text))[trace.positions[mine]]
    return draws


def _places(trace: Trace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row of the batch and position of each event, as an index."""
    return torch.from_numpy(trace.sequences).to(device), torch.from_numpy(trace.positions).to(device)
