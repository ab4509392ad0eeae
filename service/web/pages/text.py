"""Text and numbers for people, with invisible characters as escapes.

Names and plans are untrusted text. A right-to-left override shows a name backwards, a zero-width
space makes two names look alike, and a spreadsheet executes a cell that begins with ``=``. The
text is shown with such characters as escapes.

>>> escape_invisible("safe"), escape_invisible("a" + chr(0x202E) + chr(0xD800))
('safe', 'a\\\\u202e\\\\ud800')
>>> spreadsheet_safe("=HYPERLINK(1)"), spreadsheet_safe("plain")
("'=HYPERLINK(1)", 'plain')
>>> spreadsheet_safe("-----BEGIN KEY-----\\nAA==\\n-----END KEY-----\\n")[:10]
'-----BEGIN'
>>> spreadsheet_safe("-----BEGIN 1+1")
"'-----BEGIN 1+1"

Verdicts and states have the same colours on every page.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from datetime import datetime
from typing import Any, overload
from urllib.parse import urlencode

from markupsafe import Markup, escape

from affidavit.accountants import decimal_down, decimal_up
from affidavit.assessment import (
    Assessment,
    goal_of,
    verdict_sentence,
)
from affidavit.plan import Reason

DIGITS = 5
"""Significant digits of a number."""
SHORT_ID_LENGTH = 12
"""Characters of a shortened id; its title attribute has the whole id."""
ADJACENCIES = {"add_remove": "add/remove", "replace_one": "replace one", "zero_out": "zero out"}

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_LAYOUT = frozenset("\n\r\t")
_FORMULA = tuple("=+-@\t\r\n＝＋－＠")
_BOUND = re.compile(r"[εδσμ] [≤≥=] [0-9][0-9.e-]*")
_PEM = re.compile(r"-----BEGIN ([A-Z ]+)-----\n[A-Za-z0-9+/=\n]+-----END \1-----\n?")
"""A PEM block, which is no formula although it begins with a dash."""


# ---- text ---------------------------------------------------------------------------


def escape_invisible(text: str) -> str:
    """Return ``text`` with invisible characters, except line ends and tabs, as escapes."""
    if text.isprintable():
        return text
    return "".join(escaped(char) if _is_hidden(char) else char for char in text)


def spreadsheet_safe(text: str) -> str:
    """Return a cell that no spreadsheet takes for a formula; PEM blocks are unchanged."""
    cell = escape_invisible(text)
    if cell.startswith(_FORMULA) and _PEM.fullmatch(cell) is None:
        return f"'{cell}"
    return cell


def escaped(character: str) -> str:
    r"""Return a character as ``\uXXXX``, which is valid in YAML and Python."""
    number = ord(character)
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def _is_hidden(character: str) -> bool:
    return character not in _LAYOUT and unicodedata.category(character) in _HIDDEN


def short_id(identity: str) -> str:
    """Return the beginning of an id, without the name of its hash.

    >>> short_id("sha256:0123456789abcdef0123456789abcdef")
    '0123456789ab…'
    """
    return truncate(identity.removeprefix("sha256:"), SHORT_ID_LENGTH + 1)


def truncate(text: str, length: int) -> str:
    """Return ``text`` cut to ``length`` characters, with an ellipsis if it was longer."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def words(code: str) -> str:
    """Return a code as words.

    >>> words("under_noised"), words("add_remove")
    ('under-noised', 'add/remove')
    """
    return {"under_noised": "under-noised", **ADJACENCIES}.get(code, code.replace("_", " "))


def release_name(release: Mapping[str, Any]) -> str:
    """Return the name of a release of a signed statement, with its phase if there are several.

    >>> release_name({"name": "all", "phase": 1})
    'phase 2, all'
    """
    phase = f"phase {release['phase'] + 1}, " if "phase" in release else ""
    return f"{phase}{release['name']}"


def humanize(value: str | None) -> str | None:
    """Return the JSON of a plan's or policy's value as plain text; other text is unchanged.

    >>> humanize('{"name": "dp_sgd"}'), humanize('[{"clip_norm": 1.0, "count": 48}]')
    ('dp_sgd', 'clip_norm 1, count 48')
    """
    if value is None:
        return None
    try:
        return _readable(json.loads(value))
    except ValueError:
        return value


def _readable(value: Any) -> str:
    match value:
        case dict():
            is_name = list(value) in (["name"], ["scheme"], ["kind"])
            parts = [_readable(part) for part in value.values()]
            named = parts if is_name else map(" ".join, zip(value, parts, strict=True))
            return ", ".join(named) or "none"
        case list():
            separator = "; " if any(isinstance(part, dict) for part in value) else ", "
            return separator.join(map(_readable, value)) or "none"
        case bool():
            return "yes" if value else "no"
        case float() if math.isfinite(value):
            return decimal(value)
        case None:
            return "null"
        case _:
            return str(value)


