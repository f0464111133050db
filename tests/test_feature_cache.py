"""The target's hidden states on disk: the same states, for the right data, target and anchors only."""

import os
import shutil
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from tests.tiny import random_prompt, tiny_target
from training.feature_cache import FeatureCache, open_caches
from training.forward import teacher_features

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


def opened(*settings):
    cache = FeatureCache(*settings)
    open_caches([cache])
    return cache


@pytest.mark.parametrize("anchors", [(0, 1, 3), (0, 2, 4), (1, 3)])
def test_states_are_the_targets(target, rows, tmp_path, anchors):
    """Guards offsets, the order of anchors, h_0 that is looked up, and h_L that may be an anchor too; examples that
    were there already and new ones in one batch."""
    cache = opened(tmp_path / "train", target, anchors, rows, LENGTHS)
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
    first = opened(tmp_path, target, (0, 2), rows, LENGTHS).load(np.array([0, 3]), ids, mask)
    monkeypatch.setattr(type(target), "forward", lambda *_: pytest.fail("the target ran"))
    again = opened(tmp_path, target, (0, 2), rows, LENGTHS).load(np.array([0, 3]), ids, mask)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_foreign_cache_is_refused(target, rows, tmp_path):
    """Guards against states of another target, other data or other anchors."""
    opened(tmp_path / "train", target, (0, 2), rows, LENGTHS)
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
    own = opened(tmp_path / "own", target, (0, 1, 3), rows, LENGTHS).load(chosen, ids, mask)
    opened(tmp_path / "shared", target, (0, 2), rows, LENGTHS, (1, 3)).load(chosen, ids, mask)
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "forward", lambda *_: pytest.fail("the target ran"))
        shared = opened(tmp_path / "shared", target, (0, 1, 3), rows, LENGTHS).load(chosen, ids, mask)
    torch.testing.assert_close(shared, own, rtol=0, atol=0)
    with pytest.raises(ValueError, match="made with other hidden states"):
        FeatureCache(tmp_path / "own", target, (0, 2), rows, LENGTHS)
    with pytest.raises(ValueError, match=r"--feature_cache_layers has a 5: the target's layers are 1 to 4"):
        FeatureCache(tmp_path / "new", target, (0, 2), rows, LENGTHS, (1, 5))
    assert not (tmp_path / "new").exists()


def test_no_room_for_all_parts_is_refused_at_the_start(target, rows, tmp_path, monkeypatch):
    """Guards a disk that has room for the training part alone and for the validation part alone, not for both: the run
    was killed by SIGBUS, without a word. Room that is taken already is not asked for twice."""
    parts = [FeatureCache(tmp_path / part, target, (0, 2), rows, LENGTHS) for part in ("train", "val")]
    room = SimpleNamespace(free=parts[0].nbytes + 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(ValueError, match="GB free"):
        open_caches(parts)
    assert list(tmp_path.iterdir()) == []
    open_caches(parts[:1])
    open_caches(parts)
    room.free = 0
    open_caches(parts)


def test_disk_that_fills_up_is_one_line(target, rows, tmp_path, monkeypatch):
    """Guards a disk that others fill, or a quota: space that cannot be had is one line, and new files go again."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match="No space left on device"):
        opened(tmp_path / "train", target, (0, 2), rows, LENGTHS)
    assert list((tmp_path / "train").iterdir()) == []


def test_files_have_their_whole_space(target, rows, tmp_path):
    """Guards against sparse files, whose holes a write to the map fills, or dies."""
    cache = opened(tmp_path / "train", target, (0, 2), rows, LENGTHS)
    for path in (tmp_path / "train").glob("*.bin"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 0
    assert cache.missing_bytes == 0
