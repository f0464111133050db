"""Tokens per second of training/generate_answers.py's batch loop, beside `model.generate` of the same target.

Both continue the same prompts of random tokens, greedily and without an end token, in turns. The bound is what the
products with the weights, prompts included, would take at the rate of one large product of matrices, measured between
the batches in the same process, dtype and threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import new_parser, prepare, print_card
from loading.flags import COUNT, DTYPES, add_dtype_flag, fastest_dtype
from pipeline_model import Target
from script_utils import Parser, markdown_table, run_script
from training.batch_generation import PAD, generate_batch
from training.gemm_bound import gemm_rate, operations_per_token


def build_parser() -> Parser:
    parser = new_parser("Tokens/s of a target that writes training text")
    add_dtype_flag(parser, "auto: bfloat16 where the device has matrix kernels for it, else float32")
    parser.add_argument("--batch_size", type=COUNT, default=64, help="answers written side by side")
    parser.add_argument("--prompt_tokens", type=COUNT, default=64, help="of the longest prompt; the shortest has half")
    parser.add_argument("--max_new_tokens", type=COUNT, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=COUNT, default=2, help="timed batches of each form, after a short one")
    return parser


class Bench:
    """One target, one batch of prompts."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.target = Target.load(args.base_model_path, dtype=DTYPES[args.dtype], device=device)
        random = np.random.default_rng(0)
        lengths = np.linspace(max(1, args.prompt_tokens // 2), args.prompt_tokens, args.batch_size).astype(int)
        self.prompts = [random.integers(self.target.config.vocab_size, size=length).tolist() for length in lengths]
        self.forms: dict[str, Callable[[int], object]] = {"ours": self.ours, "generate": self.generate}

    def ours(self, count: int) -> None:
        generate_batch(self.target, self.prompts, count)

    def generate(self, count: int) -> None:
        """The library's loop, with the library's attention."""
        longest, config = max(map(len, self.prompts)), self.target.config
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in self.prompts])
        real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in self.prompts])
        settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
        inputs = {"input_ids": ids.to(self.target.device), "attention_mask": real.to(self.target.device)}
        ours, config._attn_implementation = config._attn_implementation, "sdpa"
        try:
            self.target.model.generate(**inputs, **settings)
        finally:
            config._attn_implementation = ours

    def operations(self, count: int) -> float:
        """Floating-point operations of the products with the weights in one batch."""
        layers, lm_head = operations_per_token(self.target)
        tokens = count * len(self.prompts)
        # The last token is not run, and each logit is of one new token.
        return layers * (sum(map(len, self.prompts)) + tokens - len(self.prompts)) + lm_head * tokens


def main(args: argparse.Namespace) -> None:
    device = prepare(args)
    args.dtype = fastest_dtype(args.dtype, device)
    bench = Bench(args, device)
    seconds: dict[str, list[float]] = {name: [] for name in bench.forms}
    rates = []
    for number in tqdm(range(args.rounds + 1), desc="write_answers", unit="round"):
        for name, write in bench.forms.items():
            begun = time.perf_counter()
            write(args.max_new_tokens if number else 2)
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - begun)
        rates.append(gemm_rate(device, bench.target.dtype))
    bound = bench.operations(args.max_new_tokens) / statistics.median(rates)
    tokens = args.batch_size * args.max_new_tokens
    speed = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    share = {name: bound / statistics.median(values) for name, values in seconds.items()}
    print_card(args, device, batch=f"{args.batch_size} prompts, {args.max_new_tokens} new tokens each, {args.dtype}")
    lines = ((name, f"{speed[name]:.1f}", f"{share[name]:.2f}") for name in speed)
    print(markdown_table(["form", "new tokens/s", "of it products"], lines) + "\n")
    result = {
        "tokens_per_s": round(speed["ours"], 1),
        "tokens_per_s_generate": round(speed["generate"], 1),
        "speedup_over_generate": round(speed["ours"] / speed["generate"], 3),
        "fraction_of_gemm_bound": round(share["ours"], 3),
        "dtype": args.dtype,
        "threads": args.threads,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run_script(main, build_parser())
