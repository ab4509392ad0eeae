"""What docstrings of public functions say, as far as reading them can tell.

Ruff asks that there is one (D1). Here: whoever raises says so, and whoever takes or gives arrays
says of which shape, in the function's docstring, in that of its class, or in that of the method
of the same name that it implements. Units and sources are for reviewers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from tests.support.document_blocks import ROOT

ROOMS = (
    "plan",
    "mechanisms",
    "accountants",
    "certificate",
    "trainer",
    "service",
    "gate",
    "worker",
    "client",
    "importers",
    "library",
)
HTTP = ("service/web/routes/", "service/web/pages/")
"""Where what is refused is said by the answers that a route declares."""
ARRAYS = re.compile(r"\b(NDArray|ndarray|Array|Tensor)\b")
_SIZE = r"[\w.*]+(?: [-+*·] \w+)?"
_SIZES = rf"\({_SIZE}(?:, ?{_SIZE})*,\)|\({_SIZE}(?:, ?{_SIZE})+\)"
SHAPE = re.compile(rf"\bshapes?\b|{_SIZES}|\b\w [x×] \w\b")
RAISES = re.compile(r"\b[Rr]aises?\b|\b[Rr]efuse[sd]?\b|\b[Rr]ejects?\b")
FRAMEWORK = {"forward", "backward"}
"""Methods whose arguments PyTorch gives: their classes say what the layer takes."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A public function, with everything that describes it."""

    place: str
    node: ast.FunctionDef
    described: str


def _functions(room: str) -> Iterator[Function]:
    trees = {path: _tree(str(path)) for path in sorted((ROOT / room).rglob("*.py"))}
    promised: dict[str, str] = {}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and _is_interface(node):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        promised[method.name] = ast.get_docstring(method) or ""
    for path, tree in trees.items():
        yield from _within(tree.body, f"{path.relative_to(ROOT)}:", "", promised)


def _within(
    body: list[ast.stmt], place: str, about: str, promised: dict[str, str]
) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            stated = ast.get_docstring(node) or ""
            yield from _within(node.body, f"{place}{node.name}.", f"{stated}\n", promised)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            inherited = promised.get(node.name, "") if about else ""
            own = ast.get_docstring(node) or ""
            yield Function(
                place=f"{place}{node.name}", node=node, described=f"{own}\n{about}{inherited}"
            )


@cache
def _tree(path: str) -> ast.Module:
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read())


def _is_interface(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0] in {"Protocol", "ABC"} for base in node.bases)


def _raises(node: ast.FunctionDef) -> bool:
    """Whether its own body raises something that it makes; functions inside it are their own."""
    inside = list(node.body)
    while inside:
        item = inside.pop()
        # Every command ends with typer.Exit.
        if isinstance(item, ast.Raise) and item.exc and "typer.Exit" not in ast.unparse(item.exc):
            return True
        if not isinstance(item, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            inside += [child for child in ast.iter_child_nodes(item) if isinstance(child, _INSIDE)]
    return False


_INSIDE = (ast.stmt, ast.ExceptHandler, ast.match_case)


def _handles_arrays(node: ast.FunctionDef) -> bool:
    provided = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    stated = [item.annotation for item in provided] + [node.returns]
    return any(entry is not None and ARRAYS.search(ast.unparse(entry)) for entry in stated)


@pytest.mark.parametrize("room", ROOMS)
def test_who_raises_says_so(room: str) -> None:
    raising = [function for function in _functions(room) if _raises(function.node)]
    assert raising
    silent = [item.place for item in raising if not RAISES.search(item.described)]
    assert not [place for place in silent if not place.startswith(HTTP)]


@pytest.mark.parametrize("room", ["mechanisms", "accountants", "trainer"])
def test_who_handles_arrays_says_of_which_shape(room: str) -> None:
    handling = [
        function
        for function in _functions(room)
        if _handles_arrays(function.node) and function.node.name not in FRAMEWORK
    ]
    assert len(handling) > 20
    assert not [item.place for item in handling if not SHAPE.search(item.described)]


def test_the_laws_find_who_says_nothing() -> None:
    (silent,) = _within(
        ast.parse('def f(x: Array) -> float:\n    """x."""\n    raise ValueError\n').body,
        "",
        "",
        {},
    )
    assert _raises(silent.node)
    assert _handles_arrays(silent.node)
    assert not RAISES.search(silent.described)
    assert not SHAPE.search(silent.described)
