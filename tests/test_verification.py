"""Verification is lossless: what comes out is distributed exactly as the target alone would have it.

The rules are checked by enumeration, where nothing is drawn by chance, and the whole decode loop by chi-square tests
with fixed seeds. Wrong rules go through the same tests, which must catch them.
"""

import itertools
import math

import pytest
import torch

import pipeline_inference
from decoding.sampling import Sampling, Verdict, acceptance_probability, draw, residual, verify
from tests.tiny import scripted_decoder, spd_decoder, tiny_head, tiny_target

NEUTRAL = Sampling(temperature=1.0)
SETTINGS = [
    NEUTRAL,
    Sampling(temperature=0.5),
    Sampling(temperature=2.0, top_k=2),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=0.7, top_k=3, top_p=0.8),
]


def grid(parts, total):
    """Every distribution of `parts` tokens whose probabilities are multiples of 1/total; most have zeros."""
    counts = [c for c in itertools.product(range(total + 1), repeat=parts) if sum(c) == total]
    return torch.tensor(counts, dtype=torch.float32) / total


def one_hot(token, size):
    return torch.nn.functional.one_hot(torch.tensor(token), size).float()


# ---------------------------------------------------------------------------------------------------------------------
# Sampling settings
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": math.nan}, "top_p is nan"),
    ],
)
def test_wrong_sampling_settings_are_refused(values, complaint):
    """Guards against nan, which compares as false with every bound, and against settings that mean nothing."""
    with pytest.raises(ValueError, match=complaint):
        Sampling(**values)


def test_probabilities_by_hand():
    """Guards against another order than temperature, top-k, top-p, and against a lost renormalisation."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    cases = [
        (Sampling(1.0), [0.5, 0.25, 0.125, 0.125]),
        (Sampling(0.5), [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        (Sampling(1.0, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1.0, top_p=0.6), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1.0, top_p=0.5), [1, 0, 0, 0]),
        # Top-k first: 2/3 of what it leaves is enough for top-p, 1/2 of the whole would not be.
        (Sampling(1.0, top_k=2, top_p=0.6), [1, 0, 0, 0]),
        (Sampling(1.0, top_k=99), [0.5, 0.25, 0.125, 0.125]),
    ]
    for sampling, expected in cases:
        torch.testing.assert_close(sampling.probabilities(logits), torch.tensor(expected, dtype=torch.float32))
    both = torch.stack([logits, logits.flip(0)])
    assert torch.equal(NEUTRAL.probabilities(both)[1], NEUTRAL.probabilities(logits.flip(0)))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-37, 1e-50])
def test_tiny_temperature_is_greedy(temperature):
    """Guards against nan from an overflow where a temperature near zero should act like zero."""
    logits = torch.tensor([-1000.0, 3.0, 900.0, 899.99, -torch.inf])
    expected = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    assert torch.equal(Sampling(temperature).probabilities(logits), expected)
    assert Sampling(temperature).draw(logits, torch.Generator().manual_seed(0)) == int(logits.argmax())
    for draft, accepted in ((2, 0), (3, None)):
        q = Sampling(temperature).probabilities(one_hot(draft, 5) * 9)
        assert verify(logits, [draft], q, Sampling(temperature), torch.Generator()) == Verdict(2, accepted)


# ---------------------------------------------------------------------------------------------------------------------
# The ratio test, by enumeration
# ---------------------------------------------------------------------------------------------------------------------


def emitted_distribution(p, q):
    """Sum over the drafts d of q(d) * (kept: d; else: the residual)."""
    correction = residual(p.clone(), q.clone())
    output = torch.zeros_like(p)
    for token in range(len(p)):
        kept = acceptance_probability(float(p[token]), float(q[token]))
        output += q[token] * (kept * one_hot(token, len(p)) + (1 - kept) * correction)
    return output


def test_ratio_test_reproduces_the_target_exactly():
    """Guards against any wrong acceptance or residual: 70 x 70 pairs of distributions over 5 tokens, with zeros."""
    vectors = grid(5, 4)
    for p, q in itertools.product(vectors, vectors):
        torch.testing.assert_close(emitted_distribution(p, q), p, atol=1e-6, rtol=0)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_ratio_test_under_sampling_settings(sampling):
    """Guards against warping the target and the draft differently: -inf logits and filtered tokens included."""
    vectors = sampling.probabilities(grid(5, 4).log())
    assert not vectors.isnan().any()
    for p, q in itertools.product(vectors[::2], vectors[1::2]):
        torch.testing.assert_close(emitted_distribution(p, q), p, atol=1e-6, rtol=0)


def test_residual_of_equal_distributions_is_no_division_by_zero():
    """Guards against 0/0 where rounding alone rejects a draft, and against changing p or q."""
    p = torch.tensor([0.5, 0.5, 0.0])
    assert torch.equal(residual(p, p.clone()), p)
    q = torch.tensor([0.25, 0.0, 0.75])
    before = p.clone(), q.clone()
    torch.testing.assert_close(residual(p, q), torch.tensor([1 / 3, 2 / 3, 0.0]))
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])
    assert (
        acceptance_probability(float(p[1]), float(q[1])) == 1.0
    )  # a token that q excludes is no division by zero either
    assert acceptance_probability(float(p[2]), float(q[2])) == 0.0


class FixedDraws:
    """Takes the place of torch's draws: a given uniform number, and a note of what is sampled from."""

    def __init__(self, monkeypatch):
        self.uniform, self.index, self.asked = 0.0, 0, []
        monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(self.uniform))
        monkeypatch.setattr(torch, "multinomial", self.multinomial)

    def multinomial(self, probabilities, count, generator=None):
        self.asked.append(probabilities.clone())
        return torch.tensor([self.index])


