"""The allow-list of uses of private objects, from ``uses.toml``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from affidavit.importers.names import load_facts
from affidavit.importers.scripts.syntax import Script, package_of
from affidavit.plan import StrictModel

SECRETS = frozenset({"data", "lots", "lot", "rows", "size", "count", "loss", "value"})
"""Kinds whose content records decide."""
HANDLES = frozenset({"engine", "optimizer", "private", "scheduler", "model", "criterion", "holder"})
"""Kinds of objects that can change what is released."""


class Use(StrictModel):
    """A use that is understood; ``uses.toml`` says what its fields are."""

    names: str
    why: str = ""
    of: str = ""
    packages: str = ""
    modules: str = ""
    keywords: str = ""
    takes: Mapping[str, str] = {}
    gives: str = ""
    parts: str = ""
    axis: str = ""
    checks_layers: bool = False

    def accepts(self, kind: str, place: int | str) -> bool:
        """Whether an argument of this kind may be given at a position or by a keyword."""
        places = self.takes.get(kind, "").split()
        return "*" in places or str(place) in places


_FACTS = load_facts("uses.toml")
METHODS = tuple(Use(**item) for item in _FACTS["methods"])
FUNCTIONS = tuple(Use(**item) for item in _FACTS["functions"])


def find_method(kind: str, name: str) -> Use | None:
    """Return the use that a method of an object of this kind is."""
    fits = (use for use in METHODS if kind in use.of.split() and name in use.names.split())
    return next(fits, None)


def find_function(script: Script, call: ast.Call) -> Use | None:
    """Return the use that a call of a package's function is, or of one of several like it."""
    made = [item.value for item in script.bindings_of(call.func)]
    match call.func:
        case ast.Subscript(value=ast.Name() as table):
            outer = [script.parents[use] for use in script.reads_of(table.id)]
            if all(isinstance(use, ast.Subscript) and isinstance(use.ctx, ast.Load)
                   for use in outer):  # fmt: skip
                made = getattr(script.value_of(table), "values", [])
    parts = [part for item in made or [None] for part in ((item.body, item.orelse) if isinstance(
        item, ast.IfExp) else (item or call.func,))]  # fmt: skip
    uses = [use_of(script.module_path(part)) for part in parts]
    return uses[0] if all(use is uses[0] for use in uses) else None


def use_of(path: str) -> Use | None:
    """Return the use that a call of what a package has under this path is."""
    package, name = package_of(path), path.rpartition(".")[2]
    if not package:
        return None
    for use in FUNCTIONS:
        if package not in use.packages.split():
            continue
        if use.names != "*" and name not in use.names.split():
            continue
        if use.modules and not any(f".{part}." in f".{path}." for part in use.modules.split()):
            continue
        return use
    return None


def arguments_of(call: ast.Call) -> Iterator[tuple[int | str, ast.expr]]:
    """Yield the arguments of a call, with their positions or keywords."""
    yield from enumerate(call.args)
    yield from ((item.arg or "**", item.value) for item in call.keywords)


def words_of(kinds: frozenset[str]) -> str:
    """Return the names of kinds in words."""
    return " and ".join(dict.fromkeys(_FACTS["words"].get(kind, kind) for kind in sorted(kinds)))
