"""Speculative pipeline decoding with a rank a stage: prints what the pipeline generates for some prompts.

    python distributed_inference/example_mp_pipeline_generate.py --spec_head_ckpt speculation_head_final.pt \\
        --rank_gpus 0,1,2,3,4 --prompt "What is the capital of France?"

It starts its ranks itself. `torchrun --standalone --nproc_per_node=5` in place of `python` starts them, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from decoding.chat import Chat, Conversation
from decoding.metrics import accept_length
from decoding.result import GenerationResult, TokenEvent, shared_length
from decoding.sampling import Sampling
from decoding.text import TextStream, paint
from distributed_inference.cycle_profile import Cycle, cycles, write_reports
from distributed_inference.launch import Checked, Lead, RankParser, add_arguments
from distributed_inference.self_launch import run, take_ctrl_c
from loading.chat_template import use_template
from loading.tokenizer import encode_prompt, load_tokenizer, print_unused_settings
from pipeline_inference import (
    PROMPTS,
    Decoder,
    Generation,
    add_chat_argument,
    answer_lines,
    check_chat,
    page_facts,
    page_title,
    result_line,
)
from script_utils import check_output_file
from timeline import stage_row, time_table
from viewer.page import Setting, run_of, write_page

PROMPT = PROMPTS[0]


def build_parser() -> RankParser:
    parser = RankParser(description="Speculative pipeline decoding with a rank a stage; python or torchrun starts it.")
    parser.add_argument(
        "--prompt", type=str, nargs="+", action="extend", help=f"one or more, repeatable; unset: {PROMPT!r}"
    )
    add_arguments(parser)
    add_chat_argument(parser)
    parser.add_argument("--baseline", action="store_true", help="stream the target alone first, on the same ranks")
    parser.add_argument(
        "--html", metavar="FILE", help="write a page that shows the ranks at work, beside the target alone on them"
    )
    return parser


class Example:
    """Decodes the prompts one after the other and streams their text."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self._tokens: list[int] = []  # of the generation under way, all verified
        self._comparison = Comparison()
        self.interactive = args.chat
        self._chat: Chat | None = None

    def prepare(self, checked: Checked) -> None:
        args = self.args
        check_chat(args, "prompt", "baseline", "html", "trace", "profile_timing")
        check_output_file("--html", args.html)
        self.tokenizer = load_tokenizer(checked.base_model_path, args.trust_remote_code)
        use_template(self.tokenizer, args)
        self.prompts = [
            (prompt, encode_prompt(self.tokenizer, prompt, enable_thinking=args.enable_thinking))
            for prompt in args.prompt or [PROMPT]
        ]
        for _, ids in self.prompts:
            checked.check_prompt(ids)

    def claim(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, lead: Lead) -> int:
        args, [path] = self.args, self.args.spec_head_ckpt
        sampling = Sampling(*args.temperature, args.top_k, args.top_p)
        decoder = lead.speculative(path, sampling, *args.draft_top_k)
        decoder.keep_trace, decoder.keep_head = decoder.keep_trace or args.html is not None, args.html is not None
        lead.warm_up(self.prompts[0][1], decoder)
        print_unused_settings(lead.checked.base_model_path)
        if args.chat:
            return self._converse(lead, decoder)
        setting = self._setting(lead, decoder)
        profile: list[Cycle] = []
        traces, shown = {}, []
        for number, (prompt, ids) in enumerate(self.prompts, start=1):
            print(f"\nPrompt {number}/{len(self.prompts)}: {prompt}", flush=True)
            standard = self._alone(lead, sampling, ids) if args.baseline or args.html else None
            generation = decoder.start(ids, args.max_new_tokens)
            if args.baseline:
                print("The pipeline:", flush=True)
            self._stream(generation)
            lead.faithfulness.add(decoder, generation)
            print(f"\n{result_line('pipeline', generation.result, setting.num_spec_layers)}", flush=True)
            if args.profile_timing:
                print(time_table(generation.result.timings, generation.result.cycles), flush=True)
            own_stage = stage_row(0) if lead.layout.colocated else None
            profile += cycles(generation.timeline, decoder.executor.fills, own_stage)
            if args.trace:
                traces[f"prompt {number}"] = generation.trace(self.tokenizer)
            if args.baseline:
                print(self._comparison.add(standard.result, generation.result, decoder), flush=True)
            if args.html:
                shown.append(run_of(prompt, standard.recording, generation.recording, setting, self.tokenizer))
        write_reports(args, {"all prompts": profile}, traces)
        if shown:
            write_page(args.html, setting, shown)
        lead.faithfulness.report()
        return int(self._comparison.differs and lead.target.dtype == torch.float32)

    def _converse(self, lead: Lead, decoder: Decoder) -> int:
        """A conversation in the terminal. Returns the exit code."""
        args, [path] = self.args, self.args.spec_head_ckpt
        longest = lead.checked.target_config.max_position_embeddings - args.max_new_tokens + 1
        num_spec_layers = lead.checked.heads[path].num_spec_layers
        self._chat = Chat(
            Conversation(self.tokenizer, longest, enable_thinking=args.enable_thinking),
            self.tokenizer,
            start=decoder.start,
            show=self._stream_line,
            describe=partial(answer_lines, "pipeline", num_spec_layers, False),
        )
        take_ctrl_c()
        return self._chat.run(args.max_new_tokens)

    def interrupted(self) -> bool:
        return self._chat is not None and self._chat.interrupt()

    def _alone(self, lead: Lead, sampling: Sampling, ids: list[int]) -> Generation:
        """The same prompt by the target alone on the same ranks: streamed with --baseline, for the page in any case."""
        decoder = lead.alone(sampling)
        decoder.keep_trace = True
        generation = decoder.start(ids, self.args.max_new_tokens)
        if self.args.baseline:
            print("The target alone:", flush=True)
            self._stream(generation)
            print()
        line = result_line("standard", generation.finish(), 0)
        print(line + "\n" * self.args.baseline, flush=True)
        lead.faithfulness.add(decoder, generation)
        return generation

    def _setting(self, lead: Lead, decoder: Decoder) -> Setting:
        """What the page says of all prompts."""
        checked, [path] = lead.checked, self.args.spec_head_ckpt
        facts = page_facts(path, decoder, f"{checked.device}, {checked.dtype}".replace("torch.", ""))
        head = "" if checked.layout.colocated else ", and one for the head"
        placement = f"{checked.layout.world_size} processes: a rank a stage{head}"
        baseline = "the target alone, on the same ranks"
        if lead.emulation:
            facts.append(f"EMULATED devices: {lead.emulation.describe()}")
            placement += "; each sleeps out the rest of an emulated device's time"
            baseline = "the target alone, on one emulated device"
        return Setting(
            title=page_title(checked.base_model_path),
            facts=facts,
            placement=placement,
            baseline=baseline,
            num_spec_layers=checked.heads[path].num_spec_layers,
            verify_lag=self.args.verify_lag,
        )

    def _stream_line(self, events: Iterable[TokenEvent]) -> None:
        self._stream(events)
        print(flush=True)

    def _stream(self, events: Iterable[TokenEvent]) -> None:
        """Print the text as it comes. Another thread does: the stages would go on while this one prints, untimed."""
        text = TextStream(self.tokenizer)
        with ThreadPoolExecutor(max_workers=1) as printer:
            for event in events:
                self._tokens.append(event.token)
                printed = printer.submit(self._show, text, event)
        printed.result()  # an error of the other thread, if there was one
        print(paint(text.end(), event.style), end="")
        self._tokens = []

    def _show(self, text: TextStream, event: TokenEvent) -> None:
        print(paint(text.put(event.token), event.style), end="", flush=True)

    def last_words(self) -> None:
        if self._tokens:
            print(f"\n[stopped] {len(self._tokens)} tokens were verified: {self._tokens}", flush=True)


