"""Exact replay of decoding: a head trained where its own decoding puts it (method.md section 11).

A draft event (t, F) is a draft that decoding verifies: token t is the newest, F tokens are in flight, t among them.
Given a text and, for each of its tokens, whether the draft of it was accepted, all events follow (`fills_of`), and the
head's rows of every event are computed in ONE pass, row for row as the decode loop computes them (`packed_rows`):

    D rows   one per token, of the deepest type: what the head's cache keeps for good
    E rows   for each event F rows, of the tokens t-F+1 .. t at their true depths F-1 .. 0; nobody else sees them

    text          1   2   3   4   5        D row T sees the D rows up to T
    event (5, 2)          .   e1  e0       e1 is token 4 at depth 1, e0 token 5 at depth 0; both see D rows 1 .. 3,
                                           and the E rows of their own event up to themselves; e0 drafts token 6

The flags themselves come from the head as it is: start from any, compute which drafts agree with the text, repeat
(`replay_flags`). After k repeats the first k events are those of real decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decoding.metrics import accept_length, alpha
from decoding.sampling import Sampling
from pipeline_model import SpeculationHead, Target, grouped_attention
from training.loss import LOSS_CHUNK, first_best

QUERY_CHUNK = 64  # E rows whose queries share one set of keys


# ---------------------------------------------------------------------------------------------------------------------
# Traces: which drafts a text's decoding verifies, from which of them were accepted


def answers_of(labels: np.ndarray) -> list[range]:
    """The stretches of supervised tokens of one sequence, labels [S] with -100 elsewhere, as ranges of positions.

    Each is an answer: its first token is the prefill's, every other one is verified exactly once.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], labels >= 0, [False]])))
    return [range(first, last) for first, last in edges.reshape(-1, 2).tolist()]


def fills_of(accepted: np.ndarray, num_stages: int) -> np.ndarray:
    """Tokens in flight F at each event of one answer, [E], from whether each event's own draft was accepted, [E] bool.

    F is 1 at the first event and after a rejection, and one more after an acceptance, up to n.
    """
    places = np.arange(len(accepted))
    begins = np.concatenate([[True], ~accepted[:-1]])[: len(accepted)]
    begun = np.maximum.accumulate(np.where(begins, places, 0))
    return np.minimum(num_stages, places - begun + 1)


@dataclass(frozen=True)
class TraceCounts:
    """What decoding counts over some answers, all events together."""

    verified_by_fill: np.ndarray  # [n], index F - 1
    accepted_by_fill: np.ndarray  # [n]
    runs: int  # a run ends with a rejection, or with the answer

    def __add__(self, other: TraceCounts) -> TraceCounts:
        """Of the answers of both, for the same n."""
        return TraceCounts(
            self.verified_by_fill + other.verified_by_fill,
            self.accepted_by_fill + other.accepted_by_fill,
            self.runs + other.runs,
        )

    @property
    def verified(self) -> int:
        return int(self.verified_by_fill.sum())

    @property
    def alpha(self) -> float | None:
        """Accepted / verified drafts; None without an event."""
        return float(alpha(self.accepted_by_fill.sum(), self.verified)) if self.verified else None

    @property
    def alpha_by_fill(self) -> list[float | None]:
        """alpha of the drafts made with F tokens in flight, F = 1 .. n; None for a fill without an event."""
        pairs = zip(self.accepted_by_fill, self.verified_by_fill, strict=True)
        return [float(alpha(accepted, verified)) if verified else None for accepted, verified in pairs]

    @property
    def cycles(self) -> int:
        """Cycles of decoding with `verify_lag` 0: one per token, and n - 1 more to fill the pipeline for each run."""
        return self.verified + (len(self.verified_by_fill) - 1) * self.runs

    @property
    def accept_length(self) -> float | None:
        """L_acc of an even split: n * tokens / cycles; None without an event."""
        n = len(self.verified_by_fill)
        return accept_length(n, self.verified, self.cycles) if self.verified else None


