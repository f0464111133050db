"""DFlash: blocks are trained as they are drafted, output is the target's own, and both are method.md section 10."""

import itertools
import math
import random
from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

import decoding.sampling
import pipeline_inference
from baselines import dflash_method
from baselines.dflash import (
    Blocks,
    BlockTerms,
    DFlashConfig,
    accepted_slots,
    block_loss,
    decay_weights,
    default_gamma,
    dflash_anchors,
    dflash_decoder,
    dpace_weights,
    mask_token_id,
    packed_blocks,
    tap_layers,
)
from baselines.dflash_method import DFlashLoss
from baselines.eagle3 import ChainExecutor
from decoding.nodes import CachePlan
from decoding.sampling import Sampling
from pipeline_inference import Completed, Decoder, LocalExecutor, Logits, PromptOutput
from pipeline_model import load_head, save_head
from tests.tiny import VOCAB, hf_greedy, layer_outputs, oracle, random_prompt, tiny_target
from tests.tiny_baselines import shadow, tiny_dflash, tiny_eagle3
from timeline import Timeline
from training.forward import teacher_features
from training.loss import LossTerms, rows_loss
from training.replay import packed_attention

TOKENS = 18


def deep_target(family="llama"):
    """A target with layers enough for several taps; Qwen3.5's has one."""
    return tiny_target(family) if family == "qwen3_5" else tiny_target(family, layers=6)


def drafter_for(target, block_size=4, **fields):
    return tiny_dflash(target, block_size, taps=1 if target.num_layers < 6 else 3, **fields)


def features_of(target, head, rows, mask=None):
    """Features and h_L of texts of one length, [N, S]."""
    ids = torch.tensor(rows)
    return teacher_features(target, ids, torch.ones_like(ids) if mask is None else mask, head.config.anchors)


def blocks_at(*places):
    return Blocks(*(np.array(column) for column in zip(*places, strict=True)))


def reference_block(head, target, tokens, anchor, size):
    """method.md section 10.2 as plain loops over one block: the rows of its slots before the drafter's norm, [B, H]."""
    states = layer_outputs(target.model, tokens)
    taps = head.config.anchors[1:]
    context = [head.context_norm(head.context_proj(torch.cat([states[b][t] for b in taps]))) for t in range(anchor)]
    mask = target.model.model.embed_tokens.weight[head.config.mask_token_id] if head.mask is None else head.mask
    rows = [states[0][anchor], *[mask] * (size - 1)]
    cos, sin = target.rope(anchor + size)

    def at(position):
        return cos[:, position : position + 1], sin[:, position : position + 1]

    for layer in head.spec_layers:
        normed = [layer.input_layernorm(row) for row in rows]
        inputs = [*context, *normed]  # context rows have no input norm
        pairs = [layer.keys_values(row[None, None], at(place)) for place, row in enumerate(inputs)]
        keys, values = (torch.stack([pair[which][0, :, 0] for pair in pairs]) for which in (0, 1))  # [T, H_kv, D]
        outputs = []
        for slot, row in enumerate(rows):
            query, gate = layer.queries(normed[slot][None, None], at(anchor + slot))
            query = query[0, :, 0]
            group = len(query) // keys.shape[1]
            scores = torch.einsum("hd,thd->ht", query, keys.repeat_interleave(group, 1)) * layer.self_attn.scaling
            attended = torch.einsum("ht,thd->hd", scores.softmax(-1), values.repeat_interleave(group, 1)).flatten()
            attended = attended if gate is None else attended * gate.flatten().sigmoid()
            hidden = row + layer.self_attn.o_proj(attended)
            outputs.append(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
        rows = outputs
    return torch.stack(rows)


# ---------------------------------------------------------------------------------------------------------------------
# The training forward
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "learned_mask"), [("llama", False), ("qwen3", True), ("qwen3_5", False)])
def test_packed_blocks_are_the_method(family, learned_mask):
    """Guards another reading of method.md than its own: taps, norms of context rows, positions, what a slot sees."""
    target = deep_target(family)
    head = drafter_for(target, learned_mask=learned_mask)
    texts = [random_prompt(11, seed=1), random_prompt(11, seed=2)]
    places = [(0, 1), (0, 4), (0, 10), (1, 2), (1, 3)]  # the third one ends after the text
    rows = packed_blocks(head, target, features_of(target, head, texts)[0], blocks_at(*places), 4)
    for (text, anchor), ours in zip(places, rows, strict=True):
        wanted = reference_block(head, target, texts[text], anchor, 4)
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


