"""Flushed drafts (method.md section 11.4) against the decode loop, which makes them, and against plain loops."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
import torch

from decoding.sampling import Sampling
from pipeline_inference import Decoder
from tests.test_replay import SPLITS, batch_of
from tests.tiny import random_prompt, spd_decoder, tiny_head, tiny_target
from training.flushed import Rejections, branch_loss, draft_tokens, follow
from training.forward import teacher_features
from training.replay import Trace, packed_rows

EVERYTHING = 1000  # rejections of a text


class Watcher:
    """A drafter that notes every draft, and drafts right where `right` says so and all tokens before it are."""

    def __init__(self, drafter, sequence, right):
        self._drafter, self._sequence, self._right = drafter, sequence, right
        self.calls = []  # position and token of the newest token, logits, whether all in flight is of the text

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def draft(self, tree):
        logits = self._drafter.draft(tree)
        node = newest = tree.frontier[0]
        of_text = True
        while node is not None:
            of_text = of_text and node.token == self._sequence[node.position]
            node = node.parent
        self.calls.append((newest.position, newest.token, logits[0].clone(), of_text))
        nxt = newest.position + 1
        if of_text and nxt < len(self._sequence) and self._right(nxt):
            ids = self.draft_token_ids
            logits[0, self._sequence[nxt] if ids is None else ids.tolist().index(self._sequence[nxt])] = 1e4
        return logits


def decoded_with_flushed(target, head, sizes, prompt, count, right):
    """A decode: the text, its flags, and for each rejected draft its position and the calls after it."""
    decoder = spd_decoder(target, head)
    sequence = [*prompt, *Decoder(decoder.executor).generate(prompt, count).tokens]
    watcher = decoder.drafter = Watcher(decoder.drafter, [*sequence, *[-1] * len(sizes)], right)
    result = decoder.generate(prompt, count)
    assert [*prompt, *result.tokens] == sequence
    wrong = {len(prompt) + place - 1 for place, accepted in enumerate(result.accepted) if place and not accepted}
    behind = {}
    for index, (position, _, _, of_text) in enumerate(watcher.calls):
        if of_text and position in wrong:
            calls = watcher.calls[index + 1 : index + len(sizes)]
            behind[position] = list(takewhile(lambda call: not call[3], calls))  # at its end decoding drafts no more
    return sequence, result.accepted[1:], behind


@pytest.fixture(params=["n = 2", "n = 3", "n = 6", "uneven", "version 10"])
def case(request):
    """Two decodes of different lengths, and the branches that `follow` makes of their rejected drafts."""
    sizes = SPLITS.get(request.param, (2, 2, 2))
    target = tiny_target("llama", layers=6)
    lists = {"shallow_hidden_layer_indices": ((0, 2, 5), (0, 3), (0, 2))} if request.param == "version 10" else {}
    head = tiny_head(target, sizes, num_spec_layers=2, **lists)
    runs = [
        decoded_with_flushed(
            target, head, sizes, random_prompt(length, seed=length), count, lambda place: place % 5 > 1
        )
        for length, count in ((5, 22), (9, 30))
    ]
    ids, labels, mask = batch_of([sequence for sequence, _, _ in runs], (5, 9))
    features, hidden = teacher_features(target, ids, mask, head.config.anchors)
    teacher = {"features": features, "hidden": hidden, "labels": labels, "attention_mask": mask, "input_ids": ids}
    trace = Trace.of(labels.numpy(), len(sizes)).with_flags(np.concatenate([flags for _, flags, _ in runs]))
    random = np.random.default_rng(0)
    rejections, _ = Rejections.drawn(trace, np.zeros(trace.num_events), EVERYTHING, random)
    behind = [runs[row][2][at] for row, at in zip(rejections.sequences, rejections.positions, strict=True)]
    rejections = rejections.only(np.array([len(calls) > 0 for calls in behind]))  # decoding may end with one
    drafted = torch.tensor([calls[0][1] for calls in behind if calls])
    branches = follow(head, target, teacher, sizes, rejections, drafted, random)
    return target, head, sizes, runs, rejections, branches


def test_flushed_drafts_are_those_of_decoding(case):
    """Guards rows, fills, branch tokens and weights of flushed drafts: what the decode loop drafted after each
    rejected draft and threw away, and what the target says there in a plain pass over text and branch."""
    target, head, sizes, runs, rejections, branches = case
    n, compared = len(sizes), 0
    assert len(rejections.positions) > 6
    assert len(set(rejections.fills)) > 1 or n == 2
    rope = target.rope(branches.features.shape[1], device=branches.features.device)
    outputs = packed_rows(head, branches.features, branches.lengths, rope, sizes, branches.drafts)
    logits = head.lm_head(target.norm(outputs)).view(-1, n - 1, head.config.draft_vocab_size)
    hidden, weights = branches.hidden.view(-1, n - 1, branches.hidden.shape[-1]), branches.weights.view(-1, n - 1)
    for row, (sequence, position) in enumerate(zip(rejections.sequences, rejections.positions, strict=True)):
        text, _, behind = runs[sequence]
        tokens = text[: position + 1]
        for step, (place, token, recorded, of_text) in enumerate(behind[position]):
            assert (place, of_text) == (position + 1 + step, False)
            tokens = [*tokens, token]
            torch.testing.assert_close(logits[row, step], recorded, atol=1e-5, rtol=1e-5)
            plain, _ = target.forward(torch.tensor([tokens]), ())
            torch.testing.assert_close(hidden[row, step], plain[0, -1], atol=1e-4, rtol=1e-4)
            assert weights[row, step] == pytest.approx(0.8**step)
            compared += 1
    assert compared > 6 * (n - 1)


def test_loss_of_flushed_drafts(case):
    """Guards the second stream's loss: reverse KL over the draft vocabulary, weighted, against a plain loop."""
    target, head, sizes, _, _, branches = case
    loss = branch_loss(head, target, branches, sizes, 1.0)
    rope = target.rope(branches.features.shape[1], device=branches.features.device)
    outputs = packed_rows(head, branches.features, branches.lengths, rope, sizes, branches.drafts)
    total = 0.0
    for output, hidden, weight in zip(outputs, branches.hidden, branches.weights, strict=True):
        q = head.lm_head(target.norm(output)).softmax(-1)
        p = target.logits(hidden).softmax(-1)
        total += float(weight) * float((q * (q / p).log()).sum())
    assert float(loss.total) == pytest.approx(total, rel=1e-4)
    assert float(loss.counted) == pytest.approx(float(branches.weights.sum()))


