"""Wall-clock speed of two ranks on two cores beside standard decoding on one: real processes, a real target and head.

Two processes, each pinned to a core of its own, run two stages; the first one drafts and verifies as well
(--colocate_draft), so it gets fewer layers. In the same run, in turns: the target alone on one core, and on both.

    speedup            pipeline / the target alone on one core: what a second device of the same kind brings
    speedup_same_cores pipeline / the target alone on both cores
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from decoding.result import shared_length
from decoding.sampling import Sampling
from distributed_inference.launch import Checked, Lead, RankParser, RankProcess, add_arguments
from loading.flags import COUNT, DTYPES, dtype_name, resolve_dtype
from loading.tokenizer import encode_prompt, load_tokenizer
from pipeline_inference import Decoder, LocalExecutor
from pipeline_model import Target
from script_utils import Parser, git_commit, markdown_table, quiet_libraries, run_script

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


def build_parser() -> Parser:
    parser = Parser(description="Two co-located ranks beside one core; the last line of the output is one JSON object.")
    parser.add_argument("--base_model_path", default=str(CHECKPOINTS / "SmolLM2-135M-Instruct"), help="target model")
    parser.add_argument("--spec_head_ckpt", default=str(CHECKPOINTS / "SmolLM2-135M-Instruct_s6_l2.pt"), help="head")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.txt"), help="a prompt a line")
    parser.add_argument("--stage_layers", default="8;22", help="layers of the two stages")
    parser.add_argument("--lm_head", default="draft", choices=["draft", "last"], help="rank that computes the logits")
    parser.add_argument("--verify_lag", type=int, default=0, choices=[0, 1], help="1: verify beside the next cycle")
    parser.add_argument(
        "--dtype", type=dtype_name, default="float32", choices=DTYPES, help="of target and head, in all three"
    )
    parser.add_argument("--max_new_tokens", type=COUNT, default=64, help="new tokens of a prompt at most")
    parser.add_argument("--num_prompts", type=COUNT, default=6, help="the first so many prompts")
    parser.add_argument("--rounds", type=COUNT, default=3, help="rounds; the three take turns within each")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="the two cores")
    return parser


class Measurement:
    """What the draft rank does, as a script of launch.py: decodes all prompts and writes down what it took."""

    interactive = False

    def __init__(self, prompts: list[list[int]], result: Path):
        self._prompts, self._result = prompts, result

    def prepare(self, checked: Checked) -> None:
        for prompt in self._prompts:
            checked.check_prompt(prompt)

    def claim(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, lead: Lead) -> int:
        decoder = lead.speculative(*lead.args.spec_head_ckpt, Sampling(), 1)
        lead.warm_up(self._prompts[0], decoder)
        self._result.write_text(json.dumps(decode(decoder, self._prompts, lead.args.max_new_tokens)))
        return 0

    def interrupted(self) -> bool:
        return False

    def last_words(self) -> None:
        pass


def decode(decoder: Decoder, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Tokens, counts and seconds of all prompts together."""
    results = [decoder.generate(prompt, max_new_tokens) for prompt in prompts]
    return {
        "tokens": [result.tokens for result in results],
        "tokens_per_second": sum(r.new_tokens for r in results) / sum(r.timings.decode for r in results),
        "new_tokens": sum(result.new_tokens for result in results),
        "cycles": sum(result.cycles for result in results),
        "accepted": sum(result.n_accepted for result in results),
        "verified": sum(result.n_verified for result in results),
        "wait_share": sum(r.timings.wait for r in results) / sum(r.timings.decode for r in results),
    }


