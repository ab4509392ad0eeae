"""The plan as a JSON Schema, for editors and other programs."""

from __future__ import annotations

import json
from functools import cache

from affidavit.plan import plan_schema
from docs.generate.tables import Schema


@cache
def schema() -> Schema:
    """A plan with phases, or with the fields of its only phase at the top."""
    result: Schema = json.loads(json.dumps(plan_schema()))
    return result


def catalog_entry() -> str:
    """What SchemaStore's catalog takes, for editors that look schemas up there."""
    entry = {
        "name": "Affidavit training plan",
        "description": "A plan of differentially private training, for affidavit check",
        "fileMatch": ["*.affidavit.yaml", "*.affidavit.yml", "*.affidavit.json"],
        "url": schema()["$id"],
    }
    return json.dumps(entry, indent=1) + "\n"


def schema_text() -> str:
    """The schema as text whose lines can be compared."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
