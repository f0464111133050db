"""Values in the configuration of a speculation head, each checked: ValueError names the field and the value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]; ValueError names the field, the value and the bound."""
    bound = f">= {low}" if high is None else f"in {low} .. {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value!r}: it must be an integer {bound}")
    return value


def integers(name: str, value: Any, low: int) -> tuple[int, ...]:
    """`value` as a list of integers >= low; ValueError names the field and the value."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name} is {value!r}: it must be a list of integers")
    return tuple(integer(f"an entry of {name}", item, low) for item in value)


def written_out(value: Any) -> Any:
    """The list that a text like "4;6;6;4" or "4,6,6,4" stands for; anything else as it is."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(\s*[;,]\s*\d+)*\s*", value):
        return [int(item) for item in re.split("[;,]", value)]
    return value


def parse_stage_layers(value: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """`stage_layers` as layer counts, from "a;b;c" (commas work too) or a list; None and "" mean an even split."""
    if value is None or value in ("", [], ()):
        return None
    value = written_out(value)
    if isinstance(value, str):
        raise ValueError(f'stage_layers is {value!r}: write one layer count a stage, as in "4;6;6;4"')
    return integers("stage_layers", value, 0)


def anchor_list(value: Any) -> tuple[int, ...]:
    anchors = integers("aggr_feature_bound", value, 0)
    if anchors[0] != 0 or any(a >= b for a, b in pairwise(anchors)):
        raise ValueError(f"aggr_feature_bound is {list(anchors)}: it must start with 0 and rise strictly")
    return anchors


def parse_shallow_layers(value: str) -> tuple[tuple[int, ...], ...]:
    """`shallow_hidden_layer_indices` from a text: "0,1,2;0,2" are the lists of g_2 and g_1."""
    if not re.fullmatch(r"\s*\d+(\s*[;,]\s*\d+)*\s*", value):
        raise ValueError(
            f'shallow_hidden_layer_indices is {value!r}: write a list of layers per stage, g_n first, as in "0,1,2;0,2"'
        )
    return tuple(tuple(map(int, item.split(","))) for item in value.split(";"))


def shallow_lists(value: Any, num_stages: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)) or len(value) != num_stages:
        raise ValueError(f"shallow_hidden_layer_indices is {value!r}: it must hold num_stages, {num_stages}, lists")
    return tuple(integers("an entry of shallow_hidden_layer_indices", item, 0) for item in value)


def draft_ids(value: Any, vocab_size: int, draft_vocab_size: int) -> tuple[int, ...] | None:
    if value is None:
        if draft_vocab_size != vocab_size:
            raise ValueError(
                f"draft_vocab_size is {draft_vocab_size} and vocab_size {vocab_size}, but draft_token_ids is missing: "
                "a reduced vocabulary needs the list of its token ids"
            )
        return None
    ids = integers("draft_token_ids", value, 0)
    if len(ids) != draft_vocab_size:
        raise ValueError(f"draft_token_ids has {len(ids)} entries, but draft_vocab_size is {draft_vocab_size}")
    if any(a >= b for a, b in pairwise(ids)):
        raise ValueError("draft_token_ids must rise strictly")
    if ids[-1] >= vocab_size:
        raise ValueError(f"draft_token_ids runs from {ids[0]} to {ids[-1]}, outside 0 .. {vocab_size - 1}")
    return ids


def trained_stages(value: Any, num_stages: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    stages = integers("trained_num_stages", value, 1)
    if max(stages) != num_stages:
        raise ValueError(f"trained_num_stages is {list(stages)}: its largest entry must be num_stages, {num_stages}")
    return stages
