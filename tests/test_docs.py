"""What the documentation says of the repository's files."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_script_is_in_the_table():
    """Guards against a script that nobody finds, and a table that names one that is gone."""
    places = [ROOT, *(folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name[0] != ".")]
    files = (file for place in places if place.name != "tests" for file in place.glob("*.py"))
    scripts = {str(file.relative_to(ROOT)) for file in files if '__name__ == "__main__"' in file.read_text()}
    assert set(re.findall(r"^\| `(.*?)`", (ROOT / "docs" / "scripts.md").read_text(), re.M)) == scripts
