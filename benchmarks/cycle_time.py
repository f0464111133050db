"""How long a cycle of the pipeline takes, beside the work it cannot do without. CPU or GPU, one process.

Ratios, smaller is better, all from one run whose rounds take turns:

    cycle_over_ar_plus_draft   a full pipeline's cycle (W = 1) / (autoregressive step + one head forward), float32
    tree4_over_chain           a cycle with W = 4 candidates at every position / the W = 1 cycle, bfloat16
    ar_over_hf_generate        our autoregressive loop / `model.generate`, seconds per token, float32

With --compile, everything compiled beside everything eager, float32:

    ar_compiled_over_eager     the autoregressive step, compiled / eager
    cycle_compiled_over_eager  the cycle (W = 1), target and head, likewise
    ar_over_bandwidth_bound, ar_compiled_over_bandwidth_bound
                               the step / (bytes of the weights it reads / the rate at which a sum reads memory)

and the seconds until a new process has its first compiled token (target, prompt and one step), and what compiling the
head adds: with the compiler's cache empty (cold), and as that process leaves it (warm).

With --context, for prompts of these lengths, in bfloat16 where the device has kernels for it: the prompt itself beside
`model.generate`'s, and both cycles after it.

The head is random: every draft is accepted unseen (but verified and timed), so that the pipeline stays full.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import new_parser, prepare, print_card
from decoding.stage import Stage
from loading.flags import COUNT, native_bfloat16
from loading.target_files import read_text_config
from loading.tokenizer import load_tokenizer
from pipeline_inference import Decoder, Generation, LocalExecutor, SPDDrafter
from pipeline_model import SpeculationHead, Target, split_layers
from planning.untrained_head import untrained_config
from script_utils import Parser, markdown_table, run_script

STREAMED = 2**28  # bytes at least of the sum that measures the memory: more than any cache holds
PROMPT = "Explain how a pipeline keeps several tokens of one sequence in flight at the same time."


def build_parser() -> Parser:
    parser = new_parser("Cycle times of the decode loop")
    parser.add_argument("--cycles", type=COUNT, default=40, help="timed cycles of each kind in a round")
    parser.add_argument("--rounds", type=COUNT, default=5, help="rounds; the kinds take turns within each")
    parser.add_argument("--compile", action="store_true", help="compiled stages beside eager ones")
    parser.add_argument("--context", type=int, nargs="+", default=[], help="prompt lengths to measure cycles after")
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
        config = untrained_config(self.target, args.num_stages, args.num_spec_layers, args.draft_vocab_size)
        torch.manual_seed(0)
        self.head = SpeculationHead(config, self.target.config).to(device, dtype).requires_grad_(False)

    def sync(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def autoregressive(self, compiled: bool = False) -> Generation:
        executor = LocalExecutor(self.target, (self.target.num_layers,), compiled=compiled)
        return Decoder(executor).start(self.prompt, self.args.cycles + 8)

    def pipeline(self, width: int, compiled: bool = False) -> Generation:
        executor = LocalExecutor(self.target, self.sizes, self.head.config.aggr_feature_bound, compiled=compiled)
        drafter_class = FullTreeDrafter if width > 1 else SPDDrafter
        drafter = drafter_class(self.head, self.target, self.sizes, compiled=compiled)
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
        short, long = (self.timed(generate, count) for count in (1, self.args.cycles + 1))
        return (long - short) / self.args.cycles

    def timed(self, generate: Callable[[int], object], count: int) -> float:
        """Seconds of a generation of so many tokens."""
        begun = self.sync()
        generate(count)
        return self.sync() - begun

    def bandwidth_bound(self) -> list[float]:
        """Seconds to read the weights of a step once, as fast as a sum over as many bytes does."""
        read = [*self.target.layers.parameters(), *self.target.norm.parameters(), *self.target.lm_head.parameters()]
        size = sum(weight.nbytes for weight in read)
        memory = torch.zeros(max(STREAMED, size) // 4, device=self.device)
        begun = self.sync()
        memory.sum()
        return [(self.sync() - begun) * size / memory.nbytes]

    def first_compiled_tokens(self) -> FirstCompiled:
        """How long the first generations with --compile take until they run."""
        begun = self.sync()
        self.fill(self.autoregressive(compiled=True))
        target = self.sync()
        self.fill(self.pipeline(1, compiled=True))
        return FirstCompiled(target - begun, self.sync() - target)

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
    if args.compile:
        kinds |= {
            "ar_step_compiled": lambda: fp32.cycle_seconds(fp32.autoregressive(compiled=True)),
            "cycle_compiled": lambda: fp32.cycle_seconds(fp32.pipeline(1, compiled=True)),
            "bandwidth_bound": fp32.bandwidth_bound,
        }
    with tqdm(total=args.rounds * len(kinds), unit="measurement", desc="cycle_time") as bar:
        for _ in range(args.rounds):
            for name, run in kinds.items():
                samples.setdefault(name, []).extend(run())
                bar.update()
    return {name: statistics.median(values) for name, values in samples.items()}


A, T = TypeVar("A"), TypeVar("T")


class FirstCompiled(NamedTuple):
    """Seconds, each with a prompt and a few steps."""

    token: float  # until the target alone has a token
    head: float  # more until a pipeline has one


def first_compiled(args: argparse.Namespace) -> FirstCompiled:
    device = prepare(args)
    return Bench(args, device, torch.float32).first_compiled_tokens()


def use_compiler_cache(folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def in_new_process(run: Callable[[A], T], argument: A, cache: str) -> T:
    """What a function returns in a process of its own, whose compiler has its cache in a folder."""
    settings = {"mp_context": get_context("spawn"), "initializer": use_compiler_cache, "initargs": (cache,)}
    with ProcessPoolExecutor(1, **settings) as pool:
        return pool.submit(run, argument).result()


def cold_and_warm(args: argparse.Namespace) -> dict[str, float]:
    """`first_compiled` with an empty cache, then with the one that this has left."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: in_new_process(first_compiled, args, folder) for name in ("cold", "warm")}
    return {f"first_compiled_{kind}_s_{name}": getattr(f, kind) for name, f in found.items() for kind in f._fields}


