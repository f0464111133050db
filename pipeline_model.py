"""Speculative Pipeline Decoding (SPD): the model file.

The target model is cut into n stages, so that n tokens of one sequence are in flight at different depths. A small
speculation head reads the hidden states that the stages have already computed and drafts the next token while the
stages run. Top to bottom: checkpoint configuration, the pure functions of depth and type, tree nodes and caches, the
partitioned target, the speculation head, checkpoint files. The decode loop is in pipeline_inference.py.

Symbols, here and everywhere else in the repository:

    L  target layers           n  pipeline stages          s  stage index, 0 .. n-1
    d  depth, 0 .. n: stages a token has passed            m  aggregation types      k  type index, 0 .. m-1
    L_s  speculation layers    H  hidden size              V  vocabulary             V_d  draft vocabulary
    W  draft-tree width        w  nodes of one position, at most W                   T  tokens before this one
    h_0  embedding output      h_i  output of decoder layer i, BEFORE the final norm

The staircase, for n = 4 and a full pipeline, one column a token (10 is the newest, * has completed):

    position        1  2  3  4  5  6   7   8   9   10
    depth d         *  *  *  *  *  *   3   2   1   0      before the cycle: all of it is visible to the head
    row fed         .  .  .  .  .  g3  g3  g2  g1  g0     token 6 completed in the last cycle: its row stays cached
    this cycle      head drafts token 11; stage 3 runs token 7, ..., stage 0 runs token 10
    afterwards      token 7 has depth 4 and verifies token 8; token 11 enters at depth 0
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache, partial
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.func import functional_call
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from script_utils import atomic_open, first_line, listed
from target_files import (
    bitsandbytes_config,
    causal_class,
    check_attention_kernels,
    check_quantization,
    check_target_weights,
    load_weights,
    read_text_config,
)

CHECKPOINT_NAME = "speculation_head_final.pt"
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text")
# Families with sliding attention windows: `layer_types` says which layers have one, or all do.
WINDOWS_BY_LAYER, WINDOWS_EVERYWHERE = ("qwen2", "qwen3"), ("mistral", "qwen3_moe")
ATTN_IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2")
# Rotary embeddings whose frequencies depend on the running length cannot be tabulated once per position.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# ---------------------------------------------------------------------------------------------------------------------
# Depth, stage and type: pure functions, shared by training, decoding and planning
# ---------------------------------------------------------------------------------------------------------------------


def split_layers(num_layers: int, num_stages: int, stage_layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers per stage, summing to `num_layers`.

    An even split gives the remainder to the first stages: the last one also computes the final logits. `stage_layers`
    states an uneven split, one positive layer count a stage. Raises ValueError when the counts do not fit.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"num_stages is {num_stages}, but the target has {num_layers} layers: choose one in 1 .. {num_layers}"
        )
    if stage_layers is None:
        base, extra = divmod(num_layers, num_stages)
        return tuple(base + (stage < extra) for stage in range(num_stages))
    sizes = tuple(stage_layers)
    if len(sizes) != num_stages:
        raise ValueError(f"stage_layers has {len(sizes)} entries, but num_stages is {num_stages}: give one a stage")
    if min(sizes) < 1 or sum(sizes) != num_layers:
        raise ValueError(
            f"stage_layers {';'.join(map(str, sizes))} sums to {sum(sizes)}, but the target has {num_layers} layers: "
            "give positive counts that sum to it"
        )
    return sizes


def layers_available(stage_sizes: Sequence[int]) -> tuple[int, ...]:
    """Layers a token has passed at depth d, for d = 0 .. n: (0, hi_0, hi_1, ..., L)."""
    available = [0]
    for size in stage_sizes:
        available.append(available[-1] + size)
    return tuple(available)


def auto_anchors(stage_sizes: Sequence[int]) -> tuple[int, ...]:
    """The `auto` list of anchors `b_0 < ... < b_{m-1}` (`aggr_feature_bound`) for a split.

    The boundaries behind 0, 1, 3 and 6 stages, and the last layer but one. On an even split with n >= 7 this is the
    published rule {0, l, 3l, 6l, L-1}, l = L/n. For fewer stages the published rule runs past the last boundary and
    can list a type that no depth maps to; this one never does, as each anchor but the last is itself a boundary.
    """
    available = layers_available(stage_sizes)
    num_stages, num_layers = len(stage_sizes), available[-1]
    boundaries = {available[min(depth, num_stages - 1)] for depth in (0, 1, 3, 6)}
    return tuple(sorted(boundaries | {max(num_layers - 1, 0)}))


def auto_shallow_layers(num_layers: int, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Version 10's rule for the hidden states that g_n, ..., g_1 read (`shallow_hidden_layer_indices`), in that order.

    With l = L // n: g_1 reads {0, l}, g_2 {0, l, 2l}, g_i {0, q, 2q, l*i} with q = l*i // 3, none above
    min(L, n*l - 2).
    """
    size = num_layers // num_stages
    highest = max(0, min(num_layers, num_stages * size - 2))
    lists = []
    for stage in range(num_stages, 0, -1):
        third = size * stage // 3
        layers = {0, size * stage} | ({third, 2 * third} if stage > 2 else {size})
        lists.append(tuple(sorted({min(layer, highest) for layer in layers})))
    return tuple(lists)


def depth_types(anchors: Sequence[int], stage_sizes: Sequence[int]) -> tuple[int, ...]:
    """Type of each depth, for d = 0 .. n: `f(d) = max{k : b_k <= layers available at depth d}`."""
    return tuple(
        max(k for k, anchor in enumerate(anchors) if anchor <= layers) for layers in layers_available(stage_sizes)
    )


def representative_depths(anchors: Sequence[int], stage_sizes: Sequence[int]) -> tuple[int | None, ...]:
    """`d_k = min{d : f(d) = k}` for each type k; None for a type that no depth maps to (dead weight)."""
    types = depth_types(anchors, stage_sizes)
    return tuple(types.index(k) if k in types else None for k in range(len(anchors)))


# ---------------------------------------------------------------------------------------------------------------------
# Configuration of a speculation head, as its checkpoint stores it
# ---------------------------------------------------------------------------------------------------------------------


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]; ValueError names the field, the value and the bound."""
    bound = f">= {low}" if high is None else f"in {low} .. {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value!r}: it must be an integer {bound}")
    return value


def _integers(name: str, value: Any, low: int) -> tuple[int, ...]:
    """`value` as a list of integers >= low; ValueError names the field and the value."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name} is {value!r}: it must be a list of integers")
    return tuple(_integer(f"an entry of {name}", item, low) for item in value)


