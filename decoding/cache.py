"""The memory that tokens leave behind in the target's layers: keys and values, and states of linear attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from decoding.nodes import CachePlan, NodeBatch
from loading.target_config import LINEAR, SLIDING, head_dim, layer_types
from pipeline_model import oldest_seen


class Place(NamedTuple):
    """What layers are about to run, and where it goes in their memory."""

    first: int  # the first of the KV slots that are written in a row ...
    used: int  # ... and the end of them; all slots before it are shown to attention
    slots: Tensor | None  # [w] KV slots that are written one by one, in place of a row of them
    parents: Tensor | None  # [w] linear-attention states that are read; None: there is no state yet
    nodes: Tensor  # [w] states that are written


class KVMemory:
    """Keys and values of one attention layer: a slot for each position, in a tree for each live node."""

    def __init__(self, keys: Tensor, values: Tensor, window: int | None = None):
        self.keys, self.values, self._window = keys, values, window  # [1, H_kv, slots, D]
        self.place: Place

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values ([w, H_kv, q, D]); return all that the mask may show, shared by the w rows."""
        place, oldest = self.place, 0
        if place.slots is None:
            self.keys[:, :, place.first : place.used].copy_(key)
            self.values[:, :, place.first : place.used].copy_(value)
            if self._window is not None:
                oldest = oldest_seen(place.first, self._window)
        else:
            self.keys[0].index_copy_(1, place.slots, key[:, :, 0].transpose(0, 1))
            self.values[0].index_copy_(1, place.slots, value[:, :, 0].transpose(0, 1))
        rows, shown = len(key), slice(oldest, place.used)
        return self.keys[:, :, shown].expand(rows, -1, -1, -1), self.values[:, :, shown].expand(rows, -1, -1, -1)

    def move(self, slots: Tensor, to: slice) -> None:
        """Copy what is in some slots to others, which follow each other."""
        for tensor in self.tensors():
            tensor[:, :, to] = tensor[:, :, slots]

    def resize(self, plan: CachePlan) -> None:
        """Have memory for a larger plan; what is in it stays."""
        self.keys, self.values = (_extended(tensor, 2, plan.slots) for tensor in self.tensors())

    def first_places(self) -> list[Tensor]:
        """The memory of slot 0."""
        return [tensor[:, :, 0] for tensor in self.tensors()]

    def clear(self, kept: int) -> None:
        """Forget all slots but the first `kept`."""
        for tensor in self.tensors():
            tensor[:, :, kept:].zero_()

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


class LinearMemory:
    """States of one linear-attention layer, a convolution's and a recurrent one for each live node.

    The state of a node's parent is what the node starts from, so that rollback is exact and free.
    """

    def __init__(self, conv: Tensor, recurrent: Tensor):
        self.conv = conv  # [nodes, channels, kernel]
        self.recurrent = recurrent  # [nodes, heads, D_k, D_v], float32
        self.place: Place
        self._gathered: Tensor | None = None  # the convolution states that the layer is updating in place

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        """The parents' convolution states [w, channels, kernel], for the layer to update in place."""
        if self.place.parents is None:
            return None
        self._gathered = self.conv[self.place.parents]
        return self._gathered

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        """The parents' recurrent states [w, heads, D_k, D_v]."""
        return None if self.place.parents is None else self.recurrent[self.place.parents]

    def update_conv_state(self, inputs: Tensor, layer_idx: int, conv_kernel_size: int, **_: Any) -> Tensor:
        """Several positions at once (prefill, [1, channels, q]): returns them with the left context they need."""
        left = inputs.new_zeros(*inputs.shape[:2], conv_kernel_size)
        if self.place.parents is not None:
            left = self._gathered
        inputs = torch.cat([left, inputs], dim=-1)
        self._gathered = inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> Tensor:
        """Store the new states ([w, heads, D_k, D_v]) under the nodes' own ids. The layer calls this last."""
        self.conv[self.place.nodes] = self._gathered
        self.recurrent[self.place.nodes] = state
        self._gathered = None
        return state

    def move(self, slots: Tensor, to: slice) -> None:
        """There are no slots here."""

    def resize(self, plan: CachePlan) -> None:
        """Have memory for a larger plan; what is in it stays."""
        self.conv, self.recurrent = (_extended(tensor, 0, plan.nodes) for tensor in self.tensors())

    def first_places(self) -> list[Tensor]:
        """The memory of node 0."""
        return [tensor[0] for tensor in self.tensors()]

    def clear(self, kept: int) -> None:
        """Forget all states, unless tokens are kept: then one of them is still needed."""
        if not kept:
            for tensor in self.tensors():
                tensor.zero_()

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.conv, self.recurrent


