"""Tiny random targets and heads of every supported family, and drafters that are right or wrong on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, set_seed
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from decoding.stage import StaticForward
from decoding.tree import TokenTree
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from pipeline_model import HeadConfig, SpeculationHead, Target, auto_anchors, split_layers

VOCAB = 61
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    # Wide enough that the argmax is never a near tie.
    "initializer_range": 0.25,
}
WINDOW = 6  # tokens: so few that most sequences of the tests outgrow it
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
FAMILIES: dict[str, Callable] = {
    "llama": lambda **kw: LlamaConfig(**SHARED | kw),
    "mistral": lambda **kw: MistralConfig(**SHARED | {"sliding_window": WINDOW} | kw),
    "qwen2": lambda **kw: Qwen2Config(**{k: v for k, v in SHARED.items() if k != "head_dim"} | kw),
    "qwen3": lambda **kw: Qwen3Config(**SHARED | kw),
    "qwen3_moe": lambda **kw: Qwen3MoeConfig(**SHARED | MOE | kw),
    "qwen3_5": lambda **kw: Qwen3_5TextConfig(**SHARED | LINEAR | kw),
    "qwen3_5_moe": lambda **kw: Qwen3_5MoeTextConfig(
        **{k: v for k, v in SHARED.items() if k != "intermediate_size"}
        | MOE
        | LINEAR
        | {"shared_expert_intermediate_size": 24}
        | kw
    ),
}

# The families that have windows only where the configuration asks for them.
USED_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW}
WINDOWED: dict[str, Callable] = {
    "qwen2 window": lambda **kw: FAMILIES["qwen2"](**USED_WINDOW | {"max_window_layers": 1} | kw),
    "qwen3 window": lambda **kw: FAMILIES["qwen3"](
        **USED_WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2} | kw
    ),
    "qwen3_moe window": lambda **kw: FAMILIES["qwen3_moe"](**USED_WINDOW | kw),
}


def tiny_model(
    family: str, *, layers: int = 4, tied: bool = False, seed: int = 0, attention: str = "sdpa", **config_fields
) -> PreTrainedModel:
    """A random float32 model of a family; the same one for the same arguments."""
    set_seed(seed)
    config = (FAMILIES | WINDOWED)[family](num_hidden_layers=layers, tie_word_embeddings=tied, **config_fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():  # norms that do something
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    return model.eval()


def tiny_target(family: str, **kwargs) -> Target:
    return Target(tiny_model(family, **kwargs))


def hf_greedy(
    model: PreTrainedModel, prompt: Sequence[int], count: int, eos: int | list[int] | None = None
) -> list[int]:
    """New tokens of `model.generate`, greedy."""
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return output[0, len(prompt) :].tolist()


def random_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


@torch.no_grad()
def layer_outputs(model: PreTrainedModel, tokens: Sequence[int]) -> list[Tensor]:
    """h_0 .. h_L of a sequence, each [S, H], by hooks in one plain pass: h_L comes before the final norm."""
    states: list[Tensor] = []
    modules = [model.model.embed_tokens, *model.model.layers]
    hooks = [module.register_forward_hook(lambda _m, _i, output: states.append(output[0])) for module in modules]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return states


def tiny_head(
    target: Target, stage_sizes: Sequence[int], *, draft_vocab: int | None = None, **fields
) -> SpeculationHead:
    """A random head for a split; `draft_vocab` limits it to that many token ids, spread over the vocabulary.

    With `shallow_hidden_layer_indices` it is one of version 10.
    """
    vocab = target.config.vocab_size
    ids = None if draft_vocab is None else tuple(range(vocab % 3, vocab, max(1, vocab // draft_vocab)))[:draft_vocab]
    even = tuple(stage_sizes) == split_layers(target.num_layers, len(stage_sizes))
    config = HeadConfig(
        hidden_size=target.config.hidden_size,
        vocab_size=vocab,
        num_stages=len(stage_sizes),
        num_spec_layers=fields.pop("num_spec_layers", 2),
        aggr_feature_bound=fields.pop(
            "aggr_feature_bound", None if "shallow_hidden_layer_indices" in fields else auto_anchors(stage_sizes)
        ),
        draft_vocab_size=vocab if ids is None else len(ids),
        draft_token_ids=ids,
        stage_layers=None if even else tuple(stage_sizes),
        spec_intermediate_size_fallback=48,
        **fields,
    )
    torch.manual_seed(1)
    return config.build(target.config).eval().requires_grad_(False)


def spd_decoder(target: Target, head: SpeculationHead, *, use_deepest: bool | None = None, **settings) -> Decoder:
    sizes = head.config.split(target.num_layers)
    executor = LocalExecutor(target, sizes, head.config.anchors)
    return Decoder(executor, SPDDrafter(head, target, sizes, use_deepest), **settings)


def replayed(prepare: Callable) -> Callable:
    """`StaticForward.start` with something like a CUDA graph on a CPU: every run writes to the same outputs."""

    def start(forward: StaticForward, anchors: frozenset[int]) -> None:
        prepare(forward, anchors)
        if forward._graph is not None:  # all is ready for these anchors
            return
        with forward._cache.restored():  # to capture a graph runs nothing
            output, captured = forward._forward()
        forward._outputs = output, captured

        def replay() -> None:
            again, also = forward._forward()
            output.copy_(again)
            for anchor, states in also.items():
                captured[anchor].copy_(states)

        forward._graph = SimpleNamespace(replay=replay)

    return start


def replayed_step(step: Callable, device: torch.device) -> Callable:
    """`static_head.prepared` with something like a CUDA graph on a CPU, as `replayed`."""
    output = step()

    def replay() -> Tensor | None:
        again = step()
        return None if output is None else output.copy_(again)

    return replay


class ScriptedDrafter:
    """Drafts what a function says: `choose(path) -> ids, best first`, for the token after the chain `path`.

    The path is the whole sequence so far, prompt included, with this frontier node's own chain at its end. Instead of
    ids, which get logits 0, -1, -2 and so on, the function can return a mapping of ids to logits.
    """

    draft_token_ids = None

    def __init__(self, choose: Callable[[list[int]], Sequence[int] | Mapping[int, float]], vocab: int = VOCAB):
        self._choose, self._vocab = choose, vocab
        self._prompt: list[int] = []

    def with_prompt(self, prompt: Sequence[int]) -> ScriptedDrafter:
        self._prompt = list(prompt)
        return self

    def start(self, plan, features, path) -> None:
        self._sequence = list(self._prompt)

    def enter(self, nodes, h0) -> None:
        pass

    def observe(self, captured) -> None:
        pass

    def draft(self, tree: TokenTree) -> Tensor:
        known = {node.position: node.token for node in tree.path}
        for position in range(len(self._sequence), tree.root.position + 1):
            self._sequence.append(known[position])
        logits = torch.full((len(tree.frontier), self._vocab), -30.0)
        for row, node in enumerate(tree.frontier):
            chain = []
            while node.position > tree.root.position:
                chain.append(node.token)
                node = node.parent
            chosen = self._choose(self._sequence + chain[::-1])
            if not isinstance(chosen, Mapping):
                chosen = {token: -float(rank) for rank, token in enumerate(chosen)}
            for token, logit in chosen.items():
                logits[row, token] = logit
        return logits


def scripted_decoder(target: Target, stage_sizes, prompt, choose, **settings) -> Decoder:
    drafter = ScriptedDrafter(choose, target.config.vocab_size).with_prompt(prompt)
    return Decoder(LocalExecutor(target, stage_sizes), drafter, **settings)


def oracle(sequence: Sequence[int], *, rank: Callable[[int], int] = lambda position: 0, width: int = 1) -> Callable:
    """A `choose` for ScriptedDrafter: at each position the sequence's token, at place `rank(position)` of `width`.

    The other places have wrong tokens; a rank outside 0 .. width - 1 makes them all wrong.
    """

    def choose(path: list[int]) -> list[int]:
        right = sequence[len(path)]
        chosen = [(right + 1 + place) % VOCAB for place in range(width)]
        if 0 <= rank(len(path)) < width:
            chosen[rank(len(path))] = right
        return chosen

    return choose


RAW_TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"  # a template that adds nothing to a prompt
CHAT_TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w2{% endfor %}"


def save_target(
    folder: str | Path,
    family: str = "llama",
    *,
    generation_fields: Mapping | None = None,
    chat_template: str | None = RAW_TURNS,
    **kwargs,
) -> PreTrainedModel:
    """A tiny target with a word-by-word tokenizer ("w0 w1 ..."), saved as users have them: a folder."""
    model = tiny_model(family, **kwargs)
    for name, value in (generation_fields or {}).items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(model.config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return model
