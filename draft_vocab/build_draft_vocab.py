"""Counts the tokens that an assistant writes and keeps the most frequent ones as the draft vocabulary of a head.

    python draft_vocab/build_draft_vocab.py --tokenizer Qwen/Qwen3-4B --data_path sharegpt.json --output list.json

The list holds the end-of-sequence and end-of-turn tokens whatever their counts: a head that cannot draft them drafts
past the end of every reply. The positions counted are those that training supervises, through the same code.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import datasets
import numpy as np
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[1]))

from loading.chat_template import add_template_flags, use_template
from loading.flags import COUNT
from loading.tokenizer import load_tokenizer
from script_utils import Parser, Switch, atomic_open, check_output_file, check_output_folder, run_script
from training.chat_format import ChatFormat
from training.conversations import IGNORE_INDEX, load_conversations


def count_labels(rows: datasets.Dataset, vocab_size: int) -> np.ndarray:
    """How often each token is supervised, int64 [V]. Raises ValueError for a token outside the vocabulary."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.select_columns("labels").with_format("arrow").iter(batch_size=256):
        labels = table["labels"].combine_chunks().flatten().to_numpy()
        labels = labels[labels != IGNORE_INDEX]
        if labels.size and labels.max() >= vocab_size:
            raise ValueError(f"--vocab_size is {vocab_size}, but the data has token {labels.max()}: give a larger one")
        counts += np.bincount(labels, minlength=vocab_size)
    return counts


def choose_tokens(counts: np.ndarray, size: int, always: Iterable[int]) -> np.ndarray:
    """The `size` most frequent tokens of `counts` [V], those of `always` among them, ascending.

    Of equally frequent tokens the lower id wins. Fewer than `size` when fewer tokens were seen. Raises ValueError when
    `size` cannot hold `always`.
    """
    always = np.unique(np.fromiter(always, dtype=np.int64))
    if len(always) > size:
        raise ValueError(f"--size is {size}, but {len(always)} tokens are always kept: give a larger one")
    by_count = np.argsort(-counts, kind="stable")  # stable: ties stay in order of id
    seen = by_count[: np.count_nonzero(counts)]
    others = seen[~np.isin(seen, always)]
    return np.sort(np.concatenate([always, others[: size - len(always)]]))


def coverage(counts: np.ndarray, token_ids: np.ndarray) -> float:
    """Share of the counted positions whose token is in the list."""
    return float(counts[token_ids].sum() / counts.sum())


def end_tokens(tokenizer: PreTrainedTokenizerBase, source: str) -> set[int]:
    """Ids that end a sequence or a turn: the tokenizer's, the chat template's and the generation config's."""
    names = {tokenizer.eos_token, ChatFormat(tokenizer).end_of_turn.strip()} - {None, ""}
    ids = set(tokenizer.convert_tokens_to_ids(sorted(names)))
    try:
        listed = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # a tokenizer without a model beside it
        return ids
    if listed is None:
        return ids
    return ids | set(listed if isinstance(listed, list) else [listed])


def named_tokens(tokenizer: PreTrainedTokenizerBase, names: list[str]) -> set[int]:
    """Ids of tokens given by their text. Raises ValueError for a text that is not one token."""
    vocabulary = tokenizer.get_vocab()
    unknown = [name for name in names if name not in vocabulary]
    if unknown:
        raise ValueError(f"--always {unknown[0]!r} is no token of this tokenizer")
    return {vocabulary[name] for name in names}


def public_name(args: argparse.Namespace) -> str:
    """The name of the tokenizer as it is written to the list, which others read on other machines.

    Raises ValueError for a name that is a local path.
    """
    if args.tokenizer_name is None:
        return Path(args.tokenizer).resolve().name if Path(args.tokenizer).exists() else args.tokenizer
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", args.tokenizer_name) or Path(args.tokenizer_name).exists():
        raise ValueError(f"--tokenizer_name {args.tokenizer_name!r} is a local path: give a model name as owner/name")
    return args.tokenizer_name


def write_list(path: str, content: dict) -> None:
    """Writes one line per key, so that a list with its thousands of ids reads and diffs as a few lines."""
    lines = [f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in content.items()]
    with atomic_open(path) as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


