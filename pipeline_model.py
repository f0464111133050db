"""Speculative Pipeline Decoding (SPD): the model file.

The target model is cut into n stages, so that n tokens of one sequence are in flight at different depths. A small
speculation head reads the hidden states that the stages have already computed and drafts the next token while the
stages run. Top to bottom: the pure functions of depth and type, the head's configuration, attention, the partitioned
target, the speculation head, checkpoint files. What a configuration or a file may hold is checked in loading/; the
target's caches and what runs the stages are in decoding/, and the decode loop is in pipeline_inference.py.

Symbols, here and everywhere else in the repository:

    L  target layers           n  pipeline stages          s  stage index, 0 .. n-1
    d  depth, 0 .. n: stages a token has passed            m  aggregation types      k  type index, 0 .. m-1
    L_s  speculation layers    H  hidden size              V  vocabulary             V_d  draft vocabulary
    W  draft-tree width        w  nodes of one position, at most W                   T  tokens before this one
    F  fill, the occupancy of the pipeline: tokens in flight, 1 .. n
    h_0  embedding output      h_i  output of decoder layer i, BEFORE the final norm

Comments cite the sections of docs/method.md, which has the mathematics.

The staircase, for n = 4 and a full pipeline, one column a token (10 is the newest, * has completed):

    position        1  2  3  4  5  6   7   8   9   10
    depth d         *  *  *  *  *  *   3   2   1   0      before the cycle: all of it is visible to the head
    row fed         .  .  .  .  .  g3  g3  g2  g1  g0     token 6 completed in the last cycle: its row stays cached
    this cycle      head drafts token 11; stage 3 runs token 7, ..., stage 0 runs token 10
    afterwards      token 7 has depth 4 and verifies token 8; token 11 enters at depth 0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from loading.checkpoint_files import checkpoint_file, read_payload
from loading.head_values import (
    anchor_list,
    draft_ids,
    integer,
    integers,
    parse_stage_layers,
    shallow_lists,
    trained_stages,
    written_out,
)
from loading.target_config import (
    FULL,
    LINEAR,
    SLIDING,
    check_supported,
    head_dim,
    layer_types,
    load_target_config,
)
from loading.target_files import (
    bitsandbytes_config,
    causal_class,
    check_attention_kernels,
    check_target_weights,
    load_weights,
)
from script_utils import atomic_open, listed

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
        raise ValueError(f"stage_layers has {len(sizes)} entries, but num_stages is {num_stages}: give one per stage")
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

    The boundaries after 0, 1, 3 and 6 stages, and the last layer but one. On an even split with n >= 7 this is the
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

    method.md section 4 counts the fill from each query. In decoding it counts from the newest token: before a row at
    depth d only F - d tokens are still in flight. `exact_fill` trains on that; the two differ for 1 < F < n.
    """
    types, depths = depth_types(anchors, stage_sizes), representative_depths(anchors, stage_sizes)
    fill = len(stage_sizes) if fill is None else integer("fill", fill, 1, len(stage_sizes))
    plan: dict[int, tuple[int, ...]] = {}
    wanted = [0, types[-1]]
    while wanted:
        kind = wanted.pop()
        if kind not in plan:
            in_flight = max(0, fill - depths[kind]) if exact_fill else fill
            plan[kind] = key_types(depths[kind], types, in_flight)
            wanted.extend(plan[kind])
    return dict(sorted(plan.items()))


