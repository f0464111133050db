"""Starts the ranks of a script that was itself started with plain `python`, as `torchrun --standalone` would.

Heads that need different numbers of stages, or different splits, get ranks of their own, one launch after the other.
Everything that one process can check is checked for all of them before the first rank is started.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distributed_inference.launch import (
    Checked,
    RankParser,
    Script,
    Share,
    choose_device,
    read_heads,
    run_rank,
    share_ranks,
)
from distributed_inference.layout import Layout
from distributed_inference.startup import Environment
from script_utils import atomic_open, quiet_libraries, run_script

CTRL_C_TAKER = "SPD_CTRL_C_TAKER"  # names the file with the process id of the rank that Ctrl-C is for
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # torchrun sets them for every rank


def run(script_class: type[Script], parser: RankParser) -> NoReturn:
    """Be the rank that torchrun started this process for; started by hand, start all ranks and wait for them."""
    if any(name in os.environ for name in RANK_VARIABLES):
        run_rank(script_class, parser)
    run_script(partial(launch_all, script_class), parser)


def take_ctrl_c() -> None:
    """Called by the rank with the terminal: from now on, Ctrl-C reaches it and does not stop the run."""
    taker = os.environ.get(CTRL_C_TAKER)  # torchrun has none, and stops all ranks
    if taker is not None:
        with atomic_open(taker) as file:
            file.write(str(os.getpid()))


class Launch(NamedTuple):
    """Ranks that are started together."""

    world_size: int
    flags: list[str]  # they take the place of the user's own


def launch_all(script_class: type[Script], args: argparse.Namespace) -> int:
    """Launch after launch. Returns 0, or the exit code of the first that failed.

    What has failed (code 1) does not stop the launches after it, as a run of eval.py does not stop the others; bad
    input and signals do.
    """
    quiet_libraries()
    launches = plan_launches(script_class, args)
    first_failure = 0
    for number, (world_size, flags) in enumerate(launches, start=1):
        if len(launches) > 1:
            print(f"[launch {number}/{len(launches)}] {world_size} ranks: {' '.join(flags)}", flush=True)
        code = start_ranks(world_size, [*sys.argv, *flags])
        first_failure = first_failure or code
        if code > 1:
            break
    return first_failure


def plan_launches(script_class: type[Script], args: argparse.Namespace) -> list[Launch]:
    """What to start for all heads. ValueError, as every rank would raise it, for what cannot work."""
    heads, _, target_config = read_heads(args)
    shares = share_ranks(args, heads, target_config)
    launches = []
    for share in shares:
        world_size = Layout(share.stage_sizes, args.colocate_draft, args.lm_head).world_size
        changed = {} if len(shares) == 1 else changed_flags(args, share, world_size)
        own_args = argparse.Namespace(**vars(args) | changed)
        for rank in range(world_size):
            choose_device(own_args, Environment(rank, rank, world_size))
        with redirect_stderr(io.StringIO()):  # notes: rank 0 writes them again
            script_class(own_args).prepare(Checked(own_args, Environment(0, 0, world_size)))
        launches.append(Launch(world_size, command_line(changed)))
    return launches


def changed_flags(args: argparse.Namespace, share: Share, world_size: int) -> dict[str, str | list]:
    """The flags in which a launch differs from the command: its heads, n, GPUs, and files of its own."""
    changed: dict[str, str | list] = {"spec_head_ckpt": share.heads}
    if share.num_stages is not None:
        changed["num_stages"] = [share.num_stages]
    if args.rank_gpus and "," in args.rank_gpus:  # listed for the longest pipeline: a shorter one takes the first
        changed["rank_gpus"] = ",".join(args.rank_gpus.split(",")[:world_size])
    for name in ("profile_timing", "trace"):
        if getattr(args, name) is not None:
            path = Path(getattr(args, name))
            stages = "-".join(map(str, share.stage_sizes))
            changed[name] = str(path.with_name(f"{path.stem}_stages{stages}{path.suffix}"))
    return changed


def command_line(flags: dict[str, str | list]) -> list[str]:
    """Flags as on a command line."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def start_ranks(world_size: int, command: Sequence[str]) -> int:
    """Run a script on so many ranks of this machine. Returns 0, or the exit code of the rank that failed first.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT reach the ranks as SIGTERM, which ends them without a word while they still
    import, and with one line later; the code is 128 plus the number of the signal that came. Once a rank has said
    `take_ctrl_c`, SIGINT is for that rank alone.
    """
    came: list[int] = []

    def stop(number: int, _: object) -> None:
        taker = Path(os.environ.get(CTRL_C_TAKER, ""))
        if number == signal.SIGINT and taker.is_file():
            with suppress(ProcessLookupError):  # it ends
                os.kill(int(taker.read_text()), number)
            return
        came.append(number)
        raise SignalException(signal.Signals(number).name, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and a shell's background jobs have them
            signal.signal(number, stop)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    logging.disable(logging.CRITICAL)  # torch's reports of failed processes: the ranks have given their reasons
    with TemporaryDirectory(prefix="ranks_") as folder:
        os.environ[CTRL_C_TAKER] = f"{folder}/takes_ctrl_c"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="SIGTERM",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as stopped:
            return 128 + (came[0] if came else stopped.sigval)
    return 0
