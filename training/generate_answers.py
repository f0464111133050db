"""Writes training text in the target's own words: answers to the first prompts of conversations, one JSON line each.

    python training/generate_answers.py --model_name Qwen/Qwen3-4B --data_path sharegpt.json --temperature 0 \\
        --output own_t0.jsonl
    accelerate launch train.py ... --data_path own_t0.jsonl --data_path sharegpt.json

A head decodes text that its target writes, so that is the text to learn from; mixed with other text it also sees what
the target would not have said. A line holds `id` (the prompt's record), `temperature`, `finish` ("eos" or "length"),
`messages` and `enable_thinking`: training puts the answer after the prompt that the target saw, and an end of turn
after an answer that was not cut off. The file grows by whole batches; what batch i holds follows from the arguments
alone, so a run that was killed is started again with the same command and goes on where it stopped, to the same file.
At a temperature, an answer follows from `--seed` and its prompt: other prompts or a batch of another size do not change
it, but for rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[1]))

from decoding.sampling import Sampling
from loading.chat_template import add_template_flags, check_template_flags, use_template
from loading.flags import (
    COUNT,
    DTYPES,
    add_attention_flag,
    add_device_flag,
    add_dtype_flag,
    add_sampling_flags,
    fastest_dtype,
    integers,
    resolve_device,
)
from loading.target_config import load_target_config
from loading.target_files import check_attention_kernels, check_target_weights
from loading.tokenizer import load_tokenizer
from pipeline_model import Target
from script_utils import (
    Parser,
    Switch,
    append_text,
    check_output_file,
    check_output_folder,
    lock_file,
    naming,
    quiet_libraries,
    run_record,
    run_script,
    shown,
    write_json,
)
from training.batch_generation import Throughput, generate_batch
from training.chat_format import ChatFormat
from training.conversations import first_prompt
from training.feature_cache import target_hash
from training.sources import Counters, SkipRecord, find_sources, folder_lines, read_all
from training.written_features import Recording, batch_file, features_folder, write_texts

SORTED_BATCHES = 16  # batches whose prompts are sorted by length together: little padding, still a random order
# What the lines of the output depend on.
SETTINGS = ("model_name", "data_path", "temperature", "top_k", "top_p", "max_new_tokens", "max_prompt_tokens")
SETTINGS += ("max_prompts", "batch_size", "seed", "dtype", "enable_thinking", "chat_template", "no_chat_template")
SETTINGS += ("leave_out_cut_answers", "feature_layers")


def build_parser() -> Parser:
    parser = Parser(prog="training/generate_answers.py", description="Let the target answer the prompts of a data set.")
    model = parser.add_argument_group("target")
    model.add_argument("--model_name", required=True, help="target model: a folder or a hub id")
    add_device_flag(model)
    add_dtype_flag(model, "auto: bfloat16 where the device has matrix kernels for it, else float32")
    add_attention_flag(model)

    data = parser.add_argument_group("data")
    data.add_argument("--data_path", required=True, action="append", help="file, folder or hub id:split; repeatable")
    add_template_flags(data)
    data.add_argument("--output", type=Path, required=True, help="jsonl file to write, or to go on with")
    data.add_argument(
        "--feature_layers",
        type=lambda text: list(integers(text)),
        help="keep the target's hidden states after these layers too, beside the output, so that train.py "
        "--feature_cache need not run it again: the head's aggr_feature_bound, 5,15,25,29",
    )
    data.add_argument("--max_prompts", type=COUNT, help="prompts, drawn at random; default: all")
    data.add_argument("--max_prompt_tokens", type=COUNT, default=512, help="longer prompts are left out")

    sampling = parser.add_argument_group("generation")
    sampling.add_argument("--max_new_tokens", type=COUNT, default=512, help="tokens of an answer at most")
    sampling.add_argument(
        "--leave_out_cut_answers",
        action=Switch,
        default=False,
        help="no line for answers that --max_new_tokens cuts off; else their finish is length",
    )
    sampling.add_argument("--batch_size", type=COUNT, default=32, help="answers written side by side")
    add_sampling_flags(sampling, seed="of the prompts' order and of sampling")
    return parser


def check(args: argparse.Namespace) -> None:
    check_template_flags(args)
    Sampling(args.temperature, args.top_k, args.top_p)  # ValueError for what no sampling can be
    if args.output.suffix != ".jsonl":
        raise ValueError(f"--output is {str(args.output)!r}: name a .jsonl file, which train.py reads")
    folder = args.output.absolute().parent
    if (
        not folder.exists() and folder.parent.is_dir()
    ):  # a new folder of one's own answers is made when they are written
        check_output_folder("--output", folder)
    else:
        check_output_file("--output", args.output)
    if args.feature_layers is not None:
        check_output_folder("--output", features_folder(args.output))
    if args.output.exists() and not args.output.is_file():
        raise ValueError(f"--output {str(args.output)!r} is no regular file: what is there could not be gone on with")


class Prompt(NamedTuple):
    """A first prompt of a conversation."""

    record: str  # which one
    messages: list[dict]
    ids: list[int]  # of the rendered messages

    def has_answer(self, line: object) -> bool:
        """Whether a line of the output, parsed, answers this prompt."""
        if not isinstance(line, dict) or not isinstance(line.get("messages"), list):
            return False
        return (line.get("id"), line["messages"][:-1]) == (self.record, self.messages)


def read_prompts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompt of every usable record; what was left out is printed."""
    try:
        sources = find_sources(args.data_path)
    except OSError as error:
        raise ValueError(f"--data_path: {error}") from None
    chat, counters, prompts = ChatFormat(tokenizer, args.enable_thinking), Counters(), []
    for record, found in read_all(sources, counters, show_progress=sys.stderr.isatty()):
        try:
            messages = first_prompt(found, counters)
            text = chat.render_prompt(messages)
        except SkipRecord as reason:
            counters.skipped[str(reason)] += 1
            continue
        if len(text) > 16 * args.max_prompt_tokens:  # not worth tokenising
            counters.skipped["prompt too long"] += 1
            continue
        ids = tokenizer(text, add_special_tokens=chat.adds_special_tokens)["input_ids"]
        if len(ids) > args.max_prompt_tokens:
            counters.skipped["prompt too long"] += 1
            continue
        prompts.append(Prompt(Path(record).name, messages, ids))
    left_out = ", ".join(f"{count} {reason}" for reason, count in counters.skipped.most_common())
    for line in folder_lines(args.data_path):
        print(line)
    print(f"{len(prompts)} prompts of {counters.records} records" + (f"; left out: {left_out}" if left_out else ""))
    if not prompts:
        raise ValueError(
            f"--data_path {' '.join(args.data_path)}: no prompt of at most {args.max_prompt_tokens} tokens"
        )
    return prompts


