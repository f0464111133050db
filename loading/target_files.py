"""The files of a target: what they must hold, and a model whose every weight comes from them.

`transformers` fills a weight that the files lack with random numbers, drops one that the model lacks, and mentions both
in its log alone. Here either is an error that names the weight, for a whole model and for a part of it.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files
from transformers.utils.import_utils import is_flash_attn_2_available
from transformers.utils.peft_utils import find_adapter_config_file

from script_utils import first_line, listed, no_loading_bar

QUANTIZATIONS = ("bnb_8bit", "bnb_4bit")
QUANTISED_PARTS = ("fp8", "bitsandbytes")  # of these a part has been seen to equal that part of the whole
QUANTISED_NAME = re.compile(r"qweight|qzeros|scale|absmax|quant_|SCB|packed")
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")  # names of a weight's scale in FP8 checkpoints
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("chat_template*",)
QUIETLY = {  # of `cached_file`: None for a file that is not there
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}
# What a fingerprint reads of a file: its start, where safetensors lists the tensors, and blocks all over the rest.
START, BLOCK, BLOCKS = 2**20, 4096, 1024


def no_target(path: str, error: Exception) -> ValueError:
    return ValueError(
        f"no target model at {path!r} ({first_line(error)}): "
        "give a folder with config.json and safetensors, or a hub id"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------------------


def read_text_config(path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a target's language model, in a local folder or under a hub id.

    It has what a composite checkpoint, such as Qwen3.5's, states outside of it: tied embeddings and quantisation.
    ValueError for a file, for an adapter, and where there is no model.
    """
    if Path(path).is_file():
        raise ValueError(f"the target {path!r} is a file: give the folder that it is in, {str(Path(path).parent)!r}")
    try:
        if find_adapter_config_file(path) is not None:
            raise ValueError(
                f"the target {path!r} has an adapter (adapter_config.json), which would be left out: merge it into the "
                "model with peft's merge_and_unload and give that folder, or move it elsewhere"
            )
        outer = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if "adapter_config.json" in str(error):
            raise
        raise no_target(path, error) from None
    config = outer.get_text_config()
    if config is not outer:
        config.tie_word_embeddings |= getattr(outer, "tie_word_embeddings", False)
        if getattr(outer, "quantization_config", None) is not None:
            config.quantization_config = outer.quantization_config
    return config


