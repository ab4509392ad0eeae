"""Texts use the glossary's words: no phrase and no identifier that ``docs/style`` refuses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ruamel.yaml import YAML

from tests.support.document_blocks import ROOT

STYLE = ROOT / "docs" / "style"
ROOMS = sorted(link.name for link in (ROOT / "src/affidavit").iterdir() if link.is_symlink())
TERMS = YAML(typ="safe").load(STYLE / "Affidavit" / "Terms.yml")["swap"]
# Every phrase begins a word; with the boundary in front the search passes most letters by.
PATTERN = re.compile(rf"\b(?:{'|'.join(TERMS)})", re.IGNORECASE)
DEFINED = re.compile(r"\s*(?:(?:async )?def|class) (\w+)")
IDENTIFIERS = frozenset(
    line.split()[0]
    for line in (STYLE / "identifiers.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def texts() -> Iterator[Path]:
    """Every file with text that a person reads."""
    yield from (page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md")
    pages = (page for folder in ("docs", "contributing") for page in (ROOT / folder).rglob("*.md"))
    yield from (page for page in pages if page.name != "mutation.md")
    for room in ROOMS:
        yield from (ROOT / room).rglob("*.py")
        yield from (ROOT / room).rglob("*.html")


def sources() -> Iterator[Path]:
    """Every Python file of the product."""
    for room in ROOMS:
        yield from (ROOT / room).rglob("*.py")


def names_of_tests() -> Iterator[tuple[str, str]]:
    """Every file, class and function of the tests and of their scripts, with its place."""
    for path in (ROOT / "tests").rglob("*.py"):
        yield path.stem, str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if named := DEFINED.match(line):
                yield named[1], f"{path.relative_to(ROOT)}:{number}"


def test_no_phrase_that_the_style_refuses() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for path in texts()
        for text in [path.read_text()]
        for match in PATTERN.finditer(text)
    ]
    assert not wrong, "see docs/style/Affidavit/Terms.yml\n" + "\n".join(wrong)


def test_no_identifier_that_the_style_refuses() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {name}"
        for path in sources()
        for name, number in ((path.stem, 1), *bound_names(path.read_text()))
        if name in IDENTIFIERS
    ]
    assert not wrong, "see docs/style/identifiers.txt\n" + "\n".join(wrong)


def test_no_name_of_a_test_that_the_style_refuses() -> None:
    """Its phrases, with a space for each underscore, and its identifiers."""
    wrong = [
        f"{place}: {name}"
        for name, place in names_of_tests()
        if name in IDENTIFIERS or PATTERN.search(name.replace("_", " "))
    ]
    assert not wrong, "see docs/style\n" + "\n".join(wrong)


def bound_names(source: str) -> Iterator[tuple[str, int]]:
    """Yield the variables, parameters, functions and classes of a module, with their lines.

    Fields of classes are left out, because documents name them.
    """
    nodes = [*ast.walk(ast.parse(source))]
    fields = {node.target for node in nodes if isinstance(node, ast.AnnAssign)}
    for node in nodes:
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) if node not in fields:
                yield name, node.lineno
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name, node.lineno


def test_a_phrase_and_a_name_are_noticed() -> None:
    """The checks can fail."""
    assert PATTERN.search("Mend the plan.")
    source = "def f(given):\n    found = given\n    return [each for each in found]\n"
    assert {"given", "found", "each"} == {name for name, _ in bound_names(source)} & IDENTIFIERS
