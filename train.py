"""Trains a speculation head for a frozen target, with Accelerate.

    accelerate launch --num_processes 8 train.py --model_name Qwen/Qwen3-4B --data_path sharegpt.json \\
        --draft_vocab_json draft_vocab/sharegpt_qwen3_top_32k.json --num_stages 8 --num_spec_layers 4 \\
        --output_dir runs/qwen3

    python train.py ...                                              one process, on a GPU or a CPU
    accelerate launch --num_processes 2 train.py ...                 two processes; without GPUs they meet over gloo

Three properties hold whatever the number of processes and micro-batches, and are what the code below is arranged
around: every supervised token of an optimiser step weighs the same; the examples of a step, their order, and the
pipeline depth and fill drawn for each micro-batch follow from seed and step alone; so does the learning rate. The
position of a run is therefore one number, its step, and a run that was stopped goes on as if it had not been.

`output_dir` receives speculation_head_final.pt, checkpoint-STEP/, run.json, log.jsonl and training_curve.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from loading.chat_template import add_template_flags, check_template_flags, use_template
from loading.checkpoint_files import CHECKPOINT_NAME, read_payload
from loading.flags import (
    ATTN_IMPLEMENTATIONS,
    COUNT,
    NATURAL,
    POSITIVE,
    add_loading_flags,
    add_quantization_flag,
    bounded,
    integers,
)
from loading.head_values import parse_shallow_layers, parse_stage_layers
from loading.target_config import load_target_config
from loading.target_files import check_attention_kernels, check_target_weights, quantization_of
from loading.tokenizer import load_tokenizer
from pipeline_model import (
    DraftHead,
    HeadConfig,
    SpeculationHead,
    Target,
    auto_anchors,
    auto_shallow_layers,
    check_weights,
    save_head,
    split_layers,
)
from script_utils import (
    Parser,
    Switch,
    check_output_folder,
    first_line,
    lock_folder,
    quiet_libraries,
    read_text,
    room_for,
    run_record,
    run_script,
    write_json,
)
from training.conversations import OVERFLOW_POLICIES, ConversationData, PadCollator, load_conversations
from training.feature_cache import FeatureCache, open_caches
from training.forward import teacher_features
from training.head_loss import DraftLoss, HeadLoss, HeadReplayLoss
from training.held_out import BEST_NAME, EarlyStopping, HeldOutTraces, copy_best, in_words, keep_best
from training.loss import LOSS_KINDS, LossTerms, TrainingLoss
from training.new_head import check_base_layers, late_layers, new_head
from training.optimizers import SCHEDULES, build_optimizers, lr_factor, scale_lr
from training.replay_loss import ROWS, TRACES, Replay, ReplaySettings, check_replay_flags
from training.run_state import (
    LOG_NAME,
    DataOrder,
    Progress,
    StopSignals,
    append_log,
    draw_fill,
    example_lengths,
    find_checkpoint,
    list_checkpoints,
    plot_log,
    random_state,
    read_log,
    read_state,
    remove_unfinished,
    save_checkpoint,
    set_random_state,
    write_log,
)

MAX_SKIPPED_IN_ROW = 5
MAX_LENGTH = 2048  # tokens of an example, unless the flag says otherwise
HEAD_INITS = ("random", "identity", "late_layers", "identity+late_layers")
STOP_PATIENCE = 3  # validations without a better head, unless the flag says otherwise
FAR_VOCABULARY = 0.05  # of the target's vocabulary: padding and added tokens are less
TRAINING_ATTENTION = (*ATTN_IMPLEMENTATIONS, "flex_attention")  # the last: the head's, with sdpa for the target
TARGET_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def build_parser() -> Parser:
    parser = Parser(prog="train.py", description="Train a speculation head for a frozen target model.")
    add_target_flags(parser, TRAINING_ATTENTION)
    add_data_flags(parser)
    add_head_flags(parser)
    add_optimisation_flags(parser)
    add_run_flags(parser)
    return parser


def add_target_flags(parser: Parser, attention: Sequence[str]) -> None:
    model = parser.add_argument_group("target")
    model.add_argument("--model_name", required=True, help="target model: a folder or a hub id")
    add_loading_flags(model, attention)
    add_quantization_flag(model)
    model.add_argument("--device_map", choices=["auto"], help="auto: spread the target over a process's GPUs")


def add_data_flags(parser: Parser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--data_path", required=True, action="append", help="file, folder or hub id:split; repeatable")
    add_template_flags(data)
    data.add_argument(
        "--max_length", type=bounded(int, 2), help="tokens of an example at most; default: 2048, or the target's limit"
    )
    data.add_argument(
        "--max_length_overflow", default="discard", choices=OVERFLOW_POLICIES, help="what happens to longer ones"
    )
    data.add_argument("--min_length", type=COUNT, default=10, help="tokens; shorter examples are left out")
    data.add_argument("--mask_assistant", action=Switch, default=True, help="learn assistant text only")
    data.add_argument("--val_fraction", type=bounded(float, 0, 0.5), default=0.01, help="conversations held out")
    data.add_argument("--val_examples", type=COUNT, default=128, help="held-out examples used at most")
    data.add_argument("--num_proc", type=COUNT, default=1, help="processes that tokenise")
    data.add_argument("--cache_dir", help="folder of the tokenised data; default: in the cache of datasets")
    data.add_argument("--force_rebuild_cache", action=Switch, default=False, help="tokenise again what is there")
    data.add_argument(
        "--feature_cache", type=Path, help="folder for the target's hidden states: later epochs skip its pass"
    )
    data.add_argument(
        "--feature_cache_layers",
        type=integers,
        default=(),
        help="more layers to keep there than this head reads, for other heads that share the folder: 5,10",
    )


def add_draft_vocab_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--draft_vocab_json",
        type=lambda text: text or None,
        help='list by draft_vocab/build_draft_vocab.py; default, and "": full vocabulary',
    )


def add_head_flags(parser: Parser) -> None:
    head = parser.add_argument_group("head")
    head.add_argument(
        "--num_stages", type=integers, required=True, help="n; several (2,3,6) for one head that fits all"
    )
    head.add_argument("--num_spec_layers", type=COUNT, default=4, help="layers of the head")
    head.add_argument(
        "--version", type=int, default=11, choices=[10, 11], help="of the head; 12 is 11 with --stage_layers"
    )
    head.add_argument("--stage_layers", help='uneven split, layers per stage: "4;6;6;4"')
    head.add_argument(
        "--aggr_feature_bound",
        type=lambda text: "auto" if text.lower() in ("", "none") else text,
        default="auto",
        help='layers whose output the head reads: "0,5,15,29"; "" and none are auto',
    )
    head.add_argument(
        "--shallow_hidden_layer_indices", default="auto", help='version 10: what g_n, .., g_1 read: "0,1,3;0,1,2;0,1"'
    )
    add_draft_vocab_flag(head)
    head.add_argument(
        "--spec_intermediate_size_fallback",
        type=COUNT,
        default=HeadConfig.spec_intermediate_size_fallback,
        help="MLP width of the head's layers where the target's config has none (mixtures of experts)",
    )
    head.add_argument("--spec_init_from_base_layers", type=integers, help="target layers (0 ..) to start from: 13,14")
    head.add_argument(
        "--head_init",
        choices=HEAD_INITS,
        help="identity: projections pass on the deepest state they read; late_layers: layers start from the target's "
        "last ones; default: random",
    )
    head.add_argument("--init_head", help="checkpoint whose weights to start from, for more training on other data")
    head.add_argument(
        "--trained_with_use_deepest",
        action=Switch,
        default=True,
        help="also train on partly filled pipelines, where completed tokens show their deepest features",
    )

    head.add_argument(
        "--fill_alpha",
        type=bounded(float, 0, 1, above=True),
        help="train on fills F as decoding meets them: drawn with weight alpha^(F-1), counted from the newest token; "
        "default: the paper's, half full, half even, counted from each row",
    )

    add_replay_flags(parser)


def add_replay_flags(parser: Parser) -> None:
    rows = parser.add_argument_group("rows and loss")
    rows.add_argument(
        "--rows",
        default="staircase",
        choices=ROWS,
        help="staircase: the paper's training; replay: every draft that decoding verifies, at its own fill",
    )
    rows.add_argument("--trace", choices=TRACES, help="replay: which drafts count as accepted; default: replay")
    rows.add_argument(
        "--trace_temperature",
        type=bounded(float, 0),
        help="replay: of texts that do not say theirs; default: 0, greedy",
    )
    rows.add_argument("--reject_weight", type=POSITIVE, help="replay: weight of rejected drafts; default: 1")
    rows.add_argument("--value_weight", action=Switch, help="replay: weigh drafts by what accepting them adds")
    rows.add_argument(
        "--flushed",
        type=COUNT,
        help="replay: learn also from the drafts behind so many rejected ones of each example, by reverse KL; default: "
        "none",
    )
    rows.add_argument("--loss", default="kl", choices=LOSS_KINDS, help="tv: 1 - acceptance; lk: between the two")
    rows.add_argument("--loss_eta", type=bounded(float, 0), help="lk: the larger, the sooner tv takes over; default: 3")


def add_optimisation_flags(parser: Parser) -> None:
    steps = parser.add_argument_group("optimisation")
    steps.add_argument("--epochs", type=POSITIVE, default=1.0, help="passes over the data; fractions work")
    steps.add_argument("--max_steps", type=COUNT, help="optimiser steps, instead of --epochs")
    steps.add_argument("--max_minutes", type=POSITIVE, help="stop after this wall-clock time, head written")
    steps.add_argument("--batch_size", type=COUNT, default=4, help="examples per process and micro-batch")
    steps.add_argument("--gradient_accumulation_steps", type=COUNT, default=2, help="micro-batches per optimiser step")
    steps.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"], help="muon: for the layers' matrices")
    steps.add_argument("--lr", type=POSITIVE, default=1e-4, help="peak learning rate")
    steps.add_argument("--lr_adamw", type=POSITIVE, help="with muon: of lm_head, norms and vectors; default: lr / 2")
    steps.add_argument(
        "--lm_head_lr_scale",
        type=bounded(float, 0),
        help="factor of the learning rate of lm_head; 0: frozen; default: 1",
    )
    steps.add_argument("--lr_scheduler", default="linear", choices=SCHEDULES, help="shape after the warm-up")
    steps.add_argument("--warmup_steps", type=NATURAL, default=100, help="of linear warm-up")
    steps.add_argument("--weight_decay", type=bounded(float, 0), default=0.0, help="of the matrices")
    steps.add_argument("--max_grad_norm", type=POSITIVE, default=1.0, help="gradients are clipped to this norm")
    steps.add_argument("--temperature", type=POSITIVE, default=1.0, help="tau of the distillation loss")
    steps.add_argument(
        "--mixed_precision", default="auto", choices=["auto", *TARGET_DTYPES], help="auto: bf16 on CUDA, no on a CPU"
    )
    steps.add_argument("--seed", type=NATURAL, default=0, help="of initial weights, data order and draws")


def add_run_flags(parser: Parser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument("--output_dir", type=Path, required=True, help="folder for everything that is written")
    run.add_argument("--resume_from", help="a checkpoint folder, or auto: the newest in output_dir, if any")
    run.add_argument("--log_interval", type=COUNT, default=10, help="steps between lines of the log")
    run.add_argument("--eval_interval", type=COUNT, default=500, help="steps between validations; one more at the end")
    run.add_argument(
        "--stop_on",
        choices=["trace_alpha"],
        help="end when decoding would accept no more of the held-out answers than before, and keep the best head",
    )
    run.add_argument("--stop_patience", type=COUNT, help="stop_on: validations without a better head; default: 3")
    run.add_argument("--save_interval", type=COUNT, default=500, help="steps between checkpoints")
    run.add_argument("--keep_checkpoints", type=COUNT, default=2, help="newest checkpoints that stay")
    run.add_argument("--tracker", default="none", choices=["none", "tensorboard", "wandb"], help="beside log.jsonl")


# What an Accelerate configuration can ask for by environment variable, and a head's training does not do: every process
# has the whole head and the whole target.
UNSUPPORTED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sequence parallelism",
}


def check_accelerate() -> None:
    """ValueError for an Accelerate configuration that training would follow by half, or not at all."""
    for variable, name in UNSUPPORTED.items():
        if os.environ.get(variable, "false").lower() in ("true", "1", "yes"):
            raise ValueError(
                f"the Accelerate configuration asks for {name}, which train.py does not do: use data parallelism "
                "(--multi_gpu), and --device_map auto for a target that is larger than a GPU"
            )
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        raise ValueError("the Accelerate configuration asks for fp8, which train.py does not do: use bf16")
    local, devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if 0 < devices < local:
        raise ValueError(f"{local} processes were started on {devices} GPUs: use --num_processes {devices}")


def is_lonely() -> bool:
    """Whether `accelerate launch` was asked for several processes and started this one, as it does without GPUs."""
    single = "WORLD_SIZE" not in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    return single and os.environ.get("MASTER_ADDR") == "127.0.0.1"  # its sign of more than one process


def lonely_processes() -> int | None:
    """How many processes a lonely one's `accelerate launch` was asked for on its command line; None: not to be seen."""
    command = psutil.Process().parent().cmdline()
    begins = [place for place, word in enumerate(command) if word in ("launch", "accelerate.commands.launch")]
    if not begins or torch.cuda.is_available():
        return None
    return launch_command_parser().parse_known_args(command[begins[0] + 1 :])[0].num_processes


