"""Imports go downwards only, the root holds six modules, and each script in a folder finds them in one line."""

import ast
from functools import cache
from pathlib import Path

from evaluation.files import DECODING_CODE

ROOT = Path(__file__).parents[1]
# From the bottom to the top. A folder stands for all of its modules; those of one line may import each other.
ORDER = (
    ("script_utils", "timeline"),
    ("loading",),
    ("pipeline_model",),
    ("decoding",),
    ("viewer",),
    ("pipeline_inference",),
    ("training",),
    ("baselines",),
    ("evaluation",),
    ("train", "eval"),
    ("distributed_inference",),
    ("planning",),
    ("benchmarks", "checkpoints", "draft_vocab", "eval_data", "docs"),
    ("tests",),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
UPWARDS = {
    ("benchmarks.gpu_check", "tests.tiny"): "it runs on a GPU what the tests run on a CPU, with their tiny models",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the project but the tests, by its dotted name."""
    files = [*ROOT.glob("*.py"), *(path for name in LEVEL for path in (ROOT / name).glob("*.py"))]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    return {name: path for name, path in names.items() if not name.startswith("tests.")}


@cache
def imports(name: str) -> frozenset[str]:
    """The project's modules that a module imports, in whichever place: in functions and under TYPE_CHECKING, too."""
    found = set()
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules().keys()
            found |= inner or {node.module}
    return frozenset(each for each in found if each.split(".")[0] in LEVEL)


def level(name: str) -> int:
    return LEVEL[name.split(".")[0]]


def test_the_root_holds_six_modules():
    assert {path.stem for path in ROOT.glob("*.py")} == {
        "pipeline_model",
        "pipeline_inference",
        "train",
        "eval",
        "timeline",
        "script_utils",
    }


def test_every_folder_with_code_has_a_place_in_the_order():
    folders = {path.parent.name for path in ROOT.glob("*/*.py") if not path.parent.name.startswith(".")}
    assert folders <= LEVEL.keys()


def test_imports_go_downwards():
    """Guards against a module that needs one above it: it could no longer be read, or used, without that."""
    upwards = {(name, other) for name in modules() for other in imports(name) if level(other) > level(name)}
    assert upwards == UPWARDS.keys()


def test_no_circles():
    """Guards against modules of one folder that need each other: none of them could be read first."""
    open_, done = [], set()

    def visit(name):
        assert name not in open_, " -> ".join([*open_[open_.index(name) :], name])
        if name in done or name not in modules():
            return
        open_.append(name)
        for other in imports(name):
            visit(other)
        done.add(open_.pop())

    for name in modules():
        visit(name)


def test_scripts_find_the_project_in_one_line():
    """Guards against a script that fails outside the project's root, and modules that change where Python looks."""
    for name in (name for name in modules() if "." in name):
        source = modules()[name].read_text(encoding="utf-8")
        is_script = '\nif __name__ == "__main__":' in source
        line = "sys.path.insert(0, str(Path(__file__).parents[1]))"
        lines = [each for each in source.splitlines() if "sys.path" in each]
        assert lines == [line] * (is_script and bool(imports(name))), name


def test_the_fingerprint_covers_what_decoding_imports():
    """Guards against rows of an evaluation that are reused although the code that made them has changed."""
    reached, left = set(), ["pipeline_inference"]
    while left:
        name = left.pop()
        if name in modules() and name not in reached:
            reached.add(name)
            left.extend(imports(name))
    # What is counted and shown, parsed and written changes neither a token nor its time.
    other = {"script_utils", "decoding.chat", "decoding.metrics", "decoding.result", "decoding.text", "loading.flags"}
    shown = {name for name in reached if name.startswith("viewer.")}
    assert {f"{name.replace('.', '/')}.py" for name in reached - other - shown} == set(DECODING_CODE)
