"""Distillation of the target into a head without ever holding all positions' logits (method.md sections 4 and 11.4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from pipeline_model import DraftHead, Target

LOSS_CHUNK = 256  # supervised positions whose logits exist at the same time
GRADIENT_CHUNK = 4 * LOSS_CHUNK  # positions whose products add to lm_head's whole gradient at the same time


class TrainingLoss(NamedTuple):
    """Sums over one batch; divide `total` by `counted` for the mean."""

    total: Tensor  # [] sum of KL * tau^2 over the counted positions, differentiable
    counted: Tensor  # [] positions in the loss: supervised, and the teacher's argmax is in the draft vocabulary
    supervised: Tensor  # [] positions whose next token is supervised
    agreed: Tensor  # [] of those, positions where the draft's argmax is the teacher's


class LossTerms(NamedTuple):
    """What a draft is trained for (method.md sections 4 and 11.4)."""

    # "kl", "tv": 1 - acceptance, "lk": between the two, the less KL the more is accepted already; of blocks also "ce":
    # cross-entropy with given tokens, "reverse_kl": KL(draft || teacher)
    kind: str = "kl"
    temperature: float = 1.0  # tau, of teacher and draft
    eta: float = 3.0  # lk: the weight of KL is exp(-eta * mean acceptance)


LOSS_KINDS = ("kl", "lk", "tv")
RENORMALISED = ("kl", "reverse_kl")  # see the teacher on the draft vocabulary alone
KL = LossTerms()


class _Distillation(torch.autograd.Function):
    """Sum of a loss between teacher and draft from hidden states, without ever holding all positions' logits.

    Forward computes the gradients of hidden states and lm_head along with the loss, chunk by chunk, if `learning`;
    backward scales them. Inputs: draft [P, H] and its lm_head [V_d, H] (differentiable), teacher [P, H] and its lm_head
    [V, H], the draft ids [V_d] or None, the teacher's argmax [P] or None for not known yet (of "ce" the tokens to
    draft), weights [P] or None for ones, terms, learning. Both hidden states are already normed. Returns total, counted
    (the sum of the weights that are in it), agreed.
    """

    @staticmethod
    def forward(ctx, draft, draft_head, teacher, teacher_head, draft_ids, teacher_best, weights, terms, learning):
        rows = _LossRows(draft, draft_head, teacher, teacher_head, draft_ids, teacher_best, terms)
        grads = _LossGradients(draft, draft_head if ctx.needs_input_grad[1] else None) if learning else None
        total = draft.new_zeros((), dtype=torch.float32)
        counted = torch.zeros((), dtype=torch.long if weights is None else torch.float32, device=draft.device)
        agreed = torch.zeros((), dtype=torch.long, device=draft.device)
        with torch.autocast(draft.device.type, enabled=False):
            kl_share = rows.kl_share()
            for part in rows.parts():
                loss, weight, right = rows.step(part, None if weights is None else weights[part], kl_share, grads)
                total += (loss * weight).sum()
                counted += weight.sum()
                agreed += right.sum()
            if learning:
                grads.finish()
        if learning:
            ctx.save_for_backward(grads.draft, grads.weight)
            ctx.dtype = draft.dtype
        ctx.mark_non_differentiable(counted, agreed)
        return total, counted, agreed

    @staticmethod
    def backward(ctx, grad, *_):
        draft_grad, weight_grad = ctx.saved_tensors
        # In place: these are this node's own, and the graph is walked once.
        weight_grad = None if weight_grad is None else weight_grad.mul_(grad)
        return draft_grad.mul_(grad).to(ctx.dtype), weight_grad, *[None] * 7


class _LossGradients:
    """The gradients of the draft's hidden states [P, H] and of its lm_head [V_d, H], from those of its logits.

    In float16 small ones would be 0 before a loss scale reaches them, as that comes with `backward`. So they have a
    scale of their own on their way through the products: the largest one under which no sum can overflow.
    """

    def __init__(self, draft: Tensor, draft_head: Tensor | None):
        """draft_head: None where it does not learn."""
        self.draft = torch.zeros_like(draft, dtype=torch.float32 if draft.dtype == torch.float16 else draft.dtype)
        self.weight = None if draft_head is None else torch.zeros_like(draft_head)
        self._waiting: list[tuple[Tensor, Tensor]] = []  # gradients and hidden states of chunks, not yet in `weight`

    def add(self, part: slice, grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Those of some positions: grad [p, V_d] of the logits, which are hidden [p, H] times weight [V_d, H]."""
        scale = self._scale(grad, hidden, weight) if hidden.dtype == torch.float16 else None
        grad = (grad if scale is None else grad * scale).to(hidden.dtype)
        self.draft[part] = self._unscaled(grad @ weight, scale).to(self.draft.dtype)
        if self.weight is None:
            return
        if scale is not None:
            self.weight += self._unscaled(grad.T @ hidden, scale)
        elif self.weight.dtype == hidden.dtype:  # in one kernel, without a product as large as itself
            self.weight.addmm_(grad.T, hidden)
        else:
            self._waiting.append((grad, hidden))
            if sum(len(rows) for _, rows in self._waiting) >= GRADIENT_CHUNK:
                self.finish()

    def finish(self) -> None:
        """Adds what waits. A product as large as lm_head for each chunk, and its sum, would cost more than its rows."""
        if self._waiting:
            grad, hidden = map(torch.cat, zip(*self._waiting, strict=True))
            self._waiting.clear()
            self.weight += grad.T @ hidden

    @staticmethod
    def _unscaled(product: Tensor, scale: Tensor | None) -> Tensor:
        return product if scale is None else product.float() / scale

    @staticmethod
    def _scale(grad: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        """A power of two, on the device."""
        size, largest = grad.abs(), torch.finfo(torch.float16).max
        sums = size.sum(dim=1).max() * weight.abs().max(), size.sum(dim=0).max() * hidden.abs().max(), size.max()
        return torch.exp2((largest / torch.stack(sums).max()).log2().floor().clamp(-14, 30))


class _LossRows:
    """Logits of draft and teacher, a chunk of positions at a time, and the loss of each position. Inputs as above."""

    def __init__(self, draft, draft_head, teacher, teacher_head, draft_ids, teacher_best, terms: LossTerms):
        device = draft.device
        automatic = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if automatic else teacher.dtype
        self.draft, self.weight = draft, draft_head.to(self.dtype)
        self.teacher, self.teacher_head, self.teacher_best = teacher, teacher_head, teacher_best
        self.terms, self.draft_ids = terms, draft_ids
        self.rank_of = None
        if draft_ids is not None:  # target id -> draft id, or -1
            self.rank_of = torch.full((len(teacher_head),), -1, device=device)
            self.rank_of[draft_ids] = torch.arange(len(draft_ids), device=device)
            if (
                teacher_best is not None and terms.kind in RENORMALISED
            ):  # the rest of the vocabulary is not needed any more
                self.teacher_head, self.draft_ids = teacher_head[draft_ids], None

    def parts(self) -> Iterator[slice]:
        for start in range(0, len(self.draft), LOSS_CHUNK):
            yield slice(start, start + LOSS_CHUNK)

    def logits(self, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft's hidden states and logits [p, V_d], the teacher's log-weights [p, V_d], its argmax's draft id or -1.

        The log-weights are the teacher's logits / tau where only their renormalised form matters, and otherwise log p;
        of "ce" the draft ids [p, 1] instead.
        """
        hidden = self.draft[part].to(self.dtype)
        if self.terms.kind == "ce":
            best = self.teacher_best[part] if self.rank_of is None else self.rank_of[self.teacher_best[part]]
            return hidden, linear(hidden, self.weight).float(), best[:, None].clamp(min=0), best
        target = linear(self.teacher[part].to(self.teacher_head.dtype), self.teacher_head)
        best = first_best(target) if self.teacher_best is None else self.teacher_best[part]
        if self.terms.kind not in RENORMALISED:
            target = self._tempered(target.float()).log_softmax(dim=-1)
        if self.draft_ids is not None:
            target = target[:, self.draft_ids]
        if self.terms.kind in RENORMALISED:  # a part of the vocabulary is enough in float32
            target = self._tempered(target.float())
        if self.rank_of is not None:
            best = self.rank_of[best]
        return hidden, linear(hidden, self.weight).float(), target, best

    def step(
        self, part: slice, weights: Tensor | None, kl_share: float, grads: _LossGradients | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of some positions [p], their weights, and where the argmaxes agree; adds their gradients to `grads`.

        A step of its own, so that nothing of it is held while the next one makes its logits.
        """
        hidden, logits, target, best = self.logits(part)
        inside, agreed = best >= 0, first_best(logits) == best
        weight = inside if weights is None else inside * weights
        loss, grad = self.terms_of(logits, target, kl_share)
        if grads is not None:
            grads.add(part, grad.mul_(weight[:, None]), hidden, self.weight)
        return loss, weight, agreed

    def kl_share(self) -> float:
        """lk: lambda = exp(-eta * mean acceptance over the batch); a constant, for no gradient goes through it."""
        if self.terms.kind != "lk":
            return float(self.terms.kind == "kl")
        accepted = counted = 0.0
        for part in self.parts():
            _, logits, target, best = self.logits(part)
            accepted += (acceptance(target.exp(), self._log_q(logits).exp()) * (best >= 0)).sum()
            counted += (best >= 0).sum()
        return float(torch.exp(-self.terms.eta * accepted / max(1, counted)))

    def _log_q(self, logits: Tensor) -> Tensor:
        return self._tempered(logits).log_softmax(dim=-1)

    def _tempered(self, logits: Tensor) -> Tensor:
        """Logits / tau, in place."""
        return logits if self.terms.temperature == 1 else logits.div_(self.terms.temperature)

    def terms_of(self, logits: Tensor, target: Tensor, kl_share: float) -> tuple[Tensor, Tensor]:
        """The loss of each position [p], and its gradient by the draft's logits [p, V_d].

        Overwrites `logits` and `target`: these are the largest things that a step needs at the same time.
        """
        tau, log_q = self.terms.temperature, self._log_q(logits)
        q, loss, grad = torch.exp(log_q, out=logits), 0.0, None
        if self.terms.kind == "ce":
            return -log_q.gather(1, target)[:, 0], q.scatter_add_(1, target, q.new_full(target.shape, -1)).div_(tau)
        if self.terms.kind == "reverse_kl":
            ratio = log_q - target.log_softmax(dim=-1)
            loss = (q * ratio).sum(dim=-1)
            return tau**2 * loss, q * (ratio - loss[:, None]) * tau
        if kl_share < 1:
            p = target.exp()
            loss = (1 - kl_share) * (1 - acceptance(p, q))
            short = (q < p).to(q.dtype)  # tokens of which the draft has too little: more of q is more acceptance
            grad = q * ((short * q).sum(dim=-1, keepdim=True) - short) * ((1 - kl_share) / tau)
        if kl_share > 0:
            # As usual for distillation, KL alone is times tau^2, so that its gradient does not fade with tau.
            scale = tau**2 if self.terms.kind == "kl" else kl_share
            log_p = target.log_softmax(dim=-1)
            p = torch.exp(log_p, out=target)
            loss = loss + scale * log_p.sub_(log_q).mul_(p).sum(dim=-1)
            difference = q.sub_(p)
            if scale != tau:
                difference.mul_(scale / tau)
            grad = difference if grad is None else grad.add_(difference)
        return loss, grad


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Chance that a draft sampled from q is kept, the sum of min(p, q): [..., V_d] -> [...].

    p is the target's whole distribution, here at the draft vocabulary's tokens: it need not sum to 1.
    """
    return torch.minimum(p, q).sum(dim=-1)


def supervised_places(labels: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Batch row and position of each token whose next one is supervised, [P] each; labels and mask [B, S]."""
    supervised = (labels[:, 1:] >= 0) & attention_mask[:, 1:].bool()
    return supervised.nonzero(as_tuple=True)


@torch.no_grad()
def teacher_argmax(target: Target, hidden: Tensor) -> Tensor:
    """The target's argmax over its whole vocabulary, from h_L [P, H]: [P]. Never holds all positions' logits."""
    return torch.cat([first_best(target.logits(rows)) for rows in hidden.split(LOSS_CHUNK)])


def first_best(logits: Tensor) -> Tensor:
    """argmax over the last dimension, the first of equal ones: on a CPU in bfloat16 four times as fast as `argmax`."""
    return logits.max(dim=-1).indices


def distillation_loss(
    head: DraftHead,
    target: Target,
    draft: Tensor,
    hidden: Tensor,
    teacher_best: Tensor | None,
    terms: LossTerms = KL,
    weights: Tensor | None = None,
) -> TrainingLoss:
    """The loss of P supervised rows: the head's outputs [P, H] and the target's h_L [P, H], both before the norm.

    teacher_best [P], the target's argmax where it is known; weights [P] of the rows in the mean, None for ones.
    """
    settings = head.draft_token_ids, hidden, teacher_best, terms, weights
    return rows_loss(target, target.norm(draft), head.lm_head.weight, *settings)


def rows_loss(
    target: Target,
    draft: Tensor,
    lm_head: Tensor,
    draft_ids: Tensor | None,
    hidden: Tensor,
    teacher_best: Tensor | None,
    terms: LossTerms,
    weights: Tensor | None,
) -> TrainingLoss:
    """`distillation_loss` of rows [P, H] that have been through their norm, with their lm_head's rows [V_d, H]."""
    with torch.no_grad():
        teacher = target.norm(hidden)
    rows = draft, lm_head, teacher, target.lm_head.weight
    learning = torch.is_grad_enabled()
    total, counted, agreed = _Distillation.apply(*rows, draft_ids, teacher_best, weights, terms, learning)
    return TrainingLoss(total, counted, counted.new_tensor(len(draft)), agreed)
