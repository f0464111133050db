"""Writes training text in the target's own words: answers to the first prompts of conversations, one JSON line each.

    python generate_training_data.py --model_name Qwen/Qwen3-4B --data_path sharegpt.json --temperature 0 \\
        --output own_t0.jsonl
    accelerate launch train.py ... --data_path own_t0.jsonl --data_path sharegpt.json

A head decodes text that its target writes, so that is the text to learn from; mixed with other text it also sees what
the target would not have said. A line holds `id` (the prompt's record), `temperature`, `finish` ("eos" or "length"),
`messages` and `enable_thinking`: training puts the answer behind the prompt that the target saw, and an end of turn
behind an answer that was not cut off. The file grows by whole batches; what batch i holds follows from the arguments
alone, so a run that was killed is started again with the same command and goes on where it stopped, to the same file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from chat_format import ChatFormat
from chat_template import add_template_flags, check_template_flags, use_template
from conversation_data import first_prompt
from conversation_sources import Counters, SkipRecord, find_sources, folder_lines, read_conversations
from pipeline_inference import Sampling, load_tokenizer
from pipeline_model import ATTN_IMPLEMENTATIONS, Target
from script_utils import (
    Parser,
    add_dtype_argument,
    check_output_file,
    quiet_libraries,
    resolve_device,
    resolve_dtype,
    run_record,
    run_script,
    write_json,
)

SORTED_BATCHES = 16  # batches whose prompts are sorted by length together: little padding, still a random order
# What the lines of the output depend on.
SETTINGS = ("model_name", "data_path", "temperature", "top_k", "top_p", "max_new_tokens", "max_prompt_tokens")
SETTINGS += ("max_prompts", "batch_size", "seed", "dtype", "enable_thinking", "chat_template", "no_chat_template")


def build_parser() -> Parser:
    parser = Parser(prog="generate_training_data.py", description="Let the target answer the prompts of a data set.")
    model = parser.add_argument_group("target")
    model.add_argument("--model_name", required=True, help="target model: a folder or a hub id")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_dtype_argument(model)
    model.add_argument("--attn_implementation", default="sdpa", choices=ATTN_IMPLEMENTATIONS)

    data = parser.add_argument_group("data")
    data.add_argument("--data_path", required=True, action="append", help="file, folder or hub id:split; repeatable")
    add_template_flags(data)
    data.add_argument("--output", type=Path, required=True, help="jsonl file to write, or to go on with")
    data.add_argument("--max_prompts", type=int, help="prompts, drawn at random; default: all")
    data.add_argument("--max_prompt_tokens", type=int, default=512, help="longer prompts are left out")

    sampling = parser.add_argument_group("generation")
    sampling.add_argument("--max_new_tokens", type=int, default=512, help="tokens of an answer at most")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    sampling.add_argument("--top_k", type=int, default=0, help="0: all tokens")
    sampling.add_argument("--top_p", type=float, default=1.0)
    sampling.add_argument("--batch_size", type=int, default=32, help="answers written side by side")
    sampling.add_argument("--seed", type=int, default=0, help="of the prompts' order and of sampling")
    return parser


def check(args: argparse.Namespace) -> None:
    for name in ("max_new_tokens", "max_prompt_tokens", "batch_size", "max_prompts"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}: give at least 1")
    check_template_flags(args)
    Sampling(args.temperature, args.top_k, args.top_p)  # ValueError for what no sampling can be
    if args.output.suffix != ".jsonl":
        raise ValueError(f"--output is {str(args.output)!r}: name a .jsonl file, which train.py reads")
    check_output_file("--output", args.output)
    if args.output.exists() and not args.output.is_file():
        raise ValueError(f"--output {str(args.output)!r} is no regular file: what is there could not be gone on with")


def read_prompts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list, list[int]]]:
    """(record id, messages, ids of the rendered prompt) of every usable record; what was left out is printed."""
    try:
        sources = find_sources(args.data_path)
    except OSError as error:
        raise ValueError(f"--data_path: {error}") from None
    chat, counters, prompts = ChatFormat(tokenizer, args.enable_thinking), Counters(), []
    for source in sources:
        for record, found in read_conversations(source, counters):
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
            prompts.append((Path(record).name, messages, ids))
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


def batches_done(args: argparse.Namespace, batches: list[list[int]]) -> int:
    """Batches that the output already holds; an unfinished one at its end is cut off. ValueError for other settings."""
    record_path = args.output.with_suffix(".run.json")
    if not args.output.exists():
        return 0
    try:
        earlier = json.loads(record_path.read_text(encoding="utf-8"))["arguments"]
    except (OSError, ValueError, KeyError):
        raise ValueError(
            f"--output {str(args.output)!r} exists, {record_path.name} does not: name a new file"
        ) from None
    for name in SETTINGS:
        if earlier.get(name) != getattr(args, name):
            raise ValueError(
                f"--output {str(args.output)!r} was begun with --{name} {earlier.get(name)}, now it is "
                f"{getattr(args, name)}: use the same arguments, or name a new file"
            )
    done, kept = 0, 0
    with args.output.open("rb+") as file:
        lines = file.readlines()
        whole = len(lines) if not lines or lines[-1].endswith(b"\n") else len(lines) - 1
        while done < len(batches) and kept + len(batches[done]) <= whole:
            kept += len(batches[done])
            done += 1
        file.truncate(sum(map(len, lines[:kept])))
    return done


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: list[int], new: list[int]) -> str:
    """What the new tokens add to the text of the prompt: special tokens, and the blank that the first may begin with.

    Decoded alone, a reply loses that blank where a tokenizer marks the beginnings of words.
    """
    before, after = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (prompt, prompt + new))
    return after.removeprefix(before) if after.startswith(before) else tokenizer.decode(new)


class Writer:
    """Answers batches of prompts with a frozen target."""

    def __init__(self, args: argparse.Namespace, target: Target, tokenizer: PreTrainedTokenizerBase):
        self.args, self.target, self.tokenizer = args, target, tokenizer
        self.pad = target.eos_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.sampling = {"do_sample": args.temperature > 0}
        if args.temperature > 0:  # transformers' default of top_k is 50, ours is neutral
            self.sampling |= {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}

    @torch.inference_mode()
    def answers(self, prompts: list[list[int]], seed: int) -> Iterator[tuple[str, str]]:
        """(text, finish) of each prompt; the batch's draws follow from `seed`."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        torch.manual_seed(seed)
        device = self.target.device
        written = self.target.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=self.args.max_new_tokens,
            pad_token_id=self.pad,
            eos_token_id=list(self.target.eos_token_ids),
            **self.sampling,
        )[:, longest:].tolist()
        for prompt, row in zip(prompts, written, strict=True):
            end = next((i for i, token in enumerate(row) if token in self.target.eos_token_ids), None)
            yield continuation(self.tokenizer, prompt, row[:end]), "length" if end is None else "eos"


