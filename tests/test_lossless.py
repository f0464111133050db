"""Greedy output is the target's own, token for token, and the schedule costs exactly the cycles it should.

References: `model.generate` of an untouched copy of the model, and a plain simulation of the schedule.
"""

import itertools
import random
from functools import lru_cache

import pytest
import torch

from decoding.result import TokenEvent
from decoding.sampling import Sampling
from pipeline_inference import Decoder, LocalExecutor
from pipeline_model import Target
from tests.tiny import (
    FAMILIES,
    VOCAB,
    ScriptedDrafter,
    hf_greedy,
    oracle,
    random_prompt,
    scripted_decoder,
    spd_decoder,
    tiny_head,
    tiny_model,
    tiny_target,
)

TOKENS = 18


@lru_cache
def models(family, tied=False):
    """A target, and the same model as the library has it."""
    return tiny_target(family, tied=tied), tiny_model(family, tied=tied)


@lru_cache
def reference(family, tied, prompt_length, count=TOKENS):
    """A prompt, and it with what the library generates after it."""
    prompt = random_prompt(prompt_length, seed=prompt_length)
    return prompt, prompt + hf_greedy(models(family, tied)[1], prompt, count)


# ---------------------------------------------------------------------------------------------------------------------
# Every factor with every family
# ---------------------------------------------------------------------------------------------------------------------

FACTORS = {
    "sizes": [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1), (1, 3), (1, 2, 1)],
    "width": [1, 2, 4],
    "verify_lag": [0, 1],
    "prompt": [1, 2, "n", 70],
    "tied": [False, True],
    "drafter": ["head", "shallow head", "reduced head", "reduced shallow head", "oracle", "wrong", "mixed", "mixed"],
}


def covering_sample(family):
    """Combinations in which each value of each factor appears about as often as the others.

    Twice as many for one family of each kind of layer memory; the others differ within the library's layers only.
    """
    count = 24 if family in ("llama", "mistral", "qwen3_5") else 12
    rng = random.Random(family)
    columns = []
    for values in FACTORS.values():
        column = list(itertools.islice(itertools.cycle(values), count))
        rng.shuffle(column)
        columns.append(column)
    return [(family, *row) for row in zip(*columns, strict=True)]


CASES = [case for family in FAMILIES for case in covering_sample(family)]


def rank_by_position(kind, width):
    """Where among `width` candidates the scripted drafters put the right token."""
    if kind == "mixed":
        return lambda position: random.Random(position).choice([0, 0, *range(width), width])
    return lambda position: 0 if kind == "oracle" else -1


@pytest.mark.parametrize(
    ("family", "sizes", "width", "lag", "length", "tied", "drafter"),
    CASES,
    ids=["-".join(map(str, case)).replace(" ", "") for case in CASES],
)
def test_greedy_output_is_the_targets_own(family, sizes, width, lag, length, tied, drafter):
    """Guards against any combination in which a draft, a rollback or a cache changes the output."""
    target, _ = models(family, tied)
    prompt, sequence = reference(family, tied, len(sizes) if length == "n" else length)
    settings = {"draft_top_k": width, "verify_lag": lag}
    if drafter.endswith("head"):
        head = tiny_head(target, sizes, draft_vocab=20 if "reduced" in drafter else None)
        decoder = spd_decoder(target, head, use_deepest="shallow" not in drafter, **settings)
    else:
        choose = oracle(sequence, rank=rank_by_position(drafter, width), width=width)
        decoder = scripted_decoder(target, sizes, prompt, choose, **settings)
    result = decoder.generate(prompt, TOKENS)

    assert result.tokens == sequence[len(prompt) :]
    assert len(result.accepted) == TOKENS
    assert result.n_verified == result.new_tokens == TOKENS - 1
    assert result.n_accepted == sum(result.accepted) - 1
    alone = len(sizes) + lag  # cycles from a correction to the next token
    if drafter == "oracle":
        assert result.alpha == 1
        assert result.cycles == alone + TOKENS - 2
    if drafter == "wrong":
        assert result.alpha == 0
        assert result.cycles == alone * (TOKENS - 1)