@dataclass(frozen=True)
class Trace:
    """The events of a batch, sequence by sequence, position by position."""

    sequences: np.ndarray  # [E] row of the batch
    positions: np.ndarray  # [E] t, the newest token's position; the event drafts t + 1
    accepted: np.ndarray  # [E] bool
    fills: np.ndarray  # [E] F
    answer_ends: np.ndarray  # [E] bool, the last event of its answer
    num_stages: int

    @classmethod
    def of(cls, labels: np.ndarray, num_stages: int) -> Trace:
        """The events of a batch's answers, labels [B, S], each draft taken as rejected until `with_flags`."""
        sequences, positions, ends = [], [], []
        for sequence, row in enumerate(labels):
            for answer in answers_of(row):
                count = len(answer) - 1
                sequences += [sequence] * count
                positions += answer[:-1]
                ends += [False] * (count - 1) + [True] * (count > 0)
        rejected = np.zeros(len(positions), dtype=bool)
        ones = np.ones(len(positions), dtype=int)
        where = (np.array(column, dtype=int) for column in (sequences, positions))
        return cls(*where, rejected, ones, np.array(ends, dtype=bool), num_stages)

    @property
    def num_events(self) -> int:
        return self.positions.size

    def with_flags(self, accepted: np.ndarray) -> Trace:
        """The same events with these flags [E] bool, and the fills that follow from them."""
        # The end of an answer is the end of a run: the next answer begins with one token in flight.
        fills = fills_of(accepted & ~self.answer_ends, self.num_stages)
        return replace(self, accepted=accepted, fills=fills)

    def only(self, chosen: np.ndarray) -> Trace:
        """Some of the events, chosen [E] bool: all of a sequence or none, as fills follow from the events before."""
        columns = ("sequences", "positions", "accepted", "fills", "answer_ends")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    def full(self) -> Trace:
        """The same events, each with as many tokens in flight as there can be."""
        accepted = np.ones(self.num_events, dtype=bool)
        return replace(self, accepted=accepted, fills=np.minimum(self.num_stages, self.positions + 1))

    def counts(self) -> TraceCounts:
        """Verified and accepted drafts by fill, and runs."""
        places, n = self.fills - 1, self.num_stages
        accepted = np.bincount(places[self.accepted], minlength=n)
        return TraceCounts(np.bincount(places, minlength=n), accepted, int((~self.accepted | self.answer_ends).sum()))


def bernoulli_flags(trace: Trace, alpha: float, random: np.random.Generator) -> np.ndarray:
    """Flags drawn independently, each accepted with probability alpha: [E] bool."""
    return random.random(trace.num_events) < alpha


# ---------------------------------------------------------------------------------------------------------------------
# Packed rows: every event of a batch in one pass of the head


class _Rows(NamedTuple):
    """Where the rows of a batch stand: real tokens' D rows, sequence by sequence, then the E rows, event by event."""

    token_sequences: Tensor  # [N] of the D rows
    token_positions: Tensor  # [N]
    sequences: Tensor  # [R] of the E rows
    positions: Tensor  # [R]
    depths: np.ndarray  # [R] of the token at the event, 0 .. n - 1
    newest: np.ndarray  # [E] the row of depth 0 of each event
    event_rows: np.ndarray  # [E + 1] the events' first rows
    token_bounds: np.ndarray  # [B + 1] the sequences' first D rows
    event_bounds: np.ndarray  # [B + 1] the sequences' first events
    limits: np.ndarray  # [E] D rows of its own sequence that an event sees


def _rows_of(trace: Trace, lengths: np.ndarray, device: torch.device) -> _Rows:
    event_rows = np.concatenate([[0], np.cumsum(trace.fills)])
    token_bounds = np.concatenate([[0], np.cumsum(lengths)])
    event_of = np.repeat(np.arange(trace.num_events), trace.fills)  # [R]
    depths = event_rows[event_of + 1] - 1 - np.arange(len(event_of))
    tokens = np.repeat(np.arange(len(lengths)), lengths)
    index = [tokens, np.arange(len(tokens)) - token_bounds[tokens]]
    index += [trace.sequences[event_of], trace.positions[event_of] - depths]
    return _Rows(
        *(torch.from_numpy(array).to(device) for array in index),
        depths,
        event_rows[1:] - 1,
        event_rows,
        token_bounds,
        np.searchsorted(trace.sequences, np.arange(len(lengths) + 1)),
        trace.positions - trace.fills + 1,
    )