def capitalized(text: str) -> str:
    """Return ``text`` with an upper-case first letter, unless that is a symbol such as ε.

    >>> capitalized("no run"), capitalized("ε ≤ 8")
    ('No run', 'ε ≤ 8')
    """
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def nowrap(text: str) -> Markup:
    """Return ``text`` as HTML without line breaks inside bounds, such as δ = 1e-6.

    >>> nowrap("at δ = 1e-6 (add/remove)")
    Markup('at <span class="nowrap">δ = 1e-6</span> (add/remove)')
    """
    return Markup(
        _BOUND.sub(r'<span class="nowrap">\g<0></span>', str(escape(escape_invisible(text))))
    )


def messages_of(reasons: tuple[Reason, ...]) -> str:
    """Return all reasons with their remedies in one paragraph."""
    return " ".join(for_people(f"{reason.message} {reason.remedy}") for reason in reasons)


def for_people(sentence: str) -> str:
    """Return ``sentence`` without references to paths of the API.

    >>> for_people("first is missing. Add it; /openapi.json lists what each field takes.")
    'first is missing. Add it.'
    """
    return re.sub(r"; (GET )?/.*", ".", sentence).strip()


def query(**parameters: Any) -> str:
    """Return the query string of the parameters that have a value."""
    present = {name: value for name, value in parameters.items() if value not in (None, "")}
    return f"?{urlencode(present, doseq=True)}" if present else ""


# ---- numbers and instants -----------------------------------------------------------


@overload
def round_up(value: float | str, digits: int = DIGITS) -> str: ...
@overload
def round_up(value: float | str | None, digits: int = DIGITS) -> str | None: ...
def round_up(value: float | str | None, digits: int = DIGITS) -> str | None:
    """Return a number rounded up, for upper bounds; None stays None.

    >>> round_up(7.9999994), round_up("Infinity"), round_up(None)
    ('8', 'not bounded', None)
    """
    if value is None:
        return None
    number = float(value)
    return decimal_up(number, digits) if math.isfinite(number) else "not bounded"


@overload
def round_down(value: float | str, digits: int = DIGITS) -> str: ...
@overload
def round_down(value: float | str | None, digits: int = DIGITS) -> str | None: ...
def round_down(value: float | str | None, digits: int = DIGITS) -> str | None:
    """Return a number rounded down, for lower bounds and remainders; None stays None."""
    return None if value is None else decimal_down(float(value), digits)


def decimal(number: float) -> str:
    """Return the shortest decimal equal to ``number``.

    >>> decimal(6.0), decimal(1e-05)
    ('6', '1e-5')
    """
    return decimal_down(number, 17)


def group_digits(number: int) -> str:
    """Return an integer with thousands separators.

    >>> group_digits(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def date(at: datetime) -> str:
    """Return the date in UTC."""
    return f"{at:%Y-%m-%d}"


def date_time(at: datetime) -> str:
    """Return date and time to the second in UTC, for people."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def elapsed(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> elapsed(3.2), elapsed(340), elapsed(7500), elapsed(200_000)
    ('3 s', '5 min 40 s', '2 h 5 min', '2 d 7 h')
    """
    rest, parts = max(0, int(seconds)), []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def iso_time(at: datetime) -> str:
    """Return date and time to the second in UTC, for programs."""
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


# ---- verdicts ------------------------------------------------------------------------

TONES = {
    **dict.fromkeys(("certified", "active", "settled", "signing"), "good"),
    **dict.fromkeys(("unproved", "undecided", "awaiting_approval", "expired"), "warn"),
    **dict.fromkeys(("in_force", "running", "reserved", "committed", "not_yet_valid"), "warn"),
    **dict.fromkeys(("under_noised", "refused", "rejected", "revoked", "key_revoked"), "bad"),
    **dict.fromkeys(("failed", "cancelled"), "bad"),
}
"""Colours of verdicts and states; others are plain."""


def draft_sentence(assessment: Assessment) -> str:
    """Return the verdict of a plan, as if it were submitted now, in one sentence."""
    epsilon, delta, target = assessment.epsilon, assessment.delta, assessment.target_epsilon
    bound = None
    if epsilon is not None and delta is not None and math.isfinite(epsilon.upper):
        bound = (
            f"ε ≤ {round_up(epsilon.upper)} at δ = {round_up(delta.upper)}"
            f"{assessment.confidence_suffix} ({words(assessment.adjacency)}, per {assessment.unit})"
        )
    sentence = verdict_sentence(
        assessment.verdict,
        bound,
        goal_of(assessment.plan, None if target is None else f"{target:g}", assessment.codes),
        assessment.codes,
    )
    return sentence.replace("Certified", "Would be certified", 1)
