"""The decoding methods that an evaluation compares, SPD and its baselines, and what sets them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from baselines.dflash import DFlashConfig, dflash_decoder
from baselines.eagle3 import Eagle3Config, eagle3_decoder
from baselines.ppsd import PPSDConfig, ppsd_decoder
from baselines.prompt_lookup import PromptLookup
from decoding.metrics import Costs, block_costs, chain_costs, ppsd_costs, spd_costs
from decoding.sampling import Sampling
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from pipeline_model import HeadConfig, Target, load_head


@dataclass(frozen=True)
class Run:
    """One combination of settings: a method, and how it decodes every sample."""

    sampling: Sampling
    max_new_tokens: int
    seed: int
    stage_sizes: tuple[int, ...]  # (L,): the target in one piece
    method: str = "autoregressive"  # one of METHODS
    spec_head_ckpt: str | None = None  # None: nothing was trained
    num_spec_layers: int = 0
    draft_top_k: int = 1
    draft_chain: int = 0  # drafts in a row: EAGLE-3's steps, DFlash's B - 1, prompt lookup's most; 0: no chains
    sample_drafts: bool = True  # a chain's, when sampling; False: the drafter's argmax
    use_deepest: bool | None = None  # None: as the head was trained
    compiled: bool = False  # the target's layers

    @property
    def costs(self) -> Costs:
        return METHODS[self.method].costs(self)

    @property
    def num_devices(self) -> int:
        """Devices that the theory assumes: one a stage, and one for a drafter that runs beside them."""
        return len(self.stage_sizes) + METHODS[self.method].beside

    @property
    def draws_as_baseline(self) -> bool:
        """Whether its ids must be the baseline's: see `Sampling.same_draws`."""
        one_draw = self.method == "autoregressive" or not self.sample_drafts
        return one_draw or self.sampling.same_draws(self.draft_top_k)

    @property
    def axes(self) -> dict[str, str]:
        """What tells this run from others of its method, for tables and for file names: "n = 6" -> "n6"."""
        axes = {}
        if METHODS[self.method].pipeline:
            axes[split_name(self.stage_sizes)] = f"n{len(self.stage_sizes)}"
        if self.method == "spd":
            axes[f"W = {self.draft_top_k}"] = f"W{self.draft_top_k}"
        if self.method == "dflash":
            axes[f"B = {self.draft_chain + 1}"] = f"B{self.draft_chain + 1}"
        elif self.draft_chain:
            axes[f"m = {self.draft_chain}"] = f"m{self.draft_chain}"
        if self.method == "dflash" and self.sample_drafts:
            axes["sampled drafts"] = "sampled"
        if self.compiled:
            axes["compiled"] = "compiled"
        return axes


def split_name(stage_sizes: Sequence[int]) -> str:
    """How a reader is told of a split: its number of stages, and their layers where these differ."""
    sizes = "" if len(set(stage_sizes)) == 1 else f" ({';'.join(map(str, stage_sizes))})"
    return f"n = {len(stage_sizes)}{sizes}"


class Method(NamedTuple):
    """What an evaluation has to know of a method."""

    title: str  # in tables
    build: Callable[[Target, Run, Mapping[str, Any]], Decoder | PromptLookup]  # settings as `Decoder` takes them
    costs: Callable[[Run], Costs]
    config_class: type[HeadConfig] | None = None  # of its checkpoints; None: it has none
    pipeline: bool = False  # the target is cut into stages
    beside: bool = False  # the drafter runs beside the stages, on a device of its own
    code: tuple[str, ...] = ()  # files that make its tokens and times, on top of the decoding code


def _spd(target: Target, run: Run, settings: Mapping[str, Any]) -> Decoder:
    head = load_head(run.spec_head_ckpt, target)
    executor = LocalExecutor(target, run.stage_sizes, head.config.anchors, compiled=run.compiled)
    drafter = SPDDrafter(head, target, run.stage_sizes, run.use_deepest, compiled=run.compiled)
    return Decoder(executor, drafter, draft_top_k=run.draft_top_k, **settings)


def _eagle3(target: Target, run: Run, settings: Mapping[str, Any]) -> Decoder:
    head = load_head(run.spec_head_ckpt, target, Eagle3Config)
    return eagle3_decoder(target, head, run.draft_chain, compiled=run.compiled, **settings)


def _dflash(target: Target, run: Run, settings: Mapping[str, Any]) -> Decoder:
    head = load_head(run.spec_head_ckpt, target, DFlashConfig)
    blocks = {"block_size": run.draft_chain + 1, "sample_drafts": run.sample_drafts, "compiled": run.compiled}
    return dflash_decoder(target, head, **blocks, **settings)


def _ppsd(target: Target, run: Run, settings: Mapping[str, Any]) -> Decoder:
    head = load_head(run.spec_head_ckpt, target, PPSDConfig)
    return ppsd_decoder(target, head, run.stage_sizes, compiled=run.compiled, **settings)


def _autoregressive(target: Target, run: Run, settings: Mapping[str, Any]) -> Decoder:
    return Decoder(LocalExecutor(target, run.stage_sizes, compiled=run.compiled), **settings)


def _prompt_lookup(target: Target, run: Run, settings: Mapping[str, Any]) -> PromptLookup:
    return PromptLookup(target, run.draft_chain, **settings)


METHODS = {
    "spd": Method(
        "SPD",
        _spd,
        lambda run: spd_costs(run.stage_sizes, run.num_spec_layers),
        HeadConfig,
        pipeline=True,
        beside=True,
    ),
    "eagle3": Method(
        "EAGLE-3",
        _eagle3,
        lambda run: chain_costs(sum(run.stage_sizes), run.num_spec_layers, run.draft_chain),
        Eagle3Config,
        code=("baselines/common.py", "baselines/eagle3.py"),
    ),
    "dflash": Method(
        "DFlash",
        _dflash,
        lambda run: block_costs(sum(run.stage_sizes), run.num_spec_layers, run.draft_chain),
        DFlashConfig,
        code=("baselines/common.py", "baselines/eagle3.py", "baselines/dflash.py"),
    ),
    "ppsd": Method(
        "PPSD",
        _ppsd,
        lambda run: ppsd_costs(run.stage_sizes, run.num_spec_layers),
        PPSDConfig,
        pipeline=True,
        code=("baselines/common.py", "baselines/ppsd.py"),
    ),
    "autoregressive": Method("autoregressive", _autoregressive, lambda run: spd_costs(run.stage_sizes, 0)),
    "prompt_lookup": Method(
        "prompt lookup",
        _prompt_lookup,
        lambda run: Costs(factor=1.0, cycle=1.0, chain=None),
        code=("baselines/prompt_lookup.py",),
    ),
}


def build_decoder(target: Target, run: Run) -> Decoder | PromptLookup:
    """The decoder of a run's method on a loaded target. ValueError for a head that does not fit."""
    settings = {
        "sampling": run.sampling,
        "eos_token_ids": target.eos_token_ids,
        "max_positions": target.config.max_position_embeddings,
    }
    return METHODS[run.method].build(target, run, settings)
