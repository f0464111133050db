"""After every cycle the stages' memories are those of a fresh pass over the committed tokens, and nothing leaks.

These tests step a generation cycle by cycle and look inside.
"""

import gc
import random
from functools import lru_cache

import pytest
import torch

from decoding.nodes import CHECKPOINT, CachePlan
from decoding.tree import Node
from loading.target_config import is_linear_attention
from pipeline_inference import LocalExecutor
from tests.tiny import (
    WINDOW,
    hf_greedy,
    oracle,
    random_prompt,
    scripted_decoder,
    spd_decoder,
    tiny_head,
    tiny_model,
    tiny_target,
)
from timeline import Timeline

CPU = torch.device("cpu")
SIZES = (1, 2, 1)
PROMPT = random_prompt(5)


@lru_cache
def target_and_sequence(family, count):
    return tiny_target(family), PROMPT + hf_greedy(tiny_model(family), PROMPT, count)


def mixed_decoder(family, width, lag, count):
    """A drafter that is right at about half of the positions, at any place among its candidates."""
    target, sequence = target_and_sequence(family, count)
    rank = lambda position: random.Random(position).choice([*range(width), *range(width), width])  # noqa: E731
    choose = oracle(sequence, rank=rank, width=width)
    return scripted_decoder(target, SIZES, PROMPT, choose, draft_top_k=width, verify_lag=lag)


class Steps:
    """A generation, stepped: after each cycle it knows, without asking the code, how deep every token has come."""

    def __init__(self, decoder, count):
        self.generation = decoder.start(PROMPT, count)
        self.generation._prefill()
        self.executor, self.tree = decoder.executor, self.generation.tree
        self.entered: dict[Node, int] = {}  # the cycle in which a node entered stage 0
        self.slots = dict(enumerate(range(len(PROMPT))))  # KV slot of each committed position
        self.slots[self.tree.root.position] = self.tree.root.slot
        self.cycle = 0

    @property
    def tokens(self):
        return PROMPT + self.generation.result.tokens

    def __iter__(self):
        while not self.generation.result.stop_reason:
            for node in self.generation._entering:
                self.entered.setdefault(node, self.cycle)
            self.generation._cycle()
            self.cycle += 1
            self.slots[self.tree.root.position] = self.tree.root.slot
            yield self.cycle

    def passed(self, stage):
        """How many committed tokens, oldest first, have passed a stage."""
        count = len(self.tokens)
        for node in self.tree.path:
            if node.position >= len(PROMPT) and self.cycle - self.entered.get(node, self.cycle) <= stage:
                count = min(count, node.position)
        return count

    @property
    def candidates(self):
        return [node for level in self.tree.levels for node in level]


class FreshPrefills:
    """Caches of one whole prefill a prefix of the final tokens: what a sequence without any rollback leaves."""

    def __init__(self, target):
        self.target, self._known = target, {}

    def __call__(self, tokens):
        key = tuple(tokens)
        if key not in self._known:
            executor = LocalExecutor(self.target, SIZES)
            with torch.inference_mode():
                executor.start(list(tokens), 0, CachePlan(len(tokens), 1, tree=False), Timeline(CPU))
            self._known[key] = [stage.cache for stage in executor.stages]
        return self._known[key]


@lru_cache
@torch.inference_mode()
def rounding(family, count):
    """By how much the library's own keys and values differ between one pass and token by token, at most.

    A tiny model can be badly conditioned at some position: of one family, on a CPU with AMX, 3e-4.
    """
    model, (_, sequence) = tiny_model(family), target_and_sequence(family, count)
    whole = model(torch.tensor([sequence]), use_cache=True).past_key_values
    grown = None
    for token in sequence:
        grown = model(torch.tensor([[token]]), past_key_values=grown, use_cache=True).past_key_values
    pairs = zip(whole.layers, grown.layers, strict=True)
    layers = [(ours, theirs) for ours, theirs in pairs if torch.is_tensor(getattr(ours, "keys", None))]
    kept = [layer.keys.shape[2] for pair in layers for layer in pair]  # a window's cache holds its last ones alone
    return max(
        float((getattr(ours, name)[:, :, -min(kept) :] - getattr(theirs, name)[:, :, -min(kept) :]).abs().max())
        for ours, theirs in layers
        for name in ("keys", "values")
    )


