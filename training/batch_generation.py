"""The target alone continues many prompts side by side: a batch multiplies matrices where one row waits for memory.

    slot        0  1  2  3  4  5  6        p: a prompt's token, .: padding, new tokens from slot 4 on
    row 0       p  p  p  p  n  n  n
    row 1       .  .  p  p  n  n           it has written an end token at slot 5 and leaves the batch

All rows write to the same slot of a preallocated cache. A row's positions are its slots: rotary embeddings depend on
differences of positions alone, so that a row may begin anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decoding.cache import KVMemory, LinearMemory, Place, linear_states
from pipeline_inference import Sampling
from pipeline_model import (
    LINEAR,
    SLIDING,
    Masks,
    Target,
    causal_mask,
    head_dim,
    oldest_seen,
    window_mask,
)
from training.gemm_bound import gemm_rate, operations_per_token
from training.loss import first_best
from training.written_features import Recording

MEASURE_EVERY = 5.0  # seconds of writing between two measurements of the machine's rate
PAD = 0  # any id of the target's will do, as padding is masked: a tokenizer's own may be missing


class RowsMemory(KVMemory):
    """Keys and values of one attention layer, [rows, H_kv, slots, D] each: a batch of sequences."""

    def update(self, key: Tensor, value: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        seen = super().update(key, value)
        return (key, value) if self.place.first == 0 else seen  # the prompts' own lie closer together


class RowsCache:
    """The memory of all layers of a target for a batch of sequences that are as long as each other."""

    def __init__(self, target: Target, rows: int, slots: int):
        config, like = target.config, {"dtype": target.dtype, "device": target.device}
        shape = rows, config.num_key_value_heads, slots, head_dim(config)
        self._layers: list[RowsMemory | LinearMemory] = []
        for kind in target.layer_types:
            if kind == LINEAR:
                self._layers.append(LinearMemory(*linear_states(config, rows, **like)))
                continue
            keys = torch.zeros(shape, **like)
            if target.device.type == "cpu":  # the product with one query is several times as fast with the slots last
                keys = torch.zeros(*shape[:2], shape[3], shape[2], **like).transpose(2, 3)
            self._layers.append(
                RowsMemory(keys, torch.zeros(shape, **like), target.window if kind == SLIDING else None)
            )
        self.rows, self.device = rows, target.device

    def __getitem__(self, layer: int) -> RowsMemory | LinearMemory:
        return self._layers[layer]

    def enter(self, slots: slice) -> None:
        """The layers will run these slots of all rows, next."""
        nodes = torch.arange(self.rows, device=self.device)
        place = Place(slots.start, slots.stop, None, nodes if slots.start else None, nodes)
        for memory in self._layers:
            memory.place = place

    def move(self, old: Tensor, new: Tensor, rows: int) -> None:
        """Rows `old` take the places `new`; the first `rows` rows are left."""
        self.rows = rows
        for memory in self._layers:
            for tensor in memory.tensors():
                tensor[new] = tensor[old]
            if isinstance(memory, RowsMemory):
                memory.keys, memory.values = memory.keys[:rows], memory.values[:rows]


class Moves(NamedTuple):
    """How a batch closes its gaps: the rows that lie last take the places of those that leave."""

    old: list[int]
    new: list[int]
    rows: int  # that are left

    @classmethod
    def without(cls, ended: Collection[int], rows: int) -> Moves:
        left = rows - len(ended)
        gaps = sorted(row for row in ended if row < left)
        return cls([row for row in range(left, rows) if row not in ended], gaps, left)

    def apply(self, values: list) -> list:
        for old, new in zip(self.old, self.new, strict=True):
            values[new] = values[old]
        return values[: self.rows]


class Batch:
    """Prompts, side by side, and what the target makes of them; `step` is one new token for each that has not ended.

    layers: the b of the h_b that the newest slots leave in `states` [rows, slots, K, H].
    """

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, layers: Sequence[int] = ()
    ):
        self.target, self.device, self._layers = target, target.device, layers
        self.states: Tensor | None = None
        self.length = max(map(len, prompts))  # slots that are filled
        self._cache = RowsCache(target, len(prompts), self.length + max_new_tokens)
        padding = [self.length - len(prompt) for prompt in prompts]
        ids = [[PAD] * count + list(prompt) for count, prompt in zip(padding, prompts, strict=True)]
        self._ids = torch.tensor(ids, device=self.device)
        slots = torch.arange(self.length + max_new_tokens, device=self.device)
        self._real = slots >= torch.tensor(padding, device=self.device)[:, None]  # [rows, slots] bool
        self._padded = any(padding)

    def prefill(self) -> Tensor:
        """Run all prompts: the logits of each one's next token, [rows, V]."""
        slots, real = slice(0, self.length), self._real[:, : self.length]
        masks = self.target.prompt_masks(self.length, 0, self.device)
        if self._padded and self._flash:
            masks = Masks(real, real)
        elif self._padded:
            own = torch.eye(self.length, dtype=torch.bool, device=self.device)  # padding sees something: itself
            full = causal_mask(self.length, 0, self.device) & real[:, None] | own
            window = self.target.window and window_mask(self.length, 0, self.target.window, self.device)
            masks = Masks(full[:, None], None if window is None else (full & window)[:, None], real)
        return self.target.logits(self._run(slots, self._ids, masks))

    def step(self, tokens: Tensor) -> Tensor:
        """Run one new token of each row, [rows]: the logits of the next, [rows, V]."""
        return self.target.logits(self.run(tokens))

    def run(self, tokens: Tensor) -> Tensor:
        """Run one new token of each row, [rows]: h_L [rows, H]."""
        slots = slice(self.length, self.length + 1)
        self.length += 1
        full = window = None
        if self._padded:
            oldest = 0 if self.target.window is None else oldest_seen(slots.start, self.target.window)
            full, window = self._real[:, : slots.stop], self._real[:, oldest : slots.stop]
            if not self._flash:
                full, window = full[:, None, None], window[:, None, None]
        return self._run(slots, tokens[:, None], Masks(full, window))

    def drop(self, ended: Collection[int]) -> Moves:
        """Take rows out of the batch: returns where the others are now."""
        moves = Moves.without(ended, self._cache.rows)
        old, new = (torch.tensor(rows, dtype=torch.long, device=self.device) for rows in (moves.old, moves.new))
        self._cache.move(old, new, moves.rows)
        self._real[new] = self._real[old]
        self._real = self._real[: moves.rows]
        return moves

    @cached_property
    def _flash(self) -> bool:
        """Whether attention takes [rows, keys] masks of what is no padding."""
        return self.target.config._attn_implementation.startswith("flash")

    def _run(self, slots: slice, ids: Tensor, masks: Masks) -> Tensor:
        """`run`, of the last of some slots."""
        self._cache.enter(slots)
        layers, embedded = range(self.target.num_layers), self.target.embed(ids)
        hidden, captured = self.target.run_layers(layers, embedded, slots, masks, self._layers, self._cache)
        if self._layers:
            captured[0] = embedded
            self.states = torch.stack([captured[b] for b in self._layers], dim=2)
        return hidden[:, -1]


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end: Collection[int] = (),
    sampling: Sampling | None = None,
    seed: int = 0,
    recording: Recording | None = None,
) -> list[list[int]]:
    """New tokens of each prompt: `max_new_tokens`, or fewer up to and with an end token.

    sampling: greedy if None. A prompt's draws follow from `seed` and its ids, whatever else is in the batch.
    recording: takes in the hidden states of its layers.
    """
    sampling = sampling or Sampling()
    written: list[list[int]] = [[] for _ in prompts]
    draws = None if sampling.greedy else uniform_draws(prompts, max_new_tokens, seed).to(target.device)
    batch = Batch(target, prompts, max_new_tokens, () if recording is None else recording.layers)
    rows = list(range(len(prompts)))  # the prompt of each row
    if recording is not None:
        recording.begin(prompts, batch.length + max_new_tokens, target.config.hidden_size)
    logits = batch.prefill()
    for count in range(1, max_new_tokens + 1):
        best = first_best(logits) if draws is None or recording is not None else None
        if recording is not None:
            recording.add(rows, batch.states, best)
        tokens = best if draws is None else draw_rows(sampling.probabilities(logits), draws[rows, count - 1])
        new = tokens.tolist()
        for row, token in zip(rows, new, strict=True):
            written[row].append(token)
        ended = {place for place, token in enumerate(new) if token in end}
        if count == max_new_tokens or len(ended) == len(rows):
            break
        if ended:
            moves = batch.drop(ended)
            rows, tokens = moves.apply(rows), torch.tensor(moves.apply(new), device=target.device)
        logits = batch.step(tokens)
    return written


