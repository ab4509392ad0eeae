"""Templates: escaped, strict, and with the few words that every page shares.

Whatever a template puts out passes ``visible`` first, so that no text from elsewhere can
reorder or hide what stands around it; an undefined name is an error and not an empty place.
"""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from affidavit.accountants import decimal_down
from affidavit.service.pages.navigation import is_current
from affidavit.service.pages.static_files import static
from affidavit.service.pages.text import short, visible


@cache
def environment() -> Environment:
    """The one environment of this process."""
    found = Environment(
        loader=PackageLoader("affidavit.service.pages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    found.globals.update(static=static, is_current=is_current, query=query)
    found.filters.update(
        short=short,
        day=day,
        moment=moment,
        second=second,
        whole=whole,
        plain=plain,
        words=words,
    )
    return found


def day(at: datetime) -> str:
    """The date in UTC."""
    return f"{at:%Y-%m-%d}"


def moment(at: datetime) -> str:
    """Date and time to the second in UTC, as a person reads it."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def second(at: datetime) -> str:
    """The same for programs."""
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def whole(number: int) -> str:
    """A whole number with its thousands apart.

    >>> whole(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def plain(number: float) -> str:
    """A number that was given, in the shortest decimal that is it.

    >>> plain(6.0), plain(1e-05)
    ('6', '1e-5')
    """
    return decimal_down(number, 17)


def words(code: str) -> str:
    """A code as words.

    >>> words("under_noised")
    'under-noised'
    """
    return {"under_noised": "under-noised", "add_remove": "add/remove"}.get(
        code, code.replace("_", " ")
    )


def query(**given: Any) -> str:
    """The query of a URL with those parameters that have a value."""
    kept = {name: value for name, value in given.items() if value not in (None, "")}
    return f"?{urlencode(kept, doseq=True)}" if kept else ""


def _finalize(value: Any) -> Any:
    # Markup is a str whose text was made here and escaped already.
    return visible(value) if type(value) is str else value
