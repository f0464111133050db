"""EAGLE-3 (arXiv 2503.01840), the chain: m tokens drafted in a row, then verified in one pass of the target.

method.md section 9 has the definitions. f_t is a projection of three hidden states of token t, e_t its embedding. Row t
pairs f_t with e_{t+1} and predicts token t+2; the drafts after it have no f yet and feed on the drafter's own output:

    position          5     6     7     8     9          7 is the newest token, and not yet in the target
    row 5             f_5   e_6   -> 7                   true rows stay in the drafter's cache
    row 6                   f_6   e_7   -> 8             the first draft
    row 7                         o_6   e_8   -> 9       o: the output of the row before, in the place of f_7
    target                        7     8     9          one pass; 8 and 9 are accepted as far as they agree

The target is one stage here, so a generation runs on one device. Training unrolls the same steps ("training-time
test"): step i feeds on the outputs of step i-1.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from baselines.method import ChainMethod, Flag, Run
from decoding.nodes import CachePlan, NodeBatch
from decoding.tree import Node, TokenTree
from loading.flags import COUNT, POSITIVE
from pipeline_inference import Captured, Completed, Decoder, LocalExecutor, Logits, PromptOutput
from pipeline_model import (
    DraftConfig,
    DraftHead,
    HeadCache,
    Qwen3_5SpecLayer,
    Qwen3SpecLayer,
    Target,
    causal_mask,
    grouped_attention,
    spec_layer_style,
)
from timeline import Timeline, stage_row
from training.forward import QUERY_CHUNK
from training.head_loss import DraftLoss
from training.loss import KL, LossTerms, TrainingLoss, distillation_loss, teacher_argmax

MIN_LAYERS = 4  # of the target: below, L-3 would be the embedding


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The b of the three hidden states h_b that f is made of: those that enter layers 2, L//2 and L-3."""
    return 2, num_layers // 2, num_layers - 3


def eagle3_anchors(num_layers: int) -> tuple[int, ...]:
    """All that the drafter reads: the embedding, and the feature layers. ValueError for a target without three."""
    if num_layers < MIN_LAYERS:
        raise ValueError(f"the target has {num_layers} layers: EAGLE-3 needs at least {MIN_LAYERS}")
    return tuple(sorted({0, *feature_layers(num_layers)}))


# ---------------------------------------------------------------------------------------------------------------------
# The drafter's weights
# ---------------------------------------------------------------------------------------------------------------------