def causal_class(path: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The model class of `transformers` for a configuration. ValueError for one that came with code of its own."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"the target {path!r} brings model code of its own ({type(config).__name__}), which cannot be cut into "
            "stages: only models of transformers can"
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def check_attention_kernels(attn_implementation: str) -> None:
    """ValueError for attention kernels that are not installed, long before anything is loaded."""
    if attn_implementation == "flash_attention_2" and not is_flash_attn_2_available(kernels_fallback_ok=True):
        raise ValueError(
            "--attn_implementation flash_attention_2 needs a CUDA GPU and the package flash-attn: "
            "pip install flash-attn, or --attn_implementation sdpa"
        )


def check_compiled(compiled: bool, config: PreTrainedConfig, quantization: str | None, device: torch.device) -> None:
    """ValueError for --compile where it cannot work, long before anything is loaded.

    quantization: as for `check_quantization`. What only compiling itself can show is `NotCompiled`.
    """
    method = quantization or quantization_of(config)
    if compiled and method is not None:
        raise ValueError(f"--compile cannot compile quantised weights ({method}): leave it out, or take the original")
    if compiled and device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ValueError(
                "--compile needs a C++ compiler on a CPU, and none is found: install g++, or leave it out"
            ) from None


# ---------------------------------------------------------------------------------------------------------------------
# Quantisation
# ---------------------------------------------------------------------------------------------------------------------


def quantization_of(config: PreTrainedConfig) -> str | None:
    """How a checkpoint is quantised, as its config.json names it; None where it is not."""
    stored = getattr(config, "quantization_config", None)
    return None if stored is None else str(stored.get("quant_method") or "of no named method")


def bitsandbytes_config(quantization: str, dtype: torch.dtype = torch.float32) -> BitsAndBytesConfig:
    """The settings behind `--quantization`: 8-bit integers, or 4-bit normal floats that are multiplied in `dtype`."""
    if quantization == "bnb_8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def check_quantization(path: str, config: PreTrainedConfig, quantization: str | None, in_parts: bool) -> None:
    """ValueError, before anything is loaded, for a quantisation that cannot be loaded on this machine.

    quantization: one of `QUANTIZATIONS`, to be done while loading, or None. in_parts: whether ranks load parts of it.
    """
    stored = quantization_of(config)
    if stored is not None and quantization is not None:
        raise ValueError(f"--quantization is {quantization}, but the target {path!r} is quantised already ({stored})")
    if in_parts and stored not in (None, *QUANTISED_PARTS):
        raise ValueError(
            f"the target {path!r} is quantised ({stored}), and ranks load parts, which is known to be right for "
            f"{' and '.join(QUANTISED_PARTS)} only: decode it in one process, or give the ranks the original"
        )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it comments on every product
    try:
        if quantization is not None:
            quantizer = AutoHfQuantizer.from_config(bitsandbytes_config(quantization), pre_quantized=False)
        elif stored is None:
            return
        elif AutoHfQuantizer.supports_quant_method(config.quantization_config):
            quantizer = AutoHfQuantizer.from_config(deepcopy(config.quantization_config), pre_quantized=True)
        else:
            raise ValueError("transformers does not know this method")
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # every method has its own way to say what it lacks
        raise cannot_quantise(path, quantization or stored, error) from None


def cannot_quantise(path: str, method: str, error: Exception) -> ValueError:
    return ValueError(f"the target {path!r}, quantised ({method}), cannot be loaded here: {first_line(error)}")


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, as the header has it."""

    dtype: str
    shape: list[int]


def stored_tensors(path: str) -> dict[str, StoredTensor]:
    """Every tensor in a target's safetensors files; none where the weights are pickled. Reads the headers alone."""
    found = [cached_file(path, name, **QUIETLY) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    if found[0] is None and found[1] is None:
        return {}
    files = [found[0]] if found[0] is not None else get_checkpoint_shard_files(path, found[1])[0]
    stored = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_slice(key)
                stored[key] = StoredTensor(tensor.get_dtype(), tensor.get_shape())
    return stored


def check_target_weights(path: str, config: PreTrainedConfig) -> None:
    """ValueError that names a weight which the files lack, have too many, or have in another shape.

    Takes a moment: `transformers` maps the files' tensors to the whole model, but no weight is read. Pickled weights
    are looked at when they are loaded, and so are quantised ones: only FP8's can be mapped without their values.
    """
    try:
        stored = stored_tensors(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise no_target(path, error) from None
    if quantization_of(config) in (None, "fp8") and stored:
        model_class = causal_class(path, config)
        check_scales(path, stored, quantised=quantization_of(config) is not None)
        check_experts(path, stored, config)
        with no_loading_bar():  # nothing is read yet
            load_weights(model_class, path, config, device_map="meta", use_safetensors=True)


def check_scales(path: str, stored: Mapping[str, StoredTensor], quantised: bool) -> None:
    """ValueError for weights in 8 bits or less without scales: they are other numbers than the model's.

    quantised: whether config.json has a quantization_config; without one, nothing would multiply with a scale.
    """
    for name, tensor in stored.items():
        if not name.endswith("weight") or tensor.dtype in PLAIN_DTYPES:
            continue
        if not quantised:
            raise ValueError(
                f"the target {path!r} has weight {name} as {tensor.dtype}: its config.json lacks the "
                "quantization_config that says what these numbers mean"
            )
        if not any(name.removesuffix("weight") + scale in stored for scale in SCALES):
            refuse_difference(path, missing=[f"{name}_scale_inv"])


def check_experts(path: str, stored: Mapping[str, StoredTensor], config: PreTrainedConfig) -> None:
    """ValueError unless experts that are stored one by one are all there: they are stacked without their numbers."""
    layers: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for name, tensor in stored.items():
        if found := re.fullmatch(r"(?!mtp\.)(.*\.mlp\.experts\.)(\d+\.(?:gate|up|down)_proj\.weight)", name):
            layers[found[1]][found[2]] = tensor.shape
    if not layers:
        return
    wide = [config.moe_intermediate_size, config.hidden_size]
    shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}
    needed = {f"{e}.{kind}.weight": shape for e in range(config.num_experts) for kind, shape in shapes.items()}
    for prefix, found in layers.items():
        refuse_difference(
            path,
            missing=[prefix + name for name in needed.keys() - found.keys()],
            unexpected=[prefix + name for name in found.keys() - needed.keys()],
            shapes=[(prefix + n, found[n], needed[n]) for n in needed if n in found and found[n] != needed[n]],
        )


def load_weights(
    model_class: type[PreTrainedModel], path: str, config: PreTrainedConfig, *, part: bool = False, **settings: Any
) -> PreTrainedModel:
    """`model_class.from_pretrained` that raises ValueError unless every weight of the model is the files'.

    part: the files may have weights that the model has no place for; otherwise it has one for all of them.
    """
    method = quantization_of(config) or (settings.get("quantization_config") and "bitsandbytes")
    try:
        model, report = model_class.from_pretrained(
            path, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    except (OSError, SafetensorError, pickle.UnpicklingError) as error:
        raise no_target(path, error) from None
    except Exception as error:
        if method is not None:  # every method has its own way to fail
            raise cannot_quantise(path, method, error) from None
        raise
    refuse_difference(
        path, report["missing_keys"], () if part else report["unexpected_keys"], sorted(report["mismatched_keys"])
    )
    head = getattr(model.lm_head, "weight", None)
    if method is not None and hasattr(model.lm_head, "in_features") and (head is None or head.element_size() < 2):
        raise ValueError(
            f"the lm_head of the target {path!r} is quantised ({method}), too, which training and ranks cannot use: "
            "give a checkpoint that leaves it as it was, as most do"
        )
    return model


def refuse_difference(
    path: str,
    missing: Collection[str],
    unexpected: Collection[str] = (),
    shapes: Sequence[tuple[str, Sequence[int], Sequence[int]]] = (),
) -> None:
    """ValueError, in one line, if files and model differ in anything; shapes: (weight, file's, model's)."""
    faults = []
    if missing:
        faults.append(f"lacks weight {listed(missing)}")
    if unexpected:
        faults.append(f"has weight {listed(unexpected)} too many")
    if shapes:
        name, found, needed = shapes[0]
        faults.append(f"has weight {name} of shape {list(found)} where {list(needed)} is needed")
    if any(QUANTISED_NAME.search(name) for name in unexpected):
        way_out = "it seems to be quantised, but config.json lacks the quantization_config that says how"
    else:
        way_out = "config.json and weights are not of one model, or not all files are here; get them again"
    if faults:
        raise ValueError(f"the target {path!r} {' and '.join(faults)}: {way_out}")


# ---------------------------------------------------------------------------------------------------------------------
# Fingerprints
# ---------------------------------------------------------------------------------------------------------------------


def target_fingerprint(path: str) -> str:
    """What a target's answers depend on: a hash of a folder's weights and configurations; a hub id's commit."""
    return _fingerprint(path, ("*.safetensors", "*.bin", "config.json", "generation_config.json", "*.index.json"))


def tokenizer_fingerprint(path: str) -> str:
    """A hash of the tokenizer's files, chat template included; a hub id's commit."""
    return _fingerprint(path, TOKENIZER_FILES)


def _fingerprint(path: str, patterns: Iterable[str]) -> str:
    folder = Path(path)
    if not folder.is_dir():
        return f"{path}@{Path(cached_file(path, 'config.json')).parent.name}"
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    return hashlib.sha256(repr([(file.name, _sampled_sha256(file)) for file in files]).encode()).hexdigest()


def _sampled_sha256(path: Path) -> str:
    """SHA-256 of a file's size, start and blocks all over it; of everything in a file of up to 4 MiB.

    Weights are too large to be hashed whole at every start, and other weights differ everywhere.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(START))
        for place in range(START, size, max(BLOCK, size // BLOCKS)):
            file.seek(place)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