def main(args: argparse.Namespace) -> None:
    quiet_libraries()
    check(args)
    device, tokenizer = resolve_device(args.device), load_tokenizer(args.model_name)
    use_template(tokenizer, args)
    prompts = read_prompts(args, tokenizer)
    batches = plan_batches([len(ids) for _, _, ids in prompts], args)
    done = batches_done(args, batches)
    target = Target.load(
        args.model_name,
        dtype=resolve_dtype(args.dtype, device),
        device=device,
        attn_implementation=args.attn_implementation,
    )
    writer = Writer(args, target, tokenizer)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if done == 0:
        write_json(args.output.with_suffix(".run.json"), run_record(args))
    elif done < len(batches):
        print(f"going on with batch {done + 1} of {len(batches)}", file=sys.stderr)
    pause = 0.1 if sys.stderr.isatty() else 30.0
    with args.output.open("a", encoding="utf-8") as file:
        for number in tqdm(
            range(done, len(batches)), initial=done, total=len(batches), unit="batch", mininterval=pause
        ):
            chosen = [prompts[index] for index in batches[number]]
            lines = []
            answers = writer.answers([ids for _, _, ids in chosen], seed=args.seed * 1_000_003 + number)
            for (record, messages, _), (text, finish) in zip(chosen, answers, strict=True):
                turns = [*messages, {"role": "assistant", "content": text}]
                line = {"id": record, "temperature": args.temperature, "finish": finish, "messages": turns}
                line["enable_thinking"] = args.enable_thinking
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
            file.write("".join(lines))
            file.flush()
    print(f"{sum(map(len, batches))} answers in {args.output}")


if __name__ == "__main__":
    run_script(main, build_parser())
