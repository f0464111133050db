"""One training run: the steps, their validation and log, checkpoints, and the end."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm import tqdm

from loading.checkpoint_files import CHECKPOINT_NAME, read_payload
from pipeline_model import save_head
from script_utils import room_for, run_record, write_json
from training.conversations import ConversationData, PadCollator
from training.feature_cache import FeatureCache, open_caches, take_written
from training.flags import STOP_PATIENCE
from training.forward import teacher_features
from training.head_loss import DraftLoss
from training.held_out import BEST_NAME, EarlyStopping, HeldOutTraces, copy_best, in_words, keep_best
from training.loss import TrainingLoss
from training.optimizers import build_optimizers, lr_factor, scale_lr
from training.run_state import (
    LOG_NAME,
    DataOrder,
    Progress,
    StopSignals,
    append_log,
    draw_fill,
    example_lengths,
    list_checkpoints,
    plot_log,
    read_log,
    read_state,
    save_checkpoint,
    write_log,
)

MAX_SKIPPED_IN_ROW = 5


class MicroBatch(NamedTuple):
    """Examples after the target's pass over them."""

    teacher: dict[str, Tensor]  # features, hidden, labels, attention_mask, perhaps teacher_best: see `training_loss`
    example_ids: list[str]


class Trainer:
    """One training run. `run` goes from the present step to the last and returns the exit code.

    Checkpoints are our own, not `Accelerator.save_state`'s: that one keeps the generators of every process, and a run
    with another number of processes could not go on exactly. Here every draw follows from seed and step alone.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        accelerator: Accelerator,
        loss: DraftLoss,
        data: ConversationData,
        collator: PadCollator,
    ):
        self.args, self.accelerator = args, accelerator
        self.loss, self.head, self.target = loss, loss.head, loss.target
        self.data, self.collator = data, collator
        self.started = time.monotonic()
        micro_batches = args.gradient_accumulation_steps * accelerator.num_processes
        self.order = DataOrder(example_lengths(data.train), args.batch_size, micro_batches, args.seed)
        self.total_steps = args.max_steps or self.order.steps(args.epochs)
        self.warmup = args.warmup_steps
        if self.warmup >= self.total_steps:
            self.warmup = self.total_steps // 10
            self.say(f"--warmup_steps lowered to {self.warmup}: the run has only {self.total_steps} steps")

        config = self.head.config
        self.splits = {n: config.split(self.target.num_layers, n) for n in config.stage_counts}
        scale = self.lm_head_lr_scale()
        self.model = accelerator.prepare(loss)
        lrs = {"lr": args.lr, "lr_adamw": args.lr_adamw, "lm_head_lr_scale": scale}
        self.optimizers = build_optimizers(self.head, args.optimizer, **lrs, weight_decay=args.weight_decay)
        # Losses are sums, so gradients are large already: fp16 starts with a low scale.
        fp16 = accelerator.mixed_precision == "fp16"
        self.scaler = torch.amp.GradScaler(accelerator.device.type, init_scale=2.0**8, enabled=fp16)
        self.progress = Progress()
        self.gradient_norm = math.nan  # of the last step, before clipping
        self.suspects: list[str] = []  # examples of the last skipped step
        self.saved_step: int | None = None  # of the newest checkpoint in the output folder, if it is this run's
        self.caches = self.open_caches()
        self.early = self.early_stopping()

    def early_stopping(self) -> EarlyStopping | None:
        """None without --stop_on."""
        args = self.args
        if args.stop_on is None:
            return None
        if not self.loss.has_traces:
            raise ValueError(
                f"--stop_on {args.stop_on} needs a drafter whose decoding can be replayed: a head trained with "
                "--trained_with_use_deepest, or PPSD's"
            )
        if self.data.val is None:
            raise ValueError(f"--stop_on {args.stop_on} needs held-out examples, and there are none: more data helps")
        return EarlyStopping(args.stop_patience or STOP_PATIENCE)

    def lm_head_lr_scale(self) -> float:
        """Of the learning rate, for the head's lm_head; with 0 it is frozen, which saves its gradient's product too."""
        scale = self.args.lm_head_lr_scale
        if scale is None:
            return 1.0
        if self.head.lm_head is None:
            raise ValueError("--lm_head_lr_scale: this head has no lm_head of its own, leave it out")
        self.head.lm_head.requires_grad_(scale > 0)
        return scale

    def open_caches(self) -> dict[str, FeatureCache]:
        """The feature cache of each part of the data; none without --feature_cache."""
        folder, anchors = self.args.feature_cache, self.head.config.anchors
        if folder is None:
            return {}
        caches = {}
        with self.accelerator.local_main_process_first():
            for part in ("train", "val"):
                rows = getattr(self.data, part)
                if rows is not None:
                    lengths, more = example_lengths(rows), self.args.feature_cache_layers
                    caches[part] = FeatureCache(folder / part, self.target, anchors, rows, lengths, more)
            open_caches(list(caches.values()))
            with_rows = [(cache, getattr(self.data, part)) for part, cache in caches.items()]
            taken = take_written(with_rows, self.args.data_path)
        size = sum(cache.nbytes for cache in caches.values()) / 1e9
        self.say(f"feature cache: {size:.1f} GB in {folder}" + (f"; {taken}" if taken else ""))
        return caches

    # The loop

    def run(self, checkpoint: Path | None = None) -> int:
        """Exit code 0 when done or out of time, 1 for a loss that stays non-finite, 128 + signal when told to stop."""
        try:
            with StopSignals() as self.signals:
                if checkpoint is not None:
                    self.restore(checkpoint)
                self.open_log(checkpoint)
                self.write_record("running")
                return self.steps()
        except OSError as error:
            raise self.disk_error(error) from error

    def steps(self) -> int:
        """The steps that are left, and the end. Returns the exit code of `run`."""
        args, progress = self.args, self.progress
        outcome, shown = "finished", self.accelerator.is_main_process
        pause = 0.1 if sys.stderr.isatty() else 30.0  # seconds between updates: log files want few
        bar = tqdm(total=self.total_steps, initial=progress.step, unit="step", mininterval=pause, disable=not shown)
        with bar:
            if self.validation_is_due and self.validate() is None:
                self.save()
                return self.stop()
            while progress.step < self.total_steps and not self.ended_early:
                began = time.monotonic()
                stopped, out_of_time = self.train_step(self.signals)
                progress.seconds += time.monotonic() - began
                bar.update()
                if progress.skipped_in_row == MAX_SKIPPED_IN_ROW:
                    return self.give_up()
                if progress.step % args.log_interval == 0 or progress.step == self.total_steps:
                    self.log(bar)
                if self.validation_is_due:
                    stopped = self.validate() is None or stopped
                if progress.step % args.save_interval == 0 or stopped or out_of_time:
                    self.save()
                if stopped:
                    return self.stop()
                if out_of_time:
                    outcome = "out of time"
                    break
        return self.finish("stopped early" if self.ended_early else outcome)

    @property
    def validation_is_due(self) -> bool:
        """Also at the start of a run that was stopped in the middle of one."""
        step = self.progress.step
        return step % self.args.eval_interval == 0 and self.progress.validated < step < self.total_steps

    @property
    def ended_early(self) -> bool:
        return self.early is not None and self.early.is_over

    def train_step(self, signals: StopSignals) -> tuple[bool, bool]:
        """One optimiser step. Returns whether any process was told to stop, and whether time is up."""
        step, losses = self.progress.step, self.accumulate()
        late = self.args.max_minutes is not None and time.monotonic() - self.started > 60 * self.args.max_minutes
        flags = [signals.received is not None, late and self.accelerator.is_main_process]
        sums = sum(torch.stack([value.detach().double() for value in loss]) for loss, _ in losses)
        sums = torch.cat([sums, sums.new_tensor(flags)])
        total, counted, supervised, agreed, stopped, out_of_time = self.accelerator.reduce(sums, "sum").tolist()
        shapes = [(self.splits[n], fill) for n, fill in self.draw_fills(step)]
        unused = self.loss.end_step(shapes, lambda value: self.accelerator.reduce(value, "sum"))

        self.gradient_norm = self.scale_gradients(counted)
        if math.isfinite(total) and math.isfinite(self.gradient_norm):
            scale_lr(self.optimizers, lr_factor(step, self.total_steps, self.warmup, self.args.lr_scheduler))
            self.rest(unused)
            for optimizer in self.optimizers:
                optimizer.step()
            self.progress.add(total, counted, int(supervised), agreed)
        elif not math.isfinite(total):
            self.skip(losses, what="loss is")
        elif self.scaler.get_scale() <= 1:  # above, fp16 has overflowed, as it does at times: the scaler lowers it
            self.skip(losses, what="gradients are")
        if self.scaler.is_enabled():
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.progress.step += 1
        return bool(stopped), bool(out_of_time)

    def accumulate(self) -> list[tuple[TrainingLoss, list[str]]]:
        """Gradients of this process's micro-batches, summed, and of all processes, averaged by the last backward."""
        accelerator = self.accelerator
        micro_batches = self.order.step(self.progress.step)
        draws = self.draw_fills(self.progress.step)
        mine = range(len(micro_batches))[accelerator.process_index :: accelerator.num_processes]
        losses = []
        for index in mine:
            number = self.progress.step * len(micro_batches) + index
            batch = self.load("train", micro_batches[index], number)
            n, fill = draws[index]
            with nullcontext() if index == mine[-1] else accelerator.no_sync(self.model):
                loss = self.model(batch.teacher, self.splits[n], fill, number)
                self.scaler.scale(loss.total).backward()
            losses.append((loss._replace(total=loss.total.detach()), batch.example_ids))
        return losses

    def draw_fills(self, step: int) -> list[tuple[int, int]]:
        """Pipeline depth and fill of each micro-batch of a step, all processes together."""
        args, count = self.args, self.order.step_size // self.args.batch_size
        settings = (tuple(self.splits), args.trained_with_use_deepest, args.fill_alpha, args.seed)
        return [draw_fill(*settings, micro_batch) for micro_batch in range(step * count, (step + 1) * count)]

    def rest(self, weights: Sequence[nn.Parameter]) -> None:
        """Take the gradients off weights that had no part in this step, so that optimisers leave them be.

        Muon moves a matrix by the same amount however small its momentum has become: a type of rows that is rare would
        wander off along the gradient of its last batch.
        """
        for weight in weights:
            weight.grad = None

    def load(self, part: str, rows: np.ndarray, number: int | None = None) -> MicroBatch:
        """Rows of `train` or `val`, run through the target, or as its pass left them in the feature cache.

        `number` of the micro-batch that they are, in training.
        """
        source = getattr(self.data, part)
        batch = self.collator([source[int(row)] for row in rows])
        names = ("input_ids", "labels", "attention_mask")
        ids, labels, mask = (batch[name].to(self.accelerator.device, non_blocking=True) for name in names)
        if number is not None:
            ids, labels, mask = self.loss.texts(ids, labels, mask, number)
        teacher = {"labels": labels, "attention_mask": mask}
        if self.loss.has_traces:
            teacher |= {"temperatures": batch["temperature"], "input_ids": ids}
        if part in self.caches:
            cached = self.caches[part].load(rows, ids, mask)
            teacher |= {"features": cached.features, "hidden": cached.hidden, "teacher_best": cached.best}
        else:
            features, hidden = teacher_features(self.target, ids, mask, self.head.config.anchors)
            teacher |= {"features": features, "hidden": hidden}
        return MicroBatch(teacher, batch["example_id"])

    def scale_gradients(self, counted: float) -> float:
        """Turn the gradients of the sum into those of the mean over the whole step, and clip. Returns their norm.

        Only here is the count of all processes and micro-batches known; DistributedDataParallel has divided by the
        number of processes, whatever their counts.
        """
        if self.scaler.is_enabled():
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        weights = [weight for weight in self.head.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad.mul_(self.accelerator.num_processes / (counted or 1))
        return float(nn.utils.clip_grad_norm_(weights, self.args.max_grad_norm))

    # Loss or gradients that are not finite

    def skip(self, losses: list[tuple[TrainingLoss, list[str]]], what: str) -> None:
        """Drop a step on all processes alike, and name the examples: those of the bad micro-batches, if they show."""
        self.progress.skipped += 1
        self.progress.skipped_in_row += 1
        suspects = [ids for loss, ids in losses if what == "gradients are" or not math.isfinite(loss.total)]
        self.suspects = sorted(name for ids in gather_object(suspects) for name in ids)
        self.say(f"step {self.progress.step}: {what} not finite, step skipped; examples {', '.join(self.suspects)}")

    def give_up(self) -> int:
        kept = list_checkpoints(self.args.output_dir)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
        examples = ", ".join(self.suspects)
        self.say(f"gave up: {MAX_SKIPPED_IN_ROW} steps in a row not finite, the last with examples {examples}; {last}")
        self.write_record("not finite")
        return 1

    # Validation and log

    @torch.no_grad()
    def validate(self) -> list[dict[str, float | None]] | None:
        """Loss and agreement on held-out examples for each n and fill the head is trained for, and logs them.

        The same examples in the same batches every time, whatever the number of processes. Empty without a split. None
        when a process was told to stop meanwhile.
        """
        args, accelerator, progress = self.args, self.accelerator, self.progress
        if self.data.val is None:
            return []
        longest_first = spread(len(self.data.val), args.val_examples)
        longest_first = longest_first[np.argsort(-example_lengths(self.data.val)[longest_first], kind="stable")]
        batches = [longest_first[i : i + args.batch_size] for i in range(0, len(longest_first), args.batch_size)]
        by_fill = args.trained_with_use_deepest and self.loss.has_fill
        shapes = [(n, fill) for n in self.splits for fill in range(1 if by_fill else n, n + 1)]
        sums = torch.zeros(len(shapes), 4, dtype=torch.float64, device=accelerator.device)
        traces, lengths = HeldOutTraces(self.splits), sums.new_zeros(2)
        self.loss.eval()
        places = range(accelerator.process_index, len(batches), accelerator.num_processes)
        watched = accelerator.is_main_process and sys.stderr.isatty()
        for place in tqdm(places, desc="held out", unit="batch", leave=False, disable=not watched):
            if self.signals.received is not None:
                break
            teacher = self.load("val", batches[place]).teacher
            with accelerator.autocast():
                traces.add(self.loss, teacher, place)
                lengths += self.loss.simulated_lengths(teacher)
            for index, (n, fill) in enumerate(shapes):
                with accelerator.autocast():
                    loss = self.loss(teacher, self.splits[n], fill)
                sums[index] += torch.stack([value.double() for value in loss])
        self.loss.train()
        stopped = sums.new_tensor(float(self.signals.received is not None))
        if accelerator.reduce(stopped, "sum").item():
            return None
        figures = [
            {
                "num_stages": n,
                "fill": fill,
                "loss": loss / counted if counted and math.isfinite(loss) else None,
                "agreement": agreed / supervised if supervised else None,
            }
            for (n, fill), (loss, counted, supervised, agreed) in zip(
                shapes, accelerator.reduce(sums, "sum").tolist(), strict=True
            )
        ]
        line = {"step": progress.step, "supervised_tokens": progress.supervised, "validation": figures}
        total, rounds = accelerator.reduce(lengths, "sum").tolist()
        line |= {"al_sim": total / rounds} if rounds else {}
        progress.validated = progress.step
        found = traces.figures(gather_object)
        self.write_log(line | ({"traces": found} if found else {}))
        if found:
            self.say(f"step {progress.step}: {in_words(found)}")
        if self.early is not None and self.early.judge(progress.step, found, figures):
            if accelerator.is_main_process:
                keep_best(self.head, args.output_dir)
            accelerator.wait_for_everyone()
        for figure in figures:
            name = f"val/n{figure['num_stages']}_fill{figure['fill']}"
            self.track({f"{name}_{key}": figure[key] for key in ("loss", "agreement")})
        return figures

    def open_log(self, checkpoint: Path | None) -> None:
        """Start the log, with the lines of a continued run up to its checkpoint."""
        lines = [] if checkpoint is None else read_log(checkpoint.parent / LOG_NAME)
        if self.accelerator.is_main_process:
            write_log(self.args.output_dir / LOG_NAME, [line for line in lines if line["step"] <= self.progress.step])

    def log(self, bar: tqdm) -> None:
        """A line for the steps since the last one."""
        progress = self.progress
        means = progress.close_window()
        line = {
            "step": progress.step,
            "epoch": round(progress.step * self.order.step_size / len(self.data.train), 4),
            "supervised_tokens": progress.supervised,
            **means,
            "lr": self.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": self.gradient_norm if math.isfinite(self.gradient_norm) else None,
            "skipped_steps": progress.skipped,
            "seconds": round(progress.seconds, 3),
        }
        self.write_log(line | self.loss.figures())
        self.track({f"train/{name}": value for name, value in line.items() if name != "step"})
        bar.set_postfix({name: "-" if value is None else f"{value:.4g}" for name, value in means.items()})

    def write_log(self, line: dict[str, object]) -> None:
        if self.accelerator.is_main_process:
            append_log(self.args.output_dir / LOG_NAME, line)

    def track(self, values: dict[str, float | None]) -> None:
        if self.args.tracker != "none":
            known = {name: value for name, value in values.items() if value is not None}
            self.accelerator.log(known, step=self.progress.step)

    def say(self, line: str) -> None:
        """One line on stderr, from the main process, clear of the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(line, file=sys.stderr)

    # Checkpoints

    def identity(self) -> dict[str, object]:
        """What has to be the same in a continued run."""
        names = ("seed", "optimizer", "lr", "lr_adamw", "lm_head_lr_scale", "weight_decay")
        names += ("trained_with_use_deepest", "fill_alpha", "stop_on")
        return {f"--{name}": getattr(self.args, name) for name in names} | {
            "examples per step": self.order.step_size,
            "training examples": len(self.data.train),
            "training tokens": int(self.order.lengths.sum()),
            "head": self.head.config.to_dict() | {"base_model_path": ""},  # the target may have moved
            **self.loss.identity,
        }

    def save(self) -> None:
        """A checkpoint, written by the main process while the others wait."""
        if self.accelerator.is_main_process:
            state = {
                "identity": self.identity(),
                "progress": asdict(self.progress),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scaler": self.scaler.state_dict(),
                "loss": self.loss.state(),
                "early": None if self.early is None else self.early.state(),
            }
            folder, keep = self.args.output_dir, self.args.keep_checkpoints
            has_best = self.early is not None and self.early.step >= 0
            save_checkpoint(folder, self.progress.step, self.head, state, keep, *[folder / BEST_NAME] * has_best)
        self.saved_step = self.progress.step
        self.accelerator.wait_for_everyone()

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. ValueError when it is damaged or belongs to a run with other settings or data."""
        state = read_state(checkpoint, self.identity())
        self.head.load_state_dict(read_payload(checkpoint)[1])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        vars(self.progress).update(state["progress"])
        self.loss.load_state(state["loss"])
        if self.early is not None:
            self.early.load_state(state["early"])
            if self.accelerator.is_main_process:
                copy_best(checkpoint, self.args.output_dir)
            self.accelerator.wait_for_everyone()
        if checkpoint.resolve().parent == self.args.output_dir.resolve():
            self.saved_step = self.progress.step
        self.say(f"continuing {checkpoint} at step {self.progress.step} of {self.total_steps}")

    # The end

    def stop(self) -> int:
        self.write_record("stopped")
        self.say(f"stopped after step {self.progress.step}: continue with the same arguments and --resume_from auto")
        return 128 + (self.signals.received or signal.SIGTERM)  # None: another process was told

    def disk_error(self, error: OSError) -> OSError | ValueError:
        """What to raise for an error: the user's line with the last checkpoint, when it is about this run's files."""
        folder = self.args.output_dir.resolve()
        if error.filename is None or not Path(error.filename).resolve().is_relative_to(folder):
            return error
        kept = list_checkpoints(folder)
        last = "there is no checkpoint yet"
        if kept:
            last = f"--resume_from auto goes on from {kept[-1]}{room_for(error, then=' when there is room')}"
        return ValueError(
            f"--output_dir {str(self.args.output_dir)!r} cannot be written ({error.strerror}, step "
            f"{self.progress.step}, {Path(error.filename).name}); {last}"
        )

    def finish(self, outcome: str) -> int:
        """Last validation, the head, the record and the plot. What a long validation could lose is saved before."""
        if self.data.val is not None and self.saved_step != self.progress.step:
            self.save()
        path, best = self.args.output_dir / CHECKPOINT_NAME, {}
        figures = [] if self.ended_early else self.validate()
        if figures is None:
            return self.stop()
        if self.early is not None:
            figures, best = self.early.validation, {"best_step": self.early.step, "trace_alpha": self.early.alpha}
            self.say(f"the best head is that of step {self.early.step}: {self.early.alpha:.4f} of its drafts accepted")
        if self.accelerator.is_main_process:
            if self.early is None:
                save_head(self.head, path)
            else:
                os.replace(self.args.output_dir / BEST_NAME, path)
            self.write_record(outcome, validation=figures, **best)
            plot_log(self.args.output_dir / LOG_NAME)
        full = [f for f in figures if f["fill"] == f["num_stages"] and f["agreement"] is not None]
        agreement = "".join(f", agreement {f['agreement']:.4f} held out at n = {f['num_stages']}" for f in full)
        self.say(f"{outcome} after step {self.progress.step} of {self.total_steps}{agreement}; head: {path}")
        return 0

    def write_record(self, outcome: str, **more: object) -> None:
        """`run.json`, from the main process."""
        record = run_record(self.args) | {
            "outcome": outcome,
            "processes": self.accelerator.num_processes,
            "mixed_precision": self.accelerator.mixed_precision,
            "examples_per_step": self.order.step_size,
            "steps": self.progress.step,
            "total_steps": self.total_steps,
            "skipped_steps": self.progress.skipped,
            "supervised_tokens": self.progress.supervised,
            "training_seconds": self.progress.seconds,
            "wall_seconds": time.monotonic() - self.started,
            "head_parameters": sum(weight.numel() for weight in self.head.parameters()),
            "train_examples": len(self.data.train),
            "val_examples": 0 if self.data.val is None else len(self.data.val),
            "data": vars(self.data.counters),
        }
        if self.accelerator.is_main_process:
            write_json(self.args.output_dir / "run.json", record | more)


def spread(total: int, most: int) -> np.ndarray:
    """Indices of at most so many of `total` rows, evenly spaced: they come from all files in proportion."""
    count = min(total, most)
    return np.arange(count) * total // max(count, 1)
