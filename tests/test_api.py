"""Decoding from Python: what a prompt may be, how long it may be, and one generation at a time."""

import threading
import time

import numpy as np
import pytest
import torch

from baselines.prompt_lookup import PromptLookup
from decoding.sampling import Sampling
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter, logit_gap
from tests.tiny import hf_greedy, random_prompt, spd_decoder, tiny_head, tiny_target

IDS = [5, 17, 3]
LIMIT = 64  # positions of the target


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", max_position_embeddings=LIMIT)


@pytest.fixture(scope="module")
def head(target):
    return tiny_head(target, (1, 3))


def decoders(target, head):
    """Makers of the two decoders that a user builds."""
    return {
        "standard": lambda: Decoder(LocalExecutor(target, (4,)), max_positions=LIMIT),
        "pipeline": lambda: spd_decoder(target, head, max_positions=LIMIT),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(IDS),
        torch.tensor(IDS),
        torch.tensor([IDS], dtype=torch.int32),
        np.array(IDS),
        np.array([IDS], dtype=np.uint16),
        [IDS],
        [np.int64(token) for token in IDS],
    ],
    ids=["tuple", "tensor", "tensor [1, S]", "array", "array [1, S]", "nested", "numpy integers"],
)
def test_prompts_as_tokenizers_return_them(target, head, prompt):
    """Guards against "Boolean value of Tensor is ambiguous" for what `return_tensors="pt"` gives."""
    expected = hf_greedy(target.model, IDS, 4)
    for make in decoders(target, head).values():
        assert make().generate(prompt, 4).tokens == expected
    assert PromptLookup(target, 2, sampling=Sampling()).generate(prompt, 4).tokens == expected


BAD_PROMPTS = [
    ("Hello", "the prompt is a str that holds no plain row of token ids"),
    (["Hello"], "the prompt is a list that holds no plain row"),
    ([1, 61], "token id 61, but the target's ids are 0 .. 60"),
    ([1, -1], "token id -1, but"),
    (torch.tensor([2**40]), "token id 1099511627776, but"),
    ([1, 2**70], "the prompt is a list that holds no plain row"),
    (torch.tensor([1.0, 2.0]), "the prompt is a Tensor that holds no plain row"),
    (np.array([True]), "the prompt is a ndarray that holds no plain row"),
    ([[1, 2], [3, 4]], "the prompt is a list that holds no plain row"),
    ([[1, 2], [3]], "the prompt is a list that holds no plain row"),
    ({"input_ids": IDS}, "the prompt is a dict that holds no plain row"),
    (torch.tensor(3), "the prompt is a Tensor that holds no plain row"),
    (None, "the prompt is a NoneType that holds no plain row"),
    ([], "the prompt is empty"),
    (torch.tensor([]), "the prompt is empty"),
    ([[]], "the prompt is empty"),
]


@pytest.mark.parametrize(("prompt", "complaint"), BAD_PROMPTS, ids=[str(prompt) for prompt, _ in BAD_PROMPTS])
def test_other_prompts_are_refused_in_plain_words(target, head, prompt, complaint):
    """Guards against errors of other libraries ("index out of range in self"), and against negative ids that run."""
    for make in decoders(target, head).values():
        with pytest.raises(ValueError, match=complaint.replace(".", r"\.")):
            make().start(prompt, 4)
    with pytest.raises(ValueError, match=complaint.replace(".", r"\.")):
        PromptLookup(target, 2, sampling=Sampling()).generate(prompt, 4)


@pytest.mark.parametrize("count", [0, -1, 2.5, "4", None])
def test_lengths_are_whole_numbers(target, head, count):
    """Guards against a generation that never reaches 2.5 tokens and so never ends."""
    for make in decoders(target, head).values():
        with pytest.raises(ValueError, match=f"max_new_tokens is {count}: "):
            make().start(IDS, count)