def test_the_sample_covers_every_value():
    """Guards against a sample that leaves a factor's value out for some family."""
    for family in FAMILIES:
        cases = [case[1:] for case in CASES if case[0] == family]
        for values, column in zip(FACTORS.values(), zip(*cases, strict=True), strict=True):
            assert set(values) == set(column)


@pytest.mark.parametrize("width", [1, 4])
def test_draft_ids_are_translated(width):
    """Guards against draft ids that are taken for the target's: output would stay right, and no draft ever would be."""
    target, _ = models("llama")
    prompt, sequence = reference("llama", False, 9)
    draft_ids = sorted({*sequence, 60})
    drafter = ScriptedDrafter(lambda path: [draft_ids.index(sequence[len(path)])], len(draft_ids)).with_prompt(prompt)
    drafter.draft_token_ids = torch.tensor(draft_ids)
    decoder = Decoder(LocalExecutor(target, (2, 2)), drafter, draft_top_k=width)
    result = decoder.generate(prompt, TOKENS)
    assert result.tokens == sequence[len(prompt) :]
    assert result.alpha == 1


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_scaled_rotary_embeddings(rope_type):
    """Guards against a rotary table that loses the scaling of long-context targets."""
    scaling = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if rope_type == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "linear":
        del scaling["original_max_position_embeddings"]
    prompt = random_prompt(70)
    expected = hf_greedy(tiny_model("llama", rope_parameters=scaling), prompt, 10)
    assert expected != hf_greedy(tiny_model("llama"), prompt, 10)
    target = tiny_target("llama", rope_parameters=scaling)
    head = tiny_head(target, (2, 2))
    for width in (1, 4):
        assert spd_decoder(target, head, draft_top_k=width).generate(prompt, 10).tokens == expected


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_baseline_is_the_same_loop(family):
    """Guards against a baseline of its own: one stage, no drafter, one cycle a token, nothing verified."""
    target, _ = models(family)
    prompt, sequence = reference(family, False, 9)
    for sizes in ((4,), (2, 2)):
        result = Decoder(LocalExecutor(target, sizes)).generate(prompt, TOKENS)
        assert result.tokens == sequence[len(prompt) :]
        assert result.cycles == len(sizes) * (TOKENS - 1)
        assert result.n_verified == 0
        assert result.alpha is None


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("width", [1, 4])
def test_bfloat16_runs(family, width):
    """Guards against a float32 tensor somewhere in the loop. Tokens may differ by rounding; the first must not."""
    target = Target(tiny_model(family).to(torch.bfloat16))
    head = tiny_head(target, (2, 2)).to(torch.bfloat16)
    prompt = random_prompt(9)
    result = spd_decoder(target, head, draft_top_k=width).generate(prompt, 10)
    assert len(result.tokens) == 10
    baseline = Decoder(LocalExecutor(target, (4,))).generate(prompt, 10)
    assert result.tokens[0] == baseline.tokens[0]


# ---------------------------------------------------------------------------------------------------------------------
# The schedule
# ---------------------------------------------------------------------------------------------------------------------


def simulate(right, num_stages, lag):
    """The schedule, one cycle at a time: accepted flags and cycles for drafts that are `right[i]` at position i.

    Position 0 is the prefill's token. `depth` has every token from the newest emitted one on, and how many stages it
    has passed; with a lag its count runs on, and the verdict comes that much later.
    """
    flags, cycles, depth = [True], 0, {0: 0}
    while len(flags) < len(right):
        cycles += 1
        newest = max(depth)
        for position in depth:
            depth[position] += 1
        depth[newest + 1] = 0
        emitted = len(flags) - 1
        if depth[emitted] >= num_stages + lag:
            flags.append(right[emitted + 1])
            if not flags[-1]:
                depth = {emitted + 1: 0}
    return flags, cycles


