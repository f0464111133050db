"""Rows that eval.py has made of the target alone on one device, for an evaluation over ranks to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from evaluation.files import RowLog
from evaluation.metrics import is_whole
from evaluation.plan import PLACEMENT
from evaluation.prompts import Sample

# And the temperature. Records made before a setting came into being lack it: it was off then.
SAME = ("target_fingerprint", "dtype", "quantization", "compile", "max_new_tokens", "top_k", "top_p", "seed")
OFF = {"compile": False, "quantization": None}
ROWS, RECORD = "__per_sample.jsonl", "__run.json"  # ends of the file names of a run of eval.py


class GivenRows(RowLog):
    """Rows of another evaluation, and its settings. They are read and never changed."""

    def __init__(self, path: str):
        """ValueError for a file that is not there, or whose settings are not."""
        rows = Path(path)
        own = rows.name.endswith(ROWS)
        record = rows.with_name(rows.name.removesuffix(ROWS) + RECORD) if own else rows.with_suffix(".json")
        super().__init__(rows, record)
        if not rows.is_file():
            raise ValueError(f"--baseline_rows has {path!r}, which is no file: give rows that eval.py has written")
        try:
            self.settings: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError):
            raise ValueError(
                f"--baseline_rows has {path!r}, but its settings, {str(record)!r}, are missing or damaged: keep both "
                "files of eval.py together"
            ) from None

    def lock(self, flag: str) -> AbstractContextManager[None]:
        return nullcontext()

    def check_rows(self, settings: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        """ValueError unless they are the target's alone, made on one device under these settings, for all samples."""
        theirs, name = self.settings, f"--baseline_rows has {str(self.path)!r}"
        if theirs.get("method", "autoregressive") != "autoregressive":
            raise ValueError(
                f"{name}, rows of method {theirs['method']}: give those of the target alone, from the baseline cache "
                "or by eval.py --method autoregressive"
            )
        if theirs.get("placement", PLACEMENT) != PLACEMENT:
            raise ValueError(f"{name}, made on {theirs['placement']}: give rows that eval.py made on one device")
        for key in SAME:
            if theirs.get(key, OFF.get(key)) != settings[key]:
                raise ValueError(
                    f"{name}, made with {key} {theirs.get(key)}, but this run has {settings.get(key)}: "
                    "run eval.py with the same target and settings"
                )
        ours, device = (_hardware(each["device"]) for each in (settings, theirs))
        if ours != device:
            raise ValueError(f"{name}, made on {device}, but the ranks are on {ours}: compare times of the same device")
        rows = self.read()
        for sample in samples:
            row = rows.get(sample.key)
            if row is None or not is_whole(row, sample):
                why = "has no row of" if row is None else "failed at" if "error" in row else "had another prompt for"
                raise ValueError(
                    f"{name}, which {why} data set {sample.dataset!r}, question {sample.question_id}: run eval.py "
                    "with the same data sets and chat template"
                )


def _hardware(device: str) -> str:
    """The name of a device without the number of its threads: one process may use more of them than a rank."""
    return device.rsplit(", ", 1)[0] if device.endswith(("thread", "threads")) else device


def choose_baseline(paths: Sequence[str], temperature: float, wanted: Sequence[float]) -> GivenRows:
    """The rows made at a temperature. ValueError where none or several are, and for rows at one that is not wanted."""
    found = [GivenRows(path) for path in paths]
    for rows in found:
        theirs = rows.settings.get("temperature")
        if theirs not in wanted:
            asked = ", ".join(f"{value:g}" for value in wanted)
            raise ValueError(
                f"--baseline_rows has {str(rows.path)!r}, made with temperature {theirs}, but this run has {asked}"
            )
    matching = [rows for rows in found if rows.settings["temperature"] == temperature]
    if len(matching) != 1:
        raise ValueError(
            f"--baseline_rows has {len(matching)} files made with temperature {temperature:g}: give one for each "
            "--temperature"
        )
    return matching[0]
