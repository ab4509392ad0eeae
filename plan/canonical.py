"""Canonical bytes and the digest: one plan, one name for ever.

The digest is sha256 over RFC 8785 canonical JSON of the plan after its defaults are
filled in. A default of None is left out, so that a field added in a later release does
not change the digest of a plan that does not use it. A plan with one phase is written
with the phase's fields at the top, whichever way it was given.

>>> from affidavit.plan.parse import plan_from
>>> one = {"version": 1, "adjacency": "add_remove", "sampling": {"scheme": "full_batch"},
...        "steps": 10, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 5}],
...        "target": {"delta": 1e-5}}
>>> digest(plan_from(one)) == digest(plan_from({**one, "steps": 1e1, "extra": []}))
True
"""

from __future__ import annotations

import hashlib
from typing import Any

import rfc8785

from affidavit.plan.asked import asks_for_lot_size, asks_for_probability
from affidavit.plan.document import Plan


def as_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, defaults filled in, in its canonical shape."""
    document: dict[str, Any] = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    for phase, written in zip(plan.phases, document["phases"], strict=True):
        if phase.steps is None and phase.epochs is None:
            written["steps"] = None
        if asks_for_lot_size(phase):
            written["sampling"]["lot_size"] = None
        if asks_for_probability(phase):
            written["sampling"]["probability"] = None
    if len(plan.phases) == 1:
        (only,) = document.pop("phases")
        document |= only
    return document


def canonical_json(value: Any) -> bytes:
    """RFC 8785 canonical JSON."""
    return rfc8785.dumps(value)


def digest_of(value: Any) -> str:
    """``sha256:`` and the hexadecimal digest of the canonical JSON of ``value``."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def digest(plan: Plan) -> str:
    """The plan's digest."""
    return digest_of(as_document(plan))
