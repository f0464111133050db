"""SPD itself, and the target alone, as methods beside the baselines. train.py trains SPD's head."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from baselines.method import Flag, Method, Run
from decoding.metrics import Costs, spd_costs
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter, check_attention, check_limits
from pipeline_model import HeadConfig, SpeculationHead, Target
from script_utils import Switch


class SPD(Method):
    name, title = "spd", "SPD"
    in_file_names = ""
    config_class = HeadConfig
    pipeline = beside = True
    decoding_flags = (
        Flag("draft_top_k", "W, width of the draft tree", [1], {"type": int, "nargs": "+"}),
        Flag("num_stages", "n, for a head trained for several", settings={"type": int, "nargs": "+"}),
        Flag("use_deepest", "as the head was trained, unless set", settings={"action": Switch}),
    )

    def check_decoding_flags(self, args: argparse.Namespace) -> None:
        for width in args.draft_top_k:
            check_limits(args.max_new_tokens, width)
            check_attention(args.attn_implementation, width, args.compile)

    def runs(self, args: argparse.Namespace, config: HeadConfig, num_layers: int) -> Iterable[Mapping[str, Any]]:
        deepest = {} if args.use_deepest is None else {"use_deepest": args.use_deepest}
        widths, stages = dict.fromkeys(args.draft_top_k), dict.fromkeys(args.num_stages or [None])
        for width, num_stages in itertools.product(widths, stages):
            yield self.shape(config, num_layers, num_stages) | {"draft_top_k": width} | deepest

    def costs(self, run: Run) -> Costs:
        return spd_costs(run.stage_sizes, run.num_spec_layers)

    def axes(self, run: Run) -> Mapping[str, str]:
        return {**super().axes(run), f"W = {run.draft_top_k}": f"W{run.draft_top_k}"}

    def unusual(self, run: Run, config: HeadConfig) -> str:
        same = run.use_deepest == config.trained_with_use_deepest
        return "" if same else f"_{'' if run.use_deepest else 'no-'}use_deepest"

    def decoder(self, target: Target, head: SpeculationHead, run: Run, settings: Mapping[str, Any]) -> Decoder:
        executor = LocalExecutor(target, run.stage_sizes, head.config.anchors, compiled=run.compiled)
        drafter = SPDDrafter(head, target, run.stage_sizes, run.use_deepest, compiled=run.compiled)
        return Decoder(executor, drafter, draft_top_k=run.draft_top_k, **settings)


class Autoregressive(Method):
    """The target alone: what every speed-up is measured against."""

    name = title = "autoregressive"
    drafts = False

    def costs(self, run: Run) -> Costs:
        return spd_costs(run.stage_sizes, 0)

    def decoder(self, target: Target, head: None, run: Run, settings: Mapping[str, Any]) -> Decoder:
        return Decoder(LocalExecutor(target, run.stage_sizes, compiled=run.compiled), **settings)
