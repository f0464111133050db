"""What a computation's products of matrices would take alone, at the rate that the machine reaches for a large one."""

from __future__ import annotations

import statistics
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline_model import Target

GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
COUNTED_TOKENS = 8


def gemm_rate(device: torch.device, dtype: torch.dtype, runs: int = 5) -> float:
    """Floating-point operations per second in one large product of square matrices: the median of some."""
    size = GEMM_SIZE[device.type]
    first, second = torch.randn(2, size, size, device=device).to(dtype)
    seconds = []
    for _ in range(runs):
        begun = time.perf_counter()
        float((first @ second)[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / statistics.median(seconds)


@torch.inference_mode()
def operations_per_token(target: Target) -> tuple[float, float]:
    """Floating-point operations of the products with a target's weights, for one token: its layers, its lm_head."""
    with FlopCounterMode(display=False) as counter:
        target.forward(torch.zeros(1, COUNTED_TOKENS, dtype=torch.long, device=target.device), ())
    return counter.get_total_flops() / COUNTED_TOKENS, 2 * target.lm_head.weight.numel()
