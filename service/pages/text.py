"""Text that nobody can hide in: characters without a shape of their own are spelled out.

Names and plans are written by others. A right-to-left override shows a name
backwards, a zero-width space makes two names look like one, and a
spreadsheet runs a cell that begins with ``=``. What is shown is the same text, with such
characters written as escapes.

>>> visible("safe"), visible("a" + chr(0x202E) + "b"), visible(chr(0xD800))
('safe', 'a\\\\u202eb', '\\\\ud800')
>>> inert("=HYPERLINK(1)"), inert("plain")
("'=HYPERLINK(1)", 'plain')
>>> inert("-----BEGIN KEY-----\\nAA==\\n-----END KEY-----\\n")[:10], inert("-----BEGIN 1+1")
('-----BEGIN', "'-----BEGIN 1+1")
"""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_KEPT = frozenset("\n\r\t")
SHORT = 12
"""Characters of an id that are shown; the whole one is beside it for who asks."""

_FORMULA = tuple("=+-@\t\r\n＝＋－＠")
_PEM = re.compile(r"-----BEGIN ([A-Z ]+)-----\n[A-Za-z0-9+/=\n]+-----END \1-----\n?")
"""A key in text, whole. It ends in dashes, as no formula does, and calls nothing."""


def visible(text: str) -> str:
    """``text`` with its invisible characters, save line ends and tabs, written as escapes."""
    if text.isprintable():
        return text
    return "".join(_spelled(item) if _is_hidden(item) else item for item in text)


def short(identity: str) -> str:
    """The beginning of an id, without the name of its hash.

    >>> short("sha256:0123456789abcdef0123456789abcdef")
    '0123456789ab…'
    """
    bare = identity.removeprefix("sha256:")
    return bare if len(bare) <= SHORT + 1 else f"{bare[:SHORT]}…"


def inert(text: str) -> str:
    """A cell of a table for spreadsheets, none of which takes it for a formula.

    A key that was exported stays the text that programs read.
    """
    shown = visible(text)
    if shown.startswith(_FORMULA) and _PEM.fullmatch(shown) is None:
        return f"'{shown}"
    return shown


def _is_hidden(character: str) -> bool:
    return character not in _KEPT and unicodedata.category(character) in _HIDDEN


def _spelled(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"
