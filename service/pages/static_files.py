"""Stylesheet, script and picture, under names that change with their content.

A name carries the first 16 hexadecimal digits of the file's SHA-256, so that a browser may
keep it for ever and still has the new one after an upgrade. Any other name is not there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Response

from affidavit.service.identity.access import open_to_all
from affidavit.service.problems import Problem

PREFIX = "/static/"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

router = APIRouter()


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is served."""

    name: str
    content: bytes
    media_type: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Every file that is served, by its name in the folder."""
    found = {}
    for item in files("affidavit.service.pages").joinpath("static").iterdir():
        path = PurePath(item.name)
        if path.suffix in TYPES:
            content = item.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            name = f"{path.stem}.{digest}{path.suffix}"
            found[item.name] = StaticFile(name, content, TYPES[path.suffix])
    return found


def static(name: str) -> str:
    """The path of a file; raises ``KeyError`` for one that is not there."""
    return PREFIX + static_files()[name].name


@cache
def _served() -> dict[str, StaticFile]:
    return {file.name: file for file in static_files().values()}


@router.get(
    f"{PREFIX}{{name}}",
    dependencies=[open_to_all(limited=False)],
    include_in_schema=False,
    response_class=Response,
)
async def serve(name: str) -> Response:
    """One file, to be kept for a year."""
    found = _served().get(name)
    if found is None:
        raise Problem(404, "not_found", "there is no such file; reload the page.")
    return Response(
        found.content,
        media_type=found.media_type,
        headers={"Cache-Control": "public, max-age=31536000, immutable"},
    )
