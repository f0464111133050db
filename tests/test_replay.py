"""Replay of decoding (method.md section 11): traces, packed rows and flags, against the decode loop and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decoding.sampling import Sampling
from pipeline_inference import Decoder
from tests.tiny import hf_greedy, random_prompt, spd_decoder, tiny_head, tiny_model, tiny_target
from training.forward import draft_rows, teacher_features
from training.replay import (
    Trace,
    acceptance_given,
    answers_of,
    bernoulli_flags,
    fills_of,
    packed_rows,
    replay_flags,
    run_values,
)
from training.replay_loss import Replay, ReplaySettings

LAYERS = 6
SPLITS = {"n = 2": (3, 3), "n = 3": (2, 2, 2), "n = 6": (1,) * 6, "uneven": (1, 3, 2)}


class Recorder:
    """A drafter that keeps the logits of every draft, by the position of its newest token: the last one is verified.

    With a `script` {position: token} it then drafts what that says, so that right drafts come where the test wants.
    """

    def __init__(self, drafter, script=None):
        self._drafter, self._script, self.logits, self.fills = drafter, script or {}, {}, {}

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def draft(self, tree):
        logits = self._drafter.draft(tree)
        self.logits[tree.frontier[0].position] = logits[0].clone()
        self.fills[tree.frontier[0].position] = tree.fill
        if tree.frontier[0].position + 1 in self._script:
            logits[0, self._script[tree.frontier[0].position + 1]] = 1e4
        return logits


def decoded(target, head, prompt, count, right=None, **settings):
    """A real decode: the whole sequence, the result and the recorder. `right`: at which positions to draft right."""
    decoder = spd_decoder(target, head, **settings)
    sequence = [*prompt, *Decoder(decoder.executor).generate(prompt, count).tokens]
    script = {place: token for place, token in enumerate(sequence) if right is not None and right(place)}
    decoder.drafter = Recorder(decoder.drafter, script)
    result = decoder.generate(prompt, count)
    return [*prompt, *result.tokens], result, decoder.drafter


def batch_of(sequences, prompt_lengths):
    """Right-padded ids, labels (answers only) and mask of some sequences."""
    width = max(map(len, sequences))
    ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in sequences])
    mask = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in sequences])
    labels = ids.masked_fill(mask == 0, -100)
    for row, length in enumerate(prompt_lengths):
        labels[row, :length] = -100
    return ids, labels, mask


def packed(target, head, ids, mask, sizes, trace):
    """The head's outputs of a batch's events, and the target's hidden states there."""
    features, hidden = teacher_features(target, ids, mask, head.config.anchors)
    cos, sin = target.rope(ids.shape[1])
    rope = cos[:, : ids.shape[1]], sin[:, : ids.shape[1]]
    outputs = packed_rows(head, features, mask.sum(1).numpy(), rope, sizes, trace)
    where = torch.from_numpy(trace.sequences), torch.from_numpy(trace.positions)
    return outputs, hidden[where], ids[where[0], where[1] + 1]


def shallow(sizes):
    """A version 10 list for each of g_n .. g_1 that its stages have computed."""
    bounds = np.cumsum(sizes)
    return tuple((0, int(bound)) for bound in reversed(bounds))


def plain_fills(accepted, n):
    fills = []
    for place in range(len(accepted)):
        grown = place > 0 and accepted[place - 1]
        fills.append(min(n, fills[-1] + 1) if grown else 1)
    return fills


def test_fills_follow_from_flags():
    """A fill counted wrong trains every later draft of the answer on rows that decoding does not have."""
    random = np.random.default_rng(0)
    for n in (1, 2, 3, 6):
        for length in (0, 1, 2, 9):
            flags = random.random(length) < 0.7
            assert fills_of(flags, n).tolist() == plain_fills(flags, n)


def test_answers_are_stretches_of_supervised_tokens():
    labels = np.array([-100, 3, 4, -100, -100, 5, 6, 7])
    assert answers_of(labels) == [range(1, 3), range(5, 8)]
    assert answers_of(np.full(3, -100)) == []


