"""The model file: splits, anchors and depth types, head configuration and checkpoints, loading, stages, the head."""

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import GPT2Config, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as apply_partial_rotary_pos_emb

import pipeline_model
from decoding.nodes import CachePlan
from decoding.stage import partition
from loading.checkpoint_files import CHECKPOINT_NAME
from loading.head_values import parse_stage_layers
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from pipeline_model import (
    HeadCache,
    HeadConfig,
    Target,
    auto_anchors,
    causal_mask,
    depth_types,
    grouped_attention,
    layers_available,
    load_head,
    read_checkpoint,
    representative_depths,
    rotate,
    save_head,
    split_layers,
)
from tests.tiny import (
    FAMILIES,
    VOCAB,
    hf_greedy,
    layer_outputs,
    random_prompt,
    save_target,
    spd_decoder,
    tiny_head,
    tiny_model,
    tiny_target,
)
from timeline import Timeline

CPU = torch.device("cpu")
EVERY_SPLIT = [(layers, stages) for layers in range(2, 65) for stages in range(1, layers + 1)]


# ---------------------------------------------------------------------------------------------------------------------
# Splits, anchors, depth types
# ---------------------------------------------------------------------------------------------------------------------


def test_even_split_covers_every_layer_once():
    """Guards against a lost or doubled layer, and a remainder that lands on the last stage."""
    for layers, stages in EVERY_SPLIT:
        sizes = split_layers(layers, stages)
        assert len(sizes) == stages
        assert sum(sizes) == layers
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)
    assert split_layers(10, 4) == (3, 3, 2, 2)


def test_stated_split_is_used_as_it_is():
    """Guards against a stated split that is reordered or replaced by the even one."""
    assert split_layers(7, 3, [1, 4, 2]) == (1, 4, 2)
    assert layers_available((1, 4, 2)) == (0, 1, 5, 7)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((4, 5), "num_stages is 5, but the target has 4 layers"),
        ((4, 0), "num_stages is 0"),
        ((4, 2, (1, 1, 2)), "3 entries, but num_stages is 2"),
        ((4, 2, (4, 0)), "4;0"),
        ((4, 2, (5, -1)), "5;-1"),
        ((4, 2, (2, 3)), "sums to 5, but the target has 4"),
    ],
)
def test_impossible_splits_are_refused(arguments, complaint):
    """Guards against a split that silently runs some layers twice or never; the message has the numbers."""
    with pytest.raises(ValueError, match=complaint):
        split_layers(*arguments)


def random_split(layers, stages, rng):
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    return tuple(b - a for a, b in pairwise(cuts))


def test_auto_anchors_have_no_dead_type():
    """Guards against the published rule's faults for few stages: anchors past L, repeated, or never reached."""
    rng = random.Random(0)
    for layers, stages in EVERY_SPLIT:
        for sizes in (split_layers(layers, stages), random_split(layers, stages, rng)):
            anchors = auto_anchors(sizes)
            assert anchors[0] == 0
            assert anchors[-1] <= layers
            assert all(a < b for a, b in pairwise(anchors))
            assert None not in representative_depths(anchors, sizes), sizes


def test_auto_anchors_are_the_published_ones_for_many_stages():
    """Guards against another list than the published {0, l, 3l, 6l, L-1} where that one works."""
    checked = 0
    for layers, stages in EVERY_SPLIT:
        if stages >= 7 and layers % stages == 0:
            size = layers // stages
            expected = sorted({0, size, 3 * size, 6 * size, layers - 1})
            assert list(auto_anchors(split_layers(layers, stages))) == expected
            checked += 1
    assert checked > 100


def types_by_counting(anchors, sizes):
    """f(d), one depth at a time: run through the layers of the first d stages and note the last anchor passed."""
    types = []
    for depth in range(len(sizes) + 1):
        layers_run = sum(sizes[:depth])
        kind = 0
        for k in range(len(anchors)):
            if anchors[k] <= layers_run:
                kind = k
        types.append(kind)
    return types


