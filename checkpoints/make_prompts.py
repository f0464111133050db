"""Writes prompts for the demo head's training text: arithmetic word problems and Python functions to complete.

Conversations in the wild have few of either. The word problems are drawn from the templates below, the functions are
those of the Python standard library that runs this script, signature and documentation. Nothing comes from an
evaluation set.

    python checkpoints/make_prompts.py --output prompts.jsonl --count 1000
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

sys.path.insert(0, str(Path(__file__).parents[1]))

from script_utils import Parser, atomic_open, run_script

NAMES = ("Ada", "Ben", "Carla", "Dmitri", "Elif", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kavya", "Liam", "Mona")
THINGS = (
    "apples",
    "books",
    "marbles",
    "stickers",
    "pencils",
    "cookies",
    "stamps",
    "shells",
    "eggs",
    "roses",
    "tickets",
)
PLACES = ("a bakery", "a school", "a library", "a farm", "a small shop", "a factory", "a museum", "a cafe")
PROBLEMS = (
    "{name} has {a} {thing}. {other} gives {name} {b} more, and then {name} loses {c}. How many {thing} are left?",
    "{name} buys {b} boxes of {thing}. Each box holds {a} {thing} and costs ${c}. How much does each of the {thing} "
    "cost, and how much does {name} pay in total?",
    "{place} sells {a} {thing} on Monday, twice as many on Tuesday, and {b} fewer on Wednesday than on Tuesday. How "
    "many {thing} does it sell in the three days?",
    "A train travels {a} miles in {c} hours. At the same speed, how far does it travel in {b} hours?",
    "{name} is {b} years older than {other}. In {c} years the sum of their ages will be {a}. How old is {other} now?",
    "{name} earns ${c} an hour and works {b} hours a week. If {name} saves half of the pay, how much is saved in {d} "
    "weeks?",
    "A rectangular garden is {a} feet long and {b} feet wide. A fence costs ${c} per foot. What does the fence cost?",
    "{name} reads {c} pages on each weekday and {b} pages on each day of the weekend. How many weeks does a book of "
    "{a} pages take?",
    "There are {a} {thing} in {place}. {name} takes {d} percent of them, and {other} takes {c}. How many remain?",
    "{name} runs {c} miles every day for {b} days, {other} runs {d} miles every day for {a} days. How many miles more "
    "does one of them run than the other?",
    "{name} shares {a} {thing} equally among {c} friends and keeps what is left over. How many does each friend get, "
    "and how many does {name} keep?",
    "A ticket costs ${b}. Children pay half. How much do {c} adults and {d} children pay together?",
    "{name} fills a tank of {a} liters. The pump gives {c} liters a minute, but {d} liters an hour leak out. How long "
    "does it take?",
    "The ratio of {thing} that {name} has to those of {other} is {c}:{d}. Together they have {a}. How many more does "
    "one have than the other?",
)
TASKS = ("Complete this function.", "Write the body of this Python function.", "Finish the code.", "Implement this:")
SKIPPED_MODULES = {"antigravity", "this", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo"}  # they show things
MAX_DOC = 500  # characters of documentation


def build_parser() -> Parser:
    parser = Parser(prog="make_prompts.py", description="Write prompts for the demo head's training text.")
    parser.add_argument("--output", type=Path, required=True, help="jsonl file to write")
    parser.add_argument("--count", type=int, default=1000, help="prompts of each kind, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    return parser


def word_problem(draw: random.Random) -> str:
    name, other = draw.sample(NAMES, 2)
    a, b, c, d = draw.randint(60, 480), draw.randint(12, 50), draw.randint(3, 9), draw.choice((2, 4, 5, 10, 20))
    place, thing = draw.choice(PLACES), draw.choice(THINGS)
    text = draw.choice(PROBLEMS).format(name=name, other=other, a=a, b=b, c=c, d=d, place=place, thing=thing)
    return text[0].upper() + text[1:]


def library_functions() -> list[str]:
    """`def name(...):` and its documentation, for the public functions and methods of the standard library."""
    found = {}
    for module_name in sorted(sys.stdlib_module_names - SKIPPED_MODULES):
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # of another operating system
            continue
        classes = [owner for _, owner in inspect.getmembers(module, inspect.isclass) if owner.__module__ == module_name]
        for owner in (module, *classes):
            for name, function in inspect.getmembers(owner, inspect.isfunction):
                text = as_prompt(name, function)
                if function.__module__ == module_name and text:
                    found[module_name, function.__qualname__] = text
    return [found[name] for name in sorted(found)]


def as_prompt(name: str, function: Callable) -> str | None:
    """Signature and documentation as source; None for what is private, undocumented or too long."""
    doc, signature = inspect.getdoc(function), str(inspect.signature(function))
    if name.startswith("_") or " at 0x" in signature or not doc or not 40 <= len(doc) <= MAX_DOC:
        return None
    return f"def {name}{signature}:\n" + indent(f'"""{doc}\n"""\n', "    ")


def main(args: argparse.Namespace) -> None:
    if args.count < 1:
        raise ValueError(f"--count is {args.count}: give at least 1")
    draw = random.Random(args.seed)
    functions = library_functions()
    chosen = draw.sample(functions, min(args.count, len(functions)))
    prompts = [f"{draw.choice(TASKS)}\n\n{function}" for function in chosen]
    prompts += [word_problem(draw) for _ in range(args.count)]
    with atomic_open(args.output) as file:
        for prompt in prompts:
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False) + "\n")
    print(f"{len(chosen)} functions and {args.count} word problems in {args.output}")


if __name__ == "__main__":
    run_script(main, build_parser())
