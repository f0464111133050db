"""The drafter and the tree: what the head sees, which candidates live on, and what a wider tree gains."""

import copy
import random
from collections import deque
from functools import lru_cache

import pytest
import torch

from decoding.tree import TokenTree
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from pipeline_model import layers_available
from tests.tiny import (
    VOCAB,
    hf_greedy,
    layer_outputs,
    random_prompt,
    scripted_decoder,
    tiny_head,
    tiny_model,
    tiny_target,
)

PROMPT = random_prompt(6)


@lru_cache
def reference(family, layers=4, count=24, seed=0):
    """A target, a prompt, and the prompt with the target's own greedy continuation."""
    prompt = random_prompt(6, seed=seed)
    sequence = prompt + hf_greedy(tiny_model(family, layers=layers), prompt, count)
    return tiny_target(family, layers=layers), prompt, sequence


# ---------------------------------------------------------------------------------------------------------------------
# What the head sees
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_draft_logits(target, head, sizes, tokens, completed, use_deepest):
    """method.md section 5 without any cache: draft logits after the last of `tokens`, [V_d].

    One row per token, all computed from scratch: a token at distance x after the newest has the type of depth
    min(n, x); with `use_deepest` the first `completed` tokens, which had left the last stage before this cycle, have
    the deepest type. The newest one is always g_0, the type the head was trained to draft from.
    """
    states = layer_outputs(target.model, tokens)
    anchors, available, num_stages = head.config.aggr_feature_bound, layers_available(sizes), len(sizes)
    rows = []
    for position in range(len(tokens)):
        distance = len(tokens) - 1 - position
        depth = min(num_stages, distance)
        if use_deepest and position < completed and distance > 0:
            depth = num_stages
        kind = max(k for k in range(len(anchors)) if anchors[k] <= available[depth])
        features = torch.cat([states[anchor][position] for anchor in anchors[: kind + 1]])
        rows.append(head.aggr_projs[kind].weight @ features)
    hidden = torch.stack(rows)[None]
    rope = target.model.model.rotary_emb(hidden, torch.arange(len(tokens))[None])
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
    for layer in head.spec_layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rope)
    return head.lm_head(target.model.model.norm(hidden[0, -1]))


def chain_of(node, root):
    """The candidates from after the root to a node, oldest first."""
    chain = []
    while node is not root:
        chain.append(node)
        node = node.parent
    return chain[::-1]


class SteeredDrafter(SPDDrafter):
    """Drafts from the head and shows what it drafted from to `check`; then pushes chosen tokens in front.

    Without the push a random head is never right, and no pipeline would ever be full.
    """

    def __init__(self, *arguments, push, check, **settings):
        super().__init__(*arguments, **settings)
        self._push, self._check = push, check
        self.entered = {}  # the cycle in which a node entered
        self.generation = None

    def enter(self, nodes, h0):
        super().enter(nodes, h0)
        self.entered |= dict.fromkeys(nodes, self.generation.result.cycles)

    def draft(self, tree):
        staying = self._cache.length
        logits = super().draft(tree)
        stayed, self._cache.length = self._cache.length, staying
        self._check(self, tree, logits)
        self._cache.length = stayed
        pushed = logits.clone()
        for place, token in enumerate(self._push(tree.frontier[0].position + 1)):
            pushed[:, token] += 60 - 2.0 * place
        return pushed

    def has_completed(self, node):
        """Whether a node had passed every stage before the running cycle; without asking the node."""
        entered = self.entered.get(node)
        return entered is None or self.generation.result.cycles - entered >= self._num_stages


