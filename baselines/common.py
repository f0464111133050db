"""What the trained baselines share: how their checkpoints describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from pipeline_model import HeadConfig, SpeculationHead


@dataclass(frozen=True)
class BaselineConfig(HeadConfig):
    """The `config` entry of a baseline's checkpoint: a speculation head's, whose version is the method's name.

    `aggr_feature_bound` lists the hidden states that the drafter reads, and h_0.
    """

    method: ClassVar[str]
    head_class: ClassVar[type[SpeculationHead]]

    @property
    def version(self) -> str:
        return self.method

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> BaselineConfig:
        """Check a checkpoint's `config` mapping. ValueError for another method's, and as `HeadConfig.parse`."""
        if raw.get("version") != cls.method:
            raise ValueError(f"checkpoint version is {raw.get('version')!r}, not {cls.method!r}: give --method its own")
        return super().parse(dict(raw) | {"version": 12 if raw.get("stage_layers") else 11})

    def build(self, target_config: PreTrainedConfig) -> SpeculationHead:
        return self.head_class(self, target_config)

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that the method reads of a target, as `aggr_feature_bound` has to list them."""
        raise NotImplementedError

    def check_target(self, target_config: PreTrainedConfig) -> None:
        super().check_target(target_config)
        expected = self.read_layers(target_config.num_hidden_layers)
        if self.anchors != expected:
            raise ValueError(
                f"aggr_feature_bound is {list(self.anchors)}, but {self.method} reads {list(expected)} of this target"
            )


class PlainHead(SpeculationHead):
    """A head whose rows are all of one type: ordinary causal attention, in training and in decoding."""

    def staircase_plan(
        self, stage_sizes: Sequence[int], fill: int | None, *, exact_fill: bool = False
    ) -> dict[int, tuple[int, ...]]:
        return {0: ()}