def uniform_draws(prompts: Sequence[Sequence[int]], count: int, seed: int) -> Tensor:
    """Numbers in [0, 1) for the tokens of each prompt, [prompts, count] float64, from the seed and its ids alone."""
    return torch.from_numpy(np.stack([np.random.default_rng([seed, *prompt]).random(count) for prompt in prompts]))


def draw_rows(probabilities: Tensor, draws: Tensor) -> Tensor:
    """Tokens [rows] that numbers in [0, 1), [rows], draw from distributions [rows, V]: the inverse of their sums."""
    sums = probabilities.cumsum(dim=-1)
    drawn = (draws * sums[:, -1]).to(sums.dtype)[:, None]
    # A rounded draw may be the whole sum: then it is the last token that has a probability.
    drawn = torch.minimum(drawn, sums[:, -1:].nextafter(sums.new_zeros(())))
    return torch.searchsorted(sums, drawn, right=True)[:, 0]


class Throughput:
    """New tokens per second, and what part of the time the products with the weights alone would have taken.

    The machine's rate is measured between the batches: what slows these down slows it down, too.
    """

    def __init__(self, target: Target):
        self._target = target
        self._tokens, self._seconds = 0, 0.0
        self._unmeasured, self._measured, self._bound = [0, 0], 0.0, 0.0

    def add(self, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]], seconds: float) -> None:
        """Count a batch."""
        new = sum(map(len, written))
        self._tokens, self._seconds = self._tokens + new, self._seconds + seconds
        self._unmeasured[0] += sum(map(len, prompts)) + new
        self._unmeasured[1] += new
        if self._seconds - self._measured < MEASURE_EVERY:
            return
        work = zip(self._unmeasured, operations_per_token(self._target), strict=True)
        rate = gemm_rate(self._target.device, self._target.dtype)
        self._bound += sum(tokens * operations for tokens, operations in work) / rate
        self._unmeasured, self._measured = [0, 0], self._seconds

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds

    @property
    def fraction_of_gemm_bound(self) -> float | None:
        """None before `MEASURE_EVERY` seconds of writing."""
        return self._bound / self._measured if self._measured else None

    def __str__(self) -> str:
        fraction = self.fraction_of_gemm_bound
        bound = "" if fraction is None else f", {fraction:.2f} of what the products with the weights allow"
        return f"{self._tokens} tokens written, {self.tokens_per_second:.0f} tokens/s in {self._target.dtype}{bound}"
