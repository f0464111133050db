"""How many stages, and which layers in each: predicted from times measured on this machine, or read from a file.

    python planning/plan_stages.py --base_model_path Qwen/Qwen3-4B --device cuda --num_devices 9 --alpha 0.8
    python planning/plan_stages.py --timings timings.json --num_devices 9 --trace raw/..._per_sample.jsonl

cost_model.py, next to it, says what follows from which times. Prints a card, a table with a row for each n, the best n
with its `--stage_layers`, and a last line of JSON; the plot goes to a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from decoding.nodes import CachePlan, NodeBoard, NodeRow
from decoding.stage import Stage
from evaluation.files import device_name
from loading.flags import COUNT, add_device_flag, add_dtype_flag, resolve_device, resolve_dtype
from pipeline_model import HeadCache, SpeculationHead, Target, load_head, read_checkpoint
from planning.cost_model import (
    LM_HEAD_PLACES,
    Placement,
    Plan,
    Replay,
    Times,
    Trace,
    best_plan,
    read_times,
    read_traces,
    replay,
    times_record,
    trace_alpha,
)
from planning.message_time import message_ms
from planning.untrained_head import untrained_config
from script_utils import (
    Parser,
    check_output_file,
    git_commit,
    markdown_table,
    quiet_libraries,
    run_record,
    run_script,
    save_figure,
    write_json,
)

DEFAULT_ALPHA = 0.8


def build_parser() -> Parser:
    parser = Parser(description="The best split of a target into pipeline stages, for a number of devices.")
    parser.add_argument("--num_devices", type=int, required=True, help="devices at most, the head's included")
    parser.add_argument("--colocate_draft", action="store_true", help="the head shares the first stage's device")
    parser.add_argument(
        "--lm_head", default="auto", choices=["auto", *LM_HEAD_PLACES], help="rank of the lm_head; auto: the faster"
    )
    acceptance = parser.add_mutually_exclusive_group()
    acceptance.add_argument("--alpha", type=float, help=f"accepted / verified drafts; unset: {DEFAULT_ALPHA}")
    acceptance.add_argument("--trace", metavar="FILE", help="replay a raw/*__per_sample.jsonl of eval.py")
    parser.add_argument("--plot", metavar="FILE", default="plan_stages.png", help="where the plot goes")
    times = parser.add_argument_group("times")
    times.add_argument("--timings", metavar="FILE", help="JSON with the times, instead of measuring them")
    times.add_argument("--save_timings", metavar="FILE", help="write the measured times for later --timings")
    times.add_argument("--base_model_path", default="checkpoints/SmolLM2-135M-Instruct", help="target model")
    times.add_argument("--spec_head_ckpt", help="head to time; unset: a random one of the two flags below")
    times.add_argument("--num_spec_layers", type=COUNT, default=2, help="L_s")
    times.add_argument("--draft_vocab_size", type=COUNT, default=16384, help="V_d, capped at the target's vocabulary")
    add_dtype_flag(times)
    add_device_flag(times, default="cpu")
    times.add_argument("--threads", type=COUNT, default=2, help="CPU threads")
    times.add_argument("--context", type=COUNT, default=512, help="tokens that stand before the one that is timed")
    times.add_argument("--rounds", type=COUNT, default=20, help="runs of each part; medians count")
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class Meter:
    """Times the parts of a target and a head, one token at a time."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        dtype = resolve_dtype(args.dtype, device)
        if args.spec_head_ckpt is not None:
            read_checkpoint(args.spec_head_ckpt)  # a wrong one fails before the target is loaded
        self.target = Target.load(args.base_model_path, dtype=dtype, device=device)
        limit = self.target.config.max_position_embeddings
        if args.context >= limit:
            raise ValueError(f"--context is {args.context}, but the target has positions for {limit}: give fewer")
        self.head = self._head().to(device, dtype).requires_grad_(False)
        self.hidden = torch.randn(1, self.target.config.hidden_size, device=device).to(dtype)

    def _head(self) -> SpeculationHead:
        if self.args.spec_head_ckpt is not None:
            return load_head(self.args.spec_head_ckpt, self.target)
        stages = min(self.args.num_devices, self.target.num_layers)
        config = untrained_config(self.target, stages, self.args.num_spec_layers, self.args.draft_vocab_size)
        return config.build(self.target.config)

    @property
    def head_text(self) -> str:
        """The head as the card shows it."""
        config = self.head.config
        shape = f"L_s = {config.num_spec_layers}, V_d = {config.draft_vocab_size:,}"
        if self.args.spec_head_ckpt is None:
            return f"random, {shape}"
        trained = config.trained_num_stages or (config.num_stages,)
        return f"{self.args.spec_head_ckpt}, {shape}, trained for n = {', '.join(map(str, trained))}"

    def median_ms(self, run: Callable[[], object]) -> float:
        """Median milliseconds of a call, after two that warm up."""
        seconds = []
        for _ in range(self.args.rounds + 2):
            begun = self._clock()
            run()
            seconds.append(self._clock() - begun)
        return statistics.median(seconds[2:]) * 1e3

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @torch.inference_mode()
    def times(self, most_stages: int) -> Times:
        """Everything that a plan needs, for n = 1 .. `most_stages`."""
        with tqdm(total=3 + most_stages, desc="plan_stages", unit="part") as bar:
            layers = self.layers_ms()
            bar.update()
            verify = self.median_ms(lambda: self.target.logits(self.hidden[0]).argmax().item())
            bar.update()
            head = {}
            for n in range(1, most_stages + 1):
                head[n] = self.head_ms(n)
                bar.update()
            message = message_ms(self.device, self.hidden, self.args.rounds)
            bar.update()
        return Times(layers, head, verify, message)

    def layers_ms(self) -> tuple[float, ...]:
        """Each layer's share of a pass through all of them; layers of one kind count the same."""
        kinds = self.target.layer_types
        alone = {kind: self.stage_ms(range(kinds.index(kind), kinds.index(kind) + 1)) for kind in set(kinds)}
        scale = self.stage_ms(range(len(kinds))) / sum(alone[kind] for kind in kinds)
        return tuple(alone[kind] * scale for kind in kinds)

    def stage_ms(self, layers: range) -> float:
        """One token through some layers (0-based), after a full context."""
        context, stage, board = (
            self.args.context,
            Stage(self.target, layers),
            NodeBoard(self.device, self.target.window),
        )
        plan = CachePlan(slots=context + 1, nodes=2, tree=False)
        stage.start(plan, root=0)
        board.start(plan, context, root=0)
        batch = board.enter(context, [NodeRow(0, 1, 0, context)])
        return self.median_ms(lambda: stage.run(batch, self.hidden))

    def head_ms(self, num_stages: int) -> float:
        """A cycle's draft of a full pipeline: a new row of each type, n + 1 rows through the layers, one draft."""
        head, context, count = self.head, self.args.context, num_stages + 1
        features = self.hidden.expand(len(head.config.anchors), -1)[None]
        cache = HeadCache(head, context + count)
        cache.length = context
        rope = self.target.rope(context + count, context)

        def draft() -> int:
            shown = [head.shown_rows(kind, features) for kind in range(len(head.projections))]
            rows = shown[0].expand(-1, count, -1)
            hidden = head.forward_rows(rows, rope, cache, outputs=1)
            return head.lm_head(self.target.norm(hidden)).argmax().item()

        return self.median_ms(draft)


