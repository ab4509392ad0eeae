"""What a request says of who sends it: one bearer token, in one header (RFC 6750).

Nothing is guessed and nothing is repaired. A header that is there but cannot be read is
refused, whatever else would have let the request in: somebody who shows a bad token is
not somebody who shows none. Nothing of what was sent is repeated in an answer or a log.

>>> bearer(["Bearer abc.def"], "")
'abc.def'
>>> bearer([], "") is None
True
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import parse_qsl

from affidavit.service.identity.tokens import PREFIX

LONGEST = 16 * 1024
"""Characters of a bearer token; providers that list many groups make long ones."""
IN_URLS = frozenset({"access_token", "api_key", "apikey", "authorization", "bearer", "token"})
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class AuthenticationError(Exception):
    """It is not known who asks; ``code`` is stable, the text is for the client."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def bearer(headers: Sequence[str], query: str) -> str | None:
    """The token in the ``Authorization`` headers, None where there is none.

    Raises ``AuthenticationError`` when they hold anything else, or when the URL holds a token.
    """
    if query:
        _refuse_in_url(query)
    if not headers:
        return None
    if len(headers) > 1:
        raise AuthenticationError(
            "malformed_credentials", "there are several Authorization headers; send one."
        )
    scheme, _, token = headers[0].strip().partition(" ")
    if scheme.lower() != "bearer":
        raise AuthenticationError(
            "unsupported_scheme", "Authorization takes Bearer TOKEN, and no other scheme."
        )
    token = token.strip(" ")
    if len(token) > LONGEST:
        raise AuthenticationError(
            "malformed_credentials", f"a token has at most {LONGEST} characters; this one has more."
        )
    if _TOKEN.fullmatch(token) is None:
        raise AuthenticationError(
            "malformed_credentials",
            "after Bearer there must be one token of the letters A to Z, digits and . _ ~ + / - =.",
        )
    return token


def _refuse_in_url(query: str) -> None:
    """URLs end in logs, histories and Referer headers, so that a token there is no secret."""
    given = parse_qsl(query, keep_blank_values=True)
    if any(name.lower() in IN_URLS or PREFIX in name + value for name, value in given):
        raise AuthenticationError(
            "token_in_url",
            "the URL holds a token, which others can now read: revoke it, and send another "
            "as Authorization: Bearer TOKEN.",
        )