def steered_run(family, sizes, *, width, lag, use_deepest, check, count=20):
    """A generation whose drafts are right at about two of three positions, at any place among the candidates."""
    target, prompt, sequence = reference(family, layers=sum(sizes))
    head = tiny_head(target, sizes)

    def push(position):
        rng = random.Random(position)
        chosen = rng.sample([token for token in range(VOCAB) if token != sequence[position]], width)
        if rng.random() < 0.7:
            chosen[rng.choice([0, *range(width)])] = sequence[position]
        return chosen

    drafter = SteeredDrafter(head, target, sizes, use_deepest, push=push, check=check)
    executor = LocalExecutor(target, sizes, head.config.aggr_feature_bound)
    generation = Decoder(executor, drafter, draft_top_k=width, verify_lag=lag).start(prompt, count)
    drafter.generation = generation
    result = generation.finish()
    assert result.tokens == sequence[len(prompt) :][:count]
    assert 0.2 < result.alpha < 0.95
    return result


def compare_with_plain(sizes, use_deepest, fills):
    """A check of every draft, of every frontier node, against `plain_draft_logits`."""

    def check(drafter, tree, logits):
        generation = drafter.generation
        emitted = generation._prompt + generation.result.tokens
        for node, ours in zip(tree.frontier, logits, strict=True):
            chain = chain_of(node, tree.root)
            in_flight = [link for link in [*tree.path, *chain] if not drafter.has_completed(link)]
            completed = in_flight[0].position if in_flight else node.position + 1
            fills.add(max(1, node.position + 1 - completed))  # the newest counts even when all have completed
            tokens = emitted + [link.token for link in chain]
            expected = plain_draft_logits(drafter.target, drafter.head, sizes, tokens, completed, use_deepest)
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)

    return check


@pytest.mark.parametrize("use_deepest", [True, False])
@pytest.mark.parametrize(
    ("family", "sizes", "width", "lag"),
    [
        ("llama", (4,), 1, 0),
        ("llama", (2, 2), 1, 0),
        ("llama", (2, 2), 1, 1),
        ("llama", (1, 2, 1), 1, 0),
        ("llama", (1, 2, 1), 3, 0),
        ("llama", (1, 1, 1, 1, 1, 1, 1), 1, 0),
        ("llama", (1, 1, 1, 1, 1, 1, 1), 1, 1),
        ("llama", (1, 1, 1, 1, 1, 1, 1), 3, 0),
        ("qwen3_5", (1, 1, 1, 1), 1, 1),
        ("qwen3_5", (1, 1, 1, 1), 3, 0),
        ("qwen3_moe", (1, 3), 3, 0),
    ],
)
def test_drafts_against_a_plain_head_without_caches(family, sizes, width, lag, use_deepest):
    """Guards against rows of a wrong type, stale rows after a rollback, and rows that are lost near the end."""
    fills = set()
    steered_run(
        family,
        sizes,
        width=width,
        lag=lag,
        use_deepest=use_deepest,
        check=compare_with_plain(sizes, use_deepest, fills),
    )
    assert fills == set(range(1, len(sizes) + 1))


@pytest.mark.parametrize("use_deepest", [True, False])
def test_drafts_of_a_lagged_tree(use_deepest):
    """Guards against a newest token that has completed already: it is drafted from like any other newest token."""
    check = compare_with_plain((1, 2, 1), use_deepest, set())
    steered_run("llama", (1, 2, 1), width=3, lag=1, use_deepest=use_deepest, check=check)


@pytest.mark.parametrize("use_deepest", [True, False])
@pytest.mark.parametrize(("family", "sizes"), [("llama", (1, 1, 1, 1)), ("qwen3_5", (1, 2, 1))])
def test_tree_forward_is_the_forward_of_each_chain(family, sizes, use_deepest):
    """Guards against an ancestor mask that lets one chain see another: each frontier node alone drafts the same."""
    widths = set()

    def check(drafter, tree, logits):
        staying = drafter._cache.length
        widths.add(len(tree.frontier))
        for node, ours in zip(tree.frontier, logits, strict=True):
            alone = copy.copy(tree)
            alone.levels = deque([link] for link in chain_of(node, tree.root))
            drafter._cache.length = staying
            expected = SPDDrafter.draft(drafter, alone)
            torch.testing.assert_close(ours[None], expected, atol=1e-5, rtol=1e-5)

    steered_run(family, sizes, width=4, lag=0, use_deepest=use_deepest, check=check)
    assert 4 in widths


