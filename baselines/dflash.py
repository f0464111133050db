"""DFlash (arXiv 2602.06036): B - 1 tokens drafted in one forward, then verified in one pass of the target.

method.md section 10 has the definitions. c_t is a projection of C hidden states ("taps") of token t, so it exists for
tokens that the target has run. A block stands at an anchor a, the newest known token: its slot 0 is that token's
embedding, its other slots are all the embedding of a mask token, and each drafts its own position:

    position     0 .. 4     5     6     7     8        anchor a = 5, B = 4
    context      c_0 .. c_4                            keys and values alone, the same rows for every layer
    block                   x_5   mask  mask  mask     every slot sees the context and the whole block
    drafts                        6     7     8        slot k drafts token a + k
    target                  5     6     7     8        one pass; 6, 7 and 8 are accepted as far as they agree

The drafter's layers are in the style of the target's family. Its logits come from the target's own lm_head, frozen, at
the rows of the draft vocabulary, after a norm of its own. The target is one stage, so a generation runs on one device.
Training runs many blocks of a text in one pass; no block sees another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from baselines.eagle3 import ChainExecutor
from decoding.nodes import CachePlan
from decoding.tree import Node, TokenTree
from pipeline_inference import Captured, Decoder
from pipeline_model import (
    DraftConfig,
    DraftHead,
    HeadCache,
    Target,
    grouped_attention,
    new_spec_layers,
)
from training.loss import LOSS_CHUNK, LossTerms, TrainingLoss, first_best, rows_loss, teacher_argmax
from training.replay import packed_attention

NUM_TAPS, NUM_LAYERS, BLOCK_SIZE, NUM_ANCHORS = 5, 2, 8, 64  # defaults of C, D, B, A
WEIGHTS = ("decay", "dpace")
LOSSES = ("kl", "ce")


def tap_layers(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """The b of the hidden states h_b that c is made of: the outputs of layers spread evenly over the target.

    ValueError for a target with too few layers for so many different ones.
    """
    if num_taps == 1:
        return (num_layers // 2 + 1,)
    if num_layers < num_taps + 3:
        raise ValueError(
            f"--num_taps is {num_taps}: so many need a target of {num_taps + 3} layers, and this one has {num_layers}"
        )
    # The published code uses Python's `round`, too, which rounds halves to even.
    return tuple(round(1 + tap * (num_layers - 4) / (num_taps - 1)) + 1 for tap in range(num_taps))


def dflash_anchors(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """All that the drafter reads: the embedding, and the taps. ValueError as `tap_layers`."""
    return 0, *tap_layers(num_layers, num_taps)


def default_gamma(block_size: int) -> float:
    """How slowly the weights of a block's slots decay: 4, 5 and 7 for B = 8, 10 and 16."""
    return float(np.interp(block_size, [8, 10, 16], [4, 5, 7]))


# ---------------------------------------------------------------------------------------------------------------------
# The drafter's weights
# ---------------------------------------------------------------------------------------------------------------------