def test_few_rejections_stand_for_all():
    """Guards the draw: at most so many of each text, and their weights add up to what all would have had."""
    labels = np.zeros((2, 40), dtype=int)
    trace = Trace.of(labels, 3)
    accepted = np.random.default_rng(0).random(trace.num_events) < 0.5
    trace = trace.with_flags(accepted)
    temperatures = np.arange(trace.num_events, dtype=float)
    few, events = Rejections.drawn(trace, temperatures, 4, np.random.default_rng(1))
    assert few.sequences.tolist() == [0] * 4 + [1] * 4
    assert not accepted[events].any()
    assert few.temperatures.tolist() == events.tolist()
    for sequence in (0, 1):
        mine = trace.sequences == sequence
        assert few.shares[few.sequences == sequence].sum() == pytest.approx((~accepted[mine]).sum())


def test_rejected_drafts_of_sampling():
    """Guards what is after a rejection at T > 0: the draft that was rejected has more probability than the target
    gives it, and is drawn in proportion to the excess."""
    target = tiny_target("llama", vocab_size=6)
    head = tiny_head(target, (2, 2), draft_vocab=4)
    outputs, hidden = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0)).expand(2, 20000, 32)
    random, temperatures = np.random.default_rng(0), np.full(20000, 0.8)
    tokens = draft_tokens(head, target, outputs, temperatures, random, hidden)
    q = torch.zeros(6)
    q[head.draft_token_ids] = Sampling(0.8).probabilities(head.lm_head(target.norm(outputs[0])))
    excess = (q - Sampling(0.8).probabilities(target.logits(hidden[0]))).clamp(min=0)
    shares = torch.bincount(tokens, minlength=6) / len(tokens)
    torch.testing.assert_close(shares, excess / excess.sum(), atol=0.02, rtol=0)
    shares = torch.bincount(draft_tokens(head, target, outputs, temperatures, random), minlength=6) / len(tokens)
    torch.testing.assert_close(shares, q, atol=0.02, rtol=0)