def test_a_new_answer_begins_with_one_token_in_flight():
    """Flags of one answer must not fill the pipeline of the next one."""
    labels = np.array([[-100, 1, 1, 1, -100, 1, 1, 1]])
    trace = Trace.of(labels, 3).with_flags(np.array([True, True, True, True]))
    assert trace.positions.tolist() == [1, 2, 5, 6]
    assert trace.fills.tolist() == [1, 2, 1, 2]
    assert trace.counts().runs == 2


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("spec_layers", [1, 2, 3])
@pytest.mark.parametrize("version", [11, 10])
def test_packed_rows_are_those_of_decoding(name, spec_layers, version):
    """Every verified draft of a real decode has the logits that training sees for it: this is what replay is for."""
    sizes = SPLITS[name]
    if version == 10 and name == "uneven":
        pytest.skip("version 10 has even splits")
    fields = {"shallow_hidden_layer_indices": shallow(sizes)} if version == 10 else {}
    if name == "n = 6" and version == 11:
        fields = {"aggr_feature_bound": (0, 1, 3, 5, 6)}
    target = tiny_target("llama", layers=LAYERS)
    head = tiny_head(target, sizes, num_spec_layers=spec_layers, **fields)
    prompts = [random_prompt(9, seed=1), random_prompt(4, seed=2)]

    def right(position):  # runs of one to nine accepted drafts
        return position % 11 not in (0, 2)

    runs = [decoded(target, head, prompt, count, right) for prompt, count in zip(prompts, (28, 17), strict=True)]
    ids, labels, mask = batch_of([tokens for tokens, _, _ in runs], map(len, prompts))

    trace = Trace.of(labels.numpy(), len(sizes))
    trace = trace.with_flags(np.concatenate([result.accepted[1:] for _, result, _ in runs]))
    outputs, _, _ = packed(target, head, ids, mask, sizes, trace)
    logits = head.lm_head(target.norm(outputs))
    recorders = [recorder for _, _, recorder in runs]
    for event in range(trace.num_events):
        recorder, position = recorders[trace.sequences[event]], int(trace.positions[event])
        assert trace.fills[event] == recorder.fills[position]
        torch.testing.assert_close(logits[event], recorder.logits[position], atol=1e-5, rtol=1e-5)
    counts = trace.counts()
    results = [result for _, result, _ in runs]
    assert counts.verified_by_fill.tolist() == np.sum([r.verified_by_fill for r in results], axis=0).tolist()
    assert counts.accepted_by_fill.tolist() == np.sum([r.accepted_by_fill for r in results], axis=0).tolist()
    assert counts.cycles == sum(result.cycles for result in results)
    assert 0 < counts.alpha < 1, "the drafts were all alike: nothing was tried"
    if len(set(sizes)) == 1:
        pooled = len(sizes) * sum(r.new_tokens for r in results) / sum(r.cycles for r in results)
        assert counts.accept_length == pytest.approx(pooled)


def test_the_staircase_is_not_what_decoding_computes():
    """method.md section 11.3: with two layers and types that depths share, section 4's rows differ from decoding's."""
    sizes, anchors = SPLITS["n = 6"], (0, 1, 3, 5, 6)
    target = tiny_target("llama", layers=LAYERS)
    head = tiny_head(target, sizes, aggr_feature_bound=anchors)
    ids = torch.tensor([random_prompt(14)])
    mask = torch.ones_like(ids)
    trace = Trace.of(ids.numpy(), 6)
    trace = trace.with_flags(np.ones(trace.num_events, dtype=bool))
    outputs, _, _ = packed(target, head, ids, mask, sizes, trace)
    differing = [abs(rows - outputs[event]).max() > 1e-3 for event, rows in staircase_outputs(head, target, ids, trace)]
    assert sum(differing) > len(differing) / 2


def staircase_outputs(head, target, ids, trace):
    """(event, the staircase's g_0 output for it) of every event, each at its own fill."""
    features, _ = teacher_features(target, ids, torch.ones_like(ids), head.config.anchors)
    cos, sin = target.rope(ids.shape[1])
    rope = cos[:, : ids.shape[1]], sin[:, : ids.shape[1]]
    sizes = head.config.split(target.num_layers)
    for event in range(trace.num_events):
        plan = head.staircase_plan(sizes, int(trace.fills[event]))
        selected = torch.tensor([trace.sequences[event]]), torch.tensor([trace.positions[event]])
        yield event, draft_rows(head, features, rope, plan, selected)[0]