def start_all_processes() -> None:
    """In a lonely process: become the launcher of all processes that were asked for, which meet on CPUs over gloo."""
    if is_lonely():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={lonely_processes()}"]
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


def check_launch(args: argparse.Namespace) -> None:
    """Fail early on what would otherwise show after minutes, or not at all."""
    check_accelerate()
    if is_lonely() and lonely_processes() is None:
        raise ValueError(
            "accelerate launch was asked for several processes and started one, as it does with fewer than two GPUs: "
            "use --num_processes 1, or add --multi_gpu, which starts several on a CPU too"
        )
    if args.tracker != "none" and find_spec(args.tracker) is None:
        raise ValueError(f"--tracker {args.tracker} needs a package: pip install {args.tracker}")
    if not torch.cuda.is_available():
        only_cuda = {"mixed_precision": "fp16", "device_map": "auto", "attn_implementation": "flex_attention"}
        for name, value in only_cuda.items():
            if getattr(args, name) == value:
                raise ValueError(f"--{name} {value} needs a CUDA device, and there is none")
    if int(os.environ.get("RANK", 0)) == 0:
        for name in ("output_dir", "cache_dir", "feature_cache"):
            check_output_folder(f"--{name}", getattr(args, name))
    check_attention_kernels(args.attn_implementation)
    if args.feature_cache_layers and args.feature_cache is None:
        raise ValueError("--feature_cache_layers needs --feature_cache, the folder")
    if args.lr_adamw is not None and args.optimizer != "muon":
        raise ValueError("--lr_adamw belongs to --optimizer muon: set --lr alone")
    if args.stop_patience is not None and args.stop_on is None:
        raise ValueError("--stop_patience belongs to --stop_on: add it, or leave --stop_patience out")
    if args.stop_on is not None and args.val_fraction == 0:
        raise ValueError(f"--stop_on {args.stop_on} needs held-out examples: give a --val_fraction above 0")