def test_depth_types_follow_the_plain_loop():
    """Guards against an off-by-one between depth and layers, on even and uneven splits and on any anchor list."""
    rng = random.Random(1)
    for layers, stages in EVERY_SPLIT[::7]:
        sizes = random_split(layers, stages, rng)
        for anchors in (auto_anchors(sizes), (0, *sorted(rng.sample(range(1, layers + 1), min(3, layers))))):
            expected = types_by_counting(anchors, sizes)
            assert list(depth_types(anchors, sizes)) == expected
            for kind, depth in enumerate(representative_depths(anchors, sizes)):
                reached = [d for d, k in enumerate(expected) if k == kind]
                assert depth == (reached[0] if reached else None)


def test_dead_type_of_the_worked_example():
    """Guards against giving a depth to a type that none has: 29 of the list 0,5,15,29,30 at L = 30, n = 6."""
    anchors, sizes = (0, 5, 15, 29, 30), split_layers(30, 6)
    assert depth_types(anchors, sizes) == (0, 1, 1, 2, 2, 2, 4)
    assert representative_depths(anchors, sizes) == (0, 1, 3, None, 6)


def test_head_with_a_dead_type_loads_and_decodes(tmp_path):
    """Guards against refusing, or tripping over, the published lists that contain a dead type."""
    target = tiny_target("llama")
    anchors = (0, 2, 3, 4)
    assert None in representative_depths(anchors, (2, 2))
    save_head(tiny_head(target, (2, 2), aggr_feature_bound=anchors), tmp_path / "head.pt")
    head = load_head(tmp_path / "head.pt", target)
    prompt = random_prompt(5)
    assert spd_decoder(target, head).generate(prompt, 8).tokens == hf_greedy(tiny_model("llama"), prompt, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Head configuration
# ---------------------------------------------------------------------------------------------------------------------

RAW = {
    "version": 11,
    "hidden_size": 32,
    "vocab_size": VOCAB,
    "num_stages": 2,
    "num_spec_layers": 1,
    "aggr_feature_bound": [0, 2, 3],
    "num_aggr_types": 3,
    "draft_vocab_size": VOCAB,
}
FULL = RAW | {
    "version": 12,
    "stage_layers": [1, 3],
    "draft_vocab_size": 3,
    "draft_token_ids": [0, 7, 60],
    "trained_with_use_deepest": True,
    "spec_intermediate_size_fallback": 48,
    "spec_init_from_base_layers": [0, 3],
    "trained_num_stages": [1, 2],
    "base_model_path": "some/model",
    "model_type": "llama",
}


@pytest.mark.parametrize("raw", [RAW, FULL], ids=["v11", "v12"])
def test_config_round_trip(raw):
    """Guards against a field that is lost or changed on its way through a checkpoint."""
    config = HeadConfig.parse(raw)
    stored = config.to_dict()
    assert raw.items() <= stored.items()
    assert HeadConfig.parse(stored) == config


def test_config_leaves_out_what_is_not_used():
    """Guards against empty optional entries, which other readers of the format would take for settings."""
    optional = {"model_type", "spec_init_from_base_layers", "draft_token_ids", "stage_layers", "trained_num_stages"}
    assert not optional & HeadConfig.parse(RAW).to_dict().keys()


def test_config_defaults_of_old_checkpoints():
    """Guards against reading a missing entry as something else than the format says."""
    config = HeadConfig.parse({key: value for key, value in RAW.items() if not key.startswith(("draft", "num_aggr"))})
    assert config.draft_vocab_size == VOCAB
    assert config.trained_with_use_deepest is False
    assert config.stage_layers is None
    assert config.split(5) == (3, 2)


@pytest.mark.parametrize("written", ["1;3", "1,3", " 1 ; 3 ", [1, 3], (1, 3)])
def test_stage_layers_are_read_from_text_and_lists(written):
    """Guards against one of the two ways in which checkpoints and flags write an uneven split."""
    assert parse_stage_layers(written) == (1, 3)
    assert HeadConfig.parse(RAW | {"version": 12, "stage_layers": written}).split(4) == (1, 3)


def test_draft_ids_are_read_from_a_tensor():
    """Guards against refusing, or keeping as it is, the tensor that some checkpoints store."""
    config = HeadConfig.parse(FULL | {"draft_token_ids": torch.tensor([0, 7, 60])})
    assert config.draft_token_ids == (0, 7, 60)


WRONG = [
    *[("version", version, repr(version)) for version in (9, 13, "10", "11", None)],
    ("hidden_size", 0, "hidden_size is 0"),
    ("hidden_size", 32.0, "hidden_size is 32.0"),
    ("vocab_size", -1, "vocab_size is -1"),
    ("num_stages", 0, "num_stages is 0"),
    ("num_stages", True, "num_stages is True"),
    ("num_spec_layers", "2", "num_spec_layers is '2'"),
    ("spec_intermediate_size_fallback", 0, "fallback is 0"),
    ("num_aggr_types", 4, "num_aggr_types is 4, but aggr_feature_bound lists 3"),
    ("aggr_feature_bound", [], r"aggr_feature_bound is \[\]"),
    ("aggr_feature_bound", "0,2,3", "aggr_feature_bound is '0,2,3'"),
    ("aggr_feature_bound", [1, 2, 3], r"\[1, 2, 3\]: it must start with 0"),
    ("aggr_feature_bound", [0, 3, 3], r"\[0, 3, 3\]: it must start with 0 and rise strictly"),
    ("aggr_feature_bound", [0, 2, "x"], "'x'"),
    ("draft_vocab_size", VOCAB + 1, f"draft_vocab_size is {VOCAB + 1}"),
    ("draft_vocab_size", 3, "draft_token_ids is missing"),
    ("draft_token_ids", [1, 2], f"has 2 entries, but draft_vocab_size is {VOCAB}"),
    ("draft_token_ids", [0, *range(VOCAB - 1)], "draft_token_ids must rise strictly"),
    ("draft_token_ids", list(range(1, VOCAB + 1)), f"from 1 to {VOCAB}, outside 0 .. {VOCAB - 1}"),
    ("draft_token_ids", list(range(-1, VOCAB - 1)), "entry of draft_token_ids is -1"),
    ("trained_num_stages", [1, 4], r"trained_num_stages is \[1, 4\]: its largest entry must be num_stages, 2"),
    ("trained_num_stages", [0, 2], "an entry of trained_num_stages is 0"),
    ("stage_layers", "2;x", "stage_layers is '2;x'"),
    ("stage_layers", [2, None], "stage_layers is"),
]


@pytest.mark.parametrize(("key", "value", "complaint"), WRONG, ids=str)
def test_wrong_config_values_are_named(key, value, complaint):
    """Guards against a wrong checkpoint that is taken, or fails later in a place that says nothing of it."""
    with pytest.raises(ValueError, match=complaint):
        HeadConfig.parse(RAW | {key: value})


WRONG_TYPE = [
    ("draft_token_ids", 5),
    ("draft_token_ids", [float(token) for token in range(VOCAB)]),
    ("stage_layers", 4),
    ("stage_layers", [1.5, 2.5]),
    ("trained_num_stages", 5),
    ("spec_init_from_base_layers", 5),
]


@pytest.mark.parametrize(("key", "value"), WRONG_TYPE, ids=lambda value: str(value)[:20])
def test_config_values_of_a_wrong_type_are_named(key, value):
    """Guards against a TypeError from a foreign checkpoint, and against fractions that are cut to whole numbers."""
    with pytest.raises(ValueError, match=key):
        HeadConfig.parse(RAW | {key: value})


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_stages", "num_spec_layers", "aggr_feature_bound"])
def test_missing_config_entries_are_named(key):
    """Guards against a KeyError for a checkpoint that lacks an entry."""
    with pytest.raises(ValueError, match=f"lacks {key}"):
        HeadConfig.parse({k: v for k, v in RAW.items() if k != key})


def test_split_for_one_of_several_trained_numbers_of_stages():
    """Guards against decoding with a number of stages that the head was not trained for."""
    config = HeadConfig.parse(RAW | {"num_stages": 4, "trained_num_stages": [2, 4]})
    assert config.split(10) == config.split(10, 4) == (3, 3, 2, 2)
    assert config.split(10, 2) == (5, 5)
    with pytest.raises(ValueError, match="num_stages is 3, but the head was trained for 2, 4"):
        config.split(10, 3)
    with pytest.raises(ValueError, match="num_stages is 1, but the head was trained for 2"):
        HeadConfig.parse(RAW).split(10, 1)


def test_version_12_needs_its_split():
    """Guards against decoding an uneven head with an even split."""
    with pytest.raises(ValueError, match="version is 12, but stage_layers is missing"):
        HeadConfig.parse(RAW | {"version": 12})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": 64}, "hidden_size 64.*hidden_size 32"),
        ({"vocab_size": 62, "draft_vocab_size": 62}, "vocab_size 62.*vocab_size 61"),
        ({"model_type": "qwen3"}, "model_type qwen3.*model_type llama"),
        ({"num_stages": 5}, "num_stages is 5, but the target has 4 layers"),
        ({"stage_layers": (1, 2)}, "sums to 3, but the target has 4"),
        ({"aggr_feature_bound": (0, 5)}, "ends at layer 5, but the target has 4"),
    ],
)
def test_head_of_another_target_is_refused(change, complaint):
    """Guards against a head that runs on a target it was not made for."""
    config = FAMILIES["llama"](num_hidden_layers=4)
    head = HeadConfig.parse(RAW)
    head.check_target(config)
    with pytest.raises(ValueError, match=complaint):
        replace(head, **change).check_target(config)


