"""Training throughput: the training forward of pipeline_model.py beside the plain form of the same mathematics.

The plain form is what method.md section 4 says, written down directly: all m*S rows through every layer under a dense
(m*S)^2 mask, teacher and draft logits at every position, softmax over them, then the supervised ones are picked. Both
run whole steps (teacher pass, forward, backward) on the same batch, in turns, in one process. "cached" is this code in
an epoch after the first, with the teacher pass read from `--feature_cache`.

The bound of a step is what its multiplications, counted while it runs, would take at the rate of one large product of
matrices, measured between the steps in the same process, dtype and threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import new_parser, prepare, print_card
from loading.flags import COUNT, DTYPES, dtype_name
from pipeline_model import (
    SpeculationHead,
    Target,
    depth_types,
    grouped_attention,
    representative_depths,
    split_layers,
)
from planning.untrained_head import untrained_config
from script_utils import Parser, markdown_table, run_script
from training.feature_cache import FeatureCache
from training.forward import teacher_features, training_loss
from training.gemm_bound import gemm_rate
from training.new_head import new_head

FORMS = ("plain", "ours", "cached")
MEMORY_FORMS = ("plain", "ours")


def build_parser() -> Parser:
    parser = new_parser("Supervised tokens/s and peak memory of training")
    parser.add_argument("--batch_size", type=COUNT, default=4, help="sequences a step")
    parser.add_argument("--length", type=COUNT, default=256, help="tokens per sequence")
    parser.add_argument("--supervised", type=float, default=0.73, help="share of supervised tokens (ShareGPT has 0.73)")
    parser.add_argument(
        "--autocast", type=dtype_name, default="bfloat16", choices=["none", *DTYPES], help="autocast of both forms"
    )
    parser.add_argument("--steps", type=COUNT, default=3, help="timed steps of each form, after one warm-up")
    parser.add_argument(
        "--memory_of", choices=MEMORY_FORMS, help=argparse.SUPPRESS
    )  # runs one form alone, for its peak
    return parser


def plain_mask(anchors, stage_sizes, fill: int, attention_mask: Tensor) -> Tensor:
    """[B, m*S, m*S] bool for blocks ordered g_{m-1} .. g_0. A dead type's rows see only themselves."""
    types, depths = depth_types(anchors, stage_sizes), representative_depths(anchors, stage_sizes)
    num_stages, kinds, length = len(stage_sizes), len(anchors), attention_mask.shape[1]
    position = torch.arange(length, device=attention_mask.device)
    distance = position[:, None] - position
    table = torch.tensor(types, device=attention_mask.device)
    blocks = []
    for kind in reversed(range(kinds)):
        if depths[kind] is None:
            eye = torch.eye(length, dtype=torch.bool, device=distance.device)
            blocks.append(torch.cat([eye & (other == kind) for other in reversed(range(kinds))], dim=1))
            continue
        wanted = table[(depths[kind] + distance).clamp(0, num_stages)]
        wanted = torch.where(distance >= fill, kinds - 1, wanted)
        row = [(distance >= 0) & (wanted == other) for other in reversed(range(kinds))]
        blocks.append(torch.cat(row, dim=1))
    real = attention_mask.bool().repeat(1, kinds)
    mask = torch.cat(blocks) & real[:, None, :]
    return mask | torch.eye(kinds * length, dtype=torch.bool, device=mask.device)  # padded rows: anything but nothing


