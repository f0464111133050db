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
from baselines.ppsd import PPSDConfig, PPSDReplay
from benchmarks.commands import Command, as_flags, layers_read, run_all
from decoding.metrics import accept_length, alpha
from decoding.sampling import Sampling
from evaluation.metrics import Estimate, bootstrap_picks, pooled
from evaluation.prompts import Sample, choose_data_sets, encode_questions, read_questions
from evaluation.replayed import ReplayedTexts, Text, target_texts
from loading.checksums import file_sha256
from loading.flags import COUNT, NATURAL, POSITIVE, bounded, integers
from loading.target_config import load_target_config
from loading.tokenizer import load_tokenizer
from pipeline_model import HeadConfig, Target, checkpoint_file, read_checkpoint
from script_utils import (
    Parser,
    atomic_open,
    check_output_file,
    check_output_folder,
    git_commit,
    json_lines,
    markdown_table,
    quiet_libraries,
    read_text,
    run_script,
    write_json,
)
from training.flags import PRECISIONS
from training.replay_loss import Replay, ReplaySettings
from training.run_state import LOG_NAME, read_log

SAMPLED_SHARE = 3, 10  # of the mixed text: three prompts of ten have their sampled answer, the others the greedy one
BOTH = "identity+late_layers"


class Arm(NamedTuple):
    """One way of training."""

    what: str
    flags: str  # of train.py, what sets this arm apart
    text: str = "mixed"  # or "greedy", "sampled"
    fresh: bool = False  # from nothing, --start_steps long, instead of from --start
    stages: tuple[int, ...] | None = None  # None: those of --num_stages


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
    "N-S0": Arm("from nothing: S0 for n = 3", "", "greedy", True, (3,)),
    "N-P2": Arm("from nothing: P2 for n = 3", "--rows replay", "greedy", True, (3,)),
    "N-PPSD": Arm("from nothing: PPSD for n = 3", "--method ppsd", "greedy", True, (3,)),
    "I-random": Arm("all drawn at random", "", "greedy", True),
    "I-identity": Arm("A_k passes its deepest state on", "--head_init identity", "greedy", True),
    "I-layers": Arm("layers from late target layers", "--head_init late_layers", "greedy", True),
    "I-both": Arm("both", f"--head_init {BOTH}", "greedy", True),
    "I-frozen": Arm("both, lm_head frozen", f"--head_init {BOTH} --lm_head_lr_scale 0", "greedy", True),
    "I-slow": Arm("both, lm_head at lr / 10", f"--head_init {BOTH} --lm_head_lr_scale 0.1", "greedy", True),
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
    target.add_argument(
        "--num_stages", type=integers, default=(2, 3, 6), help="n that each head is trained and judged for"
    )
    training = parser.add_argument_group("training, the same for all arms of a group")
    training.add_argument("--greedy_answers", action="append", required=True, help="text at temperature 0; repeatable")
    training.add_argument("--sampled_answers", action="append", required=True, help="the same prompts at 1; repeatable")
    training.add_argument("--max_steps", type=COUNT, default=200, help="optimiser steps from a trained head")
    training.add_argument("--start_steps", type=COUNT, default=100, help="optimiser steps from nothing")
    training.add_argument("--batch_size", type=COUNT, default=8, help="answers per step")
    training.add_argument("--max_length", type=COUNT, default=320, help="tokens of an example at most")
    training.add_argument("--lr", type=POSITIVE, default=2e-3, help="Muon's peak; twice as much from nothing")
    training.add_argument("--lr_adamw", type=POSITIVE, default=5e-4, help="AdamW's peak; likewise")
    training.add_argument("--mixed_precision", default="auto", choices=PRECISIONS, help="as in train.py")
    prompts = parser.add_argument_group("evaluation, the same for all")
    prompts.add_argument("--data_dir", type=Path, default=Path("eval_data"), help="folder of data sets")
    prompts.add_argument("--datasets", nargs="+", default=["mt_bench", "gsm8k", "humaneval"], help="folders there")
    prompts.add_argument("--prompts_per_dataset", type=COUNT, default=10, help="the first so many of each")
    prompts.add_argument("--max_new_tokens", type=COUNT, default=64, help="new tokens at most")
    prompts.add_argument(
        "--temperature", type=bounded(float, 0), nargs="+", default=[0.0, 1.0], help="of the judged decoding"
    )
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
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path!r} cannot be read ({error}): give what generate_answers.py wrote") from None
        for number, entry in json_lines(text, repr(path)):
            try:
                turns = entry["messages"][:-1]
            except (KeyError, TypeError):
                raise ValueError(
                    f"{path!r}, line {number} has no messages: give what generate_answers.py wrote"
                ) from None
            answers.setdefault(json.dumps(turns), json.dumps(entry, ensure_ascii=False) + "\n")
    return answers


