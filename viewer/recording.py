"""What a generation did, cycle by cycle: noted while it runs, put in order afterwards.

Recorder    keeps what a generation tells it, and computes nothing: recording is no part of any measured time
tokens_of   every token that was ever in the pipeline, when it came and went, and what became of it
staircase   which of them each stage ran in each cycle
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp
from typing import Literal, NamedTuple

from torch import Tensor

from decoding.result import GenerationResult
from decoding.tree import Node

PREFILL_CYCLE = -1  # "cycle" of what the prefill emits; the first cycle is 0


class Fate(StrEnum):
    """What became of a token."""

    FIRST = "first"  # emitted by the prefill
    ACCEPTED = "accepted"  # a draft that the target agreed with
    CORRECTED = "corrected"  # the target's own, in place of a rejected draft or of none
    FLUSHED = "flushed"  # it, or a token that it continues, disagreed with the target
    OPEN = "open"  # still in flight at the end: never judged


class RowsSeen(NamedTuple):
    """What the head saw when it drafted: rows of tokens, each of a type (the deeper, the more of the target)."""

    cached: int  # the rows of so many first positions are in the head's cache, with the deepest type
    deepest: int  # that type
    fed: list[tuple[int, int]]  # (position, type) of the others; a tree has several of a position


@dataclass
class Draft:
    """One cycle's drafting."""

    nodes: list[Node] = field(default_factory=list)
    best: tuple[Tensor, Tensor] | None = None  # a chain's: what the head finds likeliest, ids and log-probabilities
    rows: RowsSeen | None = None


class Recorder:
    """Notes what a generation does. Its lists have an entry per cycle, but for `emitted`, which has one per token."""

    def __init__(self):
        self.entered: list[list[Node]] = []  # into stage 0
        self.drafts: list[Draft] = []
        self.seconds: list[float] = []  # wall-clock, of the cycle alone: not of what the caller does between two
        self.emitted: list[tuple[Node, int]] = []  # each with its cycle
        self.parents: dict[Node, Node | None] = {}  # in the order of appearance; a node forgets its own parent in time
        self.log_probabilities: dict[Node, Tensor] = {}  # [], of a chain's drafts; a tree's nodes have a score

    def begin_cycle(self) -> None:
        self.entered.append([])
        self.drafts.append(Draft())

    def enter(self, nodes: Sequence[Node]) -> None:
        self.entered[-1].extend(nodes)

    def draft(self, nodes: Sequence[Node], rows: RowsSeen | None) -> None:
        self.parents.update((node, node.parent) for node in nodes)
        self.drafts[-1] = Draft([*self.drafts[-1].nodes, *nodes], rows=rows)

    def emit(self, node: Node) -> None:
        self.parents.setdefault(node, node.parent)
        self.emitted.append((node, len(self.entered) - 1))


class Recording(NamedTuple):
    """A generation that has ended, with what was recorded of it."""

    result: GenerationResult
    recorder: Recorder
    cycles: Sequence[Mapping[str, float]]  # seconds of each cycle, by the row of the timeline


@dataclass
class Token:
    """One token of a run. `parent` is a number in the run's list of tokens, where parents come before children."""

    id: int  # in the target's vocabulary
    position: int
    parent: int | None  # None: the prompt
    fill: int = 0  # tokens in flight when it was drafted; 0: not drafted
    probability: float | None = None  # the head's, given the tokens before it
    drafted: int | None = None  # cycle
    entered: int | None = None  # cycle in which stage 0 ran it; None: flushed before, or not needed any more
    died: int | None = None  # cycle whose verdict flushed it: the last one in which a stage ran it
    emitted: int | None = None  # cycle whose verdict confirmed it or put it there
    fate: Fate = Fate.OPEN


def tokens_of(recorder: Recorder, accepted: Sequence[bool]) -> list[Token]:
    """All tokens of a finished run, in the order of their appearance. accepted: a flag a token that was emitted."""
    number = {node: index for index, node in enumerate(recorder.parents)}
    tokens = [
        Token(node.token, node.position, number.get(parent), node.fill) for node, parent in recorder.parents.items()
    ]
    for cycle, (draft, entered) in enumerate(zip(recorder.drafts, recorder.entered, strict=True)):
        for node in draft.nodes:
            token = tokens[number[node]]
            token.drafted, token.probability = cycle, _probability(node, recorder)
        for node in entered:
            tokens[number[node]].entered = cycle
    emitted = [(number[node], cycle) for node, cycle in recorder.emitted]
    set_fates(tokens, emitted, accepted)
    return tokens


def _probability(node: Node, recorder: Recorder) -> float | None:
    """A chain's is noted, if the head's side is kept; in a tree it is what the node adds to the score of its chain."""
    noted, parent = recorder.log_probabilities.get(node), recorder.parents[node]
    if noted is not None:
        return exp(float(noted))
    return exp(node.score - parent.score) if node.score else None


def set_fates(tokens: Sequence[Token], emitted: Sequence[tuple[int, int]], accepted: Sequence[bool]) -> None:
    """Say of every token what became of it, and when it died.

    emitted: number and cycle of each emitted token, one per position; accepted: a flag for each. A token dies with the
    first verdict that puts another token at its own position, or at that of a token that it continues.
    """
    verdicts = {tokens[number].position: (number, cycle) for number, cycle in emitted}
    for number, token in enumerate(tokens):
        inherited = None if token.parent is None else tokens[token.parent].died
        chosen, cycle = verdicts.get(token.position, (number, None))
        own = cycle if chosen != number else None
        token.died = min((died for died in (inherited, own) if died is not None), default=None)
        token.fate = Fate.OPEN if token.died is None else Fate.FLUSHED
    for (number, cycle), flag in zip(emitted, accepted, strict=True):
        token, fate = tokens[number], Fate.ACCEPTED if flag else Fate.CORRECTED
        token.emitted, token.fate = cycle, Fate.FIRST if cycle == PREFILL_CYCLE else fate


def by_cycle(tokens: Sequence[Token], event: Literal["drafted", "emitted"], cycles: int) -> list[list[int]]:
    """Numbers of the tokens that each cycle drafted or emitted; what the prefill emitted is in none."""
    numbers: list[list[int]] = [[] for _ in range(cycles)]
    for number, token in enumerate(tokens):
        cycle = getattr(token, event)
        if cycle is not None and cycle != PREFILL_CYCLE:
            numbers[cycle].append(number)
    return numbers


def staircase(tokens: Sequence[Token], num_stages: int, cycles: int) -> list[list[list[int]]]:
    """Numbers of the tokens that each stage ran in each cycle, [cycles][num_stages][tokens of the cell].

    Stage s runs in cycle c what entered in cycle c - s and has not died by a verdict of an earlier cycle.
    """
    cells: list[list[list[int]]] = [[[] for _ in range(num_stages)] for _ in range(cycles)]
    for number, token in enumerate(tokens):
        if token.entered is None:
            continue
        end = min(cycles, token.entered + num_stages, cycles if token.died is None else token.died + 1)
        for cycle in range(token.entered, end):
            cells[cycle][cycle - token.entered].append(number)
    return cells


def rejections(tokens: Sequence[Token]) -> list[int]:
    """Cycles whose verdict is the target's own token and drops what was in flight, in their order."""
    corrected = {token.emitted for token in tokens if token.fate == Fate.CORRECTED}
    return sorted(corrected & {token.died for token in tokens if token.died is not None})
