"""Import plans from other libraries' documents.

An importer returns the plan fields that a document contains, and lists its assumptions. It never
adds a sampler, an adjacency or a target: missing fields must be given in pyproject.toml::

    [tool.affidavit.given."train.py"]
    adjacency = "add_remove"
    sampling = {scheme = "poisson"}
    target = {epsilon = 8.0, delta = 1e-5}

A new importer is a module with two functions, and an entry in ``DOCUMENTS``.
"""

from __future__ import annotations

from typing import Any

from affidavit.gate.checking.importers import dp_event, jax_privacy, opacus
from affidavit.gate.checking.importers.base import Partial
from affidavit.plan import MalformedPlan, load_json

DOCUMENTS = (
    (dp_event.recognises, dp_event.read),
    (opacus.recognises_state, opacus.read_state),
    (jax_privacy.recognises, jax_privacy.read),
)
"""Importers of JSON documents."""


def imported(name: str, raw: bytes) -> Partial | None:
    """The plan fields of another library's document; None if the format is unknown.

    Raises ``MalformedPlan`` if a known document cannot be imported.
    """
    if name.endswith(".py"):
        return opacus.read(raw)
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
