"""Targets whose every weight is the files', whole and in part, or a refusal that names what is wrong.

The references are logits of `transformers`' own full load, never of the loader under test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

import pipeline_inference
import train
from distributed_inference import example_mp_pipeline_generate
from distributed_inference.launch import Checked
from distributed_inference.startup import Environment, check_same
from loading.target_files import QUANTIZATIONS, target_fingerprint, tokenizer_fingerprint
from pipeline_model import Target, TargetPart, save_head
from tests.tiny import FAMILIES, VOCAB, random_prompt, save_target, tiny_head, tiny_model
from training import generate_answers

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "num_position_embeddings": 16,
}
SPECIAL = {"image_token_id": 57, "video_token_id": 58, "vision_start_token_id": 59, "vision_end_token_id": 60}
COMPOSITE = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
IDS = torch.tensor([random_prompt(9, vocab=57)])  # special ids are for images


def save_composite(folder: Path, family: str, tied: bool) -> None:
    """A vision-language model as the hub has it: bfloat16, sharded with an index, an extra layer of predictions."""
    config_class, model_class = COMPOSITE[family]
    text = FAMILIES[family](num_hidden_layers=4, tie_word_embeddings=tied).to_dict()
    set_seed(0)
    model = model_class(config_class(text_config=text, vision_config=VISION, tie_word_embeddings=tied, **SPECIAL))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    extra = {f"mtp.layers.0.mlp.{name}_proj.weight": torch.ones(48, 32) for name in ("gate", "up")}
    save_file(extra, folder / "mtp.safetensors", {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, "mtp.safetensors")
    assert len(set(index["weight_map"].values())) > 3
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def chained_logits(path: Path, parts: list[TargetPart], **settings) -> Tensor:
    """Logits of `IDS` through parts that together are the target: embedding and first rows, layers, the other rows."""
    targets = [Target.load(str(path), part=part, **settings) for part in parts]
    hidden, length = targets[0].embed(IDS), IDS.shape[1]
    for part, target in zip(parts, targets, strict=True):
        masks = target.prompt_masks(length, 0, hidden.device)
        hidden, _ = target.run_layers(part.layers, hidden, slice(0, length), masks, ())
    return torch.cat([target.logits(hidden) for part, target in zip(parts, targets, strict=True) if part.lm_head], -1)


PARTS = [
    TargetPart(range(1), True, range(20)),
    TargetPart(range(1, 3)),
    TargetPart(range(3, 4), False, range(20, VOCAB)),
]


def whole_logits(path: Path, **settings) -> Tensor:
    target = Target.load(str(path), **settings)
    return target.logits(target.forward(IDS, ())[0])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", COMPOSITE)
@torch.no_grad()
def test_composite_checkpoints_load_right_whole_and_in_parts(family, tied, tmp_path):
    """Guards against random weights: every rank of a Qwen3.5 had them, and agreed with its equally random baseline."""
    save_composite(tmp_path, family, tied)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    expected = model.eval()(input_ids=IDS).logits
    assert torch.equal(whole_logits(tmp_path), expected)
    assert torch.allclose(chained_logits(tmp_path, PARTS), expected, atol=1e-5)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in COMPOSITE])
@torch.no_grad()
def test_plain_checkpoints_load_right_whole_and_in_parts(family, tmp_path):
    """Guards against a loader that is right for composite checkpoints and no longer for the others."""
    tiny_model(family, tied=family == "qwen2").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = model.eval()(IDS).logits
    assert torch.equal(whole_logits(tmp_path), expected)
    assert torch.allclose(chained_logits(tmp_path, PARTS), expected, atol=1e-5)


@torch.no_grad()
def test_tied_flag_outside_the_text_config_only(tmp_path):
    """Guards against a random lm_head where only the outer configuration says that it is tied."""
    save_composite(tmp_path, "qwen3_5", True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    expected = model.eval()(input_ids=IDS).logits
    assert torch.equal(whole_logits(tmp_path), expected)
    assert torch.allclose(chained_logits(tmp_path, PARTS), expected, atol=1e-5)


def test_ranks_write_what_transformers_writes_from_a_composite_checkpoint(tmp_path):
    """Guards against the same fault as a user meets it: text through torchrun against `model.generate`."""
    save_composite(tmp_path, "qwen3_5", False)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz012345678"  # a token each
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    save_head(tiny_head(Target(tiny_model("qwen3_5")), (2, 2)), tmp_path / "head.pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = torch.tensor([[letters.index(letter) for letter in "hi"]])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, 2:].tolist()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    command += ["distributed_inference/example_mp_pipeline_generate.py", "--base_model_path", str(tmp_path)]
    command += [
        "--spec_head_ckpt",
        str(tmp_path / "head.pt"),
        "--rank_gpus",
        "cpu",
        "--prompt",
        "hi",
        "--no_chat_template",
    ]
    command += ["--max_new_tokens", "12", "--warmup_iters", "0"]
    root, environment = Path(__file__).parents[1], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "".join(letters[token] for token in written) in done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Files that are not the model's
# ---------------------------------------------------------------------------------------------------------------------

Q_PROJ, NORM, EXPERT = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "model.layers.2.mlp.experts."


def without(name: str) -> Callable[[dict], dict]:
    return lambda weights: {key: weight for key, weight in weights.items() if key != name}


def renamed(old: str, new: str) -> Callable[[dict], dict]:
    return lambda weights: {key.replace(old, new): weight for key, weight in weights.items()}


def reshaped(name: str, *shape: int) -> Callable[[dict], dict]:
    return lambda weights: weights | {name: torch.zeros(shape)}


def as_gptq(weights: dict) -> dict:
    """Projections as GPTQ has them, in 4 bits, without a word in config.json."""
    found = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            found[name] = weight
            continue
        stem, (rows, columns) = name.removesuffix("weight"), weight.shape
        found |= {f"{stem}qweight": torch.zeros(columns // 8, rows, dtype=torch.int32)}
        found |= {f"{stem}scales": torch.ones(1, rows)}
    return found


def as_fp8(weights: dict) -> dict:
    """Projections in 8 bits with a scale each, as FP8 checkpoints have them."""
    found = dict(weights)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().max() / 448
            found |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
    return found


FAULTS = {
    "missing": ("llama", without(Q_PROJ), {}, f"lacks weight {Q_PROJ}:"),
    "missing norm": ("llama", without(NORM), {}, f"lacks weight {NORM}:"),
    "missing lm_head": ("llama", without("lm_head.weight"), {}, "lacks weight lm_head.weight:"),
    "unexpected": ("llama", lambda w: w | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}, {}, "q_proj.bias"),
    "misnamed": (
        "llama",
        renamed("layers.1.self_attn.q_proj", "layers.1.self_attn.query"),
        {},
        f"lacks weight {Q_PROJ}",
    ),
    "foreign prefix": ("llama", renamed("model.", "module.model."), {}, "has weight module.model."),
    "shape": ("llama", reshaped(Q_PROJ, 40, 32), {}, r"q_proj.weight of shape \[40, 32\] where \[32, 32\] is needed"),
    "vocabulary": (
        "llama",
        reshaped("lm_head.weight", 66, 32),
        {},
        r"lm_head.weight of shape \[66, 32\] where \[61, 32\]",
    ),
    "more layers": ("llama", dict, {"num_hidden_layers": 3}, r"has weight model.layers.3.\S+, .* and 6 more too many"),
    "fewer layers": ("llama", dict, {"num_hidden_layers": 5}, r"lacks weight model.layers.4.\S+, .* and 6 more"),
    "gptq": ("llama", as_gptq, {}, "qweight.* lacks the quantization_config"),
    "fp8": ("llama", as_fp8, {}, "as F8_E4M3: its config.json lacks the quantization_config"),
    "scales": (
        "llama",
        lambda w: w | {f"{Q_PROJ}_scale_inv": torch.ones(1, 1)},
        {},
        "_scale_inv too many: it seems to be",
    ),
    "missing expert": ("qwen3_moe", without(f"{EXPERT}1.up_proj.weight"), {}, rf"lacks weight {EXPERT}1.up_proj"),
    "expert's number": ("qwen3_moe", renamed(f"{EXPERT}1.", f"{EXPERT}7."), {}, rf"has weight {EXPERT}7.down_proj"),
    "expert's shape": ("qwen3_moe", reshaped(f"{EXPERT}1.up_proj.weight", 20, 32), {}, r"where \[24, 32\] is needed"),
    "another model": (
        "llama",
        dict,
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        "'gpt2' is not supp",
    ),
    "classifier": ("llama", renamed("lm_head", "score"), {}, "lacks weight lm_head.weight and has weight score.weight"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A plain checkpoint of each family that the faults are made in."""
    folders = {family: tmp_path_factory.mktemp(family) for family in ("llama", "qwen3_moe")}
    for family, folder in folders.items():
        save_target(folder, family)
    return folders