def packed_attention(
    query: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    limits: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    scaling: float,
) -> Tensor:
    """Attention of rows that see a part of a shared prefix, and some rows of their own.

    query [1, H_q, Q, D]; keys and values of the prefix [1, H_kv, S, D] and of the own rows [1, H_kv, R, D]. Query i
    sees the prefix before `limits[i]` and the own rows `begins[i] .. ends[i] - 1`. Runs in chunks whose keys end at
    the largest limit, so queries should come in the order of their limits.
    """
    outputs, device = [], query.device
    for start in range(0, query.shape[2], QUERY_CHUNK):
        part = slice(start, start + QUERY_CHUNK)
        shared, first, last = int(limits[part].max()), int(begins[part].min()), int(ends[part].max())
        key, value = (
            torch.cat([of_prefix[:, :, :shared], of_own[:, :, first:last]], dim=2)
            for of_prefix, of_own in zip(prefix, own, strict=True)
        )
        seen = np.arange(shared)[None] < limits[part, None]
        rows = np.arange(first, last)[None]
        mask = np.concatenate([seen, (rows >= begins[part, None]) & (rows < ends[part, None])], axis=1)
        outputs.append(grouped_attention(query[:, :, part], key, value, torch.from_numpy(mask).to(device), scaling))
    return torch.cat(outputs, dim=2)


def packed_rows(
    head: SpeculationHead,
    features: Tensor,
    lengths: np.ndarray,
    rope: tuple[Tensor, Tensor],
    stage_sizes: Sequence[int],
    trace: Trace,
) -> Tensor:
    """The head's output at every event, before the final norm: [E, H], as decoding computes it row for row.

    features [B, S, m, H], right-padded; lengths [B] real tokens; rope: cosines and sines [1, S, D_rot].
    """
    rows = _rows_of(trace, lengths, features.device)
    shown = _shown_rows(head, features, stage_sizes, rows)  # [D, N + R, H]
    count = len(rows.token_positions)
    positions = torch.cat([rows.token_positions, rows.positions])
    cos, sin = (table[:, positions] for table in rope)
    newest = torch.from_numpy(rows.newest).to(features.device)
    state = shown[0]
    for index, layer in enumerate(head.spec_layers):
        if head.fixed_rows and index > 0:  # only the rows of depth 0 have moved
            state = shown[index].index_copy(0, count + newest, state)
        normed = layer.input_layernorm(state)[None]
        keys, values = layer.keys_values(normed, (cos, sin))
        only_newest = head.fixed_rows or index == len(head.spec_layers) - 1
        asking = count + newest if only_newest else slice(None)
        query, gate = layer.queries(normed[:, asking], (cos[:, asking], sin[:, asking]))
        attended = _attend(query, keys, values, rows, only_newest, layer.self_attn.scaling)
        state = layer.finish(state[asking][None], attended, gate)[0]
    return state


def _shown_rows(head: SpeculationHead, features: Tensor, stage_sizes: Sequence[int], rows: _Rows) -> Tensor:
    """What each row puts into the layers, D rows first: [D, N + R, H]."""
    types = np.array(head.depth_types(stage_sizes))
    deepest = head.shown_rows(int(types[-1]), features[rows.token_sequences, rows.token_positions])
    parts, places = [deepest], []
    kinds = types[rows.depths]
    for kind in np.unique(kinds):
        chosen = np.flatnonzero(kinds == kind)
        places.append(chosen)
        chosen = torch.from_numpy(chosen).to(features.device)
        parts.append(head.shown_rows(int(kind), features[rows.sequences[chosen], rows.positions[chosen]]))
    order = np.argsort(np.concatenate(places))
    tokens = np.arange(len(rows.token_positions))
    order = torch.from_numpy(np.concatenate([tokens, len(tokens) + order])).to(features.device)
    return torch.cat(parts, dim=1)[:, order]


