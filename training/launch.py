"""How the processes of a training come to be, and what of Accelerate's configuration it follows."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec

import psutil
import torch
from accelerate.commands.launch import launch_command_parser

from loading.target_files import check_attention_kernels
from script_utils import check_output_folder

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
