"""A method of decoding, as eval.py and train_baseline.py see it: what a file holds, what trains, what drafts.

Both programs know no method by name. They ask the objects that baselines/registry.py lists, each of which implements
`Method`. docs/add_a_drafter.md adds one step by step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from decoding.metrics import Costs, chain_costs
from decoding.sampling import Sampling
from loading.flags import COUNT
from pipeline_inference import Decoder, check_attention, check_limits
from pipeline_model import DraftConfig, DraftHead, Target
from training.head_loss import DraftLoss


@dataclass(frozen=True, eq=False)
class Flag:
    """A flag of one method, or of several. The parser leaves it unset (None), so that each method has its default."""

    name: str  # without dashes
    help: str
    default: Any = None  # None: the method finds it, needs none, or insists on a value
    settings: Mapping[str, Any] = field(default_factory=dict)  # more for `add_argument`: type, nargs, choices, action


@dataclass(frozen=True)
class Run:
    """One combination of settings: a method, and how it decodes every sample."""

    method: Method
    sampling: Sampling
    max_new_tokens: int
    seed: int
    stage_sizes: tuple[int, ...]  # (L,): the target in one piece
    spec_head_ckpt: str | None = None  # None: nothing was trained
    num_spec_layers: int = 0
    draft_top_k: int = 1
    draft_chain: int = 0  # drafts in a row: EAGLE-3's steps, DFlash's B - 1, prompt lookup's most; 0: no chains
    sample_drafts: bool = True  # a chain's, when sampling; False: the drafter's argmax
    use_deepest: bool | None = None  # None: nothing was trained
    compiled: bool = False  # the target's layers

    @property
    def costs(self) -> Costs:
        return self.method.costs(self)

    @property
    def num_devices(self) -> int:
        """Devices that the theory assumes: one per stage, and one for a drafter that runs beside them."""
        return len(self.stage_sizes) + self.method.beside

    @property
    def draws_as_baseline(self) -> bool:
        """Whether its ids must be the baseline's: see `Sampling.same_draws`."""
        return not self.method.drafts or not self.sample_drafts or self.sampling.same_draws(self.draft_top_k)

    @property
    def axes(self) -> dict[str, str]:
        """What tells this run from others of its method, for tables and for file names: "n = 6" -> "n6"."""
        return dict(self.method.axes(self)) | ({"compiled": "compiled"} if self.compiled else {})


def split_name(stage_sizes: Sequence[int]) -> str:
    """A split in words: its number of stages, and their layers where these differ."""
    sizes = "" if len(set(stage_sizes)) == 1 else f" ({';'.join(map(str, stage_sizes))})"
    return f"n = {len(stage_sizes)}{sizes}"


class Method:
    """What the programs ask of a method. A subclass sets the attributes and overrides what differs.

    Every function may raise a ValueError of one line, which the programs show to the user. `args` hold the method's
    own flags, with its defaults filled in, and those that all methods share.
    """

    name: str  # for --method, and in files
    title: str  # in tables
    code: tuple[str, ...] = ()  # files that make its tokens and times, on top of the decoding code
    pipeline = False  # whether the target is cut into stages
    beside = False  # whether the drafter runs beside the stages, on a device of its own
    drafts = True  # False: the target alone
    compiles = True  # whether --compile reaches the target's layers

    @property
    def in_file_names(self) -> str:
        """What the names of its evaluations' files begin their settings with."""
        return self.name

    # What a file holds

    config_class: type[DraftConfig] | None = None  # parses and writes a checkpoint's configuration; None: no checkpoint

    # What trains

    trained_here = False  # whether train_baseline.py trains it
    training_flags: tuple[Flag, ...] = ()

    def check_training_flags(self, args: argparse.Namespace) -> None:
        """ValueError for flags that contradict each other. Flags that were not given are None here."""

    def entries(self, args: argparse.Namespace, target: PreTrainedConfig) -> Mapping[str, Any]:
        """The entries of the drafter's configuration besides those about target and draft vocabulary."""
        raise NotImplementedError

    def loss(self, args: argparse.Namespace, config: DraftConfig, target: Target) -> DraftLoss:
        """A new drafter for this target, and what it learns."""
        raise NotImplementedError

    # What drafts

    decoding_flags: tuple[Flag, ...] = ()

    def check_decoding_flags(self, args: argparse.Namespace) -> None:
        """ValueError for values that no run can have."""
        check_limits(args.max_new_tokens, 1)
        check_attention(args.attn_implementation, 1, args.compile)

    def check_target(self, target: PreTrainedConfig) -> None:
        """ValueError for a target that the method cannot decode."""

    def runs(
        self, args: argparse.Namespace, config: DraftConfig | None, num_layers: int
    ) -> Iterable[Mapping[str, Any]]:
        """The fields of `Run` that this method decides, for each combination of its flags.

        config: of the checkpoint at hand, if the method has one; num_layers: of the target.
        """
        return [self.shape(config, num_layers)]

    @staticmethod
    def shape(config: DraftConfig | None, num_layers: int, num_stages: int | None = None) -> dict[str, Any]:
        """The fields of `Run` that a checkpoint decides; without one the target is in one piece."""
        if config is None:
            return {"stage_sizes": (num_layers,)}
        return {
            "stage_sizes": config.split(num_layers, num_stages),
            "num_spec_layers": config.num_spec_layers,
            "use_deepest": config.trained_with_use_deepest,
        }

    def costs(self, run: Run) -> Costs:
        """What one cycle costs, in steps of the target alone."""
        raise NotImplementedError

    def axes(self, run: Run) -> Mapping[str, str]:
        """As `Run.axes`."""
        axes = {split_name(run.stage_sizes): f"n{len(run.stage_sizes)}"} if self.pipeline else {}
        return axes | ({f"m = {run.draft_chain}": f"m{run.draft_chain}"} if run.draft_chain else {})

    def unusual(self, run: Run, config: DraftConfig) -> str:
        """What else a file name has to say, where a run departs from how its drafter was trained."""
        return ""

    def decoder(self, target: Target, head: DraftHead | None, run: Run, settings: Mapping[str, Any]) -> Decoder:
        """The decoder of a run, or an object that generates as one does.

        head: what the checkpoint holds, None where there is none; settings: more arguments of `Decoder`.
        """
        raise NotImplementedError

    # Methods have no state. A worker process gets its own copy, which is the same method.

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class ChainMethod(Method):
    """A method that drafts m tokens in a row, each from the one before, and then runs the whole target over them."""

    decoding_flags = (Flag("num_steps", "m, drafts in a row", [7], {"type": COUNT, "nargs": "+"}),)

    def lengths(self, args: argparse.Namespace) -> Sequence[int]:
        """The lengths of chains that are asked for."""
        return args.num_steps

    def check_decoding_flags(self, args: argparse.Namespace) -> None:
        super().check_decoding_flags(args)
        shortest = min(self.lengths(args))
        if shortest < 1:
            raise ValueError(f"--{self.decoding_flags[0].name} is {shortest}: it must be at least 1")

    def runs(
        self, args: argparse.Namespace, config: DraftConfig | None, num_layers: int
    ) -> Iterable[Mapping[str, Any]]:
        shape = self.shape(config, num_layers)
        return [shape | {"draft_chain": length} for length in dict.fromkeys(self.lengths(args))]

    def costs(self, run: Run) -> Costs:
        return chain_costs(sum(run.stage_sizes), run.num_spec_layers, run.draft_chain)
