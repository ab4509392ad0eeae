"""The documents that are read, and who reads them: JSON of libraries, scripts and notebooks.

Of a Jupyter notebook its code cells are read, in order, without magic commands. Cells may have
been run in another order, or twice; what is read is a run from top to bottom."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from affidavit.importers import dp_event, jax_privacy, opacus_state
from affidavit.importers.libraries import TRAINING
from affidavit.importers.partial_plan import PartialPlan, not_imported
from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan, load_json

MAGIC_PREFIXES = ("%", "!", "?")
HELP = re.compile(r"\s*[\w.]+\?{1,2}\s*")
ASSIGNED_MAGIC = re.compile(r"^(\s*\w+\s*=\s*)([!%].*)")
"""What a command printed, as the value of a name."""
PYTHON_CELL_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Magic commands of a cell that run its Python."""


def notebook_source(raw: bytes) -> bytes:
    """The cells as one script; raises ``MalformedPlan`` if this is not a notebook."""
    try:
        cells = json.loads(raw)["cells"]
        texts = [
            "".join(cell["source"])
            for cell in cells
            if cell.get("cell_type") == "code" and cell.get("source")
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise not_imported("notebook", "it has no readable cells.", "Save it again.") from None
    return "\n".join(_without_magics(text) for text in texts).encode("utf-8", "replace")


def _without_magics(text: str) -> str:
    """A cell with its magic commands as comments, and cells of other languages whole."""
    first = (text.split(maxsplit=1) or [""])[0]
    if first.startswith("%%") and first not in PYTHON_CELL_MAGICS:
        return "\n".join("# " + line for line in text.splitlines())
    return "\n".join(
        f"{line[: len(line) - len(line.lstrip())]}pass  # {line.strip()}"
        if line.lstrip().startswith(MAGIC_PREFIXES) or HELP.fullmatch(line)
        else ASSIGNED_MAGIC.sub(r"\1get_ipython()  # \2", line)
        for line in text.splitlines()
    )


JSON_IMPORTERS = (
    (dp_event.recognises, dp_event.read),
    (opacus_state.recognises, opacus_state.read),
    (jax_privacy.recognises, jax_privacy.read),
    (jax_privacy.recognises_participations, jax_privacy.read_participations),
)
"""Importers of JSON documents."""
LIBRARIES = tuple(dict.fromkeys(library.name for library in TRAINING))
"""The libraries whose training scripts are read."""


def import_file(
    name: str, raw: bytes, folder: Path | None = None, *, explicit: bool = True
) -> PartialPlan | None:
    """The plan fields of another library's document; None if the format is unknown.

    ``folder`` is where the files that a script reads are looked for. A script that was come across
    is read only if it imports a training library. Raises ``MalformedPlan`` if a
    known document cannot be imported.
    """
    if name.endswith(".ipynb"):
        raw = notebook_source(raw)
    if name.endswith((".py", ".ipynb")):
        return importer.read(raw, folder, name=Path(name).name, explicit=explicit)
    if not name.endswith(".json"):
        return None
    try:
        document: Any = load_json(raw).data
    except MalformedPlan:
        return None
    return import_document(document)


def import_document(document: Any) -> PartialPlan | None:
    """The plan fields of another library's JSON document; None if the format is unknown.

    Raises ``MalformedPlan`` if a known document cannot be imported.
    """
    for recognises, read in JSON_IMPORTERS:
        if recognises(document):
            return read(document)
    return None
