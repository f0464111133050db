"""The configuration of a target: which models the stages can run, and what their layers are like."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from loading.head_values import integer
from loading.target_files import check_quantization, read_text_config

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text")
# Families with sliding attention windows: `layer_types` says which layers have one, or all do.
WINDOWS_BY_LAYER, WINDOWS_EVERYWHERE = ("qwen2", "qwen3"), ("mistral", "qwen3_moe")
# Rotary embeddings whose frequencies depend on the running length cannot be tabulated once per position.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """The attention of each target layer: FULL, SLIDING (over `config.sliding_window` tokens) or Qwen3.5's LINEAR."""
    listed = getattr(config, "layer_types", None)
    if listed is not None:
        return tuple(listed)
    return (FULL if getattr(config, "sliding_window", None) is None else SLIDING,) * config.num_hidden_layers


def is_linear_attention(config: PreTrainedConfig, layer: int) -> bool:
    """Whether a target layer (0-based) is Qwen3.5's linear attention."""
    return layer_types(config)[layer] == LINEAR


def head_dim(config: PreTrainedConfig) -> int:
    """Width of one attention head. Qwen2's configuration does not list it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def load_target_config(
    path: str, trust_remote_code: bool = False, *, quantization: str | None = None, in_parts: bool = False
) -> PreTrainedConfig:
    """The (text) configuration of a local folder or a hub id, long before its weights.

    ValueError for a folder without a model, and as `check_supported` and `check_quantization`.
    """
    config = read_text_config(path, trust_remote_code)
    check_supported(config)
    check_quantization(path, config, quantization, in_parts)
    return config


def check_supported(config: PreTrainedConfig) -> None:
    """ValueError that names the model type, rotary embedding or sliding window which the stages cannot run."""
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model type {config.model_type!r} is not supported: the target must be one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in STATIC_ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is not supported: it must be one of {', '.join(STATIC_ROPE_TYPES)}")
    check_layer_types(config)


def check_layer_types(config: PreTrainedConfig) -> None:
    """ValueError for attention layers that `transformers` does not run in this family, or not alike with its cache."""
    family, types, window = config.model_type, set(layer_types(config)), getattr(config, "sliding_window", None)
    if family in WINDOWS_EVERYWHERE:
        allowed = {FULL if window is None else SLIDING}
    elif family in WINDOWS_BY_LAYER:
        allowed = {FULL, SLIDING}
    else:
        allowed = {FULL, LINEAR} if family.startswith("qwen3_5") else {FULL}
    if not types <= allowed:
        field = "layer_types" if getattr(config, "layer_types", None) else f"sliding_window {window}"
        raise ValueError(
            f"{field} makes layers of type {', '.join(sorted(types - allowed))}, but model type {family!r} "
            f"{'with' if window else 'without'} sliding_window has {', '.join(sorted(allowed))} alone: "
            "correct the target's config.json"
        )
    if SLIDING in types:
        if window is None:
            raise ValueError(
                "layer_types lists sliding_attention, but use_sliding_window is false or sliding_window missing: "
                "correct the target's config.json"
            )
        integer("sliding_window", window, 1)


def default_target_path(stored: str) -> str:
    """Where a head's target is: `stored`, the `base_model_path` of the head's checkpoint, if it leads anywhere.

    ValueError, to be completed with --base_model_path, when the checkpoint names none, or a folder that is not here.
    """
    if not stored:
        raise ValueError("the head's checkpoint does not name its target: give --base_model_path")
    if not Path(stored).is_dir():
        try:
            validate_repo_id(stored)
        except HFValidationError:
            raise ValueError(
                f"the head was trained on {stored!r}, a folder that is not on this machine: give --base_model_path"
            ) from None
    return stored
