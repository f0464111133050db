"""Targets with sliding attention windows: output, features and loss are the model's own, in and past the window.

References: `model.generate` and forward passes of an untouched copy of the model, masks made by plain loops.
"""

import itertools
from functools import lru_cache

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from baselines.eagle3 import eagle3_decoder
from baselines.ppsd import ppsd_decoder
from baselines.prompt_lookup import PromptLookup
from decoding.nodes import CachePlan, NodeBoard, NodeRow
from decoding.sampling import Sampling
from decoding.stage import Stage
from loading.target_config import check_supported, layer_types
from pipeline_inference import LocalExecutor, check_attention
from pipeline_model import Masks, window_mask
from tests import tiny
from tests.tiny import (
    WINDOW,
    WINDOWED,
    hf_greedy,
    layer_outputs,
    oracle,
    random_prompt,
    scripted_decoder,
    spd_decoder,
    tiny_head,
    tiny_model,
    tiny_target,
)
from tests.tiny_baselines import shadow, tiny_eagle3, tiny_ppsd
from training.forward import teacher_features

CPU = torch.device("cpu")
FAMILIES = ["mistral", *WINDOWED]
TOKENS = 20


@lru_cache
def target_of(family, attention="sdpa", **fields):
    return tiny_target(family, attention=attention, **fields)


@lru_cache
def reference(family, length, **fields):
    """A prompt, and it with what the library generates after it: other tokens than without the window."""
    prompt = random_prompt(length, seed=length)
    expected = hf_greedy(tiny_model(family, **fields), prompt, TOKENS)
    assert expected != hf_greedy(tiny_model(family, sliding_window=1000), prompt, TOKENS)
    return prompt, prompt + expected


# ---------------------------------------------------------------------------------------------------------------------
# Which positions a layer sees
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5, 100])
@pytest.mark.parametrize(("rows", "start"), [(1, 0), (7, 0), (3, 1), (4, 9)])
def test_window_mask_is_the_plain_loop(rows, start, window):
    """Guards against a window that is a token too long or too short, or whose keys begin elsewhere than the cache's."""
    first = next(key for key in range(start + rows) if key > start - window)
    expected = [
        [query - window < key <= query for key in range(first, start + rows)] for query in range(start, start + rows)
    ]
    assert window_mask(rows, start, window, CPU).tolist() == expected


def test_layers_with_a_window_are_the_librarys():
    """Guards against max_window_layers or layer_types read otherwise than transformers does."""
    full, sliding = "full_attention", "sliding_attention"
    assert layer_types(target_of("mistral").config) == (sliding,) * 4
    assert layer_types(target_of("mistral", sliding_window=None).config) == (full,) * 4
    assert layer_types(target_of("qwen2 window").config) == (full, sliding, sliding, sliding)
    assert layer_types(target_of("qwen3 window").config) == (sliding, full, sliding, full)
    assert layer_types(target_of("qwen3_moe window").config) == (sliding,) * 4
    for family in ("llama", "qwen2", "qwen3_moe", "qwen3_5"):
        assert target_of(family).window is None
    assert target_of("qwen2 window", max_window_layers=4).window is None  # in use, says the file, but by no layer


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------------------------------------------------

CASES = [  # prompts shorter and longer than the window; every n, width, lag, kernel and drafter with each family
    ((4,), 1, 0, 3, "sdpa", "head"),
    ((2, 2), 4, 1, WINDOW - 1, "sdpa", "mixed"),
    ((1, 2, 1), 2, 0, WINDOW, "eager", "mixed"),
    ((1, 3), 1, 1, WINDOW + 1, "sdpa", "oracle"),
    ((1, 1, 1, 1), 4, 0, 40, "sdpa", "mixed"),
    ((3, 1), 1, 0, 40, "eager", "mixed"),
    ((1, 1, 1, 1), 2, 1, 1, "eager", "head"),
    ((2, 1, 1), 1, 1, 2, "sdpa", "wrong"),
]


