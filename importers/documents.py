"""Choose the importer of a file: JSON of other libraries, a training script, or a notebook.

The code cells of a Jupyter notebook are read in order, without magic commands. Its cells may have
run in another order, or twice; what is imported is a run from top to bottom.
"""

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
HELP = re.compile(r"\s*+[\w.]++\?{1,2}\s*+")
ASSIGNED_MAGIC = re.compile(r"^(\s*+\w++\s*+=\s*+)([!%].*)")
"""An assignment of the output of a magic command."""
PYTHON_CELL_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics that run the Python of their cell."""


def notebook_source(raw: bytes) -> bytes:
    """Return the code cells of a notebook as one script; raises ``MalformedPlan``."""
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
    """Comment out magic commands, and whole cells of other languages."""
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
        raw = notebook_source(raw)
    if name.endswith((".py", ".ipynb")):
        return importer.read(raw, folder, name=Path(name).name, explicit=explicit)
    if not name.endswith(".json") or not (explicit or _mentions_any_kind(raw)):
        return None
    try:
        document: Any = load_json(raw).data
    except MalformedPlan:
        return None
    return import_document(document)


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
