"""Choose the importer of a file: JSON of other libraries, a training script, or a notebook.

The code cells of a Jupyter notebook are read in order. What is imported is a run from top to
bottom, and counts of cells that show another order are a question.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from affidavit.importers import dp_event, jax_privacy, opacus_state
from affidavit.importers.directives import read_harmless_lines
from affidavit.importers.libraries import TRAINING
from affidavit.importers.partial_plan import OpenUse, PartialPlan, not_imported
from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan, load_json

HELP = re.compile(r"\s*+\??[\w.]++\?{0,2}\s*+")
MAGIC = re.compile(
    r"(?P<start>\s*+(?:[\w.]++\s*+=\s*+)?+)(?:(?P<mark>!!?|%)(?P<text>.*)|(?P<bare>pip|conda)\s++(?!=).*)"
)
"""A line of IPython that is not Python, which may be assigned to a name."""
MAGIC_COMMENT = "# MAGIC "
PYTHON_CELL_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics that run the Python of their cell."""
SHELLS = ("%%bash", "%%sh", "%%!", "%%system")
RUN_ONCE = ("time", "prun")
"""Magics that run a Python statement once."""


def notebook_source(raw: bytes) -> bytes:
    """Return the code cells of a notebook as one script; raises ``MalformedPlan``.

    Magic commands are calls of ``get_ipython()``, as IPython makes them.
    """
    return "\n".join(_without_magics(text) for text, _ in _code_cells(raw)).encode(
        "utf-8", "replace"
    )


def _code_cells(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the texts of the code cells of a notebook, with the cells."""
    try:
        return [
            ("".join(cell["source"]), cell)
            for cell in json.loads(raw)["cells"]
            if cell.get("cell_type") == "code" and cell.get("source")
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise not_imported("notebook", "it has no readable cells.", "Save it again.") from None


def _questions_of_cells(raw: bytes) -> Iterator[OpenUse]:
    """Yield what the cells of a notebook show of runs that are not one from top to bottom."""
    before, last, ordered = 0, 0, True
    for text, cell in _code_cells(raw):
        lines = text.split("\n")
        code = (i for i, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#")
        line = before + next(code, 1)
        before += len(lines)
        tags = (cell.get("metadata") or {}).get("tags") or []
        count = cell.get("execution_count")
        if "parameters" in tags:
            message = f"line {line}: papermill may give the parameters of this cell other values."
            yield OpenUse(line=line, message=message)
        if isinstance(count, int):
            if count < last and ordered:
                ordered = False
                message = f"line {line}: this cell ran before one above it."
                yield OpenUse(line=line, message=message)
            last = count


def _without_magics(text: str) -> str:
    """Write magic commands as the calls that IPython makes of them, each on its line."""
    first = (text.split(maxsplit=1) or [""])[0]
    lines = text.split("\n")
    if first.startswith("%%") and first not in PYTHON_CELL_MAGICS:
        rest = "".join(f"\n# {line}" for line in lines[1:])
        ran = "; ".join(lines[1:]) if first in SHELLS else first[2:]
        return _call("system" if first in SHELLS else "run_cell_magic", ran) + rest
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "\n".join(map(_without_magic, lines))
    return text


def _without_magic(line: str) -> str:
    if line.startswith("%%"):
        return "pass" if line.split()[0] != "%%timeit" else _call("run_cell_magic", "timeit")
    if "?" in line and HELP.fullmatch(line):
        return f"{line[: len(line) - len(line.lstrip())]}pass"
    match = MAGIC.fullmatch(line)
    if match is None:
        return line
    if match["bare"]:
        return match["start"] + _call("run_line_magic", match["bare"])
    name, _, rest = match["text"].strip().partition(" ")
    if match["mark"] != "%":
        return match["start"] + _call("system", match["text"])
    if name in RUN_ONCE and not rest.lstrip().startswith("-"):
        return match["start"] + (rest.strip() or "pass")
    return match["start"] + _call("run_line_magic", name)


def _of_databricks(raw: bytes) -> bytes:
    """Write the magic commands of a Databricks notebook, which are comments, as calls."""
    if not raw.startswith(b"# Databricks notebook source"):
        return raw
    lines = raw.decode("utf-8", "surrogateescape").split("\n")
    text = "\n".join(
        _without_magic(line[len(MAGIC_COMMENT) :]) if line.startswith(f"{MAGIC_COMMENT}%") else line
        for line in lines
    )
    return text.encode("utf-8", "surrogateescape")


def _call(method: str, text: str) -> str:
    return f"get_ipython().{method}({text.strip()!r})"


JSON_IMPORTERS = (
    (dp_event.recognises, dp_event.read),
    (opacus_state.recognises, opacus_state.read),
    (jax_privacy.recognises, jax_privacy.read),
    (jax_privacy.recognises_participations, jax_privacy.read_participations),
)
"""Importers of JSON documents."""
KIND_NAMES = (
    (b"class_name", b"DpEvent"),
    (b"history", b"mechanism"),
    (b"iterations", b"strategy"),
)
"""Names that every document of a kind has; one of these groups is in each."""
LIBRARIES = tuple(dict.fromkeys(library.name for library in TRAINING))
"""The libraries whose training scripts are read."""


def import_file(
    name: str, raw: bytes, folder: Path | None = None, *, explicit: bool = True
) -> PartialPlan | None:
    """Import the plan fields of another library's file; return None if the format is unknown.

    ``folder`` is where files that a script reads are searched. A script that was only discovered
    is read if it imports a training library. Raises ``MalformedPlan`` if a known format cannot be
    imported.
    """
    if name.endswith(".ipynb"):
        source = notebook_source(raw)
        partial = importer.read(source, folder, name=Path(name).name, explicit=explicit)
        return None if partial is None else _of_notebook(partial, raw, source)
    if name.endswith(".py"):
        raw = _of_databricks(raw)
        return importer.read(raw, folder, name=Path(name).name, explicit=explicit)
    if not name.endswith(".json") or not (explicit or _mentions_any_kind(raw)):
        return None
    try:
        document: Any = load_json(raw).data
    except MalformedPlan:
        return None
    return import_document(document)


def _of_notebook(partial: PartialPlan, raw: bytes, source: bytes) -> PartialPlan:
    """Add what the order of a notebook's cells leaves open."""
    answered = read_harmless_lines(source.decode("utf-8", "replace"))
    uses = [use for use in _questions_of_cells(raw) if use.line not in answered]
    first, *others = (
        replace(
            plan,
            open_uses=(*uses, *plan.open_uses),
            assumed=(*plan.assumed, "Each cell of the notebook runs once, from top to bottom."),
        )
        for plan in (partial, *partial.others)
    )
    return replace(first, others=tuple(others))


def _mentions_any_kind(raw: bytes) -> bool:
    """Whether a JSON text has a known document's names; others take long to parse strictly."""
    return any(all(name in raw for name in names) for names in KIND_NAMES)


def import_document(document: Any) -> PartialPlan | None:
    """Import the plan fields of a JSON document; return None if the format is unknown.

    Raises ``MalformedPlan`` if a known document cannot be imported.
    """
    for recognises, read in JSON_IMPORTERS:
        if recognises(document):
            return read(document)
    return None
