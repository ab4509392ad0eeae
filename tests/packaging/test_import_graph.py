"""Imports run downwards: no circle of modules, of a room's parts, or of rooms.

Imports inside functions and for types alone count, and names that a room's face hands on count as
imports of the module that defines them. import-linter reads no faces, so that it cannot see those.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "affidavit"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink())
Graph = Mapping[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> Mapping[str, Path]:
    return {
        module_name(path): path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")
    } | {"": PACKAGE / "__init__.py"}


@cache
def faces() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """For each package with a face, the module and the name behind each of its names."""
    found: dict[str, Mapping[str, tuple[str, str]]] = {}
    for package, path in modules().items():
        stub = path.with_suffix(".pyi")
        if path.name == "__init__.py" and stub.exists():
            found[package] = {
                name.asname or name.name: (f"{package}.{node.module}".strip("."), name.name)
                for node in ast.parse(stub.read_text()).body
                if isinstance(node, ast.ImportFrom)
                for name in node.names
            }
    return found


def defining_module(module: str, name: str) -> str:
    if name in faces().get(module, {}):
        return defining_module(*faces()[module][name])
    inner = f"{module}.{name}".strip(".")
    return inner if inner in modules() else module


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(name.name, "") for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", name.name) for name in node.names]
        else:
            continue
        for module, name in names:
            if module.split(".")[0] == "affidavit":
                yield defining_module(module.removeprefix("affidavit").strip("."), name)


@cache
def import_graph() -> Graph:
    return {
        module: set(imported(ast.parse(path.read_text()))) - {module}
        for module, path in modules().items()
    }


def parts(graph: Graph, folder: str) -> Graph:
    """The graph of the parts of a folder: its modules and packages, as wholes."""
    prefix = f"{folder}." if folder else ""

    def part(module: str) -> str:
        return module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else ""

    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        if part(module):
            found.setdefault(part(module), set()).update(map(part, targets))
    return {name: targets - {name, ""} for name, targets in found.items()}


def require_no_circle(graph: Graph) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' <- '.join(error.args[1])}")


def test_no_circle_of_modules() -> None:
    graph = {module: targets - {""} for module, targets in import_graph().items() if module}
    assert sum(map(len, graph.values())) > 1000
    require_no_circle(graph)


@pytest.mark.parametrize("folder", ["", *ROOMS, "service.web"])
def test_no_circle_of_parts(folder: str) -> None:
    require_no_circle(parts(import_graph(), folder))


@pytest.mark.parametrize(
    "text",
    [
        "def late() -> None:\n    from affidavit.service.web import app\n",
        "import typing\nif typing.TYPE_CHECKING:\n    import affidavit.service.web.app\n",
    ],
)
def test_an_import_upwards_is_a_circle(text: str) -> None:
    graph = {module: set(targets) for module, targets in import_graph().items()}
    graph["service.core.database"] |= set(imported(ast.parse(text)))
    with pytest.raises(pytest.fail.Exception, match="circle"):
        require_no_circle(parts(graph, "service"))


def test_a_name_of_a_face_is_an_import_of_its_module() -> None:
    tree = ast.parse("from affidavit.assessment import certify")
    assert list(imported(tree)) == ["assessment.certification"]