@pytest.mark.parametrize(("spec_layers", "anchors"), [(1, (0, 1, 3, 5, 6)), (2, tuple(range(7)))])
def test_packed_rows_equal_the_staircase_where_both_are_exact(spec_layers, anchors):
    """One layer at any fill, or a type for each depth and a full pipeline: here section 4 is decoding, too."""
    sizes = SPLITS["n = 6"]
    target = tiny_target("llama", layers=LAYERS)
    head = tiny_head(target, sizes, num_spec_layers=spec_layers, aggr_feature_bound=anchors)
    ids = torch.tensor([random_prompt(15, seed=3)])
    trace = Trace.of(ids.numpy(), 6)
    accepted = np.ones(trace.num_events, dtype=bool)
    if spec_layers == 1:
        accepted[4] = accepted[9] = False
    trace = trace.with_flags(accepted)
    outputs, _, _ = packed(target, head, ids, torch.ones_like(ids), sizes, trace)
    compared = 0
    for event, rows in staircase_outputs(head, target, ids, trace):
        if spec_layers == 1 or trace.fills[event] == 6:
            torch.testing.assert_close(outputs[event], rows, atol=1e-5, rtol=1e-5)
            compared += 1
    assert compared >= 8


def test_an_event_sees_its_own_rows_and_the_past_alone():
    """Rows of other events, later tokens and flushed ones must not leak into a draft: zero influence, zero gradient."""
    sizes = SPLITS["n = 3"]
    target = tiny_target("llama", layers=LAYERS)
    head = tiny_head(target, sizes, num_spec_layers=3)
    ids = torch.tensor([random_prompt(12, seed=4), random_prompt(12, seed=5)])
    trace = Trace.of(ids.numpy(), 3)
    trace = trace.with_flags(bernoulli_flags(trace, 0.6, np.random.default_rng(0)))
    features, _ = teacher_features(target, ids, torch.ones_like(ids), head.config.anchors)
    features.requires_grad_()
    cos, sin = target.rope(12)
    outputs = packed_rows(head, features, np.array([12, 12]), (cos[:, :12], sin[:, :12]), sizes, trace)
    types = head.depth_types(sizes)
    for event in range(0, trace.num_events, 3):
        (gradient,) = torch.autograd.grad(outputs[event].sum(), features, retain_graph=True)
        sequence, position, fill = trace.sequences[event], trace.positions[event], trace.fills[event]
        reached = gradient.abs().sum(-1) > 0  # [B, S, m]
        expected = torch.zeros_like(reached)
        for token in range(position + 1):
            depth = position - token if position - token < fill else len(sizes)
            expected[sequence, token, : types[depth] + 1] = True
        assert torch.equal(reached, expected)


@pytest.mark.parametrize("seed", range(20))
def test_flags_by_replay_reach_those_of_decoding(seed):
    """Each repeat settles one more event, whatever the flags began with; the fixed point is the decode itself."""
    sizes = [(2, 2), (1, 2, 1), (1, 1, 1, 1)][seed % 3]
    target = tiny_target("llama", seed=seed, vocab_size=5)
    head = tiny_head(target, sizes, draft_vocab=4 if seed % 2 else None)
    prompt = random_prompt(5, seed=seed, vocab=5)
    tokens, result, _ = decoded(target, head, prompt, 14)
    ids, labels, mask = batch_of([tokens], [len(prompt)])
    trace = Trace.of(labels.numpy(), len(sizes))
    for start in (bernoulli_flags(trace, 0.5, np.random.default_rng(seed)), np.ones(trace.num_events, dtype=bool)):
        flags = start
        for repeat in range(1, trace.num_events + 1):
            outputs = packed(target, head, ids, mask, sizes, trace.with_flags(flags))
            flags = replay_flags(head, target, *outputs, Sampling())
            assert flags[:repeat].tolist() == result.accepted[1 : repeat + 1]
        assert flags.tolist() == result.accepted[1:]


