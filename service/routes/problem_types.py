"""``/problems/{code}``: what the ``type`` of a problem document leads to."""

from __future__ import annotations

from html import escape
from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import HTMLResponse

from affidavit.plan import explain
from affidavit.service.identity.access import open_to_all
from affidavit.service.problems import Problem

router = APIRouter()


@router.get(
    "/problems/{code}",
    dependencies=[open_to_all()],
    include_in_schema=False,
    response_class=HTMLResponse,
)
def problem_type(code: Annotated[str, Path(pattern="^[a-z0-9_]{1,64}$")]) -> HTMLResponse:
    """A short page with the messages and remedies of a code; ``…`` stands for what is filled in."""
    meanings = explain(code)
    if not meanings:
        raise Problem(404, "not_found", "there is no such code.")
    rows = "".join(
        f"<tr><td>{escape(meaning.room)}</td><td>{escape(meaning.message)}</td>"
        f"<td>{escape(meaning.remedy)}</td></tr>"
        for meaning in meanings
    )
    return HTMLResponse(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{code}</title>'
        f"<h1>{code}</h1><table><tr><th>from</th><th>says</th><th>to do</th></tr>{rows}</table>"
        "</html>"
    )
