"""Recorded generations: the authors' implementation, where its fixture is at hand, and this project's own record.

The record in golden/ notices when tokens, accepted flags or cycles change. After a change that is meant to do so:

    PYTHONPATH=. python tests/test_interop.py
"""

import json
from pathlib import Path

import pytest
import torch

from decoding.sampling import Sampling
from pipeline_inference import Decoder, LocalExecutor
from pipeline_model import Target, load_head
from tests.tiny import random_prompt, spd_decoder, tiny_head, tiny_target

FIXTURE = Path(__file__).parents[2] / "shared/interop/llama_v11"
GOLDEN = Path(__file__).with_name("golden") / "llama_generations.json"


# ---------------------------------------------------------------------------------------------------------------------
# The authors' implementation
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not FIXTURE.exists(), reason="the interoperability fixture is not on this machine")
def test_authors_generations():
    """Guards against any difference from the authors' decoding, W = 1: tokens, accepted flags, cycles."""
    target = Target.load(str(FIXTURE / "target"))
    head = load_head(FIXTURE, target)
    entries = json.loads((FIXTURE / "expected.json").read_text())["greedy"]
    checked = 0
    for entry in entries:
        expected = entry["k1_use_deepest_True"]
        if expected["ids"][0] in target.eos_token_ids:
            continue  # the authors' loop runs on after an end token from the prefill
        plain = Decoder(LocalExecutor(target, (target.num_layers,)), eos_token_ids=target.eos_token_ids)
        assert plain.generate(entry["prompt"], len(expected["ids"])).tokens == entry["autoregressive"]
        decoder = spd_decoder(target, head, use_deepest=True, eos_token_ids=target.eos_token_ids)
        result = decoder.generate(entry["prompt"], len(expected["ids"]))
        assert result.tokens == expected["ids"]
        assert result.accepted == expected["accepted"]
        assert result.cycles == expected["cycles"]
        checked += 1
    assert checked >= 5


# ---------------------------------------------------------------------------------------------------------------------
# This project's own record
# ---------------------------------------------------------------------------------------------------------------------


def fill(module, seed):
    """Weights that depend on torch's generator alone, not on how a library version initialises."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)


def generations():
    """Prompts and what a fixed target and head make of them. A vocabulary of 7: random drafts are sometimes right."""
    target = tiny_target("llama", vocab_size=7)
    fill(target.model, seed=2)
    head = tiny_head(target, (1, 1, 2))
    fill(head, seed=2)
    for width in (1, 4):
        for sampling in (Sampling(), Sampling(temperature=0.8, top_k=6, top_p=0.95)):
            for length in (1, 9):
                prompt = random_prompt(length, seed=length, vocab=7)
                decoder = spd_decoder(target, head, draft_top_k=width, sampling=sampling, seed=3)
                result = decoder.generate(prompt, 40)
                yield {
                    "prompt": prompt,
                    "draft_top_k": width,
                    "sampled": not sampling.greedy,
                    "tokens": result.tokens,
                    "accepted": [int(flag) for flag in result.accepted],
                    "cycles": result.cycles,
                }


def test_own_generations():
    """Guards against an unnoticed change of what is drafted, accepted or sampled, and of the number of cycles."""
    assert list(generations()) == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, generations())) + "\n]\n")