def test_the_simulation_against_the_stated_costs():
    """Guards against a simulation that shares a fault with the loop: the costs in method.md, token by token."""
    for num_stages, lag in itertools.product([1, 2, 3, 5], [0, 1]):
        for right in itertools.product([True, False], repeat=5):
            alone = num_stages + lag
            costs = [1 if before else alone for before in (False, *right[:-1])]
            assert simulate((True, *right), num_stages, lag) == ([True, *right], sum(costs))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_every_pattern_of_right_and_wrong_drafts(family, num_stages, lag):
    """Guards against a rollback that is wrong for some pattern within a pipeline length; counts every cycle."""
    target, _ = models(family)
    sizes = {2: (2, 2), 3: (1, 2, 1)}[num_stages]
    window = num_stages + 2
    count = 1 + window + num_stages  # the pipeline is full again after the window, or empties
    prompt, sequence = reference(family, False, 5)
    for pattern in itertools.product([True, False], repeat=window):
        right = (True, *pattern, *[True] * num_stages)
        choose = oracle(sequence, rank=lambda position, right=right: 0 if right[position - len(prompt)] else -1)
        result = scripted_decoder(target, sizes, prompt, choose, verify_lag=lag).generate(prompt, count)
        flags, cycles = simulate(right, num_stages, lag)
        assert result.tokens == sequence[len(prompt) :][:count], pattern
        assert result.accepted == flags, pattern
        assert result.cycles == cycles, pattern


@pytest.mark.parametrize("lag", [0, 1])
def test_fill_of_every_draft(lag):
    """Guards against alpha by fill that counts a draft under another number of tokens in flight than it was made with.

    Three stages, the prefill's token, five right drafts and a wrong one: the drafts are made with 1, 2, 3, 3, 3, 3
    tokens in flight; after the correction it starts over with 1.
    """
    target, _ = models("llama")
    prompt, sequence = reference("llama", False, 5)
    choose = oracle(sequence, rank=lambda position: -1 if position == 5 + 6 else 0)
    decoder = scripted_decoder(target, (1, 2, 1), prompt, choose, verify_lag=lag)
    result = decoder.generate(prompt, 9)
    assert result.accepted == [True] * 6 + [False] + [True] * 2
    assert result.verified_by_fill == [2, 2, 4]
    assert result.accepted_by_fill == [2, 2, 3]
    assert result.alpha_by_fill == [1.0, 1.0, 0.75]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (1, 3)])
def test_metrics_of_a_perfect_and_a_useless_drafter(sizes):
    """Guards against metrics that count the prefill's token, or the wrong factor for an uneven split."""
    target, _ = models("llama")
    stages, factor = len(sizes), 4 / max(sizes)
    prompt, sequence = reference("llama", False, 9)
    perfect = scripted_decoder(target, sizes, prompt, oracle(sequence)).generate(prompt, TOKENS)
    assert perfect.equivalent_accept_length == factor * (TOKENS - 1) / (stages + TOKENS - 2)
    # A head of one layer more than the largest stage makes every cycle longer by one layer.
    layers = max(sizes)
    assert perfect.theoretical_speedup(layers) == pytest.approx(perfect.equivalent_accept_length)
    shorter = perfect.equivalent_accept_length * layers / (layers + 1)
    assert perfect.theoretical_speedup(layers + 1) == pytest.approx(shorter)

    useless = scripted_decoder(target, sizes, prompt, oracle(sequence, rank=lambda _: -1)).generate(prompt, TOKENS)
    assert useless.equivalent_accept_length == factor / stages
    assert useless.accepted == [True] + [False] * (TOKENS - 1)
    assert useless.tokens == perfect.tokens


# ---------------------------------------------------------------------------------------------------------------------
# Ends and limits
# ---------------------------------------------------------------------------------------------------------------------


