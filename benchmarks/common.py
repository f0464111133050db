"""What the benchmarks share: flags, and the card that stands above the numbers."""

from __future__ import annotations

import argparse
import platform

import torch

from loading.flags import COUNT, add_device_flag, native_bfloat16, resolve_device
from script_utils import Parser, git_commit, quiet_libraries


def new_parser(description: str) -> Parser:
    parser = Parser(description=f"{description}; the last line of the output is one JSON object.")
    parser.add_argument("--base_model_path", default="checkpoints/SmolLM2-135M-Instruct", help="target model")
    parser.add_argument("--num_stages", type=COUNT, default=6, help="n")
    parser.add_argument("--num_spec_layers", type=COUNT, default=2, help="L_s")
    parser.add_argument("--draft_vocab_size", type=COUNT, default=16384, help="V_d, capped at the target's vocabulary")
    parser.add_argument("--threads", type=COUNT, default=2, help="CPU threads")
    add_device_flag(parser, default="cpu")
    return parser


def prepare(args: argparse.Namespace) -> torch.device:
    """Set up a run; returns its device. ValueError for a device that is not there."""
    quiet_libraries()
    torch.set_num_threads(args.threads)
    return resolve_device(args.device)


def print_card(args: argparse.Namespace, device: torch.device, **details: str) -> None:
    """What the numbers below were measured with; `details` are lines of the one benchmark."""
    processor = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        processor += f", {torch.cuda.get_device_name(device)}"
    lines = {
        "target": f"{args.base_model_path}, n = {args.num_stages}, L_s = {args.num_spec_layers}",
        **details,
        "machine": f"{platform.machine()}, {processor}, {args.threads} threads, {device}",
        "bfloat16": f"{'native' if native_bfloat16(device) else 'no native'} matrix kernels",
        "versions": f"torch {torch.__version__}, commit {git_commit()}",
    }
    for name, line in lines.items():
        print(f"{name:<10}{line}")
    print()
