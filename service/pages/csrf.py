"""Forms that another site made a browser send are not ours.

Each form carries a token that only a page of this service could have shown: the HMAC of a
cookie, that of the session or, before anybody is signed in, one that is set with the form.
A request that shows a bearer token needs none, for no browser adds that by itself. Beside
the token, ``Origin`` must be this service and ``Sec-Fetch-Site`` must not be another site,
wherever a browser sends them.

References: OWASP, Cross-Site Request Forgery Prevention (HMAC-based tokens, Fetch metadata).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import urlsplit

from fastapi import Request, Response

from affidavit.service.pages import cookies
from affidavit.service.pages.forms import Form
from affidavit.service.problems import Problem
from affidavit.service.services import Services

FIELD = "csrf"


class FormToken:
    """The token of the forms on one page; a cookie is set only where a form asks for it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._secret = _secret(request)
        self._made = False

    def __str__(self) -> str:
        """The token."""
        if self._secret is None:
            self._secret, self._made = secrets.token_urlsafe(32), True
        return _token(self._secret)

    def bind(self, answer: Response) -> None:
        """Set the cookie, if it is new and a form has its token."""
        if self._made and self._secret is not None:
            cookies.write(self._request, answer, cookies.FORM, self._secret)


def require_own(request: Request, form: Form) -> None:
    """Raise the problem of a form that no page of this service sent."""
    secret = _secret(request)
    given = form.get(FIELD)
    held = secret is not None and hmac.compare_digest(_token(secret).encode(), given.encode())
    if not held or not _same_site(request):
        raise Problem(
            403,
            "form_not_ours",
            "this form was not sent from a page of this service, or its page is too old; "
            "nothing was done. Open the page again and send the form from there.",
        )


def _secret(request: Request) -> str | None:
    return cookies.read(request, cookies.SESSION) or cookies.read(request, cookies.FORM)


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
    return services.public_url is None and urlsplit(origin).netloc == request.headers.get("host")