def first_seen(tokens, low):
    """The first index >= low whose token has not come before."""
    return next(index for index in range(low, len(tokens)) if tokens[index] not in tokens[:index])


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize(("width", "lag"), [(1, 0), (1, 1), (4, 0), (4, 1)])
def test_stops_at_the_first_end_token(family, width, lag):
    """Guards against returning, verifying or counting what was in flight after an end token, and against knowing
    only one of several end tokens."""
    target, model = models(family)
    prompt, sequence = reference(family, False, 9)
    tokens = sequence[len(prompt) :]
    at = first_seen(tokens, 4)
    ends = [tokens[at], next(token for token in range(VOCAB) if token not in tokens), tokens[first_seen(tokens, at)]]
    expected = hf_greedy(model, prompt, TOKENS, eos=ends)
    assert expected == tokens[: at + 1]
    for sizes in ((4,), (2, 2), (1, 1, 1, 1)):
        choose = oracle(sequence, width=width)
        decoder = scripted_decoder(target, sizes, prompt, choose, draft_top_k=width, verify_lag=lag, eos_token_ids=ends)
        result = decoder.generate(prompt, TOKENS)
        assert result.tokens == expected
        assert result.stop_reason == "eos"
        assert result.n_verified == result.n_accepted == at
        assert result.cycles == len(sizes) + lag + at - 1


def test_end_token_from_the_prefill():
    """Guards against decoding on after an end token that no cycle produced."""
    target, _ = models("llama")
    prompt, sequence = reference("llama", False, 9)
    head = tiny_head(target, (2, 2))
    result = spd_decoder(target, head, eos_token_ids=[sequence[len(prompt)]]).generate(prompt, TOKENS)
    assert result.tokens == sequence[len(prompt) :][:1]
    assert (result.stop_reason, result.cycles, result.n_verified) == ("eos", 0, 0)
    assert result.alpha is None
    assert result.equivalent_accept_length is None
    assert result.tokens_per_second is None


def test_end_token_as_a_correction():
    """Guards against an end token that is noticed only when it was drafted."""
    target, _ = models("llama")
    prompt, sequence = reference("llama", False, 9)
    tokens = sequence[len(prompt) :]
    at = first_seen(tokens, 3)
    choose = oracle(sequence, rank=lambda position: -1)
    decoder = scripted_decoder(target, (2, 2), prompt, choose, eos_token_ids=[tokens[at]])
    assert decoder.generate(prompt, TOKENS).tokens == tokens[: at + 1]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("width", [1, 4])
def test_exact_number_of_new_tokens(count, width):
    """Guards against a token too many or too few, and against verifying drafts past the end."""
    target, _ = models("llama")
    prompt, sequence = reference("llama", False, 9)
    for sizes, lag in itertools.product([(4,), (2, 2), (1, 1, 1, 1)], [0, 1]):
        choose = oracle(sequence, width=width)
        decoder = scripted_decoder(target, sizes, prompt, choose, draft_top_k=width, verify_lag=lag)
        result = decoder.generate(prompt, count)
        assert result.tokens == sequence[len(prompt) :][:count]
        assert result.stop_reason == "length"
        assert result.n_verified == result.new_tokens == count - 1
        assert result.cycles == (len(sizes) + lag + count - 2 if count > 1 else 0)


def test_position_limit():
    """Guards against running past the target's positions, and against refusing what just fits."""
    target, model = models("llama")
    prompt = random_prompt(20)
    decoder = spd_decoder(target, tiny_head(target, (2, 2)), max_positions=30)
    with pytest.raises(ValueError, match=r"max_new_tokens is 12: with a prompt of 20 tokens.*limit of 30"):
        decoder.start(prompt, 12)
    assert decoder.generate(prompt, 11).tokens == hf_greedy(model, prompt, 11)  # the last one is never run


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"draft_top_k": 0}, "draft_top_k is 0"),
        ({"verify_lag": 2}, "verify_lag is 2"),
        ({"verify_lag": -1}, "verify_lag is -1"),
    ],
)
def test_wrong_decoder_settings_are_refused(change, complaint):
    """Guards against settings that would be taken for others."""
    with pytest.raises(ValueError, match=complaint):
        Decoder(LocalExecutor(models("llama")[0], (4,)), **change)


def test_wrong_requests_are_refused():
    """Guards against a crash in the middle of an empty prompt or an empty generation."""
    decoder = Decoder(LocalExecutor(models("llama")[0], (4,)))
    with pytest.raises(ValueError, match="prompt is empty"):
        decoder.generate([], 3)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        decoder.generate([1], 0)


