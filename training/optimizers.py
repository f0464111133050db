"""Optimisers and learning rate of training: AdamW, or Muon for the matrices that transform hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loading.flags import native_bfloat16

Coefficients = tuple[float, float, float]  # a, b, c of Newton-Schulz

SCHEDULES: dict[str, Callable[[float], float]] = {  # factor of the learning rate; 0 -> 1 from warm-up to the end
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 + 0.5 * math.cos(math.pi * done),
    "constant": lambda done: 1.0,
}


def lr_factor(step: int, total: int, warmup: int, schedule: str) -> float:
    """What the peak learning rate is multiplied with in a step, counted from 0: linear warm-up, then the schedule."""
    if step < warmup:
        return (step + 1) / warmup
    return SCHEDULES[schedule]((step - warmup) / max(1, total - warmup))


def build_optimizers(
    head: nn.Module,
    name: str,
    lr: float,
    *,
    lr_adamw: float | None = None,
    lm_head_lr_scale: float = 1.0,
    weight_decay: float = 0.0,
) -> list[torch.optim.Optimizer]:
    """`adamw`: one AdamW. `muon`: Muon for the matrices, AdamW for lm_head and vectors, at `lr_adamw` (None: lr / 2).

    The lm_head learns at `lm_head_lr_scale` times its optimizer's rate; a frozen one, or none, is in no optimizer.
    Vectors, that is norms, are not decayed.
    """
    output = [] if head.lm_head is None else [weight for weight in head.lm_head.parameters() if weight.requires_grad]
    matrices = [weight for weight in head.parameters() if weight.ndim == 2 and all(weight is not own for own in output)]
    matrices = [weight for weight in matrices if weight.requires_grad]
    vectors = {"params": [weight for weight in head.parameters() if weight.ndim < 2], "weight_decay": 0.0}
    shared = {"weight_decay": weight_decay, "fused": True}  # one kernel: ten times faster on a CPU, too
    if name == "adamw":
        groups = [{"params": [*matrices, *output]}]
        if lm_head_lr_scale != 1:
            groups = [{"params": matrices}, {"params": output, "lr": lr * lm_head_lr_scale}]
        return [torch.optim.AdamW([*groups, vectors], lr=lr, **shared)]
    # Updates as large as AdamW's: the usual learning rates and weight decays keep their meaning.
    muon_class = torch.optim.Muon if matrices[0].is_cuda else CpuMuon
    muon = muon_class(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    lr_adamw = lr / 2 if lr_adamw is None else lr_adamw
    output = {"params": output, "lr": lr_adamw * lm_head_lr_scale}
    return [muon, torch.optim.AdamW([output, vectors], lr=lr_adamw, **shared)]


def scale_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group to `factor` times the learning rate it was made with."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


class CpuMuon(torch.optim.Muon):
    """`torch.optim.Muon` (Nesterov, learning rate matched to AdamW's) for CPUs.

    The library's runs its matrix products in bfloat16 on every device: without kernels for it a CPU is far slower than
    in float32, which is used there. Processes that train together have the same gradients; each orthogonalises some of
    the matrices and sends them to the others.
    """

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            used = [weight for weight in group["params"] if weight.grad is not None]
            updates = [self._momentum(weight, group["momentum"]) for weight in used]
            orthogonalise_all(updates, group["ns_coefficients"], group["ns_steps"])
            for weight, update in zip(used, updates, strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))

    def _momentum(self, weight: Tensor, beta: float) -> Tensor:
        """Takes the gradient in; returns what to orthogonalise."""
        momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        momentum.lerp_(weight.grad, 1 - beta)
        return weight.grad.lerp(momentum, beta)


def orthogonalise_all(matrices: list[Tensor], coefficients: Coefficients, steps: int) -> None:
    """`orthogonalise` each matrix in place; with several processes each does a share, and all get all."""
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    works = [min(matrix.shape) ** 2 * sum(matrix.shape) for matrix in matrices]  # products of the small side's size
    load = [0] * processes  # each matrix goes to whoever has least, the costliest first
    owners = [0] * len(matrices)
    for index in sorted(range(len(matrices)), key=works.__getitem__, reverse=True):
        owners[index] = load.index(min(load))
        load[owners[index]] += works[index]
    for matrix, owner in zip(matrices, owners, strict=True):
        if owner == rank:
            matrix.copy_(orthogonalise(matrix, coefficients, steps))
    if processes > 1:
        for matrix, owner in zip(matrices, owners, strict=True):
            dist.broadcast(matrix, src=owner)


def orthogonalise(matrix: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """U V^T of a matrix's singular value decomposition, roughly: Newton-Schulz, singular values end in 0.7 .. 1.2."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    newton_schulz = _of_whole if native_bfloat16(matrix.device) else _of_small_side
    x = newton_schulz(x, coefficients, steps).to(matrix.dtype)
    return x.T if tall else x


def _of_whole(x: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """Newton-Schulz in bfloat16: each step is x <- p(g) x with g = x x^T and p(g) = a + b g + c g^2."""
    a, b, c = coefficients
    x = x.bfloat16()
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _of_small_side(x: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """The same in float32, with less to multiply.

    As g turns into p g p, the steps need the small side's square only, and x itself once at the end: for a matrix five
    times as wide as high, half of the work. In bfloat16 g, which has their squares, would lose small singular values.
    """
    a, b, c = coefficients
    gram, product = x @ x.T, None
    for step in range(steps):
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal().add_(a)
        product = polynomial if product is None else polynomial @ product
        if step < steps - 1:
            gram = polynomial @ gram @ polynomial
    return product @ x
