"""The flags of training that train.py and the baselines' trainer share: target, data, optimisation, run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from loading.chat_template import add_template_flags
from loading.flags import COUNT, NATURAL, POSITIVE, add_loading_flags, add_quantization_flag, bounded, integers
from script_utils import Parser, Switch
from training.conversations import OVERFLOW_POLICIES
from training.optimizers import SCHEDULES

TARGET_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by --mixed_precision
PRECISIONS = "auto", *TARGET_DTYPES
STOP_PATIENCE = 3  # validations without a better head, unless the flag says otherwise


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
    steps.add_argument("--mixed_precision", default="auto", choices=PRECISIONS, help="auto: bf16 on CUDA, no on a CPU")
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
