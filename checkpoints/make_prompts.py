"""Writes prompts for the demo head's training text: arithmetic word problems and Python functions to complete.

Conversations in the wild have few of either. Word problems are drawn from the templates below or put together from a
beginning, some events and a question. Functions are those of the Python standard library and of `PACKAGES`, signature
and documentation, and exercises: what to keep of a list, what to make of it and what to return, with examples that this
script computes. Nothing comes from an evaluation set.

    python checkpoints/make_prompts.py --output prompts.jsonl --count 1000
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from textwrap import indent
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))

from loading.flags import COUNT
from script_utils import Parser, atomic_open, check_output_file, run_script

NAMES = (
    *("Ada", "Ben", "Carla", "Dmitri", "Elif", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kavya", "Liam", "Mona"),
    *("Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Samir", "Tess", "Umar", "Vera", "Wei", "Yusuf", "Zoe"),
)
THINGS = (
    *("apples", "books", "marbles", "stickers", "pencils", "cookies", "stamps", "shells", "eggs", "roses", "tickets"),
    *("cards", "candles", "oranges", "balloons", "bricks", "coins", "bottles", "muffins", "photos", "chairs", "toys"),
)
PLACES = (
    *("a bakery", "a school", "a library", "a farm", "a small shop", "a factory", "a museum", "a cafe"),
    *("a hotel", "a market", "a theater", "a warehouse", "an office", "a garden center", "a zoo", "a bus station"),
)
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
    "A recipe for {d} people needs {c} cups of flour. {name} cooks for {b} people. How many cups of flour are needed?",
    "{name} drives to work at {b} miles per hour and needs {d} hours. The way back takes {c} hours. What is the speed "
    "on the way back?",
    "{place} has {c} shelves with {b} {thing} each. {name} sells a third of all {thing} and orders {a} more. How many "
    "are there in the end?",
    "A shirt costs ${b}. {name} buys {c} shirts with a discount of {d} percent. How much does {name} save?",
    "{name} swims {d} laps on the first day and {c} laps more on every day after it. How many laps are that in a week?",
    "A phone plan costs ${b} a month and {d} cents for every minute. {name} talks for {a} minutes. What is the bill?",
    "{name} plants {c} rows of {b} flowers. A quarter of them do not grow. Each of the others sells for ${d}. How much "
    "money does {name} make?",
    "{name} scored {b}, {a}, and {d} points in three games. What is the average, and how many points are missing for "
    "a total of 1000?",
    "{place} is open {c} hours a day, six days a week. Every hour {b} visitors come, and each pays ${d}. How much does "
    "it take in per week?",
    "{name} has ${a}. After buying {d} {thing} at ${c} each and a bag for ${b}, how much money does {name} have left?",
    "Two buses leave {place} in opposite directions at {b} and {a} miles per hour. How far apart are they after {d} "
    "hours?",
    "{name} cuts a rope of {a} inches into pieces of {c} inches. How many whole pieces are there, and how long is the "
    "rest?",
    "{name} types {b} words per minute. {other} types {c} words per minute more. How long does a text of {a} words "
    "take each of them?",
    "A class of {b} students collects {thing}. Each girl brings {c}, each boy brings {d}. If {d} of the students are "
    "girls, how many {thing} does the class have?",
    "{name} borrows ${a} at {c} percent simple interest per year. How much does {name} owe after {d} years?",
    "Every {c} minutes a machine makes {d} {thing}. How many does it make in {b} hours?",
)
BEGINNINGS = (
    "{name} has {a} {thing}.",
    "There are {a} {thing} in {place}.",
    "{name} and {other} collect {a} {thing} together.",
    "{place} orders {c} boxes with {b} {thing} each.",
    "{name} makes {b} {thing} a day for {c} days.",
)
EVENTS = (
    "{other} brings {b} more.",
    "{c} of them get lost.",
    "{name} gives {d} of them to {other}.",
    "Half of the {thing} are sold.",
    "On the next day the number doubles.",
    "{d} percent of them are broken and thrown away.",
    "A friend takes {c} and brings back {d}.",
    "{name} buys three more boxes with {c} in each.",
    "A third of what is left goes to {place}.",
)
ENDINGS = (
    "How many {thing} are there now?",
    "How many {thing} are left?",
    "If each of the remaining {thing} costs ${c}, how much are they worth?",
    "The rest is packed into bags of {d}. How many bags are needed?",
    "{c} people share the rest equally. How many {thing} does each of them get?",
    "How many more are needed to have 1000 {thing}?",
)
TASKS = ("Complete this function.", "Write the body of this Python function.", "Finish the code.", "Implement this:")
SKIPPED_MODULES = {"antigravity", "this", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo"}  # they show things
PACKAGES = ("matplotlib.pyplot", "networkx", "numpy", "pandas", "sympy", "torch")  # where installed
MAX_DOC = 600  # characters of documentation

# Exercises: (words in the documentation, what it does)
KEPT_NUMBERS = (
    ("numbers", lambda x: True),
    ("even numbers", lambda x: x % 2 == 0),
    ("odd numbers", lambda x: x % 2 == 1),
    ("positive numbers", lambda x: x > 0),
    ("negative numbers", lambda x: x < 0),
    ("multiples of three", lambda x: x % 3 == 0),
    ("numbers greater than ten", lambda x: x > 10),
    ("numbers with two digits", lambda x: 10 <= abs(x) <= 99),
    ("numbers that end in five", lambda x: abs(x) % 10 == 5),
)
MADE_NUMBERS = (
    ("", lambda x: x),
    ("squares of the ", lambda x: x * x),
    ("absolute values of the ", abs),
    ("doubles of the ", lambda x: 2 * x),
    ("last digits of the ", lambda x: abs(x) % 10),
    ("digit sums of the ", lambda x: sum(map(int, str(abs(x))))),
)
NUMBER_RESULTS = (
    ("the sum of the", "int", sum),
    ("the product of the", "int", prod),
    ("the largest of the", "int", lambda xs: max(xs, default=None)),
    ("the smallest of the", "int", lambda xs: min(xs, default=None)),
    ("a sorted list of the", "list", sorted),
    ("a list, in reverse order, of the", "list", lambda xs: xs[::-1]),
    ("a list without duplicates of the", "list", lambda xs: list(dict.fromkeys(xs))),
    ("how often each one occurs, as a dictionary, of the", "dict", lambda xs: {x: xs.count(x) for x in xs}),
    ("the difference between the largest and the smallest of the", "int", lambda xs: max(xs) - min(xs) if xs else 0),
    ("a list of the running totals of the", "list", lambda xs: [sum(xs[: i + 1]) for i in range(len(xs))]),
)
KEPT_WORDS = (
    ("words", lambda w: True),
    ("words that start with a vowel", lambda w: w[0] in "aeiou"),
    ("words with more than four letters", lambda w: len(w) > 4),
    ("words with an even number of letters", lambda w: len(w) % 2 == 0),
    ("words that contain the letter e", lambda w: "e" in w),
    ("words without the letter a", lambda w: "a" not in w),
    ("words that end in a consonant", lambda w: w[-1] not in "aeiou"),
    ("words that have a letter twice", lambda w: len(set(w)) < len(w)),
)
MADE_WORDS = (
    ("", lambda w: w),
    ("capitalized ", str.capitalize),
    ("reversed ", lambda w: w[::-1]),
    ("uppercase ", str.upper),
    ("first letters of the ", lambda w: w[0]),
    ("last two letters of the ", lambda w: w[-2:]),
)
WORD_RESULTS = (
    ("a list of the", "list", list),
    ("the number of different", "int", lambda ws: len(set(ws))),
    ("a string, joined by spaces, of the", "str", " ".join),
    ("a string, joined by hyphens, of the", "str", "-".join),
    ("the longest of the", "str", lambda ws: max(ws, key=len, default="")),
    ("an alphabetically sorted list of the", "list", sorted),
    ("the lengths, as a dictionary, of the", "dict", lambda ws: {w: len(w) for w in ws}),
    ("the total number of letters of the", "int", lambda ws: sum(map(len, ws))),
)
WORDS = (
    *("river", "apple", "stone", "tree", "old", "window", "green", "idea", "cat", "summer", "paper", "evening", "sun"),
    *("letter", "moon", "garden", "eye", "street", "yellow", "bottle", "ice", "music", "open", "horse", "under", "sea"),
)


def build_parser() -> Parser:
    parser = Parser(prog="make_prompts.py", description="Write prompts for the demo head's training text.")
    parser.add_argument("--output", type=Path, required=True, help="jsonl file to write")
    parser.add_argument("--count", type=COUNT, default=1000, help="prompts of each kind, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    return parser


def word_problem(draw: random.Random) -> str:
    """One of the problems, or a beginning, two to four events and a question."""
    name, other = draw.sample(NAMES, 2)
    a, b, c, d = draw.randint(60, 480), draw.randint(12, 50), draw.randint(3, 9), draw.choice((2, 4, 5, 10, 20))
    place, thing = draw.choice(PLACES), draw.choice(THINGS)
    if draw.random() < 0.5:
        text = draw.choice(PROBLEMS)
    else:
        events = draw.sample(EVENTS, draw.randint(2, 4))
        text = " ".join((draw.choice(BEGINNINGS), *events, draw.choice(ENDINGS)))
    text = text.format(name=name, other=other, a=a, b=b, c=c, d=d, place=place, thing=thing)
    return text[0].upper() + text[1:]


def exercise(draw: random.Random) -> str:
    """A function over a list of numbers or words, with two examples in its documentation."""
    if draw.random() < 0.5:
        tables = KEPT_NUMBERS, MADE_NUMBERS, NUMBER_RESULTS
        argument, of = draw.choice(("numbers", "values", "nums", "lst")), "list[int]"
        examples = [[draw.randint(-20, 60) for _ in range(draw.randint(3, 7))] for _ in range(2)]
    else:
        tables = KEPT_WORDS, MADE_WORDS, WORD_RESULTS
        argument, of = draw.choice(("words", "strings", "names", "items")), "list[str]"
        examples = [draw.sample(WORDS, draw.randint(3, 6)) for _ in range(2)]
    (kept, keep), (made, make), (result, kind, finish) = map(draw.choice, tables)
    stem = kept.split(" that ")[0].split(" with")[0].replace(" ", "_")
    name = draw.choice((f"process_{stem}", f"collect_{stem}", f"{stem}_of", "solve", "compute", f"handle_{argument}"))
    doc = f"Return {result} {made}{kept} in {argument}.\n"
    for example in examples:
        answer = finish([make(item) for item in example if keep(item)])
        doc += f">>> {name}({example})\n{answer!r}\n"
    return f"def {name}({argument}: {of}) -> {kind}:\n" + indent(f'"""{doc}"""\n', "    ")


def modules() -> Iterator[tuple[str, ModuleType]]:
    """The standard library's, then those that importing `PACKAGES` brings in."""
    for name in sorted(sys.stdlib_module_names - SKIPPED_MODULES):
        try:
            yield name, importlib.import_module(name)
        except ImportError:  # of another operating system
            continue
    tops = set()
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:  # not installed
            continue
        tops.add(package.split(".")[0])
    yield from sorted((name, module) for name, module in sys.modules.items() if name.split(".")[0] in tops)


