"""Draft-OPD for DFlash: what decoding logs is what the text gives, and both streams are method.md section 11.8."""

import numpy as np
import pytest
import torch

from baselines.dflash import DFlashDrafter
from baselines.dflash_method import DraftOPDLoss
from baselines.draft_opd import Rollout, RolloutSettings, Round, opd_loss, padded, roll_out, slots_of
from decoding.sampling import Sampling
from tests.test_dflash import deep_target, drafter_for, reference_block
from tests.tiny import VOCAB, hf_greedy, random_prompt
from training.forward import teacher_features

SETTINGS = RolloutSettings(18, Sampling(), 64)
PROMPTS = [random_prompt(5, seed=1), random_prompt(2, seed=2)]


def drafts_mixed(monkeypatch, target):
    """Drafters that are right but for every fourth position, and one in between. Returns the greedy texts."""
    texts = [prompt + hf_greedy(target.model, prompt, SETTINGS.max_new_tokens) for prompt in PROMPTS]

    def draft(self, tree):
        tokens = [node.token for node in tree.path]
        self.draft_token_ids = None  # of the script's drafts
        text = next(text for text in texts if text[tree.root.position + 1 - len(tokens) :][: len(tokens)] == tokens)
        position = tree.root.position + len(tree.levels) + 1
        token = (text[position] + (position % 4 == 0 or position % 7 == 0)) % VOCAB
        return torch.nn.functional.one_hot(torch.tensor([token]), VOCAB) * 30.0

    monkeypatch.setattr(DFlashDrafter, "draft", draft)
    return texts


def logged(monkeypatch, head, target):
    """Rollouts with rounds of all kinds, and the target's pass over their texts."""
    drafts_mixed(monkeypatch, target)
    rollouts = roll_out(head, target, PROMPTS, SETTINGS)
    ids, labels, mask = padded(rollouts, target.device)
    features, hidden = teacher_features(target, ids, mask, head.config.anchors)
    return rollouts, {"features": features, "hidden": hidden, "labels": labels, "attention_mask": mask}


def test_rollouts_are_the_targets_text_and_their_rows_those_of_the_text(monkeypatch):
    """Guards the log: the verified rows up to the last accepted draft have the text's own states, those after do not,
    and the rounds follow each other without a gap."""
    target = deep_target()
    head = drafter_for(target)
    texts = drafts_mixed(monkeypatch, target)
    rollouts, teacher = logged(monkeypatch, head, target)
    seen = set()
    for row, (rollout, text) in enumerate(zip(rollouts, texts, strict=True)):
        assert rollout.tokens == text
        assert rollout.prompt_length == len(PROMPTS[row])
        anchor = rollout.prompt_length
        for one in rollout.rounds:
            accepted = rollout.accepted(one)
            assert one.anchor == anchor
            assert len(one.hidden) == 1 + len(one.drafts)
            assert not one.hidden.is_inference()
            wanted = teacher["hidden"][row, anchor : anchor + accepted + 1]
            torch.testing.assert_close(one.hidden[: accepted + 1], wanted[: len(one.hidden)], atol=1e-5, rtol=1e-4)
            if accepted + 1 < len(one.drafts):  # a row after the rejected draft
                other = teacher["hidden"][row, anchor + accepted + 1]
                assert (one.hidden[accepted + 1] - other).abs().max() > 1e-2
            seen.add(accepted)
            anchor += accepted + 1
        assert anchor >= len(text) - 1
    assert seen >= {0, 1, 2, 3}


def test_slots_of_both_streams():
    """Guards against learning after the end of a text, and against a round without its rejected draft's place."""
    hidden = torch.zeros(4, 2)
    rounds = [  # the text goes on with 5 6 7 8 9 and ends there
        (Round(2, (5, 6, 7), hidden), [1, 1, 1], [0, 0, 0]),  # all accepted
        (Round(2, (5, 0, 7), hidden), [1, 1, 0], [0, 1, 1]),
        (Round(2, (0, 6, 7), hidden), [1, 0, 0], [1, 1, 1]),  # what agrees by chance after it is not accepted
        (Round(5, (8, 9, 4), hidden), [1, 1, 0], [0, 0, 0]),  # the draft after the end was never verified
        (Round(5, (8, 4, 4), hidden), [1, 1, 0], [0, 1, 1]),
        (Round(5, (8, 9), hidden), [1, 1, 0], [0, 0, 0]),  # cut by the end of the generation
        (Round(6, (4,), hidden), [1, 0, 0], [1, 0, 0]),
        (Round(7, (), hidden), [0, 0, 0], [0, 0, 0]),
    ]
    for one, verified, rejected in rounds:
        rollout = Rollout([1, 2, 3, 5, 6, 7, 8, 9], 2, [one])
        blocks, *streams = slots_of([rollout], 4)
        assert blocks.anchors.tolist() == [one.anchor]
        assert [stream[0].astype(int).tolist() for stream in streams] == [verified, rejected]
    nothing = slots_of([Rollout([1, 2], 1, [])], 4)
    assert [len(part) for part in nothing] == [2, 0, 0]


