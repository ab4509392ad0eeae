"""What a page is rendered from, for tests of what it shows rather than of how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pydantic_core import to_jsonable_python
from sqlalchemy import Row

from affidavit.service.web.pages import response


@contextmanager
def page_views() -> Iterator[list[Any]]:
    """Collect the views of the pages that this process answers meanwhile, as data."""
    views: list[Any] = []
    render = response.html

    def html(request: Any, template: str, values: Any, **options: Any) -> Any:
        views.append(to_jsonable_python(values.get("view"), fallback=_as_data))
        return render(request, template, values, **options)

    with mock.patch.object(response, "html", html):
        yield views


def _as_data(value: Any) -> Any:
    """The fields of a row; anything else that is no data, such as a function, by its name."""
    return dict(value._mapping) if isinstance(value, Row) else repr(value)
