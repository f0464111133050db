"""A run from flags to exit code, with the output folder locked: data, target, head, and the trainer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from loading.chat_template import use_template
from loading.tokenizer import load_tokenizer
from pipeline_model import Target
from script_utils import first_line, lock_folder
from training.conversations import ConversationData, PadCollator, load_conversations
from training.flags import TARGET_DTYPES
from training.head_loss import DraftLoss
from training.run_state import find_checkpoint, remove_unfinished
from training.start import load_target
from training.trainer import Trainer


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
