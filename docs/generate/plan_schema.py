"""The plan as a JSON Schema, for editors and other programs, and as tables."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from typing import Any

from affidavit.plan import plan_schema
from docs.generate.tables import Schema, table, words

HEAD = """# The plan's schema

Generated from the classes by `make docs`; change `plan/`, not this file.

[plan.schema.json](plan.schema.json) is a JSON Schema (2020-12) of plans, version 1. Editors
that know JSON Schema complete and check plans with it; for YAML, put this in the first line:

<!-- excerpt: a comment for editors -->
```yaml
# yaml-language-server: $schema=plan.schema.json
```

`affidavit schema` prints it, and an installed Affidavit has it in `share/doc/affidavit`.
[schemastore.json](schemastore.json) is the entry for SchemaStore's catalog.

The schema describes shapes and ranges. What fields mean together, and which plans may be
certified, is checked by `affidavit check` and told in [the plan](plan.md).

"""
"""How the page begins."""


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


def page() -> str:
    """A table for each object of the schema."""
    return HEAD + "\n".join(_part(name, part) for name, part in schema()["$defs"].items())


def _part(name: str, part: Schema) -> str:
    rows = [
        (f"`{field}`", words(item), _default(item, field in part.get("required", ())))
        for field, item in part.get("properties", {}).items()
    ]
    about = _prose(part.get("description", ""))
    return f"## {name}\n\n{about}" + table(("field", "takes", "default"), rows)


def _default(field: Schema, required: bool) -> str:
    if required:
        return "required"
    provided: Any = field.get("default")
    if isinstance(provided, dict):
        provided = {name: value for name, value in provided.items() if value is not None}
    return "" if provided is None else f"`{json.dumps(provided, ensure_ascii=False)}`"


def _prose(docstring: str) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(docstring))
    return f"{text}\n\n" if text else ""