# ---------------------------------------------------------------------------------------------------------------------
# Which candidates live on
# ---------------------------------------------------------------------------------------------------------------------


def on_track(sequence, path):
    return path == sequence[: len(path)]


def scripted(choose, *, sizes=(1, 2, 1), count=20, **settings):
    """A run with a scripted drafter, `choose(sequence, path)`. The output is the target's, whatever was drafted."""
    target, prompt, sequence = reference("llama")
    decoder = scripted_decoder(target, sizes, prompt, lambda path: choose(sequence, path), **settings)
    result = decoder.generate(prompt, count)
    assert result.tokens == sequence[len(prompt) :][:count]
    return result


def wrong(sequence, path, by=1):
    return (sequence[len(path)] + by) % VOCAB


@pytest.mark.parametrize("lag", [0, 1])
def test_second_choices_are_worth_a_tree(lag):
    """Guards against a tree that follows first choices only: here the second one is always right."""

    def choose(sequence, path):
        if not on_track(sequence, path):
            return {}  # no preference at all after a wrong token
        return {wrong(sequence, path): 0.2, sequence[len(path)]: 0.0}

    chain = scripted(choose, draft_top_k=1, verify_lag=lag)
    assert chain.alpha == 0
    assert chain.cycles == (3 + lag) * 19
    for width in (2, 4):
        tree = scripted(choose, draft_top_k=width, verify_lag=lag)
        assert tree.alpha == 1
        assert tree.cycles == 3 + lag + 18


def test_wider_trees_need_fewer_cycles():
    """Guards against a width that costs cycles: totals over several prompts, right tokens at places 0 to 5."""

    def total_cycles(width):
        cycles = 0
        for seed in range(4):
            target, prompt, sequence = reference("llama", seed=seed)

            def choose(path, sequence=sequence, seed=seed):
                if not on_track(sequence, path):
                    return {}
                place = random.Random(100 * seed + len(path)).choice([0, 0, 0, 1, 1, 2, 3, 5])
                logits = {wrong(sequence, path, by): -0.4 * by for by in range(1, 6)}
                return logits | {sequence[len(path)]: -0.4 * place - 0.3}

            decoder = scripted_decoder(target, (1, 2, 1), prompt, choose, draft_top_k=width)
            cycles += decoder.generate(prompt, 20).cycles
        return cycles

    one, two, four = map(total_cycles, (1, 2, 4))
    assert four < two < one


def two_chains(sequence, path):
    """Every other token is sure. The one after it is open, with the wrong one ahead, and surely continued."""
    right = sequence[len(path)]
    if on_track(sequence, path):
        return {wrong(sequence, path): 0.2, right: 0.0} if len(path) % 2 else {right: 9.0}
    return {0: 9.0} if on_track(sequence, path[:-1]) else {}


def test_all_chains_that_agree_live_on(monkeypatch):
    """Guards against collapsing to the best chain after a verification: the other one is right later."""
    assert scripted(two_chains, draft_top_k=2).alpha == 1

    commit = TokenTree.commit

    def collapsing_commit(tree, verdict):
        dead = commit(tree, verdict)
        best = max(tree.frontier, key=lambda node: node.score)
        keep = chain_of(best, tree.root)
        for node in [node for level in tree.levels for node in level if node not in keep]:
            node.alive = False
            tree._release(node)
            dead.add(node.id)
        tree.levels = deque([node] for node in keep)
        return dead

    monkeypatch.setattr(TokenTree, "commit", collapsing_commit)
    assert scripted(two_chains, draft_top_k=2).alpha < 0.8  # the case does tell the two rules apart


