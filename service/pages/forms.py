"""Submitted forms, read strictly, and their protection against forgery (CSRF).

A body is ``application/x-www-form-urlencoded`` in UTF-8, bounded like every body, with at
most 200 fields. Browsers end the lines of a text area with CR LF; they are read as LF.

>>> form = Form.read(b"name=ci&scope=submit&scope=audit&note=a%0D%0Ab")
>>> form.get("name"), form.all("scope"), form.get("note"), form.get("days")
('ci', ['submit', 'audit'], 'a\\nb', '')

Each form carries a token that only a page of this service could have shown: the HMAC of a
cookie, that of the session or, before anybody is signed in, one that is set with the form.
A request with a bearer token needs none, for no browser adds that by itself. In addition,
``Origin`` must be this service and ``Sec-Fetch-Site`` must not be another site, wherever a
browser sends them.

References: OWASP, Cross-Site Request Forgery Prevention (HMAC-based tokens, Fetch metadata).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Depends, Request, Response

from affidavit.service.dependencies import Services
from affidavit.service.pages import sessions
from affidavit.service.problems import Problem
from affidavit.service.routing import read_body

MEDIA_TYPE = "application/x-www-form-urlencoded"
MAX_FIELDS = 200
CSRF_FIELD = "csrf"


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form; a missing one reads as empty text."""

    fields: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, body: bytes) -> Form:
        """The form in ``body``; raises ``ValueError``."""
        fields = parse_qs(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
        return cls(
            {name: [text.replace("\r\n", "\n") for text in texts] for name, texts in fields.items()}
        )

    def get(self, name: str) -> str:
        """The first text of that name, without surrounding blanks."""
        return (self.all(name) or [""])[0].strip()

    def all(self, name: str) -> list[str]:
        """Every text of that name."""
        return list(self.fields.get(name, ()))

    def first_values(self) -> dict[str, str]:
        """The first text of each field, to fill the form in again."""
        return {
            name: texts[0] for name, texts in self.fields.items() if texts and name != CSRF_FIELD
        }


def number(text: str) -> float | str:
    """A number if ``text`` is one; else the text, which its reader refuses by the field's name.

    >>> number("8"), number("1e-5"), number("many"), number("inf")
    (8, 1e-05, 'many', 'inf')
    """
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


async def read_form(request: Request) -> Form:
    """The submitted form; raises ``Problem``."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read_body(request)
    if body and media != MEDIA_TYPE:
        raise Problem(415, "unsupported_media_type", f"send the form as {MEDIA_TYPE}.")
    try:
        return Form.read(body)
    except ValueError:
        raise Problem(
            400, "malformed_form", "the form cannot be read; submit it from its page again."
        ) from None


SubmittedForm = Annotated[Form, Depends(read_form)]
"""The submitted form; the guard has read it and checked its token before the route runs."""


# ---- forged requests ----------------------------------------------------------------


class FormToken:
    """The token of the forms on one page; a cookie is set only if the page has a form."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._secret = _secret(request)
        self._is_new = False

    def __str__(self) -> str:
        """The token."""
        if self._secret is None:
            self._secret, self._is_new = secrets.token_urlsafe(32), True
        return _token(self._secret)

    def bind(self, response: Response) -> None:
        """Set the cookie, if it is new and a form carries its token."""
        if self._is_new and self._secret is not None:
            sessions.write_cookie(self._request, response, sessions.FORM, self._secret)


def require_form_token(request: Request, form: Form) -> None:
    """Raise ``Problem`` for a form that no page of this service sent."""
    secret = _secret(request)
    token = form.get(CSRF_FIELD)
    valid = secret is not None and hmac.compare_digest(_token(secret).encode(), token.encode())
    if not valid or not _same_site(request):
        raise Problem(
            403,
            "form_not_ours",
            "this form is not from a page of this service, or the page has expired. Nothing was "
            "changed. Open the page again and submit its form.",
        )


def _secret(request: Request) -> str | None:
    return sessions.read_cookie(request, sessions.SESSION) or sessions.read_cookie(
        request, sessions.FORM
    )


def _token(secret: str) -> str:
    return hmac.new(secret.encode(), b"affidavit form", hashlib.sha256).hexdigest()


def _same_site(request: Request) -> bool:
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    if origin is None:
        return True
    services: Services = request.app.state.services
    if services.public_url is not None and origin == services.public_url:
        return True
    host = origin.partition("://")[2]
    return services.public_url is None and host == request.headers.get("host")