def model_vocabulary(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the model beside the tokenizer, whose vocabulary may be padded; the tokenizer's where there is none."""
    try:
        config = AutoConfig.from_pretrained(args.tokenizer, trust_remote_code=args.trust_remote_code)
        return max(len(tokenizer), config.get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError):  # no config.json, an unknown model, one without a vocabulary
        return len(tokenizer)


def main(args: argparse.Namespace) -> None:
    """Builds and writes the list. Raises ValueError for what the user can mend."""
    check_output_file("--output", args.output)
    check_output_folder("--cache_dir", args.cache_dir)
    name = public_name(args)
    try:
        tokenizer = load_tokenizer(args.tokenizer, args.trust_remote_code)
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from None
    use_template(tokenizer, args)
    vocab_size = args.vocab_size or model_vocabulary(args, tokenizer)
    try:
        data = load_conversations(
            args.data_path,
            tokenizer,
            max_length=None,
            mask_assistant=args.mask_assistant,
            val_fraction=args.held_out,
            seed=args.seed,
            num_proc=args.num_proc,
            cache_dir=args.cache_dir,
            enable_thinking=args.enable_thinking,
        )
    except OSError as error:
        raise ValueError(str(error)) from error
    always = end_tokens(tokenizer, args.tokenizer) | named_tokens(tokenizer, args.always)
    if max(always) >= vocab_size:
        raise ValueError(f"--vocab_size is {vocab_size}, but token {max(always)} is always kept: give a larger one")

    counts = count_labels(data.train, vocab_size)
    if data.val is not None:
        held_out = count_labels(data.val, vocab_size)
        share = coverage(held_out, choose_tokens(counts, args.size, always))
        print(f"held-out coverage {share:.4%}: counted on {data.train.num_rows:,}, measured on {data.val.num_rows:,}")
        counts += held_out
    token_ids = choose_tokens(counts, args.size, always)
    if len(token_ids) < args.size:
        print(
            f"warning: --size is {args.size:,}, but the data has only {len(token_ids):,} distinct tokens; "
            "the list has these: give more data for a longer one",
            file=sys.stderr,
        )
    share = coverage(counts, token_ids)
    print(f"coverage {share:.4%} of {counts.sum():,} positions by {len(token_ids):,} of {vocab_size:,} tokens")
    write_list(
        args.output,
        {
            "tokenizer_name": name,
            "data": [Path(path).name if Path(path).exists() else path for path in args.data_path],
            "mask_assistant": args.mask_assistant,
            "vocab_size": vocab_size,
            "draft_vocab_size": len(token_ids),
            "token_ids": token_ids.tolist(),
            "total_positions_counted": int(counts.sum()),
            "topk_mass_ratio": share,
        },
    )
    print(f"wrote {args.output}")


def build_parser() -> Parser:
    parser = Parser(description="Build a draft vocabulary: the tokens that an assistant writes most.")
    source = parser.add_argument_group("input")
    source.add_argument("--tokenizer", required=True, help="model name or local folder of the tokenizer")
    source.add_argument("--trust_remote_code", action="store_true", help="run tokenizer code that comes with the model")
    source.add_argument(
        "--data_path", required=True, nargs="+", action="extend", help="file, directory or owner/name:split; repeatable"
    )
    source.add_argument(
        "--mask_assistant",
        action=Switch,
        default=True,
        help="count what the assistant writes only, not every token",
    )
    add_template_flags(source)
    source.add_argument("--num_proc", type=COUNT, default=1, help="processes that tokenise")
    source.add_argument("--cache_dir", help="folder of the tokenised data (default: inside the cache of datasets)")
    result = parser.add_argument_group("list")
    result.add_argument("--size", type=COUNT, default=32000, help="number of tokens to keep")
    result.add_argument("--always", action="append", default=[], help="token to keep whatever its count; repeatable")
    result.add_argument("--vocab_size", type=int, help="vocabulary of the model (default: its config.json's)")
    result.add_argument("--tokenizer_name", help="model name to write to the list (default: --tokenizer)")
    result.add_argument("--output", required=True, help="JSON file to write")
    check = parser.add_argument_group("check")
    check.add_argument("--held_out", type=float, default=0.0, help="share of conversations to measure coverage on")
    check.add_argument("--seed", type=int, default=0, help="which conversations are held out")
    return parser


if __name__ == "__main__":
    run_script(main, build_parser())
