"""What an evaluation has to run: flags, data, target and heads, all checked before the target is loaded.

Nothing here writes a file. Every mistake of the user is a ValueError of one line.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from baselines.method import Run
from baselines.registry import METHODS, check_owners, with_defaults
from decoding.sampling import Sampling
from evaluation.files import (
    RowLog,
    RunFiles,
    baseline_cache,
    checkpoint_labels,
    code_fingerprint,
    device_name,
    number_name,
    read_summaries,
    safe_name,
)
from evaluation.prompts import Sample, choose_data_sets, encode_questions, read_questions
from evaluation.workers import TargetOptions
from loading.chat_template import check_template_flags, template_setting, use_template
from loading.checkpoint_files import checkpoint_file
from loading.checksums import file_sha256
from loading.flags import resolve_dtype
from loading.target_config import default_target_path, load_target_config
from loading.target_files import check_compiled, check_target_weights, target_fingerprint
from loading.tokenizer import load_tokenizer
from pipeline_model import DraftConfig
from script_utils import check_output_folder

PLACEMENT = "all stages on one device"  # what the wall-clock times of this evaluation mean


@dataclass(frozen=True)
class PlannedRun:
    """One combination of head, temperature, tree width and number of stages, with its files."""

    run: Run
    settings: Mapping[str, Any]  # all that changes a row, as it is recorded and compared
    files: RunFiles
    baseline: Run  # the target alone, likewise
    baseline_settings: Mapping[str, Any]
    baseline_rows: RowLog


@dataclass(frozen=True)
class PlannedEvaluation:
    """Everything that an evaluation needs."""

    runs: Sequence[PlannedRun]
    samples: Sequence[Sample]
    options: TargetOptions
    devices: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    note: str  # which data sets, and why


def check_method(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the method's own defaults.

    ValueError for flags that do not belong to it or have no use, and for a checkpoint too many or too few.
    """
    method = METHODS[args.method]
    check_owners(args, "decoding_flags")
    if method.config_class is None and args.spec_head_ckpt:
        raise ValueError(f"--method {args.method} has no checkpoint: leave --spec_head_ckpt out")
    if method.config_class is not None and not args.spec_head_ckpt:
        raise ValueError(f"--method {args.method} needs --spec_head_ckpt, the checkpoint of its drafter")
    if args.compile and not method.compiles:
        raise ValueError(
            f"--compile compiles this project's stages, but --method {args.method} runs the library's loop"
        )
    args = with_defaults(args, "decoding_flags")
    method.check_decoding_flags(args)
    return args