def test_verify_itself_reproduces_the_target_exactly(monkeypatch):
    """Guards against a `verify` that uses its parts wrongly.

    With probabilities in thirds every ratio p/q is a multiple of 1/6, so six uniform numbers, one in the middle of
    each sixth, stand for all of them.
    """
    draws = FixedDraws(monkeypatch)
    vectors = grid(4, 3)
    for p, q in itertools.product(vectors, vectors):
        output = torch.zeros(4)
        for token, sixth in itertools.product(q.nonzero()[:, 0].tolist(), range(6)):
            draws.uniform, draws.asked = (sixth + 0.5) / 6, []
            verdict = verify(p.log(), [token], q.clone(), NEUTRAL)
            if verdict.accepted is None:
                assert len(draws.asked) == 1
                output += q[token] / 6 * draws.asked[0] / draws.asked[0].sum()
            else:
                assert verdict == Verdict(token, 0)
                output[token] += q[token] / 6
        torch.testing.assert_close(output, p, atol=1e-6, rtol=0)


def test_correction_is_never_the_rejected_draft_again(monkeypatch):
    """Guards against counting a rejected draft's own token as its correction."""
    draws = FixedDraws(monkeypatch)
    draws.uniform = 0.99
    p, q = torch.tensor([0.2, 0.4, 0.4]), torch.tensor([0.8, 0.1, 0.1])
    verify(p.log(), [0], q, NEUTRAL)
    torch.testing.assert_close(draws.asked[0], torch.tensor([0.0, 0.5, 0.5]))


# ---------------------------------------------------------------------------------------------------------------------
# Candidates that were chosen, not sampled
# ---------------------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_argmax():
    """Guards against a greedy rule that prefers a candidate, or names the wrong one."""
    logits, greedy = torch.tensor([0.0, 3.0, 2.0, 1.0]), Sampling()
    assert verify(logits, [], None, greedy) == Verdict(1, None)
    assert verify(logits, [2, 3], None, greedy) == Verdict(1, None)
    for place, candidates in enumerate([[1, 2, 3], [2, 1, 3], [2, 3, 1]]):
        assert verify(logits, candidates, None, greedy) == Verdict(1, place)


def test_tree_rule_draws_from_the_target(monkeypatch):
    """Guards against candidates that change what is sampled: the draw is from p, whatever was drafted."""
    draws = FixedDraws(monkeypatch)
    for p in grid(4, 4):
        for candidates in ([], [0], [3, 1], [2, 0, 1, 3]):
            for token in range(4):
                draws.index, draws.asked = token, []
                verdict = verify(p.log(), candidates, None, NEUTRAL)
                expected = candidates.index(token) if token in candidates else None
                assert verdict == Verdict(token, expected)
                assert len(draws.asked) == 1
                torch.testing.assert_close(draws.asked[0], p)


def test_ratio_test_is_wrong_for_a_chosen_candidate():
    """Guards against the ratio test on tree nodes: the counterexample of method.md section 5, and the right rule.

    p = (.5, .3, .2), q = (.7, .2, .1), candidate 0 because it is q's argmax: the ratio test gives (.714, .143, .143).
    """
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])
    kept = acceptance_probability(float(p[0]), float(q[0]))
    wrong = kept * one_hot(0, 3) + (1 - kept) * residual(p, q)
    torch.testing.assert_close(wrong, torch.tensor([0.714, 0.143, 0.143]), atol=5e-4, rtol=0)

    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(3)
    for _ in range(3000):
        counts[verify(p.log(), [0], None, NEUTRAL, generator).token] += 1
    assert abs(excess(counts, p)) < 4
    assert excess(wrong * 3000, p) > 100


# ---------------------------------------------------------------------------------------------------------------------
# The whole loop, by chi-square
# ---------------------------------------------------------------------------------------------------------------------