def check_memories(steps, fresh, tolerance):
    """Every stage's memory of the committed tokens against a fresh prefill of those that have passed it."""
    for stage, cache in enumerate(stage.cache for stage in steps.executor.stages):
        passed = steps.passed(stage)
        expected = fresh(steps.tokens[:passed])[stage]
        newest = next(node for node in steps.tree.path if node.position == passed - 1)
        slots = torch.tensor([steps.slots[position] for position in range(passed)])
        for layer in steps.executor.stages[stage].layers:
            if is_linear_attention(fresh.target.config, layer):
                ours, theirs = cache.linear_state(layer, newest.id), expected.linear_state(layer, 0)
            else:
                ours, theirs = cache.kv(layer, slots), expected.kv(layer, torch.arange(passed))
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=1e-4)


def check_masks(steps):
    """In a tree: every live node sees the committed tokens before it, its ancestors and itself, and nothing else."""
    mask = steps.executor._board
    for node in [steps.tree.root, *steps.candidates]:
        if node not in steps.entered:
            continue  # enters in the next cycle
        chain = set()
        ancestor = node
        while ancestor is not steps.tree.root:
            chain.add(ancestor.slot)
            ancestor = ancestor.parent
        seen = mask._visible[node.id].nonzero()[:, 0].tolist()
        assert set(seen) == chain | set(steps.slots.values())


def check_in_flight(steps):
    """The executor holds the live nodes, at their depths, and no dead ones; in a tree with their own mask rows."""
    live = {node.id: node for node in [*steps.tree.path, *steps.candidates]}
    for stage, item in enumerate(steps.executor._inputs):
        if item is None:
            continue
        batch, hidden = item
        assert len(hidden) == len(batch.ids) == len(batch.tokens)
        assert batch.nodes.tolist() == list(batch.ids)
        for row, (node_id, token) in enumerate(zip(batch.ids, batch.tokens.tolist(), strict=True)):
            node = live[node_id]
            assert (node.token, node.position) == (token, batch.position)
            assert steps.cycle - steps.entered[node] == stage
            if batch.mask is not None:
                assert torch.equal(batch.mask[row], steps.executor._board._visible[node_id][: batch.mask.shape[1]])
            if batch.window_mask is not None:
                check_window(steps, batch.window_mask[row], live[node_id])


def check_window(steps, seen, node):
    """In a tree: a layer with a sliding window sees the last positions of the node's own chain, and nothing else."""
    slots, ancestor = dict(steps.slots), node
    while ancestor is not None and ancestor.position > steps.tree.root.position:
        slots[ancestor.position] = ancestor.slot
        ancestor = ancestor.parent
    expected = {slots[position] for position in range(max(0, node.position - WINDOW + 1), node.position + 1)}
    assert set(seen.nonzero()[:, 0].tolist()) == expected


def check_pools(steps):
    """Ids and slots: distinct among the live, and all the others are in the pools."""
    tree, plan = steps.tree, steps.generation._plan
    live = [*tree.path, *steps.candidates]
    ids = [node.id for node in live]
    assert sorted(ids + tree._free_ids) == [id for id in range(plan.nodes) if id != CHECKPOINT]
    slots = [steps.slots[position] for position in range(len(steps.tokens))] + [node.slot for node in steps.candidates]
    if tree._free_slots is None:
        assert len(set(slots)) == len(slots)
        assert max(slots) < plan.slots
    else:
        assert sorted(slots + tree._free_slots) == list(range(plan.slots))