def text_file(args: argparse.Namespace, name: str) -> Path:
    return args.work_dir / "text" / f"{name}.jsonl"


def is_baseline(arm: Arm) -> bool:
    return "--method" in arm.flags


def stages_of(args: argparse.Namespace, arm: Arm) -> tuple[int, ...]:
    """The n that an arm is trained and judged for."""
    return arm.stages or args.num_stages


def training_command(args: argparse.Namespace, name: str, start: HeadConfig) -> Command:
    """How an arm is trained; start: the configuration of the head that most arms start from."""
    arm = ARMS[name]
    settings: dict[str, Any] = {
        "model_name": args.base_model_path,
        "data_path": text_file(args, arm.text),
        "output_dir": args.work_dir / name,
        "num_stages": ",".join(map(str, stages_of(args, arm))),
        "draft_vocab_json": args.draft_vocab_json,
        "max_steps": args.start_steps if arm.fresh else args.max_steps,
        "batch_size": args.batch_size,
        "gradient_accumulation_steps": 1,
        "max_length": args.max_length,
        "max_length_overflow": "truncate",
        "min_length": 2,
        "optimizer": "muon",
        "lr": args.lr * (2 if arm.fresh else 1),
        "lr_adamw": args.lr_adamw * (2 if arm.fresh else 1),
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
    if not arm.fresh:
        settings["init_head"] = args.start
    if not is_baseline(arm):
        settings["num_spec_layers"] = start.num_spec_layers
        settings["aggr_feature_bound"] = "auto" if arm.stages else ",".join(map(str, start.anchors))
    script = ("baselines/train_baseline.py", train_baseline) if is_baseline(arm) else ("train.py", train)
    return Command(*script, [*arm.flags.split(), *as_flags(settings)])


def check_stages(args: argparse.Namespace, start: HeadConfig) -> None:
    """ValueError for an n that the head to start from was not trained for."""
    layers = load_target_config(args.base_model_path).num_hidden_layers
    for n in args.num_stages:
        start.split(layers, n)


def training_commands(args: argparse.Namespace, start: HeadConfig) -> dict[str, Command]:
    """The commands of all arms; one pass of the target over each text serves every arm."""
    commands = {name: training_command(args, name, start) for name in ARMS if name != "start"}
    readers = [commands[name] for name in ("S0", "N-S0", "N-PPSD")]  # of other layers each; all else reads as these
    layers = ",".join(map(str, layers_read(readers, args.base_model_path)))
    for name, command in commands.items():
        cache = {"feature_cache": args.work_dir / "features" / ARMS[name].text, "feature_cache_layers": layers}
        command.flags.extend(as_flags(cache))
    return {name: command for name, command in commands.items() if name in args.arms}


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


def read_samples(args: argparse.Namespace) -> list[Sample]:
    """The evaluation prompts. ValueError, before any training, for those that cannot be used."""
    tokenizer, config = load_tokenizer(args.base_model_path), load_target_config(args.base_model_path)
    limits = {"max_new_tokens": args.max_new_tokens, "max_positions": config.max_position_embeddings}
    questions = (
        question
        for name in choose_data_sets(args.data_dir, args.datasets)[0]
        for question in read_questions(args.data_dir, name, args.prompts_per_dataset)
    )
    return encode_questions(questions, tokenizer, enable_thinking=False, **limits)


class Judge:
    """Judges heads on the target's own answers to the evaluation prompts."""

    def __init__(self, args: argparse.Namespace, samples: Sequence[Sample]):
        self.target, self._settings = Target.load(args.base_model_path), {}
        self._texts: dict[float, list[Text]] = {}
        for temperature in args.temperature:
            sampling = Sampling(temperature=temperature)
            self._settings[temperature] = ReplaySettings(sampling=sampling, seed=args.seed)
            kept = args.work_dir / "texts" / f"t{temperature:g}_{args.max_new_tokens}_seed{args.seed}.json"
            self._texts[temperature] = target_texts(
                self.target, samples, sampling, args.max_new_tokens, args.seed, kept
            )
        self._passes: dict[tuple, ReplayedTexts] = {}  # of the target over the texts, by anchors and temperature

    def results(self, name: str, path: str | Path, stages: Sequence[int]) -> list[dict[str, Any]]:
        """For each n and temperature, verified and accepted drafts by fill and runs, text by text."""
        config_class, replay_class = (PPSDConfig, PPSDReplay) if is_baseline(ARMS[name]) else (HeadConfig, Replay)
        head = config_class.load_head(path, self.target)
        return [
            self._result(replay_class(head, self.target, self._settings[temperature]), n, temperature)
            for n, temperature in tqdm([(n, temperature) for n in stages for temperature in self._texts], desc=name)
        ]

    def _result(self, replay: Replay, n: int, temperature: float) -> dict[str, Any]:
        config, texts = replay.head.config, self._texts[temperature]
        key = config.anchors, temperature
        if key not in self._passes:
            self._passes[key] = ReplayedTexts(self.target, texts, config.anchors)
        found = self._passes[key].counts(replay, config.split(self.target.num_layers, n))
        return {
            "num_stages": n,
            "temperature": temperature,
            "datasets": [text.dataset for text in texts],
            "verified_by_fill": [counts.verified_by_fill.tolist() for counts in found],
            "accepted_by_fill": [counts.accepted_by_fill.tolist() for counts in found],
            "runs": [counts.runs for counts in found],
        }


def judge_all(args: argparse.Namespace, samples: Sequence[Sample], heads: Mapping[str, str | Path]) -> None:
    """Judge every head whose figures are missing or of other weights or prompts."""
    judge = None
    settings = {name: str(getattr(args, name)) for name in EVALUATION_FLAGS}
    for name, path in heads.items():
        stages = stages_of(args, ARMS[name])
        identity = {"head": file_sha256(checkpoint_file(path)), "stages": list(stages), "settings": settings}
        found = read_figures(args, name)
        if found is None or found["identity"] != identity:
            judge = judge or Judge(args, samples)
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
        self.n = result["num_stages"]
        self._verified, self._accepted = (np.array(result[f"{name}_by_fill"]) for name in ("verified", "accepted"))
        self._counts = np.stack([self._verified.sum(1), self._accepted.sum(1), result["runs"]]).astype(float)
        self._picks = bootstrap_picks(result["datasets"])

    def alpha(self) -> Estimate:
        return self._pooled(lambda verified, accepted, runs: alpha(accepted, verified))

    def accept_length(self) -> Estimate:
        return self._pooled(
            lambda verified, accepted, runs: accept_length(self.n, verified, verified + (self.n - 1) * runs)
        )

    def alpha_by_fill(self) -> str:
        hits, tries = self._accepted.sum(0), self._verified.sum(0)
        return " ".join(f"{h / t:.2f}".lstrip("0") if t else "–" for h, t in zip(hits, tries, strict=True))

    def _pooled(self, formula: Callable[..., Any]) -> Estimate:
        return pooled(formula, self._counts, self._picks)


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
    stages = args.num_stages
    heads = ["arm", "", "tokens", "seconds", *(f"alpha, n = {n}" for n in stages)]
    heads += [f"by fill, n = {stages[-1]}", *(f"L_acc, n = {n}" for n in stages)]
    lines = []
    for name, by_setting in figures.items():
        found = [by_setting.get((n, temperature)) for n in stages]
        record = args.work_dir / name / "run.json"
        trained = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        tokens = f"{trained['supervised_tokens']:,}" if trained else "–"
        seconds = f"{trained['training_seconds']:,.0f}" if trained else "–"
        alphas = [f"{each.alpha():.3f}" if each else "–" for each in found]
        lengths = [f"{each.accept_length().value:.2f}" if each else "–" for each in found]
        by_fill = found[-1].alpha_by_fill() if found[-1] else "–"
        lines.append([name, ARMS[name].what, tokens, seconds, *alphas, by_fill, *lengths])
    return markdown_table(heads, lines)


def agreement_table(args: argparse.Namespace) -> str:
    """How often drafts of heads from nothing are the target's argmax, on held-out answers, with F tokens in flight."""
    n, lines = args.num_stages[-1], []
    fills = sorted({1, min(2, n), n})
    for name, arm in ARMS.items():
        log = read_log(args.work_dir / name / LOG_NAME) if arm.fresh and arm.stages is None else []
        figures = next((line["validation"] for line in reversed(log) if "validation" in line), [])
        by_fill = {figure["fill"]: figure["agreement"] for figure in figures if figure["num_stages"] == n}
        if by_fill:
            lines.append([name, arm.what, *(f"{by_fill[fill]:.3f}" for fill in fills)])
    heads = ["arm", "", *(f"agreement held out, F = {fill}" for fill in fills)]
    return markdown_table(heads, lines) if lines else ""


def claims_table(figures: Mapping[str, Mapping]) -> str:
    lines = []
    for name, other, what in CLAIMS:
        shared = figures.get(name, {}).keys() & figures.get(other, {}).keys()
        for n, temperature in sorted(shared, key=lambda key: (key[1], key[0])):
            ours, theirs = (figures[arm][n, temperature].alpha() for arm in (name, other))
            difference = ours.minus(theirs)
            cells = [what, f"{name} - {other}", str(n), f"{temperature:g}", f"{difference:+.3f}"]
            lines.append([*cells, difference.verdict("helps", "hurts")])
    return markdown_table(["what", "arms", "n", "T", "difference of alpha", ""], lines)


def report(args: argparse.Namespace, commit: str, commands: Mapping[str, Command]) -> str:
    figures = figures_of(args)
    if not figures:
        raise ValueError(f"{str(args.work_dir)!r} has no figures: run without --report_only")
    starts = agreement_table(args)
    prompts = f"{args.prompts_per_dataset} prompts of each of {', '.join(args.datasets)}"
    sections = [
        "# Ways of training a head, compared",
        f"Written by `benchmarks/compare_recipes.py` at commit {commit}, {datetime.datetime.now(datetime.UTC).date()}. "
        f"Target {Path(args.base_model_path).name}; {prompts}, at most {args.max_new_tokens} new tokens. All heads are "
        "judged on the same texts, the target's own, by exact replay of decoding: at T = 0 the counts are those of "
        "decoding, one for one; at T = 1 they have its distribution. In brackets: 95% bootstrap "
        "intervals over prompts, within each set. Seconds are of training, beside other work: they compare roughly.",
    ]
    for temperature in args.temperature:
        sections += [f"## Temperature {temperature:g}", arms_table(args, figures, temperature)]
    sections += [
        "## What helps",
        "Differences are paired: the same prompts, texts and draws for both arms. Of twenty intervals, one misses the "
        "true difference by chance: a verdict that stands alone among an arm's settings may be such a one.",
        claims_table(figures),
        *([f"## Starts\n\nHeads from nothing, n = {args.num_stages[-1]}.", starts] if starts else []),
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
    start, _ = read_checkpoint(args.start, mapped=True)
    check_stages(args, start)
    commands = training_commands(args, start)
    if not args.report_only:
        samples = read_samples(args)
        write_texts(args)
        if code := run_all(commands.values()):
            return code
        untrained = {"start": args.start} if "start" in args.arms else {}
        judge_all(args, samples, untrained | {name: args.work_dir / name for name in commands})
    with atomic_open(args.output) as file:
        file.write(report(args, commit, commands))
    print(f"\n{args.output}")
    return 0


if __name__ == "__main__":
    run_script(main, build_parser())
