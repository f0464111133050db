"""Train a small head in about two minutes, so that `make demo` has one to show.

The target answers a handful of prompts (demo_prompts.txt), and the head is trained on those answers again and again.
It knows these answers and little else: what the demo shows is the pipeline at work, not what a trained head reaches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from pipeline_inference import load_tokenizer
from pipeline_model import CHECKPOINT_NAME, Target
from script_utils import Parser, atomic_open, quiet_libraries, run_script
from training_state import CURVE_NAME

HERE = Path(__file__).parent


def build_parser() -> Parser:
    parser = Parser(description="Train the demo head on the target's own answers to a handful of prompts.")
    parser.add_argument("--base_model_path", default=str(HERE / "SmolLM2-135M-Instruct"), help="target model")
    parser.add_argument("--prompts", type=Path, default=HERE / "demo_prompts.txt", help="one prompt a line")
    parser.add_argument("--output", type=Path, default=HERE / "speculation_head_demo.pt", help="head to write")
    parser.add_argument("--num_stages", type=int, default=6, help="n")
    parser.add_argument("--answer_tokens", type=int, default=80, help="new tokens of an answer at most")
    parser.add_argument("--minutes", type=float, default=4.0, help="training time at most")
    parser.add_argument("--curve", type=Path, help="also keep the training curve, as this PNG file")
    return parser


def answers(target: Target, tokenizer, prompts: list[str], count: int) -> list[str]:
    """The target's greedy answers, all prompts in one batch."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.inference_mode():
        ids = target.model.generate(**batch, max_new_tokens=count, do_sample=False)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def keep(file: Path, name: Path) -> None:
    """Copy a file of the run to where the user wants it, whole or not at all."""
    with atomic_open(name, "wb") as copy:
        copy.write(file.read_bytes())


def main(args: argparse.Namespace) -> None:
    quiet_libraries()
    if not args.prompts.is_file():
        raise ValueError(f"--prompts is {str(args.prompts)!r}: no such file; give a text file with one prompt a line")
    prompts = args.prompts.read_text(encoding="utf-8").split("\n")
    prompts = [prompt for prompt in prompts if prompt.strip()]
    print(f"No trained head yet: making a small one from the target's answers to {len(prompts)} prompts, in about")
    print("two minutes. It will know these answers and little else.", flush=True)
    target = Target.load(args.base_model_path)
    tokenizer = load_tokenizer(args.base_model_path)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "answers.jsonl"
        with atomic_open(data) as file:
            for prompt, answer in zip(prompts, answers(target, tokenizer, prompts, args.answer_tokens), strict=True):
                turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
        layers = target.num_layers
        del target  # training loads its own
        flags = {
            "model_name": args.base_model_path,
            "data_path": data,
            "output_dir": Path(folder) / "run",
            "draft_vocab_json": HERE.parent / "draft_vocab" / "sharegpt_smollm2_top_16k.json",
            "num_stages": args.num_stages,
            "spec_init_from_base_layers": f"{layers // 2},{layers - 1}",
            "max_minutes": args.minutes,
            "epochs": 15,
            "batch_size": 4,
            "gradient_accumulation_steps": 1,
            "lr": 2e-3,
            "warmup_steps": 3,
            "val_fraction": 0,
            "log_interval": 1,
            "cache_dir": Path(folder) / "cache",
        }
        command = [item for name, value in flags.items() for item in (f"--{name}", str(value))]
        code = train.main(train.build_parser().parse_args(command))
        if code:
            raise ValueError(f"training ended with exit code {code}")
        keep(flags["output_dir"] / CHECKPOINT_NAME, args.output)
        if args.curve:
            keep(flags["output_dir"] / CURVE_NAME, args.curve)
    print(f"Head written to {args.output}")


if __name__ == "__main__":
    run_script(main, build_parser())
