"""The reference pages that are written from the code: ``python -m docs.generate``.

Run by ``make docs`` in the root of the repository. Each file of this folder makes one page from
the thing it describes, and nothing else: the command line from the program, the API from its
OpenAPI document, the plan's schema from its classes, the codes from the source. A test makes
them anew and compares, so that a page that was not written again is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate import (
    api,
    certificate,
    claims,
    cli,
    codes,
    dominating_pairs,
    mechanisms,
    mistakes,
    plan_schema,
    repositories,
    uses,
)

DOCS = Path(__file__).resolve().parents[1]

PAGES: dict[str, Callable[[], str]] = {
    "reference/claims.md": claims.page,
    "reference/mechanisms.md": mechanisms.document,
    "reference/mistakes.md": mistakes.page,
    "reference/api.md": api.page,
    "reference/certificate.example.json": certificate.example,
    "reference/cli.md": cli.page,
    "reference/codes.md": codes.page,
    "../plan/codes.json": codes.data,
    "reference/plan.schema.json": plan_schema.schema_text,
    "../plan/schema.json": plan_schema.schema_text,
    "reference/schemastore.json": plan_schema.catalog_entry,
    "../contributing/repositories.md": repositories.page,
    "reference/uses.md": uses.page,
    "theorems/dominating-pairs.md": dominating_pairs.page,
}
"""Every generated file, from ``docs``, with what makes its text."""


def write() -> None:
    """Write all of them."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