def _attend(query: Tensor, keys: Tensor, values: Tensor, rows: _Rows, only_newest: bool, scaling: float) -> Tensor:
    """Attention of all rows, or of each event's newest alone: [1, H_q, rows, D]. Sequences do not see each other."""
    count = len(rows.token_positions)
    prefixes, events = [], []
    for sequence in range(len(rows.token_bounds) - 1):
        tokens = slice(*rows.token_bounds[sequence : sequence + 2])
        prefix = keys[:, :, tokens], values[:, :, tokens]
        if not only_newest:
            asked = query[:, :, tokens]
            prefixes.append(
                scaled_dot_product_attention(asked, *prefix, is_causal=True, scale=scaling, enable_gqa=True)
            )
        first, last = rows.event_bounds[sequence : sequence + 2]
        if first == last:
            continue
        begin, end = rows.event_rows[first], rows.event_rows[last]
        own = keys[:, :, count + begin : count + end], values[:, :, count + begin : count + end]
        repeats = 1 if only_newest else np.diff(rows.event_rows[first : last + 1])
        begins = np.repeat(rows.event_rows[first:last] - begin, repeats)
        ends = (rows.newest[first:last] - begin if only_newest else np.arange(end - begin)) + 1
        asked = query[:, :, first:last] if only_newest else query[:, :, count + begin : count + end]
        limits = np.repeat(rows.limits[first:last], repeats)
        events.append(packed_attention(asked, prefix, own, limits, begins, ends, scaling))
    return torch.cat(prefixes + events, dim=2)


# ---------------------------------------------------------------------------------------------------------------------
# Flags: which drafts of the head agree with the text


@torch.no_grad()
def replay_flags(
    head: SpeculationHead,
    target: Target,
    outputs: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    sampling: Sampling,
    uniforms: Tensor | None = None,
) -> np.ndarray:
    """Whether each event's draft is accepted, given that the text was committed: [E] bool.

    outputs [E, H] of `packed_rows`; hidden [E, H], the target's h_L at the events; tokens [E], the text's next ones.
    Greedy: the draft's argmax is the token. Sampled: accepted with probability min(1, q/p) of that token, decided by
    `uniforms` [E]; what is outside the draft vocabulary is never accepted.
    """
    draft_ids, flags = head.draft_token_ids, []
    for start in range(0, len(outputs), LOSS_CHUNK):
        part = slice(start, start + LOSS_CHUNK)
        logits = head.lm_head(target.norm(outputs[part]))
        if sampling.greedy:
            best = first_best(logits)
            flags.append((best if draft_ids is None else draft_ids[best]) == tokens[part])
            continue
        q, p = sampling.probabilities(logits), sampling.probabilities(target.logits(hidden[part]))
        if draft_ids is not None:
            q = torch.zeros_like(p).index_copy_(1, draft_ids, q)
        flags.append(uniforms[part] < acceptance_given(p, q, tokens[part]))
    return torch.cat(flags).cpu().numpy() if flags else np.zeros(0, dtype=bool)


def acceptance_given(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Probability that the draft was accepted, given the committed token: min(1, q/p) of it. p, q [E, V] -> [E].

    By Bayes: the token was drafted and kept with probability q min(1, p/q) = min(q, p), and stands there with p.
    """
    index = tokens[:, None]
    return (q.gather(1, index) / p.gather(1, index).clamp_min(torch.finfo(torch.float32).tiny))[:, 0].clamp_max(1)


# ---------------------------------------------------------------------------------------------------------------------
# What acceptance at each fill is worth


class RunValues(NamedTuple):
    """Expected tokens of a run, and what each fill contributes (method.md section 11.1)."""

    tokens: float  # E[V], verified tokens per run
    visits: np.ndarray  # [n] N_F, events with F tokens in flight per run
    rest: np.ndarray  # [n] R_F, expected further tokens of a run, this one included, at an event with F in flight

    @property
    def gradient(self) -> np.ndarray:
        """dE[V] / da_F = N_F R_min(F+1, n): [n]."""
        return self.visits * np.append(self.rest[1:], self.rest[-1])


def run_values(alphas: Sequence[float]) -> RunValues:
    """`RunValues` from the acceptance at each fill, a_1 .. a_n, all below 1."""
    alphas = np.asarray(alphas, dtype=float)
    rest = np.empty(len(alphas))
    rest[-1] = 1 / (1 - alphas[-1])
    for place in range(len(alphas) - 2, -1, -1):
        rest[place] = 1 + alphas[place] * rest[place + 1]
    visits = np.cumprod(np.concatenate([[1.0], alphas[:-1]]))
    visits[-1] *= rest[-1]  # the pipeline stays full until a rejection
    return RunValues(float(rest[0]), visits, rest)