# ---------------------------------------------------------------------------------------------------------------------
# Streaming, seeds, debugging
# ---------------------------------------------------------------------------------------------------------------------


def test_streamed_events_are_the_result():
    """Guards against a stream that differs from the result, or comes all at the end."""
    target, _ = models("llama")
    prompt, sequence = reference("llama", False, 9)
    choose = oracle(sequence, rank=rank_by_position("mixed", 1))
    generation = scripted_decoder(target, (2, 2), prompt, choose).start(prompt, TOKENS)
    events = []
    for event in generation:
        events.append(event)
        assert generation.result.tokens == [event.token for event in events]
    result = generation.result
    assert events[0] == TokenEvent(sequence[len(prompt)], len(prompt), True, 0)
    assert [event.position for event in events] == list(range(len(prompt), len(prompt) + TOKENS))
    assert [event.accepted for event in events] == result.accepted
    assert len({event.cycle for event in events}) == TOKENS  # at most one per cycle
    assert events[-1].cycle == result.cycles
    assert 0 < result.alpha < 1


def test_a_stream_can_be_finished():
    """Guards against a generation that is looked at and then finished: either is fine, a wrong result is not."""
    target, _ = models("llama")
    prompt, sequence = reference("llama", False, 9)
    generation = spd_decoder(target, tiny_head(target, (2, 2))).start(prompt, TOKENS)
    stream = iter(generation)
    assert [next(stream).token, next(stream).token] == sequence[len(prompt) :][:2]
    assert generation.finish().tokens == sequence[len(prompt) :]
    assert generation.finish().tokens == sequence[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("width", [1, 4])
def test_abandoned_stream_leaves_nothing_behind(family, width):
    """Guards against state of one generation that leaks into the next one of the same decoder."""
    target, _ = models(family)
    prompt, sequence = reference(family, False, 9)
    decoder = spd_decoder(target, tiny_head(target, (1, 1, 2)), draft_top_k=width)
    for event in decoder.start(random_prompt(30, seed=8), TOKENS):
        if event.cycle > 5:
            break
    fresh = spd_decoder(target, tiny_head(target, (1, 1, 2)), draft_top_k=width).generate(prompt, TOKENS)
    again = decoder.generate(prompt, TOKENS)
    assert again.tokens == sequence[len(prompt) :]
    assert (again.tokens, again.accepted, again.cycles) == (fresh.tokens, fresh.accepted, fresh.cycles)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize(("width", "lag", "reduced"), [(1, 0, False), (1, 1, True), (4, 0, True), (4, 1, False)])
def test_seeds_reproduce_and_differ(family, width, lag, reduced):
    """Guards against draws that ignore the seed or depend on the global generator; sampling runs for every kind."""
    target, _ = models(family)
    head = tiny_head(target, (2, 1, 1), draft_vocab=20 if reduced else None)

    def sample(seed):
        sampling = Sampling(temperature=1.0, top_k=30, top_p=0.95)
        decoder = spd_decoder(target, head, sampling=sampling, draft_top_k=width, verify_lag=lag, seed=seed)
        result = decoder.generate(random_prompt(5), 12)
        return result.tokens, result.accepted, result.cycles

    first = sample(1)
    torch.manual_seed(99)
    assert sample(1) == first
    assert len({tuple(sample(seed)[0]) for seed in range(1, 4)}) == 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_unverified_output_is_the_drafters_own(sampling):
    """Guards against `verify_drafts=False` that still lets the target speak: after the prefill it is the drafter's."""
    target, _ = models("llama")
    prompt, sequence = reference("llama", False, 9)
    decoder = scripted_decoder(
        target, (2, 2), prompt, lambda path: {(3 * path[-1] + 1) % VOCAB: 50.0}, verify_drafts=False, sampling=sampling
    )
    result = decoder.generate(prompt, 10)
    if sampling.greedy:
        assert result.tokens[0] == sequence[len(prompt)]
    assert result.tokens[1:] == [(3 * token + 1) % VOCAB for token in result.tokens[:-1]]
    assert result.alpha == 1
    assert result.cycles == 2 + 10 - 2