def plain_loss(head: SpeculationHead, target: Target, batch: dict, stage_sizes, fill: int):
    """(sum of KL, counted, supervised, agreed), every intermediate in full."""
    anchors, ids = head.config.aggr_feature_bound, batch["input_ids"]
    length = ids.shape[1]
    with torch.no_grad():
        last, captured = target.forward(ids, anchors)
        teacher = target.logits(last).float()  # [B, S, V]
        features = torch.stack([captured[b] for b in anchors], dim=2)
    kinds = list(reversed(range(len(anchors))))
    rows = torch.cat([head.aggregate(kind, features) for kind in kinds], dim=1)  # [B, m*S, H]
    cos, sin = (x.repeat(1, len(anchors), 1) for x in target.rope(length))
    mask = plain_mask(anchors, stage_sizes, fill, batch["attention_mask"])
    for layer in head.spec_layers:
        normed = layer.input_layernorm(rows)
        key, value = layer.keys_values(normed, (cos, sin))
        query, gate = layer.queries(normed, (cos, sin))
        pairs = zip(query, key, value, mask, strict=True)
        attended = [grouped_attention(q[None], k[None], v[None], m, layer.self_attn.scaling) for q, k, v, m in pairs]
        rows = layer.finish(rows, torch.cat(attended), gate)
    logits = head.lm_head(target.norm(rows[:, -length:])).float()  # [B, S, V_d]

    best = teacher.argmax(dim=-1)
    if (draft_ids := head.draft_token_ids) is not None:
        rank_of = torch.full((teacher.shape[-1],), -1, device=ids.device)
        rank_of[draft_ids] = torch.arange(len(draft_ids), device=ids.device)
        teacher, best = teacher[..., draft_ids], rank_of[best]
    log_p, log_q = (x.log_softmax(dim=-1) for x in (teacher, logits))
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1)  # [B, S]
    supervised = torch.zeros_like(best, dtype=torch.bool)
    supervised[:, :-1] = (batch["labels"][:, 1:] >= 0) & batch["attention_mask"][:, 1:].bool()
    counted = supervised & (best >= 0)
    agreed = (logits.argmax(dim=-1) == best) & supervised
    return divergence[counted].sum(), counted.sum(), supervised.sum(), agreed.sum()


def our_loss(head: SpeculationHead, target: Target, batch: dict, stage_sizes, fill: int):
    anchors, labels, mask = head.config.aggr_feature_bound, batch["labels"], batch["attention_mask"]
    features, hidden = teacher_features(target, batch["input_ids"], mask, anchors)
    return training_loss(head, target, features, hidden, labels, mask, stage_sizes=stage_sizes, fill=fill)


def cached_loss(cache: FeatureCache, head: SpeculationHead, target: Target, batch: dict, stage_sizes, fill: int):
    labels, mask = batch["labels"], batch["attention_mask"]
    features, hidden, best = cache.load(np.arange(len(labels)), batch["input_ids"], mask)
    shape = {"stage_sizes": stage_sizes, "fill": fill}
    return training_loss(head, target, features, hidden, labels, mask, teacher_best=best, **shape)