# ---------------------------------------------------------------------------------------------------------------------
# Planning
# ---------------------------------------------------------------------------------------------------------------------


class Prediction:
    """A plan and its predictions: in closed form, and where there are traces, by replaying them."""

    def __init__(self, plan: Plan, times: Times, alpha: float, traces: Sequence[Trace]):
        self.plan = plan
        self.accept_length = plan.accept_length(alpha)
        self.speedup = times.autoregressive / plan.milliseconds_a_token(alpha)
        self.replay: Replay | None = replay(traces, plan) if traces else None
        self.replayed_speedup = None if self.replay is None else times.autoregressive / self.replay.milliseconds_a_token

    @property
    def best_guess(self) -> float:
        """The speed-up to choose by."""
        return self.speedup if self.replayed_speedup is None else self.replayed_speedup


def plan_rows(args: argparse.Namespace, times: Times, alpha: float, traces: Sequence[Trace]) -> list[Prediction]:
    """The best plan for each n that the devices and layers allow."""
    places = LM_HEAD_PLACES if args.lm_head == "auto" else (args.lm_head,)
    placements = [Placement(args.colocate_draft, place) for place in places]
    return [Prediction(best_plan(times, n, placements, alpha), times, alpha, traces) for n in times.head]


def most_stages(args: argparse.Namespace) -> int:
    """Stages that the devices allow; at least 1, or ValueError."""
    most = args.num_devices if args.colocate_draft else args.num_devices - 1
    if most < 1:
        needed = 1 if args.colocate_draft else 2
        raise ValueError(f"--num_devices is {args.num_devices}: a stage and the head need at least {needed}")
    return most


def print_table(rows: Sequence[Prediction]) -> None:
    replayed = rows[0].replay is not None
    heads = ["n", "devices", "stage_layers", "lm_head", "largest stage ms", "head ms", "cycle ms", "refill ms"]
    heads += ["L_acc", "speed-up"] + (["L_acc replayed", "speed-up replayed"] if replayed else [])
    lines = []
    for row in rows:
        plan = row.plan
        cells = [plan.num_stages, plan.devices, layers_text(plan), plan.placement.lm_head]
        cells += [f"{value:.3f}" for value in (max(plan.stages), plan.head, plan.cycle, plan.refill)]
        cells += [f"{row.accept_length:.2f}", f"{row.speedup:.2f}"]
        cells += [f"{row.replay.accept_length:.2f}", f"{row.replayed_speedup:.2f}"] if replayed else []
        lines.append(cells)
    print(markdown_table(heads, lines))


