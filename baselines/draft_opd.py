"""Draft-OPD (arXiv 2605.29343) for DFlash: training where the drafter's own decoding is (method.md section 11.8).

The drafter decodes a prompt, and each round leaves an anchor, its drafts, and the target's states of the rows that were
verified. The final text is then read once more by the target, and the blocks stand at the logged anchors:

    position        5     6     7     8     9          anchor 5, B = 5; 6 was accepted, 7 was not
    drafts                6     7'    8'    9'         slots 1 .. 4
    text            5     6     7     8     9
    slots 1, 2            KL(p || q), p on the text: what was verified, the rejected draft's place included
    slots 2, 3, 4         KL(q || p), p after the drafts themselves: .8^(k - 1), the rejected stream

No slot sees a draft, so the slots after a rejected draft teach as much as any; they make a second stream.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baselines.dflash import Blocks, DFlashHead, SlotRows, as_tokens, dflash_decoder, packed_blocks
from baselines.eagle3 import ChainExecutor
from decoding.nodes import CachePlan
from decoding.sampling import Sampling
from decoding.tree import Node
from pipeline_inference import Captured, Completed, PromptOutput
from pipeline_model import Target
from timeline import Timeline
from training.forward import pad_texts
from training.loss import LossTerms, TrainingLoss, rows_loss, teacher_argmax

REJECTED_DECAY = 0.8  # slot k of the rejected stream weighs so much to the power of k - 1


class Round(NamedTuple):
    """What one round of decoding drafted, and the target's states where it was verified."""

    anchor: int  # a, the position of the known token
    drafts: tuple[int, ...]  # d_1, d_2, ...; fewer than B - 1 at the end of a generation
    hidden: Tensor  # [1 + drafts, H] the target's h_L of the known token and the drafts


class Rollout(NamedTuple):
    """A text that the drafter has decoded, and how."""

    tokens: list[int]  # prompt and reply
    prompt_length: int
    rounds: list[Round]

    def accepted(self, logged: Round) -> int:
        """r: the leading drafts that are in the text."""
        text = self.tokens[logged.anchor + 1 :]
        agree = [ours == theirs for ours, theirs in zip(logged.drafts, text, strict=False)]
        return [*agree, False].index(False)


class LoggingExecutor(ChainExecutor):
    """A chain's executor that keeps every round: what entered, and the target's states of it."""

    def __init__(self, target: Target, anchors: Sequence[int]):
        super().__init__(target, (*anchors, *({target.num_layers} - {*anchors})))
        self.rounds: list[Round] = []
        self._first, self._tokens = 0, []

    def start(self, prompt: Sequence[int], root: int, plan: CachePlan, timeline: Timeline) -> PromptOutput:
        self.rounds, self._tokens = [], []
        return super().start(prompt, root, plan, timeline)

    def begin_cycle(self, position: int, entering: Sequence[Node]) -> Tensor | None:
        if not self._tokens:
            self._first = position
        self._tokens += [node.token for node in entering]
        return super().begin_cycle(position, entering)

    def finish_cycle(self) -> tuple[list[Captured], Completed]:
        captured, completed = super().finish_cycle()
        _, *drafts = self._tokens
        self.rounds.append(Round(self._first, tuple(drafts), captured[0].hidden[self.target.num_layers]))
        self._tokens = []
        return captured, completed


@dataclass(frozen=True)
class RolloutSettings:
    """How the texts are decoded."""

    max_new_tokens: int
    sampling: Sampling
    max_length: int  # of prompt and reply