def plan_batches(lengths: list[int], args: argparse.Namespace) -> list[list[int]]:
    """The prompts of each batch, as indices: a random order, sorted by length within `SORTED_BATCHES` batches."""
    order = np.random.default_rng(args.seed).permutation(len(lengths))[: args.max_prompts]
    window, batches = SORTED_BATCHES * args.batch_size, []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window].tolist(), key=lambda index: lengths[index])
        batches += [part[i : i + args.batch_size] for i in range(0, len(part), args.batch_size)]
    return batches


def check_record(args: argparse.Namespace) -> None:
    """ValueError when the output was begun with other arguments, or nobody knows with which."""
    record_path = args.output.with_suffix(".run.json")
    try:
        earlier = json.loads(record_path.read_text(encoding="utf-8"))["arguments"]
    except (OSError, ValueError, KeyError):
        raise ValueError(
            f"--output {str(args.output)!r} exists, {record_path.name} does not: name a new file"
        ) from None
    for name in SETTINGS:
        if earlier.get(name) != getattr(args, name):
            raise ValueError(
                f"--output {str(args.output)!r} was begun with --{name} {shown(earlier.get(name))}, now it is "
                f"{shown(getattr(args, name))}: use the same arguments, or name a new file"
            )


def batches_done(args: argparse.Namespace, prompts: list[Prompt], batches: list[list[int]]) -> tuple[int, int]:
    """Whole batches that the output already holds, and their bytes; what follows are answers of an unfinished one.

    ValueError for other settings, and for lines that are not the answers which these arguments put there: they would
    be lost.
    """
    if not args.output.exists():
        return 0, 0
    check_record(args)
    order = [prompts[index] for batch in batches for index in batch]
    place, size = 0, 0  # in `order`; in the file
    ends = [(0, 0)]  # both after each line
    for count, line in enumerate(args.output.read_bytes().splitlines(keepends=True), start=1):
        found = parse(line)
        if found is None and not line.endswith(b"\n"):
            break  # half a line, which a killed run left
        while place < len(order) and not order[place].has_answer(found) and args.leave_out_cut_answers:
            place += 1
        if place == len(order) or not order[place].has_answer(found):
            raise ValueError(
                f"--output {str(args.output)!r}, line {count} of it is not one of the {len(order)} answers that these "
                "arguments write: lines were added or changed, or --data_path has other prompts now; name a new file"
            )
        place, size = place + 1, size + len(line)
        if line.endswith(b"\n"):
            ends.append((place, size))
    bounds = [0, *accumulate(map(len, batches))]
    done = max(number for number, bound in enumerate(bounds) if bound <= ends[-1][0])
    return done, max(size for place, size in ends if place <= bounds[done])


