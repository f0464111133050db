"""What decoding would accept, without decoding: a head's drafts on text that the target wrote (method.md section 11).

Decoding is lossless, so the text of a prompt does not depend on the head; and given the text, every draft that decoding
verifies follows, one after the other, from what the head drafts at each place and with each number of tokens in flight.
So the target writes the texts once, and every head is judged on the same ones, in a fraction of decoding's time. At
temperature 0 the counts are those of decoding, one for one; when sampling they have the same distribution.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from decoding.sampling import Sampling
from evaluation.prompts import Sample
from pipeline_model import Target
from script_utils import write_json
from training.batch_generation import generate_batch
from training.forward import pad_texts, teacher_features
from training.replay import TraceCounts
from training.replay_loss import Replay

BATCH = 8  # texts that go through target and drafter together


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
    """Texts, with the target's hidden states for drafters that read the same layers."""

    def __init__(self, target: Target, texts: Sequence[Text], anchors: Sequence[int]):
        self._teachers = []  # of each batch, as `Replay` takes it
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            whole = [(*text.prompt_ids, *text.answer_ids) for text in batch]
            ids, labels, mask = pad_texts(whole, [len(text.prompt_ids) for text in batch], target.device)
            features, hidden = teacher_features(target, ids, mask, anchors)
            self._teachers.append({"features": features, "hidden": hidden, "labels": labels, "attention_mask": mask})

    def counts(self, replay: Replay, stage_sizes: Sequence[int]) -> list[TraceCounts]:
        """What decoding with the drafter of `replay`, and with its sampling, would verify and accept, text by text."""
        traces = [(replay.exact(teacher, stage_sizes), len(teacher["labels"])) for teacher in self._teachers]
        return [trace.only(trace.sequences == text).counts() for trace, texts in traces for text in range(texts)]