def after_context(args: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    """For each prompt length: medians in milliseconds, their ratios, and this process's peak memory.

    The cycles are those after a prompt that was not run: its keys and values are zeros, which takes no less time.
    """
    bench = Bench(args, device, torch.bfloat16 if native_bfloat16(device) else torch.float32)
    words, rows = bench.prompt, []
    for length in sorted(args.context):
        bench.prompt = (words * (length // len(words) + 1))[:length]
        kinds: dict[str, Callable[[], list[float]]] = {
            "ar_step": lambda: bench.cycle_seconds(bench.autoregressive()),
            "draft": bench.draft_seconds,
            "cycle": lambda: bench.cycle_seconds(bench.pipeline(1)),
            "tree4": lambda: bench.cycle_seconds(bench.pipeline(4)),
        }
        row = {"prefill": bench.timed(bench.ours, 1)}
        with prompts_not_run():
            for name, run in kinds.items():
                gc.collect()  # what the last kind had in memory: a generation and its iterator refer to each other
                row[name] = statistics.median(run())
        peak = peak_megabytes(device)  # ours: the library's own prompt may need more
        row["hf_prefill"] = bench.timed(bench.hf, 1)
        ratios = {
            "cycle_over_ar_plus_draft": row["cycle"] / (row["ar_step"] + row["draft"]),
            "tree4_over_chain": row["tree4"] / row["cycle"],
            "prefill_over_hf_generate": row["prefill"] / row["hf_prefill"],
        }
        milliseconds = {f"{name}_ms": round(value * 1e3, 3) for name, value in row.items()}
        rounded = {name: round(value, 3) for name, value in ratios.items()}
        rows.append({"length": length, **milliseconds, **rounded, "peak_mb": peak})
    return rows


@contextmanager
def prompts_not_run() -> Iterator[None]:
    """Stages have memory for a prompt, and leave it as it is."""
    run = Stage.prefill
    Stage.prefill = lambda stage, hidden, start: (hidden, dict.fromkeys(stage.anchors, hidden))
    try:
        yield
    finally:
        Stage.prefill = run


def peak_megabytes(device: torch.device) -> int:
    """The most memory that this process has held: on a GPU the device's, otherwise the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def check_context(args: argparse.Namespace) -> None:
    """ValueError for prompts that leave no room for the cycles."""
    room = read_text_config(args.base_model_path).max_position_embeddings - args.cycles - 3 * args.num_stages
    for length in args.context:
        if not 1 <= length <= room:
            raise ValueError(
                f"--context is {length}: with --cycles {args.cycles} and --num_stages {args.num_stages} the target "
                f"has room for 1 .. {room} tokens"
            )


def main(args: argparse.Namespace) -> None:
    device = prepare(args)
    check_context(args)
    contexts = after_context(args, device) if args.context else []  # first: its peak memory is that of nothing else
    seconds = measure(args, device)
    ratios = {
        "cycle_over_ar_plus_draft": seconds["cycle"] / (seconds["ar_step"] + seconds["draft"]),
        "tree4_over_chain": seconds["tree4_bf16"] / seconds["chain_bf16"],
        "ar_over_hf_generate": seconds["ar_token"] / seconds["hf_token"],
    }
    if args.compile:
        ratios |= {
            "ar_compiled_over_eager": seconds["ar_step_compiled"] / seconds["ar_step"],
            "cycle_compiled_over_eager": seconds["cycle_compiled"] / seconds["cycle"],
            "ar_over_bandwidth_bound": seconds["ar_step"] / seconds["bandwidth_bound"],
            "ar_compiled_over_bandwidth_bound": seconds["ar_step_compiled"] / seconds["bandwidth_bound"],
        }
    firsts = cold_and_warm(args) if args.compile else {}
    print_card(args, device)
    labels = {
        "ar_step": "autoregressive step, float32",
        "draft": "head forward, float32",
        "cycle": "full-pipeline cycle, W = 1, float32",
        "ar_token": "autoregressive loop, a token, float32",
        "hf_token": "model.generate, a token, float32",
        "chain_bf16": "full-pipeline cycle, W = 1, bfloat16",
        "tree4_bf16": "full-pipeline cycle, W = 4, bfloat16",
        "ar_step_compiled": "autoregressive step, compiled, float32",
        "cycle_compiled": "full-pipeline cycle, W = 1, compiled, float32",
        "bandwidth_bound": "reading a step's weights once, float32",
    }
    times = ((label, f"{seconds[name] * 1e3:.2f}") for name, label in labels.items() if name in seconds)
    print(markdown_table(["work", "median ms"], times) + "\n")
    print(markdown_table(["ratio", "value"], ((name, f"{value:.3f}") for name, value in ratios.items())))
    if firsts:
        print(
            "\n"
            + markdown_table(["until it runs compiled, float32", "s"], ((n, f"{s:.1f}") for n, s in firsts.items()))
        )
    if contexts:
        print("\n" + markdown_table(contexts[0], (row.values() for row in contexts)))
    milliseconds = {f"{name}_ms": round(value * 1e3, 3) for name, value in seconds.items()}
    rounded = {name: round(value, 4) for name, value in ratios.items()}
    machine = {"native_bf16": native_bfloat16(device), "threads": args.threads}
    firsts = {name: round(value, 2) for name, value in firsts.items()}
    print(json.dumps(rounded | milliseconds | firsts | machine | ({"context": contexts} if contexts else {})))


if __name__ == "__main__":
    run_script(main, build_parser())
