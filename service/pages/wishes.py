"""In which form an answer is wanted."""

from __future__ import annotations

from fastapi import Request

DATA = (".json", ".csv")
_MACHINES = ("/v1/", "/static/", "/livez", "/readyz", "/metrics", "/openapi.json")


def is_data(request: Request) -> bool:
    """Whether the path is that of a page's data."""
    return request.url.path.endswith(DATA)


def is_fragment(request: Request) -> bool:
    """Whether htmx asks for a part of a page."""
    return "hx-request" in request.headers and "hx-history-restore-request" not in request.headers


def wants_html(request: Request) -> bool:
    """Whether a person will read the answer: a browser asks, and not for the API."""
    if request.url.path.startswith(_MACHINES):
        return False
    return "text/html" in request.headers.get("accept", "") or is_fragment(request)
