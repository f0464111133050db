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
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline_inference import Decoder, Generation, LocalExecutor, SPDDrafter, load_tokenizer
from pipeline_model import HeadConfig, SpeculationHead, Target, auto_anchors, split_layers
from script_utils import Parser, git_commit, quiet_libraries, resolve_device, run_script

PROMPT = "Explain how a pipeline keeps several tokens of one sequence in flight at the same time."


def build_parser() -> Parser:
    parser = Parser(description="Cycle times of the decode loop; the last line of the output is one JSON object.")
    parser.add_argument("--base_model_path", default="checkpoints/SmolLM2-135M-Instruct", help="target model")
    parser.add_argument("--num_stages", type=int, default=6, help="n")
    parser.add_argument("--num_spec_layers", type=int, default=2, help="L_s")
    parser.add_argument("--draft_vocab_size", type=int, default=16384, help="V_d, capped at the target's vocabulary")
    parser.add_argument("--cycles", type=int, default=40, help="timed cycles of each kind in a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the kinds take turns within each")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:N")
    return parser


class FullTreeDrafter(SPDDrafter):
    """Runs the head on every frontier node, then continues the best one only, so that every level keeps W nodes."""

    def draft(self, tree):
        logits = super().draft(tree)
        logits[1:] = 0  # flat: worse than the best W continuations of the first node
        return logits


class Bench:
    """One target in one dtype, with a random head, and its steady cycles."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype):
        self.args = args
        self.device = resolve_device(args.device)
        self.target = Target.load(args.base_model_path, dtype=dtype, device=self.device)
        turn = [{"role": "user", "content": PROMPT}]
        tokenizer = load_tokenizer(args.base_model_path)
        self.prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        self.sizes = split_layers(self.target.num_layers, args.num_stages)
        vocab = self.target.config.vocab_size
        draft_vocab = min(args.draft_vocab_size, vocab)
        config = HeadConfig(
            hidden_size=self.target.config.hidden_size,
            vocab_size=vocab,
            num_stages=args.num_stages,
            num_spec_layers=args.num_spec_layers,
            aggr_feature_bound=auto_anchors(self.sizes),
            draft_vocab_size=draft_vocab,
            draft_token_ids=None if draft_vocab == vocab else tuple(range(draft_vocab)),
        )
        torch.manual_seed(0)
        self.head = SpeculationHead(config, self.target.config).to(self.device, dtype).requires_grad_(False)

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

    def cycle_seconds(self, generation: Generation) -> list[float]:
        """Seconds of each of `cycles` cycles of a full pipeline."""
        generation._prefill()
        for _ in range(2 * len(generation.result.stage_sizes)):  # fill the pipeline, warm up
            generation._cycle()
        seconds = []
        for _ in range(self.args.cycles):
            begun = self.sync()
            generation._cycle()
            seconds.append(self.sync() - begun)
        return seconds

    def draft_seconds(self) -> list[float]:
        """Seconds of the head forward of a full pipeline (W = 1), alone."""
        generation = self.pipeline(1)
        generation._prefill()
        for _ in range(2 * self.args.num_stages):
            generation._cycle()
        drafter, seconds = generation._drafter, []
        with torch.inference_mode():
            kept = drafter._cache.length
            for _ in range(self.args.cycles):
                drafter._cache.length = kept
                drafter._row_types = [None if kind else kind for kind in drafter._row_types]  # all rows move on a depth
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


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each kind of work."""
    fp32, bf16 = Bench(args, torch.float32), Bench(args, torch.bfloat16)
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
    quiet_libraries()
    if args.cycles < 1 or args.rounds < 1:
        raise ValueError(f"--cycles is {args.cycles} and --rounds {args.rounds}: both must be at least 1")
    torch.set_num_threads(args.threads)
    seconds = measure(args)
    ratios = {
        "cycle_over_ar_plus_draft": seconds["cycle"] / (seconds["ar_step"] + seconds["draft"]),
        "tree4_over_chain": seconds["tree4_bf16"] / seconds["chain_bf16"],
        "ar_over_hf_generate": seconds["ar_token"] / seconds["hf_token"],
    }
    bf16_kernels = torch.ops.mkldnn._is_mkldnn_bf16_supported() if args.device == "cpu" else True
    print(f"target    {args.base_model_path}, n = {args.num_stages}, L_s = {args.num_spec_layers}")
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"machine   {platform.machine()}, {capability}, {args.threads} threads, {args.device}")
    print(f"bfloat16  {'native' if bf16_kernels else 'no native'} matrix kernels")
    print(f"versions  torch {torch.__version__}, commit {git_commit()[:12]}\n")
    print("| work | median ms |\n|---|---|")
    labels = {
        "ar_step": "autoregressive step, float32",
        "draft": "head forward, float32",
        "cycle": "full-pipeline cycle, W = 1, float32",
        "ar_token": "autoregressive loop, a token, float32",
        "hf_token": "model.generate, a token, float32",
        "chain_bf16": "full-pipeline cycle, W = 1, bfloat16",
        "tree4_bf16": "full-pipeline cycle, W = 4, bfloat16",
    }
    for name, label in labels.items():
        print(f"| {label} | {seconds[name] * 1e3:.2f} |")
    print("\n| ratio | value |\n|---|---|")
    for name, value in ratios.items():
        print(f"| {name} | {value:.3f} |")
    milliseconds = {f"{name}_ms": round(value * 1e3, 3) for name, value in seconds.items()}
    rounded = {name: round(value, 4) for name, value in ratios.items()}
    print(json.dumps(rounded | milliseconds | {"native_bf16": bool(bf16_kernels), "threads": args.threads}))


if __name__ == "__main__":
    run_script(main, build_parser())
