"""What the project in the current folder says of its plans, in ``[tool.affidavit]``."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from affidavit.gate.checking import toml
from affidavit.plan import MalformedPlan, Reason

SETTINGS = Path("pyproject.toml")


def settings() -> dict[str, Any]:
    """The table, or nothing where there is none; raises ``MalformedPlan``."""
    return toml.settings(toml.load(SETTINGS.read_bytes())) if SETTINGS.is_file() else {}


def given_for(file: str) -> dict[str, Any]:
    """What is given beside ``file``: fields of a plan; raises ``MalformedPlan``."""
    tables = settings().get("given", {})
    found: Any = {}
    if isinstance(tables, dict):
        same = (key for key in tables if PurePath(key) == PurePath(file))
        found = tables.get(next(same, file), {})
    if not isinstance(found, dict):
        raise MalformedPlan(
            Reason(
                code="wrong_type",
                pointer="",
                message=f'[tool.affidavit.given] of "{file}" is not a table.',
                remedy="Give fields of a plan in it.",
            )
        )
    return found