def check_head_flags(args: argparse.Namespace) -> None:
    """ValueError for flags of the head that contradict each other."""
    for name in ("spec_init_from_base_layers", "head_init"):
        if args.init_head is not None and getattr(args, name) is not None:
            raise ValueError(f"--init_head brings all weights: leave --{name} out")
    if "late_layers" in (args.head_init or "") and args.spec_init_from_base_layers is not None:
        raise ValueError(
            f"--head_init {args.head_init} takes the target's last layers: leave --spec_init_from_base_layers out, or "
            "use it without late_layers"
        )
    other_version = "shallow_hidden_layer_indices" if args.version == 11 else "aggr_feature_bound"
    if getattr(args, other_version) != "auto":
        raise ValueError(f"--{other_version} does not belong to --version {args.version}: leave one of them out")
    if args.fill_alpha is not None and not args.trained_with_use_deepest:
        raise ValueError("--fill_alpha needs --trained_with_use_deepest: without it the pipeline is always full")
    check_rows_flags(args)


def check_rows_flags(args: argparse.Namespace) -> None:
    """ValueError for flags of rows and loss that contradict others."""
    check_replay_flags(args)
    if args.rows == "replay" and not args.trained_with_use_deepest:
        raise ValueError("--rows replay needs --trained_with_use_deepest: without it every draft sees a full pipeline")
    if args.rows == "replay" and args.fill_alpha is not None:
        raise ValueError("--rows replay takes its fills from traces: leave --fill_alpha out")
    if args.flushed is not None and max(args.num_stages) == 1:
        raise ValueError(
            "--flushed needs --num_stages of 2 or more: a single stage drafts nothing behind a rejected draft"
        )
    if args.loss != "lk" and args.loss_eta is not None:
        raise ValueError("--loss_eta belongs to --loss lk: leave it out")


