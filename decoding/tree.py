"""The tree of tokens in flight: the newest emitted tokens and all candidates that continue them.

A chain is a tree of width 1.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from decoding.nodes import CHECKPOINT, CachePlan, NodeRow
from decoding.sampling import Verdict


@dataclass(slots=True, eq=False)
class Node:
    """One token of the sequence, or a candidate for one."""

    token: int
    position: int
    id: int  # row in every per-node memory, reused once the node is gone
    slot: int  # KV slot
    parent: Node | None
    score: float = 0.0  # summed log-probability of the chain that ends here
    fill: int = 0  # tokens that were in flight when it was drafted, 1 .. n; 0: not drafted
    alive: bool = True  # still agrees with every emitted token
    completed: bool = False  # has left the last stage

    @property
    def row(self) -> NodeRow:
        return NodeRow(self.token, self.id, self.parent.id, self.slot)


class TokenTree:
    """The newest emitted tokens and, after them, every candidate that agrees with them.

    `path` holds the last n + 1 emitted tokens, oldest first; `levels` the candidates, one list a position. In a chain
    a level has one node. A node whose chain was not drafted further stays: if the target confirms it, it is ahead of
    a correction by all the stages it has passed.
    """

    def __init__(self, plan: CachePlan, prompt: Sequence[int], num_stages: int):
        self._free_ids = [id for id in range(plan.nodes) if id != CHECKPOINT]  # a heap: lowest first
        self._free_slots = list(range(len(prompt), plan.slots)) if plan.tree else None  # likewise
        self.keep = num_stages + 1  # emitted tokens that are nodes, at most
        self.slots: list[int] = []  # KV slots of all tokens after the prompt
        self.path: deque[Node] = deque()
        self.levels: deque[list[Node]] = deque()
        first = max(0, len(prompt) - self.keep)
        for position, token in enumerate(prompt[first:], start=first):
            parent = self.path[-1] if self.path else None
            self.path.append(Node(token, position, heapq.heappop(self._free_ids), position, parent, completed=True))

    @property
    def root(self) -> Node:
        """The newest emitted token."""
        return self.path[-1]

    @property
    def frontier(self) -> list[Node]:
        """The newest candidates, to be continued; the root itself when there are none."""
        return self.levels[-1] if self.levels else [self.root]

    @property
    def fill(self) -> int:
        """Tokens in flight when the next position is drafted, 1 .. n: the newest counts even if it has completed."""
        return max(1, self.frontier[0].position + 1 - self.completed)

    @property
    def completed(self) -> int:
        """Emitted tokens, from the start of the prompt on, that have been through all stages."""
        return next(node.position for node in reversed(self.path) if node.completed) + 1

    def new_node(self, token: int, parent: Node, score: float = 0.0, fill: int = 0) -> Node:
        position = parent.position + 1
        slot = position if self._free_slots is None else heapq.heappop(self._free_slots)
        return Node(token, position, heapq.heappop(self._free_ids), slot, parent, score, fill)

    def commit(self, verdict: Verdict) -> set[int]:
        """Emit a token after the root: the accepted candidate, or a new node. Everything that disagrees dies.

        Returns the ids of the dead. They are free from now on: the new node may already have one of them.
        """
        candidates = self.levels.popleft() if self.levels else []
        chosen = None if verdict.accepted is None else candidates[verdict.accepted]
        dead = [node for node in candidates if node is not chosen]
        if dead:
            for node in dead:
                node.alive = False
            for level in self.levels:
                for node in level:
                    node.alive = node.parent.alive
                dead.extend(node for node in level if not node.alive)
            self.levels = deque(level for level in map(living, self.levels) if level)
            for node in dead:
                self._release(node)
        self.path.append(chosen or self.new_node(verdict.token, self.root))
        self.slots.append(self.root.slot)
        if len(self.path) > self.keep:
            # Its children have all been through every stage, and no rolled-back draft reaches back this far.
            heapq.heappush(self._free_ids, self.path.popleft().id)
            self.path[0].parent = None
        return {node.id for node in dead}

    def _release(self, node: Node) -> None:
        heapq.heappush(self._free_ids, node.id)
        if self._free_slots is not None:
            heapq.heappush(self._free_slots, node.slot)


def living(level: list[Node]) -> list[Node]:
    return [node for node in level if node.alive]
