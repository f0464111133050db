"""What a training starts from: the target, the draft vocabulary, the weights of an earlier head."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from loading.target_config import load_target_config
from loading.target_files import check_target_weights
from pipeline_model import DraftHead, Target, check_weights
from script_utils import first_line, read_text

MAX_LENGTH = 2048  # tokens of an example, unless the flag says otherwise
FAR_VOCABULARY = 0.05  # of the target's vocabulary: padding and added tokens are less


def read_draft_vocab(path: str, vocab_size: int) -> list[int]:
    """Token ids of a draft vocabulary file. ValueError when it is no such file or has ids that the target lacks.

    Its `vocab_size` may be the tokenizer's length, with or without added tokens: a model's vocabulary is often padded
    past it. One that is far from the target's is worth a warning.
    """
    try:
        listed = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"--draft_vocab_json {path!r} cannot be read: {first_line(error)}") from None
    ids = listed.get("token_ids") if isinstance(listed, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(f"--draft_vocab_json {path!r} lacks token_ids: is it from build_draft_vocab.py?")
    if max(ids) >= vocab_size or min(ids) < 0:
        wrong = max(ids) if max(ids) >= vocab_size else min(ids)
        raise ValueError(
            f"--draft_vocab_json {path!r} has token {wrong}, the target's vocabulary only {vocab_size} tokens: build a "
            "list with this target's tokenizer"
        )
    built_for = listed.get("vocab_size", vocab_size)
    far = not isinstance(built_for, int) or abs(built_for - vocab_size) > FAR_VOCABULARY * vocab_size
    if far and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: --draft_vocab_json {path!r} was built for a vocabulary of {built_for} tokens, the target has "
            f"{vocab_size}: is it this target's tokenizer?",
            file=sys.stderr,
        )
    return sorted(set(ids))


def target_entries(args: argparse.Namespace, target: PreTrainedConfig) -> dict[str, object]:
    """The entries of a head's configuration that say which target and draft vocabulary it is for."""
    entries = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "base_model_path": args.model_name,
        "model_type": target.model_type,
    }
    if args.draft_vocab_json is None:
        return entries
    ids = read_draft_vocab(args.draft_vocab_json, target.vocab_size)
    return entries | {"draft_token_ids": ids, "draft_vocab_size": len(ids)}


def target_config(args: argparse.Namespace) -> PreTrainedConfig:
    """The target's configuration, long before its weights. ValueError when there is none or it cannot be used.

    Without --max_length, this sets it: to 2048, or to the target's positions where there are fewer.
    """
    config = load_target_config(args.model_name, args.trust_remote_code, quantization=args.quantization)
    check_target_weights(args.model_name, config)
    if args.max_length is None:
        args.max_length = min(MAX_LENGTH, config.max_position_embeddings)
    if args.max_length > config.max_position_embeddings:
        raise ValueError(
            f"--max_length is {args.max_length}, but the target has positions for {config.max_position_embeddings}"
        )
    return config


def layer_placement(num_layers: int, gpus: Sequence[int]) -> dict[str, int]:
    """A device map: equal runs of layers per GPU, the last run on `gpus[0]`, where everything else lies too.

    So the hidden states that training needs end where the head is.
    """
    order = [*gpus[1:], gpus[0]]
    layers = {f"model.layers.{layer}": order[layer * len(order) // num_layers] for layer in range(num_layers)}
    return layers | dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), gpus[0])


def load_target(args: argparse.Namespace, accelerator: Accelerator, dtype: torch.dtype, num_layers: int) -> Target:
    attention = "sdpa" if args.attn_implementation == "flex_attention" else args.attn_implementation
    shared = {
        "attn_implementation": attention,
        "trust_remote_code": args.trust_remote_code,
        "quantization": args.quantization,
    }
    if args.device_map is None:
        return Target.load(args.model_name, dtype=dtype, device=accelerator.device, **shared)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # processes that share this machine's GPUs
    gpus = range(accelerator.device.index or 0, torch.cuda.device_count(), local)
    placement = layer_placement(num_layers, gpus)
    return Target.load(args.model_name, dtype=dtype, device_map=placement, **shared)


def start_from(head: DraftHead, path: str) -> None:
    """Copy a checkpoint's weights. ValueError when its head reads, drafts or is built otherwise."""
    found, state = head.config.read(path)
    for name in head.config.meaning:
        ours, theirs = getattr(head.config, name), getattr(found, name)
        if ours != theirs:
            both = "differs" if name == "draft_token_ids" else f"is {theirs}, this run's {ours}"
            raise ValueError(f"--init_head {path!r}: its {name} {both}: give it the same head")
    try:
        check_weights(head.state_dict(), state)
    except ValueError as error:
        raise ValueError(f"--init_head {path!r}: {error}") from None
    head.load_state_dict(state)
