"""What decoding would accept, without decoding: a head's drafts on text that the target wrote (method.md section 11).

Decoding is lossless, so the text of a prompt does not depend on the head; and given the text, every draft that decoding
verifies follows, one after the other, from what the head drafts at each place and with each number of tokens in flight.
So the target writes the texts once, and every head is judged on the same ones, in a fraction of decoding's time. At
temperature 0 the counts are those of decoding, one for one; when sampling they have the same distribution.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from decoding.sampling import Sampling
from evaluation.prompts import Sample
from pipeline_model import SpeculationHead, Target
from script_utils import write_json
from training.batch_generation import generate_batch
from training.forward import teacher_features
from training.replay import Trace, TraceCounts, packed_rows, replay_flags

BATCH = 8  # texts that go through the head together


@dataclass(frozen=True)
class Text:
    """A prompt and what the target wrote after it."""

    dataset: str
    question_id: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def target_texts(
    target: Target, samples: Sequence[Sample], sampling: Sampling, max_new_tokens: int, seed: int, kept_in: Path
) -> list[Text]:
    """The target's own answers to all samples; `kept_in` keeps them for the next call.

    The draws of a sample follow from the seed and its prompt.
    """
    wanted = [[sample.dataset, str(sample.question_id), list(sample.prompt_ids)] for sample in samples]
    if kept_in.exists():
        found = json.loads(kept_in.read_text(encoding="utf-8"))
        if [entry[:3] for entry in found] == wanted:
            return [Text(*entry[:2], tuple(entry[2]), tuple(entry[3])) for entry in found]
    answers: list[list[int]] = []
    for start in tqdm(range(0, len(samples), BATCH), desc=f"the target's answers, T = {sampling.temperature:g}"):
        prompts = [sample.prompt_ids for sample in samples[start : start + BATCH]]
        answers += generate_batch(target, prompts, max_new_tokens, target.eos_token_ids, sampling, seed)
    write_json(kept_in, [[*entry, answer] for entry, answer in zip(wanted, answers, strict=True)])
    return [
        Text(sample.dataset, str(sample.question_id), sample.prompt_ids, tuple(answer))
        for sample, answer in zip(samples, answers, strict=True)
    ]


class ReplayedTexts:
    """Texts of one sampling setting, with the target's hidden states for heads that read the same layers."""

    def __init__(self, target: Target, texts: Sequence[Text], sampling: Sampling, anchors: Sequence[int], seed: int):
        """seed: of the draws that decide which drafts are accepted when sampling; the same ones for every head."""
        self.target, self.texts, self.sampling, self.anchors = target, texts, sampling, tuple(anchors)
        self._seed = seed
        self._batches: list[_Batch] = []

    def counts(self, head: SpeculationHead, stage_sizes: Sequence[int]) -> list[TraceCounts]:
        """What decoding with this head would verify and accept, text by text."""
        if not self._batches:
            self._batches = list(self._passes())
        return [
            counts
            for number, batch in enumerate(self._batches)
            for counts in self._counts_of(head, stage_sizes, batch, np.random.default_rng((self._seed, number)))
        ]

    def _passes(self) -> Iterator[_Batch]:
        """The target's pass over all texts."""
        for start in range(0, len(self.texts), BATCH):
            yield _Batch.of(self.target, self.texts[start : start + BATCH], self.anchors)

    @torch.no_grad()
    def _counts_of(
        self, head: SpeculationHead, stage_sizes: Sequence[int], batch: _Batch, random: np.random.Generator
    ) -> Iterable[TraceCounts]:
        """Replay until no fill changes any more: the first k events of an answer are final after k rounds."""
        target, trace = self.target, Trace.of(batch.labels.numpy(), len(stage_sizes))
        at = torch.from_numpy(trace.sequences), torch.from_numpy(trace.positions)
        uniforms = torch.from_numpy(random.random(trace.num_events))
        hidden, tokens = batch.hidden[at], batch.labels[at[0], at[1] + 1]
        rope = target.rope(batch.labels.shape[1])
        while True:
            outputs = packed_rows(head, batch.features, batch.lengths, rope, stage_sizes, trace)
            flags = replay_flags(head, target, outputs, hidden, tokens, self.sampling, uniforms)
            before, trace = trace, trace.with_flags(flags)
            if (trace.fills == before.fills).all():
                texts = range(len(batch.lengths))
                return [trace.only(trace.sequences == sequence).counts() for sequence in texts]


@dataclass(frozen=True)
class _Batch:
    """Some texts, right-padded, after the target's pass."""

    labels: Tensor  # [B, S] the answers' tokens, -100 elsewhere
    lengths: np.ndarray  # [B]
    features: Tensor  # [B, S, m, H]
    hidden: Tensor  # [B, S, H] h_L

    @classmethod
    def of(cls, target: Target, texts: Sequence[Text], anchors: Sequence[int]) -> _Batch:
        lengths = np.array([len(text.prompt_ids) + len(text.answer_ids) for text in texts])
        ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for row, text in enumerate(texts):
            ids[row, : lengths[row]] = torch.tensor([*text.prompt_ids, *text.answer_ids])
            answer = slice(len(text.prompt_ids), lengths[row])
            labels[row, answer] = ids[row, answer]
        real = torch.arange(ids.shape[1])[None] < torch.from_numpy(lengths)[:, None]
        features, hidden = teacher_features(target, ids.to(target.device), real.long().to(target.device), anchors)
        return cls(labels, lengths, features, hidden)
