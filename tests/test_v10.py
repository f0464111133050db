"""Version 10 heads: the training forward, decoding and checkpoints against method.md section 8 as plain loops."""

import copy

import pytest
import torch

from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from pipeline_model import (
    HeadConfig,
    auto_shallow_layers,
    load_head,
    read_checkpoint,
    save_head,
    split_layers,
)
from tests.tiny import (
    FAMILIES,
    VOCAB,
    hf_greedy,
    layer_outputs,
    random_prompt,
    spd_decoder,
    tiny_head,
    tiny_model,
    tiny_target,
)
from training.forward import draft_rows, teacher_features, training_loss
from training.new_head import new_head


def head_of(target, num_stages, lists=None, **fields):
    """A random head of version 10; `lists` are read by g_n, ..., g_1, None for the rule's."""
    lists = lists or auto_shallow_layers(target.num_layers, num_stages)
    return tiny_head(target, split_layers(target.num_layers, num_stages), shallow_hidden_layer_indices=lists, **fields)


def plain_logits(head, target, states, fill):
    """Draft logits at every position [S, V_d], one query and one key at a time. states: h_0 .. h_L, each [S, H]."""
    n, weights = head.config.num_stages, dict(head.named_parameters())
    length = len(states[0])
    cos, sin = target.rope(length)
    logits = []
    for t in range(length):
        x = weights["g0_proj.weight"] @ states[0][t]
        for index, layer in enumerate(head.spec_layers):
            rows = []
            for earlier in range(t):
                distance = t - earlier
                stage = n if distance >= fill else min(n, distance)
                place = n - stage  # g_n stands first
                read = torch.cat([states[b][earlier] for b in head.config.shallow_hidden_layer_indices[place]])
                g = weights[f"stage_projs.{place}.weight"] @ read
                rows.append(weights[f"fixed_stage_per_layer_projs.{index}.{place}.weight"] @ g)
            rows.append(x)
            normed = layer.input_layernorm(torch.stack(rows)[None])
            rope = cos[:, : t + 1], sin[:, : t + 1]
            keys, values = layer.keys_values(normed, rope)
            query, gate = layer.queries(normed[:, -1:], (rope[0][:, -1:], rope[1][:, -1:]))
            group = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = (query @ keys.transpose(2, 3) * layer.self_attn.scaling).softmax(dim=-1)
            x = layer.finish(x[None, None], scores @ values, gate)[0, 0]
        logits.append(head.lm_head(target.norm(x)))
    return torch.stack(logits)


def training_logits(head, target, ids, mask, fill, positions, attention="sdpa"):
    """The training forward's logits at (row, position) pairs, [P, V_d]."""
    features, _ = teacher_features(target, ids, mask, head.config.anchors)
    rope = tuple(table[:, : ids.shape[1]] for table in target.rope(ids.shape[1]))
    plan = head.staircase_plan(split_layers(target.num_layers, head.config.num_stages), fill)
    return head.lm_head(target.norm(draft_rows(head, features, rope, plan, positions, attention)))


