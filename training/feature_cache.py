"""The frozen target's hidden states on disk: epochs after the first skip its pass.

The target's pass is most of a training step, and gives the same states every time it sees an example. A `FeatureCache`
keeps them: per token, h_b of every anchor b but 0 (the embedding, looked up again) and h_L, in bfloat16, and the
target's argmax; 5.8 kB per token for a 135M target with five anchors. Examples are added when a step first meets them,
or taken from the states that the target left while it wrote them (`take_written`).
All that a step sees has gone through bfloat16, the first time too, so a run does not depend on what was in the cache
before it; but states from writing, one token at a time, are rounded in other places than those of a pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor

from pipeline_model import Target
from script_utils import write_json
from training.forward import teacher_features
from training.loss import teacher_argmax
from training.written_features import (
    WrittenFile,
    WrittenText,
    bfloat16_bits,
    check_layers,
    stored_layers,
    written_files,
)

FORMAT = 1  # raise when the files would hold something else


class CachedPass(NamedTuple):
    """What the target's pass over a batch gave."""

    features: Tensor  # [B, S, m, H] the anchors' hidden states
    hidden: Tensor  # [B, S, H] h_L
    best: Tensor  # [B, S] argmax over the vocabulary; 0 at padding


class Wanted(NamedTuple):
    """An example without states."""

    row: int
    ids: np.ndarray  # [T] int32, the tokens before its last supervised one: what comes after them is in no loss


class FeatureCache:
    """`teacher_features` of the examples of one data set, computed once.

    folder: where the states lie; made by `open`. ValueError when it belongs to other data or another target, or was
        made without one of the anchors.
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
        check_layers("--feature_cache_layers", more_anchors, target.num_layers)
        self.target, self.anchors = target, tuple(anchors)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        needed = stored_layers([*self.anchors, *more_anchors], target.num_layers)
        self.folder = folder
        self.identity = {"format": FORMAT, "data": _data_hash(rows), "target": target_hash(target)}
        self.kept = self._find_kept(needed)  # the b of the h_b that are stored
        tokens, states = int(self.offsets[-1]), len(self.kept)
        shape = (tokens, states, target.config.hidden_size)
        self._maps = {  # file -> type and shape
            "states.bin": (np.uint16, shape),  # bfloat16 bits
            "best.bin": (np.int32, shape[:1]),
            "ready.bin": (np.uint8, (len(lengths),)),
        }
        self.nbytes = sum(map(self._file_size, self._maps))  # on disk

    def _find_kept(self, needed: list[int]) -> list[int]:
        """The hidden states that the folder stores; a new one stores those that are needed."""
        folder, identity = self.folder, self.identity
        path = folder / "cache.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differing = [name for name in identity if found.get(name) != identity[name]]
            if not differing and not set(needed) <= set(found["hidden_states"]):
                differing = ["hidden_states"]
            if differing:
                raise ValueError(
                    f"--feature_cache {str(folder.parent)!r} was made with other {differing[0].replace('_', ' ')}: "
                    "delete it, or name another folder"
                )
            return found["hidden_states"]
        return needed

    def _file_size(self, name: str) -> int:
        kind, shape = self._maps[name]
        return int(np.prod(shape)) * np.dtype(kind).itemsize

    @property
    def missing_bytes(self) -> int:
        """What `open` will take of the disk."""
        found = [path.stat().st_blocks * 512 for name in self._maps if (path := self.folder / name).exists()]
        return max(0, self.nbytes - sum(found))

    def open(self) -> None:
        """Make the files, or open those that are there, with their whole space: a write to a mapped file that finds no
        room would end the process, without a word. ValueError, and no new file, when the disk has no room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = [path for name in self._maps if not (path := self.folder / name).exists()]
        try:
            for name in self._maps:
                with (self.folder / name).open("ab") as file:
                    if size := self._file_size(name):
                        os.posix_fallocate(file.fileno(), 0, size)
            write_json(self.folder / "cache.json", self.identity | {"hidden_states": self.kept})
        except OSError as error:
            for path in new:
                path.unlink(missing_ok=True)
            raise ValueError(
                f"--feature_cache {str(self.folder.parent)!r} needs {self.nbytes / 1e9:.3g} GB ({error.strerror}): "
                "make room, train on less data, or without it"
            ) from None
        maps = [np.memmap(self.folder / name, kind, "r+", shape=shape) for name, (kind, shape) in self._maps.items()]
        self.states, self.best, self.ready = maps

    def find_wanted(self, rows: datasets.Dataset) -> dict[bytes, list[Wanted]]:
        """The examples of this data set that are not there yet, by their prompts: the ids before any supervised one."""
        wanted: dict[bytes, list[Wanted]] = {}
        missing = np.flatnonzero(self.ready == 0)
        for row, example in zip(missing, rows.select(missing).with_format("numpy"), strict=True):
            ids, supervised = example["input_ids"].astype(np.int32), np.flatnonzero(example["labels"] >= 0)
            if supervised.size:
                wanted.setdefault(ids[: supervised[0]].tobytes(), []).append(Wanted(int(row), ids[: supervised[-1]]))
        return wanted

    def take(self, text: WrittenText, columns: Sequence[int], wanted: Mapping[bytes, Sequence[Wanted]]) -> int:
        """Fill in the examples that have this text; columns: where the text has the states kept. Returns how many."""
        taken = 0
        for row, ids in wanted.get(text.ids[: text.prompt].tobytes(), ()):
            if self.ready[row] or not np.array_equal(text.ids[: len(ids)], ids):
                continue
            part = slice(begin := int(self.offsets[row]), begin + len(ids))
            self.states[part], self.best[part] = text.states[: len(ids), columns], text.best[: len(ids)]
            self.ready[row] = 1
            taken += 1
        return taken

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
        bits = bfloat16_bits(states)
        for place, row in enumerate(rows):
            if not self.ready[row]:
                tokens = self._tokens(row)
                real = hidden[place, : tokens.stop - tokens.start]
                self.states[tokens] = bits[place, : len(real)]
                self.best[tokens] = teacher_argmax(self.target, real).cpu().numpy()
                self.ready[row] = 1

    def _tokens(self, row: int) -> slice:
        """Where an example's tokens lie."""
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))


