"""The target's hidden states as they arise while it writes text: training on that text skips its pass from the start.

`generate_answers.py --feature_layers` leaves them in a folder beside the answers, one file per batch, and a
`FeatureCache` takes them from there. The last token of an answer was never run: no draft reads it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from script_utils import atomic_open

FORMAT = 1  # raise when the files would hold something else
SUFFIX = ".features"  # of the folder, in the place of the answers' .jsonl
UNREADABLE = OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile  # what numpy makes of damaged files


def check_layers(flag: str, layers: Iterable[int], num_layers: int) -> None:
    """ValueError for a layer that the target does not have."""
    for layer in layers:
        if not 0 <= layer <= num_layers:
            raise ValueError(f"{flag} has a {layer}: the target's layers are 1 to {num_layers}")


def stored_layers(layers: Iterable[int], num_layers: int) -> list[int]:
    """The b of the h_b to keep on disk: these and L, but for 0, the embedding, which is looked up again."""
    return sorted({*layers, num_layers} - {0})


def bfloat16_bits(states: Tensor) -> np.ndarray:
    """Hidden states as they lie on disk, uint16: numpy has no bfloat16."""
    return states.to(torch.bfloat16).cpu().view(torch.int16).numpy().view(np.uint16)


class WrittenText(NamedTuple):
    """A prompt and its answer without the last token, T tokens, as the target ran them."""

    ids: np.ndarray  # [T] int32
    prompt: int  # tokens of the prompt
    states: np.ndarray  # [T, K, H] the bits of bfloat16: h_b of each layer b of the recording
    best: np.ndarray  # [T] int32, the target's argmax from the prompt's last token on; 0 before that


class Recording:
    """Collects the states of a batch while `generate_batch` writes it; for one batch at a time.

    layers: the b of the h_b to keep, each from 1 to L; h_L is kept in any case.
    """

    def __init__(self, layers: Sequence[int], num_layers: int):
        check_layers("--feature_layers", layers, num_layers)
        self.layers = tuple(stored_layers(layers, num_layers))
        self._prompts: Sequence[Sequence[int]] = ()

    def begin(self, prompts: Sequence[Sequence[int]], slots: int, hidden_size: int) -> None:
        """Forget the batch before; these prompts, padded on the left, will take so many slots with their answers."""
        self._prompts, self._stop = prompts, 0
        self._states = torch.zeros(len(prompts), slots, len(self.layers), hidden_size, dtype=torch.bfloat16)
        self._best = torch.zeros(len(prompts), slots, dtype=torch.int32)

    def add(self, rows: Sequence[int], states: Tensor, best: Tensor) -> None:
        """What the next slots gave: states [rows, slots, K, H], and the argmax at the last of them, [rows]."""
        start, self._stop = self._stop, self._stop + states.shape[1]
        self._states[rows, start : self._stop] = states.to(torch.bfloat16).cpu()
        self._best[rows, self._stop - 1] = best.to(torch.int32).cpu()

    def texts(self, written: Sequence[Sequence[int]]) -> Iterator[WrittenText]:
        """Each prompt with its answer, whose tokens are `written`."""
        longest = max(map(len, self._prompts))
        bits, best = bfloat16_bits(self._states), self._best.numpy()
        for row, (prompt, new) in enumerate(zip(self._prompts, written, strict=True)):
            ids = np.array([*prompt, *new[:-1]], dtype=np.int32)
            begin = longest - len(prompt)
            part = slice(begin, begin + len(ids))
            yield WrittenText(ids, len(prompt), bits[row, part], best[row, part])


def features_folder(answers: Path) -> Path:
    """Where the states of a file of answers lie."""
    return answers.with_suffix(SUFFIX)


def batch_file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npz"


def write_texts(path: Path, texts: Sequence[WrittenText], layers: Sequence[int], target: str) -> None:
    """One file, atomically; `target` tells whose states they are."""
    with atomic_open(path, "wb") as file:
        np.savez(
            file,
            format=FORMAT,
            target=target,
            layers=layers,
            lengths=[len(text.ids) for text in texts],
            prompts=[text.prompt for text in texts],
            **{name: np.concatenate([getattr(text, name) for text in texts]) for name in ("ids", "states", "best")},
        )


class WrittenFile:
    """A file of `write_texts`. ValueError, in one line, for one that is damaged."""

    def __init__(self, path: Path):
        self._path = path
        self._arrays = self._read()
        if int(self._array("format")) != FORMAT:
            raise ValueError(f"{str(path)!r} is of another version of this program: delete {str(path.parent)!r}")
        self.target = str(self._array("target"))
        self.layers = self._array("layers").tolist()

    def problem(self, layers: Sequence[int], target: str) -> str | None:
        """Why these layers' states of this target cannot come from here."""
        if self.target != target:
            return "is another target's, or this one's in another dtype"
        lacking = [layer for layer in layers if layer not in self.layers]
        return f"has no layer {', '.join(map(str, lacking))}" if lacking else None

    def texts(self) -> Iterator[WrittenText]:
        ids, states, best, lengths, prompts = map(self._array, ("ids", "states", "best", "lengths", "prompts"))
        for stop, length, prompt in zip(np.cumsum(lengths), lengths, prompts, strict=True):
            part = slice(stop - length, stop)
            yield WrittenText(ids[part], int(prompt), states[part], best[part])

    def _read(self) -> np.lib.npyio.NpzFile:
        try:
            return np.load(self._path)
        except UNREADABLE as error:
            raise self._damage(error) from None

    def _array(self, name: str) -> np.ndarray:
        try:
            return self._arrays[name]
        except UNREADABLE as error:
            raise self._damage(error) from None

    def _damage(self, error: Exception) -> ValueError:
        return ValueError(
            f"{str(self._path)!r} cannot be read ({type(error).__name__}): delete {str(self._path.parent)!r}, and "
            "training runs the target again"
        )


def written_files(data_path: Sequence[str | Path]) -> dict[Path, list[Path]]:
    """The folders of states beside files of answers, named or in named folders, and the files in each."""
    folders = []
    for entry in map(Path, data_path):
        if entry.is_file():
            folders.append(features_folder(entry))
        elif entry.is_dir():
            folders += sorted(entry.rglob(f"*{SUFFIX}"))
    return {folder: sorted(folder.glob("*.npz")) for folder in folders if folder.is_dir()}