@pytest.mark.parametrize("family", ["llama", "qwen3 window", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_memories_after_every_cycle(family, width, lag):
    """Guards against a rollback that leaves, drops or mixes up anything: keys, values, states, masks, ids, slots."""
    count = 20
    decoder = mixed_decoder(family, width, lag, count)
    steps, fresh = Steps(decoder, count), FreshPrefills(target_and_sequence(family, count)[0])
    tolerance = max(1e-4, 4 * rounding(family, count))
    assert tolerance < 1e-2  # what is left or mixed up is off by tenths
    for _ in steps:
        check_memories(steps, fresh, tolerance)
        check_in_flight(steps)
        check_pools(steps)
        if width > 1:
            check_masks(steps)
    assert steps.tokens == target_and_sequence(family, count)[1]
    assert 0.2 < steps.generation.result.alpha < 0.9


def live_nodes():
    gc.collect()
    return sum(type(item) is Node for item in gc.get_objects())


def footprint(steps):
    """Sizes of all that a generation holds, once it runs."""
    generation, tree = steps.generation, steps.tree
    return {
        "cache bytes": sum(stage.cache.nbytes() for stage in steps.executor.stages),
        "path": len(tree.path),
        "ids": len(tree._free_ids) + len(tree.path) + len(steps.candidates),
        "timeline": len(generation.timeline.spans) + len(generation.timeline._unread),
        "recorder": generation.recorder is not None,
    }


@pytest.mark.parametrize(
    ("family", "width", "kind"),
    [("llama", 1, "head"), ("llama", 3, "scripted"), ("qwen3_5", 1, "scripted"), ("qwen3_5", 3, "head")],
)
def test_nothing_grows_with_the_output(family, width, kind):
    """Guards against pools, caches, parents and logs that grow with each token."""
    count = 62
    if kind == "head":
        target = target_and_sequence(family, count)[0]
        decoder = spd_decoder(target, tiny_head(target, SIZES), draft_top_k=width)
    else:
        decoder = mixed_decoder(family, width, 0, count)
    before = live_nodes()
    steps = Steps(decoder, count)
    early = None
    for _ in steps:
        steps.entered.clear()  # this test's own record keeps nodes alive
        if early is None and len(steps.generation.result.tokens) >= 10:
            early = footprint(steps)
    assert len(steps.generation.result.tokens) == count
    assert footprint(steps) == early
    assert live_nodes() - before <= steps.generation._plan.nodes


def test_memory_is_planned_not_grown():
    """Guards against a plan that is larger than it must be: a chain needs one slot a position, and few ids."""
    target, _ = target_and_sequence("qwen3_5", 20)
    chain = scripted_decoder(target, SIZES, PROMPT, lambda path: [0]).start(PROMPT, 50)._plan
    assert chain.slots == len(PROMPT) + 50
    assert chain.nodes <= 3 * (len(SIZES) + 2)
    short = scripted_decoder(target, SIZES, PROMPT, lambda path: [0, 1, 2], draft_top_k=3)
    plans = [short.start(PROMPT, count)._plan for count in (10, 1000)]
    assert plans[1].slots - plans[0].slots == 990
    assert plans[1].nodes == plans[0].nodes


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_generation_that_overflowed_spoils_no_later_one(family, width):
    """Guards the memory that generations share: what is not a number goes through any mask, so it must not stay."""
    target, prompt = tiny_target(family), random_prompt(9)
    decoder = spd_decoder(target, tiny_head(target, (2, 2)), draft_top_k=width)
    decoder.generate(prompt, 20)  # makes the memory
    with torch.inference_mode():
        for stage in decoder.executor.stages:
            for tensor in stage.cache.tensors():
                tensor.fill_(torch.nan)
    assert decoder.generate(prompt, 12).tokens == hf_greedy(tiny_model(family), prompt, 12)
