"""Importers: plans written down by other libraries, as far as what they wrote goes.

An importer turns a document into as much of a plan as it says, and tells what it took for
granted. It never fills in a sampler, an adjacency or a target: what the document leaves open
is asked for, and is given beside the file, in pyproject.toml::

    [tool.affidavit.given."train.py"]
    adjacency = "add_remove"
    sampling = {scheme = "poisson"}
    target = {epsilon = 8.0, delta = 1e-5}

A new one is a file with ``recognises`` and ``read``, and a line here.
"""

from __future__ import annotations

from typing import Any

from affidavit.gate.checking.importers import dp_event, jax_privacy, opacus_script, opacus_state
from affidavit.gate.checking.importers.partial import Partial
from affidavit.plan import MalformedPlan, load_json

DOCUMENTS = (dp_event, opacus_state, jax_privacy)
"""Importers of JSON documents."""


def imported(name: str, raw: bytes) -> Partial | None:
    """What another library's file says of a plan; None if it is none that is known.

    Raises ``MalformedPlan`` where it is known but cannot be taken.
    """
    if name.endswith(".py"):
        return opacus_script.read(raw)
    if not name.endswith(".json"):
        return None
    try:
        document: Any = load_json(raw).data
    except MalformedPlan:
        return None
    for importer in DOCUMENTS:
        if importer.recognises(document):
            found: Partial = importer.read(document)
            return found
    return None
