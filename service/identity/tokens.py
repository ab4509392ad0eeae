"""Tokens as text: made, recognised and hashed, without any database.

::

    affidavit_0f3c9a51b7de_<43 characters, the secret><6 characters, the checksum>

The prefix and the checksum let a scanner of leaked secrets find one in a log or a
repository and be sure of it, and let the service refuse a mistyped one without asking the
database. The id in the middle is public: lists and logs call the token by it. The secret
is 256 random bits in base 62; the checksum is the CRC-32 of all that stands before it.

A token is kept as its SHA-256. A slow hash such as bcrypt makes guessing a *chosen*
password dear; 256 random bits cannot be guessed at any price, so that it would only make
each request slow, and a flood of requests a way to stop the service.

>>> made = mint()
>>> parse(made.text) == made
True
>>> parse(made.text[:-1] + ("a" if made.text[-1] != "a" else "b")) is None
True
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

PREFIX = "affidavit_"
PATTERN = re.compile(r"affidavit_([0-9a-f]{12})_[0-9A-Za-z]{49}")

_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SECRET = 43  # 62**43 > 2**256
_CHECKSUM = 6  # 62**6 > 2**32


@dataclass(frozen=True, slots=True)
class TokenText:
    """A well-formed token, with its public id; its text appears in no representation."""

    id: str
    text: str = field(repr=False)

    @property
    def digest(self) -> str:
        """What is kept of it: SHA-256, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def mint() -> TokenText:
    """A new token, from the operating system's random numbers."""
    token_id = secrets.token_hex(6)
    body = f"{PREFIX}{token_id}_{_base62(secrets.randbits(256), _SECRET)}"
    return TokenText(token_id, body + _checksum(body))


def parse(text: str) -> TokenText | None:
    """The token that ``text`` is, if its form and its checksum are right."""
    result = PATTERN.fullmatch(text)
    if result is None or _checksum(text[:-_CHECKSUM]) != text[-_CHECKSUM:]:
        return None
    return TokenText(result[1], text)


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), _CHECKSUM)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