def test_model_type_of_the_whole_and_of_the_text_part_are_the_same():
    """Guards against refusing a head that stores `qwen3_5` on a target that calls its text part `qwen3_5_text`."""
    config = FAMILIES["qwen3_5"](num_hidden_layers=4)
    for name in ("qwen3_5", "qwen3_5_text", None):
        replace(HeadConfig.parse(RAW), model_type=name).check_target(config)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoint files
# ---------------------------------------------------------------------------------------------------------------------


def expected_weights(spec_layers, anchors, draft_vocab, gated):
    """method.md section 8, for H = 32, 4 heads of 8, 2 key heads, MLP 48."""
    shapes = {f"aggr_projs.{k}.weight": (32, (k + 1) * 32) for k in range(len(anchors))}
    shapes["lm_head.weight"] = (draft_vocab, 32)
    layer = {
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
        "self_attn.q_proj": (64 if gated else 32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "self_attn.q_norm": (8,),
        "self_attn.k_norm": (8,),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    for index in range(spec_layers):
        shapes |= {f"spec_layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_checkpoint_round_trip(family, tmp_path):
    """Guards against other key names or shapes than published files have, and weights that change on the way."""
    target = tiny_target(family)
    head = tiny_head(target, (1, 3), draft_vocab=20, model_type=family)
    save_head(head, tmp_path / CHECKPOINT_NAME)
    payload = torch.load(tmp_path / CHECKPOINT_NAME, weights_only=True)
    assert payload.keys() == {"state_dict", "config"}
    assert payload["config"] == head.config.to_dict()
    found = {name: tuple(tensor.shape) for name, tensor in payload["state_dict"].items()}
    assert found == expected_weights(2, head.config.aggr_feature_bound, 20, gated=family.startswith("qwen3_5"))

    for path in (tmp_path, tmp_path / CHECKPOINT_NAME):  # the folder works too
        loaded = load_head(path, target)
        assert loaded.config == head.config
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), head.parameters(), strict=True))
        assert not any(weight.requires_grad for weight in loaded.parameters())
        assert not loaded.training