CASES = [  # family, layers, n, lists (None: the rule's), fill (None: n), layers of the head
    ("llama", 4, 4, None, None, 2),
    ("llama", 4, 4, None, 1, 3),
    ("llama", 4, 4, None, 2, 2),
    ("llama", 7, 3, None, None, 2),  # an even split with a remainder
    ("llama", 4, 2, ((4, 1, 4), (2, 0)), None, 1),  # as listed: unsorted, one twice, g_2 without h_0
    ("llama", 2, 1, None, None, 2),
    ("qwen3_5", 4, 4, None, 3, 2),
    ("qwen3_5_moe", 4, 2, None, 1, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chunk", [2, 128])
def test_training_forward_equals_the_plain_loops(case, chunk, monkeypatch):
    """Guards every choice of section 8: which type is seen where, its list, its matrix of each layer, the order of the
    lists, g_0 as its own key, rows that stay as they are; for logits and gradients, on a padded batch."""
    monkeypatch.setattr("training.forward.QUERY_CHUNK", chunk)
    family, layers, n, lists, fill, spec_layers = case
    shape = {"layer_types": ["linear_attention", "full_attention"] * (layers // 2)} if "3_5" in family else {}
    target = tiny_target(family, layers=layers, **shape)
    head = head_of(target, n, lists, num_spec_layers=spec_layers, draft_vocab=20).requires_grad_(True)
    plain = copy.deepcopy(head)
    ids, mask = torch.tensor([random_prompt(9, seed=row) for row in range(2)]), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    expected = torch.cat(
        [plain_logits(plain, target, layer_outputs(target.model, row[: m.sum()]), fill or n)
         for row, m in zip(ids.tolist(), mask, strict=True)]
    )  # fmt: skip
    ours = training_logits(head, target, ids, mask, fill, mask.nonzero(as_tuple=True))
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)
    weighting = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    for logits in (ours, expected):
        (logits * weighting).sum().backward()
    for (name, weight), other in zip(head.named_parameters(), plain.parameters(), strict=True):
        ours, theirs = (torch.zeros_like(weight) if w.grad is None else w.grad for w in (weight, other))
        scale = max(float(theirs.abs().max()), 1e-6)
        torch.testing.assert_close(
            ours / scale, theirs / scale, rtol=1e-5, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_flex_attention_takes_the_rows_of_version_10():
    """Guards the FlexAttention form: types without queries are keys there too."""
    target = tiny_target("llama")
    head = head_of(target, 4)
    ids, mask = torch.tensor([random_prompt(12)]), torch.ones(1, 12, dtype=torch.long)
    positions = mask.nonzero(as_tuple=True)
    with torch.no_grad():
        for fill in (1, 3, 4):
            forms = [training_logits(head, target, ids, mask, fill, positions, a) for a in ("sdpa", "flex_attention")]
            torch.testing.assert_close(*forms, atol=2e-5, rtol=1e-4)


def test_types_that_a_fill_hides_take_no_part():
    """Guards the cost of short fills, and `projections`: only modules of types that are seen get gradients."""
    target = tiny_target("llama")
    head = new_head(head_of(target, 4).config, target)
    sizes = split_layers(4, 4)
    assert head.staircase_plan(sizes, None) == {0: (0, 1, 2, 3), 1: (), 2: (), 3: (), 4: ()}
    assert head.staircase_plan(sizes, 2) == head.staircase_plan(sizes, 2, exact_fill=True) == {0: (0, 1), 1: (), 4: ()}
    with pytest.raises(ValueError, match="fill is 5"):
        head.staircase_plan(sizes, 5)
    ids = torch.tensor([random_prompt(10)])
    features, hidden = teacher_features(target, ids, torch.ones_like(ids), head.config.anchors)
    loss = training_loss(head, target, features, hidden, ids, torch.ones_like(ids), stage_sizes=sizes, fill=3)
    loss.total.backward()
    touched = [[module.weight.grad is not None for module in modules] for modules in head.projections]
    assert touched == [[True], [True] * 3, [True] * 3, [False] * 3, [True] * 3]
    of_types = {id(module.weight) for modules in head.projections for module in modules}
    others = {name for name, weight in head.named_parameters() if id(weight) not in of_types}
    assert all(name.startswith(("spec_layers", "lm_head")) for name in others)


@pytest.mark.parametrize("use_deepest", [True, False])
@pytest.mark.parametrize(
    ("family", "n", "width", "lag"), [("llama", 4, 1, 0), ("qwen3_5", 4, 1, 1), ("llama", 3, 3, 0)]
)
def test_training_rows_are_decoding_rows(family, n, width, lag, use_deepest):
    """Guards training and decoding against each other: for every fill, every node of a chain or tree is drafted from
    the logits of the training forward over its own chain. Caught: stale rows, a wrong order of rows, a cache of g_n
    that is not constant."""
    target = tiny_target(family)
    head = head_of(target, n)
    prompt, drafts = random_prompt(5), []

    class Recorder(SPDDrafter):
        def draft(self, tree):
            logits = super().draft(tree)
            for node, row in zip(tree.frontier, logits, strict=True):
                chain = []
                while node is not tree.root:
                    chain.append(node.token)
                    node = node.parent
                drafts.append((prompt + generation.result.tokens + chain[::-1], tree.fill, row))
            return logits

    sizes = split_layers(target.num_layers, n)
    drafter = Recorder(head, target, sizes, use_deepest)
    decoder = Decoder(LocalExecutor(target, sizes, head.config.anchors), drafter, draft_top_k=width, verify_lag=lag)
    generation = decoder.start(prompt, 10)
    generation.finish()
    assert {fill for _, fill, _ in drafts} == set(range(1, n + 1))
    for tokens, fill, logits in drafts:
        ids = torch.tensor([tokens])
        newest = torch.tensor([0]), torch.tensor([len(tokens) - 1])
        expected = training_logits(head, target, ids, torch.ones_like(ids), fill if use_deepest else None, newest)
        torch.testing.assert_close(logits, expected[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "width", "lag"), [(2, 2, 0), (4, 3, 1)])
def test_greedy_output_is_the_targets_own(family, n, width, lag):
    """Guards losslessness with a head of version 10; a vocabulary of 7, so that some of its drafts are right."""
    target, prompt = tiny_target(family, vocab_size=7), random_prompt(6, vocab=7)
    decoder = spd_decoder(target, head_of(target, n), draft_top_k=width, verify_lag=lag)
    result = decoder.generate(prompt, 30)
    assert result.tokens == hf_greedy(tiny_model(family, vocab_size=7), prompt, 30)
    assert 0 < result.n_accepted < result.n_verified


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_checkpoint_round_trip(family, tmp_path):
    """Guards the file format of section 8: names, shapes, configuration; and that what was saved is what is loaded."""
    target = tiny_target(family)
    lists = ((0, 2, 4), (2, 0))
    head = head_of(target, 2, lists, num_spec_layers=2, draft_vocab=20)
    save_head(head, tmp_path / "head.pt")
    payload = torch.load(tmp_path / "head.pt", weights_only=True)
    config, state = payload["config"], payload["state_dict"]
    assert config["version"] == 10
    assert config["shallow_hidden_layer_indices"] == [[0, 2, 4], [2, 0]]
    assert not {"aggr_feature_bound", "num_aggr_types", "stage_layers"} & config.keys()
    own = {name: list(weight.shape) for name, weight in state.items() if not name.startswith("spec_layers.")}
    assert own == {
        "stage_projs.0.weight": [32, 96],
        "stage_projs.1.weight": [32, 64],
        "g0_proj.weight": [32, 32],
        **{f"fixed_stage_per_layer_projs.{layer}.{i}.weight": [32, 32] for layer in (0, 1) for i in (0, 1)},
        "lm_head.weight": [20, 32],
    }
    loaded = load_head(tmp_path / "head.pt", target)
    assert loaded.config == head.config
    assert all(torch.equal(weight, head.state_dict()[name]) for name, weight in loaded.state_dict().items())
    prompt = random_prompt(4)
    again, first = (spd_decoder(target, h).generate(prompt, 12) for h in (loaded, head))
    assert (again.tokens, again.accepted) == (first.tokens, first.accepted)


def test_the_rule_for_shallow_layers():
    """Guards the default lists: the worked ones for 8 stages of 4 layers, and for every split none that is empty, past
    the clamp, or deeper than a token has come at that depth."""
    assert auto_shallow_layers(32, 8)[-1] == (0, 4)
    assert auto_shallow_layers(32, 8)[-2] == (0, 4, 8)
    assert auto_shallow_layers(32, 8)[-3] == (0, 4, 8, 12)
    assert auto_shallow_layers(32, 8)[-7] == (0, 9, 18, 28)
    assert auto_shallow_layers(32, 8)[0] == (0, 10, 20, 30)
    for layers in range(1, 41):
        for n in range(1, layers + 1):
            lists = auto_shallow_layers(layers, n)
            available = [sum(split_layers(layers, n)[:depth]) for depth in range(n, 0, -1)]
            assert all(own[-1] <= most for own, most in zip(lists, available, strict=True))
            assert all(own[0] == 0 and own[-1] <= max(0, n * (layers // n) - 2) for own in lists)


RAW = {
    "version": 10,
    "hidden_size": 32,
    "vocab_size": VOCAB,
    "num_stages": 2,
    "num_spec_layers": 1,
    "shallow_hidden_layer_indices": [[0, 2, 4], [0, 2]],
}
WRONG = [
    ({"shallow_hidden_layer_indices": [[0, 2]]}, "must hold num_stages, 2, lists"),
    ({"shallow_hidden_layer_indices": "0,2;0"}, "must hold num_stages, 2, lists"),
    ({"shallow_hidden_layer_indices": [[0, 2], []]}, "must be a list of integers"),
    ({"shallow_hidden_layer_indices": [[0, 2], [-1]]}, "entry of shallow_hidden_layer_indices is -1"),
    ({"shallow_hidden_layer_indices": [[0, 4], [0, 3]]}, "g_1 reads layer 3, but the first 1 of 2 stages end at 2"),
    ({"shallow_hidden_layer_indices": [[0, 5], [0, 2]]}, "g_2 reads layer 5, but the first 2 of 2 stages end at 4"),
    ({"stage_layers": [1, 3]}, r"stage_layers is \[1, 3\], but a head of version 10 is made for one n and an even"),
    ({"trained_num_stages": [1, 2]}, r"trained_num_stages is \[1, 2\], but a head of version 10 is made for one n"),
]


@pytest.mark.parametrize(("change", "complaint"), WRONG, ids=[complaint for _, complaint in WRONG])
def test_wrong_configurations_are_named(change, complaint):
    """Guards against a checkpoint that fails in a projection, or reads layers a token has not passed."""
    with pytest.raises(ValueError, match=complaint) as caught:
        HeadConfig.parse(RAW | change).check_target(tiny_target("llama").config)
    assert "\n" not in str(caught.value)


def test_foreign_files_are_named(tmp_path):
    """Guards against a KeyError for a file without lists, and a head of one version with weights of the other."""
    with pytest.raises(ValueError, match="lacks shallow_hidden_layer_indices"):
        HeadConfig.parse({key: value for key, value in RAW.items() if key != "shallow_hidden_layer_indices"})
    target = tiny_target("llama")
    old, new = head_of(target, 2), tiny_head(target, (2, 2))
    torch.save({"state_dict": new.state_dict(), "config": old.config.to_dict()}, tmp_path / "mixed.pt")
    assert read_checkpoint(tmp_path / "mixed.pt")[0].version == 10
    with pytest.raises(ValueError, match=r"mixed.*lacks weight fixed_stage_per_layer_projs"):
        load_head(tmp_path / "mixed.pt", target)