# ---------------------------------------------------------------------------------------------------------------------
# Configuration of a speculation head, as its checkpoint stores it
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The `config` entry of any drafter's checkpoint, parsed and checked: its target, vocabulary and shape.

    Each method has a subclass, which says what `version` its files have and what class its weights are, and adds the
    entries of its own to `checked`. Build it with `parse`, or `read` it from a file; write it with `to_dict`. Each
    wrong value is a ValueError that names it.
    """

    version: ClassVar[int | str]  # in the file: the method's name, or a number for speculation heads
    head_class: ClassVar[type[DraftHead]]
    min_layers: ClassVar[int] = 1  # least `num_spec_layers`
    # Entries that must agree before weights of one drafter can start another.
    meaning: ClassVar[tuple[str, ...]] = ("aggr_feature_bound", "num_spec_layers", "draft_token_ids")

    hidden_size: int  # H, of the target
    vocab_size: int  # V, of the target
    num_stages: int  # n of its pipeline; 1 where the target stays in one piece
    num_spec_layers: int  # L_s, decoder layers of the drafter
    aggr_feature_bound: tuple[int, ...] | None  # anchors b_0 = 0 < ...: the hidden states h_b that it reads
    draft_vocab_size: int  # V_d, tokens that it can draft
    draft_token_ids: tuple[int, ...] | None = None  # target id of each draft id, ascending; None: V_d = V
    trained_with_use_deepest: bool = False  # of speculation heads alone
    stage_layers: tuple[int, ...] | None = None  # layers per stage; None: even split
    spec_intermediate_size_fallback: int = 9216  # MLP width where the target's config has none
    base_model_path: str = ""  # as the trainer was told; informative
    model_type: str | None = None  # of the target; None in the oldest checkpoints

    @property
    def anchors(self) -> tuple[int, ...]:
        """The b of every hidden state h_b that the drafter reads, rising from 0."""
        return self.aggr_feature_bound

    @property
    def stage_counts(self) -> tuple[int, ...]:
        """Every n that it is made for."""
        return (self.num_stages,)

    def read_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """What `aggr_feature_bound` must be on a target of so many layers; None where that is free."""
        return None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Check a checkpoint's `config` mapping. Keys that the class does not know are ignored."""
        cls.check_version(raw.get("version"))
        missing = [key for key in cls.required(raw) if key not in raw]
        if missing:
            raise ValueError(f"the checkpoint's config lacks {', '.join(missing)}")
        return cls(**cls.checked(raw))

    @classmethod
    def check_version(cls, version: Any) -> None:
        """ValueError for a version that is another method's."""
        if version != cls.version:
            raise ValueError(f"checkpoint version is {version!r}, not {cls.version!r}: give --method its own")

    @classmethod
    def required(cls, raw: Mapping[str, Any]) -> tuple[str, ...]:
        """The entries that have no default."""
        return "hidden_size", "vocab_size", "num_stages", "num_spec_layers", "aggr_feature_bound"

    @classmethod
    def checked(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that a mapping gives, by name."""
        vocab_size = integer("vocab_size", raw["vocab_size"], 1)
        draft_vocab_size = integer("draft_vocab_size", raw.get("draft_vocab_size", vocab_size), 1, vocab_size)
        anchors = None if raw.get("aggr_feature_bound") is None else anchor_list(raw["aggr_feature_bound"])
        if anchors is not None and raw.get("num_aggr_types", len(anchors)) != len(anchors):
            raise ValueError(f"num_aggr_types is {raw['num_aggr_types']}, but aggr_feature_bound lists {len(anchors)}")
        fallback = raw.get("spec_intermediate_size_fallback", 9216)
        return {
            "hidden_size": integer("hidden_size", raw["hidden_size"], 1),
            "vocab_size": vocab_size,
            "num_stages": integer("num_stages", raw["num_stages"], 1),
            "num_spec_layers": integer("num_spec_layers", raw["num_spec_layers"], cls.min_layers),
            "aggr_feature_bound": anchors,
            "draft_vocab_size": draft_vocab_size,
            "draft_token_ids": draft_ids(raw.get("draft_token_ids"), vocab_size, draft_vocab_size),
            "trained_with_use_deepest": bool(raw.get("trained_with_use_deepest", False)),
            "stage_layers": parse_stage_layers(raw.get("stage_layers")),
            "spec_intermediate_size_fallback": integer("spec_intermediate_size_fallback", fallback, 1),
            "base_model_path": str(raw.get("base_model_path", "")),
            "model_type": raw.get("model_type"),
        }

    def to_dict(self) -> dict[str, Any]:
        """The mapping a checkpoint stores: plain numbers, strings and lists; optional entries only where used."""
        raw = {"version": self.version} | {field.name: getattr(self, field.name) for field in fields(self)}
        if self.aggr_feature_bound is not None:
            raw["num_aggr_types"] = len(self.aggr_feature_bound)
        return {key: _listed_out(value) for key, value in raw.items() if value is not None}

    def split(self, num_layers: int, num_stages: int | None = None) -> tuple[int, ...]:
        """Stage sizes on a target of `num_layers` layers; `num_stages` picks one of several the head was trained for.

        ValueError when the head was not trained for that many.
        """
        if num_stages is None or num_stages == self.num_stages:
            return split_layers(num_layers, self.num_stages, self.stage_layers)
        if num_stages not in self.stage_counts:
            raise ValueError(
                f"--num_stages is {num_stages}, but the head was trained for {', '.join(map(str, self.stage_counts))}"
            )
        return split_layers(num_layers, num_stages)

    def check_target(self, target_config: PreTrainedConfig) -> None:
        """ValueError unless the drafter fits the target: hidden size, vocabulary, family, and layers enough."""
        for name in ("hidden_size", "vocab_size", "model_type"):
            ours, theirs = getattr(self, name), getattr(target_config, name)
            if ours is not None and _family(ours) != _family(theirs):
                raise ValueError(
                    f"the head was made for a target with {name} {ours} (base_model_path {self.base_model_path!r}), "
                    f"but this target has {name} {theirs}: give the target the head was trained on"
                )
        num_layers = target_config.num_hidden_layers
        self.split(num_layers)
        if self.aggr_feature_bound is not None and self.aggr_feature_bound[-1] > num_layers:
            last = self.aggr_feature_bound[-1]
            raise ValueError(f"aggr_feature_bound ends at layer {last}, but the target has {num_layers} layers")
        expected = self.read_layers(num_layers)
        if expected is not None and self.anchors != expected:
            raise ValueError(
                f"aggr_feature_bound is {list(self.anchors)}, but {self.version} reads {list(expected)} of this target"
            )

    # Weights that go with it

    def build(self, target_config: PreTrainedConfig) -> DraftHead:
        """Untrained weights. ValueError when they do not fit the target."""
        return self.head_class(self, target_config)

    def new_head(self, target: Target, seed: int = 0) -> DraftHead:
        """Weights to train, in float32 on the target's device: random but for what starts from the target's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = self.build(target.config).float()
        head.start_from_target(target)
        return head.to(target.device)

    # Files

    @classmethod
    def read(cls, path: str | Path, *, mapped: bool = False) -> tuple[Self, Mapping[str, Tensor]]:
        """Configuration and weights of a checkpoint: a file, or a folder with `speculation_head_final.pt`.

        `mapped` leaves the weights on disk until they are used, for those who want the configuration alone.
        ValueError, in one line, for a wrong configuration, and as `read_payload`.
        """
        raw, state = read_payload(path, mapped=mapped)
        try:
            return cls.parse(raw), state
        except ValueError as error:
            raise ValueError(f"{str(checkpoint_file(path))!r}: {error}") from None

    @classmethod
    def read_head(cls, path: str | Path, target_config: PreTrainedConfig, *, mapped: bool = False) -> DraftHead:
        """The weights of a checkpoint, frozen, as they are stored. ValueError as `read`, or if they do not fit."""
        config, state = cls.read(path, mapped=mapped)
        try:
            with torch.device("meta"):
                head = config.build(target_config)
            check_weights(head.state_dict(), state)
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from None
        head.load_state_dict(state, assign=True)
        return head.eval().requires_grad_(False)

    @classmethod
    def load_head(cls, path: str | Path, target: Target) -> DraftHead:
        """As `read_head`, in the target's dtype and on its device."""
        return cls.read_head(path, target.config).to(device=target.device, dtype=target.dtype)


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DraftConfig):
    """The `config` entry of a speculation head's checkpoint (method.md section 8: versions 10, 11 and 12).

    `num_stages` is the largest n when the head was trained for several.
    """

    meaning = (*DraftConfig.meaning, "shallow_hidden_layer_indices")

    trained_with_use_deepest: bool = True  # completed tokens always show their deepest type
    shallow_hidden_layer_indices: tuple[tuple[int, ...], ...] | None = None  # version 10: b of g_n, ..., of g_1
    spec_init_from_base_layers: tuple[int, ...] | None = None  # target layers the speculation layers started from
    spec_init_first_layer: int | None = None  # number of the target's first layer there: 0; None: not said, as in the
    # paper's heads, which count from 0, and this project's first ones, which count from 1
    trained_num_stages: tuple[int, ...] | None = None  # every n it was trained for; None: num_stages alone

    @property
    def anchors(self) -> tuple[int, ...]:
        if self.aggr_feature_bound is not None:
            return self.aggr_feature_bound
        return tuple(sorted({0}.union(*self.shallow_hidden_layer_indices)))

    @property
    def stage_counts(self) -> tuple[int, ...]:
        return self.trained_num_stages or (self.num_stages,)

    @property
    def version(self) -> int:
        if self.shallow_hidden_layer_indices is not None:
            return 10
        return 11 if self.stage_layers is None else 12

    @classmethod
    def check_version(cls, version: Any) -> None:
        if version not in (10, 11, 12):
            raise ValueError(f"checkpoint version is {version!r}: this program reads versions 10, 11 and 12")

    @classmethod
    def required(cls, raw: Mapping[str, Any]) -> tuple[str, ...]:
        *others, anchors = super().required(raw)
        return *others, "shallow_hidden_layer_indices" if raw["version"] == 10 else anchors

    @classmethod
    def checked(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        version, shallow_layers = raw["version"], None
        if version == 10:
            for name in ("stage_layers", "trained_num_stages"):
                if raw.get(name):
                    raise ValueError(
                        f"{name} is {raw[name]!r}, but a head of version 10 is made for one n and an even split: "
                        "use version 11"
                    )
            raw = dict(raw) | {"aggr_feature_bound": None}
        checked = super().checked(raw)
        if version == 10:
            shallow_layers = shallow_lists(raw["shallow_hidden_layer_indices"], checked["num_stages"])
        if version == 12 and checked["stage_layers"] is None:
            raise ValueError("checkpoint version is 12, but stage_layers is missing")
        base_layers = raw.get("spec_init_from_base_layers")
        if base_layers is not None:
            base_layers = integers("spec_init_from_base_layers", written_out(base_layers), 0)
        first_layer = raw.get("spec_init_first_layer")
        if first_layer is not None:
            first_layer = integer("spec_init_first_layer", first_layer, 0, 1)
        return checked | {
            "shallow_hidden_layer_indices": shallow_layers,
            "spec_init_from_base_layers": base_layers,
            "spec_init_first_layer": first_layer,
            "trained_num_stages": trained_stages(raw.get("trained_num_stages"), checked["num_stages"]),
        }

    def build(self, target_config: PreTrainedConfig) -> SpeculationHead:
        """An untrained head. ValueError when it does not fit the target."""
        return (HeadV10 if self.version == 10 else SpeculationHead)(self, target_config)

    def check_target(self, target_config: PreTrainedConfig) -> None:
        super().check_target(target_config)
        available = layers_available(self.split(target_config.num_hidden_layers))
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
# Attention over one shared sequence
# ---------------------------------------------------------------------------------------------------------------------


class Masks(NamedTuple):
    """What attention layers may see, [B or 1, 1, q, keys] bool each; None where attention needs no mask."""

    full: Tensor | None = None  # for layers that see everything before them
    window: Tensor | None = None  # for layers with a sliding window
    linear: Tensor | None = None  # [B, q] for linear attention: what is no padding


def oldest_seen(position: int, window: int) -> int:
    """The oldest position that a token sees through a sliding window of `window` tokens, itself among them."""
    return max(0, position - window + 1)


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


def _rows_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of one query in each of B sequences with keys of their own, without repeating keys.

    query [B, H_q, 1, D], key and value [B, H_kv, T, D], mask [B, 1, 1, T] bool or None -> [B, 1, H_q, D]. Two products
    are several times as fast on a CPU as SDPA, whose blocks of queries stay all but empty.
    """
    batch, heads, _, width = query.shape
    scores = (query * scaling).view(batch, key.shape[1], -1, width) @ key.transpose(2, 3)
    scores = scores.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(dim=-1).to(value.dtype) @ value).view(batch, 1, heads, width)


def _nodes_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """`transformers` attention function: SDPA that runs tree nodes which share one KV cache as rows of one query.

    So run single queries of a batch with its own keys, too; prompts and training go to the library's SDPA.
    """
    nodes, _, length, _ = query.shape
    if attention_mask is not None and length > PROMPT_BLOCK:
        return _blocks_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if nodes > 1 and key.stride(0) != 0:
        return _rows_attention(query, key, value, attention_mask, scaling), None
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

    def rope(self, stop: int, start: int = 0, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of positions start .. stop - 1, each [1, stop - start, D_rot].

        They are on `device`, or on the target's own; the tables are kept and grow with the longest request.
        """
        if self._rope is None or self._rope[0].shape[1] < stop:
            positions = torch.arange(-(-stop // 1024) * 1024, device=self.device)[None]
            like = torch.empty(1, dtype=self.dtype, device=self.device)
            self._rope = self._rotary(like, positions)
        cos, sin = (table[:, start:stop] for table in self._rope)
        return (cos, sin) if device is None else (cos.to(device), sin.to(device))

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
        cache: Mapping[int, Any] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Decoder layers (0-based) over hidden states [B, q, H] that stand at the given q positions.

        cache: by layer, what a decoder layer of `transformers` takes for one, as decoding/cache.py has it.

        Returns the last layer's output and the anchors that these layers produce, {b: h_b}, before any final norm.
        """
        rope = self.rope(positions.stop, positions.start)
        masks = self.attention_masks(masks, hidden.dtype)
        mask_of = {FULL: masks.full, SLIDING: masks.window, LINEAR: masks.linear}
        captured = {}
        for index in layers:
            mask = mask_of[self.layer_types[index]]
            memory = None if cache is None else cache[index]
            hidden = self.layers[index](hidden, attention_mask=mask, position_embeddings=rope, cache=memory)
            if index + 1 in anchors:
                captured[index + 1] = hidden
        return hidden, captured

    def attention_masks(self, masks: Masks, dtype: torch.dtype) -> Masks:
        """Bool masks as this target's attention takes them."""
        if not self.needs_float_mask:
            return masks
        full, window = (None if mask is None else float_mask(mask, dtype) for mask in (masks.full, masks.window))
        return Masks(full, window, masks.linear)

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

    def run_rows(
        self, rows: Tensor, rope: tuple[Tensor, Tensor], write: Callable, mask: Tensor | None, asked: int
    ) -> Tensor:
        """All steps: R rows become keys and values, and the last `asked` of them queries, [B, asked, H] afterwards.

        write: stores the rows' keys and values, and returns all that there are. mask [asked, keys] bool; None: all
        are visible.
        """
        asking = slice(rows.shape[1] - asked, rows.shape[1])
        normed = self.input_layernorm(rows)
        keys, values = write(*self.keys_values(normed, rope))
        if asked == 0:
            return rows[:, asking]
        query, gate = self.queries(normed[:, asking], (rope[0][:, asking], rope[1][:, asking]))
        attended = grouped_attention(query, keys, values, mask, self.self_attn.scaling)
        return self.finish(rows[:, asking], attended, gate)


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
    config: DraftConfig, target_config: PreTrainedConfig
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


def new_spec_layers(config: DraftConfig, target_config: PreTrainedConfig) -> nn.ModuleList:
    """L_s layers in the target family's style."""
    layer_class, layer_config = spec_layer_style(config, target_config)
    return nn.ModuleList(layer_class(layer_config, index) for index in range(config.num_spec_layers))


class HeadCache:
    """Keys and values of the head's layers, preallocated. The first `length` rows are tokens that stay."""

    def __init__(self, head: DraftHead, capacity: int):
        attn = head.spec_layers[0].self_attn
        kv_heads = attn.k_proj.out_features // attn.head_dim
        weight = attn.k_proj.weight
        shape = (len(head.spec_layers), 1, kv_heads, capacity, attn.head_dim)
        self.length = 0
        self._keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._values = torch.zeros_like(self._keys)

    def take(self, other: HeadCache, length: int) -> None:
        """Begin with the first rows of another cache."""
        self.length = length
        self._keys[:, :, :, :length] = other._keys[:, :, :, :length]
        self._values[:, :, :, :length] = other._values[:, :, :, :length]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put R rows after the `length` ones; return all of them, [1, H_kv, length + R, D] each."""
        end = self.length + key.shape[2]
        self._keys[layer][:, :, self.length : end] = key
        self._values[layer][:, :, self.length : end] = value
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """All memory of a layer, [1, H_kv, capacity, D] each."""
        return self._keys[layer], self._values[layer]

    def clear(self, kept: int = 0) -> None:
        """Forget all but the first rows: a mask hides what an earlier generation left, unless that is no number."""
        self.length = kept
        self._keys[:, :, :, kept:].zero_()
        self._values[:, :, :, kept:].zero_()


class DraftHead(nn.Module):
    """The weights of a drafter, whatever its method: what trains, and what a checkpoint holds beside its configuration.

    A subclass makes its modules in `__init__`.
    """

    fixed_rows = False  # True: rows of other types than 0 are never queries, and each layer has its own for them
    spec_layers: nn.ModuleList  # L_s decoder layers, of a drafter that has some: see `forward_rows`

    def __init__(self, config: DraftConfig, target_config: PreTrainedConfig):
        super().__init__()
        config.check_target(target_config)
        self.config = config
        self.lm_head: nn.Linear | None = None  # V_d rows of its own; None: it drafts with the target's

    @cached_property
    def draft_token_ids(self) -> Tensor | None:
        """Target id of each draft id, [V_d], on the head's device; None when the vocabularies are the same."""
        ids = self.config.draft_token_ids
        return None if ids is None else torch.tensor(ids, device=next(self.parameters()).device)

    @torch.no_grad()
    def start_from_target(self, target: Target) -> None:
        """Copy what new weights, on the CPU, take over from the target: an own lm_head's rows."""
        if self.lm_head is not None:
            rows, ids = target.lm_head.weight.float().cpu(), self.config.draft_token_ids
            self.lm_head.weight.copy_(rows if ids is None else rows[list(ids)])

    def forward_rows(
        self,
        shown: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: HeadCache,
        mask: Tensor | None = None,
        outputs: int = 0,
    ) -> Tensor:
        """Run R rows after the cached ones; return the last `outputs`, [outputs, H], before the final norm.

        shown [D, R, H] as `shown_rows`; of `fixed_rows`, the last `outputs` are those of type 0. rope: cosines and
        sines of the rows' positions, [1, R, D_rot]. mask [R, length + R] bool; None is causal. The rows' keys and
        values stay in the cache until the next call, which starts at `cache.length`.
        """
        count, rows, causal = shown.shape[1], shown[:1], mask is None
        for index, layer in enumerate(self.spec_layers):
            rows, asked = self.rows_into(index, rows, shown, outputs), self.num_queries(index, count, outputs)
            if causal and mask is None and asked > 1:
                mask = causal_mask(count, cache.length, rows.device)
            visible = None if causal and asked <= 1 else mask[count - asked :]
            rows = layer.run_rows(rows, rope, partial(cache.write, index), visible, asked)
        return rows[0]

    def rows_into(self, index: int, moved: Tensor, shown: Tensor, outputs: int) -> Tensor:
        """The rows [1, R, H] that a layer takes in; moved: the output of the layer before, or the shown rows."""
        if self.fixed_rows and index > 0:
            return torch.cat([shown[index : index + 1, : shown.shape[1] - outputs], moved], dim=1)
        return moved

    def num_queries(self, index: int, count: int, outputs: int) -> int:
        """How many of a layer's `count` rows, the last ones, are queries.

        The last layer's other rows are only ever keys and values, as fixed ones are everywhere.
        """
        return outputs if self.fixed_rows or index == len(self.spec_layers) - 1 else count


class SpeculationHead(DraftHead):
    """Projections A_k, L_s decoder layers, lm_head. The final norm and the rotary table are the target's.

    This is version 11, and 12, where the layers move every row; `HeadV10` is version 10. What the two do not share is
    here: the projections, the type of a depth, the rows that a type shows, and whether they move.
    """

    config: HeadConfig

    def __init__(self, config: HeadConfig, target_config: PreTrainedConfig):
        super().__init__(config, target_config)
        self._add_projections()
        self.spec_layers = new_spec_layers(config, target_config)
        self.lm_head = _projection(config.hidden_size, config.draft_vocab_size)

    def _add_projections(self) -> None:
        hidden, types = self.config.hidden_size, len(self.config.aggr_feature_bound)
        self.aggr_projs = nn.ModuleList(_projection((k + 1) * hidden, hidden) for k in range(types))

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


class HeadV10(SpeculationHead):
    """Version 10 (method.md section 8): a type a depth, and only g_0 moves through the layers.

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
        fill = deepest if fill is None else integer("fill", fill, 1, deepest)
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
# Checkpoint files
# ---------------------------------------------------------------------------------------------------------------------


def save_head(head: DraftHead, path: str | Path) -> None:
    """Write `{"state_dict", "config"}` atomically: a killed run never leaves half a checkpoint under this name."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    with atomic_open(path, "wb") as file:
        torch.save({"state_dict": state, "config": head.config.to_dict()}, file)


def read_checkpoint(path: str | Path, *, mapped: bool = False) -> tuple[HeadConfig, Mapping[str, Tensor]]:
    """Configuration and weights of a speculation head's checkpoint, as `DraftConfig.read`."""
    return HeadConfig.read(path, mapped=mapped)


def load_head(path: str | Path, target: Target) -> SpeculationHead:
    """The speculation head of a checkpoint, frozen, in the target's dtype and on its device; as `read_head`."""
    return HeadConfig.load_head(path, target)


def read_head(path: str | Path, target_config: PreTrainedConfig, *, mapped: bool = False) -> SpeculationHead:
    """The speculation head of a checkpoint, frozen, as it is stored. ValueError as `DraftConfig.read_head`."""
    return HeadConfig.read_head(path, target_config, mapped=mapped)


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