@pytest.fixture
def saved(tmp_path):
    """A target, and the contents of a good checkpoint for it."""
    target = tiny_target("llama")
    save_head(tiny_head(target, (2, 2)), tmp_path / "good.pt")
    return target, torch.load(tmp_path / "good.pt", weights_only=True)


def test_wrong_weights_are_named(saved, tmp_path):
    """Guards against a head that loads with weights left random, ignored or broadcast."""
    target, payload = saved
    path, name = tmp_path / "bad.pt", "spec_layers.1.self_attn.q_proj.weight"
    weights = payload["state_dict"]
    lacking = {key: value for key, value in weights.items() if key != name}
    for state, complaint in [
        (lacking, f"lacks weight {name}"),
        (weights | {"spec_layers.2.extra": torch.zeros(1)}, "unexpected weight spec_layers.2.extra"),
        (weights | {name: torch.zeros(32, 33)}, rf"{name} has shape \[32, 33\].*need \[32, 32\]"),
    ]:
        torch.save(payload | {"state_dict": state}, path)
        with pytest.raises(ValueError, match=complaint):
            load_head(path, target)


class RunsCode:
    """A pickle that writes a file when it is opened without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_files_that_are_no_checkpoint_are_refused(saved, tmp_path):
    """Guards against a traceback, and against running the code that a pickle can carry."""
    _, payload = saved
    good = (tmp_path / "good.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(good[: len(good) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"state_dict": {}}, tmp_path / "half.pt")
    torch.save(payload | {"state_dict": RunsCode(tmp_path / "ran")}, tmp_path / "code.pt")
    for name in ("cut", "empty", "text", "list", "half", "code", "missing"):
        with pytest.raises(ValueError, match=f"{name}.pt") as caught:
            read_checkpoint(tmp_path / f"{name}.pt")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match=f"no head checkpoint at .*{CHECKPOINT_NAME}"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("change", [{"config": None}, {"config": [1]}, {"state_dict": [1]}], ids=str)
def test_checkpoints_of_a_wrong_shape_are_refused(saved, tmp_path, change):
    """Guards against a traceback for a file that has the two entries, but not as mappings."""
    target, payload = saved
    torch.save(payload | change, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=r"bad\.pt"):
        load_head(tmp_path / "bad.pt", target)


def test_wrong_config_names_the_file(saved, tmp_path):
    """Guards against an error that leaves open which of several checkpoints is wrong."""
    target, payload = saved
    for change, complaint in [({"version": 9}, "bad.pt': .*version is 9"), ({"hidden_size": 64}, "bad.pt': .*64")]:
        torch.save(payload | {"config": payload["config"] | change}, tmp_path / "bad.pt")
        with pytest.raises(ValueError, match=complaint):
            load_head(tmp_path / "bad.pt", target)


def test_failed_save_keeps_the_old_checkpoint(saved, tmp_path, monkeypatch):
    """Guards against half a checkpoint, or temporary files, after a full disk or a kill."""
    target, _ = saved
    before = (tmp_path / "good.pt").read_bytes()

    def fails_midway(payload, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pipeline_model.torch, "save", fails_midway)
    with pytest.raises(OSError, match="disk full"):
        save_head(tiny_head(target, (2, 2)), tmp_path / "good.pt")
    assert os.listdir(tmp_path) == ["good.pt"]
    assert (tmp_path / "good.pt").read_bytes() == before


# ---------------------------------------------------------------------------------------------------------------------
# Loading a target
# ---------------------------------------------------------------------------------------------------------------------


def test_target_loads_as_it_was_saved(tmp_path):
    """Guards against a loader that changes weights, dtype or end tokens."""
    model = save_target(tmp_path, generation_fields={"eos_token_id": [3, 5]})
    target = Target.load(str(tmp_path))
    assert target.dtype == torch.float32
    assert target.eos_token_ids == (3, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), target.model.parameters(), strict=True))
    assert Target.load(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens_of_the_target(eos, expected):
    """Guards against end tokens that are missed because they stand in the other of the two places."""
    assert tiny_target("llama", eos_token_id=eos).eos_token_ids == expected


def test_text_part_of_a_multimodal_target_is_loaded(tmp_path):
    """Guards against refusing Qwen3.5 as it is published: the text model inside a vision-language one."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    special = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    text = FAMILIES["qwen3_5"](num_hidden_layers=4).to_dict()
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **special))
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    assert target.config.model_type == "qwen3_5_text"
    expected = model.model.language_model.layers.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in target.layers.state_dict().items())


