"""`cycle_overhead.py --replay`: wall-clock speed-up under given acceptance, by real processes whose models sleep.

The columns of its table:

    cycles, accept_length   of the replayed acceptance, as the decode loop counts them
    cycle_ms                the whole decoding over its cycles, refills included
    speedup                 the given time of autoregressive decoding over the pipeline's measured one, per token
    predicted               the same by the planner's model, without messages and bookkeeping (planning/cost_model.py)
    published               as the paper's authors measured it; it was not measured here
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sleeping_ranks import Sleeps, decode_over_ranks
from decoding.metrics import accept_length, iid_alpha
from planning.cost_model import Placement, Times, Trace, predict, read_traces, trace_alpha

SEED = 0


@dataclass(frozen=True)
class Published:
    """What the paper's authors report for Qwen3.5-4B at temperature 0, over all their prompts."""

    stage_ms: float
    draft_ms: float
    verify_ms: float
    accept_length: float
    speedup: float  # wall-clock
    baseline_ms: float = 28.4  # a token of autoregressive decoding


PUBLISHED = {  # by n
    4: Published(7.9, 4.2, 4.0, accept_length=2.64, speedup=2.27),
    8: Published(4.2, 3.5, 1.2, accept_length=3.39, speedup=2.53),
}


@dataclass(frozen=True)
class Case:
    """A pipeline with given times and acceptance."""

    num_stages: int
    sleeps: Sleeps
    baseline_ms: float  # a token of autoregressive decoding
    traces: Sequence[Trace]
    source: str  # of the acceptance, for the card
    published: float | None = None  # speed-up


def cases(args: argparse.Namespace) -> list[Case]:
    """What the flags ask for. ValueError for acceptance that no trace can have."""
    given = [name for name in ("alpha", "alpha_by_fill", "trace") if getattr(args, name) is not None]
    if len(given) > 1:
        raise ValueError(f"--{given[0]} and --{given[1]} both give the acceptance: drop one")
    if not given:
        return [published_case(args, n) for n in args.num_stages or PUBLISHED]
    found = []
    for n in args.num_stages:
        baseline = n * args.stage_ms + args.verify_ms if args.baseline_ms is None else args.baseline_ms
        sleeps = Sleeps(args.stage_ms, args.draft_ms, args.verify_ms, args.hidden_size)
        found.append(Case(n, sleeps, baseline, given_traces(args, n), f"--{given[0]}"))
    return found


def published_case(args: argparse.Namespace, num_stages: int) -> Case:
    """The published times, and the alpha that follows from the published L_acc."""
    if num_stages not in PUBLISHED:
        raise ValueError(
            f"--num_stages is {num_stages}, but figures are published for {', '.join(map(str, PUBLISHED))}: give the "
            "acceptance by --alpha, --alpha_by_fill or --trace, and the times"
        )
    figures = PUBLISHED[num_stages]
    alpha = iid_alpha(figures.accept_length, num_stages)
    sleeps = Sleeps(figures.stage_ms, figures.draft_ms, figures.verify_ms, args.hidden_size)
    source = f"the published L_acc {figures.accept_length}"
    traces = [shuffled_trace(alpha, args.new_tokens)]
    return Case(num_stages, sleeps, figures.baseline_ms, traces, source, figures.speedup)


def given_traces(args: argparse.Namespace, num_stages: int) -> list[Trace]:
    """Acceptance as --alpha, --alpha_by_fill or --trace gives it."""
    if args.trace is not None:
        return read_traces(args.trace)
    alphas = [args.alpha] if args.alpha is not None else args.alpha_by_fill
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise ValueError(f"an acceptance of {alpha} was given: it must lie in 0 .. 1")
    if args.alpha is not None:
        return [shuffled_trace(args.alpha, args.new_tokens)]
    if len(alphas) != num_stages:
        raise ValueError(f"--alpha_by_fill has {len(alphas)} values, but n is {num_stages}: give one per fill, 1 .. n")
    return [filled_trace(alphas, args.new_tokens)]


def shuffled_trace(alpha: float, tokens: int) -> Trace:
    """The share alpha of the drafts, to the nearest one, at random places."""
    flags = [index < round(alpha * tokens) for index in range(tokens)]
    random.Random(SEED).shuffle(flags)
    return Trace(tuple(flags))


def filled_trace(alphas: Sequence[float], tokens: int) -> Trace:
    """Drafts that are accepted by chance, with F tokens in flight with probability alphas[F - 1].

    The first draft, and the one after a rejection, is made with one token in flight; an accepted draft adds one, up
    to n.
    """
    rng, fill, flags = random.Random(SEED), 1, []
    for _ in range(tokens):
        flags.append(rng.random() < alphas[fill - 1])
        fill = min(len(alphas), fill + 1) if flags[-1] else 1
    return Trace(tuple(flags))


def replay_row(case: Case, verify_lag: int) -> dict[str, float]:
    """The figures of one case."""
    n, warm_up = case.num_stages, [True] * 2 * case.num_stages
    flags = [warm_up, *(trace.accepted for trace in case.traces)]
    decoded = [each.result for each in decode_over_ranks(case.sleeps, n, verify_lag, flags)[1:]]
    tokens, cycles = (sum(getattr(result, name) for result in decoded) for name in ("new_tokens", "cycles"))
    seconds = sum(result.timings.decode for result in decoded)
    alone = case.baseline_ms * tokens  # milliseconds of autoregressive decoding
    row = {
        "num_stages": n,
        "verify_lag": verify_lag,
        "alpha": round(trace_alpha(case.traces), 4),
        "tokens": tokens,
        "cycles": cycles,
        "accept_length": round(accept_length(n, tokens, cycles), 4),
        "cycle_ms": round(seconds / cycles * 1e3, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "baseline_tokens_per_second": round(1e3 / case.baseline_ms, 2),
        "speedup": round(alone / (seconds * 1e3), 4),
        "predicted": round(alone / predicted_ms(case, verify_lag), 4),
    }
    return row if case.published is None else row | {"published": case.published}


def predicted_ms(case: Case, verify_lag: int) -> float:
    """What the traces take if messages and bookkeeping cost nothing."""
    n, sleeps = case.num_stages, case.sleeps
    if verify_lag:
        slowest = max(sleeps.stage, sleeps.draft, sleeps.verify)
        return slowest * sum(trace.cycles(n, verify_lag) for trace in case.traces)
    plan = predict(Times((sleeps.stage,) * n, {n: sleeps.draft}, sleeps.verify, message=0), (1,) * n, Placement())
    return sum(trace.milliseconds(plan) for trace in case.traces)


def replay_card(found: Sequence[Case]) -> str:
    """What is emulated, and what is not."""
    lines = [
        "real      n + 1 processes, messages with hidden states over TCP, the decode loop, verdicts and rollbacks",
        "emulated  forwards, during which a rank sleeps for the given time; and acceptance: the head drafts a wrong",
        "          token where the given acceptance has a rejection. No model runs, and the prompt is not timed",
        "baseline  autoregressive decoding takes exactly its given time: nothing here slows it down",
    ]
    for case in found:
        stage, draft, verify, _ = case.sleeps
        lines.append(
            f"n = {case.num_stages:<6}stage {stage:g} ms, head {draft:g} ms, verification {verify:g} ms; baseline "
            f"{case.baseline_ms:g} ms per token; acceptance by {case.source}"
        )
    return "\n".join(lines)
