"""The checks that need a GPU, one after the other; benchmarks/gpu_check.sh starts them with a time limit.

    exactness     tiny float32 targets of every family, with windows and without: greedy output equals
                  `model.generate`, chain and tree
    compiled      the same through compiled layers, on a GPU as graphs; a family for each kind of layer
    eager         the target and head in bfloat16: standard decoding and the pipeline, their equality, ms per token and
                  per cycle, and what of a cycle is the host's: in none of the device's spans
    graphed       the same through compiled layers
    flash         as eager, with flash attention, where it can be imported
    ranks         two and three ranks on one GPU (gloo, pinned memory): the tokens of one process
    graphed_ranks the same ranks with compiled stages
    training      training throughput

Every check has its own line and its own entry in the JSON file: ok, failed, or skipped with the reason. On a CPU
(--device cpu) the checks run as far as they can.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from decoding.result import GenerationResult, shared_length
from loading.flags import add_device_flag, resolve_device
from loading.tokenizer import encode_prompt, load_tokenizer
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter, logit_gap
from pipeline_model import Target, load_head, save_head
from script_utils import Parser, check_output_file, first_line, git_commit, quiet_libraries, run_script, write_json
from tests.tiny import FAMILIES, WINDOWED, random_prompt, save_target, spd_decoder, tiny_head, tiny_model

ROOT = Path(__file__).parents[1]
PROMPT = "Explain how a pipeline keeps several tokens of one sequence in flight at the same time."
TINY_TOKENS = 24
KINDS = ("llama", "qwen3 window", "qwen3_5")  # have all kinds of layers: full, sliding and linear attention
RANKS = {2: ["--colocate_draft"], 3: []}  # by their number, of two stages: how


class Skipped(Exception):
    """A check that does not apply here; the message says why."""


def build_parser() -> Parser:
    parser = Parser(description="All checks that need a GPU, with one JSON file and a short table.")
    add_device_flag(parser)
    parser.add_argument("--base_model_path", default=str(ROOT / "checkpoints/SmolLM2-135M-Instruct"), help="target")
    parser.add_argument(
        "--spec_head_ckpt", default=str(ROOT / "checkpoints/SmolLM2-135M-Instruct_s6_l2.pt"), help="its head"
    )
    parser.add_argument("--max_new_tokens", type=int, default=128, help="new tokens of the real target")
    parser.add_argument(
        "--budget_sec", type=float, default=450, help="time for all checks; what is left over is skipped"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="where the JSON goes")
    return parser


class Checks:
    """The checks; each returns what it measured, raises Skipped, or fails with any other exception."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, resolve_device(args.device)
        self._end = time.monotonic() + args.budget_sec

    def left(self) -> float:
        return self._end - time.monotonic()

    def exactness(self, families: Iterable[str] | None = None, compiled: bool = False) -> dict[str, Any]:
        """Greedy float32 tokens of every family, or some, single-process, against the library's."""
        compared = 0
        for family in families or (*FAMILIES, *WINDOWED):
            expected = library_greedy(tiny_model(family).to(self.device), random_prompt(9))
            target = Target(tiny_model(family).to(self.device))
            for width, lag in ((1, 0), (4, 0), (1, 1)):
                head = tiny_head(target, (2, 2)).to(self.device)
                executor = LocalExecutor(target, (2, 2), head.config.anchors, compiled=compiled)
                drafter = SPDDrafter(head, target, (2, 2), compiled=compiled)
                decoder = Decoder(executor, drafter, draft_top_k=width, verify_lag=lag)
                tokens = decoder.generate(random_prompt(9), TINY_TOKENS).tokens
                if tokens != expected:
                    raise ValueError(f"{family}, W = {width}, verify_lag {lag}: {tokens} instead of {expected}")
                compared += 1
        return {"generations": compared, "tokens": compared * TINY_TOKENS}

    def compiled(self) -> dict[str, Any]:
        if self.device.type == "cpu":
            raise Skipped("tests/test_compiled.py compiles on a CPU")
        return self.exactness(KINDS, compiled=True)

    def eager(self, attn_implementation: str = "sdpa", compiled: bool = False) -> dict[str, Any]:
        """Pipeline beside standard decoding on the real target, bfloat16 on a GPU."""
        args = self.args
        if not Path(args.base_model_path).is_dir() or not Path(args.spec_head_ckpt).exists():
            raise Skipped("no target or head there: make demo, or --base_model_path and --spec_head_ckpt")
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        target = Target.load(
            args.base_model_path, dtype=dtype, device=self.device, attn_implementation=attn_implementation
        )
        head = load_head(args.spec_head_ckpt, target)
        sizes = head.config.split(target.num_layers)
        prompt = encode_prompt(load_tokenizer(args.base_model_path), PROMPT)
        standard = Decoder(LocalExecutor(target, (target.num_layers,), compiled=compiled))
        executor = LocalExecutor(target, sizes, head.config.anchors, compiled=compiled)
        decoder = Decoder(executor, SPDDrafter(head, target, sizes, compiled=compiled))
        for warm in (standard, decoder):
            warm.generate(prompt, 8)
        expected, result = (d.generate(prompt, args.max_new_tokens) for d in (standard, decoder))
        report = {"standard": times(expected), "pipeline": times(result)}
        at = shared_length(expected.tokens, result.tokens)
        report |= {"dtype": str(dtype).removeprefix("torch."), "equal_tokens": at, "tokens": len(result.tokens)}
        if at < min(len(expected.tokens), len(result.tokens)):
            prefix = [*prompt, *expected.tokens[:at]]
            report["logit_gap"] = logit_gap(standard.executor, prefix, expected.tokens[at], result.tokens[at])
            if dtype == torch.float32:
                raise ValueError(f"float32 output differs from token {at}: {report}")
        return report

    def graphed(self) -> dict[str, Any]:
        return self.eager(compiled=True)

    def flash(self) -> dict[str, Any]:
        if self.device.type == "cpu":
            raise Skipped("flash attention runs on GPUs")
        if importlib.util.find_spec("flash_attn") is None:
            raise Skipped("flash_attn is not installed: pip install -r requirements-cuda.txt")
        return self.eager("flash_attention_2")

    def ranks(self, *flags: str) -> dict[str, Any]:
        """Two stages of a tiny target on this one device, the draft beside them or with the first, against one process.

        Tokens/s by the number of ranks.
        """
        with tempfile.TemporaryDirectory() as folder:
            save_target(f"{folder}/target")
            target = Target.load(f"{folder}/target", device=self.device)
            save_head(tiny_head(target, (2, 2)), f"{folder}/head.pt")
            result = spd_decoder(target, load_head(f"{folder}/head.pt", target)).generate([5, 17, 3], TINY_TOKENS)
            expected = " ".join(f"w{token}" for token in result.tokens)
            script = [str(ROOT / "distributed_inference/example_mp_pipeline_generate.py"), "--prompt", "w5 w17 w3"]
            paths = ["--base_model_path", f"{folder}/target", "--spec_head_ckpt", f"{folder}/head.pt"]
            speeds = {}
            for count, layout in RANKS.items():
                place = "cpu" if self.device.type == "cpu" else ",".join([str(self.device.index or 0)] * count)
                where = ["--rank_gpus", place, "--dist_backend", "gloo", "--dtype", "float32", *layout]
                limits = ["--max_new_tokens", str(TINY_TOKENS), *flags]
                torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
                out = self._run(*torchrun, *script, *paths, *where, *limits)
                if expected not in out:
                    raise ValueError(f"{count} ranks wrote something else than {expected!r}: {out[-300:]!r}")
                speeds[str(count)] = float(re.search(r"([\d.]+) tokens/s", out)[1])
        return {"tokens": TINY_TOKENS, "tokens_per_second": speeds}

    def graphed_ranks(self) -> dict[str, Any]:
        return self.ranks("--compile")

    def training(self) -> dict[str, Any]:
        if not Path(self.args.base_model_path).is_dir():
            raise Skipped("no target there: make demo, or --base_model_path")
        if self.device.type == "cpu":
            raise Skipped("benchmarks/train_throughput.py takes minutes on a CPU")
        flags = ["--device", str(self.device), "--base_model_path", self.args.base_model_path]
        return json.loads(self._run(str(ROOT / "benchmarks/train_throughput.py"), *flags).splitlines()[-1])

    def _run(self, *command: str) -> str:
        """Standard output of a Python process that must end well within the time that is left."""
        try:
            done = subprocess.run(
                [sys.executable, *command], capture_output=True, text=True, timeout=max(1.0, self.left()), cwd=ROOT
            )
        except subprocess.TimeoutExpired:
            raise ValueError("the time for all checks is over") from None
        if done.returncode:
            raise ValueError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def outcome(self, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run one check."""
        begun = time.monotonic()
        if self.left() <= 0:
            return {"status": "skipped", "reason": "the time for all checks is over"}
        try:
            entry = {"status": "ok"} | check()
        except Skipped as reason:
            entry = {"status": "skipped", "reason": str(reason)}
        except Exception as error:  # the other checks still have something to say
            entry = {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error, most=600)}"}
        return entry | {"seconds": round(time.monotonic() - begun, 1)}


def times(result: GenerationResult) -> dict[str, Any]:
    """Speed, and milliseconds a token and a cycle: on a GPU its own by CUDA events."""
    timings, cycles = result.timings, result.cycles
    spans = sum(timings.stages) + timings.draft + timings.verify
    return {
        "tokens_per_second": round(result.tokens_per_second, 2),
        "alpha": None if result.alpha is None else round(result.alpha, 3),
        "token_ms": round(timings.decode / result.new_tokens * 1e3, 3),
        "cycle_ms": round(timings.decode / cycles * 1e3, 3),
        "host_ms": round((timings.decode - spans) / cycles * 1e3, 3),
        "stage_ms": [round(seconds / cycles * 1e3, 3) for seconds in timings.stages],
        "draft_ms": round(timings.draft / cycles * 1e3, 3),
        "verify_ms": round(timings.verify / cycles * 1e3, 3),
        "ideal_tokens_per_second": round(result.new_tokens / timings.ideal_decode, 2),
    }


def library_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """New tokens of `model.generate`, greedy, on the model's device."""
    ids = torch.tensor([prompt], device=model.device)
    settings = {"max_new_tokens": TINY_TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def main(args: argparse.Namespace) -> int:
    quiet_libraries()
    check_output_file("--output", args.output)
    checks = Checks(args)
    gpu = torch.cuda.get_device_name(checks.device) if checks.device.type == "cuda" else "none"
    card = {
        "device": str(checks.device),
        "gpu": gpu,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": git_commit(),
    }
    print("\n".join(f"{name:<9}{value}" for name, value in card.items()))
    print("\n| check | status | seconds | details |\n|---|---|---|---|", flush=True)
    results = {}
    todo = (checks.exactness, checks.compiled, checks.eager, checks.graphed, checks.flash)
    for check in (*todo, checks.ranks, checks.graphed_ranks, checks.training):
        entry = results[check.__name__] = checks.outcome(check)
        details = {name: value for name, value in entry.items() if name not in ("status", "seconds")}
        print(f"| {check.__name__} | {entry['status']} | {entry.get('seconds', 0)} | {details} |", flush=True)
        write_json(args.output, card | {"checks": results})
    return int(any(entry["status"] == "failed" for entry in results.values()))


if __name__ == "__main__":
    run_script(main, build_parser())