class Bench:
    """One target, one head for each vocabulary, one batch."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        # As train.py has them: the head's weights in float32 under autocast, the frozen target in the products' dtype.
        self.dtype = torch.float32 if args.autocast == "none" else DTYPES[args.autocast]
        self.target = Target.load(args.base_model_path, dtype=self.dtype, device=device)
        self.sizes = split_layers(self.target.num_layers, args.num_stages)
        vocab = self.target.config.vocab_size
        sizes = {"16k": args.draft_vocab_size, "full": vocab}
        shape = args.num_stages, args.num_spec_layers
        configs = {name: untrained_config(self.target, *shape, size) for name, size in sizes.items()}
        self.heads = {name: new_head(config, self.target) for name, config in configs.items()}
        generator = torch.Generator().manual_seed(0)
        shape = (args.batch_size, args.length)
        ids = torch.randint(0, vocab, shape, generator=generator)
        labels = ids.masked_fill(torch.rand(shape, generator=generator) >= args.supervised, -100)
        batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        self.batch = {name: tensor.to(device) for name, tensor in batch.items()}
        self.tokens = int((labels[:, 1:] >= 0).sum())
        if self.tokens == 0:
            raise ValueError(f"--length {args.length}, --supervised {args.supervised}: no token is supervised")
        self.losses = {"plain": plain_loss, "ours": our_loss}

    def open_cache(self, folder: Path) -> None:
        """Have the form "cached", too."""
        rows = datasets.Dataset.from_dict({"input_ids": self.batch["input_ids"].tolist()})
        lengths = np.full(len(rows), self.args.length)
        cache = FeatureCache(folder, self.target, self.heads["16k"].config.aggr_feature_bound, rows, lengths)
        cache.open()
        self.losses["cached"] = partial(cached_loss, cache)

    def step(self, form: str, vocabulary: str) -> tuple[float, float]:
        """Seconds of one step (teacher, forward, backward), and its loss."""
        head, loss = self.heads[vocabulary], self.losses[form]
        head.zero_grad(set_to_none=True)
        enabled = self.args.autocast != "none"
        begun = time.perf_counter()
        with torch.autocast(self.device.type, DTYPES[self.args.autocast] if enabled else None, enabled=enabled):
            total, counted, *_ = loss(head, self.target, self.batch, self.sizes, self.args.num_stages)
        (total / counted).backward()
        value = float((total / counted).detach())  # waits for the device
        return time.perf_counter() - begun, value

    def multiplications(self, form: str, vocabulary: str) -> float:
        """Floating-point operations of the products in one step."""
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product}) as counter:
            self.step(form, vocabulary)
        return counter.get_total_flops()


def added_product(_sum, first, second, **_) -> int:
    """Operations of `addmm_`, from the shapes of its arguments: torch counts all other products by itself."""
    return 2 * first[0] * first[1] * second[1]


def peak_memory(form: str) -> float:
    """Bytes that one step of a form needs beyond what was there before it, measured in a process of its own."""
    command = [sys.executable, *sys.argv, "--memory_of", form]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"measuring the memory of the {form} form failed: {result.stderr.strip().splitlines()[-1]}")
    return float(result.stdout.strip().splitlines()[-1])


def measure_memory(bench: Bench, form: str) -> None:
    with torch.no_grad():  # weights are mapped from their file: bring them in, they are not the step's
        bench.target.logits(bench.target.forward(bench.batch["input_ids"][:, :4], ())[0])
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        bench.step(form, "16k")
        print(torch.cuda.max_memory_allocated(bench.device) - before)
        return
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = process_kilobytes("VmRSS")
    bench.step(form, "16k")
    print((process_kilobytes("VmHWM") - before) * 1024)


def process_kilobytes(field: str) -> int:
    """A memory figure of this process, from Linux's /proc: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main(args: argparse.Namespace) -> None:
    bench = Bench(args, prepare(args))
    if args.memory_of:
        return measure_memory(bench, args.memory_of)
    kinds = [(form, vocabulary) for vocabulary in bench.heads for form in FORMS]
    seconds: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    losses, rates = {}, []
    bar = tqdm(total=(args.steps + 1) * len(kinds) + len(MEMORY_FORMS), desc="train_throughput", unit="step")
    with bar, tempfile.TemporaryDirectory() as folder:
        bench.open_cache(Path(folder))
        for step in range(args.steps + 1):
            for kind in kinds:
                lasted, losses[kind] = bench.step(*kind)
                if step:  # the first one warms up
                    seconds[kind].append(lasted)
                bar.update()
            rates.append(gemm_rate(bench.device, bench.dtype))  # what slows down the steps slows it down, too
        rate = statistics.median(rates)
        bound = {kind: bench.multiplications(*kind) / rate for kind in kinds}
        memory = {}
        for form in MEMORY_FORMS:
            memory[form] = peak_memory(form)
            bar.update()
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    report(args, bench, medians, bound, losses, memory)


def report(
    args: argparse.Namespace, bench: Bench, seconds: dict, bound: dict, losses: dict, memory: dict[str, float]
) -> None:
    """The card, the table and the JSON; all by (form, vocabulary). bound: seconds that the products would take."""
    rate = {kind: bench.tokens / lasted for kind, lasted in seconds.items()}
    batch = f"{args.batch_size} x {args.length}, {bench.tokens} supervised, autocast {args.autocast}"
    print_card(args, bench.device, batch=batch)
    heads = ["draft vocabulary", "form", "s a step", "supervised tokens/s", "loss", "of it products"]
    share = {kind: bound[kind] / lasted for kind, lasted in seconds.items()}
    lines = (
        (*kind[::-1], f"{lasted:.2f}", f"{rate[kind]:.0f}", f"{losses[kind]:.4f}", f"{share[kind]:.2f}")
        for kind, lasted in seconds.items()
    )
    print(markdown_table(heads, lines))
    print(f"\npeak memory of a step, 16k: plain {memory['plain'] / 1e6:.0f} MB, ours {memory['ours'] / 1e6:.0f} MB")
    result = {
        "speedup_16k": round(rate["ours", "16k"] / rate["plain", "16k"], 3),
        "speedup_full": round(rate["ours", "full"] / rate["plain", "full"], 3),
        "speedup_16k_cached": round(rate["cached", "16k"] / rate["plain", "16k"], 3),
        "speedup_full_cached": round(rate["cached", "full"] / rate["plain", "full"], 3),
        "tokens_per_s_16k": round(rate["ours", "16k"], 1),
        "tokens_per_s_16k_cached": round(rate["cached", "16k"], 1),
        "fraction_of_gemm_bound_16k": round(share["ours", "16k"], 3),
        "fraction_of_gemm_bound_full": round(share["ours", "full"], 3),
        "peak_memory_ratio": round(memory["ours"] / memory["plain"], 3),
        "autocast": args.autocast,
        "threads": args.threads,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run_script(main, build_parser())
