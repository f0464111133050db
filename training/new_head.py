"""How a head starts that is to be trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from loading.head_values import integer
from loading.target_config import is_linear_attention
from pipeline_model import HeadConfig, SpeculationHead, Target


def check_base_layers(base_layers: Sequence[int], num_spec_layers: int, target_config: PreTrainedConfig) -> None:
    """ValueError unless each speculation layer has a target layer, counted from 0, in range and of full attention."""
    if len(base_layers) != num_spec_layers:
        raise ValueError(
            f"spec_init_from_base_layers lists {len(base_layers)} layers, but num_spec_layers is {num_spec_layers}: "
            "give one per speculation layer"
        )
    for number in base_layers:
        integer("an entry of spec_init_from_base_layers", number, 0, target_config.num_hidden_layers - 1)
        if is_linear_attention(target_config, number):
            raise ValueError(f"target layer {number} is linear attention: start from a full-attention layer")


def late_layers(num_spec_layers: int, target_config: PreTrainedConfig) -> tuple[int, ...]:
    """The target's last full-attention layers, one for each speculation layer. ValueError when it has too few."""
    full = [layer for layer in range(target_config.num_hidden_layers) if not is_linear_attention(target_config, layer)]
    if len(full) < num_spec_layers:
        raise ValueError(
            f"num_spec_layers is {num_spec_layers}, but the target has only {len(full)} full-attention layers to start "
            "from: use fewer, or another start"
        )
    return tuple(full[-num_spec_layers:])


def new_head(
    config: HeadConfig,
    target: Target,
    base_layers: Sequence[int] | None = None,
    seed: int = 0,
    *,
    identity_projections: bool = False,
) -> SpeculationHead:
    """A head to train, in float32 on the target's device.

    Its lm_head starts from the target's rows for the draft vocabulary. `base_layers` lists one target layer (the
    first is 0) for each speculation layer to start from; whatever the two have in common is copied. With
    `identity_projections` each row starts as the deepest hidden state that it reads. ValueError as `check_base_layers`.
    """
    if base_layers is not None:
        check_base_layers(base_layers, config.num_spec_layers, target.config)
    head = config.new_head(target, seed)
    for layer, number in zip(head.spec_layers, base_layers or (), strict=False):
        source, own = target.layers[number].state_dict(), layer.state_dict()
        common = {name: w for name, w in source.items() if name in own and own[name].shape == w.shape}
        layer.load_state_dict(common, strict=False)
    if identity_projections:
        for projection in chain(*head.projections):
            start_as_identity(projection.weight)
    return head


@torch.no_grad()
def start_as_identity(weight: Tensor) -> None:
    """Make a projection [H, j H] pass on the last of the j hidden states it reads: zero but for an identity."""
    weight.zero_()
    weight[:, -len(weight) :].fill_diagonal_(1)