@pytest.mark.parametrize("length", [LIMIT, LIMIT - 1, LIMIT - 5])
@pytest.mark.parametrize("settings", [{}, {"draft_top_k": 3}, {"verify_lag": 1}], ids=str)
def test_the_last_token_needs_no_position(target, head, length, settings):
    """Guards against a prompt that fills the target's positions and is refused, though `generate` continues it."""
    prompt, count = random_prompt(length), LIMIT - length + 1
    expected = hf_greedy(target.model, prompt, count)
    for decoder in (
        Decoder(LocalExecutor(target, (4,)), max_positions=LIMIT),
        spd_decoder(target, head, max_positions=LIMIT, **settings),
    ):
        assert decoder.generate(prompt, count).tokens == expected
        with pytest.raises(ValueError, match=f"max_new_tokens is {count + 1}: with a prompt of {length} tokens"):
            decoder.start(prompt, count + 1)


# ---------------------------------------------------------------------------------------------------------------------
# One generation at a time
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["standard", "pipeline"])
def test_a_generation_that_was_replaced_does_not_go_on(target, head, name):
    """Guards against wrong tokens, silently, of a generation that goes on in a later one's cache."""
    decoder = decoders(target, head)[name]()
    events = iter(decoder.start(IDS, 20))
    assert [next(events).token for _ in range(5)] == hf_greedy(target.model, IDS, 5)
    other = random_prompt(7)
    assert decoder.generate(other, 20).tokens == hf_greedy(target.model, other, 20)  # left half-way: no obstacle
    with pytest.raises(RuntimeError, match="one generation at a time"):
        next(events)


@pytest.mark.parametrize("shared", ["executor", "drafter"])
def test_decoders_that_share_a_part_take_turns(target, head, shared):
    """Guards against the same for two decoders over one executor, or with one drafter."""
    executors = [LocalExecutor(target, (1, 3), head.config.anchors) for _ in range(2)]
    drafters = [SPDDrafter(head, target, (1, 3)) for _ in range(2)]
    parts = zip(executors[:1] * 2 if shared == "executor" else executors, drafters[:1] * 2, strict=True)
    first, second = (Decoder(executor, drafter) for executor, drafter in parts)
    events = iter(first.start(IDS, 20))
    next(events)
    second.generate(IDS, 20)
    with pytest.raises(RuntimeError, match="one generation at a time"):
        next(events)


def test_the_logit_gap_takes_the_executor_too(target):
    """Guards against a paused generation that goes on in the cache of a comparison."""
    decoder = Decoder(LocalExecutor(target, (4,)))
    events = iter(decoder.start(IDS, 20))
    next(events)
    logit_gap(decoder.executor, IDS, 1, 2)
    with pytest.raises(RuntimeError, match="one generation at a time"):
        next(events)


def test_generations_on_executors_of_their_own_do_not_meet(target, head):
    """Guards against a refusal of two decoders on one target, whose generations are both right."""
    makers = decoders(target, head)
    running = [iter(makers[name]().start(IDS, 20)) for name in ("standard", "pipeline", "pipeline")]
    expected = hf_greedy(target.model, IDS, 20)
    for token in expected:
        assert [next(events).token for events in running] == [token] * 3


def test_a_thread_cannot_start_in_the_middle_of_a_step(target):
    """Guards against a cache that is replaced while another thread's generation runs on it."""
    decoder, refused, expected = Decoder(LocalExecutor(target, (4,))), [], hf_greedy(target.model, IDS, 5)

    def start_another(*_):
        def attempt():
            try:
                decoder.generate(IDS, 3)
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()

    hook = target.layers[2].register_forward_hook(start_another)
    try:
        assert decoder.generate(IDS, 5).tokens == expected
    finally:
        hook.remove()
    assert refused
    assert set(refused) == {"another thread is decoding on this executor: one generation at a time"}


def test_time_between_steps_is_the_callers(target, head):
    """Guards against a decode speed that falls with the time the caller needs to print a token."""
    for make in decoders(target, head).values():
        generation = make().start(IDS, 5)
        begun = time.perf_counter()
        for _ in generation:
            time.sleep(0.02)
        assert generation.result.timings.decode < time.perf_counter() - begun - 4 * 0.02