def test_acceptance_given_the_committed_token_is_exact():
    """Sampled decoding: over x ~ p the mean must be the chance that a draft of q is kept, sum min(p, q)."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(50, 6, generator=generator).softmax(-1) for _ in range(2))
    q[:, 2] = 0  # outside the draft vocabulary
    q /= q.sum(-1, keepdim=True)
    mean = sum(p[:, x] * acceptance_given(p, q, torch.full((50,), x)) for x in range(6))
    torch.testing.assert_close(mean, torch.minimum(p, q).sum(-1))
    assert (acceptance_given(p, q, torch.full((50,), 2)) == 0).all()


def test_sampled_flags_are_distributed_as_those_of_decoding():
    """Flags of sampled text must be accepted as often as sampled decoding accepts, at every fill."""
    sizes, count = (2, 2), 6
    target = tiny_target("llama", vocab_size=5)
    head, prompt, sampling = tiny_head(target, sizes, draft_vocab=4), [1, 2, 3], Sampling(temperature=1.0)
    decoder = spd_decoder(target, head, sampling=sampling)
    generator = torch.Generator().manual_seed(0)
    observed, replayed = np.zeros((2, 2)), np.zeros((2, 2))  # fill x (verified, accepted)
    for seed in range(50):
        decoder.seed = seed
        result = decoder.generate(prompt, count)
        observed += np.stack([result.verified_by_fill, result.accepted_by_fill], axis=1)
        ids, labels, mask = batch_of([[*prompt, *result.tokens]], [len(prompt)])
        trace = Trace.of(labels.numpy(), 2)
        uniforms, flags = torch.rand(trace.num_events, generator=generator), np.zeros(trace.num_events, dtype=bool)
        for _ in range(trace.num_events):
            outputs = packed(target, head, ids, mask, sizes, trace.with_flags(flags))
            flags = replay_flags(head, target, *outputs, sampling, uniforms)
        counts = trace.with_flags(flags).counts()
        replayed += np.stack([counts.verified_by_fill, counts.accepted_by_fill], axis=1)
    shares = observed[:, 1] / observed[:, 0], replayed[:, 1] / replayed[:, 0]
    spread = np.sqrt(shares[0] * (1 - shares[0]) * (1 / observed[:, 0] + 1 / replayed[:, 0]))
    assert (np.abs(shares[0] - shares[1]) < 3.5 * spread).all(), shares


def test_values_of_a_run():
    """E[V] and its derivatives by acceptance at each fill, which `--value_weight` weighs events with."""
    alphas = np.array([0.466, 0.496, 0.572, 0.549, 0.607, 0.630])
    values = run_values(alphas)
    assert values.tokens == pytest.approx(2.021, abs=1e-3)
    assert 6 * values.tokens / (values.tokens + 5) == pytest.approx(1.727, abs=1e-3)
    for place in range(6):
        step = np.eye(6)[place] * 1e-6
        difference = (run_values(alphas + step).tokens - run_values(alphas - step).tokens) / 2e-6
        assert values.gradient[place] == pytest.approx(difference, rel=1e-5)
    assert values.visits.sum() == pytest.approx(values.tokens)
    assert run_values([0.8] * 4).tokens == pytest.approx(1 / (1 - 0.8))


# ---------------------------------------------------------------------------------------------------------------------
# The loss


def own_answer(target, head, sizes, count=40):
    """A text that the target wrote, as a batch of one: ids, and what `Replay` takes."""
    prompt = random_prompt(6)
    tokens = [*prompt, *spd_decoder(target, head).generate(prompt, count).tokens]
    ids, labels, mask = batch_of([tokens], [len(prompt)])
    features, hidden = teacher_features(target, ids, mask, head.config.anchors)
    return tokens, {"features": features, "hidden": hidden, "labels": labels, "attention_mask": mask}


def test_a_text_learned_by_heart_decodes_as_its_trace_says():
    """Training and decoding must agree in the end: alpha of the trace is alpha of the decode, and rises. Before it
    and after it the target's own text is decoded."""
    sizes = (2, 2, 2)
    target = tiny_target("llama", layers=LAYERS)
    head = tiny_head(target, sizes).requires_grad_(True)
    tokens, teacher = own_answer(target, head, sizes)
    assert tokens[6:] == hf_greedy(tiny_model("llama", layers=LAYERS), tokens[:6], len(tokens) - 6)
    replay = Replay(head, target, ReplaySettings())
    optimizer, random = torch.optim.AdamW(head.parameters(), 3e-3), np.random.default_rng(0)
    for _ in range(120):
        trace, _ = replay.renewed(teacher, sizes, random)
        loss, counts = replay.loss(teacher, sizes, trace)
        (loss.total / loss.counted).backward()
        optimizer.step()
        optimizer.zero_grad()
        replay.running.add(np.stack([counts.verified_by_fill, counts.accepted_by_fill]))
    trace, _ = replay.renewed(teacher, sizes, random, repeats=len(tokens))
    result = spd_decoder(target, head.eval()).generate(tokens[:6], len(tokens) - 6)
    assert result.tokens == tokens[6:]
    assert result.alpha == pytest.approx(trace.counts().alpha)
    assert result.alpha > 0.85
    assert result.cycles == trace.counts().cycles
    assert replay.running.alpha() > 0.7