# ---------------------------------------------------------------------------------------------------------------------
# Head and target


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


def read_layers(args: argparse.Namespace, stage_sizes: Sequence[int]) -> dict[str, object]:
    """The entry of a head's configuration that lists the hidden states it reads. ValueError for no such list."""
    if args.version == 10:
        text = args.shallow_hidden_layer_indices
        automatic = auto_shallow_layers(sum(stage_sizes), len(stage_sizes))
        return {"shallow_hidden_layer_indices": automatic if text == "auto" else parse_shallow_layers(text)}
    if args.aggr_feature_bound == "auto":
        return {"aggr_feature_bound": auto_anchors(stage_sizes)}
    try:
        return {"aggr_feature_bound": integers(args.aggr_feature_bound)}
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--aggr_feature_bound {error}") from None


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


def head_config(args: argparse.Namespace, target: PreTrainedConfig) -> HeadConfig:
    """The head that the arguments describe. ValueError for one that cannot be."""
    stages = tuple(sorted(set(args.num_stages)))
    stage_layers = parse_stage_layers(args.stage_layers)
    if stage_layers is not None and len(stages) > 1:
        raise ValueError(f"--stage_layers describes one split, but --num_stages lists {len(stages)}: give one n")
    sizes = split_layers(target.num_hidden_layers, stages[-1], stage_layers)
    split_layers(target.num_hidden_layers, stages[0])
    base_layers = base_layers_of(args, target)
    raw = {
        "version": args.version if stage_layers is None or args.version == 10 else 12,
        **target_entries(args, target),
        "num_stages": stages[-1],
        "num_spec_layers": args.num_spec_layers,
        **read_layers(args, sizes),
        "trained_with_use_deepest": args.trained_with_use_deepest,
        "stage_layers": stage_layers,
        "spec_init_from_base_layers": base_layers,
        "spec_init_first_layer": None if base_layers is None else 0,
        "spec_intermediate_size_fallback": args.spec_intermediate_size_fallback,
        "trained_num_stages": stages if len(stages) > 1 else None,
    }
    config = HeadConfig.parse(raw)
    config.check_target(target)
    if base_layers is not None:
        if args.quantization is not None or quantization_of(target) is not None:
            flag = "spec_init_from_base_layers" if args.head_init is None else f"head_init {args.head_init}"
            raise ValueError(f"--{flag} copies weights of the target, but this one is quantised: leave it out")
        check_base_layers(base_layers, config.num_spec_layers, target)
    return config


def base_layers_of(args: argparse.Namespace, target: PreTrainedConfig) -> tuple[int, ...] | None:
    """The target layers that the head's layers start from; None for a random start."""
    if "late_layers" in (args.head_init or ""):
        return late_layers(args.num_spec_layers, target)
    return args.spec_init_from_base_layers


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


# ---------------------------------------------------------------------------------------------------------------------
# The run


class MicroBatch(NamedTuple):
    """Examples after the target's pass over them."""

    teacher: dict[str, Tensor]  # features, hidden, labels, attention_mask, perhaps teacher_best: see `training_loss`
    example_ids: list[str]


