"""EAGLE-3: the chain is lossless, its steps are those of training, and both are method.md section 9."""

import random

import pytest
import torch

from baselines.eagle3 import (
    ChainExecutor,
    Eagle3Config,
    eagle3_anchors,
    eagle3_decoder,
    feature_layers,
    unrolled_loss,
    unrolled_outputs,
)
from pipeline_inference import Decoder, LocalExecutor
from pipeline_model import load_head, save_head
from tests.test_verification import FILTERED, NEUTRAL, exact_pairs, excesses, sampled_pairs
from tests.tiny import VOCAB, hf_greedy, layer_outputs, oracle, random_prompt, tiny_model, tiny_target
from tests.tiny_baselines import shadow, tiny_eagle3, tiny_ppsd
from training.forward import teacher_features

TOKENS = 18


def features_of(target, tokens):
    ids = torch.tensor([tokens])
    return teacher_features(target, ids, torch.ones_like(ids), eagle3_anchors(target.num_layers))[0]


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "length"), [(1, 30), (3, 1), (7, 5), (12, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_greedy_output_is_the_targets_own_and_drafts_are_training_logits(family, steps, length):
    """Guards decoding (several verdicts a cycle, states of linear attention within a chain, the end inside one) and
    training against each other: whatever is accepted, each draft's logits are the unrolled forward's over its text."""
    target, prompt = tiny_target(family), random_prompt(length, seed=length)
    head = tiny_eagle3(target)
    sequence = prompt + hf_greedy(tiny_model(family), prompt, TOKENS)
    wrong = {position for position in range(len(sequence)) if random.Random(position).random() < 0.3}
    decoder = eagle3_decoder(target, head, steps)
    drafter = shadow(decoder, prompt, oracle(sequence, rank=lambda position: -1 if position in wrong else 0))
    result = decoder.generate(prompt, TOKENS)

    assert result.tokens == sequence[length:]
    emitted = range(length + 1, length + TOKENS)  # by cycles
    cycle_ends = position = 0
    while position < len(emitted):  # a cycle emits its drafts up to the first wrong one, or one token more
        for _ in range(min(steps, len(emitted) - position - 1) + 1):
            position += 1
            if emitted[position - 1] in wrong:
                break
        cycle_ends += 1
    assert result.cycles == cycle_ends
    assert result.n_accepted == sum(result.accepted) - 1
    assert sum(accepted > 0 for accepted in result.accepted_by_fill) >= min(steps, 2)

    for text, step, logits in drafter.notes:
        outputs = list(unrolled_outputs(head, target, features_of(target, text), step + 1))
        row = outputs[step][0, len(text) - 2 - step]
        torch.testing.assert_close(head.lm_head(target.norm(row)), logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("sampling", "draft_vocab", "steps"), [(NEUTRAL, None, 2), (FILTERED, 3, 4)])
def test_sampled_outputs_are_distributed_as_the_target(sampling, draft_vocab, steps):
    """Guards against verifying a chain with the wrong q, or against the wrong token's logits: 64 pairs, enumerated."""
    fields = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    target = tiny_target("llama", layers=4, num_attention_heads=2, num_key_value_heads=1, seed=2, **fields)
    decoder = eagle3_decoder(target, tiny_eagle3(target, draft_vocab), steps, sampling=sampling)
    counts, alpha = sampled_pairs(decoder, 180)
    assert 0.05 < alpha < 0.95  # both outcomes were there
    assert max(map(abs, excesses(counts, exact_pairs(target, sampling)))) < 3.5


def test_a_chain_is_one_pass_of_the_target():
    """Guards against a chain that reads the target's weights once per token, which no clock on tiny models shows."""
    target = tiny_target("llama")
    prompt = random_prompt(4)
    sequence = prompt + hf_greedy(tiny_model("llama"), prompt, TOKENS)
    widths = []
    target.layers[0].register_forward_hook(lambda _, __, output: widths.append(output.shape[1]))
    target.lm_head.register_forward_hook(lambda _, __, output: widths.append(-len(output)))
    decoder = eagle3_decoder(target, tiny_eagle3(target), 4)
    shadow(decoder, prompt, oracle(sequence))
    result = decoder.generate(prompt, 11)
    assert result.cycles == 2
    assert result.tokens == sequence[4:15]
    assert [width for width in widths if width > 0] == [4, 5, 5]  # the prompt, and two cycles
    assert widths[-1] == -5  # all logits of a cycle at once


def test_impossible_chains_are_refused():
    """Guards against chains in a pipeline, where the tokens of one would wait for each other."""
    target = tiny_target("llama")
    for executor, more in (
        (LocalExecutor(target, (2, 2)), {}),
        (ChainExecutor(target), {"draft_top_k": 2}),
        (ChainExecutor(target), {"verify_lag": 1}),
    ):
        with pytest.raises(ValueError, match="draft_chain is 3"):
            Decoder(executor, None, draft_chain=3, **more)


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def reference_rows(head, target, tokens, steps):
    """method.md section 9 as plain loops over one sequence: [step][row] the drafter's output before the norm."""
    (layer,), num_layers = head.spec_layers, target.num_layers
    states = layer_outputs(target.model, tokens)
    fused = [
        head.fc(torch.cat([states[b][t] for b in (2, num_layers // 2, num_layers - 3)])) for t in range(len(tokens))
    ]
    norm_e, norm_f = layer.input_layernorm.embedding, layer.input_layernorm.feature

    def project(pair, position):
        cos, sin = (table[:, position : position + 1] for table in target.rope(position + 1))
        normed = torch.cat([norm_e(pair[0]), norm_f(pair[1])])[None, None]
        (key, value), (query, gate) = layer.keys_values(normed, (cos, sin)), layer.queries(normed, (cos, sin))
        return query[0, :, 0], key[0, :, 0], value[0, :, 0], gate

    first = {}  # row -> key, value of step 0
    outputs = [{} for _ in range(steps)]
    for row in range(len(tokens) - 1):
        own, feature = [], fused[row]
        for step in range(min(steps, len(tokens) - 1 - row)):
            pair = states[0][row + 1 + step], feature
            query, key, value, gate = project(pair, row + step)
            if step == 0:
                first[row] = key, value
            else:
                own.append((key, value))
            seen = [first[earlier] for earlier in range(row + 1)] + own
            group = len(query) // len(key)
            keys, values = (torch.stack(part).repeat_interleave(group, 1) for part in zip(*seen, strict=True))
            weights = torch.einsum("hd,thd->ht", query, keys).mul(layer.self_attn.scaling).softmax(dim=-1)
            attended = torch.einsum("ht,thd->hd", weights, values)
            attended = attended.flatten() if gate is None else attended.flatten() * gate.flatten().sigmoid()
            hidden = pair[1] + layer.self_attn.o_proj(attended)  # the feature as it came in, not normed
            feature = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs[step][row] = feature
    return outputs


@pytest.mark.parametrize(("family", "layers"), [("llama", 8), ("qwen3", 4), ("qwen3_5", 4)])
def test_unrolled_forward_is_the_method(family, layers):
    """Guards another reading of method.md than its own: taps, shifts, what a step sees, positions, the residual."""
    target = tiny_target(family, layers=layers) if family != "qwen3_5" else tiny_target(family)
    head, tokens = tiny_eagle3(target), random_prompt(9)
    expected = reference_rows(head, target, tokens, 4)
    for step, outputs in enumerate(unrolled_outputs(head, target, features_of(target, tokens), 4)):
        for row, wanted in expected[step].items():
            torch.testing.assert_close(outputs[0, row], wanted, atol=1e-5, rtol=1e-4)


def test_query_chunks_change_nothing(monkeypatch):
    """Guards against a chunk of queries that loses keys of earlier chunks, or its own later steps."""
    target = tiny_target("llama")
    head, features = tiny_eagle3(target), features_of(target, random_prompt(50))
    whole = list(unrolled_outputs(head, target, features, 3))
    monkeypatch.setattr("baselines.eagle3.QUERY_CHUNK", 16)
    for ours, theirs in zip(unrolled_outputs(head, target, features, 3), whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("draft_vocab", [None, 20])
def test_loss_is_the_method(draft_vocab):
    """Guards against a shifted target, a weight of the wrong step, and rows that are padded or not supervised."""
    target = tiny_target("llama")
    head = tiny_eagle3(target, draft_vocab)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (2, 12), generator=generator)
    labels = ids.masked_fill(torch.rand(2, 12, generator=generator) > 0.7, -100)
    mask = torch.ones_like(ids)
    mask[1, -4:], labels[1, -4:] = 0, -100
    features, hidden = teacher_features(target, ids, mask, head.config.anchors)
    loss = unrolled_loss(head, target, features, hidden, labels, mask, steps=3, decay=0.8)

    draft_ids = list(head.config.draft_token_ids or range(VOCAB))
    with torch.no_grad():
        teacher = target.model(ids).logits
    total, counted, supervised, agreed = 0.0, 0, 0, 0
    for batch, length in enumerate((12, 8)):
        rows = reference_rows(head, target, ids[batch, :length].tolist(), 3)
        for step in range(3):
            for row, output in rows[step].items():
                asked = row + step + 1  # predicts the token after this one
                if asked + 1 >= length or labels[batch, asked + 1] < 0:
                    continue
                supervised += step == 0
                p, best = teacher[batch, asked], int(teacher[batch, asked].argmax())
                if best not in draft_ids:
                    continue
                counted += step == 0
                logits = head.lm_head(target.norm(output))
                agreed += step == 0 and draft_ids[int(logits.argmax())] == best
                log_p, log_q = p[draft_ids].log_softmax(-1), logits.log_softmax(-1)
                total += 0.8**step * float((log_p.exp() * (log_p - log_q)).sum())
    assert float(loss.total) == pytest.approx(total, rel=1e-5)
    assert (int(loss.counted), int(loss.supervised), int(loss.agreed)) == (counted, supervised, agreed)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def test_checkpoints_come_back_and_others_are_refused(tmp_path):
    """Guards against a checkpoint that loads as another method's, or for a target whose layers it does not read."""
    target = tiny_target("llama")
    head = tiny_eagle3(target, 20)
    save_head(head, tmp_path / "eagle3.pt")
    loaded = Eagle3Config.load_head(tmp_path / "eagle3.pt", target)
    assert loaded.config == head.config
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    with pytest.raises(ValueError, match="checkpoint version is 'eagle3': this program reads versions"):
        load_head(tmp_path / "eagle3.pt", target)
    save_head(tiny_ppsd(target, (2, 2)), tmp_path / "ppsd.pt")
    with pytest.raises(ValueError, match="checkpoint version is 'ppsd', not 'eagle3'"):
        Eagle3Config.load_head(tmp_path / "ppsd.pt", target)
    with pytest.raises(ValueError, match=r"is \[0, 1, 2\], but eagle3 reads \[0, 2, 3, 4\] of this target"):
        Eagle3Config.load_head(tmp_path / "eagle3.pt", tiny_target("llama", layers=7))
    with pytest.raises(ValueError, match="the target has 3 layers: EAGLE-3 needs at least 4"):
        Eagle3Config.load_head(tmp_path / "eagle3.pt", tiny_target("llama", layers=3))


def test_feature_layers():
    """Guards the taps: SmolLM2-135M's 30 layers, and a target so small that two of the three are one."""
    assert feature_layers(30) == (2, 15, 27)
    assert eagle3_anchors(30) == (0, 2, 15, 27)
    assert feature_layers(4) == (2, 2, 1)
    assert eagle3_anchors(4) == (0, 1, 2)
