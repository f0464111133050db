"""The training forward against method.md section 4 written down as plain loops, and against reference numbers."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from pipeline_model import Target, auto_shallow_layers, key_types, load_head, staircase_plan
from tests.tiny import VOCAB, random_prompt, tiny_head, tiny_target
from training import forward
from training.forward import STAIRCASE_ATTENTION, draft_rows, teacher_features, training_loss
from training.loss import KL, LossTerms, _Distillation, distillation_loss
from training.new_head import late_layers, new_head

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
FIXTURE = Path(__file__).parents[2] / "shared/interop/llama_v11"


def batch(rows=2, length=11, seed=0, padded=3, supervised=0.7):
    """Right-padded ids, labels and attention mask; the second row has `padded` tokens less."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(rows, length, generator=generator) > supervised, -100)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -padded:] = 0
        labels[1, -padded:] = -100
    return ids, labels, mask


def depth_type(anchors, sizes, depth):
    """f(d) = max{k : b_k <= layers available at depth d}."""
    layers = sum(sizes[:depth])
    return max(k for k, anchor in enumerate(anchors) if anchor <= layers)


def sees(anchors, sizes, fill, query, key):
    """Whether the row (k, t) attends to the row (j, T): the staircase, one pair at a time."""
    (kind, t), (other, earlier), n = query, key, len(sizes)
    depth = next(d for d in range(n + 1) if depth_type(anchors, sizes, d) == kind)
    distance = t - earlier
    if distance < 0:
        return False
    if distance >= fill:
        return other == len(anchors) - 1
    return other == depth_type(anchors, sizes, min(n, depth + distance))


def reference_loss(head, target, ids, labels, mask, sizes, fill, temperature):
    """Sum of KL * tau^2, counted, supervised, agreed: every row of every live type, sequence by sequence."""
    anchors = head.config.aggr_feature_bound
    states = []  # h_0 .. h_L by hooks on an untouched forward of the whole model
    hooks = [layer.register_forward_hook(lambda _, __, out: states.append(out)) for layer in target.layers]
    with torch.no_grad():
        teacher_logits = target.model(ids).logits
    for hook in hooks:
        hook.remove()
    states = [target.embed_tokens(ids), *states]
    draft_ids = list(head.config.draft_token_ids or range(VOCAB))
    live = sorted({depth_type(anchors, sizes, depth) for depth in range(len(sizes) + 1)})
    total, counted, supervised, agreed = 0.0, 0, 0, 0
    for row in range(len(ids)):
        length = int(mask[row].sum())
        pairs = [(kind, t) for kind in live for t in range(length)]
        x = torch.stack(
            [head.aggr_projs[k](torch.cat([states[b][row, t] for b in anchors[: k + 1]])) for k, t in pairs]
        )[None]
        cos, sin = target.rope(length)
        positions = [t for _, t in pairs]
        rope = cos[:, positions], sin[:, positions]
        visible = torch.tensor([[sees(anchors, sizes, fill, q, k) for k in pairs] for q in pairs])
        for layer in head.spec_layers:
            normed = layer.input_layernorm(x)
            keys, values = layer.keys_values(normed, rope)
            queries, gate = layer.queries(normed, rope)
            group = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = (queries @ keys.transpose(2, 3) * layer.self_attn.scaling).masked_fill(~visible, -torch.inf)
            x = layer.finish(x, scores.softmax(dim=-1) @ values, gate)
        draft = head.lm_head(target.norm(x[0, :length]))  # the first rows are type 0
        for t in range(length - 1):
            if labels[row, t + 1] < 0:
                continue
            supervised += 1
            best = int(teacher_logits[row, t].argmax())
            if best not in draft_ids:
                continue
            counted += 1
            agreed += draft_ids[int(draft[t].argmax())] == best
            log_p = (teacher_logits[row, t, draft_ids] / temperature).log_softmax(dim=-1)
            log_q = (draft[t] / temperature).log_softmax(dim=-1)
            total = total + (log_p.exp() * (log_p - log_q)).sum() * temperature**2
    return total, counted, supervised, agreed