def roll_out(
    head: DFlashHead, target: Target, prompts: Sequence[Sequence[int]], settings: RolloutSettings, seed: int = 0
) -> list[Rollout]:
    """Decode every prompt with the drafter as it is; the text is the target's own, whatever the drafter has learned."""
    longest = max(map(len, prompts)) + settings.max_new_tokens + head.config.block_size
    target.rope(longest)  # made here, not under decoding's inference mode: training goes through it as well
    if head.norm.weight.dtype != target.dtype:
        head = copy.deepcopy(head).to(target.dtype)
    executor = LoggingExecutor(target, head.config.anchors)
    decoder = dflash_decoder(
        target, head, executor=executor, sampling=settings.sampling, eos_token_ids=target.eos_token_ids
    )
    rollouts = []
    for number, prompt in enumerate(prompts):
        decoder.seed = seed + number
        count = min(settings.max_new_tokens, settings.max_length - len(prompt))
        tokens = [*prompt, *decoder.generate(prompt, count).tokens]
        rounds = [logged._replace(hidden=logged.hidden.clone()) for logged in executor.rounds]
        rollouts.append(Rollout(tokens, len(prompt), rounds))
    return rollouts


def padded(rollouts: Sequence[Rollout], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels (replies alone) and attention mask of the texts, right-padded, each [N, S]."""
    prompt_lengths = [rollout.prompt_length for rollout in rollouts]
    return pad_texts([rollout.tokens for rollout in rollouts], prompt_lengths, device)


def slots_of(rollouts: Sequence[Rollout], block_size: int) -> tuple[Blocks, np.ndarray, np.ndarray]:
    """Blocks at all logged anchors; the slots of the verified stream, and those of the rejected one, [A, B - 1] bool.

    Of a round with r accepted drafts the first has the slots up to r + 1, as far as the text goes; the second those
    from r + 1 on that had a draft, where the text goes on after the accepted ones: nothing after its end was rejected.
    """
    sequences, anchors, verified, rejected = [], [], [], []
    slots = np.arange(1, block_size)
    for row, rollout in enumerate(rollouts):
        for logged in rollout.rounds:
            accepted, end = rollout.accepted(logged), len(rollout.tokens) - logged.anchor
            sequences.append(row)
            anchors.append(logged.anchor)
            verified.append((slots <= accepted + 1) & (slots < end))
            rejected.append((slots > accepted) & (slots <= len(logged.drafts)) & (accepted + 1 < end))
    shape = len(anchors), block_size - 1
    masks = (np.array(mask, dtype=bool).reshape(shape) for mask in (verified, rejected))
    return Blocks(np.array(sequences, dtype=int), np.array(anchors, dtype=int)), *masks


def opd_loss(
    head: DFlashHead,
    target: Target,
    features: Tensor,
    hidden: Tensor,
    labels: Tensor,
    attention_mask: Tensor,
    *,
    rollouts: Sequence[Rollout],
    rejected: bool = True,
    temperature: float = 1.0,
) -> TrainingLoss:
    """The loss of the logged rounds, from the target's pass over their texts (`padded`); `total / counted` is the mean.

    Both streams leave out slots whose teacher's argmax is outside the draft vocabulary, as everywhere. `rejected`:
    whether there is a second stream. `agreed` is about the first one.
    """
    size = head.config.block_size
    blocks, verified_slots, rejected_slots = slots_of(rollouts, size)
    outputs, rows = packed_blocks(head, target, features, blocks, size), head.output_rows(target)

    def stream(chosen: np.ndarray, kind: str, decay: float, states: Tensor | None) -> TrainingLoss:
        slots = SlotRows.of(blocks, np.nonzero(chosen), labels.device)
        asked = hidden[slots.sequences, slots.asked] if states is None else states
        best, weights = teacher_argmax(target, asked), decay ** (slots.places - 1).float()
        draft, terms = head.norm(outputs[slots.blocks, slots.places]), LossTerms(kind, temperature)
        return rows_loss(target, draft, rows, head.draft_token_ids, asked, best, terms, weights)

    loss = stream(verified_slots, "kl", 1.0, None)
    if rejected and rejected_slots.any():
        logged = [state for rollout in rollouts for state in rollout.rounds]
        states = [logged[block].hidden[place] for block, place in zip(*np.nonzero(rejected_slots), strict=True)]
        other = stream(rejected_slots, "reverse_kl", REJECTED_DECAY, torch.stack(states))
        loss = loss._replace(total=loss.total + other.total, counted=loss.counted + other.counted)
    return as_tokens(loss, labels, attention_mask)
