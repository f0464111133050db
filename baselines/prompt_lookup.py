"""Prompt lookup: drafts are copied from the text so far. `transformers`' own assisted generation, measured as ours is.

It needs no training and no device of its own, so a trained drafter has to do better. A cycle is one pass of the target;
a hook counts them. The first pass runs the prompt and may already verify drafts: what it yields is the prefill's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation import BaseStreamer

from baselines.method import ChainMethod, Flag, Run
from decoding.metrics import Costs
from decoding.result import GenerationResult
from decoding.sampling import Sampling
from loading.flags import COUNT
from loading.target_config import is_linear_attention
from loading.tokenizer import token_ids
from pipeline_inference import check_length, check_limits
from pipeline_model import Target
from timeline import Timings


def check_prompt_lookup(config: PreTrainedConfig) -> None:
    """ValueError for a target whose cache `transformers` cannot roll back."""
    if any(is_linear_attention(config, layer) for layer in range(config.num_hidden_layers)):
        raise ValueError(
            f"prompt lookup cannot run {config.model_type!r}: transformers' assisted generation does not roll back "
            "linear attention; use another method"
        )


class _Emitted(BaseStreamer):
    """What each pass of the target added to the text, and when the first one had."""

    def __init__(self):
        self.passes: list[list[int]] = []
        self.prefilled = 0.0  # on the host's clock
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            self.passes.append(value.flatten().tolist())
            if len(self.passes) == 1:
                self.prefilled = time.perf_counter()
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


class PromptLookup:
    """Generates as a `Decoder` does, with drafts of up to `num_tokens` tokens that followed the same words before."""

    def __init__(
        self,
        target: Target,
        num_tokens: int,
        *,
        sampling: Sampling,
        eos_token_ids: Sequence[int] = (),
        max_positions: int | None = None,
        seed: int = 0,
    ):
        check_prompt_lookup(target.config)
        if num_tokens < 1:
            raise ValueError(f"prompt_lookup_num_tokens is {num_tokens}: it must be at least 1")
        self.target, self.num_tokens, self.sampling = target, num_tokens, sampling
        self.eos_token_ids, self.max_positions, self.seed = tuple(eos_token_ids), max_positions, seed

    def generate(self, prompt: Sequence[int] | Tensor | np.ndarray, max_new_tokens: int) -> GenerationResult:
        """Decode to the end. ValueError as `Decoder.check`."""
        prompt = token_ids(prompt, self.target.config.vocab_size)
        check_limits(max_new_tokens, 1)
        if self.max_positions is not None:
            check_length(len(prompt), max_new_tokens, self.max_positions)
        drafts: list[Tensor] = []  # of each pass

        def note_drafts(module: nn.Module, args: tuple, inputs: dict) -> None:
            drafts.append(inputs["input_ids"][0, 1:])

        model = self.target.model
        emitted, ids = _Emitted(), torch.tensor([prompt], device=self.target.device)
        hook = model.register_forward_pre_hook(note_drafts, with_kwargs=True)
        own_settings, model.generation_config = model.generation_config, GenerationConfig()  # they would fill gaps
        cuda = [ids.device] if ids.is_cuda else []
        begun = time.perf_counter()
        try:
            with torch.random.fork_rng(devices=cuda):
                torch.manual_seed(self.seed)
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=self._config(max_new_tokens),
                    streamer=emitted,
                )
        finally:
            hook.remove()
            model.generation_config = own_settings
        ended = time.perf_counter()
        decode = ended - emitted.prefilled
        timings = Timings(emitted.prefilled - begun, decode, stages=[decode], ideal_decode=decode)
        return self._result(emitted.passes, [draft.tolist() for draft in drafts], timings)

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        sampling = self.sampling
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=not sampling.greedy,
            prompt_lookup_num_tokens=self.num_tokens,
            eos_token_id=list(self.eos_token_ids) or None,
            pad_token_id=0,
            **({} if sampling.greedy else drawn),
        )

    def _result(self, passes: Sequence[list[int]], drafts: Sequence[list[int]], timings: Timings) -> GenerationResult:
        first, *cycles = passes
        result = GenerationResult(
            (self.target.num_layers,),
            tokens=list(first),
            accepted=[True] * len(first),
            cycles=len(cycles),
            verified_by_fill=[0] * self.num_tokens,
            accepted_by_fill=[0] * self.num_tokens,
            timings=timings,
            prefill_tokens=len(first),
        )
        for tokens, draft in zip(cycles, drafts[1:], strict=True):
            for place, token in enumerate(tokens):
                verified = place < len(draft)
                accepted = verified and draft[place] == token
                if verified:
                    result.verified_by_fill[place] += 1
                    result.accepted_by_fill[place] += accepted
                result.tokens.append(token)
                result.accepted.append(accepted)
        result.stop_reason = "eos" if result.tokens[-1] in self.eos_token_ids else "length"
        return result


class PromptLookupMethod(ChainMethod):
    """Prompt lookup, for eval.py."""

    name, title = "prompt_lookup", "prompt lookup"
    code = ("baselines/prompt_lookup.py",)
    compiles = False
    decoding_flags = (Flag("prompt_lookup_num_tokens", "drafts in a row at most", [10], {"type": COUNT, "nargs": "+"}),)

    def lengths(self, args: argparse.Namespace) -> Sequence[int]:
        return args.prompt_lookup_num_tokens

    def check_target(self, target: PreTrainedConfig) -> None:
        check_prompt_lookup(target)

    def costs(self, run: Run) -> Costs:
        return Costs(factor=1.0, cycle=1.0, chain=None)

    def decoder(self, target: Target, head: None, run: Run, settings: Mapping[str, Any]) -> PromptLookup:
        return PromptLookup(target, run.draft_chain, **settings)