CASES = [  # family, sizes, anchors (None: auto), fill (None: n), draft vocabulary, layers of the head, temperature
    ("llama", (1, 1, 1, 1), None, None, None, 2, 1.0),
    ("llama", (1, 1, 1, 1), None, 1, 20, 2, 1.0),
    ("llama", (1, 1, 1, 1), None, 2, None, 3, 2.0),
    ("llama", (1, 1, 1, 1), (0, 1, 2, 3), 3, 20, 2, 0.5),
    ("llama", (1, 1, 1, 1), (0, 1, 2, 3, 4), None, None, 2, 1.0),
    ("llama", (2, 2), (0, 1, 2, 3), None, None, 2, 1.0),  # type 1 is dead
    ("llama", (2, 2), (0,), None, 20, 1, 1.0),
    ("llama", (4,), None, None, None, 1, 1.0),
    ("qwen3", (1, 3), None, 1, 20, 2, 1.0),
    ("qwen3_moe", (1, 2, 1), None, None, None, 1, 1.0),
    ("qwen3_5", (1, 1, 2), None, None, 20, 2, 1.0),
    ("qwen3_5", (1, 1, 1, 1), None, 2, None, 2, 1.0),
    ("qwen3_5_moe", (2, 2), None, 1, None, 2, 2.0),
]