@pytest.mark.parametrize(("family", "change", "fields", "message"), FAULTS.values(), ids=FAULTS)
def test_files_that_are_not_the_models_are_refused_by_name(family, change, fields, message, saved, tmp_path):
    """Guards against made-up weights in silence, and a traceback for a shape, in the whole and in parts.

    The part has none of the faulty weights: what it would decode with is still not the model.
    """
    config = json.loads((saved[family] / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(change(load_file(saved[family] / "model.safetensors")), tmp_path / "model.safetensors", {"format": "pt"})
    for part in (None, TargetPart(range(0, 1))):
        with pytest.raises(ValueError, match=message) as refusal:
            Target.load(str(tmp_path), part=part)
        assert "\n" not in str(refusal.value)


def test_pickled_weights_are_looked_at_too(saved, tmp_path):
    """Guards against a missing weight in a .bin file, whose names show only when it is loaded."""
    shutil.copy(saved["llama"] / "config.json", tmp_path)
    weights = load_file(saved["llama"] / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert Target.load(str(tmp_path)).num_layers == 4
    torch.save(without(NORM)(weights), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"lacks weight {NORM}"):
        Target.load(str(tmp_path))
    with pytest.raises(ValueError, match=r"no target model at .*model\.safetensors"):
        Target.load(str(tmp_path), part=TargetPart(range(1)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match="no target model at"):
        Target.load(str(tmp_path))


def test_missing_shards_are_named(tmp_path):
    """Guards against a traceback for a download that lacks one of its files."""
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-00002-of-*.safetensors"))[0]
    shard.unlink()
    for part in (None, TargetPart(range(0, 1))):
        with pytest.raises(ValueError, match=shard.name):
            Target.load(str(tmp_path), part=part)


@pytest.mark.parametrize("name", ["config.json", "pytorch_model.bin", "notes.txt", "model.safetensors"])
def test_a_file_where_a_folder_is_meant(name, tmp_path):
    """Guards against a traceback about pickled data for a path that goes one step too far."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"{name}' is a file: give the folder that it is in, '{tmp_path}'"):
        Target.load(str(tmp_path / name))


def test_an_adapter_beside_the_model_is_refused(saved, tmp_path):
    """Guards against an adapter that is left out in silence, or applied to the whole and not to parts."""
    shutil.copytree(saved["llama"], tmp_path / "both")
    (tmp_path / "alone").mkdir()
    for folder in (tmp_path / "both", tmp_path / "alone"):
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/nothing"}')
        with pytest.raises(ValueError, match=r"has an adapter \(adapter_config.json\).*merge"):
            Target.load(str(folder))


def test_flash_attention_that_is_not_installed(saved, monkeypatch, tmp_path):
    """Guards against a traceback from train.py and training/generate_answers.py, after all data had been encoded."""
    monkeypatch.setattr("loading.target_files.is_flash_attn_2_available", lambda **_: False)
    kernels, data = ["--attn_implementation", "flash_attention_2"], ["--data_path", "/not/read.jsonl"]
    target, out = str(saved["llama"]), str(tmp_path / "out")
    commands = [
        (train, ["--model_name", target, "--num_stages", "2", "--output_dir", out, *data]),
        (generate_answers, ["--model_name", target, "--output", f"{out}.jsonl", *data]),
        (pipeline_inference, ["--base_model_path", target, "--prompt", "w1"]),
    ]
    for script, flags in commands:
        with pytest.raises(ValueError, match="pip install flash-attn, or --attn_implementation sdpa"):
            script.main(script.build_parser().parse_args([*flags, *kernels]))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# What ranks compare
# ---------------------------------------------------------------------------------------------------------------------


def test_fingerprints_tell_targets_and_tokenizers_apart(saved, tmp_path):
    """Guards against ranks with another target of the same shape: they wrote text that neither target writes."""
    ours = saved["llama"]
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(ours, copy)
    save_target(other, "llama", seed=7)
    assert target_fingerprint(str(copy)) == target_fingerprint(str(ours)) != target_fingerprint(str(other))
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (copy / "config.json").write_text(json.dumps(config))
    assert target_fingerprint(str(copy)) != target_fingerprint(str(ours))
    assert tokenizer_fingerprint(str(copy)) == tokenizer_fingerprint(str(ours))
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_fingerprint(str(copy)) != tokenizer_fingerprint(str(ours))


def test_ranks_refuse_another_target(saved, tmp_path):
    """Guards against a checksum that is made and not compared."""
    other, head = tmp_path / "other", tmp_path / "head.pt"
    save_target(other, "llama", seed=7)
    save_head(tiny_head(Target.load(str(other)), (2, 2)), head)
    facts = []
    for target in (saved["llama"], other):
        flags = ["--base_model_path", str(target), "--spec_head_ckpt", str(head), "--rank_gpus", "cpu"]
        args = example_mp_pipeline_generate.build_parser().parse_args(flags)
        facts.append(Checked(args, Environment(0, 0, 3)).facts(args))
    check_same([facts[0], facts[0]], "rank {}".format)
    with pytest.raises(ValueError, match=r"rank 1 has target checksum \w{12}, but rank 0 has \w{12}"):
        check_same(facts, "rank {}".format)


def test_fingerprints_see_changes_all_over_a_large_file(tmp_path):
    """Guards against a checksum of the first bytes, which all fine-tunings of a model share."""
    content = bytearray(os.urandom(1000) * 12_000)  # more than is hashed whole
    path, seen = tmp_path / "model.safetensors", set()
    for place in (None, 0, 5_000_000, len(content) - 20_000):
        changed = bytearray(content)
        if place is not None:
            changed[place : place + 16_000] = bytes(16_000)  # a tensor of some size, not one byte
        path.write_bytes(changed)
        seen.add(target_fingerprint(str(tmp_path)))
    assert len(seen) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Quantised targets
# ---------------------------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def save_fp8(folder: Path, saved: Path, change: Callable[[dict], dict] = dict) -> None:
    """The checkpoint `saved` in 8 bits, with the configuration that says so."""
    config = json.loads((saved / "config.json").read_text()) | {"quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(config))
    weights = change(as_fp8(load_file(saved / "model.safetensors")))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@torch.no_grad()
def test_fp8_checkpoints_load_right_whole_and_in_parts(family, saved, tmp_path):
    """Guards against weights without their scales, experts' too, in a rank of an FP8 target."""
    save_fp8(tmp_path, saved[family])
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(IDS).logits
    assert torch.equal(whole_logits(tmp_path), expected)
    assert torch.allclose(chained_logits(tmp_path, PARTS), expected, atol=1e-5)


@pytest.mark.parametrize("lost", [f"{Q_PROJ}_scale_inv", Q_PROJ])
def test_fp8_weights_without_a_scale_are_refused(lost, saved, tmp_path):
    """Guards against a weight that is multiplied by no scale, of which transformers says nothing."""
    save_fp8(tmp_path, saved["llama"], without(lost))
    for part in (None, TargetPart(range(0, 1))):
        with pytest.raises(ValueError, match=f"lacks weight {lost}"):
            Target.load(str(tmp_path), part=part)


NOT_HERE = r"cannot be loaded here: "
METHODS = [
    ({"quant_method": "gptq", "bits": 4}, None, rf"quantised \(gptq\), {NOT_HERE}.*pip install optimum"),
    ({"quant_method": "awq", "bits": 4}, None, rf"quantised \(awq\), {NOT_HERE}.*pip install gptqmodel"),
    ({"quant_method": "unheard_of"}, None, rf"quantised \(unheard_of\), {NOT_HERE}transformers does not know"),
    ({"bits": 4}, None, rf"quantised \(of no named method\), {NOT_HERE}"),
    ({"quant_method": "gptq", "bits": 4}, TargetPart(range(1)), r"is quantised \(gptq\), and ranks load parts"),
]


@pytest.mark.parametrize(("settings", "part", "message"), METHODS)
def test_quantised_checkpoints_that_cannot_be_loaded_are_refused_by_name(settings, part, message, saved, tmp_path):
    """Guards against a traceback about a package, and against a part that nobody has shown to be right."""
    if settings.get("quant_method") in ("gptq", "awq") and find_spec("gptqmodel"):
        pytest.skip("they can be loaded here")
    config = json.loads((saved["llama"] / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(saved["llama"] / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=message) as refusal:
        Target.load(str(tmp_path), part=part)
    assert "\n" not in str(refusal.value)


def test_quantization_is_refused_where_it_makes_no_sense(saved, tmp_path):
    """Guards against quantising twice, and a head that starts from the bare integers of a quantised layer."""
    save_fp8(tmp_path, saved["llama"])
    with pytest.raises(ValueError, match=r"--quantization is bnb_4bit, but the target .* is quantised already \(fp8\)"):
        Target.load(str(tmp_path), quantization="bnb_4bit")
    flags = ["--model_name", str(tmp_path), "--num_stages", "2", "--data_path", "/not/read.jsonl"]
    flags += ["--num_spec_layers", "1", "--max_length", "64", "--output_dir", str(tmp_path / "out")]
    for flag, value in (("--spec_init_from_base_layers", "1"), ("--head_init", "late_layers")):
        with pytest.raises(ValueError, match=rf"{flag}[\w ]* copies weights of the target"):
            train.main(train.build_parser().parse_args([*flags, flag, value]))


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_bitsandbytes_that_is_not_installed_is_named(saved):
    """Guards against a traceback after minutes of loading for a package that is not there."""
    with pytest.raises(ValueError, match=rf"quantised \(bnb_8bit\), {NOT_HERE}.*pip install -U bitsandbytes"):
        Target.load(str(saved["llama"]), quantization="bnb_8bit")


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@torch.no_grad()
def test_bitsandbytes_quantises_as_transformers_does(quantization, tmp_path):
    """Guards against another quantisation than asked for, and wrong parts of a checkpoint that is quantised already."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 4}
    save_target(tmp_path / "plain", "llama", **sizes)
    asked = {
        "bnb_8bit": BitsAndBytesConfig(load_in_8bit=True),
        "bnb_4bit": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        ),
    }
    settings = {"quantization_config": asked[quantization], "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **settings).eval()
    expected = model(IDS).logits
    plain = whole_logits(tmp_path / "plain", dtype=torch.bfloat16)
    assert not torch.equal(plain, expected)
    assert torch.equal(whole_logits(tmp_path / "plain", dtype=torch.bfloat16, quantization=quantization), expected)
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **settings)  # a pass repacks 4-bit weights
    fresh.save_pretrained(tmp_path / "stored")
    assert torch.equal(whole_logits(tmp_path / "stored", dtype=torch.bfloat16), expected)
    assert torch.equal(chained_logits(tmp_path / "stored", PARTS, dtype=torch.bfloat16), expected)