def test_mask_is_a_plain_double_loop(monkeypatch):
    """Guards against a row that sees its own anchor's context, another block, or padding; in chunks and sequences."""
    seen = []

    def watched(query, prefix, own, limits, begins, ends, scaling):
        width = prefix[0].shape[2]
        mask = np.zeros((query.shape[2], width + own[0].shape[2]), dtype=bool)
        for row in range(len(mask)):
            mask[row, : limits[row]] = True
            mask[row, width + begins[row] : width + ends[row]] = True
        seen.append(mask)
        return packed_attention(query, prefix, own, limits, begins, ends, scaling)

    monkeypatch.setattr("baselines.dflash.packed_attention", watched)
    monkeypatch.setattr("training.replay.QUERY_CHUNK", 5)
    target = deep_target()
    head, generator = drafter_for(target, layers=1), np.random.default_rng(0)
    lengths = [12, 7]
    texts = [random_prompt(length, seed=length) + [0] * (12 - length) for length in lengths]
    attention = torch.tensor([[1] * length + [0] * (12 - length) for length in lengths])
    features, _ = features_of(target, head, texts, attention)
    for most in (1, 3, 64):
        labels = np.array(texts)
        for row, length in enumerate(lengths):
            labels[row, length:] = -100
        labels[:, 0] = -100
        blocks = Blocks.drawn(labels, most, generator)
        counts = [min(most, length - 2) for length in lengths]  # anchors 1 .. length - 2
        assert np.bincount(blocks.sequences).tolist() == counts
        seen.clear()
        rows = packed_blocks(head, target, features, blocks, 4)
        for sequence, mask in enumerate(seen):
            anchors = blocks.anchors[blocks.sequences == sequence]
            assert mask.shape == (4 * len(anchors), 12 + 4 * len(anchors))
            for block, slot in itertools.product(range(len(anchors)), range(4)):
                for position in range(12):
                    assert mask[4 * block + slot, position] == (position < anchors[block] <= lengths[sequence])
                for other in range(len(mask)):
                    assert mask[4 * block + slot, 12 + other] == (other // 4 == block)
        alone = [packed_blocks(head, target, features, blocks_at(place), 4)[0] for place in zip(*blocks, strict=True)]
        torch.testing.assert_close(rows, torch.stack(alone), atol=1e-5, rtol=1e-4)


def test_what_reaches_a_block_and_what_does_not():
    """Guards against leaks: of the token that a slot has to draft, of the features that decoding lacks, of other
    blocks. And against blocks that read less than decoding has."""
    target = deep_target()
    head = drafter_for(target)
    features, _ = features_of(target, head, [random_prompt(12)])
    anchor, size = 5, 4

    def rows(changed, *others):
        return packed_blocks(head, target, changed, blocks_at((0, anchor), *others), size)[0]

    before = rows(features)
    later, own, known, earlier = (features.clone() for _ in range(4))
    later[:, anchor + 1 :] += 1  # tokens and features after the anchor
    own[:, anchor, 1:] += 1  # its own features, which the target has not computed yet
    known[:, anchor, 0] += 1  # its token
    earlier[:, anchor - 1, 1:] += 1
    for changed in (later, own):
        assert torch.equal(rows(changed), before)
    for changed in (known, earlier):
        assert (rows(changed) - before).abs().amax(dim=-1).min() > 1e-3
    torch.testing.assert_close(rows(features, (0, 6)), before, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rows(features, (0, 8)), before, atol=1e-6, rtol=1e-5)


def test_slots_see_the_slots_behind_them(monkeypatch):
    """Guards the bidirectional block: another embedding in the last slot changes the first one's draft."""
    target = deep_target()
    head = drafter_for(target)
    features, _ = features_of(target, head, [random_prompt(12)])
    before = packed_blocks(head, target, features, blocks_at((0, 5)), 4)[0]
    original = type(head).block_inputs

    def changed(self, *arguments):
        inputs = original(self, *arguments).clone()
        inputs[:, -1] += 1
        return inputs

    monkeypatch.setattr(type(head), "block_inputs", changed)
    after = packed_blocks(head, target, features, blocks_at((0, 5)), 4)[0]
    assert (after - before).abs().amax(dim=-1)[1] > 1e-3


def test_layers_that_are_read():
    """Guards the taps by method.md's numbers, halves rounded to even; and names a target that has too few layers."""
    for num_layers, ids in ((36, [1, 9, 17, 25, 33]), (24, [1, 6, 11, 16, 21]), (30, [1, 8, 14, 20, 27])):
        assert tap_layers(num_layers, 5) == tuple(layer + 1 for layer in ids)
    assert dflash_anchors(30, 5) == (0, 2, 9, 15, 21, 28)
    assert dflash_anchors(30, 1) == (0, 16)
    with pytest.raises(ValueError, match="--num_taps is 5: so many need a target of 8 layers, and this one has 7"):
        tap_layers(7, 5)


# ---------------------------------------------------------------------------------------------------------------------
# Anchors, weights, losses
# ---------------------------------------------------------------------------------------------------------------------


def test_anchors_are_where_decoding_can_be():
    """Guards against anchors before an answer or at its last token, against repeated ones, and against slots after the
    end of an answer, where nothing is ever verified."""
    labels = np.full((2, 14), -100)
    labels[0, 3:6] = labels[0, 9:14] = labels[1, 2:4] = 7  # two answers, and one of two tokens
    every = Blocks.drawn(labels, 64, np.random.default_rng(0))
    assert list(zip(*every, strict=True)) == [(0, 3), (0, 4), (0, 9), (0, 10), (0, 11), (0, 12), (1, 2)]
    assert every.counted(labels, 4).sum(axis=1).tolist() == [2, 1, 3, 3, 2, 1, 1]
    counts = np.zeros(14, dtype=int)
    for seed in range(300):
        drawn = Blocks.drawn(labels, 2, np.random.default_rng(seed))
        assert np.bincount(drawn.sequences).tolist() == [2, 1]
        assert (np.diff(drawn.anchors[:2]) > 0).all()
        counts[drawn.anchors[:2]] += 1
    assert counts[[3, 4, 9, 10, 11, 12]].min() > 60  # 100 each
    labels[:] = -100
    assert not len(Blocks.drawn(labels, 64, np.random.default_rng(0)).anchors)


@pytest.mark.parametrize(("loss", "weights", "draft_vocab"), [("kl", "decay", 20), ("kl", "dpace", None)])
def test_loss_is_the_method(loss, weights, draft_vocab):
    """Guards against a shifted teacher, a wrong weight or a slot that is not supervised, by plain loops."""
    target, size, gamma = deep_target(), 4, 4.0
    head = drafter_for(target, draft_vocab=draft_vocab)
    ids = torch.tensor([random_prompt(12, seed=1), random_prompt(8, seed=2) + [0] * 4])
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :2], labels[0, 9], labels[1, :1] = -100, -100, -100
    blocks = blocks_at((0, 2), (0, 3), (0, 6), (0, 10), (1, 1), (1, 6))
    features, hidden = features_of(target, head, ids.tolist(), mask)
    settings = {"blocks": blocks, "terms": BlockTerms(loss, weights, gamma)}
    ours = block_loss(head, target, features, hidden, labels, mask, **settings)

    draft_ids = list(head.config.draft_token_ids or range(VOCAB))
    teacher = target.model(ids, attention_mask=mask).logits
    rows = target.lm_head.weight[draft_ids]
    total, normaliser, slots, agreed = 0.0, 0.0, 0, 0
    for sequence, anchor in zip(*blocks, strict=True):
        losses, right = [], []
        outputs = reference_block(head, target, ids[sequence].tolist(), anchor, size)
        for slot in range(1, size):
            if anchor + slot >= 12 or labels[sequence, anchor + slot] < 0:
                break
            p, logits = teacher[sequence, anchor + slot - 1], head.norm(outputs[slot]) @ rows.T
            best = int(p.argmax())
            slots += 1
            agreed += draft_ids[int(logits.argmax())] == best
            log_p, log_q = p[draft_ids].log_softmax(-1), logits.log_softmax(-1)
            inside = best in draft_ids
            losses.append(float((log_p.exp() * (log_p - log_q)).sum()) if inside else None)
            right.append(float(log_q.exp()[draft_ids.index(best)]) if inside else None)
        counted = [slot for slot, value in enumerate(losses) if value is not None]
        for slot in counted:
            weight = float(np.exp(-slot / gamma))
            if weights == "dpace":
                smooth = [1 if value is None else 0.5 + 0.5 * value for value in right]
                weight = sum(float(np.prod(smooth[: later + 1])) for later in counted if later >= slot)
            total += weight * losses[slot]
            normaliser += weight if weights == "decay" else 0
        normaliser += weights == "dpace"
    assert float(ours.total) == pytest.approx(total, rel=1e-4)
    assert float(ours.counted) == pytest.approx(normaliser, rel=1e-5)
    tokens = 9 + 7  # supervised ones that have a token before them, as every drafter counts them
    assert int(ours.supervised) == tokens
    assert float(ours.agreed) == pytest.approx(agreed * tokens / slots)