@pytest.mark.parametrize("case", CASES, ids=[str(index) for index in range(len(CASES))])
@pytest.mark.parametrize("chunk", [2, 128])
def test_loss_and_gradients_equal_the_plain_loops(case, chunk, monkeypatch):
    """Guards against every shortcut of the training forward: types left out, gathered keys, chunks, fused gradients.

    Small chunks put many borders into a short sequence.
    """
    monkeypatch.setattr("training.forward.QUERY_CHUNK", chunk)
    monkeypatch.setattr("training.loss.LOSS_CHUNK", chunk)
    family, sizes, anchors, fill, draft_vocab, layers, temperature = case
    target = tiny_target(family)
    fields = {} if anchors is None else {"aggr_feature_bound": anchors}
    head = tiny_head(target, sizes, draft_vocab=draft_vocab, num_spec_layers=layers, **fields).requires_grad_(True)
    ids, labels, mask = batch()

    total, *counts = reference_loss(head, target, ids, labels, mask, sizes, fill or len(sizes), temperature)
    (total / counts[0]).backward()
    expected = {name: weight.grad for name, weight in head.named_parameters()}
    head.zero_grad(set_to_none=True)

    features, hidden = teacher_features(target, ids, mask, head.config.aggr_feature_bound)
    loss = training_loss(
        head,
        target,
        features,
        hidden,
        labels,
        mask,
        stage_sizes=sizes,
        fill=fill,
        terms=LossTerms(temperature=temperature),
    )
    assert [int(count) for count in loss[1:]] == counts
    torch.testing.assert_close(loss.total.detach(), total.detach(), rtol=1e-5, atol=1e-6)
    (loss.total / loss.counted).backward()
    best = target.logits(hidden).argmax(dim=-1)
    again = training_loss(
        head,
        target,
        features,
        hidden,
        labels,
        mask,
        stage_sizes=sizes,
        fill=fill,
        terms=LossTerms(temperature=temperature),
        teacher_best=best,
    )
    torch.testing.assert_close(again, loss)
    for name, weight in head.named_parameters():
        ours, theirs = (torch.zeros_like(weight) if grad is None else grad for grad in (weight.grad, expected[name]))
        scale = max(float(theirs.abs().max()), 1e-6)
        torch.testing.assert_close(
            ours / scale, theirs / scale, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_worked_example_of_the_staircase():
    """Guards against an off-by-one in the key types: n = 4, a type a depth but the last two, every query row."""
    types = (0, 1, 2, 3, 3)
    assert key_types(0, types, 4) == (0, 1, 2)
    assert key_types(1, types, 4) == (1, 2)
    assert key_types(3, types, 4) == ()
    assert key_types(0, types, 2) == (0, 1)
    assert key_types(2, types, 1) == (2,)
    anchors, sizes = (0, 1, 2, 3), (1, 1, 1, 1)
    assert staircase_plan(anchors, sizes, None) == {0: (0, 1, 2), 1: (1, 2), 2: (2,), 3: ()}
    assert staircase_plan(anchors, sizes, 1) == {0: (0,), 3: ()}  # one token in flight: nothing else is seen
    with pytest.raises(ValueError, match="fill is 5"):
        staircase_plan(anchors, sizes, 5)


def test_padding_changes_nothing():
    """Guards against padded tokens that are seen or counted: a padded batch is the sum of its rows alone."""
    target = tiny_target("qwen3_5")
    head = tiny_head(target, (1, 1, 2))
    ids, labels, mask = batch(padded=4)

    def loss(rows, length):
        parts = ids[rows, :length], mask[rows, :length]
        features, hidden = teacher_features(target, *parts, head.config.aggr_feature_bound)
        return training_loss(
            head, target, features, hidden, labels[rows, :length], parts[1], stage_sizes=(1, 1, 2), fill=2
        )

    whole, first, second = loss(slice(0, 2), 11), loss(slice(0, 1), 11), loss(slice(1, 2), 7)
    torch.testing.assert_close(whole.total, first.total + second.total)
    assert int(whole.counted) == int(first.counted + second.counted)
    with pytest.raises(ValueError, match="right-padded"):
        teacher_features(target, ids, mask.flip(1), head.config.aggr_feature_bound)


@pytest.mark.parametrize("version", [10, 11, 12])
def test_identity_projections_pass_on_the_deepest_state(version):
    """Guards --head_init identity: every row of every type starts as the last hidden state that it reads, in each layer
    of version 10 too."""
    target = tiny_target("llama")
    sizes = (1, 2, 1) if version == 12 else (2, 2)
    fields = {"shallow_hidden_layer_indices": auto_shallow_layers(4, 2)} if version == 10 else {}
    config = tiny_head(target, sizes, **fields).config
    assert config.version == version
    head = new_head(config, target, identity_projections=True)
    features = torch.randn(5, len(config.anchors), config.hidden_size)
    lists = config.shallow_hidden_layer_indices
    deepest = config.anchors if lists is None else (0, *(layers[-1] for layers in reversed(lists)))
    for kind, layer in enumerate(deepest):
        shown = head.shown_rows(kind, features)
        assert torch.equal(shown, features[:, config.anchors.index(layer)].expand_as(shown))


def test_late_layers_have_full_attention():
    """Guards --head_init late_layers on hybrid targets, where every second layer here is linear attention."""
    assert late_layers(2, tiny_target("llama").config) == (2, 3)
    hybrid = tiny_target("qwen3_5").config
    assert late_layers(2, hybrid) == (1, 3)
    with pytest.raises(ValueError, match="only 2 full-attention layers"):
        late_layers(3, hybrid)


def test_new_head_starts_from_the_target():
    """Guards against a head that starts at random where it should start from the target, or depends on global state."""
    target = tiny_target("llama")
    config = tiny_head(target, (2, 2), draft_vocab=20).config
    head = new_head(config, target, base_layers=[1, 3], seed=3)
    torch.rand(5)
    again = new_head(config, target, base_layers=[1, 3], seed=3)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[list(config.draft_token_ids)])
    for layer, number in zip(head.spec_layers, (1, 3), strict=True):
        source = target.layers[number]
        assert torch.equal(layer.self_attn.o_proj.weight, source.self_attn.o_proj.weight)
        assert torch.equal(layer.mlp.down_proj.weight, source.mlp.down_proj.weight)
    for wrong, complaint in (([2], "lists 1 layers"), ([2, 4], "is 4"), ([-1, 1], "is -1")):
        with pytest.raises(ValueError, match=complaint):
            new_head(config, target, base_layers=wrong)
    hybrid = tiny_target("qwen3_5")
    with pytest.raises(ValueError, match="layer 2 is linear attention"):
        new_head(tiny_head(hybrid, (2, 2)).config, hybrid, base_layers=[2, 3])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("seen", [(), (0,), (0, 1), (0, 0, 1, 2), (1, 2, 2)])
