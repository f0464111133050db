"""How well a method decodes (method.md section 7): pure functions of counts, which everybody who reports them calls.

Counts are numbers or arrays of them; who divides by a count of 0 has asked for it.

    verified, accepted   drafts that a verdict was about, and those of them that stay
    tokens               what the cycles produced: the prefill's token and drafts without a verdict do not count
    cycles               of the decode loop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Count = TypeVar("Count")  # a number, or an array of them


@dataclass(frozen=True)
class Costs:
    """What a cycle of a method is worth, in steps of the target alone."""

    factor: float  # cycles that fit in a step while the drafter hides: L / largest stage, n for an even split
    cycle: float  # steps that a cycle takes with a device a stage and one for the drafter
    chain: int | None = 0  # drafts that a cycle verifies in a row; 0: a pipeline, which verifies one; None: it varies


def cycles_a_step(stage_sizes: Sequence[int]) -> float:
    """`Costs.factor` of a pipeline with these layers per stage."""
    return sum(stage_sizes) / max(stage_sizes)


def spd_costs(stage_sizes: Sequence[int], num_spec_layers: int) -> Costs:
    """SPD: a cycle lasts as long as the largest stage or the head, whichever has more layers.

    One stage and no head (`spd_costs((L,), 0)`) is the target alone.
    """
    cycle = max(*stage_sizes, num_spec_layers) / sum(stage_sizes)
    return Costs(factor=cycles_a_step(stage_sizes), cycle=cycle)


def ppsd_costs(stage_sizes: Sequence[int], num_spec_layers: int) -> Costs:
    """PPSD: the drafter follows the first stage in a cycle."""
    first, *others = stage_sizes
    cycle = max(first + num_spec_layers, *others) / sum(stage_sizes)
    return Costs(factor=cycles_a_step(stage_sizes), cycle=cycle)


def chain_costs(num_layers: int, num_spec_layers: int, num_steps: int) -> Costs:
    """EAGLE-3: a cycle is a chain of `num_steps` drafts and one pass of the target."""
    return Costs(factor=1.0, cycle=(num_layers + num_steps * num_spec_layers) / num_layers, chain=num_steps)


def block_costs(num_layers: int, num_spec_layers: int, num_drafts: int) -> Costs:
    """DFlash: a cycle is one forward of the drafter, whatever it drafts, and one pass of the target."""
    return Costs(factor=1.0, cycle=(num_layers + num_spec_layers) / num_layers, chain=num_drafts)


def alpha(accepted: Count, verified: Count) -> Count:
    return accepted / verified


def accept_length(factor: float, tokens: Count, cycles: Count) -> Count:
    """L_acc, by the `Costs.factor` of a method: its speed-up while the drafter hides behind a stage. tau of a chain."""
    return factor * tokens / cycles


def theoretical_speedup(costs: Costs, tokens: Count, cycles: Count) -> Count:
    """The speed-up over the target alone with a device a stage and one for the drafter, if layers were all there is."""
    return tokens / (cycles * costs.cycle)


def iid_accept_length(alpha: float, num_stages: int, factor: float | None = None) -> float:
    """L_acc of a pipeline whose drafts are each accepted with probability alpha: a rejection costs n cycles.

    factor: as in `Costs`; n unless given.
    """
    return (num_stages if factor is None else factor) / (1 + (num_stages - 1) * (1 - alpha))


def iid_alpha(accept_length: float, num_stages: int) -> float:
    """The alpha from which `iid_accept_length` follows, for an even split."""
    return 1 - (num_stages / accept_length - 1) / (num_stages - 1)


def iid_chain_length(alpha: float, num_steps: int) -> float:
    """tau of a chain of drafts, likewise: the accepted ones up to the first rejection, and the target's own token."""
    return sum(alpha**step for step in range(num_steps + 1))


def closed_form(alpha: float | None, num_stages: int, costs: Costs) -> float | None:
    """The L_acc that alpha alone predicts for a method with these costs; None where there is no prediction."""
    if alpha is None or costs.chain is None:
        return None
    return iid_chain_length(alpha, costs.chain) if costs.chain else iid_accept_length(alpha, num_stages, costs.factor)
