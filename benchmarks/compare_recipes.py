"""Which way of training helps a head: arms that differ in one thing each, compared on the same texts.

    python benchmarks/compare_recipes.py --work_dir runs/recipes --greedy_answers g.jsonl --sampled_answers s.jsonl

Both files hold the target's answers to the same prompts, by training/generate_answers.py, at temperature 0 and 1. All
arms of a group start from the same head and see the same text in the same order with the same steps and learning rates.
Each head is then judged on the target's own answers to the evaluation prompts (evaluation/replayed.py), so that two
arms differ by their heads alone, and differences have paired intervals over prompts. What is finished is not done
again: a run that was stopped goes on with the same command. --report_only rewrites the report from what is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from tqdm import tqdm

import train
from baselines import train_baseline
from baselines.method import Run
from baselines.ppsd import PPSDConfig
from baselines.registry import METHODS
from benchmarks.compare_methods import Command, is_trained, layers_read
from decoding.metrics import accept_length, alpha
from decoding.sampling import Sampling
from evaluation.metrics import bootstrap_picks, interval
from evaluation.prompts import encode_questions, read_questions
from evaluation.replayed import ReplayedTexts, target_texts
from evaluation.workers import build_decoder
from loading.checksums import file_sha256
from loading.flags import COUNT, NATURAL, POSITIVE
from loading.tokenizer import load_tokenizer
from pipeline_model import Target, checkpoint_file, load_head, read_checkpoint
from script_utils import (
    Parser,
    atomic_open,
    check_output_file,
    check_output_folder,
    git_commit,
    markdown_table,
    quiet_libraries,
    run_script,
    write_json,
)

SAMPLED_SHARE = 3, 10  # of the mixed text: three prompts of ten have their sampled answer, the others the greedy one
TRAINED, NOTHING = "trained", "nothing"  # what an arm starts from


class Arm(NamedTuple):
    """One way of training."""

    what: str
    flags: str  # of train.py, what sets this arm apart
    start: str = TRAINED
    text: str = "mixed"  # or "greedy", "sampled"
    stages: str | None = None  # None: those of --num_stages
    short: bool = False  # --start_steps instead of --max_steps


ARMS = {
    "start": Arm("the head that all arms below start from", ""),
    "S0": Arm("staircase, the paper's fills", ""),
    "S1": Arm("staircase, fills as in decoding", "--fill_alpha 0.5"),
    "P1": Arm("exact rows, fills drawn", "--rows replay --trace bernoulli"),
    "P2": Arm("exact rows, replayed", "--rows replay"),
    "P3": Arm("P2, loss lk", "--rows replay --loss lk"),
    "P4": Arm("P2, rejected drafts count twice", "--rows replay --reject_weight 2"),
    "P5": Arm("P2, flushed drafts too", "--rows replay --flushed 4"),
    "P6-greedy": Arm("P2, greedy text alone", "--rows replay", text="greedy"),
    "P6-sampled": Arm("P2, sampled text alone", "--rows replay", text="sampled"),
    "N-S0": Arm("from nothing: S0 for n = 3", "", NOTHING, "greedy", "3", True),
    "N-P2": Arm("from nothing: P2 for n = 3", "--rows replay", NOTHING, "greedy", "3", True),
    "N-PPSD": Arm("from nothing: PPSD for n = 3", "--method ppsd", NOTHING, "greedy", "3", True),
    "I-random": Arm("all drawn at random", "", NOTHING, "greedy", short=True),
    "I-identity": Arm("A_k passes its deepest state on", "--head_init identity", NOTHING, "greedy", short=True),
    "I-layers": Arm("layers from late target layers", "--head_init late_layers", NOTHING, "greedy", short=True),
    "I-both": Arm("both", "--head_init identity+late_layers", NOTHING, "greedy", short=True),
    "I-frozen": Arm(
        "both, lm_head frozen", "--head_init identity+late_layers --lm_head_lr_scale 0", NOTHING, "greedy", short=True
    ),
    "I-slow": Arm(
        "both, lm_head at lr / 10",
        "--head_init identity+late_layers --lm_head_lr_scale 0.1",
        NOTHING,
        "greedy",
        short=True,
    ),
}
EVALUATION_FLAGS = ("datasets", "prompts_per_dataset", "max_new_tokens", "temperature", "seed", "base_model_path")
# Each claim: the arm, what it is compared with, what the difference is due to.
CLAIMS = (
    ("P2", "S1", "the method: exact rows at replayed fills, against the staircase"),
    ("P1", "S1", "exact rows"),
    ("P2", "P1", "on-policy places"),
    ("S1", "S0", "fills as decoding meets them"),
    ("P3", "P2", "loss `lk` instead of KL"),
    ("P4", "P2", "weight 2 on rejected drafts"),
    ("P5", "P2", "the flushed stream"),
    ("P6-greedy", "P2", "no sampled text"),
    ("P6-sampled", "P2", "sampled text alone"),
    ("P2", "start", "more training, with replay"),
    ("N-P2", "N-PPSD", "from nothing: SPD with replay, against PPSD"),
    ("N-P2", "N-S0", "from nothing: replay, against the staircase"),
    ("I-identity", "I-random", "A_k that pass their deepest state on"),
    ("I-layers", "I-random", "layers from late target layers"),
    ("I-both", "I-random", "both"),
    ("I-frozen", "I-both", "lm_head frozen"),
    ("I-slow", "I-both", "lm_head at lr / 10"),
)


def build_parser() -> Parser:
    parser = Parser(prog="compare_recipes.py", description="Train a head in several ways and compare them.")
    parser.add_argument(
        "--work_dir", type=Path, required=True, help="folder of heads and figures; a stopped run goes on"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/training_recipes.md"), help="the report")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS], help="train and evaluate only these")
    parser.add_argument("--report_only", action="store_true", help="neither train nor evaluate")
    target = parser.add_argument_group("target and start")
    target.add_argument("--base_model_path", default="checkpoints/SmolLM2-135M-Instruct", help="folder or hub id")
    target.add_argument(
        "--start", default="checkpoints/SmolLM2-135M-Instruct_s6_l2.pt", help="trained head that most arms start from"
    )
    target.add_argument(
        "--draft_vocab_json", default="draft_vocab/sharegpt_smollm2_top_16k.json", help="of heads from nothing"
    )
    target.add_argument("--num_stages", default="2,3,6", help="n that each head is trained and judged for")
    training = parser.add_argument_group("training, the same for all arms of a group")
    training.add_argument("--greedy_answers", action="append", required=True, help="text at temperature 0; repeatable")
    training.add_argument("--sampled_answers", action="append", required=True, help="the same prompts at 1; repeatable")
    training.add_argument("--max_steps", type=COUNT, default=200, help="optimiser steps from a trained head")
    training.add_argument("--start_steps", type=COUNT, default=100, help="optimiser steps from nothing")
    training.add_argument("--batch_size", type=COUNT, default=8, help="answers per step")
    training.add_argument("--max_length", type=COUNT, default=320, help="tokens of an example at most")
    training.add_argument("--lr", type=POSITIVE, default=2e-3, help="Muon's peak; twice as much from nothing")
    training.add_argument("--lr_adamw", type=POSITIVE, default=5e-4, help="AdamW's peak; likewise")
    training.add_argument("--mixed_precision", default="auto", help="as in train.py")
    prompts = parser.add_argument_group("evaluation, the same for all")
    prompts.add_argument("--data_dir", type=Path, default=Path("eval_data"), help="folder of data sets")
    prompts.add_argument("--datasets", nargs="+", default=["mt_bench", "gsm8k", "humaneval"], help="folders there")
    prompts.add_argument("--prompts_per_dataset", type=COUNT, default=10, help="the first so many of each")
    prompts.add_argument("--max_new_tokens", type=COUNT, default=64, help="new tokens at most")
    prompts.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="of the judged decoding")
    parser.add_argument("--seed", type=NATURAL, default=0, help="of training and evaluation")
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def write_texts(args: argparse.Namespace) -> None:
    """The three training texts, in one order: greedy, sampled, mixed. ValueError when the prompts differ."""
    texts = {
        name: read_answers(paths)
        for name, paths in (("greedy", args.greedy_answers), ("sampled", args.sampled_answers))
    }
    shared = [key for key in texts["greedy"] if key in texts["sampled"]]
    if not shared:
        raise ValueError(
            "--greedy_answers and --sampled_answers have no prompt in common: answer the same prompts twice"
        )
    some, of = SAMPLED_SHARE
    for name in ("greedy", "sampled", "mixed"):
        chosen = [
            texts[("sampled" if place % of < some else "greedy") if name == "mixed" else name][key]
            for place, key in enumerate(shared)
        ]
        path = text_file(args, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") != "".join(chosen):
            raise ValueError(f"{str(path)!r} holds another text than the answers given: choose another --work_dir")
        with atomic_open(path) as file:
            file.writelines(chosen)


def read_answers(paths: Sequence[str]) -> dict[str, str]:
    """Lines of answers by their prompts, in the order of the files."""
    answers = {}
    for path in paths:
        with Path(path).open(encoding="utf-8", newline="\n") as lines:  # not splitlines: a text may have U+2028 in it
            for line in lines:
                turns = json.loads(line)["messages"][:-1]
                answers.setdefault(json.dumps(turns), line)
    return answers


def text_file(args: argparse.Namespace, name: str) -> Path:
    return args.work_dir / "text" / f"{name}.jsonl"


def is_baseline(name: str) -> bool:
    return "--method" in ARMS[name].flags


def training_command(args: argparse.Namespace, name: str) -> Command:
    """How an arm is trained."""
    arm = ARMS[name]
    fresh = arm.start == NOTHING
    baseline = is_baseline(name)
    settings: dict[str, Any] = {
        "model_name": args.base_model_path,
        "data_path": text_file(args, arm.text),
        "output_dir": args.work_dir / name,
        "num_stages": arm.stages or args.num_stages,
        "draft_vocab_json": args.draft_vocab_json,
        "max_steps": args.start_steps if arm.short else args.max_steps,
        "batch_size": args.batch_size,
        "gradient_accumulation_steps": 1,
        "max_length": args.max_length,
        "max_length_overflow": "truncate",
        "min_length": 2,
        "optimizer": "muon",
        "lr": args.lr * (2 if fresh else 1),
        "lr_adamw": args.lr_adamw * (2 if fresh else 1),
        "lr_scheduler": "linear",
        "warmup_steps": 10,
        "weight_decay": 0.01,
        "mixed_precision": args.mixed_precision,
        "val_examples": 32,
        "save_interval": 50,
        "seed": args.seed,
        "cache_dir": args.work_dir / "data",
        "resume_from": "auto",
    }
    if not fresh:
        settings["init_head"] = args.start
    if not baseline:
        config, _ = read_checkpoint(args.start, mapped=True)
        settings["num_spec_layers"] = config.num_spec_layers
        settings["aggr_feature_bound"] = "auto" if arm.stages else ",".join(map(str, config.anchors))
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    script, module = ("baselines/train_baseline.py", train_baseline) if baseline else ("train.py", train)
    return Command(script, module, [*arm.flags.split(), *flags])


def training_commands(args: argparse.Namespace) -> dict[str, Command]:
    """The commands of all arms; one pass of the target over each text serves every arm."""
    commands = {name: training_command(args, name) for name in ARMS if name != "start"}
    readers = [commands[name] for name in ("S0", "N-S0", "N-PPSD")]  # of other layers each; all else reads as these
    layers = ",".join(map(str, layers_read(readers, args.base_model_path)))
    for name, command in commands.items():
        folder = args.work_dir / "features" / ARMS[name].text
        command.flags.extend(["--feature_cache", str(folder), "--feature_cache_layers", layers])
    return {name: command for name, command in commands.items() if name in args.arms}


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


class Judge:
    """Judges heads on the target's own answers to the evaluation prompts."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.target = Target.load(args.base_model_path)
        tokenizer = load_tokenizer(args.base_model_path)
        limits = {"max_new_tokens": args.max_new_tokens, "max_positions": self.target.config.max_position_embeddings}
        samples = [
            sample
            for name in args.datasets
            for sample in encode_questions(
                read_questions(args.data_dir, name, args.prompts_per_dataset),
                tokenizer,
                enable_thinking=False,
                **limits,
            )
        ]
        self._texts = {
            temperature: target_texts(
                self.target,
                samples,
                Sampling(temperature=temperature),
                args.max_new_tokens,
                args.seed,
                args.work_dir / "texts" / f"t{temperature:g}_{args.max_new_tokens}.json",
            )
            for temperature in args.temperature
        }
        self._passes: dict[tuple, ReplayedTexts] = {}  # of the target over the texts, by anchors and temperature

    def results(self, name: str, path: str | Path, stages: Sequence[int]) -> list[dict[str, Any]]:
        """For each n and temperature, verified and accepted drafts by fill and runs, text by text."""
        wanted = tqdm([(n, temperature) for n in stages for temperature in self._args.temperature], desc=name)
        counts = self._decoded if is_baseline(name) else self._replayed
        return [
            {
                "num_stages": n,
                "temperature": temperature,
                "datasets": [text.dataset for text in self._texts[temperature]],
                **counts(path, n, temperature),
            }
            for n, temperature in wanted
        ]

    def _replayed(self, path: str | Path, n: int, temperature: float) -> dict[str, list]:
        """Of an SPD head."""
        head = load_head(path, self.target)
        key = head.config.anchors, temperature
        if key not in self._passes:
            sampling, seed = Sampling(temperature=temperature), self._args.seed
            self._passes[key] = ReplayedTexts(self.target, self._texts[temperature], sampling, key[0], seed)
        texts = self._passes[key].counts(head, head.config.split(self.target.num_layers, n))
        return {
            "verified_by_fill": [counts.verified_by_fill.tolist() for counts in texts],
            "accepted_by_fill": [counts.accepted_by_fill.tolist() for counts in texts],
            "runs": [counts.runs for counts in texts],
        }

    def _decoded(self, path: str | Path, n: int, temperature: float) -> dict[str, list]:
        """Of a baseline's drafter, by decoding; when sampling, the texts are then others."""
        config, _ = PPSDConfig.read(path, mapped=True)
        run = Run(
            method=METHODS["ppsd"],
            sampling=Sampling(temperature=temperature),
            max_new_tokens=self._args.max_new_tokens,
            seed=self._args.seed,
            stage_sizes=config.split(self.target.num_layers, n),
            spec_head_ckpt=str(path),
            num_spec_layers=config.num_spec_layers,
        )
        decoder = build_decoder(self.target, run)
        results = [decoder.generate(text.prompt_ids, run.max_new_tokens) for text in self._texts[temperature]]
        return {
            "verified_by_fill": [result.verified_by_fill for result in results],
            "accepted_by_fill": [result.accepted_by_fill for result in results],
            "runs": [(result.cycles - result.n_verified) // (n - 1) for result in results],
        }


def judge_all(args: argparse.Namespace, heads: Mapping[str, str | Path]) -> None:
    """Judge every head whose figures are missing or of other weights or prompts."""
    judge = None
    for name, path in heads.items():
        stages = [int(n) for n in (ARMS[name].stages or args.num_stages).split(",")]
        settings = {name: str(getattr(args, name)) for name in EVALUATION_FLAGS}
        identity = {"head": file_sha256(checkpoint_file(path)), "stages": stages, "settings": settings}
        found = read_figures(args, name)
        if found is None or found["identity"] != identity:
            judge = judge or Judge(args)
            results = judge.results(name, path, stages)
            write_json(figures_file(args, name), {"identity": identity, "results": results})


def figures_file(args: argparse.Namespace, name: str) -> Path:
    return args.work_dir / "figures" / f"{name}.json"


def read_figures(args: argparse.Namespace, name: str) -> dict[str, Any] | None:
    path = figures_file(args, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class Figures:
    """What one arm reached, for one n and temperature."""

    def __init__(self, result: Mapping[str, Any]):
        self.verified = np.array(result["verified_by_fill"], dtype=float)  # [texts, n]
        self.accepted = np.array(result["accepted_by_fill"], dtype=float)
        self.runs = np.array(result["runs"], dtype=float)
        self.n = result["num_stages"]
        self._picks = bootstrap_picks(result["datasets"])

    def alpha(self) -> Estimate:
        return self._estimate(lambda verified, accepted, runs: alpha(accepted.sum(-1), verified.sum(-1)))

    def accept_length(self) -> Estimate:
        def length(verified: np.ndarray, accepted: np.ndarray, runs: np.ndarray) -> np.ndarray:
            tokens = verified.sum(-1)
            return accept_length(self.n, tokens, tokens + (self.n - 1) * runs)

        return self._estimate(length)

    def alpha_by_fill(self) -> str:
        hits, tries = self.accepted.sum(0), self.verified.sum(0)
        return " ".join(f"{h / t:.2f}".lstrip("0") if t else "–" for h, t in zip(hits, tries, strict=True))

    def _estimate(self, formula: Callable[..., np.ndarray]) -> Estimate:
        columns = self.verified, self.accepted, self.runs
        value = float(formula(*(column.sum(0) for column in columns)))
        return Estimate(value, formula(*(column[self._picks].sum(1) for column in columns)))


class Estimate(NamedTuple):
    """A pooled value, and what it is on each bootstrap resample of the texts, the same ones for every arm."""

    value: float
    resampled: np.ndarray

    def __str__(self) -> str:
        low, high = interval(self.resampled)
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"

    def minus(self, other: Estimate) -> Estimate:
        return Estimate(self.value - other.value, self.resampled - other.resampled)

    def verdict(self) -> str:
        low, high = interval(self.resampled)
        return "helps" if low > 0 else "hurts" if high < 0 else "cannot be told"


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------


def figures_of(args: argparse.Namespace) -> dict[str, dict[tuple[int, float], Figures]]:
    """For each judged arm, its figures by n and temperature."""
    return {
        name: {(result["num_stages"], result["temperature"]): Figures(result) for result in found["results"]}
        for name in ARMS
        if (found := read_figures(args, name)) is not None
    }


def arms_table(args: argparse.Namespace, figures: Mapping[str, Mapping], temperature: float) -> str:
    stages = [int(n) for n in args.num_stages.split(",")]
    heads = ["arm", "", "tokens", "seconds", *(f"alpha, n = {n}" for n in stages)]
    heads += [f"by fill, n = {stages[-1]}", *(f"L_acc, n = {n}" for n in stages)]
    lines = []
    for name, by_setting in figures.items():
        found = [by_setting.get((n, temperature)) for n in stages]
        record = args.work_dir / name / "run.json"
        trained = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        tokens = f"{trained['supervised_tokens']:,}" if trained else "–"
        seconds = f"{trained['training_seconds']:,.0f}" if trained else "–"
        alphas = [str(each.alpha()) if each else "–" for each in found]
        lengths = [f"{each.accept_length().value:.2f}" if each else "–" for each in found]
        by_fill = found[-1].alpha_by_fill() if found[-1] else "–"
        lines.append([name, ARMS[name].what, tokens, seconds, *alphas, by_fill, *lengths])
    return markdown_table(heads, lines)


def claims_table(args: argparse.Namespace, figures: Mapping[str, Mapping]) -> str:
    lines = []
    for name, other, what in CLAIMS:
        shared = figures.get(name, {}).keys() & figures.get(other, {}).keys()
        for n, temperature in sorted(shared, key=lambda key: (key[1], key[0])):
            ours, theirs = (figures[arm][n, temperature].alpha() for arm in (name, other))
            difference = ours.minus(theirs)
            low, high = interval(difference.resampled)
            cells = [
                what,
                f"{name} - {other}",
                str(n),
                f"{temperature:g}",
                f"{difference.value:+.3f} [{low:+.3f}, {high:+.3f}]",
            ]
            lines.append([*cells, difference.verdict()])
    return markdown_table(["what", "arms", "n", "T", "difference of alpha", ""], lines)


def report(args: argparse.Namespace, commit: str, commands: Mapping[str, Command]) -> str:
    figures = figures_of(args)
    prompts = f"{args.prompts_per_dataset} prompts of each of {', '.join(args.datasets)}"
    sections = [
        "# Ways of training a head, compared",
        f"Written by `benchmarks/compare_recipes.py` at commit {commit}, {datetime.datetime.now(datetime.UTC).date()}. "
        f"Target {Path(args.base_model_path).name}; {prompts}, at most {args.max_new_tokens} new tokens. All heads are "
        "judged on the same texts, the target's own, by exact replay of decoding: at T = 0 the counts are those of "
        "decoding, one for one; at T = 1 they have its distribution (PPSD is decoded). In brackets: 95% bootstrap "
        "intervals over prompts, within each set. Seconds are of training, beside other work: they compare roughly.",
    ]
    for temperature in args.temperature:
        sections += [f"## Temperature {temperature:g}", arms_table(args, figures, temperature)]
    sections += [
        "## What helps",
        "Differences are paired: the same prompts, texts and draws for both arms.",
        claims_table(args, figures),
        "## Commands",
        "```\n" + "\n\n".join(str(command) for command in commands.values()) + "\n```",
    ]
    return "\n\n".join(sections) + "\n"


def main(args: argparse.Namespace) -> int:
    """Exit code of the first training that fails; 0 with the report written."""
    quiet_libraries()
    check_output_file("--output", args.output)
    check_output_folder("--work_dir", args.work_dir)
    commit = git_commit()
    write_texts(args)
    commands = training_commands(args)
    heads = {name: args.work_dir / name for name in commands}
    if not args.report_only:
        for name, command in commands.items():
            if not is_trained(command):
                print(f"\n{name}: {command}", flush=True)
                if code := command.module.main(command.arguments):
                    return code
        judge_all(args, ({"start": args.start} if "start" in args.arms else {}) | heads)
    with atomic_open(args.output) as file:
        file.write(report(args, commit, commands))
    print(f"\n{args.output}")
    return 0


if __name__ == "__main__":
    run_script(main, build_parser())