def run_alone(args: argparse.Namespace, prompts: list[list[int]], cores: list[int], result: Path) -> None:
    """Process body: the target alone, a thread a core."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    quiet_libraries()
    target = Target.load(args.base_model_path, dtype=resolve_dtype(args.dtype, torch.device("cpu")))
    decoder = Decoder(LocalExecutor(target, (target.num_layers,)), eos_token_ids=target.eos_token_ids)
    decoder.generate(prompts[0], 4)
    result.write_text(json.dumps(decode(decoder, prompts, args.max_new_tokens)))


def run_rank(args: argparse.Namespace, prompts: list[list[int]], rank: int, port: int, result: Path) -> None:
    """Process body: one of the two ranks, on its own core."""
    os.sched_setaffinity(0, [args.cores[rank]])
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    quiet_libraries()
    parser = RankParser(prog="colocated_speed.py")
    add_arguments(parser)
    paths = ["--base_model_path", args.base_model_path, "--spec_head_ckpt", args.spec_head_ckpt, "--dtype", args.dtype]
    stages = ["--stage_layers", args.stage_layers, "--colocate_draft", "--lm_head", args.lm_head, "--rank_gpus", "cpu"]
    limits = ["--max_new_tokens", str(args.max_new_tokens), "--verify_lag", str(args.verify_lag)]
    flags = parser.parse_args([*paths, *stages, *limits])
    RankProcess(Measurement(prompts, result), flags, parser).run()


def in_processes(bodies: list[tuple], result: Path) -> dict[str, Any]:
    """Run process bodies side by side; what they wrote down. ValueError when one of them fails."""
    context = get_context("fork")  # nothing here has threads yet, and the imports are done
    processes = [context.Process(target=function, args=(*arguments, result)) for function, *arguments in bodies]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise ValueError("a measured process failed: its reason stands above")
    return json.loads(result.read_text())


def measure(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, list[dict[str, Any]]]:
    """All rounds of the three."""
    runs: dict[str, list[dict[str, Any]]] = {"one core": [], "two ranks": [], "two cores": []}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for _ in range(args.rounds):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ranks = [(run_rank, args, prompts, rank, store.port) for rank in range(2)]
            runs["one core"].append(in_processes([(run_alone, args, prompts, args.cores[:1])], result))
            runs["two ranks"].append(in_processes(ranks, result))
            runs["two cores"].append(in_processes([(run_alone, args, prompts, args.cores)], result))
    return runs


def main(args: argparse.Namespace) -> None:
    if not set(args.cores) <= os.sched_getaffinity(0):
        raise ValueError(f"--cores is {args.cores}, but this process may use {sorted(os.sched_getaffinity(0))}")
    if not args.prompts.is_file():
        raise ValueError(f"no prompts at {str(args.prompts)!r}: give a file with a prompt a line")
    tokenizer = load_tokenizer(args.base_model_path)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [encode_prompt(tokenizer, line) for line in lines if line.strip()][: args.num_prompts]
    runs = measure(args, prompts)
    rates = {name: statistics.median(run["tokens_per_second"] for run in rows) for name, rows in runs.items()}
    pipeline, alone = runs["two ranks"][0], runs["one core"][0]
    shared = [shared_length(ours, theirs) for ours, theirs in zip(pipeline["tokens"], alone["tokens"], strict=True)]
    equal = sum(tokens == others for tokens, others in zip(pipeline["tokens"], alone["tokens"], strict=True))
    print(f"target    {args.base_model_path}, {args.dtype}, {len(prompts)} prompts, greedy")
    print(f"pipeline  stages {args.stage_layers}, lm_head {args.lm_head}, verify_lag {args.verify_lag}")
    print(f"machine   {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, cores {args.cores}")
    print(f"versions  torch {torch.__version__}, commit {git_commit()}")
    print(f"equality  {equal} of {len(prompts)} prompts, {sum(shared)} tokens up to the first difference\n")
    print(markdown_table(["decoding", "tokens/s"], ((name, f"{rate:.2f}") for name, rate in rates.items())))
    print(
        json.dumps(
            {
                "speedup": round(rates["two ranks"] / rates["one core"], 4),
                "speedup_same_cores": round(rates["two ranks"] / rates["two cores"], 4),
                "tokens_per_second": {name: round(rate, 3) for name, rate in rates.items()},
                "alpha": round(pipeline["accepted"] / max(1, pipeline["verified"]), 4),
                "tokens_per_cycle": round(pipeline["new_tokens"] / pipeline["cycles"], 4),
                "wait_share": round(pipeline["wait_share"], 4),
                "equal_prompts": equal,
            }
        )
    )


if __name__ == "__main__":
    run_script(main, build_parser())
