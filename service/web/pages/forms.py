"""Submitted forms, read strictly, and their protection against forgery (CSRF).

A body is ``application/x-www-form-urlencoded`` in UTF-8, limited in size like every body, with at
most 200 fields. The CR LF line ends of text areas become LF.

>>> form = Form.read(b"name=ci&scope=submit&scope=audit&note=a%0D%0Ab")
>>> form.get("name"), form.all("scope"), form.get("note"), form.get("days")
('ci', ['submit', 'audit'], 'a\\nb', '')

Each form contains a token that only pages of this service can show: the HMAC of the session cookie
or, before signing in, of a cookie that is set with the form. Requests with a bearer token need
none, because browsers do not add one automatically. If present, ``Origin`` must be this service
and ``Sec-Fetch-Site`` must not be another site.

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

from fastapi import Depends, Request

from affidavit.service.core.problems import Problem
from affidavit.service.web import sessions
from affidavit.service.web.dependencies import Services
from affidavit.service.web.routing import read_body

MEDIA_TYPE = "application/x-www-form-urlencoded"
MAX_FIELDS = 200
CSRF_FIELD = "csrf"


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form; a missing field is empty."""

    fields: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, body: bytes) -> Form:
        """Parse ``body``; raises ``ValueError``."""
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
        """Return the first value of a field, without surrounding whitespace."""
        return (self.all(name) or [""])[0].strip()

    def all(self, name: str) -> list[str]:
        """Return all values of a field."""
        return list(self.fields.get(name, ()))

    def first_values(self) -> dict[str, str]:
        """Return the first value of each field, to fill in the form again."""
        return {
            name: texts[0] for name, texts in self.fields.items() if texts and name != CSRF_FIELD
        }


def number(text: str) -> float | str:
    """Return ``text`` as a number, or unchanged if it is none, for validation to refuse it.

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
    """Read the submitted form; raises ``Problem``."""
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
"""The submitted form, which the guard has read and whose token it has checked."""


# ---- forged requests ----------------------------------------------------------------


def form_token(request: Request) -> tuple[str, str | None]:
    """Return the token for the forms of a page, and the secret of a new cookie or None."""
    secret = _secret(request)
    if secret is not None:
        return _token(secret), None
    secret = secrets.token_urlsafe(32)
    return _token(secret), secret


def require_form_token(request: Request, form: Form) -> None:
    """Raise ``Problem`` unless a page of this service sent the form."""
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
