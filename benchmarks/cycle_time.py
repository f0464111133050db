"""How long a cycle of the pipeline takes, beside the work it cannot do without. CPU or GPU, one process.

Ratios, smaller is better, all from one run whose rounds take turns:

    cycle_over_ar_plus_draft   a full pipeline's cycle (W = 1) / (autoregressive step + one head forward), float32
    tree4_over_chain           a cycle with W = 4 candidates at every position / the W = 1 cycle, bfloat16
    ar_over_hf_generate        our autoregressive loop / `model.generate`, seconds a token, float32

The head is random: every draft is accepted unseen (but verified and timed), so that the pipeline stays full.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import head_config, native_bfloat16, new_parser, prepare, print_card
from pipeline_inference import Decoder, Generation, LocalExecutor, SPDDrafter, load_tokenizer
from pipeline_model import SpeculationHead, Target, split_layers
from script_utils import Parser, markdown_table, run_script

PROMPT = "Explain how a pipeline keeps several tokens of one sequence in flight at the same time."


def build_parser() -> Parser:
    parser = new_parser("Cycle times of the decode loop")
    parser.add_argument("--cycles", type=int, default=40, help="timed cycles of each kind in a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the kinds take turns within each")
    return parser


class FullTreeDrafter(SPDDrafter):
    """Runs the head on every frontier node, then continues the best one only, so that every level keeps W nodes."""

    def draft(self, tree):
        logits = super().draft(tree)
        logits[1:] = 0  # flat: worse than the best W continuations of the first node
        return logits


class Bench:
    """One target in one dtype, with a random head, and its steady cycles."""

    def __init__(self, args: argparse.Namespace, device: torch.device, dtype: torch.dtype):
        self.args, self.device = args, device
        self.target = Target.load(args.base_model_path, dtype=dtype, device=device)
        turn = [{"role": "user", "content": PROMPT}]
        tokenizer = load_tokenizer(args.base_model_path)
        self.prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        self.sizes = split_layers(self.target.num_layers, args.num_stages)
        config = head_config(args, self.target, args.draft_vocab_size)
        torch.manual_seed(0)
        self.head = SpeculationHead(config, self.target.config).to(device, dtype).requires_grad_(False)

    def sync(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def autoregressive(self) -> Generation:
        return Decoder(LocalExecutor(self.target, (self.target.num_layers,))).start(self.prompt, self.args.cycles + 8)

    def pipeline(self, width: int) -> Generation:
        executor = LocalExecutor(self.target, self.sizes, self.head.config.aggr_feature_bound)
        drafter = (FullTreeDrafter if width > 1 else SPDDrafter)(self.head, self.target, self.sizes)
        decoder = Decoder(executor, drafter, draft_top_k=width, verify_drafts=False)
        return decoder.start(self.prompt, self.args.cycles + 3 * self.args.num_stages)

    def fill(self, generation: Generation) -> None:
        """Run the prompt, fill the pipeline, warm up."""
        generation._prefill()
        for _ in range(2 * len(generation.result.stage_sizes)):
            generation._cycle()

    def cycle_seconds(self, generation: Generation) -> list[float]:
        """Seconds of each of `cycles` cycles of a full pipeline."""
        self.fill(generation)
        seconds = []
        for _ in range(self.args.cycles):
            begun = self.sync()
            generation._cycle()
            seconds.append(self.sync() - begun)
        return seconds

    @torch.inference_mode()
    def draft_seconds(self) -> list[float]:
        """Seconds of the head forward of a full pipeline (W = 1), alone: the draft of one cycle, again and again."""
        generation = self.pipeline(1)
        self.fill(generation)
        generation._begin_cycle()  # the newest token has entered, all others have moved on by one depth
        drafter, seconds = generation._drafter, []
        row_types, cached = drafter._row_types, drafter._cache.length
        for _ in range(self.args.cycles):
            drafter._row_types, drafter._cache.length = row_types.copy(), cached
            begun = self.sync()
            drafter.draft(generation.tree).argmax().item()
            seconds.append(self.sync() - begun)
        return seconds

    def generation_seconds(self, generate: Callable[[int], object]) -> float:
        """Seconds a token of a decode loop: a long generation less a short one."""
        times = []
        for count in (1, self.args.cycles + 1):
            begun = self.sync()
            generate(count)
            times.append(self.sync() - begun)
        return (times[1] - times[0]) / self.args.cycles

    def ours(self, count: int) -> None:
        Decoder(LocalExecutor(self.target, (self.target.num_layers,))).generate(self.prompt, count)

    def hf(self, count: int) -> None:
        ids = torch.tensor([self.prompt], device=self.device)
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        self.target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Median seconds of each kind of work."""
    fp32, bf16 = (Bench(args, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    samples: dict[str, list[float]] = {}
    kinds: dict[str, Callable[[], list[float]]] = {
        "ar_step": lambda: fp32.cycle_seconds(fp32.autoregressive()),
        "draft": fp32.draft_seconds,
        "cycle": lambda: fp32.cycle_seconds(fp32.pipeline(1)),
        "ar_token": lambda: [fp32.generation_seconds(fp32.ours)],
        "hf_token": lambda: [fp32.generation_seconds(fp32.hf)],
        "chain_bf16": lambda: bf16.cycle_seconds(bf16.pipeline(1)),
        "tree4_bf16": lambda: bf16.cycle_seconds(bf16.pipeline(4)),
    }
    with tqdm(total=args.rounds * len(kinds), unit="measurement", desc="cycle_time") as bar:
        for _ in range(args.rounds):
            for name, run in kinds.items():
                samples.setdefault(name, []).extend(run())
                bar.update()
    return {name: statistics.median(values) for name, values in samples.items()}


def main(args: argparse.Namespace) -> None:
    device = prepare(args, "cycles", "rounds")
    seconds = measure(args, device)
    ratios = {
        "cycle_over_ar_plus_draft": seconds["cycle"] / (seconds["ar_step"] + seconds["draft"]),
        "tree4_over_chain": seconds["tree4_bf16"] / seconds["chain_bf16"],
        "ar_over_hf_generate": seconds["ar_token"] / seconds["hf_token"],
    }
    print_card(args, device)
    labels = {
        "ar_step": "autoregressive step, float32",
        "draft": "head forward, float32",
        "cycle": "full-pipeline cycle, W = 1, float32",
        "ar_token": "autoregressive loop, a token, float32",
        "hf_token": "model.generate, a token, float32",
        "chain_bf16": "full-pipeline cycle, W = 1, bfloat16",
        "tree4_bf16": "full-pipeline cycle, W = 4, bfloat16",
    }
    times = ((label, f"{seconds[name] * 1e3:.2f}") for name, label in labels.items())
    print(markdown_table(["work", "median ms"], times) + "\n")
    print(markdown_table(["ratio", "value"], ((name, f"{value:.3f}") for name, value in ratios.items())))
    milliseconds = {f"{name}_ms": round(value * 1e3, 3) for name, value in seconds.items()}
    rounded = {name: round(value, 4) for name, value in ratios.items()}
    print(json.dumps(rounded | milliseconds | {"native_bf16": native_bfloat16(device), "threads": args.threads}))


if __name__ == "__main__":
    run_script(main, build_parser())
