"""PPSD: lossless in the pipeline, a cycle that ends where it should, and training that is its decoding."""

import random

import pytest
import torch

from baselines.ppsd import FirstStageExecutor, PPSDConfig, causal_outputs, ppsd_decoder
from decoding.tree import Node
from pipeline_inference import Decoder
from pipeline_model import save_head
from tests.test_verification import FILTERED, NEUTRAL, exact_pairs, excesses, sampled_pairs
from tests.tiny import hf_greedy, layer_outputs, oracle, random_prompt, spd_decoder, tiny_head, tiny_model, tiny_target
from tests.tiny_baselines import shadow, tiny_ppsd
from training.forward import teacher_features

TOKENS = 18


def training_logits(head, target, tokens):
    """The training forward's draft logits after the last token of a text."""
    ids = torch.tensor([tokens])
    features, _ = teacher_features(target, ids, torch.ones_like(ids), head.config.anchors)
    row = causal_outputs(head, target, features[:, :, 1], (torch.tensor([0]), torch.tensor([len(tokens) - 1])))
    return head.lm_head(target.norm(row))[0]


@pytest.mark.parametrize(
    ("sizes", "length", "lag"), [((2, 2), 30, 0), ((1, 1, 1, 1), 1, 0), ((1, 2, 1), 5, 0), ((1, 1, 1, 1), 2, 1)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_greedy_output_is_the_targets_own_and_drafts_are_training_logits(family, sizes, length, lag):
    """Guards decoding (stage 0 that runs early, rollbacks of the drafter's cache) and training against each other:
    whatever is accepted, each draft's logits are the training forward's over its text, and cycles are SPD's."""
    target, prompt = tiny_target(family), random_prompt(length, seed=length)
    head = tiny_ppsd(target, sizes, layers=2 if lag else 1)
    sequence = prompt + hf_greedy(tiny_model(family), prompt, TOKENS)
    choose = oracle(sequence, rank=lambda position: -1 if random.Random(position).random() < 0.3 else 0)
    decoder = ppsd_decoder(target, head, sizes, verify_lag=lag)
    drafter = shadow(decoder, prompt, choose)
    result = decoder.generate(prompt, TOKENS)

    spd = spd_decoder(target, tiny_head(target, sizes), verify_lag=lag)
    shadow(spd, prompt, choose)
    expected = spd.generate(prompt, TOKENS)
    assert result.tokens == expected.tokens == sequence[length:]
    assert (result.accepted, result.cycles) == (expected.accepted, expected.cycles)
    assert 0.2 < result.alpha < 1

    for text, _, logits in drafter.notes:
        torch.testing.assert_close(training_logits(head, target, text), logits, atol=1e-5, rtol=1e-4)


def test_training_logits_are_a_layer_on_the_first_stage():
    """Guards against features of another depth, and against rows that are not plain causal attention."""
    target = tiny_target("llama")
    head, tokens = tiny_ppsd(target, (1, 2, 1)), random_prompt(8)
    rows = layer_outputs(target.model, tokens)[1][None]  # the output of layer 1, stage 0's only one
    cos, sin = (table[:, :8] for table in target.rope(8))
    (layer,) = head.spec_layers
    causal = torch.full((8, 8), -torch.inf).triu(1)[None, None]
    expected = layer(rows, attention_mask=causal, position_embeddings=(cos, sin))[0, -1]
    torch.testing.assert_close(
        training_logits(head, target, tokens), head.lm_head(target.norm(expected)), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(("sampling", "draft_vocab"), [(NEUTRAL, None), (FILTERED, 3)], ids=["neutral", "filtered"])
def test_sampled_outputs_are_distributed_as_the_target(sampling, draft_vocab):
    """Guards against a loop that verifies PPSD's drafts with another q: 64 pairs of tokens, enumerated."""
    fields = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    target = tiny_target("llama", layers=2, num_attention_heads=2, num_key_value_heads=1, seed=2, **fields)
    decoder = ppsd_decoder(target, tiny_ppsd(target, (1, 1), draft_vocab), (1, 1), sampling=sampling)
    counts, alpha = sampled_pairs(decoder, 180)
    assert 0.05 < alpha < 0.95
    assert max(map(abs, excesses(counts, exact_pairs(target, sampling)))) < 3.5


def test_the_draft_waits_for_the_first_stage_only():
    """Guards the method's point: within a cycle the drafter sees what stage 0 has just made, and nothing deeper."""
    target, order = tiny_target("llama"), []
    head, prompt = tiny_ppsd(target, (2, 1, 1)), random_prompt(4)
    decoder = ppsd_decoder(target, head, (2, 1, 1))
    for index, stage in enumerate(decoder.executor.stages):
        run = stage.run
        stage.run = lambda *args, run=run, index=index: order.append(index) or run(*args)
    draft = decoder.drafter.draft
    decoder.drafter.draft = lambda tree: order.append("draft") or draft(tree)
    sequence = prompt + hf_greedy(tiny_model("llama"), prompt, 8)
    shadow(decoder, prompt, oracle(sequence))
    decoder.generate(prompt, 8)
    assert order[:6] == [0, "draft", 0, "draft", 1, 0]  # the pipeline fills
    assert order[6:10] == ["draft", 2, 1, 0]  # and is full


def test_a_stage_that_ran_early_is_rolled_back():
    """Guards against a rejected token that stage 0 has already run and that goes on into stage 1."""
    target = tiny_target("qwen3_5")
    executor = FirstStageExecutor(target, (2, 2), (0, 2))
    decoder = Decoder(executor, None)
    generation = decoder.start(random_prompt(3), 4)
    generation._prefill()
    root = generation.tree.root
    with torch.inference_mode():
        executor.begin_cycle(root.position, [root])
        draft = Node(1, root.position + 1, 7, root.position + 1, root)
        executor.finish_cycle()
        executor.begin_cycle(draft.position, [draft])
        executor.finish_cycle()
        executor.roll_back({7})
        _, completed = executor.finish_cycle()
    assert completed is None


def test_checkpoints_come_back_and_wrong_shapes_are_refused(tmp_path):
    """Guards against a drafter on a stage that its pipeline does not have."""
    target = tiny_target("llama")
    head = tiny_ppsd(target, (1, 3), 20)
    save_head(head, tmp_path / "ppsd.pt")
    assert PPSDConfig.load_head(tmp_path / "ppsd.pt", target).config == head.config
    with pytest.raises(ValueError, match="num_stages is 1: PPSD drafts while"):
        tiny_ppsd(target, (4,))
    payload = torch.load(tmp_path / "ppsd.pt", weights_only=True)
    payload["config"]["aggr_feature_bound"] = [0, 2]
    torch.save(payload, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"is \[0, 2\], but ppsd reads \[0, 1\] of this target"):
        PPSDConfig.load_head(tmp_path / "other.pt", target)
