"""A generation that goes on from the caches of the one before it: nothing runs twice, and nothing else comes out."""

import pytest
import torch

from decoding.sampling import Sampling
from decoding.stage import Stage
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from tests.tiny import VOCAB, hf_greedy, random_prompt, spd_decoder, tiny_head, tiny_target

SIZES = (1, 2, 1)


class Oracle(SPDDrafter):
    """The head at work, but what it drafts is right at most positions: accepted and rejected drafts in one run."""

    sequence = ()  # what the target will write, prompt included
    every = 4  # so many drafts, one is wrong

    def draft(self, tree):
        logits = super().draft(tree).fill_(-30.0)
        position = tree.frontier[0].position + 1
        if position < len(self.sequence):
            token = self.sequence[position] + (position % self.every == 0)
            logits[:, token % VOCAB] = 0.0
            logits[:, (token + 7) % VOCAB] = -1.0
        return logits


@pytest.fixture
def prefilled(monkeypatch):
    """Positions that prompts ran, a list a stage call."""
    ran = []
    prefill = Stage.prefill

    def note(stage, hidden, start):
        ran.append((stage.layers.start, list(range(start, start + len(hidden)))))
        return prefill(stage, hidden, start)

    monkeypatch.setattr(Stage, "prefill", note)
    return ran


def positions(ran):
    """Those of the first stage, in order; empties the list."""
    found = [position for first, part in ran if first == 0 for position in part]
    ran.clear()
    return found


def oracle_decoder(target, **settings):
    head = tiny_head(target, SIZES)
    drafter = Oracle(head, target, SIZES, settings.pop("use_deepest", None))
    return Decoder(LocalExecutor(target, SIZES, head.config.anchors), drafter, **settings)


def turns(decoder, target, lengths=(9, 14, 7), cut=None):
    """A conversation: each prompt is everything before it and some more tokens. Yields (prompt, generation)."""
    sequence, last = [], None
    for number, length in enumerate(lengths):
        prompt = sequence + random_prompt(length, seed=number)
        if decoder.drafter is not None:
            decoder.drafter.sequence = prompt + hf_greedy(target.model, prompt, 12)
        generation = decoder.start(prompt, 12, after=last, checkpoint=len(prompt) - 2)
        for event in generation:
            if number == cut and event.position == len(prompt) + 6:
                generation.stop()
        yield prompt, generation
        sequence, last = prompt + generation.result.tokens, generation


@pytest.mark.parametrize(
    ("family", "width", "lag", "deepest", "cut"),
    [
        ("llama", 1, 0, True, None),
        ("llama", 4, 1, False, 1),
        ("mistral", 1, 1, False, 1),
        ("mistral", 4, 0, True, None),
        ("qwen3_5", 1, 0, False, 1),
        ("qwen3_5", 4, 1, True, None),
    ],
)
def test_a_conversation_runs_no_turn_twice(prefilled, family, width, lag, deepest, cut):
    """Guards against turns that run again, and against keys, states and rows of the head that are not the prefix's."""
    target = tiny_target(family)
    decoder = oracle_decoder(target, draft_top_k=width, verify_lag=lag, use_deepest=deepest)
    known = 0
    for prompt, generation in turns(decoder, target, cut=cut):
        tokens = generation.result.tokens
        assert tokens == hf_greedy(target.model, prompt, 12)[: len(tokens)]
        ran = positions(prefilled)
        assert ran == list(range(generation.result.kept_tokens, len(prompt)))
        # The newest token had not run, unless its verdict came a cycle after it.
        assert max(0, known - 1) <= generation.result.kept_tokens <= max(0, known - 1 + lag)
        known = len(prompt) + len(tokens)
        check_head_rows(target, decoder.drafter, prompt)
        prefilled.clear()


def check_head_rows(target, drafter, prompt):
    """What the head keeps of a prompt is what it makes of it anew."""
    fresh = oracle_decoder(target, use_deepest=drafter.use_deepest)
    fresh.start(prompt, 1).finish()
    count = len(prompt) - len(SIZES) + 1
    ours, theirs = drafter._cache, fresh.drafter._cache
    assert min(ours.length, theirs.length) >= count
    torch.testing.assert_close(ours._keys[..., :count, :], theirs._keys[..., :count, :], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours._values[..., :count, :], theirs._values[..., :count, :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_prompt_that_differs_earlier_keeps_what_is_the_same(prefilled, family):
    """Guards against reuse past the first token that differs, and states of tokens that are no longer there."""
    target = tiny_target(family)
    decoder, generation = oracle_decoder(target, draft_top_k=4), None
    for first, checkpoint, kept in [(20, 12, 0), (17, 13, 12), (14, 0, 13), (15, 0, 13), (5, 0, 0)]:
        # Every prompt begins as the one before it, up to the token at `first`.
        prompt = random_prompt(first, seed=0) + random_prompt(8, seed=first)
        generation = decoder.start(prompt, 6, after=generation, checkpoint=checkpoint)
        assert generation.finish().tokens == hf_greedy(target.model, prompt, 6)
        expected = kept if family == "qwen3_5" else {20: 0, 17: 17, 14: 14, 15: 14, 5: 5}[first]
        assert generation.result.kept_tokens == expected
        assert positions(prefilled) == list(range(expected, len(prompt)))


def test_the_target_alone_goes_on_too(prefilled):
    """Guards against a baseline that runs the conversation again while the pipeline does not."""
    target = tiny_target("qwen3_5")
    decoder = Decoder(LocalExecutor(target, (4,)))
    ran = []
    for prompt, generation in turns(decoder, target):
        assert generation.result.tokens == hf_greedy(target.model, prompt, 12)
        ran.append(len(positions(prefilled)))
    assert ran == [9, 14 + 1, 7 + 1]


def test_caches_that_somebody_else_used_are_not_reused():
    """Guards against keys of another text: of a generation in between, of another decoder, of one that did not run."""
    target = tiny_target("llama")
    decoder = oracle_decoder(target)
    prompt = random_prompt(12)
    first = decoder.start(prompt, 4)
    first.finish()
    assert first.kept_for([*prompt, *range(9)]).length == 12
    decoder.generate(random_prompt(12, seed=5), 4)
    unused = decoder.start(prompt, 4)
    for last in (first, unused, spd_decoder(target, tiny_head(target, SIZES)).start(prompt, 4)):
        generation = decoder.start(prompt, 4, after=last)
        assert generation.finish().tokens == first.result.tokens
        assert generation.result.kept_tokens == 0


def test_a_sampled_conversation_is_the_one_that_runs_anew():
    """Guards against random numbers that depend on what was kept: the same seed draws the same answer."""
    target = tiny_target("llama")
    for decoder in (
        oracle_decoder(target, sampling=Sampling(0.8), draft_top_k=4),
        Decoder(LocalExecutor(target, (4,))),
    ):
        decoder.sampling = Sampling(0.8)
        for prompt, generation in turns(decoder, target, lengths=(9, 14)):
            decoder_anew = Decoder(LocalExecutor(target, (4,)), sampling=Sampling(0.8))
            assert generation.result.tokens == decoder_anew.generate(prompt, 12).tokens


def test_a_stopped_generation_has_its_times():
    """Guards against an answer cut short that has no speed, or emits one token more."""
    decoder = oracle_decoder(tiny_target("llama"))
    generation = decoder.start(random_prompt(9), 20)
    for event in generation:
        if event.position == 9 + 5:
            generation.stop()
    result = generation.result
    assert (len(result.tokens), result.stop_reason) == (6, "stopped")
    assert result.tokens_per_second > 0
