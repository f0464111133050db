"""Tiny drafters of the baselines, and a way to make them right or wrong on purpose while they really run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baselines.dflash import DFlashConfig, DFlashHead, dflash_anchors
from baselines.eagle3 import Eagle3Config, eagle3_anchors
from baselines.ppsd import PPSDConfig
from decoding.tree import TokenTree
from pipeline_inference import Decoder, Drafter
from pipeline_model import DraftConfig, DraftHead, Target


def tiny_eagle3(target: Target, draft_vocab: int | None = None) -> DraftHead:
    """A random EAGLE-3 head."""
    return _tiny(Eagle3Config, target, draft_vocab, num_stages=1, aggr_feature_bound=eagle3_anchors(target.num_layers))


def tiny_ppsd(target: Target, sizes: Sequence[int], draft_vocab: int | None = None, layers: int = 1) -> DraftHead:
    """A random PPSD head for a split."""
    shape = {"num_stages": len(sizes), "stage_layers": list(sizes), "aggr_feature_bound": (0, sizes[0])}
    return _tiny(PPSDConfig, target, draft_vocab, num_spec_layers=layers, **shape)


def tiny_dflash(
    target: Target, block_size: int = 4, draft_vocab: int | None = None, taps: int = 3, layers: int = 2, **fields
) -> DFlashHead:
    """A random DFlash drafter; its target needs 3 layers more than taps. Norms that do something, and the target's."""
    shape = {"num_stages": 1, "num_spec_layers": layers, "aggr_feature_bound": dflash_anchors(target.num_layers, taps)}
    head = _tiny(DFlashConfig, target, draft_vocab, block_size=block_size, mask_token_id=3, **shape, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
    return head


def _tiny(config_class: type[DraftConfig], target: Target, draft_vocab: int | None, **fields) -> DraftHead:
    raw = {
        "version": config_class.version,
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "model_type": target.config.model_type,
        "num_spec_layers": 1,
        "spec_intermediate_size_fallback": 48,
        **fields,
    }
    if draft_vocab is not None:
        vocab = target.config.vocab_size
        ids = list(range(vocab % 3, vocab, max(1, vocab // draft_vocab)))[:draft_vocab]
        raw |= {"draft_token_ids": ids, "draft_vocab_size": len(ids)}
    config = config_class.parse(raw)
    torch.manual_seed(1)
    return config.build(target.config).eval().requires_grad_(False)


class ShadowedDrafter:
    """Drafts, in chains, what `choose(text) -> ids, best first` says, while the real drafter runs beside it.

    `notes` has, for each draft, the text it continues, how many drafts of its own cycle that ends with, and the real
    drafter's logits.
    """

    draft_token_ids = None

    def __init__(self, drafter: Drafter, prompt: Sequence[int], choose: Callable, vocab: int):
        self._drafter, self._prompt, self._choose, self._vocab = drafter, list(prompt), choose, vocab
        self.notes: list[tuple[list[int], int, Tensor]] = []

    def start(self, plan, features, path) -> None:
        self._text = list(self._prompt)
        self._drafter.start(plan, features, path)

    def enter(self, nodes, h0) -> None:
        self._text[nodes[0].position :] = [nodes[0].token]  # what stood there and after was rejected
        self._drafter.enter(nodes, h0)

    def observe(self, captured) -> None:
        self._drafter.observe(captured)

    def draft(self, tree: TokenTree) -> Tensor:
        self.notes.append((list(self._text), len(tree.levels), self._drafter.draft(tree)[0]))
        logits = torch.full((1, self._vocab), -30.0)
        for rank, token in enumerate(self._choose(self._text)):
            logits[0, token] = -float(rank)
        return logits


def shadow(decoder: Decoder, prompt: Sequence[int], choose: Callable) -> ShadowedDrafter:
    """Put a script before a decoder's drafter."""
    vocab = decoder.executor.target.config.vocab_size
    decoder.drafter = ShadowedDrafter(decoder.drafter, prompt, choose, vocab)
    return decoder.drafter