def library_functions() -> list[str]:
    """`def name(...):` and its documentation, for the public functions and methods of all `modules`."""
    found = {}
    for module_name, module in modules():
        classes = [owner for _, owner in members(module, inspect.isclass) if owner.__module__ == module_name]
        for owner in (module, *classes):
            for name, function in members(owner, inspect.isfunction):
                text = as_prompt(name, function)
                if function.__module__ == module_name and text:
                    found[module_name, function.__qualname__] = text
    return [found[name] for name in sorted(found)]


def members(owner: object, kind: Callable[[object], bool]) -> list[tuple[str, object]]:
    """`inspect.getmembers`, empty for what cannot be looked into (modules that load their parts when asked)."""
    try:
        return inspect.getmembers(owner, kind)
    except Exception:
        return []


def as_prompt(name: str, function: Callable) -> str | None:
    """Signature and documentation as source; None for what is private, undocumented or too long."""
    try:
        doc, signature = inspect.getdoc(function), str(inspect.signature(function))
    except ValueError:  # wraps a function of C
        return None
    if name.startswith("_") or " at 0x" in signature or not doc or not 40 <= len(doc) <= MAX_DOC:
        return None
    return f"def {name}{signature}:\n" + indent(f'"""{doc}\n"""\n', "    ")


def main(args: argparse.Namespace) -> None:
    check_output_file("--output", args.output)
    warnings.simplefilter("ignore")  # of modules that are looked into, about what they will drop
    draw = random.Random(args.seed)
    library = library_functions()
    functions = draw.sample(library, min(args.count, len(library))) + [exercise(draw) for _ in range(args.count)]
    prompts = [f"{draw.choice(TASKS)}\n\n{function}" for function in functions]
    prompts += [word_problem(draw) for _ in range(args.count)]
    with atomic_open(args.output) as file:
        for prompt in prompts:
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False) + "\n")
    counts = f"{len(functions) - args.count} library functions, {args.count} exercises and {args.count} word problems"
    print(f"{counts} in {args.output}")


if __name__ == "__main__":
    run_script(main, build_parser())