def test_labels_are_not_shifted(monkeypatch):
    """Guards slot k against its neighbour's label: a drafter that is sure of the text has no cross-entropy with it."""
    target = deep_target()
    head, ids = drafter_for(target), random.Random(0).sample(range(VOCAB), 12)  # no token twice
    head.norm = torch.nn.Identity()
    monkeypatch.setattr(type(head), "output_rows", lambda *_: torch.eye(VOCAB))
    features, hidden = features_of(target, head, [ids])
    labels, blocks = torch.tensor([ids]), blocks_at((0, 1), (0, 5), (0, 8))
    settings = {"blocks": blocks, "terms": BlockTerms("ce")}
    for shift in (0, 1, -1):
        wanted = torch.tensor([[ids[(anchor + slot + shift) % 12] for slot in range(4)] for anchor in blocks.anchors])
        sure = torch.nn.functional.one_hot(wanted, VOCAB).float() * 60
        monkeypatch.setattr("baselines.dflash.packed_blocks", lambda *_, sure=sure: sure)
        loss = block_loss(head, target, features, hidden, labels, torch.ones_like(labels), **settings)
        mean = float(loss.total / loss.counted)
        assert mean < 1e-5 if shift == 0 else mean > 1


@pytest.mark.parametrize("kind", ["ce", "reverse_kl"])
def test_losses_of_blocks_and_their_gradients(kind):
    """Guards the two losses that only blocks have: values and gradients against autograd through plain formulas."""
    target, generator = tiny_target("llama"), torch.Generator().manual_seed(0)
    draft_ids = torch.arange(2, VOCAB, 3)
    draft, hidden = (torch.randn(9, 32, generator=generator) for _ in range(2))
    rows = target.lm_head.weight[draft_ids].clone()
    wanted = torch.randint(0, VOCAB, (9,), generator=generator)
    wanted[:4] = draft_ids[:4]
    weights = torch.rand(9, generator=generator)
    for tau in (1.0, 1.7):
        results = []
        for ours in (True, False):
            leaves = [draft.clone().requires_grad_(True), rows.clone().requires_grad_(True)]
            inside = torch.isin(wanted, draft_ids)
            if ours:
                terms = LossTerms(kind, tau)
                loss = rows_loss(target, *leaves, draft_ids, hidden, wanted, terms, weights)
                assert float(loss.counted) == pytest.approx(float(weights[inside].sum()))
                total = loss.total
            else:
                log_q = (leaves[0] @ leaves[1].T / tau).log_softmax(-1)
                log_p = (target.logits(hidden)[:, draft_ids] / tau).log_softmax(-1)
                each = (log_q.exp() * (log_q - log_p)).sum(-1) * tau**2
                if kind == "ce":
                    ranks = torch.searchsorted(draft_ids, wanted).clamp(max=len(draft_ids) - 1)
                    each = cross_entropy(leaves[0] @ leaves[1].T / tau, ranks, reduction="none")
                total = (each * weights * inside).sum()
            total.backward()
            results.append([total.detach(), *(leaf.grad for leaf in leaves)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_weights_of_slots():
    """Guards decay by method.md's numbers, and D-PACE by the double sum that defines it."""
    assert decay_weights(8, default_gamma(8))[:3].tolist() == pytest.approx([1.0, 0.7788, 0.6065], abs=1e-4)
    assert [default_gamma(size) for size in (4, 8, 10, 16, 20)] == [4, 4, 5, 7, 7]
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(50, 7, generator=generator).requires_grad_(True)
    counted = torch.rand(50, 7, generator=generator) < 0.7
    ours = dpace_weights(right, counted)
    assert not ours.requires_grad
    right = right.detach()
    assert (ours.diff(dim=1) <= 1e-6).all()
    for row in range(50):
        for slot in range(7):
            total = 0.0
            for later in range(slot, 7):
                product = 1.0
                for earlier in range(later + 1):
                    product *= 0.5 + 0.5 * float(right[row, earlier]) if counted[row, earlier] else 1.0
                total += product * bool(counted[row, later])
            assert float(ours[row, slot]) == pytest.approx(total, abs=1e-5)


def test_anchors_are_drawn_anew_in_training_alone(monkeypatch):
    """Guards against a run that sees the same blocks in every pass, one that cannot be continued, and held-out figures
    that change from draw to draw."""
    target = deep_target()
    loss = DFlashLoss(drafter_for(target), target, terms=BlockTerms(), num_anchors=3, seed=0)
    labels, drawn = torch.zeros(2, 40, dtype=torch.long), []
    monkeypatch.setattr(dflash_method, "block_loss", lambda *_, blocks, **__: drawn.append(blocks.anchors.tolist()))
    for training, number in ((True, 0), (True, 1), (True, 0), (False, 0), (False, 1)):
        loss.train(training)
        loss.of_batch({"labels": labels}, (6,), 1, number)
    first, second, again, held_out, other = drawn
    assert first == again != second != held_out == other != first


@pytest.mark.parametrize(("train_lm_head", "learned_mask"), [(False, False), (True, True)])
def test_gradients_reach_the_drafter_alone(train_lm_head, learned_mask):
    """Guards the frozen rows: embedding, lm_head and target never learn, and each weight of the drafter does."""
    target = deep_target()
    config = drafter_for(target, draft_vocab=30, train_lm_head=train_lm_head, learned_mask=learned_mask).config
    head = config.new_head(target)
    assert torch.equal(head.norm.weight, target.norm.weight)
    names = {name.split(".")[0] for name in head.state_dict()}
    expected = {"context_proj", "context_norm", "norm", "spec_layers"}
    assert names == expected | ({"lm_head"} if train_lm_head else set()) | ({"mask"} if learned_mask else set())
    rows = target.lm_head.weight[list(config.draft_token_ids)]
    assert torch.equal(head.output_rows(target), rows)
    if learned_mask:
        assert torch.equal(head.mask, target.embed_tokens.weight[3])
    ids = torch.tensor([random_prompt(12)])
    features, hidden = features_of(target, head, ids.tolist())
    settings = {"blocks": blocks_at((0, 2), (0, 5)), "terms": BlockTerms()}
    block_loss(head, target, features, hidden, ids, torch.ones_like(ids), **settings).total.backward()
    assert [name for name, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    assert all(weight.grad is None and not weight.requires_grad for weight in target.model.parameters())


def test_number_of_trained_weights():
    """Guards method.md's count for the demo target, by formula: what is trained is what is stored."""
    width, kv, mlp = 576, 192, 1536
    layer = 2 * width * width + 2 * kv * width + 3 * mlp * width + 2 * width + 2 * 64
    for layers, count in ((1, 5_200_256), (2, 8_740_480), (5, 19_361_152)):
        assert 5 * width * width + 2 * width + layers * layer == count
    target = deep_target()
    head = drafter_for(target, layers=2)
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32 + 2 * 8
    assert sum(weight.numel() for weight in head.parameters()) == 3 * 32 * 32 + 2 * 32 + 2 * layer


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------


def rounds_of(wrong, emitted, size):
    """How many rounds emit these positions, with drafts that are wrong at some of them, and how many they accept."""
    rounds = accepted = position = 0
    while position < len(emitted):  # a round emits its drafts up to the first wrong one, or one token more
        for _ in range(min(size, len(emitted) - position)):
            position += 1
            if emitted[position - 1] in wrong:
                break
            accepted += 1
        rounds += 1
    return rounds, accepted


@pytest.mark.parametrize(("size", "length"), [(2, 30), (4, 1), (8, 5)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_greedy_output_is_the_targets_own_and_drafts_are_training_logits(family, size, length):
    """Guards decoding (several verdicts a round, context of rejected tokens, the end inside a block) and training
    against each other: whatever is accepted, each draft's logits are the packed forward's at its anchor and slot."""
    target, prompt = deep_target(family), random_prompt(length, seed=length)
    head = drafter_for(target, 8, draft_vocab=30)
    sequence = prompt + hf_greedy(target.model, prompt, TOKENS)
    wrong = {position for position in range(len(sequence)) if random.Random(position).random() < 0.3}
    decoder = dflash_decoder(target, head, size)
    drafter = shadow(decoder, prompt, oracle(sequence, rank=lambda position: -1 if position in wrong else 0))
    result = decoder.generate(prompt, TOKENS)

    assert result.tokens == sequence[length:]
    emitted = range(length + 1, length + TOKENS)  # by rounds
    rounds, _ = rounds_of(wrong, emitted, size)
    assert result.cycles == rounds
    assert result.new_tokens == TOKENS - 1
    assert result.n_accepted == sum(result.accepted) - 1
    assert sum(accepted > 0 for accepted in result.accepted_by_fill) >= min(size - 1, 2)

    features, _ = features_of(target, head, [sequence])
    for text, slot, logits in drafter.notes:
        anchor = len(text) - 1 - slot
        rows = packed_blocks(head, target, features, blocks_at((0, anchor)), size)[0]
        wanted = head.norm(rows[slot + 1]) @ head.output_rows(target).T
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-4)


def test_a_round_is_one_forward_of_each():
    """Guards against a draft that runs once per token, and against a target that does; blocks of 1 are the target
    alone, a drafter that is always right gives B tokens per round, one that is always wrong gives 1."""
    target = deep_target()
    head, prompt = drafter_for(target), random_prompt(4)
    sequence = prompt + hf_greedy(target.model, prompt, 13)
    calls = []
    target.layers[0].register_forward_hook(lambda _, __, output: calls.append(("target", output.shape[-2])))
    head.context_norm.register_forward_hook(lambda _, __, output: calls.append(("context", len(output))))
    head.norm.register_forward_hook(lambda _, __, output: calls.append(("block", len(output))))
    for rank, rounds in ((0, 3), (-1, 12)):
        calls.clear()
        decoder = dflash_decoder(target, head)
        shadow(decoder, prompt, oracle(sequence, rank=lambda _, rank=rank: rank))
        result = decoder.generate(prompt, 13)
        assert result.tokens == sequence[4:]
        assert result.cycles == rounds
        assert result.new_tokens / result.cycles == (4 if rank == 0 else 1)
        assert calls.count(("block", 3)) == rounds
        assert sum(kind == "target" for kind, _ in calls) == rounds + 1
        assert sum(rows for kind, rows in calls if kind == "context") == 4 + (8 if rank == 0 else 11)
    alone = dflash_decoder(target, head, 1)
    assert alone.drafter is None
    assert alone.generate(prompt, 13).tokens == sequence[4:]
    with pytest.raises(ValueError, match="--block_size is 5: this drafter was trained for 1 to 4"):
        dflash_decoder(target, head, 5)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_end_tokens_inside_a_block(place):
    """Guards against tokens after an end token, which a block may have accepted already."""
    target = deep_target()
    head, prompt = drafter_for(target), random_prompt(6, seed=4)
    sequence = prompt + hf_greedy(target.model, prompt, 12)
    end = sequence[7 + place]
    first = sequence.index(end, 6) - 6
    decoder = dflash_decoder(target, head, eos_token_ids=[end])
    shadow(decoder, prompt, oracle(sequence))
    result = decoder.generate(prompt, 12)
    assert result.tokens == sequence[6 : 7 + first]
    assert (result.stop_reason, result.cycles) == ("eos", -(-first // 4))


def test_memories_after_every_round():
    """Guards the memories of a round that was rejected in part: target and drafter have what a fresh pass has, and the
    drafter one row for each token before the known one."""
    target, prompt = deep_target(), random_prompt(5)
    head = drafter_for(target)
    sequence = prompt + hf_greedy(target.model, prompt, TOKENS)
    decoder = dflash_decoder(target, head)
    memory = decoder.drafter
    shadow(decoder, prompt, oracle(sequence, rank=lambda position: 0 if position % 5 else -1))
    fresh = ChainExecutor(target, head.config.anchors)
    plan = CachePlan(len(sequence), 1, tree=False)
    features = fresh.start(sequence, 0, plan, Timeline(torch.device("cpu"))).features
    context = head.context(features[:, 1:])[None]
    generation = decoder.start(prompt, TOKENS)
    generation._prefill()
    while not generation.result.stop_reason:
        known = generation.tree.root.position
        generation._cycle()
        assert memory._cache.length == known
        cos, sin = target.rope(known)
        for index, layer in enumerate(head.spec_layers):
            wanted = layer.keys_values(context[:, :known], (cos[:, :known], sin[:, :known]))
            kept = memory._cache._keys[index][:, :, :known], memory._cache._values[index][:, :, :known]
            torch.testing.assert_close(kept, wanted, atol=1e-5, rtol=1e-4)
        slots = torch.arange(generation.tree.root.position)
        for layer in range(target.num_layers):
            ours, theirs = (executor.stages[0].cache.kv(layer, slots) for executor in (decoder.executor, fresh))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert generation.result.cycles > 4


def test_an_overfitted_text_is_decoded_in_whole_blocks():
    """Guards training against decoding as a whole: any difference between them, which each alone would not show, costs
    accepted drafts of a text that the drafter knows by heart. The aim is .9 B tokens per round."""
    target, prompt = deep_target(), random_prompt(8)
    head = drafter_for(target).config.new_head(target)
    text = prompt + hf_greedy(target.model, prompt, 33)
    ids = torch.tensor([text])
    labels = ids.clone()
    labels[:, :8] = -100
    features, hidden = features_of(target, head, [text])
    optimizer, generator = torch.optim.AdamW(head.parameters(), lr=3e-3), np.random.default_rng(0)
    for _ in range(200):
        blocks = Blocks.drawn(labels.numpy(), 16, generator)
        settings = {"blocks": blocks, "terms": BlockTerms()}
        loss = block_loss(head, target, features, hidden, labels, torch.ones_like(ids), **settings)
        (loss.total / loss.counted).backward()
        optimizer.step()
        optimizer.zero_grad()
    every = Blocks.drawn(labels.numpy(), 64, generator)
    lengths = 1 + accepted_slots(head, target, features, hidden, labels, blocks=every)
    assert (lengths[:-2] == 4).float().mean() > 0.9
    result = dflash_decoder(target, head).generate(prompt, 33)
    assert result.tokens == text[8:]
    assert result.new_tokens / result.cycles > 0.9 * 4


@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_simulated_length_is_that_of_decoding(draft_vocab):
    """Guards the held-out figure: at each anchor, as many slots as a round that begins there accepts."""
    target, prompt = deep_target(), random_prompt(6)
    head = drafter_for(target, draft_vocab=draft_vocab)
    head.norm.weight.data.zero_()  # all logits alike: the first draft id everywhere
    sequence = prompt + hf_greedy(target.model, prompt, TOKENS)
    drafted = 0 if draft_vocab is None else head.config.draft_token_ids[0]
    ids = torch.tensor([sequence[:10] + [drafted] * 3 + sequence[13:]])
    features, hidden = features_of(target, head, ids.tolist())
    best = ids.roll(-1)  # a target that says what the text does
    blocks = blocks_at((0, 6), (0, 8), (0, 9), (0, 10), (0, 11), (0, 12), (0, len(sequence) - 2))
    found = accepted_slots(head, target, features, hidden, ids, blocks=blocks, teacher_best=best)
    wanted = []
    for anchor in blocks.anchors:
        right = [token == drafted for token in ids[0, anchor + 1 : anchor + 4].tolist()]
        wanted.append([*right, False].index(False))
    assert found.tolist() == wanted
    assert set(wanted) == {0, 1, 2, 3}


# ---------------------------------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------------------------------


class Toy:
    """Executor and drafter whose distributions, over 4 tokens, are drawn anew for each text."""

    device, stage_sizes, anchors, vocab_size, draft_token_ids = torch.device("cpu"), (1,), (0,), 4, None

    def __init__(self, drafts=None):
        self._drafts = drafts  # the same tokens in every block; None: distributions as well
        self.distribution = lru_cache(maxsize=None)(self._distribution)

    def _distribution(self, *of):
        return torch.randn(4, generator=torch.Generator().manual_seed(hash(of))).mul(1.5).log_softmax(-1)

    def start(self, *arguments):
        if len(arguments) == 4:  # as an executor
            self._text, self._entered = list(arguments[0]), []
            return PromptOutput(torch.tensor([0.0, -200, -200, -200]), torch.zeros(len(self._text), 1, 1))

    def begin_cycle(self, position, entering):
        self._text[position:] = [entering[0].token]
        self._entered.append((entering[0].id, tuple(self._text)))
        return torch.zeros(1, 1)

    def finish_cycle(self):
        ids, texts = zip(*self._entered, strict=True)
        self._entered = []
        return (), Completed(ids, Logits(lambda row: self.distribution(texts[row])))

    def draft(self, tree):
        slot = len(tree.levels)
        if slot == 0:
            self._block = tuple(self._text)
        if self._drafts is None:
            return self.distribution(self._block, slot)[None]
        return torch.nn.functional.one_hot(torch.tensor([self._drafts[slot]]), 4).float()

    enter = observe = roll_back = finish = lambda self, *_: None


class Enumeration:
    """Takes the place of every random decision of the decode loop, and goes through all of them."""

    def __init__(self, monkeypatch):
        for module in (pipeline_inference, decoding.sampling):
            monkeypatch.setattr(module, "draw", lambda p, _: torch.tensor(self._decide(p.tolist())))
        true = decoding.sampling.acceptance_probability

        def accepted(*arguments):
            kept = true(*arguments)
            return (-1.0, 2.0)[self._decide([1 - kept, kept])]  # below or above any uniform number

        monkeypatch.setattr(decoding.sampling, "acceptance_probability", accepted)

    def _decide(self, probabilities):
        if self._place == len(self._script):
            first, *others = (index for index, value in enumerate(probabilities) if value > 1e-12)
            self._open += [[*self._script, index] for index in others]
            self._script.append(first)
        choice = self._script[self._place]
        self._place += 1
        self._probability *= probabilities[choice]
        return choice

    def outcomes(self, run):
        """Probability of each result of `run`."""
        found, self._open = Counter(), [[]]
        while self._open:
            self._script, self._place, self._probability = self._open.pop(), 0, 1.0
            found[run()] += self._probability
        return found


def toy_joint(toy, prompt, count):
    """The target's own distribution of the tokens after the first new one, which is 0."""
    joint = {}
    for tokens in itertools.product(range(4), repeat=count):
        text, logarithm = [*prompt, 0], 0.0
        for token in tokens:
            logarithm += float(toy.distribution(tuple(text))[token])
            text.append(token)
        joint[(0, *tokens)] = math.exp(logarithm)
    return joint


@pytest.mark.parametrize("drafts", [*itertools.product(range(4), repeat=2), None])
def test_sampled_output_is_exactly_the_targets(monkeypatch, drafts):
    """Guards the verification of blocks: every random decision enumerated, for all drafts as point masses, and for
    drafts that each slot samples from a distribution of its own, by the ratio test."""
    toy, count = Toy(drafts), 2 if drafts is None else 3
    settings = {"draft_chain": 2, "sample_drafts": drafts is None, "sampling": Sampling(temperature=1.0)}
    decoder, flags = Decoder(toy, toy, **settings), set()

    def run():
        result = decoder.generate([1, 2], count + 1)
        flags.update(result.accepted[1:])
        return tuple(result.tokens)

    found = Enumeration(monkeypatch).outcomes(run)
    wanted = toy_joint(toy, [1, 2], count)
    assert flags == {True, False}
    assert found.keys() <= wanted.keys()
    assert max(abs(found[tokens] - wanted[tokens]) for tokens in wanted) < 1e-6


def test_argmax_drafts_draw_what_the_target_alone_draws():
    """Guards against a ratio test on drafts that were not sampled, which would also use up other random numbers."""
    target, sampling = deep_target(), Sampling(temperature=1.5)
    prompt = random_prompt(4)
    alone = Decoder(LocalExecutor(target, (6,)), sampling=sampling, seed=3).generate(prompt, 30)
    decoder = dflash_decoder(target, drafter_for(target), sampling=sampling, seed=3)
    choices = [token if place % 5 else 0 for place, token in enumerate(prompt + alone.tokens)] + [0] * 4
    shadow(decoder, prompt, lambda text: [choices[len(text)]])
    result = decoder.generate(prompt, 30)
    assert result.tokens == alone.tokens
    assert 0 < result.n_accepted < result.n_verified


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"learned_mask": True, "train_lm_head": True}])
def test_checkpoints_come_back_and_others_are_refused(tmp_path, fields):
    """Guards against a checkpoint that loads as another method's, or with another block, mask, or set of weights."""
    target = deep_target()
    head = drafter_for(target, draft_vocab=20, **fields)
    save_head(head, tmp_path / "dflash.pt")
    loaded = DFlashConfig.load_head(tmp_path / "dflash.pt", target)
    assert loaded.config == head.config
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    with pytest.raises(ValueError, match="checkpoint version is 'dflash': this program reads versions"):
        load_head(tmp_path / "dflash.pt", target)
    save_head(tiny_eagle3(target), tmp_path / "eagle3.pt")
    with pytest.raises(ValueError, match="checkpoint version is 'eagle3', not 'dflash'"):
        DFlashConfig.load_head(tmp_path / "eagle3.pt", target)
    with pytest.raises(ValueError, match=r"is \[0, 2, 3, 4\], but dflash reads \[0, 2, 4, 6\] of this target"):
        DFlashConfig.load_head(tmp_path / "dflash.pt", tiny_target("llama", layers=8))
    raw = head.config.to_dict()
    for name, value, complaint in (
        ("block_size", 1, "block_size is 1: a block needs"),
        ("block_size", None, "block_size is None: it must be an integer"),
        ("mask_token_id", VOCAB, "mask_token_id is 61, outside the target's 0 .. 60"),
        ("num_stages", 2, "num_stages is 2: DFlash has one"),
    ):
        with pytest.raises(ValueError, match=complaint):
            DFlashConfig.parse(raw | {name: value}).check_target(target.config)


def test_mask_tokens():
    """Guards against a mask that means something: an end token, a turn's, or one that no target has."""
    words = {"a": 0, "<eos>": 1, "user": 2, "<reponame>": 3, "nowhere": 4, "9": 5}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="a")
    tokenizer.chat_template = "{% for m in messages %}user {{ m.content }}{% endfor %}"
    for token, mask in ((None, 3), ("nowhere", 4), ("4", 4), ("9", 9)):
        assert mask_token_id(tokenizer, token, 10) == mask
    for token, complaint in (("<eos>", "which every reply has"), ("user", "which every reply has"), ("b", "neither")):
        with pytest.raises(ValueError, match=f"--mask_token is '{token}'.*{complaint}"):
            mask_token_id(tokenizer, token, 10)
    with pytest.raises(ValueError, match="--mask_token is '10': neither a token of the target's tokenizer nor an id"):
        mask_token_id(tokenizer, "10", 10)
    unknown = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="--mask_token is missing"):
        mask_token_id(unknown, None, 10)