def test_unsupported_targets_are_refused_by_name(tmp_path):
    """Guards against a target that the stages would run wrongly: other architectures, moving rotary."""
    GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model type 'gpt2' is not supported.*llama, mistral"):
        Target.load(str(tmp_path))
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type 'dynamic' is not supported"):
        tiny_target("llama", rope_parameters=rope)


def test_missing_targets_are_refused(tmp_path):
    """Guards against a traceback for a mistyped path, an empty folder, and a folder without weights."""
    with pytest.raises(ValueError, match="no target model at '/nowhere/at/all'"):
        Target.load("/nowhere/at/all")
    with pytest.raises(ValueError, match=str(tmp_path)):
        Target.load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ValueError, match=r"no target model at.*`unheard_of`"):
        Target.load(str(tmp_path))
    save_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no target model at.*model\.safetensors"):
        Target.load(str(tmp_path))


def test_truncated_weights_are_refused(tmp_path):
    """Guards against a traceback for a download that was cut off."""
    save_target(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=str(tmp_path)):
        Target.load(str(tmp_path))


def test_wrapped_model_still_generates():
    """Guards against an attention function that breaks the library's own batches, padded ones included."""
    plain, wrapped = tiny_model("llama"), tiny_target("llama").model
    ids = torch.tensor([random_prompt(6, seed=1), [0, 0, *random_prompt(4, seed=2)]])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.generate(ids, **settings), wrapped.generate(ids, **settings))


