"""What a generation gives: its tokens as they come, and its counts and metrics at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decoding.metrics import accept_length, alpha, cycles_a_step, spd_costs, theoretical_speedup
from timeline import Timings


class TokenEvent(NamedTuple):
    """One emitted token, as it streams out."""

    token: int
    position: int
    accepted: bool  # an accepted draft; False: the target's correction. True for the prefill's token
    cycle: int  # cycles finished when it was emitted; 0: by the prefill

    @property
    def style(self) -> str:
        """How `paint` shows it."""
        return "draft" if self.accepted else "correction"


@dataclass
class GenerationResult:
    """What one generation did. The metrics are method.md section 7's."""

    stage_sizes: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)  # new tokens, the prefill's included
    accepted: list[bool] = field(default_factory=list)  # a flag a token; True for the prefill's
    cycles: int = 0
    verified_by_fill: list[int] = field(default_factory=list)  # index F - 1: drafts made with F tokens in flight
    accepted_by_fill: list[int] = field(default_factory=list)
    stop_reason: str = ""  # "eos", "length" or "stopped"
    timings: Timings = field(default_factory=Timings)
    prefill_tokens: int = 1  # tokens that the prefill gave: one, but where it verifies drafts already
    kept_tokens: int = 0  # of the prompt: they were in memory, and the prefill did not run them

    @property
    def new_tokens(self) -> int:
        """Tokens that the cycles produced: the prefill's are not counted."""
        return len(self.tokens) - self.prefill_tokens

    @property
    def n_verified(self) -> int:
        return sum(self.verified_by_fill)

    @property
    def n_accepted(self) -> int:
        return sum(self.accepted_by_fill)

    @property
    def alpha(self) -> float | None:
        """Accepted / verified drafts; None when none was verified."""
        return alpha(self.n_accepted, self.n_verified) if self.n_verified else None

    @property
    def alpha_by_fill(self) -> list[float | None]:
        """alpha of the drafts made with F tokens in flight, for F = 1 .. n."""
        pairs = zip(self.accepted_by_fill, self.verified_by_fill, strict=True)
        return [alpha(accepted, verified) if verified else None for accepted, verified in pairs]

    @property
    def accepted_runs(self) -> list[int]:
        """How many drafts in a row were accepted before each rejection, the run that the end cut short included.

        No token ends a run but a rejection's, so two rejections in a row have a run of 0 between them, and the runs sum
        to the accepted drafts. Empty when no draft was verified.
        """
        if not self.n_verified:
            return []
        runs = [0]
        for flag in self.accepted[self.prefill_tokens :]:
            if flag:
                runs[-1] += 1
            else:
                runs.append(0)
        return runs

    @property
    def factor(self) -> float:
        """How many cycles are worth one step of the target alone: L / (largest stage), n when the stages are equal."""
        return cycles_a_step(self.stage_sizes)

    @property
    def equivalent_accept_length(self) -> float | None:
        """L_acc: the theoretical speed-up while the head hides behind a stage; None before the first cycle."""
        return accept_length(self.factor, self.new_tokens, self.cycles) if self.cycles else None

    def theoretical_speedup(self, num_spec_layers: int) -> float | None:
        """L_acc, less what a head deeper than a stage costs; None before the first cycle."""
        costs = spd_costs(self.stage_sizes, num_spec_layers)
        return theoretical_speedup(costs, self.new_tokens, self.cycles) if self.cycles else None

    @property
    def tokens_per_second(self) -> float | None:
        """Measured decode speed, prefill excluded; None without a cycle and until the generation has ended."""
        return self.new_tokens / self.timings.decode if self.timings.decode and self.cycles else None

    @property
    def ideal_tokens_per_second(self) -> float | None:
        """Decode speed that the run's own timers give with a device per stage and one for the head; None likewise."""
        return self.new_tokens / self.timings.ideal_decode if self.timings.ideal_decode and self.cycles else None


def shared_length(first: Sequence, second: Sequence) -> int:
    """How many items two sequences have in common from the start on."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
