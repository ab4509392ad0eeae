"""What a form sent: names and texts, read strictly.

A body is ``application/x-www-form-urlencoded`` in UTF-8, bounded like every body, with at
most 200 fields. Browsers end lines of a text area with CR LF; they are read as LF.

>>> form = Form.read(b"name=ci&scope=submit&scope=audit&note=a%0D%0Ab")
>>> form.get("name"), form.all("scope"), form.get("note"), form.get("days")
('ci', ['submit', 'audit'], 'a\\nb', '')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Depends, Request

from affidavit.service.problems import Problem
from affidavit.service.routing import read_body

MEDIA_TYPE = "application/x-www-form-urlencoded"
MOST_FIELDS = 200


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form; one that was not sent reads as empty text."""

    fields: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, body: bytes) -> Form:
        """The form in ``body``; raises ``ValueError``."""
        found = parse_qs(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MOST_FIELDS,
        )
        return cls({name: [_lines(text) for text in texts] for name, texts in found.items()})

    def get(self, name: str) -> str:
        """The first text of that name, without blanks around it."""
        return (self.all(name) or [""])[0].strip()

    def all(self, name: str) -> list[str]:
        """Every text of that name."""
        return list(self.fields.get(name, ()))


async def read_form(request: Request) -> Form:
    """The form that was sent; raises ``Problem``."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read_body(request)
    if body and media != MEDIA_TYPE:
        raise Problem(415, "unsupported_media_type", f"a form comes as {MEDIA_TYPE}.")
    try:
        return Form.read(body)
    except ValueError:
        raise Problem(
            400, "malformed_form", "the form cannot be read; send it from its page again."
        ) from None


async def _form(request: Request) -> Form:
    return await read_form(request)


TheForm = Annotated[Form, Depends(_form)]
"""What was sent; the guard has read and checked it before."""


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")
