"""SHA-256 of whole files. Imports little, as `wheels.py` does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def file_sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(paths: Iterable[Path]) -> str:
    """One SHA-256 of the names and contents of files, hashed side by side."""
    paths = sorted(paths)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        sums = list(pool.map(file_sha256, paths))
    return hashlib.sha256(
        repr([(path.name, digest) for path, digest in zip(paths, sums, strict=True)]).encode()
    ).hexdigest()
