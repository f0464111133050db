"""The training forward: the staircase of rows and attention over it (method.md section 4).

The plain form runs m blocks of S rows through every layer under a dense (m*S)^2 mask. The same mathematics with less:
rows that no g_0 row depends on are not computed; a query sees the deepest block but for a band of a few distances at
its own position, so its keys are gathered in chunks; the last layer has only g_0 queries, and of those only the
supervised positions go on to MLP, norm, lm_head and loss, in chunks again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from decoding.compiled import allow_shapes
from pipeline_model import SpeculationHead, Target, grouped_attention
from training.loss import KL, LossTerms, TrainingLoss, distillation_loss, supervised_places

QUERY_CHUNK = 64  # positions whose queries share one gathered set of keys: with more, most keys are masked


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
    """FlexAttention's mask of one type's rows over the keys of all types, one type after the other.

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

    CUDA only: on a CPU it has no backward. It is compiled for each padded length; after the end stand rows that no
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


def pad_texts(
    texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels (what stands after the prompts, -100 elsewhere) and attention mask, right-padded, each [B, S]."""
    ids = [torch.tensor(text) for text in texts]
    labels = [torch.cat([torch.full((n,), -100), row[n:]]) for row, n in zip(ids, prompt_lengths, strict=True)]
    return (
        pad_sequence(ids, batch_first=True).to(device),
        pad_sequence(labels, batch_first=True, padding_value=-100).to(device),
        pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(device),
    )


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
    selected = supervised_places(labels, attention_mask)
    plan = head.staircase_plan(stage_sizes, fill, exact_fill=exact_fill)
    rope = target.rope(features.shape[1], device=features.device)
    draft = draft_rows(head, features, rope, plan, selected, attention)
    best = None if teacher_best is None else teacher_best[selected]
    return distillation_loss(head, target, draft, hidden[selected], best, terms)