def parse(line: bytes) -> object:
    """The value of a line of JSON; None for anything else."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: list[int], new: list[int]) -> str:
    """What the new tokens add to the text of the prompt: special tokens, and the blank that the first may begin with.

    Decoded alone, a reply loses that blank where a tokenizer marks the beginnings of words.
    """
    before, after = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (prompt, prompt + new))
    return after.removeprefix(before) if after.startswith(before) else tokenizer.decode(new)


class Writer:
    """Answers batches of prompts with a frozen target, and knows how fast."""

    def __init__(
        self,
        args: argparse.Namespace,
        target: Target,
        tokenizer: PreTrainedTokenizerBase,
        recording: Recording | None,
    ):
        self.target, self.tokenizer, self.end, self.seed = target, tokenizer, target.eos_token_ids, args.seed
        self.sampling = Sampling(args.temperature, args.top_k, args.top_p)
        self.max_new_tokens = args.max_new_tokens
        self.throughput = Throughput(target)
        self.recording, self.folder = recording, features_folder(args.output)
        if recording is not None:
            self._hash = target_hash(target)
            self.folder.mkdir(exist_ok=True)

    def answers(self, prompts: list[list[int]], number: int) -> Iterator[tuple[str, str]]:
        """(text, finish) of each prompt; at a temperature, an answer follows from the seed and its prompt.

        number: of the batch, for the file of its hidden states, which is there before the first answer.
        """
        begun = time.perf_counter()
        settings = self.max_new_tokens, self.end, self.sampling, self.seed, self.recording
        written = generate_batch(self.target, prompts, *settings)
        if self.recording is not None:
            texts = list(self.recording.texts(written))
            write_texts(batch_file(self.folder, number), texts, self.recording.layers, self._hash)
        self.throughput.add(prompts, written, time.perf_counter() - begun)
        for prompt, new in zip(prompts, written, strict=True):
            ended = new[-1] in self.end
            yield continuation(self.tokenizer, prompt, new[:-1] if ended else new), "eos" if ended else "length"


def main(args: argparse.Namespace) -> None:
    quiet_libraries()
    check(args)
    check_attention_kernels(args.attn_implementation)
    config = load_target_config(args.model_name)
    recording = None if args.feature_layers is None else Recording(args.feature_layers, config.num_hidden_layers)
    check_target_weights(args.model_name, config)
    args.output.parent.mkdir(exist_ok=True)
    with lock_file("--output", args.output):
        device, tokenizer = resolve_device(args.device), load_tokenizer(args.model_name)
        args.dtype = fastest_dtype(args.dtype, device)
        use_template(tokenizer, args)
        prompts = read_prompts(args, tokenizer)
        batches = plan_batches([len(prompt.ids) for prompt in prompts], args)
        done, size = batches_done(args, prompts, batches)
        if done < len(batches):
            loading = {"dtype": DTYPES[args.dtype], "device": device, "attn_implementation": args.attn_implementation}
            target = Target.load(args.model_name, **loading)
            if done == 0:
                write_json(args.output.with_suffix(".run.json"), run_record(args))
            else:
                print(f"going on with batch {done + 1} of {len(batches)}", file=sys.stderr)
            writer = Writer(args, target, tokenizer, recording)
            write_answers(args, writer, prompts, batches, done, size)
            print(writer.throughput)
        print(f"{sum(1 for _ in args.output.open('rb'))} answers in {args.output}")


def write_answers(
    args: argparse.Namespace, writer: Writer, prompts: list[Prompt], batches: list[list[int]], done: int, size: int
) -> None:
    """Append the answers of all batches but the first `done`, which take `size` bytes. ValueError for a full disk."""
    pause = 0.1 if sys.stderr.isatty() else 30.0
    numbers = tqdm(range(done, len(batches)), initial=done, total=len(batches), unit="batch", mininterval=pause)
    number = done
    try:
        with naming(args.output), args.output.open("ab") as file:
            file.truncate(size)
        for number in numbers:
            chosen = [prompts[index] for index in batches[number]]
            lines = []
            answers = writer.answers([prompt.ids for prompt in chosen], number)
            for prompt, (text, finish) in zip(chosen, answers, strict=True):
                if finish == "length" and args.leave_out_cut_answers:
                    continue
                turns = [*prompt.messages, {"role": "assistant", "content": text}]
                line = {"id": prompt.record, "temperature": args.temperature, "finish": finish, "messages": turns}
                line["enable_thinking"] = args.enable_thinking
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
            append_text(args.output, "".join(lines))
    except OSError as error:
        if error.filename != str(args.output):
            raise
        raise ValueError(
            f"--output {str(args.output)!r} cannot be written ({error.strerror}): the answers of {number} of "
            f"{len(batches)} batches are in it, the same command goes on from there"
        ) from None


if __name__ == "__main__":
    run_script(main, build_parser())
