"""A step of Muon on a CPU for the matrices of a head, by processes that train together.

    alone     optimizers.CpuMuon, every process does all products
    shared    the same as train.py runs it: each process does its share and sends it to the others
    library   torch.optim.Muon, whose products are in bfloat16, every process does all; with --library

They take turns within each round; a step ends when the last process has all matrices. Weights and gradients are random:
the products cost the same whatever they are of.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import new_parser, prepare, print_card
from loading.flags import COUNT
from pipeline_model import Target
from planning.untrained_head import untrained_config
from script_utils import Parser, markdown_table, run_script
from training.new_head import new_head
from training.optimizers import CpuMuon, build_optimizers

Shapes = list[tuple[int, int]]


def build_parser() -> Parser:
    parser = new_parser("A step of Muon, shared between processes or not")
    parser.add_argument("--processes", type=COUNT, default=2, help="processes that train together")
    parser.add_argument("--rounds", type=COUNT, default=5, help="steps of each kind")
    parser.add_argument("--library", action="store_true", help="torch's Muon, too: can take a minute a step on a CPU")
    return parser


def muon_shapes(args: argparse.Namespace, target: Target) -> Shapes:
    """Shapes of the matrices that Muon trains in a head of this target."""
    config = untrained_config(target, args.num_stages, args.num_spec_layers, args.draft_vocab_size)
    head = new_head(config, target)
    muon = build_optimizers(head, "muon", 1e-3)[0]
    return [tuple(weight.shape) for group in muon.param_groups for weight in group["params"]]


def time_steps(rank: int, port: int, args: argparse.Namespace, shapes: Shapes, result: Path) -> None:
    """Body of a process; the first one writes the seconds of each kind of step."""
    torch.set_num_threads(max(1, args.threads // args.processes))
    store = dist.TCPStore("127.0.0.1", port, args.processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.processes)
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    settings = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}
    ours = CpuMuon(weights, **settings)

    def unshared() -> AbstractContextManager:
        return patch.object(dist, "is_initialized", return_value=False)

    kinds: dict[str, tuple[torch.optim.Optimizer, Callable[[], AbstractContextManager]]] = {
        "alone": (ours, unshared),
        "shared": (ours, nullcontext),
    }
    if args.library:
        kinds["library"] = (torch.optim.Muon(weights, **settings), nullcontext)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(args.rounds + 1):  # the first is a warm-up
        for name, (optimizer, setting) in kinds.items():
            torch.manual_seed(number)  # the same gradients in all processes, as after an all-reduce
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            dist.barrier()
            begun = time.perf_counter()
            with setting():
                optimizer.step()
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - begun)
    if rank == 0:
        result.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure(args: argparse.Namespace, shapes: Shapes, result: Path) -> dict[str, float]:
    """Median milliseconds of each kind of step."""
    store = dist.TCPStore("127.0.0.1", 0, args.processes, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(time_steps, (store.port, args, shapes, result), nprocs=args.processes)
    return {name: statistics.median(each) * 1e3 for name, each in json.loads(result.read_text()).items()}


def main(args: argparse.Namespace) -> None:
    device = prepare(args)
    if device.type != "cpu":
        raise ValueError(f"--device is {args.device!r}: Muon's products are shared on a CPU only, use cpu")
    shapes = muon_shapes(args, Target.load(args.base_model_path, dtype=torch.float32))
    print_card(args, device, processes=str(args.processes), matrices=str(len(shapes)))
    with tempfile.TemporaryDirectory() as folder:
        ms = measure(args, shapes, Path(folder) / "seconds.json")
    print(markdown_table(["step", "ms"], [(name, f"{value:.1f}") for name, value in ms.items()]))
    ratios = {"shared_over_alone": ms["shared"] / ms["alone"]}
    if args.library:
        ratios["alone_over_library"] = ms["alone"] / ms["library"]
    times = {f"{name}_ms": value for name, value in ms.items()}
    figures = {name: round(value, 3) for name, value in (ratios | times).items()}
    print(json.dumps(figures | {"processes": args.processes, "threads": args.threads}))


if __name__ == "__main__":
    run_script(main, build_parser())
