"""Batches of prompts: what the target writes for each one alone, whatever stands beside it."""

import pytest
import torch
from torch import Tensor

from pipeline_inference import Sampling
from tests.tiny import hf_greedy, random_prompt, tiny_model, tiny_target
from training import batch_generation
from training.batch_generation import Throughput, draw_rows, generate_batch, uniform_draws

PROMPTS = [random_prompt(length, seed=length) for length in (3, 9, 14, 5, 9)]
ENDS = tuple(range(12))  # so many that the rows end one after the other


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3 window", "qwen3_moe", "qwen3_5"])
def test_greedy_answers_equal_generate(family, attention):
    """Guards padding (masks, positions, linear-attention states), windows, and rows that move when others end."""
    target, model = tiny_target(family, attention=attention), tiny_model(family, attention=attention)
    assert generate_batch(target, PROMPTS, 16) == [hf_greedy(model, prompt, 16) for prompt in PROMPTS]
    ended = generate_batch(target, PROMPTS, 16, ENDS)
    assert ended == [hf_greedy(model, prompt, 16, eos=list(ENDS)) for prompt in PROMPTS]
    assert len(set(map(len, ended))) > 1


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_draw_depends_on_seed_and_prompt_alone(family):
    """Guards --temperature: the same answers in another order and beside other prompts, others with another seed."""
    target, settings = tiny_target(family), {"end": ENDS, "sampling": Sampling(1.0)}
    answers = generate_batch(target, PROMPTS[:4], 12, seed=3, **settings)
    assert answers[1:] == generate_batch(target, PROMPTS[3:0:-1], 12, seed=3, **settings)[::-1]
    assert answers != generate_batch(target, PROMPTS[:4], 12, seed=4, **settings)
    first, second = uniform_draws(PROMPTS[:2], 3, seed=3).tolist()
    assert not set(first) & set(second)  # or all answers would be lucky at the same token


def test_draws_follow_the_probabilities():
    """Guards the inverse of the sums: evenly spread numbers draw each token as often as its probability says, and
    neither end of [0, 1) draws a token that has none."""
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    numbers = torch.arange(1000, dtype=torch.float64) / 1000
    drawn = draw_rows(probabilities.expand(1000, -1), numbers)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 250, 0, 500, 250, 0]
    assert draw_rows(probabilities[None], torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [4]


def test_no_work_for_answers_that_ended(monkeypatch):
    """Guards compaction: each step runs the rows that go on, no others."""
    rows, run = [], batch_generation.Batch.step

    def counting(batch: batch_generation.Batch, tokens: Tensor) -> Tensor:
        rows.append(len(tokens))
        return run(batch, tokens)

    monkeypatch.setattr(batch_generation.Batch, "step", counting)
    lengths = [len(answer) for answer in generate_batch(tiny_target("llama"), PROMPTS, 16, ENDS)]
    assert rows == [sum(length > count for length in lengths) for count in range(1, max(lengths))]


def test_throughput_counts_tokens_and_products(monkeypatch):
    """Guards the report: new tokens per second, and the products by a plain count of the weights."""
    target = tiny_target("llama")
    monkeypatch.setattr(batch_generation, "gemm_rate", lambda *_: 1e6)
    throughput = Throughput(target)
    throughput.add([[1, 2, 3]], [[4, 5]], 4.0)
    assert throughput.fraction_of_gemm_bound is None  # too early to stop for a measurement
    throughput.add([[1, 2, 3]], [[4, 5], [6]], 4.0)
    assert throughput.tokens_per_second == 5 / 8
    names = ("proj.weight",)
    weights = sum(weight.numel() for name, weight in target.layers.named_parameters() if name.endswith(names))
    products = 2 * (weights * (6 + 5) + target.lm_head.weight.numel() * 5)
    attention = 1.2  # of eight tokens with each other, in the count of a layer: little beside real weights, not here
    assert products / 1e6 / 8 <= throughput.fraction_of_gemm_bound <= attention * products / 1e6 / 8
