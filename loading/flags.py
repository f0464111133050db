"""Flags that several programs share, with the types of their values: the target, what it runs on, how to sample."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence

import torch

from loading.target_files import QUANTIZATIONS

Group = argparse._ArgumentGroup | argparse.ArgumentParser

ATTN_IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}  # short -> long


# ---------------------------------------------------------------------------------------------------------------------
# Types of values, for `type=`
# ---------------------------------------------------------------------------------------------------------------------


def bounded(kind: type, low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: an int or float in [low, high], or in (low, high] when `above`."""
    bound = f"{'above' if above else 'at least'} {low}" + ("" if high == math.inf else f" and at most {high}")

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low) or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'an integer' if kind is int else 'a number'} {bound}")
        return value

    return parse


def integers(text: str) -> tuple[int, ...]:
    """An argparse type: "2,3,6"."""
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 2,3,6") from None


COUNT, POSITIVE, NATURAL = bounded(int, 1), bounded(float, 0, above=True), bounded(int, 0)


def dtype_name(text: str) -> str:
    """The name of a data type as flags have it, for `type=`: bf16 is bfloat16. Other texts are left to `choices=`."""
    return DTYPE_NAMES.get(text, text)


# ---------------------------------------------------------------------------------------------------------------------
# The target, and what it runs on
# ---------------------------------------------------------------------------------------------------------------------


def add_loading_flags(group: Group, attention: Sequence[str] = ATTN_IMPLEMENTATIONS) -> None:
    """How a target is loaded, wherever its path comes from."""
    add_attention_flag(group, attention)
    group.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")


def add_attention_flag(group: Group, attention: Sequence[str] = ATTN_IMPLEMENTATIONS) -> None:
    group.add_argument("--attn_implementation", default="sdpa", choices=attention, help="attention kernels")


def add_quantization_flag(group: Group) -> None:
    group.add_argument("--quantization", choices=QUANTIZATIONS, help="quantise the target's weights while loading")


def add_dtype_flag(group: Group, auto: str = "auto: float32 on a CPU, or bfloat16") -> None:
    """The flag --dtype, for `resolve_dtype` or, where `auto` says so, `fastest_dtype`."""
    group.add_argument(
        "--dtype",
        type=dtype_name,
        default="auto",
        choices=["auto", *DTYPES],
        help=f"{auto}; fp32, bf16, fp16 and half work, too",
    )


def add_device_flag(group: Group, default: str = "auto") -> None:
    """The flag --device, for `resolve_device`."""
    group.add_argument("--device", default=default, help="auto, cpu, cuda or cuda:N")


def add_compile_flag(group: Group) -> None:
    group.add_argument(
        "--compile", action="store_true", help="compiled layers, on GPUs as CUDA graphs; for the target alone, too"
    )


def resolve_device(name: str) -> torch.device:
    """A torch device from a flag: "auto" is CUDA where there is one. ValueError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device is {name!r}: use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"--device is {name!r}, but this machine has {count} CUDA devices: use auto or cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The data type of a flag; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    automatic = "float32" if device.type == "cpu" else "bfloat16"
    return DTYPES[automatic if name == "auto" else name]


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 matrix kernels; torch falls back to slow ones on a CPU without."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def fastest_dtype(name: str, device: torch.device) -> str:
    """The name of a flag's data type; "auto" is bfloat16 where the device has kernels for it, else float32."""
    return name if name != "auto" else "bfloat16" if native_bfloat16(device) else "float32"


# ---------------------------------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------------------------------


def add_sampling_flags(
    group: Group,
    nargs: int | str | None = None,
    *,
    temperature: str = "0: greedy",
    seed: str = "of every random draw",
) -> None:
    """The flags of `Sampling`, and the seed of its draws.

    nargs: of --temperature, as argparse has it; temperature, seed: help texts.
    """
    several = {"default": 0.0} if nargs is None else {"default": [0.0], "nargs": nargs}
    group.add_argument("--temperature", type=float, help=temperature, **several)
    group.add_argument("--top_k", type=int, default=0, help="0: off")
    group.add_argument("--top_p", type=float, default=1.0, help="1: off")
    group.add_argument("--seed", type=int, default=0, help=seed)
