"""The shape of the tree: listed packages, short files, one place for each name."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
SCRIPTS = [ROOT / "train.py", ROOT / "serve.py"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_kernel(path: Path) -> bool:
    return path.stem.startswith(("tpu_", "gpu_"))


def line_limit(path: Path) -> int:
    if path in SCRIPTS:
        return 60
    return 900 if is_kernel(path) else 500


def function_lengths(path: Path) -> dict[str, int]:
    """Lines of each function without its docstring."""
    lengths = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            lengths[node.name] = node.end_lineno - body[0].lineno + 1
    return lengths


def test_pyproject_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {name(p.parent).replace("/", ".") for p in SOURCES}
    assert set(listed) == found
    assert all((ROOT / package.replace(".", "/") / "__init__.py").exists() for package in listed)


@pytest.mark.parametrize("path", SOURCES + SCRIPTS + TESTS, ids=name)
def test_a_file_fits_its_limit(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= line_limit(path)


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=name)
def test_a_function_fits_two_screens(path: Path):
    limit = 120 if is_kernel(path) else 70
    assert {n: lines for n, lines in function_lengths(path).items() if lines > limit} == {}


def test_every_folder_of_tests_mirrors_a_folder_of_code():
    mirrored = {p.name for package in PACKAGES for p in (ROOT / package).rglob("*") if p.is_dir()} | set(PACKAGES)
    folders = {p.parent.relative_to(ROOT / "tests").parts[0] for p in TESTS if p.parent != ROOT / "tests"}
    assert folders - mirrored - {"aot", "arch", "experiments", "golden"} == set()


def test_no_unfinished_work_is_marked_in_the_code():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [name(p) for p in SOURCES + SCRIPTS if marks.search(p.read_text(encoding="utf-8"))] == []
