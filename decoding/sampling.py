"""Sampling settings, and the verification of drafts: `verify` is one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, the same for the target, the drafter and the baseline. The defaults are neutral: greedy."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: it must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must lie in (0, 1]; 1 turns it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def same_draws(self, draft_top_k: int) -> bool:
        """Whether a pipeline of this width emits the very tokens of the target alone, given the same seed.

        A tree's verification draws from the target, once per token, as the target alone does. A sampled chain's is the
        ratio test, which uses up other random numbers: its tokens are distributed alike, no more.
        """
        return self.greedy or draft_top_k > 1

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is sampled from, [..., V] float32: temperature, then top-k, then top-p."""
        # A temperature that float32 cannot hold would divide by zero; the smallest one it can is as greedy.
        temperature = max(float(self.temperature), torch.finfo(torch.float32).tiny)
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        rows = logits.float().reshape(-1, logits.shape[-1])
        rows = rows - rows.amax(dim=-1, keepdim=True)  # keeps a tiny temperature from overflowing
        return warpers(None, rows).softmax(dim=-1).view(logits.shape)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> int:
        """One token from logits [V]."""
        return int(logits.argmax() if self.greedy else draw(self.probabilities(logits), generator))


NEUTRAL = Sampling()


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index, [], from a distribution [V]; it stays on the device."""
    return torch.multinomial(probabilities, 1, generator=generator)[0]


class Verdict(NamedTuple):
    """What the target says of one position."""

    token: int  # the token that stands there
    accepted: int | None  # index of the candidate that has it; None: the target's own correction


def acceptance_probability(p: float, q: float) -> float:
    """Probability that a draft is kept which the target draws with probability p, the drafter with q: min(1, p/q)."""
    return min(1.0, p / max(q, torch.finfo(torch.float32).tiny))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Distribution of the correction after a rejection: max(0, p - q), renormalised, [V].

    Where p = q nothing is ever rejected but by rounding; p itself is then the exact answer.
    """
    excess = (p - q).clamp_(min=0)
    total = excess.sum()
    return torch.where(total > 0, excess / total, p)  # chosen on the device: the host need not know


def verify(
    logits: Tensor,
    candidates: Sequence[int],
    q: Tensor | None,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Decide one position, losslessly: the token is distributed exactly as the target alone would have it.

    logits [V] are the target's. With q [V] there is one candidate, which was SAMPLED from q: speculative sampling's
    ratio test (arXiv 2211.17192). Without q the candidates were chosen deterministically (greedy, or tree nodes, at
    most one per token): draw from the target, and see which candidate agrees. The ratio test would be wrong there.
    """
    if q is None or not candidates:
        token = sampling.draw(logits, generator)
        return Verdict(token, candidates.index(token) if token in candidates else None)
    p, token = sampling.probabilities(logits), candidates[0]
    uniform = torch.rand((), generator=generator, device=logits.device)
    uniform, *kept = torch.stack([uniform, p[token], q[token]]).tolist()  # to the host in one copy
    if uniform < acceptance_probability(*kept):
        return Verdict(token, 0)
    return Verdict(int(draw(residual(p, q), generator)), None)
