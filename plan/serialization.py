"""A plan as data: its canonical bytes, its digest and its JSON Schemas.

The digest is sha256 over the RFC 8785 canonical JSON of the plan with its defaults filled in. A
field whose value is None is left out, so a field that is added in a later release does not change
the digest of plans that do not use it. A plan with one phase has the fields of the phase at the
top, whichever way it was given.

>>> from affidavit.plan.parse import plan_from
>>> one = {"version": 1, "adjacency": "add_remove", "sampling": {"scheme": "full_batch"},
...        "steps": 10, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 5}],
...        "target": {"delta": 1e-5}}
>>> digest(plan_from(one)) == digest(plan_from({**one, "steps": 1e1, "extra": []}))
True

``plan_schemas`` describes both forms: with phases, and with the fields of one phase at the top.

>>> sorted(set(plan_schemas("#/$defs/{model}")) & {"PlanOfOnePhase", "PlanOfPhases"})
['PlanOfOnePhase', 'PlanOfPhases']
"""

from __future__ import annotations

from typing import Any

from affidavit.plan.canonical import digest_of
from affidavit.plan.document import PHASE_FIELDS, PlanDocument
from affidavit.plan.parse import Plan


def as_document(plan: PlanDocument) -> dict[str, Any]:
    """Return the plan as plain data in canonical form, with defaults filled in."""
    document: dict[str, Any] = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    for phase, written in zip(plan.phases, document["phases"], strict=True):
        if phase.asks_for_steps:
            written["steps"] = None
        if phase.asks_for_lot_size:
            written["sampling"]["lot_size"] = None
        if phase.asks_for_probability:
            written["sampling"]["probability"] = None
    if len(plan.phases) == 1:
        (only,) = document.pop("phases")
        document |= only
    return document


def digest(plan: PlanDocument) -> str:
    """Return the digest of the plan."""
    return digest_of(as_document(plan))


Schema = dict[str, Any]
SCHEMA_ID = "https://affidavit.dev/schemas/plan-v1.json"
KEYWORDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
"""The JSON Schema keyword of each bound."""


def plan_schemas(ref_template: str) -> dict[str, Schema]:
    """Return the schemas ``PlanOfOnePhase``, ``PlanOfPhases`` and their parts by name.

    They refer to one another by ``ref_template``, in which ``{model}`` stands for the name.
    """
    phased = Plan.model_json_schema(ref_template=ref_template)
    parts: dict[str, Schema] = phased.pop("$defs")
    phase = parts["Phase"]
    single = {
        **phased,
        "title": "PlanOfOnePhase",
        "properties": {
            **{name: part for name, part in phased["properties"].items() if name != "phases"},
            **{name: phase["properties"][name] for name in sorted(PHASE_FIELDS)},
        },
        "required": sorted({*phased["required"], *phase["required"]} - {"phases"}),
    }
    schemas: dict[str, Schema] = with_schema_keywords(
        {"PlanOfOnePhase": single, "PlanOfPhases": phased, **parts}
    )
    return schemas


def plan_schema() -> Schema:
    """Return the JSON Schema of a plan in either form, for editors."""
    parts = plan_schemas("#/$defs/{model}")
    roots = [{"$ref": f"#/$defs/{name}"} for name in ("PlanOfOnePhase", "PlanOfPhases")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "Affidavit training plan, version 1",
        "anyOf": roots,
        "$defs": parts,
    }


def with_schema_keywords(schema: Any) -> Any:
    """Return ``schema`` with JSON Schema keywords for bounds.

    Pydantic leaves its own keywords for bounds that follow a validator, as in ``Integer``.
    """
    if isinstance(schema, list):
        return [with_schema_keywords(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        name: with_schema_keywords(part) for name, part in schema.items() if name not in KEYWORDS
    }
    bounds = {KEYWORDS[name]: part for name, part in schema.items() if name in KEYWORDS}
    return result | bounds