def test_each_text_is_replayed_at_its_own_temperature():
    """Greedy and sampled texts in one batch: flags as if each kind were alone, draws that depend on a text and not on
    its neighbours, padding or place, and the given temperature for texts that say none."""
    sizes = (2, 2, 2)
    target = tiny_target("llama", layers=LAYERS)
    head = tiny_head(target, sizes, draft_vocab=40)
    texts, starts = [random_prompt(length, seed=length) for length in (14, 20, 17)], [4, 6, 5]

    def flags(chosen, temperatures, default):
        ids, labels, mask = batch_of([texts[i] for i in chosen], [starts[i] for i in chosen])
        features, hidden = teacher_features(target, ids, mask, head.config.anchors)
        teacher = {"features": features, "hidden": hidden, "labels": labels, "attention_mask": mask}
        if temperatures is not None:
            teacher["temperatures"] = torch.tensor(temperatures, dtype=torch.float64)
        replay = Replay(head, target, ReplaySettings(sampling=Sampling(temperature=default)))
        trace, _ = replay.renewed(teacher, sizes, np.random.default_rng(0), repeats=40)
        return {text: trace.only(trace.sequences == row).accepted.tolist() for row, text in enumerate(chosen)}

    alone = {text: flags([text], None, default) for text, default in ((0, 0.0), (1, 2.0), (2, 0.7))}
    expected = {text: found[text] for text, found in alone.items()}
    assert flags([0, 1, 2], [0.0, 2.0, 0.7], 1.0) == expected
    assert flags([2, 0, 1], [0.7, math.nan, 2.0], 0.0) == expected
    assert flags([1, 0], [0.0, 2.0], 1.0) != {text: expected[text] for text in (0, 1)}


def test_weights_of_events():
    """--reject_weight and --value_weight change what an event counts, and nothing else."""
    sizes = (2, 2, 2)
    target = tiny_target("llama", layers=LAYERS)
    head = tiny_head(target, sizes)
    _, teacher = own_answer(target, head, sizes)
    plain = Replay(head, target, ReplaySettings())
    trace = Trace.of(teacher["labels"].numpy(), 3)
    trace = trace.with_flags(bernoulli_flags(trace, 0.5, np.random.default_rng(0)))
    assert plain._weights(trace, torch.device("cpu")) is None
    heavy = Replay(head, target, ReplaySettings(reject_weight=2.0))._weights(trace, torch.device("cpu"))
    assert heavy.tolist() == [1.0 if accepted else 2.0 for accepted in trace.accepted]
    worth = Replay(head, target, ReplaySettings(value_weight=True))
    worth.running.add(np.array([[80.0, 40, 20], [32, 20, 14]]))
    weights = worth._weights(trace, torch.device("cpu"))
    assert weights.mean() == pytest.approx(1)
    rest = run_values(worth.running.alpha_by_fill(3)).rest
    ratio = weights[trace.fills == 1].mean() / weights[trace.fills == 3].mean()
    assert ratio == pytest.approx(rest[1] / rest[2], rel=1e-4)


def test_full_traces_have_as_many_in_flight_as_there_can_be():
    labels = np.array([[1, 2, 3, 4, 5]])
    assert Trace.of(labels, 3).full().fills.tolist() == [1, 2, 3, 3]