class Comparison:
    """The pipeline beside the target alone, on the prompts so far."""

    def __init__(self):
        self._pairs: list[tuple[GenerationResult, GenerationResult]] = []  # the target alone, the pipeline
        self.differs = False  # ids that must be equal are not

    def add(self, standard: GenerationResult, pipeline: GenerationResult, decoder: Decoder) -> str:
        """One more prompt. Returns what there is to say of it, and after several of all of them."""
        self._pairs.append((standard, pipeline))
        ids = ""
        if decoder.verify_drafts and decoder.sampling.same_draws(decoder.draft_top_k):
            equal = standard.tokens == pipeline.tokens
            self.differs |= not equal
            at = shared_length(standard.tokens, pipeline.tokens)
            ids = "ids are equal, " if equal else f"ids DIFFER from token {at}, "
        line = f"[compare] {ids}{self._speed(self._pairs[-1:])}"
        return line if len(self._pairs) == 1 else f"{line}; all prompts so far: {self._speed(self._pairs)}"

    def _speed(self, pairs: Sequence[tuple[GenerationResult, GenerationResult]]) -> str:
        """The measured speed-up of some prompts together, beside their L_acc."""
        alone, pipeline = zip(*pairs, strict=True)
        seconds = [sum(result.timings.decode for result in results) for results in (alone, pipeline)]
        tokens = [sum(result.new_tokens for result in results) for results in (alone, pipeline)]
        cycles = sum(result.cycles for result in pipeline)
        if not cycles or not all(tokens):
            return "no decode step"
        speedup = tokens[1] * seconds[0] / (seconds[1] * tokens[0])
        length = accept_length(pipeline[0].factor, tokens[1], cycles)
        return f"{speedup:.2f}x as fast, {speedup / length:.0%} of L_acc {length:.2f}"


def main() -> NoReturn:
    run(Example, build_parser())


if __name__ == "__main__":
    main()