class Trainer:
    """One training run. `run` goes from the present step to the last and returns the exit code."""

    def __init__(
        self,
        args: argparse.Namespace,
        accelerator: Accelerator,
        loss: DraftLoss,
        data: ConversationData,
        collator: PadCollator,
    ):
        self.args, self.accelerator = args, accelerator
        self.loss, self.head, self.target = loss, loss.head, loss.target
        self.data, self.collator = data, collator
        self.started = time.monotonic()
        micro_batches = args.gradient_accumulation_steps * accelerator.num_processes
        self.order = DataOrder(example_lengths(data.train), args.batch_size, micro_batches, args.seed)
        self.total_steps = args.max_steps or self.order.steps(args.epochs)
        self.warmup = args.warmup_steps
        if self.warmup >= self.total_steps:
            self.warmup = self.total_steps // 10
            self.say(f"--warmup_steps lowered to {self.warmup}: the run has only {self.total_steps} steps")

        config = self.head.config
        self.splits = {n: config.split(self.target.num_layers, n) for n in config.stage_counts}
        scale = self.lm_head_lr_scale()
        self.model = accelerator.prepare(loss)
        lrs = {"lr": args.lr, "lr_adamw": args.lr_adamw, "lm_head_lr_scale": scale}
        self.optimizers = build_optimizers(self.head, args.optimizer, **lrs, weight_decay=args.weight_decay)
        # Losses are sums, so gradients are large already: fp16 starts with a low scale.
        fp16 = accelerator.mixed_precision == "fp16"
        self.scaler = torch.amp.GradScaler(accelerator.device.type, init_scale=2.0**8, enabled=fp16)
        self.progress = Progress()
        self.gradient_norm = math.nan  # of the last step, before clipping
        self.suspects: list[str] = []  # examples of the last skipped step
        self.saved_step: int | None = None  # of the newest checkpoint in the output folder, if it is this run's
        self.caches = self.open_caches()
        self.early = self.early_stopping()

    def early_stopping(self) -> EarlyStopping | None:
        """None without --stop_on."""
        args = self.args
        if args.stop_on is None:
            return None
        if not self.loss.has_traces:
            raise ValueError(
                f"--stop_on {args.stop_on} needs a drafter whose decoding can be replayed: a head trained with "
                "--trained_with_use_deepest, or PPSD's"
            )
        if self.data.val is None:
            raise ValueError(f"--stop_on {args.stop_on} needs held-out examples, and there are none: more data helps")
        return EarlyStopping(args.stop_patience or STOP_PATIENCE)

    def lm_head_lr_scale(self) -> float:
        """Of the learning rate, for the head's lm_head; with 0 it is frozen, which saves its gradient's product too."""
        scale = self.args.lm_head_lr_scale
        if scale is None:
            return 1.0
        if self.head.lm_head is None:
            raise ValueError("--lm_head_lr_scale: this head has no lm_head of its own, leave it out")
        self.head.lm_head.requires_grad_(scale > 0)
        return scale

    def open_caches(self) -> dict[str, FeatureCache]:
        """The feature cache of each part of the data; none without --feature_cache."""
        folder, anchors = self.args.feature_cache, self.head.config.anchors
        if folder is None:
            return {}
        caches = {}
        with self.accelerator.local_main_process_first():
            for part in ("train", "val"):
                rows = getattr(self.data, part)
                if rows is not None:
                    lengths, more = example_lengths(rows), self.args.feature_cache_layers
                    caches[part] = FeatureCache(folder / part, self.target, anchors, rows, lengths, more)
            open_caches(list(caches.values()))
        self.say(f"feature cache: {sum(cache.nbytes for cache in caches.values()) / 1e9:.1f} GB in {folder}")
        return caches

    # The loop

    def run(self, checkpoint: Path | None = None) -> int:
        """Exit code 0 when done or out of time, 1 for a loss that stays non-finite, 128 + signal when told to stop."""
        try:
            with StopSignals() as self.signals:
                if checkpoint is not None:
                    self.restore(checkpoint)
                self.open_log(checkpoint)
                self.write_record("running")
                return self.steps()
        except OSError as error:
            raise self.disk_error(error) from error

    def steps(self) -> int:
        """The steps that are left, and the end. Returns the exit code of `run`."""
        args, progress = self.args, self.progress
        outcome, shown = "finished", self.accelerator.is_main_process
        pause = 0.1 if sys.stderr.isatty() else 30.0  # seconds between updates: log files want few
        bar = tqdm(total=self.total_steps, initial=progress.step, unit="step", mininterval=pause, disable=not shown)
        with bar:
            if self.validation_is_due and self.validate() is None:
                self.save()
                return self.stop()
            while progress.step < self.total_steps and not self.ended_early:
                began = time.monotonic()
                stopped, out_of_time = self.train_step(self.signals)
                progress.seconds += time.monotonic() - began
                bar.update()
                if progress.skipped_in_row == MAX_SKIPPED_IN_ROW:
                    return self.give_up()
                if progress.step % args.log_interval == 0 or progress.step == self.total_steps:
                    self.log(bar)
                if self.validation_is_due:
                    stopped = self.validate() is None or stopped
                if progress.step % args.save_interval == 0 or stopped or out_of_time:
                    self.save()
                if stopped:
                    return self.stop()
                if out_of_time:
                    outcome = "out of time"
                    break
        return self.finish("stopped early" if self.ended_early else outcome)

    @property
    def validation_is_due(self) -> bool:
        """Also at the start of a run that was stopped in the middle of one."""
        step = self.progress.step
        return step % self.args.eval_interval == 0 and self.progress.validated < step < self.total_steps

    @property
    def ended_early(self) -> bool:
        return self.early is not None and self.early.is_over

    def train_step(self, signals: StopSignals) -> tuple[bool, bool]:
        """One optimiser step. Returns whether any process was told to stop, and whether time is up."""
        step, losses = self.progress.step, self.accumulate()
        late = self.args.max_minutes is not None and time.monotonic() - self.started > 60 * self.args.max_minutes
        flags = [signals.received is not None, late and self.accelerator.is_main_process]
        sums = sum(torch.stack([value.detach().double() for value in loss]) for loss, _ in losses)
        sums = torch.cat([sums, sums.new_tensor(flags)])
        total, counted, supervised, agreed, stopped, out_of_time = self.accelerator.reduce(sums, "sum").tolist()
        shapes = [(self.splits[n], fill) for n, fill in self.draw_fills(step)]
        unused = self.loss.end_step(shapes, lambda value: self.accelerator.reduce(value, "sum"))

        self.gradient_norm = self.scale_gradients(counted)
        if math.isfinite(total) and math.isfinite(self.gradient_norm):
            scale_lr(self.optimizers, lr_factor(step, self.total_steps, self.warmup, self.args.lr_scheduler))
            self.rest(unused)
            for optimizer in self.optimizers:
                optimizer.step()
            self.progress.add(total, counted, int(supervised), agreed)
        elif not math.isfinite(total):
            self.skip(losses, what="loss is")
        elif self.scaler.get_scale() <= 1:  # above, fp16 has overflowed, as it does at times: the scaler lowers it
            self.skip(losses, what="gradients are")
        if self.scaler.is_enabled():
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.progress.step += 1
        return bool(stopped), bool(out_of_time)

    def accumulate(self) -> list[tuple[TrainingLoss, list[str]]]:
        """Gradients of this process's micro-batches, summed, and of all processes, averaged by the last backward."""
        accelerator = self.accelerator
        micro_batches = self.order.step(self.progress.step)
        draws = self.draw_fills(self.progress.step)
        mine = range(len(micro_batches))[accelerator.process_index :: accelerator.num_processes]
        losses = []
        for index in mine:
            number = self.progress.step * len(micro_batches) + index
            batch = self.load("train", micro_batches[index], number)
            n, fill = draws[index]
            with nullcontext() if index == mine[-1] else accelerator.no_sync(self.model):
                loss = self.model(batch.teacher, self.splits[n], fill, number)
                self.scaler.scale(loss.total).backward()
            losses.append((loss._replace(total=loss.total.detach()), batch.example_ids))
        return losses

    def draw_fills(self, step: int) -> list[tuple[int, int]]:
        """Pipeline depth and fill of each micro-batch of a step, all processes together."""
        args, count = self.args, self.order.step_size // self.args.batch_size
        settings = (tuple(self.splits), args.trained_with_use_deepest, args.fill_alpha, args.seed)
        return [draw_fill(*settings, micro_batch) for micro_batch in range(step * count, (step + 1) * count)]

    def rest(self, weights: Sequence[nn.Parameter]) -> None:
        """Take the gradients off weights that had no part in this step, so that optimisers leave them be.

        Muon moves a matrix by the same amount however small its momentum has become: a type of rows that is rare would
        wander off along the gradient of its last batch.
        """
        for weight in weights:
            weight.grad = None

    def load(self, part: str, rows: np.ndarray, number: int | None = None) -> MicroBatch:
        """Rows of `train` or `val`, run through the target, or as its pass left them in the feature cache.

        `number` of the micro-batch that they are, in training.
        """
        source = getattr(self.data, part)
        batch = self.collator([source[int(row)] for row in rows])
        names = ("input_ids", "labels", "attention_mask")
        ids, labels, mask = (batch[name].to(self.accelerator.device, non_blocking=True) for name in names)
        if number is not None:
            ids, labels, mask = self.loss.texts(ids, labels, mask, number)
        teacher = {"labels": labels, "attention_mask": mask}
        if self.loss.has_traces:
            teacher |= {"temperatures": batch["temperature"], "input_ids": ids}
        if part in self.caches:
            cached = self.caches[part].load(rows, ids, mask)
            teacher |= {"features": cached.features, "hidden": cached.hidden, "teacher_best": cached.best}
        else:
            features, hidden = teacher_features(self.target, ids, mask, self.head.config.anchors)
            teacher |= {"features": features, "hidden": hidden}
        return MicroBatch(teacher, batch["example_id"])

    def scale_gradients(self, counted: float) -> float:
        """Turn the gradients of the sum into those of the mean over the whole step, and clip. Returns their norm.

        Only here is the count of all processes and micro-batches known; DistributedDataParallel has divided by the
        number of processes, whatever their counts.
        """
        if self.scaler.is_enabled():
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        weights = [weight for weight in self.head.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad.mul_(self.accelerator.num_processes / (counted or 1))
        return float(nn.utils.clip_grad_norm_(weights, self.args.max_grad_norm))

    # Loss or gradients that are not finite

    def skip(self, losses: list[tuple[TrainingLoss, list[str]]], what: str) -> None:
        """Drop a step on all processes alike, and name the examples: those of the bad micro-batches, if they show."""
        self.progress.skipped += 1
        self.progress.skipped_in_row += 1
        suspects = [ids for loss, ids in losses if what == "gradients are" or not math.isfinite(loss.total)]
        self.suspects = sorted(name for ids in gather_object(suspects) for name in ids)
        self.say(f"step {self.progress.step}: {what} not finite, step skipped; examples {', '.join(self.suspects)}")

    def give_up(self) -> int:
        kept = list_checkpoints(self.args.output_dir)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
        examples = ", ".join(self.suspects)
        self.say(f"gave up: {MAX_SKIPPED_IN_ROW} steps in a row not finite, the last with examples {examples}; {last}")
        self.write_record("not finite")
        return 1

    # Validation and log

    @torch.no_grad()
    def validate(self) -> list[dict[str, float | None]] | None:
        """Loss and agreement on held-out examples for each n and fill the head is trained for, and logs them.

        The same examples in the same batches every time, whatever the number of processes. Empty without a split. None
        when a process was told to stop meanwhile.
        """
        args, accelerator, progress = self.args, self.accelerator, self.progress
        if self.data.val is None:
            return []
        longest_first = spread(len(self.data.val), args.val_examples)
        longest_first = longest_first[np.argsort(-example_lengths(self.data.val)[longest_first], kind="stable")]
        batches = [longest_first[i : i + args.batch_size] for i in range(0, len(longest_first), args.batch_size)]
        by_fill = args.trained_with_use_deepest and self.loss.has_fill
        shapes = [(n, fill) for n in self.splits for fill in range(1 if by_fill else n, n + 1)]
        sums = torch.zeros(len(shapes), 4, dtype=torch.float64, device=accelerator.device)
        traces, lengths = HeldOutTraces(self.splits), sums.new_zeros(2)
        self.loss.eval()
        for place in range(accelerator.process_index, len(batches), accelerator.num_processes):
            if self.signals.received is not None:
                break
            teacher = self.load("val", batches[place]).teacher
            with accelerator.autocast():
                traces.add(self.loss, teacher, place)
                lengths += self.loss.simulated_lengths(teacher)
            for index, (n, fill) in enumerate(shapes):
                with accelerator.autocast():
                    loss = self.loss(teacher, self.splits[n], fill)
                sums[index] += torch.stack([value.double() for value in loss])
        self.loss.train()
        stopped = sums.new_tensor(float(self.signals.received is not None))
        if accelerator.reduce(stopped, "sum").item():
            return None
        figures = [
            {
                "num_stages": n,
                "fill": fill,
                "loss": loss / counted if counted and math.isfinite(loss) else None,
                "agreement": agreed / supervised if supervised else None,
            }
            for (n, fill), (loss, counted, supervised, agreed) in zip(
                shapes, accelerator.reduce(sums, "sum").tolist(), strict=True
            )
        ]
        line = {"step": progress.step, "supervised_tokens": progress.supervised, "validation": figures}
        total, rounds = accelerator.reduce(lengths, "sum").tolist()
        line |= {"al_sim": total / rounds} if rounds else {}
        progress.validated = progress.step
        found = traces.figures(gather_object)
        self.write_log(line | ({"traces": found} if found else {}))
        if found:
            self.say(f"step {progress.step}: {in_words(found)}")
        if self.early is not None and self.early.judge(progress.step, found, figures):
            if accelerator.is_main_process:
                keep_best(self.head, args.output_dir)
            accelerator.wait_for_everyone()
        for figure in figures:
            name = f"val/n{figure['num_stages']}_fill{figure['fill']}"
            self.track({f"{name}_{key}": figure[key] for key in ("loss", "agreement")})
        return figures

    def open_log(self, checkpoint: Path | None) -> None:
        """Start the log, with the lines of a continued run up to its checkpoint."""
        lines = [] if checkpoint is None else read_log(checkpoint.parent / LOG_NAME)
        if self.accelerator.is_main_process:
            write_log(self.args.output_dir / LOG_NAME, [line for line in lines if line["step"] <= self.progress.step])

    def log(self, bar: tqdm) -> None:
        """A line for the steps since the last one."""
        progress = self.progress
        means = progress.close_window()
        line = {
            "step": progress.step,
            "epoch": round(progress.step * self.order.step_size / len(self.data.train), 4),
            "supervised_tokens": progress.supervised,
            **means,
            "lr": self.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": self.gradient_norm if math.isfinite(self.gradient_norm) else None,
            "skipped_steps": progress.skipped,
            "seconds": round(progress.seconds, 3),
        }
        self.write_log(line | self.loss.figures())
        self.track({f"train/{name}": value for name, value in line.items() if name != "step"})
        bar.set_postfix({name: "-" if value is None else f"{value:.4g}" for name, value in means.items()})

    def write_log(self, line: dict[str, object]) -> None:
        if self.accelerator.is_main_process:
            append_log(self.args.output_dir / LOG_NAME, line)

    def track(self, values: dict[str, float | None]) -> None:
        if self.args.tracker != "none":
            known = {name: value for name, value in values.items() if value is not None}
            self.accelerator.log(known, step=self.progress.step)

    def say(self, line: str) -> None:
        """One line on stderr, from the main process, clear of the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(line, file=sys.stderr)

    # Checkpoints

    def identity(self) -> dict[str, object]:
        """What has to be the same in a continued run."""
        names = ("seed", "optimizer", "lr", "lr_adamw", "lm_head_lr_scale", "weight_decay")
        names += ("trained_with_use_deepest", "fill_alpha", "stop_on")
        return {f"--{name}": getattr(self.args, name) for name in names} | {
            "examples per step": self.order.step_size,
            "training examples": len(self.data.train),
            "training tokens": int(self.order.lengths.sum()),
            "head": self.head.config.to_dict() | {"base_model_path": ""},  # the target may have moved
            **self.loss.identity,
        }

    def save(self) -> None:
        """A checkpoint, written by the main process while the others wait."""
        random_states = gather_object([random_state()])
        if self.accelerator.is_main_process:
            state = {
                "identity": self.identity(),
                "progress": asdict(self.progress),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scaler": self.scaler.state_dict(),
                "random_states": random_states,
                "loss": self.loss.state(),
                "early": None if self.early is None else self.early.state(),
            }
            folder, keep = self.args.output_dir, self.args.keep_checkpoints
            has_best = self.early is not None and self.early.step >= 0
            save_checkpoint(folder, self.progress.step, self.head, state, keep, *[folder / BEST_NAME] * has_best)
        self.saved_step = self.progress.step
        self.accelerator.wait_for_everyone()

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. ValueError when it is damaged or belongs to a run with other settings or data."""
        state = read_state(checkpoint, self.identity())
        self.head.load_state_dict(read_payload(checkpoint)[1])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        vars(self.progress).update(state["progress"])
        self.loss.load_state(state["loss"])
        if self.early is not None:
            self.early.load_state(state["early"])
            if self.accelerator.is_main_process:
                copy_best(checkpoint, self.args.output_dir)
            self.accelerator.wait_for_everyone()
        if checkpoint.resolve().parent == self.args.output_dir.resolve():
            self.saved_step = self.progress.step
        if self.accelerator.process_index < len(state["random_states"]):
            set_random_state(state["random_states"][self.accelerator.process_index])
        self.say(f"continuing {checkpoint} at step {self.progress.step} of {self.total_steps}")

    # The end

    def stop(self) -> int:
        self.write_record("stopped")
        self.say(f"stopped after step {self.progress.step}: continue with the same arguments and --resume_from auto")
        return 128 + (self.signals.received or signal.SIGTERM)  # None: another process was told

    def disk_error(self, error: OSError) -> OSError | ValueError:
        """What to raise for an error: the user's line with the last checkpoint, when it is about this run's files."""
        folder = self.args.output_dir.resolve()
        if error.filename is None or not Path(error.filename).resolve().is_relative_to(folder):
            return error
        kept = list_checkpoints(folder)
        last = "there is no checkpoint yet"
        if kept:
            last = f"--resume_from auto goes on from {kept[-1]}{room_for(error, then=' when there is room')}"
        return ValueError(
            f"--output_dir {str(self.args.output_dir)!r} cannot be written ({error.strerror}, step "
            f"{self.progress.step}, {Path(error.filename).name}); {last}"
        )

    def finish(self, outcome: str) -> int:
        """Last validation, the head, the record and the plot. What a long validation could lose is saved before."""
        if self.data.val is not None and self.saved_step != self.progress.step:
            self.save()
        path, best = self.args.output_dir / CHECKPOINT_NAME, {}
        figures = [] if self.ended_early else self.validate()
        if figures is None:
            return self.stop()
        if self.early is not None:
            figures, best = self.early.validation, {"best_step": self.early.step, "trace_alpha": self.early.alpha}
            self.say(f"the best head is that of step {self.early.step}: {self.early.alpha:.4f} of its drafts accepted")
        if self.accelerator.is_main_process:
            if self.early is None:
                save_head(self.head, path)
            else:
                os.replace(self.args.output_dir / BEST_NAME, path)
            self.write_record(outcome, validation=figures, **best)
            plot_log(self.args.output_dir / LOG_NAME)
        full = [f for f in figures if f["fill"] == f["num_stages"] and f["agreement"] is not None]
        agreement = "".join(f", agreement {f['agreement']:.4f} held out at n = {f['num_stages']}" for f in full)
        self.say(f"{outcome} after step {self.progress.step} of {self.total_steps}{agreement}; head: {path}")
        return 0

    def write_record(self, outcome: str, **more: object) -> None:
        """`run.json`, from the main process."""
        record = run_record(self.args) | {
            "outcome": outcome,
            "processes": self.accelerator.num_processes,
            "mixed_precision": self.accelerator.mixed_precision,
            "examples_per_step": self.order.step_size,
            "steps": self.progress.step,
            "total_steps": self.total_steps,
            "skipped_steps": self.progress.skipped,
            "supervised_tokens": self.progress.supervised,
            "training_seconds": self.progress.seconds,
            "wall_seconds": time.monotonic() - self.started,
            "head_parameters": sum(weight.numel() for weight in self.head.parameters()),
            "train_examples": len(self.data.train),
            "val_examples": 0 if self.data.val is None else len(self.data.val),
            "data": vars(self.data.counters),
        }
        if self.accelerator.is_main_process:
            write_json(self.args.output_dir / "run.json", record | more)


def spread(total: int, most: int) -> np.ndarray:
    """Indices of at most so many of `total` rows, evenly spaced: they come from all files in proportion."""
    count = min(total, most)
    return np.arange(count) * total // max(count, 1)


def load_data(
    args: argparse.Namespace, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase
) -> ConversationData:
    """The conversations; one process a machine encodes them, the others find the rows in the cache."""
    with accelerator.local_main_process_first():
        try:
            return load_conversations(
                args.data_path,
                tokenizer,
                max_length=args.max_length,
                overflow=args.max_length_overflow,
                min_length=args.min_length,
                mask_assistant=args.mask_assistant,
                val_fraction=args.val_fraction,
                seed=args.seed,
                num_proc=args.num_proc,
                cache_dir=args.cache_dir,
                rebuild=args.force_rebuild_cache and accelerator.is_local_main_process,
                enable_thinking=args.enable_thinking,
                verbose=accelerator.is_main_process,
            )
        except OSError as error:
            raise ValueError(f"--data_path: {first_line(error)}") from None


def main(args: argparse.Namespace) -> int:
    """Train; returns the exit code of `Trainer.run`. ValueError, in one line, for what the user has to mend."""
    quiet_libraries()
    check_launch(args)
    check_template_flags(args)
    check_head_flags(args)
    config_of_target = target_config(args)
    config = head_config(args, config_of_target)
    start_all_processes()

    def make_loss(target: Target) -> DraftLoss:
        identity = "identity" in (args.head_init or "")
        layers = config.spec_init_from_base_layers
        head = new_head(config, target, layers, args.seed, identity_projections=identity)
        if args.init_head is not None:
            start_from(head, args.init_head)
        return head_loss(args, head, target)

    return run_training(args, config_of_target, make_loss)


def head_loss(args: argparse.Namespace, head: SpeculationHead, target: Target) -> DraftLoss:
    """The training forward that the flags of rows and loss ask for."""
    terms = LossTerms(args.loss, args.temperature, 3.0 if args.loss_eta is None else args.loss_eta)
    if args.rows == "staircase":
        attention = "flex_attention" if args.attn_implementation == "flex_attention" else "sdpa"
        return HeadLoss(head, target, terms=terms, exact_fill=args.fill_alpha is not None, attention=attention)
    return HeadReplayLoss(Replay(head, target, ReplaySettings.of(args), terms))


def run_training(
    args: argparse.Namespace, config_of_target: PreTrainedConfig, make_loss: Callable[[Target], DraftLoss]
) -> int:
    """Data, target, head, and the run; returns its exit code. `make_loss` makes the head and its loss."""
    writes = int(os.environ.get("RANK", 0)) == 0
    with lock_folder("--output_dir", args.output_dir) if writes else nullcontext():
        checkpoint = find_checkpoint(args.resume_from, args.output_dir)
        if writes:
            remove_unfinished(args.output_dir)
        return train_head(args, config_of_target, make_loss, checkpoint)


def train_head(
    args: argparse.Namespace,
    config_of_target: PreTrainedConfig,
    make_loss: Callable[[Target], DraftLoss],
    checkpoint: Path | None,
) -> int:
    """`run_training` in an output folder that is this run's alone."""
    tokenizer = load_tokenizer(args.model_name, args.trust_remote_code)
    use_template(tokenizer, args)
    if len(tokenizer) > config_of_target.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the target only {config_of_target.vocab_size}")

    on_cpu = not torch.cuda.is_available()
    precision = ("no" if on_cpu else "bf16") if args.mixed_precision == "auto" else args.mixed_precision
    accelerator = Accelerator(
        mixed_precision=precision,
        cpu=on_cpu,
        log_with=None if args.tracker == "none" else args.tracker,
        project_dir=args.output_dir,
        # The others wait for the one that encodes the data.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))],
    )
    data = load_data(args, accelerator, tokenizer)
    target = load_target(args, accelerator, TARGET_DTYPES[precision], config_of_target.num_hidden_layers)
    collator = PadCollator(0)  # any id of the target's will do: it is masked. A tokenizer's own may be none of them
    if args.tracker != "none":
        settings = {name: str(value) for name, value in vars(args).items()}
        accelerator.init_trackers("speculation_head", settings, {"wandb": {"dir": str(args.output_dir)}})
    code = Trainer(args, accelerator, make_loss(target), data, collator).run(checkpoint)
    accelerator.end_training()
    return code


if __name__ == "__main__":
    run_script(main, build_parser())