def excesses(counts, pairs):
    """How much the pairs of tokens, the first of them alone and the second alone deviate from exact [8, 8] `pairs`."""
    views = [torch.flatten, lambda table: table.sum(1), lambda table: table.sum(0)]
    return [excess(view(counts), view(pairs)) for view in views]


def excess(counts, probabilities):
    """The chi-square statistic, as standard deviations above its mean. Cells that expect fewer than 5 are merged."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    cells = expected > 0
    if (observed[~cells] > 0).any():
        return math.inf  # came out, and never should
    freedom = int(cells.sum()) - 1
    statistic = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    return float(statistic - freedom) / math.sqrt(2 * freedom)


PROMPT = [3, 1]


@pytest.fixture(scope="module")
def target():
    """A target of 8 tokens."""
    fields = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    return tiny_target("llama", layers=2, num_attention_heads=2, num_key_value_heads=1, seed=2, **fields)


@torch.no_grad()
def exact_pairs(target, sampling):
    """Probabilities of the second and third new token, [8, 8], from the target's own logits."""

    def following(tokens):
        return sampling.probabilities(target.model(torch.tensor([tokens])).logits[0, -1])

    pairs = torch.zeros(8, 8)
    for first, first_p in enumerate(following(PROMPT)):
        for second, second_p in enumerate(following([*PROMPT, first])):
            pairs[second] += first_p * second_p * following([*PROMPT, first, second])
    return pairs


def sampled_pairs(decoder, runs):
    """Counts of the second and third new token, which the cycles produce, [8, 8], and alpha."""
    counts = torch.zeros(8, 8)
    accepted = 0
    for seed in range(runs):
        decoder.seed = seed
        result = decoder.generate(PROMPT, 3)
        counts[result.tokens[1], result.tokens[2]] += 1
        accepted += result.n_accepted
    return counts, accepted / (2 * runs)


FILTERED = Sampling(temperature=1.3, top_k=5, top_p=0.9)


@pytest.mark.parametrize(
    ("sampling", "width", "draft_vocab"),
    [(NEUTRAL, 1, None), (NEUTRAL, 1, 3), (NEUTRAL, 4, None), (FILTERED, 1, None), (FILTERED, 4, 3)],
    ids=["chain", "reduced-chain", "tree", "filtered-chain", "filtered-reduced-tree"],
)
def test_sampled_outputs_are_distributed_as_the_target(target, sampling, width, draft_vocab):
    """Guards against a loop that verifies with the wrong position, q or rule: 64 pairs of tokens, enumerated."""
    head = tiny_head(target, (1, 1), num_spec_layers=1, draft_vocab=draft_vocab)
    counts, alpha = sampled_pairs(spd_decoder(target, head, sampling=sampling, draft_top_k=width), 450)
    assert 0.1 < alpha < 0.9  # both outcomes were there
    assert max(map(abs, excesses(counts, exact_pairs(target, sampling)))) < 3.5


def accept_always(logits, candidates, q, sampling, generator):
    return Verdict(candidates[0], 0) if candidates else verify(logits, [], None, sampling, generator)


def correct_from_p(logits, candidates, q, sampling, generator):
    """Speculative sampling's usual mistake: the correction from p instead of the residual."""
    p = sampling.probabilities(logits)
    if not candidates or torch.rand((), generator=generator) < acceptance_probability(
        float(p[candidates[0]]), float(q[candidates[0]])
    ):
        return accept_always(logits, candidates, q, sampling, generator)
    return Verdict(int(draw(p, generator)), None)


def prefer_candidates(logits, candidates, q, sampling, generator):
    """A tree rule that lets every candidate try by its own: p(c) for each in turn, then p for the correction."""
    p = sampling.probabilities(logits)
    for place, token in enumerate(candidates):
        if torch.rand((), generator=generator) < p[token]:
            return Verdict(token, place)
    return Verdict(int(draw(p, generator)), None)


@pytest.mark.parametrize(
    ("rule", "width", "is_right"),
    [
        (verify, 1, True),
        (accept_always, 1, False),
        (correct_from_p, 1, False),
        (verify, 4, True),
        (accept_always, 4, False),
        (prefer_candidates, 4, False),
    ],
)
def test_wrong_rules_are_caught(target, rule, width, is_right, monkeypatch):
    """Guards against a chi-square test that would pass anything. The drafter always prefers the same four tokens."""
    monkeypatch.setattr(pipeline_inference, "verify", rule)
    decoder = scripted_decoder(
        target, (1, 1), PROMPT, lambda path: {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0}, sampling=NEUTRAL, draft_top_k=width
    )
    counts, _ = sampled_pairs(decoder, 250)
    deviation = max(map(abs, excesses(counts, exact_pairs(target, NEUTRAL))))
    assert deviation < 3.5 if is_right else deviation > 8