def check_flags(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the method's own defaults. ValueError for a flag that no run can have; cheap."""
    args = check_method(args)
    for temperature in args.temperature:
        Sampling(temperature, args.top_k, args.top_p)
    check_template_flags(args)
    if args.force_baseline_recompute and (args.resume or not args.baseline):
        other = "--resume would mix two baselines in one run" if args.resume else "--no-baseline leaves nothing to do"
        raise ValueError(f"--force_baseline_recompute with {other}: drop one of the two")
    for folder in (args.output_dir, args.output_dir / "raw", args.output_dir / "summary"):
        check_output_folder("--output_dir", folder)
    check_output_folder("--baseline_cache_dir", args.baseline_cache_dir)
    return args


def target_of_heads(paths: Sequence[str], config_class: type[DraftConfig] | None) -> str:
    """The target that the checkpoints of heads name. ValueError when they name several or none, and without a head."""
    if not paths:
        raise ValueError("--base_model_path is missing: without a head, nothing else names the target")
    targets: dict[str, str] = {}  # the first head of each
    for path in paths:
        config, _ = config_class.read(path, mapped=True)
        try:
            target = default_target_path(config.base_model_path)
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
        targets.setdefault(target, path)
    if len(targets) > 1:
        named = ", ".join(f"{path!r} on {target!r}" for target, path in targets.items())
        raise ValueError(f"--spec_head_ckpt lists heads of several targets ({named}): give --base_model_path")
    return next(iter(targets))


def parse_devices(values: Sequence[str]) -> list[str]:
    """Devices of the workers, one per process, from --gpus: GPU ids (also "0, 1"), "cpu", or "auto" alone.

    ValueError for a GPU that is not there or named twice, for devices of several kinds, and for anything else.
    """
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    if names == ["auto"]:
        return ["cuda:0" if torch.cuda.is_available() else "cpu"]
    for name in names:
        if name != "cpu" and not name.isdecimal():
            raise ValueError(f"--gpus has {name!r}: give GPU ids (0 1 2), cpu, or auto alone")
    ids = [int(name) for name in names if name != "cpu"]
    count = torch.cuda.device_count()
    if ids and max(ids) >= count:
        raise ValueError(
            f"--gpus has {max(ids)}, but this machine has {count} GPUs, counted from 0: use another, or cpu"
        )
    if len(set(ids)) < len(ids):
        raise ValueError(f"--gpus is {' '.join(names)}: a GPU named twice would share its time between two processes")
    kinds = {torch.cuda.get_device_name(index) for index in ids} | ({"cpu"} if "cpu" in names else set())
    if len(kinds) != 1:
        found = ", ".join(sorted(kinds)) or "nothing"
        raise ValueError(f"--gpus lists {found}: all times of a run must come from one kind of device")
    return ["cpu" if name == "cpu" else f"cuda:{int(name)}" for name in names]


class Planner:
    """Reads what an evaluation needs and combines it into runs. ValueError for everything that does not fit.

    `args` are the flags, with the target of the heads where --base_model_path was left out.
    """

    def __init__(self, args: argparse.Namespace):
        args = check_flags(args)
        self.method = METHODS[args.method]
        config_class = self.method.config_class
        target = args.base_model_path or target_of_heads(args.spec_head_ckpt, config_class)
        self.args = args = argparse.Namespace(**vars(args) | {"base_model_path": target})
        self.devices = parse_devices(args.gpus)
        self.labels = checkpoint_labels(args.spec_head_ckpt) if args.spec_head_ckpt else {}
        self.names, self.note = choose_data_sets(args.data_dir, args.datasets)
        questions = [
            item for name in self.names for item in read_questions(args.data_dir, name, args.prompts_per_dataset)
        ]
        self.config = load_target_config(args.base_model_path, args.trust_remote_code, quantization=args.quantization)
        check_compiled(args.compile, self.config, args.quantization, torch.device(self.devices[0]))
        check_target_weights(args.base_model_path, self.config)
        self.method.check_target(self.config)
        self.tokenizer = load_tokenizer(args.base_model_path, args.trust_remote_code)
        use_template(self.tokenizer, args)
        self.samples = encode_questions(
            questions,
            self.tokenizer,
            enable_thinking=args.enable_thinking,
            max_new_tokens=args.max_new_tokens,
            max_positions=self.config.max_position_embeddings,
        )
        self.options = TargetOptions(
            path=args.base_model_path,
            dtype=resolve_dtype(args.dtype, torch.device(self.devices[0])),
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
            quantization=args.quantization,
            threads=max(1, torch.get_num_threads() // len(self.devices)),  # processes on a CPU share its threads
        )
        self.heads = {path: config_class.read_head(path, self.config).config for path in args.spec_head_ckpt}

    def plan(self) -> PlannedEvaluation:
        args, shared = self.args, self.target_settings()
        runs = [
            self.planned(shared, path, temperature, shape)
            for path in dict.fromkeys(args.spec_head_ckpt or [None])
            for temperature in dict.fromkeys(args.temperature)
            for shape in self.shapes(path)
        ]
        for planned in runs:
            planned.files.rows.check(planned.settings, resume=args.resume)
            for rows in (planned.files.rows, planned.baseline_rows):
                rows.read()  # damaged rows are found now, not after the target is loaded
        read_summaries(args.output_dir, runs[0].files.prefix)  # the table will show them, too
        return PlannedEvaluation(runs, self.samples, self.options, self.devices, self.tokenizer, self.note)

    def target_settings(self) -> dict[str, Any]:
        """All but the temperature that changes what the target alone answers, or its times."""
        args = self.args
        return {
            "target": safe_name(Path(args.base_model_path).resolve().name),
            "target_fingerprint": target_fingerprint(args.base_model_path),
            "code_fingerprint": code_fingerprint(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": device_name(torch.device(self.devices[0]), self.options.threads),
            "dtype": str(self.options.dtype).removeprefix("torch."),
            "attn_implementation": args.attn_implementation,
            "quantization": args.quantization,
            "compile": args.compile,
            "chat_template": template_setting(args),
            "enable_thinking": args.enable_thinking,
            "max_new_tokens": args.max_new_tokens,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "seed": args.seed,
        }

    def planned(
        self, shared: Mapping[str, Any], path: str | None, temperature: float, shape: Mapping[str, Any]
    ) -> PlannedRun:
        """The run of a checkpoint at a temperature; shape: more fields of it, one of `shapes`."""
        args, method = self.args, self.method
        sampling = Sampling(temperature, args.top_k, args.top_p)
        given = {"sampling": sampling, "max_new_tokens": args.max_new_tokens, "seed": args.seed}
        given |= {"compiled": args.compile}
        run = Run(method, spec_head_ckpt=path, **given, **shape)
        baseline_settings = dict(shared) | {"temperature": temperature}
        title = " ".join(filter(None, (method.title, self.labels.get(path))))
        settings = baseline_settings | {
            "label": ", ".join([title, *run.axes, f"T = {temperature:g}"]),
            "placement": PLACEMENT,
            "method": args.method,
            "method_fingerprint": code_fingerprint(method.code),
            "head": self.labels.get(path),
            "head_sha256": None if path is None else file_sha256(checkpoint_file(path)),
            "stage_sizes": run.stage_sizes,
            "num_spec_layers": run.num_spec_layers,
            "draft_top_k": run.draft_top_k,
            "draft_chain": run.draft_chain,
            "sample_drafts": run.sample_drafts,
            "use_deepest": run.use_deepest,
            "baseline": args.baseline,
        }
        axes = [method.in_file_names, *run.axes.values(), f"T{number_name(temperature)}"]
        name = "__".join(filter(None, (self.labels.get(path), settings["target"], "_".join(filter(None, axes)))))
        name += "" if path is None else method.unusual(run, self.heads[path])
        return PlannedRun(
            run=run,
            settings=settings,
            files=RunFiles(args.output_dir, name),
            baseline=Run(METHODS["autoregressive"], stage_sizes=(self.config.num_hidden_layers,), **given),
            baseline_settings=baseline_settings,
            baseline_rows=baseline_cache(baseline_folder(args), baseline_settings),
        )

    def shapes(self, path: str | None) -> list[dict[str, Any]]:
        """What checkpoint and method decide of each of its runs: fields of `Run`. ValueError for what does not fit."""
        num_layers = self.config.num_hidden_layers
        try:
            return [dict(shape) for shape in self.method.runs(self.args, self.heads.get(path), num_layers)]
        except ValueError as error:
            raise ValueError(str(error) if path is None else f"{path!r}: {error}") from None


def baseline_folder(args: argparse.Namespace) -> Path:
    return args.baseline_cache_dir or args.output_dir / "baseline_cache"