# ---------------------------------------------------------------------------------------------------------------------
# Stages
# ---------------------------------------------------------------------------------------------------------------------


def prefill(executor, prompt):
    plan = CachePlan(len(prompt), 2, tree=False)
    with torch.inference_mode():
        return executor.start(prompt, 0, plan, Timeline(CPU))


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_whole_model_computes(family):
    """Guards against a wrong cut, and against anchors taken at another layer or after the final norm."""
    target, plain = tiny_target(family), tiny_model(family)
    for length in (1, 2, 9):
        prompt = random_prompt(length)
        expected_states = layer_outputs(plain, prompt)
        with torch.no_grad():
            whole = plain(torch.tensor([prompt]), output_hidden_states=True)
        for sizes in [(4,), (2, 2), (1, 3), (3, 1), (1, 1, 1, 1)]:
            output = prefill(LocalExecutor(target, sizes, range(5)), prompt)
            torch.testing.assert_close(output.logits, whole.logits[0, -1], atol=1e-5, rtol=1e-5)
            for layer, expected in enumerate(expected_states):
                torch.testing.assert_close(output.features[:, layer], expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(whole.hidden_states[4][0], expected_states[4], atol=1e-2)  # that one is normalised


def test_stage_captures_only_its_own_anchors():
    """Guards against anchors that two stages capture, or none: one at a boundary belongs to the stage before it."""
    stages = partition(tiny_target("llama"), (1, 2, 1))
    for stage in stages:
        stage.start(CachePlan(slots=4, nodes=2, tree=False), root=0, anchors=(0, 1, 2, 4))
    assert [sorted(stage.anchors) for stage in stages] == [[1], [2], [4]]


@pytest.mark.parametrize("family", ["llama", "qwen3 window", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_chunked_prefill_is_the_whole_prefill(family, chunk, monkeypatch):
    """Guards against chunks that forget the tokens before them: attention, convolution and recurrent state."""
    target = tiny_target(family)
    whole, chunked = LocalExecutor(target, (2, 2), (0, 2, 4)), LocalExecutor(target, (2, 2), (0, 2, 4))
    prompt = random_prompt(10)
    expected = prefill(whole, prompt)
    monkeypatch.setattr(chunked, "PREFILL_CHUNK", chunk, raising=False)
    output = prefill(chunked, prompt)
    close = {"atol": 5e-4, "rtol": 1e-3}  # states are about 10; the library has two algorithms for linear attention
    torch.testing.assert_close(output, expected, **close)
    for ours, theirs in zip(chunked.stages, whole.stages, strict=True):
        torch.testing.assert_close(ours.cache.tensors(), theirs.cache.tensors(), **close)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_eager_attention_gives_the_same_tokens(family):
    """Guards against masks that only one of the attention implementations understands."""
    prompt = random_prompt(7)
    expected = hf_greedy(tiny_model(family), prompt, 12)
    target = tiny_target(family, attention="eager")
    assert target.config._attn_implementation == "eager"
    head = tiny_head(target, (1, 1, 2))
    for width in (1, 4):
        assert spd_decoder(target, head, draft_top_k=width).generate(prompt, 12).tokens == expected


# ---------------------------------------------------------------------------------------------------------------------
# The speculation head
# ---------------------------------------------------------------------------------------------------------------------


def head_inputs(family, rows=6):
    target = tiny_target(family)
    head = tiny_head(target, (2, 2))
    states = torch.randn(1, rows, 32, generator=torch.Generator().manual_seed(3))
    cos, sin = target.rope(rows)
    return target, head, states, (cos[:, :rows], sin[:, :rows])


def run_rows(head, rows, rope, at, **kwargs):
    """forward_rows of the rows `at`, all cached afterwards."""
    cache = kwargs.pop("cache")
    with torch.no_grad():
        output = head.forward_rows(rows[:, at], (rope[0][:, at], rope[1][:, at]), cache, **kwargs)
    cache.length += rows[:, at].shape[1]
    return output


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_head_layers_are_the_library_layers(family):
    """Guards against a decoder layer that was taken apart and put together differently: gate, norms, residuals."""
    _, head, rows, rope = head_inputs(family)
    split = run_rows(head, rows, rope, slice(None), cache=HeadCache(head, 6), outputs=6)
    whole = rows
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~causal_mask(6, 0, CPU), -torch.inf)
    with torch.no_grad():
        for layer in head.spec_layers:
            whole = layer(whole, attention_mask=mask, position_embeddings=rope)
    torch.testing.assert_close(split, whole[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_head_row_by_row_is_one_causal_pass(family):
    """Guards against a cache that loses or misplaces rows."""
    _, head, rows, rope = head_inputs(family)
    whole = run_rows(head, rows, rope, slice(None), cache=HeadCache(head, 6), outputs=6)
    for step in (1, 2, 4):
        cache = HeadCache(head, 6)
        parts = [
            run_rows(head, rows, rope, slice(at, at + step), cache=cache, outputs=min(step, 6 - at))
            for at in range(0, 6, step)
        ]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "tree"])
def test_last_layer_computes_only_what_is_asked(masked):
    """Guards against the shortcut of the last layer taking the wrong rows, positions or mask rows."""
    _, head, rows, rope = head_inputs("qwen3_5")
    mask = None
    if masked:  # rows 2 .. 5 are two chains of two after rows 0 and 1
        mask = causal_mask(6, 0, CPU)
        mask[3, 2] = mask[4, 3] = mask[5, 2] = mask[5, 4] = False
    every = run_rows(head, rows, rope, slice(None), cache=HeadCache(head, 6), mask=mask, outputs=6)
    for outputs in range(6):
        cache = HeadCache(head, 6)
        asked = run_rows(head, rows, rope, slice(None), cache=cache, mask=mask, outputs=outputs)
        assert asked.shape == (outputs, 32)
        torch.testing.assert_close(asked, every[6 - outputs :], atol=1e-5, rtol=1e-5)


def test_rows_do_not_stay_unless_they_are_kept():
    """Guards against in-flight rows that linger in the head's cache: `length` alone says what stays."""
    _, head, rows, rope = head_inputs("llama")
    cache = HeadCache(head, 6)
    run_rows(head, rows, rope, slice(0, 3), cache=cache)
    expected = run_rows(head, rows, rope, slice(3, 4), cache=cache, outputs=1)
    cache.length = 3
    run_rows(head, rows.flip(1), rope, slice(3, 6), cache=cache)
    cache.length = 3
    torch.testing.assert_close(run_rows(head, rows, rope, slice(3, 4), cache=cache, outputs=1), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_attention_against_plain_loops(masked):
    """Guards against query heads that read another group's keys, and mask rows that are repeated in wrong order."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(1, 4, 3, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, 7, 8, generator=generator)
    mask = torch.rand(3, 7, generator=generator) < 0.6 if masked else torch.ones(3, 7, dtype=torch.bool)
    mask[:, 0] = True
    expected = torch.empty(1, 4, 3, 8)
    for head in range(4):
        for row in range(3):
            seen = mask[row].nonzero()[:, 0]
            scores = key[0, head // 2, seen] @ query[0, head, row] * 0.3
            expected[0, head, row] = scores.softmax(0) @ value[0, head // 2, seen]
    output = grouped_attention(query, key, value, mask if masked else None, 0.3)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("offset", [0, 9])
def test_a_prompt_attends_in_blocks_as_at_once(offset, monkeypatch):
    """Guards against a block that misses its own keys, or the prompt's rows in another order."""
    module = tiny_target("llama").layers[0].self_attn
    heads, groups, width = 4, module.num_key_value_groups, module.head_dim
    query = torch.randn(1, heads, 11, width)
    key, value = torch.randn(2, 1, heads // groups, offset + 11, width)
    mask = causal_mask(11, offset, CPU)[None, None]
    whole, _ = pipeline_model._nodes_attention(module, query, key, value, mask, 0.3)
    monkeypatch.setattr(pipeline_model, "PROMPT_BLOCK", 4)
    blocks, _ = pipeline_model._nodes_attention(module, query, key, value, mask, 0.3)
    torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("use_deepest", [True, False])
def test_the_head_takes_a_prompt_in_parts(use_deepest, monkeypatch):
    """Guards against a long prompt whose parts do not see each other, or stand at other positions."""
    target = tiny_target("llama")
    head, sizes, drafts = tiny_head(target, (1, 2, 1)), (1, 2, 1), []
    for chunk in (100, 4):
        monkeypatch.setattr(SPDDrafter, "PREFILL_CHUNK", chunk)
        drafter = SPDDrafter(head, target, sizes, use_deepest)
        Decoder(LocalExecutor(target, sizes, head.config.anchors), drafter).start(random_prompt(13), 3)._prefill()
        drafts.append((drafter._cache.length, drafter._cache._keys, drafter._cache._values))
    torch.testing.assert_close(drafts[1], drafts[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "reference"), [("llama", apply_rotary_pos_emb), ("qwen3_5", apply_partial_rotary_pos_emb)]
)
def test_rotate_is_the_library_rotation(family, reference):
    """Guards against a rotation that differs from the target's, in full or over a part of the width."""
    rope = tuple(table[:, 3:9] for table in tiny_target(family).rope(9))
    assert rope[0].shape[-1] == (8 if family == "llama" else 4)
    query, key = torch.randn(2, 1, 4, 6, 8, generator=torch.Generator().manual_seed(5))
    for ours, theirs in zip((rotate(query, rope), rotate(key, rope)), reference(query, key, *rope), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rope_table_grows_without_changing():
    """Guards against positions past the first table, or a second table that is built for other positions."""
    target = tiny_target("llama")
    first = [table[:, :5].clone() for table in target.rope(5)]
    longer = target.rope(2000)
    assert longer[0].shape[1] >= 2000
    expected = target.model.model.rotary_emb(torch.zeros(1), torch.tensor([[0, 1, 2, 3, 4, 1999]]))
    for small, large, known in zip(first, longer, expected, strict=True):
        assert torch.equal(large[:, :5], small)
        torch.testing.assert_close(large[:, [0, 1, 2, 3, 4, 1999]], known)


def test_aggregation_reads_the_first_anchors():
    """Guards against g_k that reads other anchors than b_0 .. b_k, or in another order."""
    head = tiny_head(tiny_target("llama"), (1, 1, 1, 1))
    features = torch.randn(2, len(head.config.anchors), 32, generator=torch.Generator().manual_seed(6))
    for kind, projection in enumerate(head.aggr_projs):
        weight = projection.weight.view(32, kind + 1, 32)
        expected = sum(features[:, k] @ weight[:, k].T for k in range(kind + 1))
        torch.testing.assert_close(head.aggregate(kind, features), expected, atol=1e-5, rtol=1e-5)