def test_flex_attention_is_the_same_attention(seen, device):
    """Guards the FlexAttention mask: outputs equal the chunked form's; on CUDA, where it trains, gradients too."""
    generator = torch.Generator().manual_seed(0)

    def random(heads):
        return torch.randn(2, heads, 150, 16, generator=generator).to(device).requires_grad_(device == "cuda")

    query, kinds = random(4), sorted({*seen, 3})
    keys, values = ({kind: random(2) for kind in kinds} for _ in range(2))
    inputs, outputs = [query, *keys.values(), *values.values()], []
    for attend in STAIRCASE_ATTENTION.values():
        out = attend(query, keys, values, seen, 0.3)
        outputs.append([out, *torch.autograd.grad(out.square().sum(), inputs)] if device == "cuda" else [out])
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3 if device == "cuda" else 1e-5)


@pytest.mark.parametrize("seen", [(0,), (0, 1), (0, 0, 1, 2), (1, 2, 2), (0,) * 128, (0,) * 140 + (1,) * 300])
@pytest.mark.parametrize("blocks", [1, 4])
def test_flex_attention_looks_at_the_right_blocks(seen, blocks):
    """Guards the blocks that the kernel skips, or takes without asking for each pair: as the library finds them by
    looking at every pair. A CPU's form looks at every pair itself, and would hide a wrong one."""
    kinds, length = tuple(sorted({*seen, 3})), 128 * blocks
    ours = forward._staircase_blocks(kinds, seen, length, torch.device("cpu"))
    library = create_block_mask(ours.mask_mod, None, None, length, len(kinds) * length, device="cpu")

    def listed(counts, which):
        return [set(row[:count].tolist()) for count, row in zip(counts[0, 0].tolist(), which[0, 0], strict=True)]

    assert listed(ours.kv_num_blocks, ours.kv_indices) == listed(library.kv_num_blocks, library.kv_indices)
    full = (listed(mask.full_kv_num_blocks, mask.full_kv_indices) for mask in (ours, library))
    assert next(full) == next(full)


