"""Calls of the project's scripts that a comparison makes: each a command that anyone could type."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import NamedTuple

from loading.checkpoint_files import CHECKPOINT_NAME
from loading.target_config import load_target_config
from script_utils import run_record


class Command(NamedTuple):
    """A call of one of the project's scripts, made in this process."""

    script: str
    module: ModuleType
    flags: list[str]

    @property
    def arguments(self) -> argparse.Namespace:
        return self.module.build_parser().parse_args(self.flags)

    def __str__(self) -> str:
        return f"python {self.script} {shlex.join(self.flags)}"


def as_flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as a command line has them: {"lr": 0.1} -> ["--lr", "0.1"]."""
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def layers_read(commands: Iterable[Command], base_model_path: str) -> list[int]:
    """The target's layers whose output some drafter reads."""
    target, layers = load_target_config(base_model_path), set()
    for command in commands:
        layers.update(command.module.head_config(command.arguments, target).anchors)
    return sorted(layers - {0})


def is_trained(command: Command) -> bool:
    """Whether this drafter is finished. ValueError when its folder is another training's."""
    arguments = command.arguments
    record = arguments.output_dir / "run.json"
    if not record.exists():
        return False
    found = json.loads(record.read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(run_record(arguments)["arguments"]))
    for name in (flag.removeprefix("--") for flag in command.flags if flag.startswith("--")):
        value, theirs = wanted[name], found["arguments"].get(name)
        if theirs != value:
            raise ValueError(
                f"{str(arguments.output_dir)!r} was trained with --{name} {theirs}, this comparison has {value}: "
                "choose another --work_dir"
            )
    return found["outcome"] == "finished" and (arguments.output_dir / CHECKPOINT_NAME).exists()


def run_all(trainings: Iterable[Command], evaluations: Iterable[Command] = ()) -> int:
    """Train what is not trained, evaluate what is not evaluated. Returns the exit code of the first that fails."""
    todo = [command for command in trainings if not is_trained(command)]
    for command in (*todo, *evaluations):
        print(f"\n{command}", flush=True)
        code = command.module.main(command.arguments)
        if code:
            return code
    return 0
