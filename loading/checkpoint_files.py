"""The files of speculation heads: where they are, and reading one that may be damaged or foreign."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor

from script_utils import first_line

CHECKPOINT_NAME = "speculation_head_final.pt"
HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^:]+))?:(.+)")  # owner/repo@revision:file


def checkpoint_file(path: str | Path) -> Path:
    """The file of a head checkpoint: itself, that of a folder, or one of the hub, which is downloaded once.

    On the hub: owner/repo:file.pt, or owner/repo@revision:file.pt for a branch, tag or commit. ValueError, in one line,
    for a file that the hub does not give.
    """
    local, hub_file = Path(path), HUB_FILE.fullmatch(str(path))
    if local.is_dir():
        return local / CHECKPOINT_NAME
    if hub_file is None or local.exists():
        return local
    repository, revision, name = hub_file.groups()
    try:
        return _downloaded(repository, name, revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no head checkpoint {str(path)!r} on the hub ({first_line(error)}): "
            "give owner/repo:file.pt, with @branch after repo for another branch than main, or a local file"
        ) from None


@cache
def _downloaded(repository: str, name: str, revision: str | None) -> Path:
    """A file of the hub. Asked for once per process: all who read it get the same one, after one wait."""
    return Path(hf_hub_download(repository, name, revision=revision))


def read_payload(path: str | Path, *, mapped: bool = False) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """What a head's file holds, both unchecked: the mapping of its configuration, and its weights by name.

    `mapped` leaves the weights on disk until they are used. ValueError, in one line, for a missing, truncated or
    foreign file, and as `checkpoint_file`.
    """
    path = checkpoint_file(path)
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise ValueError(
            f"no head checkpoint at {str(path)!r}: train one, give one of the hub (owner/repo:file.pt), or omit "
            "--spec_head_ckpt"
        ) from None
    except pickle.UnpicklingError:
        raise ValueError(
            f"{str(path)!r} holds more than weights, or is damaged: only plain tensors and numbers are loaded"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = first_line(error, most=120)
        raise ValueError(f"{str(path)!r} is no readable head checkpoint ({reason}): copy it again") from None
    entries = [payload.get(name) for name in ("state_dict", "config")] if isinstance(payload, dict) else [None]
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"{str(path)!r} is not a head checkpoint: it must hold mappings 'state_dict' and 'config'")
    return payload["config"], payload["state_dict"]