def dead_end(special, offers_right):
    """Sure and right, but for position `special`: there A is ahead of B, two good continuations of A crowd B's out,
    and the target says B. The position after `special` is drafted wrong."""

    def choose(sequence, path):
        right = sequence[len(path)]
        if len(path) == special:
            return {wrong(sequence, path): 2.2, (right if offers_right else wrong(sequence, path, 2)): 0.0}
        if len(path) == special + 1:
            return {wrong(sequence, path): 0.0, wrong(sequence, path, 2): 0.0}
        return {right: 9.0}

    return choose


def test_dead_end_is_kept_and_can_be_confirmed():
    """Guards against forgetting a candidate that the beam did not continue: it is stages ahead of a correction.

    Three stages. The prefill's token and tokens 1 to 3 are emitted at cycles 0, 3, 4, 5. Token 4 is B, in cycle 6.
    B has passed two stages by then and completes in cycle 7, which corrects token 5; tokens 6 and 7 follow in 10 and
    11. Without B, token 4 is a correction and needs three cycles: 5, 6, 7 come in 9, 12 and 13.
    """
    special = len(PROMPT) + 4
    kept = scripted(dead_end(special, offers_right=True), draft_top_k=2, count=8)
    assert kept.accepted == [True] * 5 + [False, True, True]
    assert kept.cycles == 11
    corrected = scripted(dead_end(special, offers_right=False), draft_top_k=2, count=8)
    assert corrected.accepted == [True] * 4 + [False, False, True, True]
    assert corrected.cycles == 13


@pytest.mark.parametrize("lag", [0, 1])
def test_fill_of_drafts_behind_a_dead_end(lag):
    """Guards against counting a draft under the wrong fill where the newest token is not at depth 0.

    Tokens 1 to 7 of the case above are drafted with 1, 2, 3, 3, 1, 1, 2 tokens in flight: after the dead end, token 4,
    and after the correction, token 5, there is one.
    """
    run = scripted(dead_end(len(PROMPT) + 4, offers_right=True), draft_top_k=2, count=8, verify_lag=lag)
    assert run.accepted == [True] * 5 + [False, True, True]
    assert run.verified_by_fill == [3, 2, 2]
    assert run.accepted_by_fill == [2, 2, 2]


def test_best_chains_are_chosen_by_summed_log_probability():
    """Guards against scores that are not summed, or not normalised, over a chain; and against doubled candidates."""
    target, prompt, _ = reference("llama")
    tables = {(): {10: 0.0, 20: -1.0}, (10,): {1: 0.0, 2: -0.1, 3: -0.2, 4: -0.3}, (20,): {5: 9.0}}
    decoder = scripted_decoder(
        target, (1, 2, 1), prompt, lambda path: tables.get(tuple(path[len(prompt) + 1 :]), {}), draft_top_k=3
    )
    generation = decoder.start(prompt, 20)
    generation._prefill()
    generation._cycle()
    generation._cycle()
    first, second = generation.tree.levels
    assert [node.token for node in first[:2]] == [10, 20]
    # 10 has .731 and splits it into .211, .191, .173, .156. 20 has .269, and its continuation is sure.
    assert [(node.parent.token, node.token) for node in second] == [(20, 5), (10, 1), (10, 2)]
    scores = torch.tensor([node.score for node in second]).exp()
    torch.testing.assert_close(scores, torch.tensor([0.269, 0.211, 0.191]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("lag", [0, 1])
def test_no_two_siblings_are_the_same_token(lag):
    """Guards against a level that holds a candidate twice: width would be lost, and `verify` could pick either."""
    target, prompt, sequence = reference("llama")
    choose = lambda path: [sequence[len(path)], 1, 2, 3]  # noqa: E731
    decoder = scripted_decoder(target, (1, 2, 1), prompt, choose, draft_top_k=4, verify_lag=lag)
    generation = decoder.start(prompt, 20)
    for _ in generation:
        for level in generation.tree.levels:
            named = [(node.parent.id, node.token) for node in level]
            assert len(set(named)) == len(named) <= 4
            assert len({node.position for node in level}) == 1
