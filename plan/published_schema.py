"""The JSON Schema of a plan as a file of this package: to read it imports no model.

``schema.json`` is written by ``python -m docs.generate`` from ``serialization.plan_schema``. An
installed extension may add to the schema, which is then to be made from the models.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from affidavit.plan.extensions import installed_extensions


def published_schema() -> dict[str, Any] | None:
    """Return what ``plan_schema`` returns, or None if an installed extension may add to it."""
    if installed_extensions("affidavit.strategies") or installed_extensions("affidavit.mechanisms"):
        return None
    text = files("affidavit.plan").joinpath("schema.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def referenced_models(schema: Any) -> list[str]:
    """Return the names of all models that a part of a schema refers to."""
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for part in schema.values() for name in referenced_models(part)]
    parts = schema if isinstance(schema, list) else []
    return [name for part in parts for name in referenced_models(part)]