def _written_out(value: Any) -> Any:
    """The list that a text like "4;6;6;4" or "4,6,6,4" stands for; anything else as it is."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(\s*[;,]\s*\d+)*\s*", value):
        return [int(item) for item in re.split("[;,]", value)]
    return value


def parse_stage_layers(value: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """`stage_layers` as layer counts, from "a;b;c" (commas work too) or a list; None and "" mean an even split."""
    if value is None or value in ("", [], ()):
        return None
    value = _written_out(value)
    if isinstance(value, str):
        raise ValueError(f'stage_layers is {value!r}: write one layer count a stage, as in "4;6;6;4"')
    return _integers("stage_layers", value, 0)


def _anchor_list(value: Any) -> tuple[int, ...]:
    anchors = _integers("aggr_feature_bound", value, 0)
    if anchors[0] != 0 or any(a >= b for a, b in pairwise(anchors)):
        raise ValueError(f"aggr_feature_bound is {list(anchors)}: it must start with 0 and rise strictly")
    return anchors


def parse_shallow_layers(value: str) -> tuple[tuple[int, ...], ...]:
    """`shallow_hidden_layer_indices` from a text: "0,1,2;0,2" are the lists of g_2 and g_1."""
    if not re.fullmatch(r"\s*\d+(\s*[;,]\s*\d+)*\s*", value):
        raise ValueError(
            f'shallow_hidden_layer_indices is {value!r}: write a list of layers a stage, g_n first, as in "0,1,2;0,2"'
        )
    return tuple(tuple(map(int, item.split(","))) for item in value.split(";"))


def _shallow_lists(value: Any, num_stages: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)) or len(value) != num_stages:
        raise ValueError(f"shallow_hidden_layer_indices is {value!r}: it must hold num_stages, {num_stages}, lists")
    return tuple(_integers("an entry of shallow_hidden_layer_indices", item, 0) for item in value)


def _draft_ids(value: Any, vocab_size: int, draft_vocab_size: int) -> tuple[int, ...] | None:
    if value is None:
        if draft_vocab_size != vocab_size:
            raise ValueError(
                f"draft_vocab_size is {draft_vocab_size} and vocab_size {vocab_size}, but draft_token_ids is missing: "
                "a reduced vocabulary needs the list of its token ids"
            )
        return None
    ids = _integers("draft_token_ids", value, 0)
    if len(ids) != draft_vocab_size:
        raise ValueError(f"draft_token_ids has {len(ids)} entries, but draft_vocab_size is {draft_vocab_size}")
    if any(a >= b for a, b in pairwise(ids)):
        raise ValueError("draft_token_ids must rise strictly")
    if ids[-1] >= vocab_size:
        raise ValueError(f"draft_token_ids runs from {ids[0]} to {ids[-1]}, outside 0 .. {vocab_size - 1}")
    return ids


def _trained_stages(value: Any, num_stages: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    stages = _integers("trained_num_stages", value, 1)
    if max(stages) != num_stages:
        raise ValueError(f"trained_num_stages is {list(stages)}: its largest entry must be num_stages, {num_stages}")
    return stages


@dataclass(frozen=True)
class HeadConfig:
    """The `config` entry of a head checkpoint, parsed and checked (METHOD section 8: versions 10, 11 and 12).

    Build it with `HeadConfig.parse`; write it with `to_dict`. Each wrong value is a ValueError that names it.
    """

    hidden_size: int  # H, of the target
    vocab_size: int  # V, of the target
    num_stages: int  # n; the largest one when the head was trained for several
    num_spec_layers: int  # L_s
    aggr_feature_bound: tuple[int, ...] | None  # anchors b_0 = 0 < ... < b_{m-1}; None in version 10
    draft_vocab_size: int  # V_d, rows of the head's lm_head
    draft_token_ids: tuple[int, ...] | None = None  # target id of each draft id, ascending; None: V_d = V
    trained_with_use_deepest: bool = True  # completed tokens always show their deepest type
    shallow_hidden_layer_indices: tuple[tuple[int, ...], ...] | None = None  # version 10: b of g_n, ..., of g_1
    stage_layers: tuple[int, ...] | None = None  # layers per stage; None: even split
    spec_intermediate_size_fallback: int = 9216  # MLP width where the target's config has none
    spec_init_from_base_layers: tuple[int, ...] | None = None  # target layers the speculation layers started from
    spec_init_first_layer: int | None = None  # number of the target's first layer there: 0; None: not said, as in the
    # paper's heads, which count from 0, and this project's first ones, which count from 1
    trained_num_stages: tuple[int, ...] | None = None  # every n it was trained for; None: num_stages alone
    base_model_path: str = ""  # as the trainer was told; informative
    model_type: str | None = None  # of the target; None in the oldest checkpoints

    @property
    def anchors(self) -> tuple[int, ...]:
        """The b of every hidden state h_b that the head reads, rising from 0."""
        if self.aggr_feature_bound is not None:
            return self.aggr_feature_bound
        return tuple(sorted({0}.union(*self.shallow_hidden_layer_indices)))

    @property
    def version(self) -> int:
        if self.shallow_hidden_layer_indices is not None:
            return 10
        return 11 if self.stage_layers is None else 12

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> HeadConfig:
        """Check a checkpoint's `config` mapping. Keys this version does not know are ignored."""
        version = raw.get("version")
        if version not in (10, 11, 12):
            raise ValueError(f"checkpoint version is {version!r}: this program reads versions 10, 11 and 12")
        read_layers = "shallow_hidden_layer_indices" if version == 10 else "aggr_feature_bound"
        required = ("hidden_size", "vocab_size", "num_stages", "num_spec_layers", read_layers)
        missing = [key for key in required if key not in raw]
        if missing:
            raise ValueError(f"the checkpoint's config lacks {', '.join(missing)}")

        vocab_size = _integer("vocab_size", raw["vocab_size"], 1)
        draft_vocab_size = _integer("draft_vocab_size", raw.get("draft_vocab_size", vocab_size), 1, vocab_size)
        num_stages = _integer("num_stages", raw["num_stages"], 1)
        stage_layers = parse_stage_layers(raw.get("stage_layers"))
        anchors = shallow_layers = None
        if version == 10:
            shallow_layers = _shallow_lists(raw["shallow_hidden_layer_indices"], num_stages)
            for name in ("stage_layers", "trained_num_stages"):
                if raw.get(name):
                    raise ValueError(
                        f"{name} is {raw[name]!r}, but a head of version 10 is made for one n and an even split: "
                        "use version 11"
                    )
        else:
            anchors = _anchor_list(raw["aggr_feature_bound"])
            if raw.get("num_aggr_types", len(anchors)) != len(anchors):
                listed = f"aggr_feature_bound lists {len(anchors)}"
                raise ValueError(f"num_aggr_types is {raw['num_aggr_types']}, but {listed}")
        if version == 12 and stage_layers is None:
            raise ValueError("checkpoint version is 12, but stage_layers is missing")
        base_layers = raw.get("spec_init_from_base_layers")
        if base_layers is not None:
            base_layers = _integers("spec_init_from_base_layers", _written_out(base_layers), 0)
        first_layer = raw.get("spec_init_first_layer")
        if first_layer is not None:
            first_layer = _integer("spec_init_first_layer", first_layer, 0, 1)
        return cls(
            hidden_size=_integer("hidden_size", raw["hidden_size"], 1),
            vocab_size=vocab_size,
            num_stages=num_stages,
            num_spec_layers=_integer("num_spec_layers", raw["num_spec_layers"], 1),
            aggr_feature_bound=anchors,
            draft_vocab_size=draft_vocab_size,
            draft_token_ids=_draft_ids(raw.get("draft_token_ids"), vocab_size, draft_vocab_size),
            trained_with_use_deepest=bool(raw.get("trained_with_use_deepest", False)),
            shallow_hidden_layer_indices=shallow_layers,
            stage_layers=stage_layers,
            spec_intermediate_size_fallback=_integer(
                "spec_intermediate_size_fallback", raw.get("spec_intermediate_size_fallback", 9216), 1
            ),
            spec_init_from_base_layers=base_layers,
            spec_init_first_layer=first_layer,
            trained_num_stages=_trained_stages(raw.get("trained_num_stages"), num_stages),
            base_model_path=str(raw.get("base_model_path", "")),
            model_type=raw.get("model_type"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The mapping a checkpoint stores: plain numbers, strings and lists; optional entries only where used."""
        raw = {"version": self.version} | {field.name: getattr(self, field.name) for field in fields(self)}
        if self.aggr_feature_bound is not None:
            raw["num_aggr_types"] = len(self.aggr_feature_bound)
        return {key: _listed_out(value) for key, value in raw.items() if value is not None}

    def build(self, target_config: PreTrainedConfig) -> SpeculationHead:
        """An untrained head. ValueError when it does not fit the target."""
        return (FixedRowHead if self.version == 10 else SpeculationHead)(self, target_config)

    def split(self, num_layers: int, num_stages: int | None = None) -> tuple[int, ...]:
        """Stage sizes on a target of `num_layers` layers; `num_stages` picks one of several the head was trained for.

        ValueError when the head was not trained for that many.
        """
        if num_stages is None or num_stages == self.num_stages:
            return split_layers(num_layers, self.num_stages, self.stage_layers)
        trained = self.trained_num_stages or (self.num_stages,)
        if num_stages not in trained:
            raise ValueError(
                f"--num_stages is {num_stages}, but the head was trained for {', '.join(map(str, trained))}"
            )
        return split_layers(num_layers, num_stages)

    def check_target(self, target_config: PreTrainedConfig) -> None:
        """ValueError unless this head fits the target: hidden size, vocabulary, family, and layers enough."""
        for name in ("hidden_size", "vocab_size", "model_type"):
            ours, theirs = getattr(self, name), getattr(target_config, name)
            if ours is not None and _family(ours) != _family(theirs):
                raise ValueError(
                    f"the head was made for a target with {name} {ours} (base_model_path {self.base_model_path!r}), "
                    f"but this target has {name} {theirs}: give the target the head was trained on"
                )
        num_layers = target_config.num_hidden_layers
        available = layers_available(self.split(num_layers))
        if self.aggr_feature_bound is not None and self.aggr_feature_bound[-1] > num_layers:
            last = self.aggr_feature_bound[-1]
            raise ValueError(f"aggr_feature_bound ends at layer {last}, but the target has {num_layers} layers")
        for stage, layers in enumerate(reversed(self.shallow_hidden_layer_indices or ()), start=1):
            if max(layers) > available[stage]:
                raise ValueError(
                    f"shallow_hidden_layer_indices: g_{stage} reads layer {max(layers)}, but the first {stage} of "
                    f"{self.num_stages} stages end at {available[stage]}"
                )


def _listed_out(value: Any) -> Any:
    """Tuples, and those within them, as lists; anything else as it is."""
    return [_listed_out(item) for item in value] if isinstance(value, tuple) else value


def _family(value: Any) -> Any:
    """A model type without the suffix of its text part: a head may store either name of the same model."""
    return value.removesuffix("_text") if isinstance(value, str) else value


# ---------------------------------------------------------------------------------------------------------------------
# Tree nodes on their way through the stages, and the memory they leave behind
# ---------------------------------------------------------------------------------------------------------------------


class NodeRow(NamedTuple):
    """A node as the host knows it: what has to be told to whoever runs the stages."""

    token: int
    id: int
    parent: int  # node id of the parent
    slot: int  # KV slot


class NodeBatch(NamedTuple):
    """The w candidate tokens of one position, which enter stage 0 together and travel together (w = 1 in a chain).

    A batch says all that a stage needs, rollback included: a node sees what its parent sees, and itself. Dropping
    every batch of rejected nodes is the whole rollback; nothing in a stage has to be restored.
    """

    position: int  # of every node in the batch
    ids: tuple[int, ...]  # the w node ids, on the host
    rows: Tensor  # [w, 4] on the device: a NodeRow for each node
    mask: Tensor | None = None  # [w, used] bool, the KV slots each node sees; None in a chain: all up to its own
    window_mask: Tensor | None = None  # [w, used] bool, those within the window; None where the target has no window

    @property
    def tokens(self) -> Tensor:
        return self.rows[:, 0]

    @property
    def nodes(self) -> Tensor:
        """The node ids, [w]: rows of every memory that has one per node."""
        return self.rows[:, 1]

    @property
    def parents(self) -> Tensor:
        return self.rows[:, 2]

    @property
    def slots(self) -> Tensor:
        return self.rows[:, 3]

    def keep(self, rows: Sequence[int], at_rows: Tensor) -> NodeBatch:
        """The batch with only the given rows, which the device has in `at_rows`."""
        masks = (None if mask is None else mask[at_rows] for mask in (self.mask, self.window_mask))
        return NodeBatch(self.position, tuple(self.ids[row] for row in rows), self.rows[at_rows], *masks)

    @property
    def masks(self) -> Masks:
        """The masks as decoder layers take them, each [w, 1, 1, used]."""
        return Masks(*(None if mask is None else mask[:, None, None] for mask in (self.mask, self.window_mask)))


class Masks(NamedTuple):
    """What attention layers may see, [B or 1, 1, q, keys] bool each; None where attention needs no mask."""

    full: Tensor | None = None  # for layers that see everything before them
    window: Tensor | None = None  # for layers with a sliding window


SLOT_STEP, NODE_STEP = 512, 32  # capacities of compiled stages grow by these


class CachePlan(NamedTuple):
    """How much memory one generation needs; nothing grows after it is allocated."""

    slots: int  # KV slots: prompt + new tokens, and in a tree one for each live node
    nodes: int  # node ids that can be alive at once
    tree: bool  # False: a chain, slot = position, no masks
    width: int = 1  # nodes that run at once, at most: W, or the tokens of a drafted chain; 0: the prompt alone

    def fits(self, other: CachePlan) -> bool:
        """Whether memory made for this plan serves the other one as well."""
        return self.slots >= other.slots and self.nodes >= other.nodes

    def joined(self, other: CachePlan) -> CachePlan:
        """A plan for either."""
        return self._replace(slots=max(self.slots, other.slots), nodes=max(self.nodes, other.nodes))

    def in_steps(self) -> CachePlan:
        """The same, rounded up, so that few generations need another size."""
        return self._replace(
            slots=-(-self.slots // SLOT_STEP) * SLOT_STEP, nodes=-(-self.nodes // NODE_STEP) * NODE_STEP
        )


class HostCopies:
    """Brings integers to the device, each list in one copy that the host does not wait for.

    On CUDA they leave from pinned memory. Lists as indices, and tensors that are made on the device from a list, would
    do the same with a wait for the whole device.
    """

    RING = 4  # copies that may be under way

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[tuple[Tensor, torch.cuda.Event] | None] = [None] * self.RING
        self._next = 0

    def copy(self, numbers: Sequence) -> Tensor:
        """The numbers, int64, in new memory on the device."""
        tensor = torch.from_numpy(np.array(numbers, dtype=np.int64))  # several times as fast as torch.tensor
        return tensor if self._device.type != "cuda" else self._through_pinned(tensor)

    def copy_each(self, lists: Iterable[Sequence[int]]) -> Sequence[Tensor]:
        """Several lists, each as a tensor, in one copy; nothing is copied where there are none."""
        lists = list(lists)
        if not lists:
            return ()
        return self.copy(list(chain.from_iterable(lists))).split([len(numbers) for numbers in lists])

    def _through_pinned(self, tensor: Tensor) -> Tensor:
        place = self._next = (self._next + 1) % self.RING
        if self._buffers[place] is not None:
            self._buffers[place][1].synchronize()  # an earlier copy from this buffer: long done
        if self._buffers[place] is None or self._buffers[place][0].numel() < tensor.numel():
            size = max(256, 2 * tensor.numel())
            self._buffers[place] = torch.empty(size, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()
        buffer, copied = self._buffers[place]
        on_device = buffer[: tensor.numel()].copy_(tensor.flatten()).to(self._device, non_blocking=True)
        copied.record()
        return on_device.view(tensor.shape)


class NodeBoard:
    """Brings nodes to the device, one copy per batch; for a tree it also says which KV slots each node sees."""

    def __init__(self, device: torch.device, window: int | None = None):
        """`window`: the target's sliding window, in tokens, if it has one."""
        self._device, self._window, self._copies = device, window, HostCopies(device)
        self._used = 0  # KV slots in use so far, from slot 0 up
        self._visible: Tensor | None = None  # [nodes, slots] bool: row i is node i's own view; None in a chain
        self._positions: Tensor  # [slots] of the token in each slot
        self._range: Tensor  # [W] 0, 1, 2 ...

    def start(self, plan: CachePlan, prompt_length: int, root: int) -> None:
        """A generation begins: its prompt fills the first slots, `root` is the node id of its last token."""
        self._visible, self._used = None, prompt_length
        if plan.tree:
            self._visible = torch.zeros(plan.nodes, plan.slots, dtype=torch.bool, device=self._device)
            self._visible[root, :prompt_length] = True
            self._positions = torch.arange(plan.slots, device=self._device)
            self._range = torch.arange(plan.width, device=self._device)

    def enter(self, position: int, rows: Sequence[NodeRow]) -> NodeBatch:
        """The batch of some nodes at one position: each sees what its parent sees, and its own slot."""
        batch = NodeBatch(position, tuple(row.id for row in rows), self._copies.copy(rows))
        if self._visible is None:
            return batch
        self._used = max(self._used, *(row.slot + 1 for row in rows))
        visible = self._visible[batch.parents]
        visible[self._range[: len(rows)], batch.slots] = True
        self._visible[batch.nodes] = visible
        mask = visible[:, : self._used]
        if self._window is None:
            return batch._replace(mask=mask)
        self._positions[batch.slots] = position
        recent = self._positions[: self._used] >= oldest_seen(position, self._window)
        return batch._replace(mask=mask, window_mask=mask & recent)


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
                self._layers[layer] = LinearMemory(*_linear_states(config, plan.nodes, dtype, device))
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

    def clear(self) -> None:
        """Forget all numbers: a mask hides what an earlier generation left, unless that is no number."""
        for tensor in self.tensors():
            tensor.zero_()

    def prefill(self, start: int, length: int, root: Tensor) -> None:
        """The layers will run prompt positions `start .. start + length - 1`; `root` [1] is the prompt's node id."""
        self._run_at(Place(start, start + length, None, root if start else None, root))

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


def _linear_states(
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


def head_dim(config: PreTrainedConfig) -> int:
    """Width of one attention head. Qwen2's configuration does not list it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """The attention of each target layer: FULL, SLIDING (over `config.sliding_window` tokens) or Qwen3.5's LINEAR."""
    listed = getattr(config, "layer_types", None)
    if listed is not None:
        return tuple(listed)
    return (FULL if getattr(config, "sliding_window", None) is None else SLIDING,) * config.num_hidden_layers


def is_linear_attention(config: PreTrainedConfig, layer: int) -> bool:
    """Whether a target layer (0-based) is Qwen3.5's linear attention."""
    return layer_types(config)[layer] == LINEAR


def oldest_seen(position: int, window: int) -> int:
    """The oldest position that a token sees through a sliding window of `window` tokens, itself among them."""
    return max(0, position - window + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Attention over one shared sequence
# ---------------------------------------------------------------------------------------------------------------------


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of r query rows, without repeating keys for the query heads that share them.

    query [B, H_q, r, D], key and value [B, H_kv, T, D], mask [r, T] bool or None (all visible) -> [B, H_q, r, D].
    """
    batch, heads, rows, width = query.shape
    group = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], group * rows, width)
    if mask is not None:
        mask = mask.repeat(group, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).view(
        batch, heads, rows, width
    )


PROMPT_BLOCK = 256  # rows of a masked prompt that attend at the same time


def _blocks_attention(module, query, key, value, mask, scaling, **kwargs):
    """SDPA of a chunk of the prompt under its causal mask [.., rows, keys], a block of rows at a time.

    A block does not meet the keys after its last row, and no more than a block of the mask is turned into floats.
    """
    length, parts = query.shape[2], []
    before = key.shape[2] - length  # keys before row 0, at most
    for start in range(0, length, PROMPT_BLOCK):
        rows = slice(start, min(start + PROMPT_BLOCK, length))
        seen = slice(0, before + rows.stop)
        block = query[:, :, rows], key[:, :, seen], value[:, :, seen], mask[:, :, rows, seen]
        parts.append(sdpa_attention_forward(module, *block, scaling=scaling, **kwargs)[0])
    return torch.cat(parts, dim=1), None  # [B, rows, H_q, D]


def _nodes_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """`transformers` attention function: SDPA that runs tree nodes which share one KV cache as rows of one query.

    Anything else (prefill, training, batches with their own keys) goes to the library's SDPA.
    """
    nodes, _, length, _ = query.shape
    if attention_mask is not None and length > PROMPT_BLOCK:
        return _blocks_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    if length > 1 or (nodes > 1 and key.stride(0) != 0):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    mask = None if attention_mask is None else attention_mask.view(nodes, -1)
    output = grouped_attention(query.transpose(0, 2), key[:1], value[:1], mask, scaling)  # [1, H_q, w, D]
    return output.transpose(1, 2).transpose(0, 1), None  # [w, 1, H_q, D]


def float_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as an additive one."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def causal_mask(rows: int, start: int, device: torch.device) -> Tensor:
    """Row i stands at position start + i and sees every position up to its own: [rows, start + rows] bool."""
    return torch.ones(rows, start + rows, dtype=torch.bool, device=device).tril(start)


def window_mask(rows: int, start: int, window: int, device: torch.device) -> Tensor:
    """As `causal_mask`, but each row sees the last `window` positions up to its own.

    The keys begin at the oldest position that row 0 sees: [rows, start + rows - oldest_seen(start, window)] bool.
    """
    oldest = oldest_seen(start, window)
    return causal_mask(rows, start, device)[:, oldest:].triu(start - oldest - window + 1)


# ---------------------------------------------------------------------------------------------------------------------
# The partitioned target
# ---------------------------------------------------------------------------------------------------------------------


class TargetPart(NamedTuple):
    """What one process holds of a target, beside the final norm and the rotary table. The rest is never read."""

    layers: range  # decoder layers, 0-based
    embedding: bool = False
    lm_head: range = range(0)  # rows of the vocabulary

    def cut(self, model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """A model class that has only this part, so that `from_pretrained` reads only these weights.

        The lm_head keeps all its rows, and the embedding that it is tied to: `trim` drops the rest.
        """
        part = self

        def init(model: PreTrainedModel, config: PreTrainedConfig) -> None:
            model_class.__init__(model, config)
            for index in range(config.num_hidden_layers):
                if index not in part.layers:
                    model.model.layers[index] = nn.Identity()
            tied = config.tie_word_embeddings and bool(part.lm_head)
            if not part.embedding and not tied:
                model.model.embed_tokens = nn.Identity()
            if not part.lm_head:
                model.lm_head = nn.Identity()
            if not tied:
                model.all_tied_weights_keys = {}

        # `transformers` finds a checkpoint's names and conversions by a class's module and name.
        body = {"__init__": init, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
        return type(model_class.__name__, (model_class,), body)

    def trim(self, model: PreTrainedModel) -> PreTrainedModel:
        """Drop what a loaded `cut` model holds beyond this part."""
        if not self.embedding:
            model.model.embed_tokens = nn.Identity()
        if self.lm_head and len(self.lm_head) < model.config.vocab_size:
            rows = model.lm_head.weight[self.lm_head.start : self.lm_head.stop].clone()
            model.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
            model.lm_head.weight = nn.Parameter(rows, requires_grad=False)
        return model


class Target:
    """A frozen causal language model of `transformers`, opened up: embedding, decoder layers, final norm, lm_head.

    Loaded in part, it has only that part's modules, and every layer keeps its number. Raises ValueError for a model
    type, rotary embedding or attention window that the stages cannot run.
    """

    def __init__(self, model: PreTrainedModel):
        self.config = model.config.get_text_config()
        check_supported(self.config)
        self.layer_types = layer_types(self.config)
        self.window: int | None = self.config.sliding_window if SLIDING in self.layer_types else None
        if self.config._attn_implementation == "sdpa":
            # The same mathematics, faster for the stages' batches of nodes; `model.generate` works as before.
            ALL_ATTENTION_FUNCTIONS.register("spd_sdpa", _nodes_attention)
            ALL_MASK_ATTENTION_FUNCTIONS.register("spd_sdpa", sdpa_mask)
            self.config._attn_implementation = "spd_sdpa"
        self.model = model.eval().requires_grad_(False)
        self.embed_tokens: nn.Module = model.model.embed_tokens
        self.layers: nn.ModuleList = model.model.layers
        self.norm: nn.Module = model.model.norm
        self.lm_head: nn.Linear = model.lm_head
        self._rotary: nn.Module = model.model.rotary_emb
        self._rope: tuple[Tensor, Tensor] | None = None
        self._compiled_layers: dict[tuple, Callable[..., Tensor]] = {}  # by kind of layer

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        part: TargetPart | None = None,
        quantization: str | None = None,
        device_map: Mapping[str, int] | None = None,
    ) -> Target:
        """Load a local folder or a hub id, all of it or a part, onto a device, or module by module by `device_map`.

        quantization: one of `QUANTIZATIONS`, done while loading. ValueError as `load_target_config`, for a weight that
        is missing, unexpected or of another shape, and for damaged files.
        """
        check_attention_kernels(attn_implementation)
        config = load_target_config(path, trust_remote_code, quantization=quantization, in_parts=part is not None)
        check_target_weights(path, config)
        model_class = causal_class(path, config)
        settings = {
            "dtype": dtype,
            "attn_implementation": attn_implementation,
            "device_map": device_map or {"": device},
        }
        if quantization is not None:
            settings["quantization_config"] = bitsandbytes_config(quantization, dtype)
        if part is None:
            return cls(load_weights(model_class, path, config, **settings))
        model = load_weights(part.cut(model_class), path, config, part=True, use_safetensors=True, **settings)
        return cls(part.trim(model))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every end-of-sequence id: generation_config may list several."""
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.config.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of positions 0 .. at least length - 1, each [1, >= length, D_rot]."""
        if self._rope is None or self._rope[0].shape[1] < length:
            positions = torch.arange(-(-length // 1024) * 1024, device=self.device)[None]
            like = torch.empty(1, dtype=self.dtype, device=self.device)
            self._rope = self._rotary(like, positions)
        return self._rope

    def embed(self, tokens: Tensor) -> Tensor:
        """h_0 of token ids: [...] -> [..., H]."""
        return self.embed_tokens(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and lm_head: h_L [..., H] -> [..., V]."""
        return self.lm_head(self.norm(hidden))

    def forward(self, input_ids: Tensor, anchors: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """All layers over ids [B, S], causal, no cache: h_L [B, S, H] and the anchors {b: h_b}, h_0 among them."""
        embedded, length = self.embed(input_ids), input_ids.shape[1]
        masks = self.prompt_masks(length, 0, embedded.device)
        hidden, captured = self.run_layers(range(self.num_layers), embedded, slice(0, length), masks, anchors)
        return hidden, {0: embedded} | captured

    def run_layers(
        self,
        layers: range,
        hidden: Tensor,
        positions: slice,
        masks: Masks,
        anchors: Collection[int],
        cache: StageCache | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Decoder layers (0-based) over hidden states [B, q, H] that stand at the given q positions.

        Returns the last layer's output and the anchors that these layers produce, {b: h_b}, before any final norm.
        """
        cos, sin = self.rope(positions.stop)
        rope = cos[:, positions], sin[:, positions]
        masks = self.attention_masks(masks, hidden.dtype)
        mask_of = {FULL: masks.full, SLIDING: masks.window, LINEAR: None}
        captured = {}
        for index in layers:
            mask = mask_of[self.layer_types[index]]
            memory = None if cache is None else cache[index]
            hidden = self.layers[index](hidden, attention_mask=mask, position_embeddings=rope, cache=memory)
            if index + 1 in anchors:
                captured[index + 1] = hidden
        return hidden, captured

    def compiled_layer(self, index: int) -> Callable[..., Tensor]:
        """The forward of a layer (0-based), compiled with its weights as arguments: one for all layers of its kind.

        (weights, hidden [W, 1, H], rope, mask, the layer's two memory tensors, nodes, parents, slots, [W] each) -> the
        layer's output. Compiled anew for other shapes only; what cannot be compiled is an error, never run otherwise.
        """
        layer = self.layers[index]
        shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
        kind = self.layer_types[index], shapes
        if kind not in self._compiled_layers:
            memory_class = LinearMemory if self.layer_types[index] == LINEAR else KVMemory
            allow_shapes()
            compiled = torch.compile(partial(_run_layer, _empty(layer), memory_class), dynamic=False, fullgraph=True)
            self._compiled_layers[kind] = compiled
        return self._compiled_layers[kind]

    @cached_property
    def compiled_logits(self) -> Callable[[Tensor], Tensor]:
        """`logits` of one h_L [H], compiled. NotCompiled as `StaticForward`."""
        last = nn.Sequential(self.norm, self.lm_head)
        run = torch.compile(partial(functional_call, _empty(last)), dynamic=False, fullgraph=True)
        weights = dict(last.named_parameters())
        with self.compiling():
            run(weights, (self.norm.weight.new_zeros(self.config.hidden_size),))
        return lambda hidden: run(weights, (hidden,))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around a first run: NotCompiled where something cannot be compiled."""
        try:
            yield
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise NotCompiled(
                f"the layers of model type {self.config.model_type!r} cannot be compiled here "
                f"({first_line(error)}): leave --compile out"
            ) from None

    def attention_masks(self, masks: Masks, dtype: torch.dtype) -> Masks:
        """Bool masks as this target's attention takes them."""
        if not self.needs_float_mask:
            return masks
        return Masks(*(None if mask is None else float_mask(mask, dtype) for mask in masks))

    def prompt_masks(self, length: int, start: int, device: torch.device) -> Masks:
        """Causal masks of positions `start .. start + length - 1`, over the keys that `StageCache.update` returns.

        Flash attention makes its own, SDPA the plain causal one, and one query may see all that is there.
        """
        if length == 1 or self.config._attn_implementation.startswith("flash"):
            return Masks()
        plain = start == 0 and not self.needs_float_mask
        full = None if plain else causal_mask(length, start, device)[None, None]
        if self.window is None:
            return Masks(full)
        covers_all = plain and length <= self.window
        return Masks(full, None if covers_all else window_mask(length, start, self.window, device)[None, None])

    @property
    def needs_float_mask(self) -> bool:
        """Whether attention takes additive masks, and no mask means no causality either."""
        return self.config._attn_implementation == "eager"

    def partition(self, stage_sizes: Sequence[int], *, compiled: bool = False) -> list[Stage]:
        """The stages of a split; `compiled` as for `Stage`."""
        bounds = pairwise(layers_available(stage_sizes))
        return [Stage(self, range(lo, hi), compiled=compiled) for lo, hi in bounds]


MOST_SHAPES = 1024  # of one compiled function in one process


def allow_shapes() -> None:
    """Let a function be compiled for so many shapes: behind torch's own limits it would run uncompiled, or fail."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_SHAPES


def _empty(layer: nn.Module) -> nn.Module:
    """A copy without weights: with those of one layer, what is compiled would be for that one alone."""
    weights = {id(weight): nn.Parameter(weight.to("meta"), requires_grad=False) for weight in layer.parameters()}
    empty = copy.deepcopy(layer, weights)
    for module in empty.modules():
        if type(module) is nn.Linear:
            module.__class__ = _StreamedLinear
    return empty


class _StreamedLinear(nn.Linear):
    """A linear layer to be compiled: on a CPU, a single row's product is a sum along each row of the weights.

    Compiled, such a sum reads the weights as fast as the memory gives them; the library's product of a row and a matrix
    takes up to twice as long.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.shape[:-1].numel() > 1:
            return super().forward(input)
        output = (self.weight.float() * input.float().view(-1)).sum(dim=-1)
        if self.bias is not None:
            output = output + self.bias
        return output.to(input.dtype).view(*input.shape[:-1], -1)


def _run_layer(template, memory_class, weights, hidden, rope, mask, first, second, nodes, parents, slots):
    """A decoder layer with the weights of any layer of its kind: see `Target.compiled_layer`."""
    memory = memory_class(first, second)
    memory.place = Place(0, first.shape[2], slots, parents, nodes)
    settings = {"attention_mask": mask, "position_embeddings": rope, "cache": memory}
    return functional_call(template, weights, (hidden,), settings, strict=True)


def default_target_path(config: HeadConfig, path: str | None) -> str:
    """Where a head's target is: `path`, what the user gave, or else what the head's checkpoint names.

    ValueError, to be completed with --base_model_path, when the checkpoint names none, or a folder that is not here.
    """
    if path:
        return path
    stored = config.base_model_path
    if not stored:
        raise ValueError("the head's checkpoint does not name its target: give --base_model_path")
    if not Path(stored).is_dir():
        try:
            validate_repo_id(stored)
        except HFValidationError:
            raise ValueError(
                f"the head was trained on {stored!r}, a folder that is not on this machine: give --base_model_path"
            ) from None
    return stored


def find_target(
    path: str | None, checkpoint: str | None, trust_remote_code: bool = False
) -> tuple[str, PreTrainedConfig]:
    """Where the target is, and its configuration: at `path`, or else where the head's checkpoint says.

    ValueError, which names the checkpoint where that was asked, as `default_target_path` and `load_target_config`.
    """
    if path:
        return path, load_target_config(path, trust_remote_code)
    if not checkpoint:
        raise ValueError("--base_model_path is missing: without --spec_head_ckpt, nothing else names the target")
    config, _ = read_checkpoint(checkpoint, mapped=True)
    try:
        path = default_target_path(config, None)
        return path, load_target_config(path, trust_remote_code)
    except ValueError as error:
        raise ValueError(f"--base_model_path is missing, and {str(checkpoint)!r} does not help: {error}") from None


def load_target_config(
    path: str, trust_remote_code: bool = False, *, quantization: str | None = None, in_parts: bool = False
) -> PreTrainedConfig:
    """The (text) configuration of a local folder or a hub id, long before its weights.

    ValueError for a folder without a model, and as `check_supported` and `check_quantization`.
    """
    config = read_text_config(path, trust_remote_code)
    check_supported(config)
    check_quantization(path, config, quantization, in_parts)
    return config


def check_supported(config: PreTrainedConfig) -> None:
    """ValueError that names the model type, rotary embedding or sliding window which the stages cannot run."""
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model type {config.model_type!r} is not supported: the target must be one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in STATIC_ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is not supported: it must be one of {', '.join(STATIC_ROPE_TYPES)}")
    check_layer_types(config)


def check_layer_types(config: PreTrainedConfig) -> None:
    """ValueError for attention layers that `transformers` does not run in this family, or not alike with its cache."""
    family, types, window = config.model_type, set(layer_types(config)), getattr(config, "sliding_window", None)
    if family in WINDOWS_EVERYWHERE:
        allowed = {FULL if window is None else SLIDING}
    elif family in WINDOWS_BY_LAYER:
        allowed = {FULL, SLIDING}
    else:
        allowed = {FULL, LINEAR} if family.startswith("qwen3_5") else {FULL}
    if not types <= allowed:
        field = "layer_types" if getattr(config, "layer_types", None) else f"sliding_window {window}"
        raise ValueError(
            f"{field} makes layers of type {', '.join(sorted(types - allowed))}, but model type {family!r} "
            f"{'with' if window else 'without'} sliding_window has {', '.join(sorted(allowed))} alone: "
            "correct the target's config.json"
        )
    if SLIDING in types:
        if window is None:
            raise ValueError(
                "layer_types lists sliding_attention, but use_sliding_window is false or sliding_window missing: "
                "correct the target's config.json"
            )
        _integer("sliding_window", window, 1)


class Stage:
    """Decoder layers [lo, hi) of the target with their memory, which all the tokens at depth s run through in a cycle.

    The one class that runs layers: local stages, ranks, the autoregressive baseline (one stage) and all drafters use
    it. Hidden states are [q, H] or [w, H]; every call returns those that leave the stage and the anchors captured on
    the way: {b: h_b}, taken from the layers' outputs, before any final norm.
    """

    def __init__(self, target: Target, layers: range, *, compiled: bool = False):
        """`compiled`: batches of nodes go through compiled layers, on CUDA as one graph; prompts run as ever."""
        self._target, self.layers, self._compiled = target, layers, compiled
        self.anchors: frozenset[int] = frozenset()  # the b of the h_b that are captured
        self.cache: StageCache | None = None  # as large as the largest generation so far
        self._static: dict[tuple[int, bool], StaticForward] = {}  # of compiled batches, by width and whether of a tree
        self._forward: StaticForward  # of this generation
        self._root: Tensor  # [1] node id of the prompt's last token

    def start(self, plan: CachePlan, root: int, anchors: Iterable[int] = ()) -> None:
        """A generation begins: have memory for it, capture those of the anchors that these layers produce."""
        target = self._target
        self.anchors = frozenset(b for b in anchors if self.layers.start < b <= self.layers.stop)
        if self._compiled:
            plan = plan.in_steps()
        if self.cache is None or not self.cache.plan.fits(plan):
            plan = plan if self.cache is None else plan.joined(self.cache.plan)
            self.cache, self._static = None, {}  # their memory can be used again
            self.cache = StageCache(target.config, self.layers, plan, target.dtype, target.device)
        elif plan.tree or self._compiled:
            self.cache.clear()
        self._root = torch.tensor([root], device=target.device)
        if self._compiled and plan.width:
            kind = plan.width, plan.tree
            if kind not in self._static:
                self._static[kind] = StaticForward(target, self.layers, self.cache, *kind)
            self._forward = self._static[kind]
            self._forward.start(self.anchors)

    def prefill(self, hidden: Tensor, start: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a chunk of the prompt, [q, H] at positions start .. start + q - 1."""
        length = len(hidden)
        self.cache.prefill(start, length, self._root)
        masks = self._target.prompt_masks(length, start, hidden.device)
        return _rows(*self._run(self.layers, hidden[None], slice(start, start + length), masks), 0)

    def run(self, batch: NodeBatch, hidden: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Run one position's nodes, [w, H]."""
        if self._compiled:
            return self._forward.run([batch], hidden)
        self.cache.enter(batch)
        position = slice(batch.position, batch.position + 1)
        return _rows(*self._run(self.layers, hidden[:, None], position, batch.masks), 1)

    def run_chain(self, batches: Sequence[NodeBatch], hidden: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a chain of q tokens at successive positions in one pass, [q, H].

        Linear-attention layers leave a state after every token only when they run one token at a time; the others run
        them all at once, as a prompt.
        """
        if self._compiled:
            return self._forward.run(batches, hidden)
        start, hidden, captured = batches[0].position, hidden[None], {}
        positions = slice(start, start + len(batches))
        masks = self._target.prompt_masks(len(batches), start, hidden.device)
        for one_by_one, group in groupby(self.layers, partial(is_linear_attention, self._target.config)):
            layers = list(group)
            layers = range(layers[0], layers[-1] + 1)
            if one_by_one:
                parts = []
                for row, batch in enumerate(batches):
                    self.cache.enter(batch)
                    place = slice(start + row, start + row + 1)
                    parts.append(self._run(layers, hidden[:, row : row + 1], place, Masks()))
                hidden = torch.cat([part for part, _ in parts], dim=1)
                captured |= {b: torch.cat([found[b] for _, found in parts], dim=1) for b in parts[0][1]}
            else:
                self.cache.prefill(start, len(batches), batches[-1].nodes)
                hidden, found = self._run(layers, hidden, positions, masks)
                captured |= found
        return _rows(hidden, captured, 0)

    def _run(self, layers: range, hidden: Tensor, positions: slice, masks: Masks) -> tuple[Tensor, dict[int, Tensor]]:
        return self._target.run_layers(layers, hidden, positions, masks, self.anchors, self.cache)


def _rows(hidden: Tensor, captured: dict[int, Tensor], dim: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Hidden states and anchors without a dimension of size 1."""
    return hidden.squeeze(dim), {b: states.squeeze(dim) for b, states in captured.items()}


class NotCompiled(ValueError):
    """The target's layers cannot be compiled: there is no other way to run them then."""


WARM_UP_RUNS = 2  # of compiled layers, before a generation's prompt


class StaticForward:
    """A stage's forward of a batch in shapes and addresses that never change, through compiled layers.

    W rows always run (the first one stands in for missing ones), and attention sees all KV slots under a mask. The rows
    are the nodes of one position, or the tokens of a chain, whose positions follow each other. Each kind of layer is
    compiled once and serves all layers of its kind. On CUDA the whole forward is captured as one graph, and what leaves
    it is copied, as the next replay writes to the same memory.
    """

    def __init__(self, target: Target, layers: range, cache: StageCache, width: int, tree: bool):
        self._target, self._layers, self._cache, self._tree = target, layers, cache, tree
        self._runs = [  # of each layer: what runs it, and its weights
            (target.compiled_layer(index), dict(target.layers[index].named_parameters())) for index in layers
        ]
        device, slots = target.device, cache.plan.slots
        self._range, self._slots = (torch.arange(count, device=device) for count in (width, slots))
        self._rows = torch.zeros(width, 4, dtype=torch.long, device=device)
        self._hidden = torch.zeros(width, 1, target.config.hidden_size, dtype=target.dtype, device=device)
        self._rope = tuple(table[:, :1].repeat(width, 1, 1) for table in target.rope(1))
        window = None if target.window is None else torch.zeros(width, 1, 1, slots, dtype=torch.bool, device=device)
        self._masks = Masks(torch.zeros(width, 1, 1, slots, dtype=torch.bool, device=device), window)
        self._anchors: frozenset[int] = frozenset()
        self._ready_for: frozenset[int] | None = None  # the anchors that all is compiled and captured for
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, dict[int, Tensor]]  # of the graph

    def start(self, anchors: frozenset[int]) -> None:
        """A generation begins. Compiles, warms up and captures where that has not been done for these anchors.

        NotCompiled where a layer cannot be compiled.
        """
        for mask in self._masks:
            if mask is not None:
                mask.zero_()
        if anchors == self._ready_for:
            return
        self._anchors, self._ready_for, self._graph = anchors, None, None
        self._masks.full[..., 0] = True  # no row without a key
        if self._target.window is not None:
            self._masks.window[..., 0] = True
        with self._target.compiling():
            for _ in range(WARM_UP_RUNS):
                self._forward()
        if self._target.device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outputs = self._forward()
        self._ready_for = anchors

    def run(self, batches: Sequence[NodeBatch], hidden: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the nodes of a batch, [w, H], or of several batches that are a chain; returns as `Stage.run`."""
        count, first = len(hidden), batches[0]
        rows = first.rows if len(batches) == 1 else torch.cat([batch.rows for batch in batches])
        self._fill(self._rows, rows)
        self._fill(self._hidden, hidden[:, None])
        positions = slice(first.position, first.position + len(batches))
        for fixed, table in zip(self._rope, self._target.rope(positions.stop), strict=True):
            self._fill(fixed, table[0, positions, None])
        self._fill_masks(first, len(batches))
        if self._graph is None:
            output, captured = self._forward()
            return output[:count, 0], {b: states[:count, 0] for b, states in captured.items()}
        self._graph.replay()
        output, captured = self._outputs
        return output[:count, 0].clone(), {b: states[:count, 0].clone() for b, states in captured.items()}

    def _fill_masks(self, first: NodeBatch, length: int) -> None:
        """Those of a batch of a tree, or of a chain of so many tokens."""
        if first.mask is not None:
            for fixed, mask in zip(self._masks, first.masks, strict=True):
                if mask is not None:
                    self._fill(fixed[..., : mask.shape[-1]], mask)
            return
        ahead = (self._slots - self._range[:length, None])[:, None, None]  # of the first token's position, but for that
        past = ahead <= first.position
        self._fill(self._masks.full, past)
        if self._target.window is not None:
            self._fill(self._masks.window, past & (ahead > first.position - self._target.window))

    @staticmethod
    def _fill(fixed: Tensor, ours: Tensor) -> None:
        """Copy w rows into W, the first one into those that are missing as well."""
        fixed[: len(ours)] = ours
        if len(ours) < len(fixed):
            fixed[len(ours) :] = ours[:1]

    def _forward(self) -> tuple[Tensor, dict[int, Tensor]]:
        target, hidden, captured = self._target, self._hidden, {}
        masks = target.attention_masks(self._masks, hidden.dtype)
        for index, (run, weights) in zip(self._layers, self._runs, strict=True):
            kind, memory = target.layer_types[index], self._cache[index].tensors()
            if kind == LINEAR and not self._tree:  # a row starts from the state that the one before it leaves
                rows = (slice(row, row + 1) for row in range(len(hidden)))
                hidden = torch.cat([self._run(run, weights, hidden, None, memory, row) for row in rows])
            else:
                seen = None if kind == LINEAR else masks.window if kind == SLIDING else masks.full
                hidden = self._run(run, weights, hidden, seen, memory, slice(None))
            if index + 1 in self._anchors:
                captured[index + 1] = hidden
        return hidden, captured

    def _run(self, run, weights, hidden: Tensor, mask: Tensor | None, memory: tuple, rows: slice) -> Tensor:
        """One layer over some of the rows."""
        _, nodes, parents, slots = self._rows[rows].unbind(1)
        rope = tuple(table[rows] for table in self._rope)
        return run(weights, hidden[rows], rope, mask, *memory, nodes, parents, slots)


# ---------------------------------------------------------------------------------------------------------------------
# The speculation head (the Pipeline Draft Module)
# ---------------------------------------------------------------------------------------------------------------------


class _SplitAttention:
    """A `transformers` decoder layer in three steps, so that rows can be keys and values without being queries.

    Inputs [B, R, H]; queries, keys and values [B, heads, R, D]. Mixed into a decoder layer class, whose modules and
    state-dict names it keeps.
    """

    gated: bool  # Qwen3.5: q_proj also yields a gate for the attention output

    def keys_values(self, normed: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        attn = self.self_attn
        shape = (*normed.shape[:2], -1, attn.head_dim)
        key = attn.k_norm(attn.k_proj(normed).view(shape)).transpose(1, 2)
        return rotate(key, rope), attn.v_proj(normed).view(shape).transpose(1, 2)

    def queries(self, normed: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        attn = self.self_attn
        shape = (*normed.shape[:2], -1, attn.head_dim)
        projected, gate = attn.q_proj(normed), None
        if self.gated:
            projected, gate = projected.view(*normed.shape[:2], -1, 2 * attn.head_dim).chunk(2, dim=-1)
            gate = gate.reshape(*normed.shape[:2], -1)
        return rotate(attn.q_norm(projected.reshape(shape)).transpose(1, 2), rope), gate

    def finish(self, residual: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        """Output projection, residual, MLP. `attended` [B, heads, R, D]."""
        attended = attended.transpose(1, 2).flatten(2)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Qwen3SpecLayer(_SplitAttention, Qwen3DecoderLayer):
    gated = False


class Qwen3_5SpecLayer(_SplitAttention, Qwen3_5DecoderLayer):
    gated = True


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [B, heads, R, D] with cos and sin [1, R, D_rot], D_rot <= D (the rest passes)."""
    cos, sin = rope[0][:, None], rope[1][:, None]
    width = cos.shape[-1]
    rotated, rest = (x, None) if width == x.shape[-1] else x.split([width, x.shape[-1] - width], dim=-1)
    half = torch.cat([-rotated[..., width // 2 :], rotated[..., : width // 2]], dim=-1)
    rotated = rotated * cos + half * sin
    return rotated if rest is None else torch.cat([rotated, rest], dim=-1)


def spec_layer_style(
    config: HeadConfig, target_config: PreTrainedConfig
) -> tuple[type[Qwen3SpecLayer | Qwen3_5SpecLayer], PreTrainedConfig]:
    """Class and configuration of dense full-attention layers in the target family's style (never MoE or linear)."""
    shape = {
        "hidden_size": target_config.hidden_size,
        # Some MoE configurations have no dense MLP width; the checkpoint says which one to use then.
        "intermediate_size": getattr(target_config, "intermediate_size", None)
        or config.spec_intermediate_size_fallback,
        "num_hidden_layers": config.num_spec_layers,
        "num_attention_heads": target_config.num_attention_heads,
        "num_key_value_heads": target_config.num_key_value_heads,
        "head_dim": head_dim(target_config),
        "hidden_act": target_config.hidden_act,
        "rms_norm_eps": target_config.rms_norm_eps,
        "attention_bias": False,
    }
    if target_config.model_type.startswith("qwen3_5"):
        return Qwen3_5SpecLayer, Qwen3_5TextConfig(**shape, layer_types=["full_attention"] * config.num_spec_layers)
    return Qwen3SpecLayer, Qwen3Config(**shape)


def new_spec_layers(config: HeadConfig, target_config: PreTrainedConfig) -> nn.ModuleList:
    """L_s layers in the target family's style."""
    layer_class, layer_config = spec_layer_style(config, target_config)
    return nn.ModuleList(layer_class(layer_config, index) for index in range(config.num_spec_layers))


class HeadCache:
    """Keys and values of the head's layers, preallocated. The first `length` rows are tokens that stay."""

    def __init__(self, head: SpeculationHead, capacity: int):
        attn = head.spec_layers[0].self_attn
        kv_heads = attn.k_proj.out_features // attn.head_dim
        weight = attn.k_proj.weight
        shape = (len(head.spec_layers), 1, kv_heads, capacity, attn.head_dim)
        self.length = 0
        self._keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._values = torch.zeros_like(self._keys)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put R rows behind the `length` ones; return all of them, [1, H_kv, length + R, D] each."""
        end = self.length + key.shape[2]
        self._keys[layer][:, :, self.length : end] = key
        self._values[layer][:, :, self.length : end] = value
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]


class SpeculationHead(nn.Module):
    """Projections A_k, L_s decoder layers, lm_head. The final norm and the rotary table are the target's.

    This is version 11, and 12, where the layers move every row; `FixedRowHead` is version 10. What the two do not share
    is here: the projections, the type of a depth, the rows that a type shows, and whether they move.
    """

    fixed_rows = False  # True: rows of other types than 0 are never queries, and each layer has its own for them

    def __init__(self, config: HeadConfig, target_config: PreTrainedConfig):
        super().__init__()
        config.check_target(target_config)
        self.config = config
        self._add_projections()
        self._add_layers(target_config)
        self._add_lm_head()

    def _add_projections(self) -> None:
        hidden, types = self.config.hidden_size, len(self.config.aggr_feature_bound)
        self.aggr_projs = nn.ModuleList(_projection((k + 1) * hidden, hidden) for k in range(types))

    def _add_layers(self, target_config: PreTrainedConfig) -> None:
        self.spec_layers = new_spec_layers(self.config, target_config)

    def _add_lm_head(self) -> None:
        self.lm_head = _projection(self.config.hidden_size, self.config.draft_vocab_size)

    @cached_property
    def draft_token_ids(self) -> Tensor | None:
        """Target id of each draft id, [V_d], on the head's device; None when the vocabularies are the same."""
        ids = self.config.draft_token_ids
        return None if ids is None else torch.tensor(ids, device=self.lm_head.weight.device)

    def depth_types(self, stage_sizes: Sequence[int]) -> tuple[int, ...]:
        """The type of row that a token at depth d shows, for d = 0 .. n."""
        return depth_types(self.config.aggr_feature_bound, stage_sizes)

    def staircase_plan(
        self, stage_sizes: Sequence[int], fill: int | None, *, exact_fill: bool = False
    ) -> dict[int, tuple[int, ...]]:
        """What the training forward computes, as `staircase_plan` returns it, type 0 first."""
        return staircase_plan(self.config.aggr_feature_bound, stage_sizes, fill, exact_fill=exact_fill)

    @property
    def projections(self) -> list[list[nn.Linear]]:
        """For each type, the modules that its rows alone go through."""
        return [[projection] for projection in self.aggr_projs]

    def aggregate(self, kind: int, features: Tensor) -> Tensor:
        """g_k = A_k [h_{b_0}; ...; h_{b_k}]: features [..., m, H] -> [..., H]."""
        return self.aggr_projs[kind](features[..., : kind + 1, :].flatten(-2))

    def shown_rows(self, kind: int, features: Tensor) -> Tensor:
        """What tokens of a type put into the layers: [..., m, H] -> [D, ..., H].

        D = 1 where the layers move the rows; with `fixed_rows` D = L_s, a row for each layer.
        """
        return self.aggregate(kind, features)[None]

    def forward_rows(
        self,
        shown: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: HeadCache,
        mask: Tensor | None = None,
        outputs: int = 0,
    ) -> Tensor:
        """Run R rows behind the cached ones; return the last `outputs`, [outputs, H], before the final norm.

        shown [D, R, H] as `shown_rows`; of `fixed_rows`, the last `outputs` are those of type 0. rope: cosines and
        sines of the rows' positions, [1, R, D_rot]. mask [R, length + R] bool; None is causal. The rows' keys and
        values stay in the cache until the next call, which starts at `cache.length`.
        """
        count, rows, causal = shown.shape[1], shown[:1], mask is None
        for index, layer in enumerate(self.spec_layers):
            if self.fixed_rows and index > 0:
                rows = torch.cat([shown[index : index + 1, : count - outputs], rows], dim=1)
            normed = layer.input_layernorm(rows)
            keys, values = cache.write(index, *layer.keys_values(normed, rope))
            # The last layer's other rows are only ever keys and values, as fixed ones are everywhere.
            asked = outputs if self.fixed_rows or index == len(self.spec_layers) - 1 else count
            asking = slice(count - asked, count)
            rows = rows[:, asking]
            if asked == 0:
                continue
            query, gate = layer.queries(normed[:, asking], (rope[0][:, asking], rope[1][:, asking]))
            if causal and mask is None and asked > 1:
                mask = causal_mask(count, cache.length, rows.device)
            visible = None if causal and asked == 1 else mask[asking]
            attended = grouped_attention(query, keys, values, visible, layer.self_attn.scaling)
            rows = layer.finish(rows, attended, gate)
        return rows[0]


class FixedRowHead(SpeculationHead):
    """Version 10 (METHOD section 8): a type a depth, and only g_0 moves through the layers.

    g_i, i = 1 .. n, is a projection of the hidden states that `shallow_hidden_layer_indices` lists for it; in layer l
    its row is P_{l,i} g_i, a key and a value and never a query. g_0 = g0_proj(h_0) is the query, and at distance 0 its
    own key. In the module lists the projections of g_n come first.
    """

    fixed_rows = True

    def _add_projections(self) -> None:
        hidden, lists = self.config.hidden_size, self.config.shallow_hidden_layer_indices
        self._sources = [[self.config.anchors.index(b) for b in layers] for layers in lists]  # places in the features
        self.stage_projs = nn.ModuleList(_projection(len(layers) * hidden, hidden) for layers in lists)
        self.g0_proj = _projection(hidden, hidden)
        self.fixed_stage_per_layer_projs = nn.ModuleList(
            nn.ModuleList(_projection(hidden, hidden) for _ in lists) for _ in range(self.config.num_spec_layers)
        )

    def depth_types(self, stage_sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(range(len(stage_sizes) + 1))

    def staircase_plan(
        self, stage_sizes: Sequence[int], fill: int | None, *, exact_fill: bool = False
    ) -> dict[int, tuple[int, ...]]:
        """Type 0 and those it sees. The only queries are newest tokens: both ways to count a fill are the same."""
        deepest = len(stage_sizes)
        fill = deepest if fill is None else _integer("fill", fill, 1, deepest)
        seen = key_types(0, self.depth_types(stage_sizes), fill)
        return {0: seen} | dict.fromkeys((*seen[1:], deepest), ())

    @property
    def projections(self) -> list[list[nn.Linear]]:
        stages = zip(self.stage_projs, *self.fixed_stage_per_layer_projs, strict=True)  # g_n first
        return [[self.g0_proj], *reversed([list(modules) for modules in stages])]

    def aggregate(self, kind: int, features: Tensor) -> Tensor:
        """g_i: features [..., m, H] -> [..., H]."""
        if kind == 0:
            return self.g0_proj(features[..., 0, :])
        return self.stage_projs[-kind](features[..., self._sources[-kind], :].flatten(-2))

    def shown_rows(self, kind: int, features: Tensor) -> Tensor:
        """P_{l,i} g_i for every layer l, [L_s, ..., H]; g_0 is itself, and only layer 0 takes it from here."""
        row = self.aggregate(kind, features)
        if kind == 0:
            return row.expand(len(self.spec_layers), *row.shape)
        return torch.stack([layer[-kind](row) for layer in self.fixed_stage_per_layer_projs])


def _projection(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


# ---------------------------------------------------------------------------------------------------------------------
# Training forward (METHOD section 4)
# ---------------------------------------------------------------------------------------------------------------------

# The plain form runs m blocks of S rows through every layer under a dense (m*S)^2 mask. The same mathematics with less:
# rows that no g_0 row depends on are not computed; a query sees the deepest block but for a band of a few distances at
# its own position, so its keys are gathered in chunks; the last layer has only g_0 queries, and of those only the
# supervised positions go on to MLP, norm, lm_head and loss, in chunks again.

QUERY_CHUNK = 128  # positions whose queries share one gathered set of keys
LOSS_CHUNK = 128  # supervised positions whose logits exist at the same time


class TrainingLoss(NamedTuple):
    """Sums over one batch; divide `total` by `counted` for the mean."""

    total: Tensor  # [] sum of KL * tau^2 over the counted positions, differentiable
    counted: Tensor  # [] positions in the loss: supervised, and the teacher's argmax is in the draft vocabulary
    supervised: Tensor  # [] positions whose next token is supervised
    agreed: Tensor  # [] of those, positions where the draft's argmax is the teacher's


def key_types(query_depth: int, types: Sequence[int], fill: int) -> tuple[int, ...]:
    """Types of the keys at distance 0, 1, ... from a query row; from the last entry on, all are the deepest type.

    `types` is f(d) for d = 0 .. n. A key at distance x has type f(min(n, d + x)), and the deepest once x >= fill.
    """
    num_stages = len(types) - 1
    seen = [types[min(num_stages, query_depth + distance)] for distance in range(fill)]
    while seen and seen[-1] == types[-1]:
        seen.pop()
    return tuple(seen)


def staircase_plan(
    anchors: Sequence[int], stage_sizes: Sequence[int], fill: int | None, *, exact_fill: bool = False
) -> dict[int, tuple[int, ...]]:
    """The types whose rows a g_0 row depends on, directly or through other rows, each with its `key_types`.

    METHOD section 4 counts the fill from each query. In decoding it counts from the newest token: behind a row at depth
    d only F - d tokens are still in flight. `exact_fill` trains on that; the two differ for 1 < F < n.
    """
    types, depths = depth_types(anchors, stage_sizes), representative_depths(anchors, stage_sizes)
    fill = len(stage_sizes) if fill is None else _integer("fill", fill, 1, len(stage_sizes))
    plan: dict[int, tuple[int, ...]] = {}
    wanted = [0, types[-1]]
    while wanted:
        kind = wanted.pop()
        if kind not in plan:
            in_flight = max(0, fill - depths[kind]) if exact_fill else fill
            plan[kind] = key_types(depths[kind], types, in_flight)
            wanted.extend(plan[kind])
    return dict(sorted(plan.items()))


def staircase_attention(
    query: Tensor, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], seen: Sequence[int], scaling: float
) -> Tensor:
    """Attention of one type's rows: [B, H_q, S, D] over each type's keys and values, [B, H_kv, S, D].

    The key at distance x is of type `seen[x]`, and of the deepest type from distance `len(seen)` on.
    """
    deepest, band, length = max(keys), len(seen), query.shape[2]
    if band == 0:
        return scaled_dot_product_attention(
            query, keys[deepest], values[deepest], is_causal=True, scale=scaling, enable_gqa=True
        )
    ranges = {kind: (seen.index(kind), band - tuple(reversed(seen)).index(kind)) for kind in seen}
    outputs = []
    for start in range(0, length, QUERY_CHUNK):
        stop, first = min(start + QUERY_CHUNK, length), max(0, start - band + 1)
        far = max(0, stop - band)  # deepest keys before here
        spans = [(deepest, 0, far, band, length + 1)] if far else []
        spans += [(kind, first, stop, nearest, beyond) for kind, (nearest, beyond) in ranges.items()]
        rows = torch.arange(start, stop, device=query.device)[:, None]
        masks = []
        for _, left, right, nearest, beyond in spans:
            distance = rows - torch.arange(left, right, device=query.device)
            masks.append((distance >= nearest) & (distance < beyond))
        key, value = (
            torch.cat([blocks[kind][:, :, left:right] for kind, left, right, _, _ in spans], dim=2)
            for blocks in (keys, values)
        )
        outputs.append(grouped_attention(query[:, :, start:stop], key, value, torch.cat(masks, dim=1), scaling))
    return torch.cat(outputs, dim=2)


FLEX_BLOCK = 128  # rows and columns of FlexAttention's blocks; sequences are padded to a multiple


@lru_cache(maxsize=256)
def _staircase_blocks(kinds: tuple[int, ...], seen: tuple[int, ...], length: int, device: torch.device) -> BlockMask:
    """FlexAttention's mask of one type's rows over the keys of all types, one type behind the other.

    length: of each of them, a multiple of FLEX_BLOCK. Only blocks are looked at, never all pairs of rows.
    """
    deepest, band, count = max(kinds), len(seen), length // FLEX_BLOCK
    block_at = torch.tensor([kinds.index(kind) for kind in (*seen, deepest)], device=device)  # by distance

    def visible(_batch, _head, row, column):
        distance = row - column % length
        return (distance >= 0) & (block_at[distance.clamp(0, band)] == column // length)

    place = torch.arange(count, device=device)
    between = (place[:, None] - place) * FLEX_BLOCK  # distances between the rows and columns of a block: from ... to
    nearest, farthest = between - (FLEX_BLOCK - 1), between + (FLEX_BLOCK - 1)
    some, all_of = [], []
    for kind in kinds:
        distances = [distance for distance, other in enumerate(seen) if other == kind]
        first, last = (distances[0], distances[-1]) if distances else (length, -1)
        if kind == deepest:
            first, last = min(first, band), length
        some.append((farthest >= first) & (nearest <= last))
        all_of.append((nearest >= first) & (farthest <= last))
    some, all_of = torch.cat(some, dim=1), torch.cat(all_of, dim=1)
    return BlockMask.from_kv_blocks(
        *_block_lists(some & ~all_of),
        *_block_lists(all_of),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(length, len(kinds) * length),
    )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of blocks has, [1, 1, Q], and which, [1, 1, Q, K], from [Q, K] bool."""
    which = blocks.to(torch.int32).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], which.to(torch.int32)[None, None]


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    allow_shapes()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex_staircase_attention(
    query: Tensor, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], seen: Sequence[int], scaling: float
) -> Tensor:
    """`staircase_attention` by FlexAttention: one kernel that skips the blocks of keys no query sees.

    CUDA only: on a CPU it has no backward. It is compiled for each padded length; behind the end stand rows that no
    real one sees.
    """
    if not seen:  # plain causal attention over the deepest type, which SDPA gives to FlashAttention
        return staircase_attention(query, keys, values, seen, scaling)
    length, behind = query.shape[2], (0, 0, 0, -query.shape[2] % FLEX_BLOCK)
    blocks = _staircase_blocks(tuple(keys), tuple(seen), length + behind[-1], query.device)
    key, value = (torch.cat([pad(rows, behind) for rows in kinds.values()], dim=2) for kinds in (keys, values))
    attend = _compiled_flex_attention() if query.is_cuda else flex_attention
    attended = attend(pad(query, behind), key, value, block_mask=blocks, scale=scaling, enable_gqa=True)
    return attended[:, :, :length]


STAIRCASE_ATTENTION = {"sdpa": staircase_attention, "flex_attention": flex_staircase_attention}


def draft_rows(
    head: SpeculationHead,
    features: Tensor,
    rope: tuple[Tensor, Tensor],
    plan: Mapping[int, tuple[int, ...]],
    selected: tuple[Tensor, Tensor],
    attention: str = "sdpa",
) -> Tensor:
    """The head's g_0 output before the final norm at the selected (batch, position) pairs: [P, H].

    features [B, S, m, H]; rope [1, S, D_rot]; plan as `head.staircase_plan`; attention, one of `STAIRCASE_ATTENTION`.
    """
    attend = STAIRCASE_ATTENTION[attention]
    batch, kinds = len(features), list(plan)
    shown = torch.cat([head.shown_rows(kind, features) for kind in kinds], dim=1)  # [D, kinds * B, S, H]
    rows = shown[0]
    for index, layer in enumerate(head.spec_layers):
        last = index == len(head.spec_layers) - 1
        if head.fixed_rows and index > 0:
            rows = torch.cat([rows, shown[index, batch:]])
        normed = layer.input_layernorm(rows)
        keys, values = (dict(zip(kinds, x.split(batch), strict=True)) for x in layer.keys_values(normed, rope))
        if last or head.fixed_rows:  # kinds[0] is type 0
            rows, normed = rows[:batch], normed[:batch]
        query, gate = layer.queries(normed, rope)
        attended = torch.cat(
            [
                attend(part, keys, values, plan[kind], layer.self_attn.scaling)
                for kind, part in zip(kinds, query.split(batch), strict=False)
            ]
        )
        if last:
            attended = attended.transpose(1, 2)[selected].transpose(0, 1)[None]  # [1, heads, P, D]
            gate = None if gate is None else gate[selected][None]
            rows = rows[selected][None]
        rows = layer.finish(rows, attended, gate)
    return rows[0]


class LossTerms(NamedTuple):
    """What a draft is trained for (METHOD sections 4 and 11.4)."""

    # "kl", "tv": 1 - acceptance, "lk": between the two, the less KL the more is accepted already; of blocks also "ce":
    # cross-entropy with given tokens, "reverse_kl": KL(draft || teacher)
    kind: str = "kl"
    temperature: float = 1.0  # tau, of teacher and draft
    eta: float = 3.0  # lk: the weight of KL is exp(-eta * mean acceptance)


LOSS_KINDS = ("kl", "lk", "tv")
RENORMALISED = ("kl", "reverse_kl")  # see the teacher on the draft vocabulary alone
KL = LossTerms()


class _Distillation(torch.autograd.Function):
    """Sum of a loss between teacher and draft from hidden states, without ever holding all positions' logits.

    Forward computes the gradients of hidden states and lm_head along with the loss, chunk by chunk, if `learning`;
    backward scales them. Inputs: draft [P, H] and its lm_head [V_d, H] (differentiable), teacher [P, H] and its lm_head
    [V, H], the draft ids [V_d] or None, the teacher's argmax [P] or None for not known yet (of "ce" the tokens to
    draft), weights [P] or None for ones, terms, learning. Both hidden states are already normed. Returns total, counted
    (the sum of the weights that are in it), agreed.
    """

    @staticmethod
    def forward(ctx, draft, draft_head, teacher, teacher_head, draft_ids, teacher_best, weights, terms, learning):
        rows = _LossRows(draft, draft_head, teacher, teacher_head, draft_ids, teacher_best, terms)
        grads = _LossGradients(draft, draft_head if ctx.needs_input_grad[1] else None) if learning else None
        total = draft.new_zeros((), dtype=torch.float32)
        counted = torch.zeros((), dtype=torch.long if weights is None else torch.float32, device=draft.device)
        agreed = torch.zeros((), dtype=torch.long, device=draft.device)
        with torch.autocast(draft.device.type, enabled=False):
            kl_share = rows.kl_share()
            for part in rows.parts():
                loss, weight, right = rows.step(part, None if weights is None else weights[part], kl_share, grads)
                total += (loss * weight).sum()
                counted += weight.sum()
                agreed += right.sum()
        if learning:
            ctx.save_for_backward(grads.draft, grads.weight)
            ctx.dtype = draft.dtype
        ctx.mark_non_differentiable(counted, agreed)
        return total, counted, agreed

    @staticmethod
    def backward(ctx, grad, *_):
        draft_grad, weight_grad = ctx.saved_tensors
        # In place: these are this node's own, and the graph is walked once.
        weight_grad = None if weight_grad is None else weight_grad.mul_(grad)
        return draft_grad.mul_(grad).to(ctx.dtype), weight_grad, *[None] * 7


class _LossGradients:
    """The gradients of the draft's hidden states [P, H] and of its lm_head [V_d, H], from those of its logits.

    In float16 small ones would be 0 before a loss scale reaches them, as that comes with `backward`. So they have a
    scale of their own on their way through the products: the largest one under which no sum can overflow.
    """

    def __init__(self, draft: Tensor, draft_head: Tensor | None):
        """draft_head: None where it does not learn."""
        self.draft = torch.zeros_like(draft, dtype=torch.float32 if draft.dtype == torch.float16 else draft.dtype)
        self.weight = None if draft_head is None else torch.zeros_like(draft_head)

    def add(self, part: slice, grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Those of some positions: grad [p, V_d] of the logits, which are hidden [p, H] times weight [V_d, H]."""
        scale = self._scale(grad, hidden, weight) if hidden.dtype == torch.float16 else None
        grad = (grad if scale is None else grad * scale).to(hidden.dtype)
        self.draft[part] = self._unscaled(grad @ weight, scale).to(self.draft.dtype)
        if self.weight is None:
            return
        if scale is None and self.weight.dtype == hidden.dtype:  # in one kernel, without a product as large as itself
            self.weight.addmm_(grad.T, hidden)
        else:
            self.weight += self._unscaled(grad.T @ hidden, scale)

    @staticmethod
    def _unscaled(product: Tensor, scale: Tensor | None) -> Tensor:
        return product if scale is None else product.float() / scale

    @staticmethod
    def _scale(grad: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        """A power of two, on the device."""
        size, largest = grad.abs(), torch.finfo(torch.float16).max
        sums = size.sum(dim=1).max() * weight.abs().max(), size.sum(dim=0).max() * hidden.abs().max(), size.max()
        return torch.exp2((largest / torch.stack(sums).max()).log2().floor().clamp(-14, 30))


class _LossRows:
    """Logits of draft and teacher, a chunk of positions at a time, and the loss of each position. Inputs as above."""

    def __init__(self, draft, draft_head, teacher, teacher_head, draft_ids, teacher_best, terms: LossTerms):
        device = draft.device
        automatic = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if automatic else teacher.dtype
        self.draft, self.weight = draft, draft_head.to(self.dtype)
        self.teacher, self.teacher_head, self.teacher_best = teacher, teacher_head, teacher_best
        self.terms, self.draft_ids = terms, draft_ids
        self.rank_of = None
        if draft_ids is not None:  # target id -> draft id, or -1
            self.rank_of = torch.full((len(teacher_head),), -1, device=device)
            self.rank_of[draft_ids] = torch.arange(len(draft_ids), device=device)
            if (
                teacher_best is not None and terms.kind in RENORMALISED
            ):  # the rest of the vocabulary is not needed any more
                self.teacher_head, self.draft_ids = teacher_head[draft_ids], None

    def parts(self) -> Iterator[slice]:
        for start in range(0, len(self.draft), LOSS_CHUNK):
            yield slice(start, start + LOSS_CHUNK)

    def logits(self, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft's hidden states and logits [p, V_d], the teacher's log-weights [p, V_d], its argmax's draft id or -1.

        The log-weights are the teacher's logits / tau where only their renormalised form matters, and otherwise log p;
        of "ce" the draft ids [p, 1] instead.
        """
        hidden = self.draft[part].to(self.dtype)
        if self.terms.kind == "ce":
            best = self.teacher_best[part] if self.rank_of is None else self.rank_of[self.teacher_best[part]]
            return hidden, linear(hidden, self.weight).float(), best[:, None].clamp(min=0), best
        target = linear(self.teacher[part].to(self.teacher_head.dtype), self.teacher_head)
        best = target.argmax(dim=-1) if self.teacher_best is None else self.teacher_best[part]
        target = target.float().div_(self.terms.temperature)
        if self.terms.kind not in RENORMALISED:
            target = target.log_softmax(dim=-1)
        if self.draft_ids is not None:
            target = target[:, self.draft_ids]
        if self.rank_of is not None:
            best = self.rank_of[best]
        return hidden, linear(hidden, self.weight).float(), target, best

    def step(
        self, part: slice, weights: Tensor | None, kl_share: float, grads: _LossGradients | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of some positions [p], their weights, and where the argmaxes agree; adds their gradients to `grads`.

        A step of its own, so that nothing of it is held while the next one makes its logits.
        """
        hidden, logits, target, best = self.logits(part)
        inside, agreed = best >= 0, logits.argmax(dim=-1) == best
        weight = inside if weights is None else inside * weights
        loss, grad = self.terms_of(logits, target, kl_share)
        if grads is not None:
            grads.add(part, grad.mul_(weight[:, None]), hidden, self.weight)
        return loss, weight, agreed

    def kl_share(self) -> float:
        """lk: lambda = exp(-eta * mean acceptance over the batch); a constant, for no gradient goes through it."""
        if self.terms.kind != "lk":
            return float(self.terms.kind == "kl")
        accepted = counted = 0.0
        for part in self.parts():
            _, logits, target, best = self.logits(part)
            accepted += (acceptance(target.exp(), self._log_q(logits).exp()) * (best >= 0)).sum()
            counted += (best >= 0).sum()
        return float(torch.exp(-self.terms.eta * accepted / max(1, counted)))

    def _log_q(self, logits: Tensor) -> Tensor:
        return logits.div_(self.terms.temperature).log_softmax(dim=-1)

    def terms_of(self, logits: Tensor, target: Tensor, kl_share: float) -> tuple[Tensor, Tensor]:
        """The loss of each position [p], and its gradient by the draft's logits [p, V_d].

        Overwrites `logits` and `target`: these are the largest things that a step needs at the same time.
        """
        tau, log_q = self.terms.temperature, self._log_q(logits)
        q, loss, grad = torch.exp(log_q, out=logits), 0.0, None
        if self.terms.kind == "ce":
            return -log_q.gather(1, target)[:, 0], q.scatter_add_(1, target, q.new_full(target.shape, -1)).div_(tau)
        if self.terms.kind == "reverse_kl":
            ratio = log_q - target.log_softmax(dim=-1)
            loss = (q * ratio).sum(dim=-1)
            return tau**2 * loss, q * (ratio - loss[:, None]) * tau
        if kl_share < 1:
            p = target.exp()
            loss = (1 - kl_share) * (1 - acceptance(p, q))
            short = (q < p).to(q.dtype)  # tokens of which the draft has too little: more of q is more acceptance
            grad = q * ((short * q).sum(dim=-1, keepdim=True) - short) * ((1 - kl_share) / tau)
        if kl_share > 0:
            # As usual for distillation, KL alone is times tau^2, so that its gradient does not fade with tau.
            scale = tau**2 if self.terms.kind == "kl" else kl_share
            log_p = target.log_softmax(dim=-1)
            p = torch.exp(log_p, out=target)
            loss = loss + scale * log_p.sub_(log_q).mul_(p).sum(dim=-1)
            difference = q.sub_(p).mul_(scale / tau)
            grad = difference if grad is None else grad.add_(difference)
        return loss, grad


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Chance that a draft sampled from q is kept, the sum of min(p, q): [..., V_d] -> [...].

    p is the target's whole distribution, here at the draft vocabulary's tokens: it need not sum to 1.
    """
    return torch.minimum(p, q).sum(dim=-1)


@torch.no_grad()
def teacher_features(
    target: Target, input_ids: Tensor, attention_mask: Tensor, anchors: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """One frozen pass over right-padded ids [B, S]: the anchors' hidden states [B, S, m, H] and h_L [B, S, H].

    With padding on the right, causal attention needs no mask: no real token sees a padded one. ValueError otherwise.
    """
    if (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
        raise ValueError("attention_mask must be right-padded: ones, then zeros")
    hidden, captured = target.forward(input_ids, anchors)
    return torch.stack([captured[b].to(hidden.device) for b in anchors], dim=2), hidden


@torch.no_grad()
def teacher_argmax(target: Target, hidden: Tensor) -> Tensor:
    """The target's argmax over its whole vocabulary, from h_L [P, H]: [P]. Never holds all positions' logits."""
    return torch.cat([target.logits(rows).argmax(dim=-1) for rows in hidden.split(LOSS_CHUNK)])


def training_loss(
    head: SpeculationHead,
    target: Target,
    features: Tensor,
    hidden: Tensor,
    labels: Tensor,
    attention_mask: Tensor,
    *,
    stage_sizes: Sequence[int],
    fill: int | None = None,
    exact_fill: bool = False,
    terms: LossTerms = KL,
    teacher_best: Tensor | None = None,
    attention: str = "sdpa",
) -> TrainingLoss:
    """Distillation loss of a batch for a pipeline with `fill` tokens in flight (None: full, n).

    fill and exact_fill as in `staircase_plan`; features and hidden as `teacher_features` returns them; labels [B, S]
    hold the token at each position, or -100 where it is not supervised; the prediction at t is supervised when the
    label at t + 1 is. teacher_best [B, S] is the target's argmax at each position where somebody has it already: with a
    draft vocabulary it saves a third of the lm_heads' work. attention as in `draft_rows`.
    """
    supervised = (labels[:, 1:] >= 0) & attention_mask[:, 1:].bool()
    selected = supervised.nonzero(as_tuple=True)
    plan = head.staircase_plan(stage_sizes, fill, exact_fill=exact_fill)
    cos, sin = target.rope(features.shape[1])
    rope = cos[:, : features.shape[1]].to(features.device), sin[:, : features.shape[1]].to(features.device)
    draft = draft_rows(head, features, rope, plan, selected, attention)
    best = None if teacher_best is None else teacher_best[selected]
    return distillation_loss(head, target, draft, hidden[selected], best, terms)


def distillation_loss(
    head: SpeculationHead,
    target: Target,
    draft: Tensor,
    hidden: Tensor,
    teacher_best: Tensor | None,
    terms: LossTerms = KL,
    weights: Tensor | None = None,
) -> TrainingLoss:
    """The loss of P supervised rows: the head's outputs [P, H] and the target's h_L [P, H], both before the norm.

    teacher_best [P], the target's argmax where it is known; weights [P] of the rows in the mean, None for ones.
    """
    settings = head.draft_token_ids, hidden, teacher_best, terms, weights
    return rows_loss(target, target.norm(draft), head.lm_head.weight, *settings)


def rows_loss(
    target: Target,
    draft: Tensor,
    lm_head: Tensor,
    draft_ids: Tensor | None,
    hidden: Tensor,
    teacher_best: Tensor | None,
    terms: LossTerms,
    weights: Tensor | None,
) -> TrainingLoss:
    """`distillation_loss` of rows [P, H] that have been through their norm, with their lm_head's rows [V_d, H]."""
    with torch.no_grad():
        teacher = target.norm(hidden)
    rows = draft, lm_head, teacher, target.lm_head.weight
    learning = torch.is_grad_enabled()
    total, counted, agreed = _Distillation.apply(*rows, draft_ids, teacher_best, weights, terms, learning)
    return TrainingLoss(total, counted, counted.new_tensor(len(draft)), agreed)


def check_base_layers(base_layers: Sequence[int], num_spec_layers: int, target_config: PreTrainedConfig) -> None:
    """ValueError unless each speculation layer has a target layer, counted from 0, in range and of full attention."""
    if len(base_layers) != num_spec_layers:
        raise ValueError(
            f"spec_init_from_base_layers lists {len(base_layers)} layers, but num_spec_layers is {num_spec_layers}: "
            "give one a speculation layer"
        )
    for number in base_layers:
        _integer("an entry of spec_init_from_base_layers", number, 0, target_config.num_hidden_layers - 1)
        if is_linear_attention(target_config, number):
            raise ValueError(f"target layer {number} is linear attention: start from a full-attention layer")


def new_head(
    config: HeadConfig, target: Target, base_layers: Sequence[int] | None = None, seed: int = 0
) -> SpeculationHead:
    """A head to train, in float32 on the target's device.

    Its lm_head starts from the target's rows for the draft vocabulary. `base_layers` lists one target layer (the
    first is 0) for each speculation layer to start from; whatever the two have in common is copied.
    ValueError as `check_base_layers`.
    """
    if base_layers is not None:
        check_base_layers(base_layers, config.num_spec_layers, target.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = config.build(target.config)
    rows = target.lm_head.weight.detach().float().cpu()
    with torch.no_grad():
        head.lm_head.weight.copy_(rows if config.draft_token_ids is None else rows[list(config.draft_token_ids)])
    for layer, number in zip(head.spec_layers, base_layers or (), strict=False):
        source, own = target.layers[number].state_dict(), layer.state_dict()
        common = {name: w for name, w in source.items() if name in own and own[name].shape == w.shape}
        layer.load_state_dict(common, strict=False)
    return head.float().to(target.device)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoint files
# ---------------------------------------------------------------------------------------------------------------------


def save_head(head: SpeculationHead, path: str | Path) -> None:
    """Write `{"state_dict", "config"}` atomically: a killed run never leaves half a checkpoint under this name."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    with atomic_open(path, "wb") as file:
        torch.save({"state_dict": state, "config": head.config.to_dict()}, file)


HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^:]+))?:(.+)")  # owner/repo@revision:file


def checkpoint_file(path: str | Path) -> Path:
    """The file of a head checkpoint: itself, that of a folder, or one of the hub, which is downloaded once.

    On the hub: owner/repo:file.pt, or owner/repo@revision:file.pt for a branch, tag or commit. ValueError, in one line,
    for a file that the hub does not give.
    """
    local, hub_file = Path(path), HUB_FILE.fullmatch(str(path))
    if local.is_dir():
        return local / CHECKPOINT_NAME
    if hub_file is None or local.exists():
        return local
    repository, revision, name = hub_file.groups()
    try:
        return _downloaded(repository, name, revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no head checkpoint {str(path)!r} on the hub ({first_line(error)}): "
            "give owner/repo:file.pt, with @branch behind repo for another branch than main, or a local file"
        ) from None


@cache
def _downloaded(repository: str, name: str, revision: str | None) -> Path:
    """A file of the hub. Asked for once a process: all who read it get the same one, and wait for the network once."""
    return Path(hf_hub_download(repository, name, revision=revision))


def read_checkpoint(
    path: str | Path, config_class: type[HeadConfig] = HeadConfig, *, mapped: bool = False
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Configuration and weights of a head checkpoint (a file, or a folder with `speculation_head_final.pt`).

    `mapped` leaves the weights on disk until they are used, for those who want the configuration alone. ValueError, in
    one line, for a missing, truncated or foreign file and for a wrong configuration, and as `checkpoint_file`.
    """
    path = checkpoint_file(path)
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise ValueError(
            f"no head checkpoint at {str(path)!r}: train one, give one of the hub (owner/repo:file.pt), or omit "
            "--spec_head_ckpt"
        ) from None
    except pickle.UnpicklingError:
        raise ValueError(
            f"{str(path)!r} holds more than weights, or is damaged: only plain tensors and numbers are loaded"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = first_line(error, most=120)
        raise ValueError(f"{str(path)!r} is no readable head checkpoint ({reason}): copy it again") from None
    entries = [payload.get(name) for name in ("state_dict", "config")] if isinstance(payload, dict) else [None]
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"{str(path)!r} is not a head checkpoint: it must hold mappings 'state_dict' and 'config'")
    try:
        return config_class.parse(payload["config"]), payload["state_dict"]
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def load_head(path: str | Path, target: Target, config_class: type[HeadConfig] = HeadConfig) -> SpeculationHead:
    """The head of a checkpoint, frozen, in the target's dtype and on its device. ValueError as `read_head`."""
    return read_head(path, target.config, config_class).to(device=target.device, dtype=target.dtype)


def read_head(
    path: str | Path,
    target_config: PreTrainedConfig,
    config_class: type[HeadConfig] = HeadConfig,
    *,
    mapped: bool = False,
) -> SpeculationHead:
    """The head of a checkpoint, frozen, as it is stored. ValueError as `read_checkpoint`, or if it does not fit."""
    config, state = read_checkpoint(path, config_class, mapped=mapped)
    try:
        with torch.device("meta"):
            head = config.build(target_config)
        check_weights(head.state_dict(), state)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None
    head.load_state_dict(state, assign=True)
    return head.eval().requires_grad_(False)


def check_weights(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """ValueError that names the first missing, unexpected or wrongly shaped weight."""
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing:
        raise ValueError(f"the checkpoint lacks weight {listed(missing)}")
    if unexpected:
        raise ValueError(f"the checkpoint has unexpected weight {listed(unexpected)}")
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise ValueError(
                f"weight {name} has shape {list(found[name].shape)}, but target and config need {list(tensor.shape)}"
            )