def layers_text(plan: Plan) -> str:
    return ";".join(map(str, plan.stage_layers))


def plot(rows: Sequence[Prediction], times: Times, title: str, path: str) -> None:
    """Speed-ups over n, and what a cycle consists of. PNG, written atomically."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")  # without pyplot there is no display to need
    figure.suptitle(title, fontsize=10)
    left, right = figure.subplots(1, 2)
    stages = [row.plan.num_stages for row in rows]
    left.plot(stages, [row.speedup for row in rows], "o-", label="closed form")
    if rows[0].replay is not None:
        left.plot(stages, [row.replayed_speedup for row in rows], "s--", label="recorded drafts replayed")
    left.plot(stages, [row.accept_length for row in rows], ":", color="0.5", label="L_acc, closed form")
    left.axhline(1, color="0.4", lw=1, ls="--")
    left.set(title="predicted speed-up over the target alone", xlabel="n", ylabel="times")
    right.plot(stages, [row.plan.cycle for row in rows], "k-", lw=2, label="cycle")
    right.plot(stages, [max(row.plan.stages) for row in rows], "o--", label="largest stage")
    right.plot(stages, [row.plan.head for row in rows], "s--", label="head")
    right.axhline(times.verify, color="tab:olive", ls=":", label="final norm + lm_head")
    right.set(title="time of a full pipeline's cycle", xlabel="n", ylabel="ms", yscale="log")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    save_figure(figure, path)


def get_times(args: argparse.Namespace, most: int) -> tuple[Times, dict[str, str]]:
    """The file's times, or measured ones, for each n up to `most` that the layers allow; and where they come from."""
    if args.timings is not None:
        return read_times(args.timings, most), {"times": args.timings}
    device = resolve_device(args.device)
    torch.set_num_threads(args.threads)
    meter = Meter(args, device)
    times = meter.times(min(most, meter.target.num_layers))
    if args.save_timings is not None:
        write_json(args.save_timings, times_record(times) | run_record(args))
    return times, {
        "target": f"{args.base_model_path}, {args.context} tokens of context, {meter.target.dtype}",
        "head": meter.head_text,
        "machine": device_name(device, args.threads),
        "versions": f"torch {torch.__version__}, commit {git_commit()}",
    }


def check(args: argparse.Namespace) -> None:
    """ValueError for flags that cannot be."""
    if args.alpha is not None and not 0 <= args.alpha <= 1:
        raise ValueError(f"--alpha is {args.alpha}: it must lie in 0 .. 1")
    if args.timings is not None and args.save_timings is not None:
        raise ValueError("--save_timings belongs to measuring: leave it or --timings out")
    check_output_file("--plot", args.plot)
    check_output_file("--save_timings", args.save_timings)


def main(args: argparse.Namespace) -> None:
    check(args)
    quiet_libraries()
    most = most_stages(args)
    traces = [] if args.trace is None else read_traces(args.trace)
    alpha = trace_alpha(traces) if traces else DEFAULT_ALPHA if args.alpha is None else args.alpha
    times, card = get_times(args, most)
    rows = plan_rows(args, times, alpha, traces)
    best = max(rows, key=lambda row: row.best_guess)
    card |= {
        "layers": f"{len(times.layers)}, {sum(times.layers):.3f} ms together",
        "others": f"final norm + lm_head {times.verify:.3f} ms, a message {times.message:.3f} ms",
        "alone": f"{times.autoregressive:.3f} ms per token",
        "drafts": f"alpha {alpha:.3f}" + (f", {len(traces)} generations of {args.trace}" if traces else ""),
    }
    for name, line in card.items():
        print(f"{name:<10}{line}")
    print()
    print_table(rows)
    plan = best.plan
    print(
        f'\nbest: n = {plan.num_stages} on {plan.devices} devices, --stage_layers "{layers_text(plan)}" '
        f"--lm_head {plan.placement.lm_head}: {best.best_guess:.2f} times the target alone"
    )
    plot(rows, times, f"{card.get('target', args.timings)}\n{card['drafts']}", args.plot)
    print(f"plot: {args.plot}")
    print(json.dumps(summary(best, times, alpha)))


def summary(best: Prediction, times: Times, alpha: float) -> dict[str, object]:
    """The last line: the best plan, for machines."""
    plan = best.plan
    return {
        "num_stages": plan.num_stages,
        "devices": plan.devices,
        "stage_layers": layers_text(plan),
        "lm_head": plan.placement.lm_head,
        "alpha": round(alpha, 4),
        "cycle_ms": round(plan.cycle, 4),
        "refill_ms": round(plan.refill, 4),
        "equivalent_accept_length": round(best.accept_length, 4),
        "speedup": round(best.speedup, 4),
        "speedup_replayed": None if best.replayed_speedup is None else round(best.replayed_speedup, 4),
        "autoregressive_ms": round(times.autoregressive, 4),
    }


if __name__ == "__main__":
    run_script(main, build_parser())
