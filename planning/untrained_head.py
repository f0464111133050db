"""The head that times are measured with where none is trained: its size matters, its weights do not."""

from __future__ import annotations

from pipeline_model import HeadConfig, Target, auto_anchors, split_layers


def untrained_config(target: Target, num_stages: int, num_spec_layers: int, draft_vocab_size: int) -> HeadConfig:
    """A head for an even split of the target, its draft vocabulary the first ids. ValueError for one that cannot be."""
    vocab_size = target.config.vocab_size
    draft_vocab_size = min(draft_vocab_size, vocab_size)
    return HeadConfig.parse(
        {
            "version": 11,
            "hidden_size": target.config.hidden_size,
            "vocab_size": vocab_size,
            "num_stages": num_stages,
            "num_spec_layers": num_spec_layers,
            "aggr_feature_bound": auto_anchors(split_layers(target.num_layers, num_stages)),
            "draft_vocab_size": draft_vocab_size,
            "draft_token_ids": None if draft_vocab_size == vocab_size else tuple(range(draft_vocab_size)),
            "trained_with_use_deepest": True,
        }
    )