class PairNorm(nn.Module):
    """Norms of both halves of [e; f], each with its own weights."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.embedding, self.feature = norm, copy.deepcopy(norm)

    def forward(self, pairs: Tensor) -> Tensor:
        embedding, feature = pairs.chunk(2, dim=-1)
        return torch.cat([self.embedding(embedding), self.feature(feature)], dim=-1)


class _PairInput:
    """A decoder layer over pairs [e; f], 2H wide, which adds to f as it came in: [B, R, 2H] -> [B, R, H].

    Mixed into a speculation layer's class.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, outputs, bias=False))
        self.input_layernorm = PairNorm(self.input_layernorm)

    def finish(self, pairs: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        return super().finish(pairs.chunk(2, dim=-1)[1], attended, gate)


class Qwen3PairLayer(_PairInput, Qwen3SpecLayer):
    pass


class Qwen3_5PairLayer(_PairInput, Qwen3_5SpecLayer):
    pass


PAIR_LAYERS = {Qwen3SpecLayer: Qwen3PairLayer, Qwen3_5SpecLayer: Qwen3_5PairLayer}


class Eagle3Head(DraftHead):
    """fc, one decoder layer in the style of the target's family, lm_head; final norm and embedding are the target's."""

    def __init__(self, config: Eagle3Config, target_config: PreTrainedConfig):
        super().__init__(config, target_config)
        self._sources = feature_layers(target_config.num_hidden_layers)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        layer_class, layer_config = spec_layer_style(config, target_config)
        self.spec_layers = nn.ModuleList([PAIR_LAYERS[layer_class](layer_config, 0)])
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def fuse(self, states: Mapping[int, Tensor]) -> Tensor:
        """f of tokens whose hidden states are {b: h_b [..., H]}: [..., H]."""
        return self.fc(torch.cat([states[b] for b in self._sources], dim=-1))


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    version = "eagle3"
    head_class = Eagle3Head

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        return eagle3_anchors(num_layers)

    def check_target(self, target_config: PreTrainedConfig) -> None:
        for name in ("num_stages", "num_spec_layers"):
            if getattr(self, name) != 1:
                raise ValueError(f"{name} is {getattr(self, name)}: EAGLE-3 has one")
        super().check_target(target_config)


# ---------------------------------------------------------------------------------------------------------------------
# Training-time test
# ---------------------------------------------------------------------------------------------------------------------


def unrolled_outputs(head: Eagle3Head, target: Target, features: Tensor, steps: int) -> Iterator[Tensor]:
    """The drafter's outputs before the final norm, [B, S, H], for step 0 .. steps - 1.

    features [B, S, m, H] as `teacher_features` returns them. Row r of a step goes on from row r of the step before; in
    step i it reads the embedding of token r + 1 + i, stands at position r + i, and predicts token r + 2 + i.
    """
    (layer,) = head.spec_layers
    states = dict(zip(head.config.anchors, features.unbind(2), strict=True))
    embedding, hidden, length = states[0], head.fuse(states), features.shape[1]
    keys, values = [], []
    for step in range(steps):
        embedding = pad(embedding[:, 1:], (0, 0, 0, 1))  # rows whose token lies past the end predict nothing
        pairs = torch.cat([embedding, hidden], dim=-1)
        rope = target.rope(step + length, step, features.device)
        normed = layer.input_layernorm(pairs)
        key, value = layer.keys_values(normed, rope)
        keys.append(key)
        values.append(value)
        query, gate = layer.queries(normed, rope)
        hidden = layer.finish(pairs, unrolled_attention(query, keys, values, layer.self_attn.scaling), gate)
        yield hidden


def unrolled_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scaling: float) -> Tensor:
    """Row r sees the rows of step 0 up to r, and of each later step, the present one included, its own.

    query [B, H_q, S, D]; keys and values of all steps so far, each [B, H_kv, S, D] -> [B, H_q, S, D].
    """
    length, outputs = query.shape[2], []
    for start in range(0, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        own = torch.eye(stop - start, dtype=torch.bool, device=query.device)
        mask = torch.cat([causal_mask(stop - start, start, query.device), *[own] * (len(keys) - 1)], dim=1)
        key, value = (
            torch.cat([first[:, :, :stop], *(step[:, :, start:stop] for step in later)], dim=2)
            for first, *later in (keys, values)
        )
        outputs.append(grouped_attention(query[:, :, start:stop], key, value, mask, scaling))
    return torch.cat(outputs, dim=2)


def unrolled_loss(
    head: Eagle3Head,
    target: Target,
    features: Tensor,
    hidden: Tensor,
    labels: Tensor,
    attention_mask: Tensor,
    *,
    steps: int,
    decay: float,
    terms: LossTerms = KL,
    teacher_best: Tensor | None = None,
) -> TrainingLoss:
    """Sum over the steps i of decay^i times the distillation loss of its rows; arguments as `training_loss`.

    The soft cross-entropy of method.md less the teacher's entropy, which has no gradient. Counts are those of step 0:
    `total / counted` divides every step by the same number, so that all tokens of a step weigh alike.
    """
    supervised = (labels >= 0) & attention_mask.bool()
    if teacher_best is None:  # found once: the steps ask for the same positions
        predicting = pad(supervised[:, 1:], (0, 1))
        teacher_best = torch.zeros_like(labels)
        teacher_best[predicting] = teacher_argmax(target, hidden[predicting])
    losses = []
    for step, output in enumerate(unrolled_outputs(head, target, features, steps)):
        batch, row = supervised[:, step + 2 :].nonzero(as_tuple=True)
        asked = batch, row + step + 1  # where the target predicts the same token
        losses.append(distillation_loss(head, target, output[batch, row], hidden[asked], teacher_best[asked], terms))
    total = sum(decay**step * loss.total for step, loss in enumerate(losses))
    return losses[0]._replace(total=total)


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------


class ChainExecutor(LocalExecutor):
    """The target as one stage that runs all the tokens which entered in a cycle, a chain, in one pass."""

    def __init__(self, target: Target, anchors: Sequence[int] = (0,), *, compiled: bool = False):
        super().__init__(target, (target.num_layers,), anchors, compiled=compiled)
        self._chain: list[tuple[NodeBatch, Tensor]] = []  # what entered in this cycle, with h_0 [1, H]

    def start(self, prompt: Sequence[int], root: int, plan: CachePlan, timeline: Timeline) -> PromptOutput:
        self._chain = []
        return super().start(prompt, root, plan, timeline)

    def begin_cycle(self, position: int, entering: Sequence[Node]) -> Tensor | None:
        hidden = super().begin_cycle(position, entering)
        self._chain.append(self._inputs[0])
        return hidden

    def finish_cycle(self) -> tuple[list[Captured], Completed]:
        batches, embedded = zip(*self._chain, strict=True)
        self._chain, self._inputs[0] = [], None
        with self._timeline.span(stage_row(0)):
            hidden, anchors = self.stages[0].run_chain(batches, torch.cat(embedded))
        ids = tuple(node for batch in batches for node in batch.ids)
        captured = Captured(torch.cat([batch.nodes for batch in batches]), anchors)
        return [captured], Completed(ids, Logits.of_all(partial(self.target.logits, hidden)))


class Eagle3Drafter:
    """The head at work: true rows for the tokens that the target has run, then rows that feed on its own output."""

    def __init__(self, head: Eagle3Head, target: Target):
        self.head, self.target = head, target
        self.draft_token_ids = head.draft_token_ids
        self._cache: HeadCache | None = None
        self._embeddings: Tensor | None = None  # [slots, H] e of each position
        self._true = 0  # rows in the cache that have a true feature
        self._states: dict[int, Tensor] = {}  # b -> h_b [q, H] of the positions from `_true` on
        self._output: Tensor | None = None  # [1, H] of the newest row, before the final norm

    def start(self, plan: CachePlan, features: Tensor, path: Sequence[Node]) -> None:
        length = len(features)
        states = dict(zip(self.head.config.anchors, features.unbind(1), strict=True))
        self._cache = HeadCache(self.head, plan.slots)
        self._embeddings = features.new_zeros(plan.slots, features.shape[-1])
        self._embeddings[:length] = states[0]
        self._true, self._states = 0, states
        if length > 1:  # the row of the prompt's last token waits for the embedding of the next token
            self._run_true_rows(length - 1, outputs=0)
        self._states = {b: hidden[-1:] for b, hidden in states.items()}

    def enter(self, nodes: Sequence[Node], h0: Tensor) -> None:
        self._embeddings[nodes[0].position] = h0[0]

    def observe(self, captured: Iterable[Captured]) -> None:
        for _, hidden in captured:  # of the last cycle's chain, which began where the true rows end
            self._states = hidden

    def draft(self, tree: TokenTree) -> Tensor:
        newest = tree.frontier[0].position
        if tree.levels:
            self._run(self._output, newest - 1, outputs=1)
        else:
            self._run_true_rows(newest, outputs=1)
        return self.head.lm_head(self.target.norm(self._output))

    def _run_true_rows(self, stop: int, outputs: int) -> None:
        """The rows up to `stop`, whose tokens the target has run by now."""
        features = self.head.fuse({b: hidden[: stop - self._true] for b, hidden in self._states.items()})
        self._run(features, self._true, outputs)
        self._true = stop

    def _run(self, features: Tensor, first: int, outputs: int) -> None:
        """Rows from `first` on, one for each feature [R, H]; what the cache held there and beyond is forgotten."""
        stop = first + len(features)
        pairs = torch.cat([self._embeddings[first + 1 : stop + 1], features], dim=-1)
        self._cache.length = first
        rope = self.target.rope(stop, first)
        self._output = self.head.forward_rows(pairs[None], rope, self._cache, outputs=outputs)


def eagle3_decoder(
    target: Target, head: Eagle3Head, num_steps: int, *, compiled: bool = False, **settings: object
) -> Decoder:
    """A decoder that drafts chains of `num_steps` tokens; `compiled` as for `Stage`, other settings as `Decoder`."""
    executor = ChainExecutor(target, head.config.anchors, compiled=compiled)
    return Decoder(executor, Eagle3Drafter(head, target), draft_chain=num_steps, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# The method, for eval.py and train_baseline.py
# ---------------------------------------------------------------------------------------------------------------------


class Eagle3Loss(DraftLoss):
    """The unrolled training forward; settings are those of `unrolled_loss`."""

    def of_batch(
        self, teacher: dict[str, Tensor], stage_sizes: tuple[int, ...], fill: int, micro_batch: int
    ) -> TrainingLoss:
        return unrolled_loss(self.head, self.target, **teacher, **self.settings)

    @property
    def identity(self) -> dict[str, object]:
        return {"--unroll_steps": self.settings["steps"], "--step_decay": self.settings["decay"]}


class Eagle3(ChainMethod):
    name, title = "eagle3", "EAGLE-3"
    code = ("baselines/eagle3.py",)
    config_class = Eagle3Config
    trained_here = True
    training_flags = (
        Flag("unroll_steps", "steps of the training-time test", 7, {"type": COUNT}),
        Flag("step_decay", "step i weighs so much to the power of i", 0.8, {"type": POSITIVE}),
    )

    def entries(self, args: argparse.Namespace, target: PreTrainedConfig) -> dict[str, Any]:
        anchors = eagle3_anchors(target.num_hidden_layers)
        return {"num_stages": 1, "num_spec_layers": 1, "aggr_feature_bound": anchors}

    def loss(self, args: argparse.Namespace, config: Eagle3Config, target: Target) -> Eagle3Loss:
        head, terms = config.new_head(target, args.seed), LossTerms(temperature=args.temperature)
        return Eagle3Loss(head, target, steps=args.unroll_steps, decay=args.step_decay, terms=terms)

    def decoder(self, target: Target, head: Eagle3Head, run: Run, settings: Mapping[str, Any]) -> Decoder:
        return eagle3_decoder(target, head, run.draft_chain, compiled=run.compiled, **settings)