def test_flex_attention_meets_few_shapes(monkeypatch):
    """Guards against a kernel that is compiled for each length of a batch, until it is not compiled any more."""
    met, attend = set(), forward.flex_attention

    def recording(query, key, value, *, block_mask, **settings):
        met.add((query.shape, key.shape, id(block_mask)))
        return attend(query, key, value, block_mask=block_mask, **settings)

    monkeypatch.setattr("training.forward.flex_attention", recording)
    for length in (1, 100, 127, 128, 129):
        keys = {kind: torch.randn(1, 2, length, 8) for kind in (0, 1)}
        out = forward.flex_staircase_attention(torch.randn(1, 4, length, 8), keys, keys, (0,), 0.3)
        assert out.shape == (1, 4, length, 8)
    assert len(met) == 2


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_small_gradients_survive_float16(size):
    """Guards against gradients that are 0 before the loss scale reaches them, and sums that overflow under a scale of
    their own: a draft that is nearly right, and hidden states of several sizes. The reference is float64 autograd."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"draft": (40, 16), "head": (20000, 16), "teacher": (40, 16)}
    draft, head, teacher = (torch.randn(shape, generator=generator) for shape in shapes.values())
    draft, head, teacher = (draft * size).half(), (head / 16 / size).half(), (teacher * size).half()
    teacher = draft + teacher * 1e-2
    inputs = draft.clone().requires_grad_(), head.float().requires_grad_()
    total, *_ = _Distillation.apply(*inputs, teacher, head, None, None, None, KL, True)
    scale = 2.0**16
    ours = torch.autograd.grad(total * scale, inputs)
    exact = draft.double().requires_grad_(), head.double().requires_grad_()
    log_p, log_q = ((x @ w.T).log_softmax(-1) for x, w in ((teacher.double(), head.double()), exact))
    expected = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum() * scale, exact)
    for found, wanted in zip(ours, expected, strict=True):
        assert found.isfinite().all()
        assert float((found.double() - wanted).norm() / wanted.norm()) < 0.1


def test_validation_computes_no_gradients(monkeypatch):
    """Guards the time and memory of a held-out loss: half of a training step's lm_heads are its gradients."""
    target = tiny_target("llama")
    head = new_head(tiny_head(target, (2, 2)).config, target)
    rows, hidden = torch.randn(2, 9, 32).unbind()
    expected = float(distillation_loss(head, target, rows, hidden, None).total.detach())
    monkeypatch.setattr("training.loss._LossGradients", None)
    with torch.no_grad():
        assert float(distillation_loss(head, target, rows, hidden, None).total) == expected


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", (1, 1, 1, 1)), ("qwen3_5", (1, 1, 1, 1)), ("qwen3_5", (1, 2, 1))]
)
def test_training_rows_are_decoding_rows(family, sizes):
    """Guards `exact_fill`, and training and decoding against each other: for every fill, decoding drafts from the
    logits of the training forward over the same tokens. With an anchor a layer every depth has a type."""
    target = tiny_target(family)
    anchors = (0, 1, 2, 3, 4)
    head = tiny_head(target, sizes, aggr_feature_bound=anchors)
    prompt, drafts = random_prompt(5), []

    class Recorder(SPDDrafter):
        def draft(self, tree):
            logits = super().draft(tree)
            in_flight = [level[0].token for level in tree.levels]
            drafts.append((prompt + generation.result.tokens + in_flight, tree.fill, logits[0]))
            return logits

    executor = LocalExecutor(target, sizes, anchors)
    generation = Decoder(executor, Recorder(head, target, sizes), seed=1).start(prompt, 12)
    generation.finish()
    assert {fill for _, fill, _ in drafts} == set(range(1, len(sizes) + 1))
    for tokens, fill, logits in drafts:
        ids = torch.tensor([tokens])
        features, _ = teacher_features(target, ids, torch.ones_like(ids), anchors)
        cos, sin = (table[:, : len(tokens)] for table in target.rope(len(tokens)))
        plan = staircase_plan(anchors, sizes, fill, exact_fill=True)
        newest = torch.tensor([0]), torch.tensor([len(tokens) - 1])
        row = draft_rows(head, features, (cos, sin), plan, newest)
        torch.testing.assert_close(head.lm_head(target.norm(row))[0], logits, atol=2e-5, rtol=1e-4)


@pytest.mark.skipif(not FIXTURE.exists(), reason="the reference numbers are not at hand")
@pytest.mark.parametrize("fill", [1, 2, 3, 4])
def test_reference_numbers(fill):
    """Guards against another reading of the training rules than the authors': losses and draft logits, every fill."""
    expected = json.loads((FIXTURE / "expected.json").read_text())
    target = Target.load(str(FIXTURE / "target"))
    head = load_head(FIXTURE, target)
    anchors, sizes = head.config.aggr_feature_bound, head.config.split(target.num_layers)
    ids, labels, mask = (torch.tensor(expected[f"train_{name}"]) for name in ("input_ids", "labels", "attention_mask"))
    features, hidden = teacher_features(target, ids, mask, anchors)
    loss = training_loss(head, target, features, hidden, labels, mask, stage_sizes=sizes, fill=fill)
    wanted = next(item for item in expected["training"] if item["fill"] == fill)
    assert float(loss.total / loss.counted) == pytest.approx(wanted["loss"], abs=1e-4)
    assert int(loss.agreed) / int(loss.supervised) == pytest.approx(wanted["acc"])

    cos, sin = (table[:, : ids.shape[1]] for table in target.rope(ids.shape[1]))
    real = mask.nonzero(as_tuple=True)
    rows = draft_rows(head, features, (cos, sin), staircase_plan(anchors, sizes, fill), real)
    logits = torch.load(FIXTURE / f"draft_logits_fill{fill}.pt", weights_only=True)
    torch.testing.assert_close(head.lm_head(target.norm(rows)), logits[real], atol=1e-4, rtol=0)