class StageCache:
    """Keys, values and linear-attention states of one stage's layers, preallocated: `cache[layer]` is one layer's.

    The decoder layers of `transformers` see a layer's memory as their cache (the methods of `transformers.cache_utils`
    that they call). A rejected token costs nothing to drop. A layer with a sliding window has all the slots too, since
    a rollback may need the oldest of them again; in a chain it reads the window alone.
    """

    def __init__(
        self, config: PreTrainedConfig, layers: range, plan: CachePlan, dtype: torch.dtype, device: torch.device
    ):
        types = layer_types(config)
        self.plan = plan
        self._layers: dict[int, KVMemory | LinearMemory] = {}
        for layer in layers:
            if types[layer] == LINEAR:
                self._layers[layer] = LinearMemory(*linear_states(config, plan.nodes, dtype, device))
            else:
                shape = (1, config.num_key_value_heads, plan.slots, head_dim(config))
                keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
                self._layers[layer] = KVMemory(keys, values, config.sliding_window if types[layer] == SLIDING else None)

    def __getitem__(self, layer: int) -> KVMemory | LinearMemory:
        return self._layers[layer]

    def tensors(self) -> list[Tensor]:
        """All memory, layer by layer."""
        return [tensor for memory in self._layers.values() for tensor in memory.tensors()]

    def nbytes(self) -> int:
        """Bytes held, all layers together."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def clear(self, kept: int = 0) -> None:
        """Forget all but the first tokens: a mask hides what an earlier generation left, unless that is no number."""
        for memory in self._layers.values():
            memory.clear(kept)

    def move(self, slots: Sequence[int], end: int) -> None:
        """Bring what is in some KV slots to the slots before `end`, in this order."""
        at_slots, to = None, slice(end - len(slots), end)
        for memory in self._layers.values():
            if at_slots is None:
                at_slots = torch.tensor(slots, device=memory.tensors()[0].device)
            memory.move(at_slots, to)

    def resize(self, plan: CachePlan) -> None:
        """Have memory for a larger plan, layer by layer; what is in it stays."""
        self.plan = plan
        for memory in self._layers.values():
            memory.resize(plan)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Around trial runs, whose nodes all have slot 0 and id 0: what was there is there again afterwards."""
        places = [place for memory in self._layers.values() for place in memory.first_places()]
        saved = [place.clone() for place in places]
        yield
        for place, numbers in zip(places, saved, strict=True):
            place.copy_(numbers)

    def prefill(self, start: int, length: int, parent: Tensor, node: Tensor) -> None:
        """The layers will run positions `start .. start + length - 1` of the prompt.

        Linear-attention layers go on from the states of `parent` and leave theirs under `node`, [1] node ids both.
        """
        self._run_at(Place(start, start + length, None, parent if start else None, node))

    def enter(self, batch: NodeBatch) -> None:
        """The layers will run this batch: a tree's, which has masks, or a chain's."""
        if batch.mask is None:
            self._run_at(Place(batch.position, batch.position + 1, None, batch.parents, batch.nodes))
        else:
            self._run_at(Place(0, batch.mask.shape[1], batch.slots, batch.parents, batch.nodes))

    def _run_at(self, place: Place) -> None:
        for memory in self._layers.values():
            memory.place = place

    def kv(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a full-attention layer at the given slots, each [H_kv, len(slots), D]."""
        memory = self._layers[layer]
        return memory.keys[0][:, slots], memory.values[0][:, slots]

    def linear_state(self, layer: int, node: int) -> tuple[Tensor, Tensor]:
        """Convolution [channels, kernel] and recurrent [heads, D_k, D_v] state of a node in a linear layer."""
        memory = self._layers[layer]
        return memory.conv[node], memory.recurrent[node]


def _extended(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A larger tensor that begins with this one, and is zero after it."""
    larger = tensor.new_zeros(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    larger.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return larger


def linear_states(
    config: PreTrainedConfig, nodes: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Zero convolution and recurrent states of a linear-attention layer, as `LinearMemory` holds them."""
    key_width = config.linear_num_key_heads * config.linear_key_head_dim
    value_width = config.linear_num_value_heads * config.linear_value_head_dim
    conv_shape = (nodes, 2 * key_width + value_width, config.linear_conv_kernel_dim)
    state_shape = (nodes, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return (
        torch.zeros(conv_shape, dtype=dtype, device=device),
        torch.zeros(state_shape, dtype=torch.float32, device=device),
    )
