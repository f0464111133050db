"""Losses of drafts (method.md section 11.4): acceptance, the mixture `lk`, weights; gradients by finite differences."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from training.loss import LOSS_KINDS, LossTerms, acceptance, distillation_loss

ROWS, HIDDEN, VOCAB, DRAFT = 7, 6, 11, (1, 2, 5, 8, 10)


def problem(draft_ids=DRAFT, seed=0):
    """Hidden states of draft and teacher, a head and a target of nothing but an lm_head, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def lm_head(rows):
        layer = nn.Linear(HIDDEN, rows, bias=False, dtype=torch.float64)
        layer.weight.data.copy_(torch.randn(rows, HIDDEN, generator=generator) * 0.7)
        return layer

    target = SimpleNamespace(norm=nn.Identity(), lm_head=lm_head(VOCAB).requires_grad_(False))
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    head = SimpleNamespace(lm_head=lm_head(VOCAB if ids is None else len(ids)), draft_token_ids=ids)
    draft, hidden = (torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    return head, target, draft.requires_grad_(), hidden


def plain_loss(head, target, draft, hidden, terms, weights=None):
    """Row by row: total, counted. The share of KL in `lk` is a constant."""
    ids = range(VOCAB) if head.draft_token_ids is None else head.draft_token_ids.tolist()
    kl, missed, inside, tau = [], [], [], terms.temperature
    for row in range(ROWS):
        z, teacher = head.lm_head.weight @ draft[row], target.lm_head.weight @ hidden[row]
        q, p = (z / tau).softmax(-1), (teacher / tau).softmax(-1)
        inside.append(int(teacher.argmax()) in ids)
        kept = p[list(ids)]
        missed.append(1 - sum(min(a, b) for a, b in zip(kept, q, strict=True)))
        kept = kept / kept.sum()
        kl.append((kept * (kept.log() - q.log())).sum())
    weights = [1.0] * ROWS if weights is None else weights.tolist()
    counted = [weight * keep for weight, keep in zip(weights, inside, strict=True)]
    taken = [1 - m.detach() for m, keep in zip(missed, inside, strict=True) if keep]
    share = torch.exp(-terms.eta * torch.stack(taken).mean())
    losses = {
        "kl": [tau**2 * x for x in kl],
        "tv": missed,
        "lk": [share * x + (1 - share) * y for x, y in zip(kl, missed, strict=True)],
    }[terms.kind]
    return sum(c * x for c, x in zip(counted, losses, strict=True)), sum(counted)


@pytest.mark.parametrize("draft_ids", [DRAFT, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_loss_and_gradients_are_those_of_plain_loops(kind, temperature, draft_ids):
    """The chunked forward writes its own gradients: a slip there trains a worse head without a sign."""
    terms = LossTerms(kind, temperature, eta=1.5)
    head, target, draft, hidden = problem(draft_ids)
    weights = torch.linspace(0.2, 2, ROWS, dtype=torch.float64)
    for weighing in (None, weights):
        loss = distillation_loss(head, target, draft, hidden, None, terms, weighing)
        total, counted = plain_loss(head, target, draft, hidden, terms, weighing)
        torch.testing.assert_close(loss.total.double(), total, atol=1e-5, rtol=1e-5)
        assert float(loss.counted) == pytest.approx(float(counted), rel=1e-6)
        ours = torch.autograd.grad(loss.total, [draft, head.lm_head.weight])
        theirs = torch.autograd.grad(total, [draft, head.lm_head.weight])
        for mine, plain in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3, ROWS])
def test_mixed_precision_adds_every_row_to_the_lm_heads_gradient(chunk, monkeypatch):
    """Chunks wait for each other before they are added: the last ones, too few for a product, may not be forgotten."""
    monkeypatch.setattr("training.loss.LOSS_CHUNK", chunk)
    monkeypatch.setattr("training.loss.GRADIENT_CHUNK", 4)
    head, target, draft, hidden = problem(None)
    total, _ = plain_loss(head, target, draft, hidden, LossTerms())
    theirs = torch.autograd.grad(total, [draft, head.lm_head.weight])
    head.lm_head.float(), target.lm_head.float()
    draft = draft.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = distillation_loss(head, target, draft, hidden.float(), None)
    ours = torch.autograd.grad(loss.total, [draft, head.lm_head.weight])
    for mine, plain in zip(ours, theirs, strict=True):
        assert (mine - plain).norm() < 0.02 * plain.norm()


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_gradient_by_finite_differences(kind):
    """Not of `lk` by itself: its share of KL moves with the draft, and no gradient may go through that."""
    head, target, draft, hidden = problem()
    terms = LossTerms(kind, eta=0.0 if kind == "lk" else 3.0)
    (gradient,) = torch.autograd.grad(distillation_loss(head, target, draft, hidden, None, terms).total, draft)
    at = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        up, down = (plain_loss(head, target, draft + sign * 1e-5 * at, hidden, terms)[0] for sign in (1, -1))
    assert float((gradient * at).sum()) == pytest.approx(float(up - down) / 2e-5, rel=1e-4)


def test_a_known_argmax_of_the_teacher_changes_nothing():
    for kind in LOSS_KINDS:
        head, target, draft, hidden = problem()
        best = (hidden @ target.lm_head.weight.T).argmax(-1)
        losses = [distillation_loss(head, target, draft, hidden, known, LossTerms(kind)) for known in (None, best)]
        torch.testing.assert_close(losses[0].total, losses[1].total)
        assert losses[0].agreed == losses[1].agreed


def test_acceptance_is_one_less_total_variation():
    """Half the L1 distance on the whole vocabulary, where the draft has nothing outside its own."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(20, VOCAB, generator=generator).softmax(-1)
    q = torch.zeros_like(p)
    q[:, list(DRAFT)] = torch.rand(20, len(DRAFT), generator=generator).softmax(-1)
    kept = acceptance(p[:, list(DRAFT)], q[:, list(DRAFT)])
    torch.testing.assert_close(1 - kept, (p - q).abs().sum(-1) / 2)
    assert (kept <= p[:, list(DRAFT)].sum(-1) + 1e-6).all()