def open_caches(caches: Sequence[FeatureCache]) -> None:
    """Open caches that share a disk. ValueError, and nothing written, when it has no room for all of them."""
    wanted = sum(cache.missing_bytes for cache in caches)
    folder = caches[0].folder.absolute()
    existing = next(path for path in folder.parents if path.exists())
    if (free := shutil.disk_usage(existing).free) < wanted:
        raise ValueError(
            f"--feature_cache {str(caches[0].folder.parent)!r} needs {wanted / 1e9:.3g} GB, the disk has "
            f"{free / 1e9:.3g} GB free: make room, train on less data, or without it"
        )
    for cache in caches:
        cache.open()


def take_written(caches: Sequence[tuple[FeatureCache, datasets.Dataset]], data_path: Sequence[str]) -> str:
    """Examples whose states the target left while it wrote the files of `data_path` go into the caches, opened before.

    Returns a few words on each folder of such states; "" where there is none, or no example is missing.
    """
    folders = written_files(data_path)
    if not folders:
        return ""
    wanted = [(cache, cache.find_wanted(rows)) for cache, rows in caches]
    if not any(found for _, found in wanted):
        return ""
    kept, target = caches[0][0].kept, caches[0][0].identity["target"]
    words = []
    for folder, files in folders.items():
        taken, problem = 0, None
        for file in map(WrittenFile, files):
            if (problem := file.problem(kept, target)) is not None:
                break
            columns = [file.layers.index(layer) for layer in kept]
            for text in file.texts():
                taken += sum(cache.take(text, columns, found) for cache, found in wanted)
        words.append(
            f"{taken:,} examples from {folder.name}" if problem is None else f"{folder.name} {problem}: not used"
        )
    return "; ".join(words)


def _data_hash(rows: datasets.Dataset) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for batch in rows.select_columns("input_ids").with_format("numpy").iter(batch_size=1024):
        for ids in batch["input_ids"]:
            digest.update(len(ids).to_bytes(8, "little") + np.asarray(ids, dtype=np.int32).tobytes())
    return digest.hexdigest()


def target_hash(target: Target) -> str:
    """Of the start of every weight: any other model, and any further training of this one, shows there."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in target.model.state_dict().items():
        digest.update(name.encode() + weight.flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()
