"""Wheels: what pip says reaches the user, and a file comes out whole or not at all."""

import sys
import zipfile

import pytest

from loading import wheels
from loading.checksums import file_sha256, files_sha256
from loading.wheels import download_wheel, extract

PIP = """
import sys, zipfile
assert sys.argv[1:4] == ["-m", "pip", "download"] and "--no-deps" in sys.argv
folder = sys.argv[sys.argv.index("--dest") + 1]
if sys.argv[-1] == "missing==1":
    sys.exit("first line\\nERROR: no matching distribution\\n")
with zipfile.ZipFile(folder + "/data-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("package/data.txt", "text")
"""


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A program in pip's place."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{PIP}")
    script.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(script))
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_a_file_comes_out_of_a_downloaded_wheel(pip):
    wheel = download_wheel("data==1", pip, 100)
    assert [path.name for path in pip.iterdir()] == ["data-1-py3-none-any.whl"]
    assert extract(wheel, "data.txt", pip).read_text() == "text"


def test_what_pip_says_last_is_the_reason(pip):
    """Guards against a failure without a reason, and against a log that stays in the user's folder."""
    with pytest.raises(ValueError, match=r"could not download missing==1 \(ERROR: no matching distribution\)"):
        download_wheel("missing==1", pip)
    assert list(pip.iterdir()) == []


def test_wheels_that_are_none_are_named(tmp_path):
    broken, other = tmp_path / "broken.whl", tmp_path / "other.whl"
    broken.write_bytes(b"PK half of one")
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("package/else.txt", "")
    for wheel, reason in ((broken, "is not an intact wheel"), (other, "holds no data.txt")):
        with pytest.raises(ValueError, match=f"{wheel.name} {reason}"):
            extract(wheel, "data.txt", tmp_path)
    assert not (tmp_path / "data.txt").exists()


def test_checksums_see_names_and_contents(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"abc")
    two.write_bytes(b"abc")
    assert file_sha256(one) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files_sha256([one, two]) == files_sha256([two, one]) != files_sha256([one])
    two.write_bytes(b"abd")
    assert files_sha256([one]) != files_sha256([two])
