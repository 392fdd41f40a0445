"""This package keeps to its room: it loads nothing that can run code from bytes, and knows nobody but kernels."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "state").rglob("*.py"))
ALLOWED = {"state", "kernels", "torch", "numpy", "safetensors", "msgpack"} | set(sys.stdlib_module_names)
UNSAFE = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")}


def imports_of(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_a_file_imports_only_what_this_package_may(source: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(ast.parse(source.read_text()))}
    assert roots <= ALLOWED, roots - ALLOWED
    assert not roots & UNSAFE


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_a_file_calls_nothing_that_unpickles(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in UNSAFE_CALLS, f"line {node.lineno}"
        if isinstance(node, ast.Name):
            assert node.id not in {"eval", "exec", "__import__"}, f"line {node.lineno}"


def test_the_sources_were_found() -> None:
    assert {"codec.py", "memory.py", "pages.py"} <= {source.name for source in SOURCES}
