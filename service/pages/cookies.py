"""The two cookies: who is signed in, and, for who is not, what binds a form to a browser.

Over https their names begin with ``__Host-``, so that no neighbouring host can set them,
and they are sent over https alone. Scripts cannot read them, and other sites' forms do not
send them. Whether it is https the service knows by ``AFFIDAVIT_PUBLIC_URL``, for behind a
proxy that ends TLS every request looks like http.

References: RFC 6265bis 4.1.3.2 (cookie name prefixes).
"""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import Request, Response

from affidavit.service.services import Services

SESSION = "affidavit_session"
FORM = "affidavit_form"
SIGN_IN = "affidavit_sign_in"


def read(request: Request, name: str) -> str | None:
    """The cookie of that name."""
    return request.cookies.get(_named(request, name)) or None


def write(
    request: Request, answer: Response, name: str, value: str, until: datetime | None = None
) -> None:
    """Set a cookie until then, or for as long as the browser is open."""
    answer.set_cookie(
        _named(request, name),
        value,
        expires=None if until is None else until.astimezone(UTC),
        path="/",
        secure=is_secure(request),
        httponly=True,
        samesite="lax",
    )


def remove(request: Request, answer: Response, name: str) -> None:
    """Have the browser forget it."""
    answer.delete_cookie(
        _named(request, name),
        path="/",
        secure=is_secure(request),
        httponly=True,
        samesite="lax",
    )


def is_secure(request: Request) -> bool:
    """Whether browsers reach this service over https."""
    services: Services = request.app.state.services
    if services.public_url is not None:
        return services.public_url.startswith("https://")
    return request.url.scheme == "https"


def _named(request: Request, name: str) -> str:
    return f"__Host-{name}" if is_secure(request) else name
