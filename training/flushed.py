"""Drafts that decoding throws away: those after a rejected one (method.md section 11.4, `flushed`).

That a draft is wrong is known n cycles after it was made. Meanwhile the pipeline has drafted n - 1 times more, each
time from the branch that began with it:

    text        1   2   3   4   5         the draft of 4 was a, and n = 3
    branch                  a   b   c     from 1 2 3 a the head drafted b, from 1 2 3 a b it drafted c: both flushed

Nobody verifies b and c, so they have no part in the acceptance. To train on them as well is the other half of Draft-OPD
(arXiv 2605.29343), here for whoever wants to see what it does: reverse KL, 0.8^(j-1) for the j-th draft of a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from decoding.sampling import Sampling
from pipeline_model import SpeculationHead, Target
from training.batch_generation import Batch, draw_rows
from training.loss import LossTerms, TrainingLoss, distillation_loss, first_best
from training.replay import Trace, packed_rows

BRANCH_DECAY = 0.8  # of the weights of a branch's drafts, from one to the next


@dataclass(frozen=True)
class Rejections:
    """Some rejected drafts of a batch, K in all."""

    sequences: np.ndarray  # [K] row of the batch
    positions: np.ndarray  # [K] of the newest token when they were made
    fills: np.ndarray  # [K] tokens in flight then
    temperatures: np.ndarray  # [K] of their texts
    shares: np.ndarray  # [K] rejected drafts of its text that each stands for

    @classmethod
    def drawn(
        cls, trace: Trace, temperatures: np.ndarray, most: int, random: np.random.Generator
    ) -> tuple[Rejections, np.ndarray]:
        """At most so many of each text, and which events of the trace they are, [K]; temperatures [E]."""
        events, shares = [np.zeros(0, dtype=int)], [np.zeros(0)]
        for sequence in np.unique(trace.sequences):
            rejected = np.flatnonzero((trace.sequences == sequence) & ~trace.accepted)
            chosen = np.sort(random.permutation(rejected)[:most])
            events.append(chosen)
            shares.append(np.full(len(chosen), len(rejected) / max(1, len(chosen))))
        events = np.concatenate(events)
        columns = trace.sequences, trace.positions, trace.fills, temperatures
        return cls(*(column[events] for column in columns), np.concatenate(shares)), events

    def only(self, chosen: np.ndarray) -> Rejections:
        """Some of them, chosen [K] bool."""
        return Rejections(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def branch_events(self, steps: Sequence[int], num_stages: int) -> Trace:
        """Drafts of each branch as events of a batch of K texts; the first draft after a rejected one is step 1."""
        steps, count = np.array(steps), len(self.positions)
        fills = np.minimum(num_stages, self.fills[:, None] + steps)
        rejected = np.zeros(fills.size, dtype=bool)
        sequences = np.repeat(np.arange(count), len(steps))
        positions = (self.positions[:, None] + steps).ravel()
        return Trace(sequences, positions, rejected, fills.ravel(), rejected, num_stages)


@dataclass(frozen=True)
class Branches:
    """The texts up to K rejected drafts, then what the head drafted: n - 1 tokens, each with a draft after it."""

    features: Tensor  # [K, S, m, H]
    lengths: np.ndarray  # [K]
    drafts: Trace  # the flushed ones, K (n - 1) events
    hidden: Tensor  # [events, H] the target's h_L there: what should have been drafted
    weights: Tensor  # [events]


@torch.no_grad()
def follow(
    head: SpeculationHead,
    target: Target,
    teacher: Mapping[str, Tensor],
    stage_sizes: Sequence[int],
    rejections: Rejections,
    drafted: Tensor,
    random: np.random.Generator,
) -> Branches:
    """What decoding does after rejected drafts, whose tokens are `drafted` [K].

    teacher as `training_loss` takes it, with `input_ids` [B, S].
    """
    count, num_stages, device = len(rejections.positions), len(stage_sizes), drafted.device
    begins, steps = rejections.positions + 1, range(1, num_stages)
    places = zip(rejections.sequences, begins, strict=True)
    prompts = [teacher["input_ids"][row, :stop].tolist() for row, stop in places]
    batch = Batch(target, prompts, num_stages - 1, head.config.anchors)
    batch.prefill()
    known = teacher["features"]
    features = known.new_zeros(count, int(begins.max()) + num_stages - 1, *known.shape[2:])
    for row, (sequence, stop) in enumerate(zip(rejections.sequences, begins, strict=True)):
        features[row, :stop] = known[sequence, :stop]
    rope = target.rope(features.shape[1], device=features.device)
    rows, hidden = torch.arange(count, device=device), []
    first = torch.from_numpy(begins).to(device)
    for step in steps:
        hidden.append(batch.run(drafted))
        features[rows, first + step - 1] = batch.states[:, -1]
        if step == num_stages - 1:
            break
        drafts = rejections.branch_events([step], num_stages)
        outputs = packed_rows(head, features, begins + step, rope, stage_sizes, drafts)
        drafted = draft_tokens(head, target, outputs, rejections.temperatures, random)
    weights = rejections.shares[:, None] * BRANCH_DECAY ** np.arange(num_stages - 1)
    return Branches(
        features,
        begins + num_stages - 1,
        rejections.branch_events(steps, num_stages),
        torch.stack(hidden, dim=1).flatten(0, 1),
        torch.from_numpy(weights.ravel().astype(np.float32)).to(device),
    )


def branch_loss(
    head: SpeculationHead, target: Target, branches: Branches, stage_sizes: Sequence[int], temperature: float
) -> TrainingLoss:
    """Reverse KL of the flushed drafts; the mean is by the sum of their weights."""
    rope = target.rope(branches.features.shape[1], device=branches.features.device)
    outputs = packed_rows(head, branches.features, branches.lengths, rope, stage_sizes, branches.drafts)
    terms = LossTerms("reverse_kl", temperature)
    return distillation_loss(head, target, outputs, branches.hidden, None, terms, branches.weights)


@torch.no_grad()
def draft_tokens(
    head: SpeculationHead,
    target: Target,
    outputs: Tensor,
    temperatures: np.ndarray,
    random: np.random.Generator,
    hidden: Tensor | None = None,
) -> Tensor:
    """What is drafted at some events, as target ids [K], from the head's rows there, [K, H], each at its temperature.

    hidden [K, H], the target's h_L: the drafts are those that were rejected, which happens to a token with probability
    max(0, q - p).
    """
    draft_ids, tokens = head.draft_token_ids, torch.zeros(len(outputs), dtype=torch.long, device=outputs.device)
    draws = torch.from_numpy(random.random(len(outputs))).to(outputs.device)
    for temperature in np.unique(temperatures):
        mine, sampling = torch.from_numpy(temperatures == temperature).to(outputs.device), Sampling(float(temperature))
        logits = head.lm_head(target.norm(outputs[mine]))
        if sampling.greedy:
            best = first_best(logits)
        else:
            q = sampling.probabilities(logits)
            if hidden is not None:
                p = sampling.probabilities(target.logits(hidden[mine]))
                excess = (q - (p if draft_ids is None else p[:, draft_ids])).clamp_(min=0)
                q = torch.where(excess.sum(dim=-1, keepdim=True) > 0, excess, q)
            best = draw_rows(q, draws[mine])
        tokens[mine] = best if draft_ids is None else draft_ids[best]
    return tokens
