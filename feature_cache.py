"""The frozen target's hidden states on disk: epochs after the first skip its pass.

The target's pass is most of a training step, and gives the same states every time it sees an example. A `FeatureCache`
keeps them: per token, h_b of every anchor b but 0 (the embedding, looked up again) and h_L, in bfloat16, and the
target's argmax; 5.8 kB a token for a 135M target with five anchors. Examples are added when a step first meets them.
All that a step sees has gone through bfloat16, the first time too, so a run does not depend on what was in the cache
before it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor

from pipeline_model import Target, teacher_argmax, teacher_features
from script_utils import write_json

FORMAT = 1  # raise when the files would hold something else


class CachedPass(NamedTuple):
    """What the target's pass over a batch gave."""

    features: Tensor  # [B, S, m, H] the anchors' hidden states
    hidden: Tensor  # [B, S, H] h_L
    best: Tensor  # [B, S] argmax over the vocabulary; 0 at padding


class FeatureCache:
    """`teacher_features` of the examples of one data set, computed once.

    folder: where the states lie; made when missing. ValueError when it belongs to other data or another target, when it
        was made without one of the anchors, or when the disk has no room for all examples.
    anchors: what this head reads.
    rows, lengths: the data set and the tokens of each of its examples.
    more_anchors: what heads that are trained later from the same folder will read besides.

    Several processes may share a folder: an example is marked as there only after its states are written, and two
    processes that meet the same example write the same states.
    """

    def __init__(
        self,
        folder: Path,
        target: Target,
        anchors: Sequence[int],
        rows: datasets.Dataset,
        lengths: np.ndarray,
        more_anchors: Sequence[int] = (),
    ):
        for layer in more_anchors:
            if not 0 <= layer <= target.num_layers:
                raise ValueError(
                    f"--feature_cache_layers has a {layer}: the target's layers are 1 to {target.num_layers}"
                )
        self.target, self.anchors = target, tuple(anchors)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        folder.mkdir(parents=True, exist_ok=True)
        needed = {*self.anchors, *more_anchors, target.num_layers} - {0}
        identity = {"format": FORMAT, "data": _data_hash(rows), "target": _target_hash(target)}
        self.kept = self._claim(folder, identity, needed)  # the b of the h_b that are stored
        self.nbytes = self._nbytes(len(self.kept))
        shape = (self._num_tokens, len(self.kept), target.config.hidden_size)
        self.states = _open_map(folder / "states.bin", np.uint16, shape)  # bfloat16 bits
        self.best = _open_map(folder / "best.bin", np.int32, shape[:1])
        self.ready = _open_map(folder / "ready.bin", np.uint8, (len(lengths),))

    def _claim(self, folder: Path, identity: dict[str, object], needed: set[int]) -> list[int]:
        """The hidden states that the folder stores; a new one stores those that are needed."""
        path = folder / "cache.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differing = [name for name in identity if found.get(name) != identity[name]]
            if not differing and not needed <= set(found["hidden_states"]):
                differing = ["hidden_states"]
            if differing:
                raise ValueError(
                    f"--feature_cache {str(folder.parent)!r} was made with other {differing[0].replace('_', ' ')}: "
                    "delete it, or name another folder"
                )
            return found["hidden_states"]
        kept = sorted(needed)
        free, wanted = shutil.disk_usage(folder).free, self._nbytes(len(kept))
        if free < wanted:
            raise ValueError(
                f"--feature_cache {str(folder.parent)!r} needs {wanted / 1e9:.1f} GB, the disk has "
                f"{free / 1e9:.1f} GB free: train on less data, or without it"
            )
        write_json(path, identity | {"hidden_states": kept})
        return kept

    @torch.no_grad()
    def load(self, rows: np.ndarray, input_ids: Tensor, attention_mask: Tensor) -> CachedPass:
        """The target's pass over the examples `rows`, right-padded to [B, S]; runs it where one is missing."""
        if not self.ready[rows].all():
            self._add(rows, input_ids, attention_mask)
        batch, length = input_ids.shape
        bits = np.zeros((batch, length, *self.states.shape[1:]), dtype=np.uint16)
        best = np.zeros((batch, length), dtype=np.int64)
        for place, row in enumerate(rows):
            tokens = self._tokens(row)
            count = tokens.stop - tokens.start
            bits[place, :count], best[place, :count] = self.states[tokens], self.best[tokens]
        states = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        states = states.to(input_ids.device, non_blocking=True).to(self.target.dtype)
        layers = {0: self.target.embed(input_ids)} | dict(zip(self.kept, states.unbind(2), strict=True))
        features = torch.stack([layers[anchor] for anchor in self.anchors], dim=2)
        return CachedPass(features, layers[self.target.num_layers], torch.from_numpy(best).to(input_ids.device))

    def _add(self, rows: np.ndarray, input_ids: Tensor, attention_mask: Tensor) -> None:
        states, hidden = teacher_features(self.target, input_ids, attention_mask, self.kept)
        bits = states.to(torch.bfloat16).cpu().view(torch.int16).numpy().view(np.uint16)
        for place, row in enumerate(rows):
            if not self.ready[row]:
                tokens = self._tokens(row)
                real = hidden[place, : tokens.stop - tokens.start]
                self.states[tokens] = bits[place, : len(real)]
                self.best[tokens] = teacher_argmax(self.target, real).cpu().numpy()
                self.ready[row] = 1

    @property
    def _num_tokens(self) -> int:
        return int(self.offsets[-1])

    def _nbytes(self, num_states: int) -> int:
        """Size of a full cache: of each token so many hidden states, and its argmax."""
        return self._num_tokens * (2 * num_states * self.target.config.hidden_size + 4)

    def _tokens(self, row: int) -> slice:
        """Where an example's tokens lie."""
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))


def _open_map(path: Path, dtype: type, shape: tuple[int, ...]) -> np.memmap:
    """A file as an array, zeros where it was never written; such parts take no room on disk."""
    with path.open("ab") as file:
        file.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)


def _data_hash(rows: datasets.Dataset) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for batch in rows.select_columns("input_ids").with_format("numpy").iter(batch_size=1024):
        for ids in batch["input_ids"]:
            digest.update(len(ids).to_bytes(8, "little") + np.asarray(ids, dtype=np.int32).tobytes())
    return digest.hexdigest()


def _target_hash(target: Target) -> str:
    """Of the start of every weight: any other model, and any further training of this one, shows there."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in target.model.state_dict().items():
        digest.update(name.encode() + weight.flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()
