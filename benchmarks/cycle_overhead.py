"""What messages, headers and bookkeeping cost a cycle of distributed decoding: real processes, sleeping models.

n + 1 processes decode with the real loop, ranks and messages. A stage forward, a head forward and a verification each
sleep for as long as the flags say; every draft is accepted, so that the pipeline stays full.

    cycle        median time between two tokens
    mean         their mean, which is the throughput: where the verdict is what the pipeline waits for, tokens come in
                 bursts of up to n, and the median of a burst says little
    ideal        max(stage, draft) + verify; with --verify_lag 1 max(stage, draft, verify)
    overhead     cycle - ideal. It can be below 0: stages go on while the draft rank verifies
    efficiency   ideal / cycle
    bound        no schedule can beat this one: max(stage, draft + verify), as draft and verdict depend on each other;
                 with --verify_lag 1 the same as ideal
    host         processor time of rank 0, for a cycle: what its Python costs, and the bytes it sends and receives

With --single_process the same loop runs all stages in one process, one after the other, without messages: what the
decode loop itself costs. Its ideal and its bound are n * stage + draft + verify.

With --replay drafts are accepted and rejected as given, and the pipeline's speed stands beside that of autoregressive
decoding (replay.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.replay import cases, replay_card, replay_row
from benchmarks.sleeping_ranks import Sleeps, decode_in_one_process, decode_over_ranks
from loading.flags import COUNT
from script_utils import Parser, git_commit, markdown_table, run_script

STAGES = [8]
TIMES = {"stage_ms": 4.2, "draft_ms": 3.5, "verify_ms": 1.2}


def build_parser() -> Parser:
    parser = Parser(description="Overhead of a distributed cycle; the last line of the output is one JSON object.")
    parser.add_argument(
        "--num_stages", type=int, nargs="+", help="n; the JSON's main figures are the first one's; unset: 8"
    )
    for name, what in (("stage", "a stage forward"), ("draft", "a head forward"), ("verify", "a verification")):
        parser.add_argument(f"--{name}_ms", type=float, help=f"sleep of {what}; unset: {TIMES[f'{name}_ms']}")
    parser.add_argument("--verify_lag", type=int, nargs="+", default=[0], choices=[0, 1], help="0, 1, or both")
    parser.add_argument("--single_process", action="store_true", help="all stages in one process: the loop alone")
    parser.add_argument("--hidden_size", type=COUNT, default=2560, help="H, of the payloads (float32)")
    parser.add_argument("--cycles", type=int, default=300, help="timed cycles")
    replay = parser.add_argument_group("replay")
    replay.add_argument(
        "--replay",
        action="store_true",
        help="given acceptance, beside autoregressive decoding; without the flags below: times and acceptance as the "
        "paper's authors published them, n = 4 and 8",
    )
    replay.add_argument("--alpha", type=float, help="acceptance of every draft")
    replay.add_argument("--alpha_by_fill", type=float, nargs="+", help="with 1 .. n tokens in flight")
    replay.add_argument("--trace", metavar="FILE", help="as recorded: a raw/*__per_sample.jsonl of eval.py, W = 1")
    replay.add_argument("--baseline_ms", type=float, help="per token of the target alone; unset: n * stage + verify")
    replay.add_argument("--new_tokens", type=COUNT, default=1000, help="tokens to decode, where there is no --trace")
    return parser


def row(args: argparse.Namespace, num_stages: int, lag: int) -> dict[str, float]:
    """The figures of one pipeline."""
    stage, draft, verify = args.stage_ms, args.draft_ms, args.verify_ms
    sleeps = Sleeps(stage, draft, verify, args.hidden_size)
    accepted = [True] * (args.cycles + 4 * num_stages - 1)
    if args.single_process:
        [decoded] = decode_in_one_process(sleeps, num_stages, lag, [accepted])
        ideal = bound = num_stages * stage + draft + verify
    else:
        [decoded] = decode_over_ranks(sleeps, num_stages, lag, [accepted])
        ideal = max(stage, draft, verify) if lag else max(stage, draft) + verify
        bound = ideal if lag else max(stage, draft + verify)
    # The last cycles: the pipeline has been full for some time.
    seconds = [end - begin for begin, end in pairwise(decoded.cycle_ends[-args.cycles - 1 :])]
    cycle = statistics.median(seconds) * 1e3
    return {
        "num_stages": num_stages,
        "verify_lag": lag,
        "cycle_ms": round(cycle, 3),
        "ideal_ms": ideal,
        "overhead_ms": round(cycle - ideal, 3),
        "efficiency": round(ideal / cycle, 4),
        "bound_ms": bound,
        "mean_ms": round(statistics.mean(seconds) * 1e3, 3),
        "p90_ms": round(statistics.quantiles(seconds, n=10)[-1] * 1e3, 3),
        "host_ms": round(decoded.host / decoded.result.cycles * 1e3, 3),
    }


def check(args: argparse.Namespace) -> None:
    """ValueError for flags that cannot be, or do not belong together."""
    times = ("stage_ms", "draft_ms", "verify_ms", "baseline_ms")
    given = [name for name in times if getattr(args, name) is not None]
    for name in given:
        if not 0 <= getattr(args, name) < 1e4:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must lie in 0 .. 10000")
    if min(args.num_stages or STAGES) < 1 or args.cycles < 2:
        raise ValueError(f"--num_stages is {args.num_stages} and --cycles {args.cycles}: at least 1 and 2 are needed")
    acceptance = [name for name in ("alpha", "alpha_by_fill", "trace") if getattr(args, name) is not None]
    if not args.replay and (acceptance or args.baseline_ms is not None):
        raise ValueError(f"--{(*acceptance, 'baseline_ms')[0]} is about --replay: add it")
    if args.replay and args.single_process:
        raise ValueError("--replay is about processes, --single_process has one: drop one of the two")
    if args.replay and given and not acceptance:
        raise ValueError(
            f"--{given[0]} with --replay needs the acceptance as well: --alpha, --alpha_by_fill or --trace; without "
            "any of them, times and acceptance are the published ones"
        )


def print_machine() -> None:
    print(f"machine   {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs")
    print(f"versions  torch {torch.__version__}, commit {git_commit()}\n")


def overhead(args: argparse.Namespace) -> list[dict[str, float]]:
    """A row a pipeline, without rejections; and the card."""
    print(f"sleeps    stage {args.stage_ms} ms, draft {args.draft_ms} ms, verify {args.verify_ms} ms")
    messages = "none, one process" if args.single_process else "TCP"
    print(f"messages  {messages}, H = {args.hidden_size}, float32, {args.cycles} cycles")
    print_machine()
    return [row(args, num_stages, lag) for lag in args.verify_lag for num_stages in args.num_stages]


def replay(args: argparse.Namespace) -> list[dict[str, float]]:
    """A row a pipeline, with the given acceptance; and the card."""
    found = cases(args)
    print(replay_card(found))
    print_machine()
    return [replay_row(case, lag) for case in found for lag in args.verify_lag]


def main(args: argparse.Namespace) -> None:
    check(args)
    published = args.replay and (args.alpha, args.alpha_by_fill, args.trace) == (None, None, None)
    unset = TIMES | ({} if published else {"num_stages": STAGES})
    args = argparse.Namespace(**vars(args) | {name: value for name, value in unset.items() if vars(args)[name] is None})
    rows = replay(args) if args.replay else overhead(args)
    print(markdown_table(rows[0], (row.values() for row in rows)))
    print(json.dumps(rows[0] | {"runs": rows}))


if __name__ == "__main__":
    run_script(main, build_parser())
