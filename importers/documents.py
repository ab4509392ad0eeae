"""The documents that are read, and who reads them: JSON of libraries, scripts and notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from affidavit.importers import dp_event, jax_privacy, notebook, opacus_state, scripts
from affidavit.importers.base import Partial
from affidavit.importers.libraries import TRAINING
from affidavit.plan import MalformedPlan, load_json

DOCUMENTS = (
    (dp_event.recognises, dp_event.read),
    (opacus_state.recognises, opacus_state.read),
    (jax_privacy.recognises, jax_privacy.read),
    (jax_privacy.recognises_participations, jax_privacy.read_participations),
)
"""Importers of JSON documents."""
LIBRARIES = tuple(dict.fromkeys(library.name for library in TRAINING))
"""The libraries whose training scripts are read."""


def imported(
    name: str, raw: bytes, folder: Path | None = None, *, explicit: bool = True
) -> Partial | None:
    """The plan fields of another library's document; None if the format is unknown.

    ``folder`` is where the files that a script reads are looked for. A script that was come across
    is read only if it imports a training library. Raises ``MalformedPlan`` if a
    known document cannot be imported.
    """
    if name.endswith(".ipynb"):
        raw = notebook.source_of(raw)
    if name.endswith((".py", ".ipynb")):
        return scripts.read(raw, folder, name=Path(name).name, explicit=explicit)
    if not name.endswith(".json"):
        return None
    try:
        document: Any = load_json(raw).data
    except MalformedPlan:
        return None
    return imported_document(document)


def imported_document(document: Any) -> Partial | None:
    """The plan fields of another library's JSON document; None if the format is unknown.

    Raises ``MalformedPlan`` if a known document cannot be imported.
    """
    for recognises, read in DOCUMENTS:
        if recognises(document):
            return read(document)
    return None