class DFlashHead(DraftHead):
    """W_c and its norm, D decoder layers, and the norm before the target's lm_head."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, target_config: PreTrainedConfig):
        super().__init__(config, target_config)
        taps, hidden = len(config.anchors) - 1, config.hidden_size
        self.context_proj = nn.Linear(taps * hidden, hidden, bias=False)
        self.spec_layers = new_spec_layers(config, target_config)
        norm = self.spec_layers[0].input_layernorm
        self.context_norm, self.norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.mask = nn.Parameter(torch.zeros(hidden)) if config.learned_mask else None
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if config.train_lm_head else None

    @torch.no_grad()
    def start_from_target(self, target: Target) -> None:
        """The norm before the lm_head, too, and a learned mask from the mask token's embedding."""
        super().start_from_target(target)
        self.norm.load_state_dict(target.norm.state_dict())
        if self.mask is not None:
            self.mask.copy_(target.embed(torch.tensor(self.config.mask_token_id, device=target.device)))

    def context(self, taps: Tensor) -> Tensor:
        """c of tokens from their taps: [..., C, H] -> [..., H]."""
        return self.context_norm(self.context_proj(taps.flatten(-2)))

    def block_inputs(self, known: Tensor, target: Target, block_size: int) -> Tensor:
        """Blocks as they enter the layers, from the embeddings of their slots 0: [A, H] -> [A, B, H]."""
        mask = self.mask
        if mask is None:
            mask = target.embed(torch.tensor(self.config.mask_token_id, device=known.device))
        masks = mask.to(known.dtype).expand(len(known), block_size - 1, -1)
        return torch.cat([known[:, None], masks], dim=1)

    def output_rows(self, target: Target) -> Tensor:
        """The lm_head's rows of the draft vocabulary, [V_d, H]: the target's, frozen, or the drafter's own."""
        if self.lm_head is not None:
            return self.lm_head.weight
        rows, ids = target.lm_head.weight.detach(), self.draft_token_ids
        return rows if ids is None else rows[ids]


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DraftConfig):
    """`num_spec_layers` is D, `aggr_feature_bound` 0 and the C taps."""

    version = "dflash"
    head_class = DFlashHead

    block_size: int = BLOCK_SIZE  # B in training, the largest in decoding
    mask_token_id: int = 0  # whose embedding stands for a token that is to be drafted
    learned_mask: bool = False  # a vector of the drafter's own instead, which starts from that embedding
    train_lm_head: bool = False  # an lm_head of the drafter's own, which starts from the target's rows

    @classmethod
    def checked(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        checked = super().checked(raw)
        for name in ("block_size", "mask_token_id"):
            if type(raw.get(name)) is not int:
                raise ValueError(f"{name} is {raw.get(name)!r}: it must be an integer")
        block_size, mask = raw["block_size"], raw["mask_token_id"]
        if block_size < 2:
            raise ValueError(f"block_size is {block_size}: a block needs a known token and at least one to draft")
        if not 0 <= mask < checked["vocab_size"]:
            raise ValueError(f"mask_token_id is {mask}, outside the target's 0 .. {checked['vocab_size'] - 1}")
        flags = {name: bool(raw.get(name, False)) for name in ("learned_mask", "train_lm_head")}
        return checked | {"block_size": block_size, "mask_token_id": mask} | flags

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        return dflash_anchors(num_layers, len(self.anchors) - 1)

    def check_target(self, target_config: PreTrainedConfig) -> None:
        if self.num_stages != 1:
            raise ValueError(f"num_stages is {self.num_stages}: DFlash has one")
        super().check_target(target_config)


# Tokens that no text has, of several families: the first one that a tokenizer knows stands for "to be drafted".
MASK_TOKENS = ("<|mask|>", "<reponame>", "<|fim_pad|>", "<|reserved_special_token_0|>")


def mask_token_id(tokenizer: PreTrainedTokenizerBase, token: str | None, vocab_size: int) -> int:
    """The id of the mask token: that of a text or of a number; None: the first of `MASK_TOKENS`.

    ValueError for one that the tokenizer or the target lacks, or that replies are made of.
    """
    known = tokenizer.get_vocab()
    if token is None:
        token = next((name for name in MASK_TOKENS if name in known), None)
        if token is None:
            raise ValueError("--mask_token is missing: name a token of the target's tokenizer that no text has")
    mask = int(token) if token.isdecimal() else known.get(token, -1)  # a tokenizer may have tokens that are numbers
    if not 0 <= mask < vocab_size:
        raise ValueError(
            f"--mask_token is {token!r}: neither a token of the target's tokenizer nor an id below {vocab_size}"
        )
    text = tokenizer.convert_ids_to_tokens(mask) if mask < len(tokenizer) else ""
    if text and (mask in tokenizer.all_special_ids or text in str(tokenizer.chat_template)):
        raise ValueError(f"--mask_token is {token!r}, which every reply has: name one that no text has")
    return mask


# ---------------------------------------------------------------------------------------------------------------------
# Training: many blocks of a text in one pass
# ---------------------------------------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """Where the blocks of a batch stand: sequence by sequence, anchors rising, so that their context grows slowly."""

    sequences: np.ndarray  # [A] row of the batch
    anchors: np.ndarray  # [A] position of slot 0

    @classmethod
    def drawn(cls, labels: np.ndarray, most: int, random: np.random.Generator) -> Blocks:
        """At most so many anchors of each sequence, uniformly, among those that decoding can come to.

        labels [N, S]: the tokens where they are supervised, -100 elsewhere. An anchor and the token after
        it are supervised.
        """
        sequences, anchors = [], []
        for sequence, row in enumerate(labels):
            possible = np.flatnonzero((row[:-1] >= 0) & (row[1:] >= 0))
            chosen = np.sort(random.choice(possible, min(most, len(possible)), replace=False))
            sequences += [sequence] * len(chosen)
            anchors += chosen.tolist()
        return cls(np.array(sequences, dtype=int), np.array(anchors, dtype=int))

    def counted(self, labels: np.ndarray, block_size: int) -> np.ndarray:
        """Whether each of the slots 1 .. B - 1 is supervised, like all before it in its block: [A, B - 1] bool."""
        positions = self.anchors[:, None] + np.arange(1, block_size)
        inside = positions < labels.shape[1]
        found = labels[self.sequences[:, None], np.minimum(positions, labels.shape[1] - 1)]
        return np.logical_and.accumulate(inside & (found >= 0), axis=1)


def packed_blocks(head: DFlashHead, target: Target, features: Tensor, blocks: Blocks, block_size: int) -> Tensor:
    """The drafter's rows of all blocks, as decoding computes them one by one, before its norm: [A, B, H].

    features [N, S, 1 + C, H] as `teacher_features` returns them.
    """
    count, length = len(blocks.anchors), features.shape[1]
    context = head.context(features[:, :, 1:])
    sequences, anchors = (torch.from_numpy(array).to(features.device) for array in blocks)
    rows = head.block_inputs(features[sequences, anchors, 0], target, block_size).flatten(0, 1)[None]
    cos, sin = target.rope(length + block_size, device=features.device)
    positions = (anchors[:, None] + torch.arange(block_size, device=anchors.device)).flatten()
    own_rope, context_rope = (cos[:, positions], sin[:, positions]), (cos[:, :length], sin[:, :length])
    for layer in head.spec_layers:
        normed = layer.input_layernorm(rows)
        prefix, own = layer.keys_values(context, context_rope), layer.keys_values(normed, own_rope)
        query, gate = layer.queries(normed, own_rope)
        attended = _attend(query, prefix, own, blocks, block_size, layer.self_attn.scaling)
        rows = layer.finish(rows, attended, gate)
    return rows[0].view(count, block_size, rows.shape[-1])


def _attend(
    query: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    blocks: Blocks,
    block_size: int,
    scaling: float,
) -> Tensor:
    """A block's rows see the context before its anchor, and each other: [1, H_q, A * B, D]."""
    outputs = [query[:, :, :0]]
    bounds = np.searchsorted(blocks.sequences, np.arange(len(prefix[0]) + 1))
    for sequence, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        part = slice(first * block_size, last * block_size)
        shared = tuple(states[sequence : sequence + 1] for states in prefix)
        begins = np.repeat(np.arange(last - first) * block_size, block_size)
        limits = np.repeat(blocks.anchors[first:last], block_size)
        rows = tuple(states[:, :, part] for states in own)
        outputs.append(packed_attention(query[:, :, part], shared, rows, limits, begins, begins + block_size, scaling))
    return torch.cat(outputs, dim=2)


@dataclass(frozen=True)
class BlockTerms:
    """What blocks are trained for (method.md section 10.4)."""

    loss: str = "kl"  # one of LOSSES; "ce": cross-entropy with the text's own tokens, for text that the target wrote
    weights: str = "decay"  # one of WEIGHTS: by place, or by what a slot adds to the expected length
    gamma: float = 4.0  # of decay: slot k weighs exp(-(k - 1) / gamma)
    temperature: float = 1.0  # tau of the loss


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """Weights of the slots 1 .. B - 1, [B - 1]."""
    return torch.exp(-torch.arange(block_size - 1) / gamma)


def dpace_weights(right: Tensor, counted: Tensor) -> Tensor:
    """D-PACE: what each slot adds to a smoothed expected length; right and counted [A, B - 1] -> [A, B - 1].

    right: the drafter's probability of the token that it should draft. With s_i = (1 + right_i) / 2, or 1 where slot i
    is not counted, w_j is the sum over the counted slots m >= j of s_1 ... s_m.
    """
    reached = torch.where(counted, (1 + right) / 2, torch.ones_like(right)).cumprod(dim=1) * counted
    return reached.flip(1).cumsum(dim=1).flip(1).detach()


def block_loss(
    head: DFlashHead,
    target: Target,
    features: Tensor,
    hidden: Tensor,
    labels: Tensor,
    attention_mask: Tensor,
    *,
    blocks: Blocks,
    terms: BlockTerms,
    teacher_best: Tensor | None = None,
) -> TrainingLoss:
    """The loss of blocks on a text; arguments as `training_loss`.

    `total / counted` is the mean: `counted` is the sum of the weights with `decay`, the number of blocks with `dpace`.
    `supervised` counts the text's supervised tokens, as for every drafter; `agreed` is the share of slots that agree,
    times `supervised`.
    """
    size = head.config.block_size
    outputs = packed_blocks(head, target, features, blocks, size)
    counted = blocks.counted(labels.cpu().numpy(), size)
    slots = SlotRows.of(blocks, np.nonzero(counted), labels.device)
    if terms.loss == "ce":
        wanted = labels[slots.sequences, slots.asked + 1]
    else:
        wanted = slots.teacher_best(target, hidden, teacher_best)
    draft, rows = head.norm(outputs[slots.blocks, slots.places]), head.output_rows(target)
    weights = _slot_weights(head, draft, rows, wanted, slots, counted, terms)
    asked = hidden[slots.sequences, slots.asked]
    kind = LossTerms(terms.loss, terms.temperature)
    loss = rows_loss(target, draft, rows, head.draft_token_ids, asked, wanted, kind, weights)
    if terms.weights == "dpace":
        loss = loss._replace(counted=loss.counted.new_tensor(len(blocks.anchors)))
    return as_tokens(loss, labels, attention_mask)


def as_tokens(loss: TrainingLoss, labels: Tensor, attention_mask: Tensor) -> TrainingLoss:
    """A loss of slots, with counts of the text's tokens, as `block_loss` has them: several blocks draft one token."""
    supervised = ((labels[:, 1:] >= 0) & attention_mask[:, 1:].bool()).sum()
    return loss._replace(supervised=supervised, agreed=loss.agreed * supervised / loss.supervised.clamp(min=1))


class SlotRows(NamedTuple):
    """Slots of blocks, one after the other, as indices on the device: P of them."""

    blocks: Tensor  # [P]
    places: Tensor  # [P] k, 1 .. B - 1
    sequences: Tensor  # [P] row of the batch
    asked: Tensor  # [P] the position where the target predicts the same token

    @classmethod
    def of(cls, blocks: Blocks, where: tuple[np.ndarray, np.ndarray], device: torch.device) -> SlotRows:
        """`where`: block and k - 1 of each slot."""
        block, place = where
        index = block, place + 1, blocks.sequences[block], blocks.anchors[block] + place
        return cls(*(torch.from_numpy(array).to(device) for array in index))

    def teacher_best(self, target: Target, hidden: Tensor, known: Tensor | None) -> Tensor:
        """The target's argmax at every slot, [P]; known [N, S] where somebody has it already. hidden [N, S, H]."""
        if known is None:  # each position once, though several blocks ask for it
            wanted = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
            wanted[self.sequences, self.asked] = True
            known = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            known[wanted] = teacher_argmax(target, hidden[wanted])
        return known[self.sequences, self.asked]


def _slot_weights(
    head: DFlashHead,
    draft: Tensor,
    rows: Tensor,
    wanted: Tensor,
    slots: SlotRows,
    counted: np.ndarray,
    terms: BlockTerms,
) -> Tensor:
    """Weight of each slot, [P]."""
    if terms.weights == "decay":
        return decay_weights(head.config.block_size, terms.gamma).to(draft.device)[slots.places - 1]
    right, inside = _probabilities(head, draft, rows, wanted)
    grid = slots.blocks, slots.places - 1
    table = right.new_zeros(counted.shape).index_put_(grid, right)
    in_loss = torch.zeros(counted.shape, dtype=torch.bool, device=draft.device).index_put_(grid, inside)
    return dpace_weights(table, in_loss)[grid]


@torch.no_grad()
def _probabilities(head: DFlashHead, draft: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The drafter's probability of each slot's token, [P]; and whether the draft vocabulary has it, [P] bool."""
    ids = head.draft_token_ids
    ranks = tokens if ids is None else torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    inside = torch.ones_like(ranks, dtype=torch.bool) if ids is None else ids[ranks] == tokens
    parts = zip(draft.split(LOSS_CHUNK), ranks.split(LOSS_CHUNK), strict=True)
    right = [
        linear(part, rows.to(part.dtype)).float().softmax(dim=-1).gather(1, rank[:, None])[:, 0] for part, rank in parts
    ]
    return torch.cat(right) * inside, inside


@torch.no_grad()
def accepted_slots(
    head: DFlashHead,
    target: Target,
    features: Tensor,
    hidden: Tensor,
    labels: Tensor,
    *,
    blocks: Blocks,
    teacher_best: Tensor | None = None,
) -> Tensor:
    """How many slots of each block a greedy target would accept, [A]: those before the first that disagrees.

    1 + their mean is AL_sim of method.md section 10.4, the tokens per round, on text that the target wrote greedily.
    """
    size = head.config.block_size
    counted = blocks.counted(labels.cpu().numpy(), size)
    slots = SlotRows.of(blocks, np.nonzero(counted), labels.device)
    outputs = packed_blocks(head, target, features, blocks, size)
    draft, rows = head.norm(outputs[slots.blocks, slots.places]), head.output_rows(target)
    best = [first_best(linear(part, rows.to(part.dtype))) for part in draft.split(LOSS_CHUNK)]
    ids = head.draft_token_ids
    drafted = torch.cat(best) if ids is None else ids[torch.cat(best)]
    agrees = torch.zeros(counted.shape, dtype=torch.bool, device=draft.device)
    right = drafted == slots.teacher_best(target, hidden, teacher_best)
    return agrees.index_put_((slots.blocks, slots.places - 1), right).cumprod(dim=1).sum(dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------


class DFlashDrafter:
    """The drafter at work: context rows for the tokens that the target has run, and a block after them.

    The decode loop asks for the drafts of a chain one by one; all of them come from the forward before the first.
    """

    def __init__(self, head: DFlashHead, target: Target, block_size: int):
        self.head, self.target, self.block_size = head, target, block_size
        self.draft_token_ids = head.draft_token_ids
        self._rows = head.output_rows(target)
        self._cache: HeadCache | None = None  # of the context: a row each for the tokens 0 .. length - 1
        self._states: dict[int, Tensor] = {}  # b -> h_b [q, H] of the last chain, which began after them
        self._known: Tensor | None = None  # [1, H] embedding of the newest token that is known
        self._logits: Tensor | None = None  # [B - 1, V_d] of the block

    def start(self, plan: CachePlan, features: Tensor, path: Sequence[Node]) -> None:
        self._cache = HeadCache(self.head, plan.slots + self.block_size)
        length, count = len(features), len(self.head.config.anchors)
        rope = self.target.rope(length)
        context = self.head.context(features[:, 1:count])[None]
        for index, layer in enumerate(self.head.spec_layers):
            self._cache.write(index, *layer.keys_values(context, rope))
        self._cache.length = length

    def enter(self, nodes: Sequence[Node], h0: Tensor) -> None:
        self._known = h0  # of the newest: the known token before a block is drafted

    def observe(self, captured: Iterable[Captured]) -> None:
        for _, hidden in captured:  # of the last cycle's chain, which began where the context ends
            self._states = hidden

    def draft(self, tree: TokenTree) -> Tensor:
        if not tree.levels:
            self._logits = self._draft_block(tree.root.position)
        return self._logits[len(tree.levels)][None]

    def _draft_block(self, anchor: int) -> Tensor:
        """Take the tokens before the anchor into the context; logits of the slots 1 .. B - 1."""
        first, stop = self._cache.length, anchor + self.block_size
        context = self._context(anchor - first)[None]
        rope, own_rope = self.target.rope(stop, first), self.target.rope(stop, anchor)
        rows = self.head.block_inputs(self._known, self.target, self.block_size)
        for index, layer in enumerate(self.head.spec_layers):
            normed = layer.input_layernorm(rows)
            keys, values = self._cache.write(index, *layer.keys_values(torch.cat([context, normed], dim=1), rope))
            query, gate = layer.queries(normed, own_rope)
            attended = grouped_attention(query, keys, values, None, layer.self_attn.scaling)
            rows = layer.finish(rows, attended, gate)
        self._cache.length = anchor  # the block's own rows are forgotten
        return linear(self.head.norm(rows[0, 1:]), self._rows)

    def _context(self, count: int) -> Tensor:
        """c of the first so many tokens of the last chain, [count, H]: those that were not rejected."""
        if not count:
            return self._known[:0]
        taps = [self._states[b][:count] for b in self.head.config.anchors[1:]]
        return self.head.context(torch.stack(taps, dim=1))


def dflash_decoder(
    target: Target,
    head: DFlashHead,
    block_size: int | None = None,
    *,
    executor: ChainExecutor | None = None,
    sample_drafts: bool = False,
    compiled: bool = False,
    **settings: object,
) -> Decoder:
    """A decoder that drafts blocks of `block_size` (None: as trained), their known token included.

    Drafts are the drafter's argmax at any temperature; `sample_drafts` draws them from its distribution. `executor`: of
    the target, if it is to be another one; `compiled`: as for `Stage`. Other settings as `Decoder`. ValueError for
    blocks larger than the drafter was trained for. A block of 1 drafts nothing.
    """
    size = head.config.block_size if block_size is None else block_size
    check_block_size(head.config, size)
    executor = executor or ChainExecutor(target, head.config.anchors, compiled=compiled)
    if size == 1:
        return Decoder(executor, **settings)
    drafter = DFlashDrafter(head, target, size)
    return Decoder(executor, drafter, draft_chain=size - 1, sample_drafts=sample_drafts, **settings)


def check_block_size(config: DFlashConfig, block_size: int) -> None:
    """ValueError for blocks that the drafter was not trained for: their last slots would be noise."""
    if not 1 <= block_size <= config.block_size:
        raise ValueError(f"--block_size is {block_size}: this drafter was trained for 1 to {config.block_size}")
