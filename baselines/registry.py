"""All methods of decoding, and the flags of each: what eval.py and train_baseline.py go through."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Literal

from baselines.dflash_method import DFlash
from baselines.eagle3 import Eagle3
from baselines.method import Flag, Method
from baselines.ppsd import PPSD
from baselines.prompt_lookup import PromptLookupMethod
from baselines.spd import SPD, Autoregressive

METHODS: dict[str, Method] = {
    method.name: method for method in (SPD(), Eagle3(), PPSD(), DFlash(), Autoregressive(), PromptLookupMethod())
}
Kind = Literal["training_flags", "decoding_flags"]


def owners(kind: Kind) -> dict[str, dict[str, Flag]]:
    """By the name of each flag: the methods that have it, with their own form of it."""
    found: dict[str, dict[str, Flag]] = {}
    for method in METHODS.values():
        for flag in getattr(method, kind):
            found.setdefault(flag.name, {})[method.name] = flag
    return found


def add_method_flags(group: argparse._ArgumentGroup, kind: Kind) -> None:
    """Add the flags of all methods, each once. Its help says whose it is, and each method's default."""
    for name, flags in owners(kind).items():
        flag = next(iter(flags.values()))
        star = "* " if "nargs" in flag.settings else ""  # takes several values: a run for each
        defaults = dict.fromkeys(shown_default(each.default) for each in flags.values() if each.default is not None)
        # Of no width: argparse's own default, None for all, which its formatter would add if the help did not name it.
        text = f"{star}{', '.join(flags)}: {flag.help} (default: {', '.join(defaults) or None})%(default).0s"
        group.add_argument(f"--{name}", help=text, **flag.settings)


def shown_default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def check_owners(args: argparse.Namespace, kind: Kind) -> None:
    """ValueError for a flag of other methods than the one at hand."""
    for name, flags in owners(kind).items():
        if args.method not in flags and getattr(args, name) is not None:
            raise ValueError(f"--{name} belongs to --method {' and '.join(flags)}: leave it out with {args.method}")


def with_defaults(args: argparse.Namespace, kind: Kind) -> argparse.Namespace:
    """The arguments with the method's own defaults where a flag was not given."""
    flags: Mapping[str, Any] = {flag.name: flag.default for flag in getattr(METHODS[args.method], kind)}
    missing = {name: default for name, default in flags.items() if getattr(args, name) is None}
    return argparse.Namespace(**vars(args) | missing)