def decoder_for(target, sizes, prompt, sequence, drafter, **settings):
    if drafter == "head":
        return spd_decoder(target, tiny_head(target, sizes), **settings)
    ranks = {"mixed": lambda position: position * 7 % 5 % 3, "oracle": lambda position: 0, "wrong": lambda position: -1}
    choose = oracle(sequence, rank=ranks[drafter], width=settings["draft_top_k"])
    return scripted_decoder(target, sizes, prompt, choose, **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sizes", "width", "lag", "length", "attention", "drafter"), CASES)
def test_greedy_output_is_the_targets_own(family, sizes, width, lag, length, attention, drafter):
    """Guards against a token that sees more or less than its window: in a chain, in a tree, and after a rollback."""
    prompt, sequence = reference(family, length)
    target = target_of(family, attention)
    decoder = decoder_for(target, sizes, prompt, sequence, drafter, draft_top_k=width, verify_lag=lag)
    assert decoder.generate(prompt, TOKENS).tokens == sequence[length:]


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("width", [1, 4])
def test_a_window_shorter_than_the_pipeline(window, width):
    """Guards against trees whose window ends among the drafts in flight, where a slot is not its position."""
    prompt, sequence = reference("mistral", 9, sliding_window=window)
    target = target_of("mistral", sliding_window=window)
    decoder = decoder_for(target, (1, 1, 1, 1), prompt, sequence, "mixed", draft_top_k=width)
    assert decoder.generate(prompt, TOKENS).tokens == sequence[9:]


@pytest.mark.parametrize("family", ["mistral", "qwen2 window"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunk", [1, 4, WINDOW + 2])
def test_prompts_in_chunks(family, attention, chunk, monkeypatch):
    """Guards against a later chunk of a long prompt whose window is cut off at the chunk, or not at all."""
    monkeypatch.setattr(LocalExecutor, "PREFILL_CHUNK", chunk)
    prompt, sequence = reference(family, 40)
    target = target_of(family, attention)
    decoder = decoder_for(target, (1, 3), prompt, sequence, "mixed", draft_top_k=2)
    assert decoder.generate(prompt, TOKENS).tokens == sequence[40:]


def test_a_chain_reads_the_window_alone():
    """Guards the cost of long sequences: in a chain a layer with a window reads its slots, without a mask."""
    target = target_of("qwen3 window")
    plan, board, stage = CachePlan(slots=40, nodes=2, tree=False), NodeBoard(CPU, WINDOW), Stage(target, range(4))
    board.start(plan, prompt_length=30, root=0)
    stage.start(plan, root=0)
    cache, batch = stage.cache, board.enter(30, [NodeRow(token=5, id=1, parent=0, slot=30)])
    assert batch.masks == Masks(None, None)
    cache.enter(batch)
    entering = torch.randn(2, 1, 2, 1, 8)
    seen = [[stored.shape[2] for stored in cache[layer].update(*entering, layer)] for layer in range(4)]
    assert seen == [[WINDOW] * 2, [31] * 2, [WINDOW] * 2, [31] * 2]
    for stored, new in zip(cache[0].update(*entering, 0), entering, strict=True):
        assert torch.equal(stored[:, :, -1:], new)


def flash_stand_in(module, query, key, value, attention_mask, scaling, sliding_window=None, **_):
    """What flash attention computes, in plain steps: causal, the last query sees the last key, own window, no mask."""
    assert attention_mask is None
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, dim=1).transpose(2, 3) * scaling
    rows, keys = scores.shape[2:]
    for row, seen in itertools.product(range(rows), range(keys)):
        distance = row + keys - rows - seen
        if distance < 0 or (sliding_window is not None and distance >= sliding_window):
            scores[:, :, row, seen] = -torch.inf
    return (scores.softmax(dim=-1) @ value.repeat_interleave(group, dim=1)).transpose(1, 2), None


@pytest.mark.parametrize("family", FAMILIES)
def test_flash_attention_gets_the_window(family, monkeypatch):
    """Guards against masks, or none of the window, for a kernel that takes a number: whole prompts and chunks."""
    target = tiny_target(family)
    monkeypatch.setattr(target.config, "_attn_implementation", "flash_attention_2")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash_stand_in)
    monkeypatch.setattr(LocalExecutor, "PREFILL_CHUNK", 16)
    prompt, sequence = reference(family, 40)
    decoder = decoder_for(target, (1, 3), prompt, sequence, "mixed", draft_top_k=1)
    assert decoder.generate(prompt, TOKENS).tokens == sequence[40:]


@pytest.mark.parametrize("family", ["mistral", "qwen3 window"])
def test_flash_attention_verifies_chains(family, monkeypatch):
    """Guards against EAGLE-3's rows with a mask, which that kernel refuses, or without one, as if all began at 0."""
    prompt, sequence = reference(family, 20)
    target = tiny_target(family)
    monkeypatch.setattr(target.config, "_attn_implementation", "flash_attention_2")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash_stand_in)
    monkeypatch.setattr(LocalExecutor, "PREFILL_CHUNK", 8)
    decoder = eagle3_decoder(target, tiny_eagle3(target), 3)
    shadow(decoder, prompt, oracle(sequence + [0] * 4, rank=lambda position: -(position % 4 == 0)))
    assert decoder.generate(prompt, TOKENS).tokens == sequence[20:]


