"""The target's hidden states on disk: the same states, for the right data, target and anchors only."""

import shutil
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from feature_cache import FeatureCache
from pipeline_model import teacher_features
from tests.tiny import random_prompt, tiny_target

LENGTHS = np.array([5, 9, 3, 7])


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def rows():
    return datasets.Dataset.from_dict({"input_ids": [random_prompt(int(n), seed=i) for i, n in enumerate(LENGTHS)]})


def padded(rows, chosen):
    longest = max(LENGTHS[chosen])
    ids, mask = torch.zeros(len(chosen), longest, dtype=torch.long), torch.zeros(len(chosen), longest)
    for place, row in enumerate(chosen):
        ids[place, : LENGTHS[row]] = torch.tensor(rows[int(row)]["input_ids"])
        mask[place, : LENGTHS[row]] = 1
    return ids, mask


@pytest.mark.parametrize("anchors", [(0, 1, 3), (0, 2, 4), (1, 3)])
def test_states_are_the_targets(target, rows, tmp_path, anchors):
    """Guards offsets, the order of anchors, h_0 that is looked up, and h_L that may be an anchor too; examples that
    were there already and new ones in one batch."""
    cache = FeatureCache(tmp_path / "train", target, anchors, rows, LENGTHS)
    for chosen in ([2, 0], [1, 0], [3, 2, 1, 0]):
        ids, mask = padded(rows, chosen)
        features, hidden, best = cache.load(np.array(chosen), ids, mask)
        expected, last = teacher_features(target, ids, mask, anchors)
        real = mask.bool()
        torch.testing.assert_close(hidden[real], last[real].bfloat16().float())
        assert torch.equal(best[real], target.logits(last).argmax(dim=-1)[real])
        for place, anchor in enumerate(anchors):
            exact = expected[:, :, place][real]
            torch.testing.assert_close(features[:, :, place][real], exact.bfloat16().float() if anchor else exact)


def test_each_example_is_computed_once(target, rows, tmp_path, monkeypatch):
    """Guards against a cache that is never read: the second meeting, also by another process, runs no layer."""
    ids, mask = padded(rows, [0, 3])
    first = FeatureCache(tmp_path, target, (0, 2), rows, LENGTHS).load(np.array([0, 3]), ids, mask)
    monkeypatch.setattr(type(target), "forward", lambda *_: pytest.fail("the target ran"))
    again = FeatureCache(tmp_path, target, (0, 2), rows, LENGTHS).load(np.array([0, 3]), ids, mask)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_foreign_cache_is_refused(target, rows, tmp_path):
    """Guards against states of another target, other data or other anchors."""
    FeatureCache(tmp_path / "train", target, (0, 2), rows, LENGTHS)
    changed = datasets.Dataset.from_dict({"input_ids": rows["input_ids"][::-1]})
    for other, anchors, data, lengths, part in (
        (tiny_target("llama", seed=1), (0, 2), rows, LENGTHS, "target"),
        (target, (0, 3), rows, LENGTHS, "hidden states"),
        (target, (0, 2), changed, LENGTHS[::-1], "data"),
    ):
        with pytest.raises(ValueError, match=f"made with other {part}"):
            FeatureCache(tmp_path / "train", other, anchors, data, lengths)


def test_heads_that_read_other_layers_share_a_cache(target, rows, tmp_path, monkeypatch):
    """Guards --feature_cache_layers: what one head's pass left is what another head's own pass gives, in its order of
    anchors, without a pass; a layer that nobody asked for is refused as before."""
    ids, mask = padded(rows, [1, 3])
    chosen = np.array([1, 3])
    own = FeatureCache(tmp_path / "own", target, (0, 1, 3), rows, LENGTHS).load(chosen, ids, mask)
    FeatureCache(tmp_path / "shared", target, (0, 2), rows, LENGTHS, (1, 3)).load(chosen, ids, mask)
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "forward", lambda *_: pytest.fail("the target ran"))
        shared = FeatureCache(tmp_path / "shared", target, (0, 1, 3), rows, LENGTHS).load(chosen, ids, mask)
    torch.testing.assert_close(shared, own, rtol=0, atol=0)
    with pytest.raises(ValueError, match="made with other hidden states"):
        FeatureCache(tmp_path / "own", target, (0, 2), rows, LENGTHS)
    with pytest.raises(ValueError, match=r"--feature_cache_layers has a 5: the target's layers are 1 to 4"):
        FeatureCache(tmp_path / "new", target, (0, 2), rows, LENGTHS, (1, 5))
    assert not (tmp_path / "new").exists()


def test_full_disk_is_one_line(target, rows, tmp_path, monkeypatch):
    """Guards against a run that dies in the middle because the disk is full."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ValueError, match="GB free"):
        FeatureCache(tmp_path / "train", target, (0, 2), rows, LENGTHS)