@pytest.mark.parametrize("draft_vocab", [None, 30])
def test_loss_is_the_method(monkeypatch, draft_vocab):
    """Guards both streams by plain loops: which way each divergence goes, after which prefix, and its weight; and
    what the second one adds when it is on."""
    target = deep_target()
    head = drafter_for(target, draft_vocab=draft_vocab)
    rollouts, teacher = logged(monkeypatch, head, target)
    draft_ids = list(head.config.draft_token_ids or range(VOCAB))

    def log_p(hidden):
        logits = target.logits(hidden)
        return logits[draft_ids].log_softmax(-1), int(logits.argmax()) in draft_ids

    sums = {"verified": [0.0, 0.0], "rejected": [0.0, 0.0]}
    for row, rollout in enumerate(rollouts):
        for one in rollout.rounds:
            rows = reference_block(head, target, rollout.tokens, one.anchor, 4)
            accepted = rollout.accepted(one)
            for slot in range(1, 4):
                log_q = (head.norm(rows[slot]) @ head.output_rows(target).T).log_softmax(-1)
                if slot <= accepted + 1 and one.anchor + slot < len(rollout.tokens):
                    p, inside = log_p(teacher["hidden"][row, one.anchor + slot - 1])
                    sums["verified"][0] += inside * float((p.exp() * (p - log_q)).sum())
                    sums["verified"][1] += inside
                if slot > accepted and slot <= len(one.drafts) and one.anchor + accepted + 1 < len(rollout.tokens):
                    p, inside = log_p(one.hidden[slot - 1])
                    sums["rejected"][0] += inside * 0.8 ** (slot - 1) * float((log_q.exp() * (log_q - p)).sum())
                    sums["rejected"][1] += inside * 0.8 ** (slot - 1)
    assert min(weight for _, weight in sums.values()) > 3
    off = opd_loss(head, target, **teacher, rollouts=rollouts, rejected=False)
    both = opd_loss(head, target, **teacher, rollouts=rollouts)
    assert [float(off.total), float(off.counted)] == pytest.approx(sums["verified"], rel=1e-4)
    total = np.sum(list(sums.values()), axis=0)
    assert [float(both.total), float(both.counted)] == pytest.approx(total, rel=1e-4)
    assert int(both.supervised) == int(off.supervised) == 2 * SETTINGS.max_new_tokens


@pytest.mark.parametrize("rejected", [False, True])
def test_gradients_are_those_of_the_loss(monkeypatch, rejected):
    """Guards both streams' gradients by finite differences, along the gradient and across it; the target gets none."""
    target = deep_target()
    head = drafter_for(target, draft_vocab=30).config.new_head(target)
    rollouts, teacher = logged(monkeypatch, head, target)

    def value():
        return opd_loss(head, target, **teacher, rollouts=rollouts, rejected=rejected).total

    value().backward()
    weights = list(head.parameters())
    assert all(weight.grad is not None for weight in weights)
    assert all(weight.grad is None for weight in target.model.parameters())
    torch.manual_seed(0)
    for random in (0.0, 1.0):
        steps = [weight.grad + random * weight.grad.norm() * torch.randn_like(weight) for weight in weights]
        length = torch.stack([step.norm() for step in steps]).norm()
        slope = sum((weight.grad * step).sum() for weight, step in zip(weights, steps, strict=True)) / length
        values = []
        with torch.no_grad():
            for sign in (1, -2):  # there, and back to the other side
                for weight, step in zip(weights, steps, strict=True):
                    weight.add_(step, alpha=sign * 3e-3 / float(length))
                values.append(float(value()))
            for weight, step in zip(weights, steps, strict=True):
                weight.add_(step, alpha=3e-3 / float(length))
        assert (values[0] - values[1]) / 6e-3 == pytest.approx(float(slope), rel=0.02)


def test_replies_end_where_the_target_says():
    """Guards against replies past an end token, and prompts that leave a reply of one token, which has no round."""
    target = deep_target()
    head = drafter_for(target)
    text = hf_greedy(target.model, PROMPTS[0], 10)
    target.__dict__["eos_token_ids"] = (text[4],)
    end = text.index(text[4]) + 1
    (rollout,) = roll_out(head, target, PROMPTS[:1], SETTINGS)
    assert rollout.tokens == PROMPTS[0] + text[:end]
    (short,) = roll_out(head, target, PROMPTS[:1], RolloutSettings(18, Sampling(), len(PROMPTS[0]) + 1))
    assert (short.tokens, short.rounds) == (PROMPTS[0] + text[:1], [])
    loss = DraftOPDLoss(
        head.requires_grad_(True), target, terms=None, num_anchors=3, seed=0, rollout=None, rejected=True
    )
    loss.rollouts = [short]
    nothing = loss({}, (6,), 1)
    nothing.total.backward()
    assert [value.item() for value in nothing] == [0, 0, 0, 0]
    assert all(weight.grad is not None for weight in head.parameters())