@pytest.mark.parametrize(("width", "compiled", "flag"), [(2, False, "--draft_top_k 2"), (1, True, "--compile")])
def test_flash_attention_is_refused_where_masks_are_needed(width, compiled, flag):
    """Guards against a kernel that is handed a tree's mask: it would take it for padding."""
    with pytest.raises(ValueError, match=rf"{flag} needs masks .* use --attn_implementation sdpa"):
        check_attention("flash_attention_2", width, compiled)


# ---------------------------------------------------------------------------------------------------------------------
# Training and baselines
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_training_features_are_the_models(family, attention):
    """Guards against a head that learns from, and is taught by, states of a target without its window."""
    rows = [random_prompt(20, seed=1), random_prompt(9, seed=2), random_prompt(WINDOW, seed=3)]
    ids, attended = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], attended[row, : len(tokens)] = torch.tensor(tokens), 1
    features, hidden = teacher_features(target_of(family, attention), ids, attended, range(4))
    for row, tokens in enumerate(rows):
        *anchors, last = layer_outputs(tiny_model(family), tokens)
        close = {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(features[row, : len(tokens)], torch.stack(anchors, dim=1), **close)
        torch.testing.assert_close(hidden[row, : len(tokens)], last, **close)


@pytest.mark.parametrize("family", ["mistral", "qwen3 window"])
@pytest.mark.parametrize("method", ["eagle3", "ppsd", "prompt lookup"])
def test_baselines_are_lossless_too(family, method):
    """Guards against a comparison with methods that decode another model: chains verified in one pass, a lookup."""
    prompt, sequence = reference(family, 9)
    target = target_of(family)
    if method == "prompt lookup":
        decoder = PromptLookup(target, 3, sampling=Sampling())
    else:
        if method == "eagle3":
            decoder = eagle3_decoder(target, tiny_eagle3(target), 3)
        else:
            decoder = ppsd_decoder(target, tiny_ppsd(target, (1, 2, 1)), (1, 2, 1))
        shadow(decoder, prompt, oracle(sequence + [0] * 4, rank=lambda position: -(position % 4 == 0)))
    result = decoder.generate(prompt, TOKENS)
    assert result.tokens == sequence[9:]
    assert method == "prompt lookup" or 0.3 < result.alpha < 1


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------

MIXED = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"sliding_window": 17}, "sliding_window 17 .* 'llama'"),
        (
            "qwen3_moe window",
            {"layer_types": MIXED},
            "full_attention, .* 'qwen3_moe' with sliding_window",
        ),
        ("mistral", {"sliding_window": None, "layer_types": MIXED}, "sliding_attention, .* without sliding_window"),
        ("qwen3", {"layer_types": MIXED}, "use_sliding_window is false"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention, .* 'qwen2'"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_windows_that_the_library_runs_otherwise_are_refused(family, fields, message):
    """Guards against windows in config.json that a family's layers ignore, or that only the library's cache obeys."""
    config = (tiny.FAMILIES | WINDOWED)[family](num_hidden_layers=4, **fields)
    with pytest.raises(ValueError, match=message):
        check_supported(config)
