"""Bearer tokens: their text, and the repository that creates, lists, revokes and finds them.

::

    affidavit_0f3c9a51b7de_<43 characters, the secret><6 characters, the checksum>

The prefix and the checksum let a scanner recognise leaked tokens, and let the service refuse a
mistyped token without reading the database. The id in the middle is public; lists and logs use it.
The secret is 256 random bits in base 62. The checksum is the CRC-32 of the text before it.

A token is stored as its SHA-256. A slow hash such as bcrypt protects chosen passwords; 256 random
bits cannot be guessed, and a slow hash would only make each request slow and floods effective.

>>> token = generate_token()
>>> parse_token(token.text) == token
True
>>> parse_token(token.text[:-1] + ("a" if token.text[-1] != "a" else "b")) is None
True

Rules of the repository:

- The creation and the revocation of a token are logged in the same transaction; the log has neither
  the token nor its hash.
- Every request reads the token, so a revocation applies to the next request in every process.
- Rows are found by the public id, and the hashes are compared in constant time.
- A use is recorded at most once a minute, after the response.

Its tables:

``tokens``
    One row per token, written once: its id, name, scopes, expiry, owner and team if given, and
    SHA-256. The token itself is not stored.
``token_revocations``
    One row per revoked token, never deleted.
``token_uses``
    The last use of a token, to the minute. The only one of these tables that changes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import string
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from threading import Lock
from typing import Any, Literal

from sqlalchemy import Connection, Engine, bindparam, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from affidavit.service.core.database import (
    Store,
    write,
)
from affidavit.service.core.errors import OperatorError
from affidavit.service.core.teams import NAME as TEAM_NAME
from affidavit.service.identity.actor import (
    DEFAULT_QUEUE,
    WORK_TARGET_PATTERN,
    Actor,
    Approve,
    Serves,
    approve_alone,
)
from affidavit.service.identity.scopes import ORGANISATION_ONLY_SCOPES, Scope
from affidavit.service.log.entries import (
    PENDING_LEAF,
    append,
    insert_logged,
    is_logged,
    logged,
)
from affidavit.service.tables.identity import token_revocations, token_uses, tokens
from affidavit.service.tables.log import log_entries, log_leaves
from affidavit.trust.log import LogEntry

# ---- the text ------------------------------------------------------------------------

TOKEN_PREFIX = "affidavit_"
TOKEN_PATTERN = re.compile(r"affidavit_([0-9a-f]{12})_[0-9A-Za-z]{49}")

_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
SECRET_LENGTH = 43  # 62**43 > 2**256
CHECKSUM_LENGTH = 6  # 62**6 > 2**32


@dataclass(frozen=True, slots=True)
class TokenText:
    """A well-formed token with its public id; ``repr`` omits its text."""

    id: str
    text: str = field(repr=False)

    @property
    def digest(self) -> str:
        """The stored SHA-256, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def hash_for_log(digest: str) -> str:
    """Hash a token's stored digest for the log, so that readers of the log do not see it."""
    return hashlib.sha256(digest.encode()).hexdigest()


def generate_token() -> TokenText:
    """Generate a token from the operating system's random numbers."""
    token_id = secrets.token_hex(6)
    body = f"{TOKEN_PREFIX}{token_id}_{_base62(secrets.randbits(256), SECRET_LENGTH)}"
    return TokenText(token_id, body + _checksum(body))


def parse_token(text: str) -> TokenText | None:
    """Parse a token; return None if its form or its checksum is wrong."""
    result = TOKEN_PATTERN.fullmatch(text)
    if result is None or _checksum(text[:-CHECKSUM_LENGTH]) != text[-CHECKSUM_LENGTH:]:
        return None
    return TokenText(result[1], text)


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), CHECKSUM_LENGTH)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))


# ---- the repository ------------------------------------------------------------------

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
PERSON_PATTERN = re.compile(r"(?:oidc:[!-~]{1,200}|[A-Za-z0-9][A-Za-z0-9._@+-]{0,63})")
MAX_DAYS = 366
USE_INTERVAL_SECONDS = 60.0
"""Minimum time between two recorded uses of a token."""

log = logging.getLogger("affidavit.service")


class TokenError(OperatorError):
    """A token that cannot be created or revoked; the text gives the reason and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """The stored facts about a token, which do not include its secret."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    created_by: str
    expires_at: datetime
    revoked_at: datetime | None
    last_used_at: datetime | None
    person: str | None = None
    team: str | None = None
    serves: Serves = DEFAULT_QUEUE

    @property
    def actor(self) -> Actor:
        """The holder; tokens of one person, or else of one name in one team, have one holder."""
        name = self.name if self.team is None else f"{self.team}/{self.name}"
        return Actor(self.person or f"token:{name}", frozenset(self.scopes), self.team, self.serves)

    def state_at(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """Return whether it can be used at ``now``, or why not."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at <= now else "active"

    @property
    def serves_text(self) -> str:
        """The queues and data sets of a worker's token as text; empty for other tokens."""
        by_hand = [f"{name} by hand" for name in sorted(self.serves.datasets)]
        targets = sorted(self.serves.queues) + by_hand
        return ", ".join(targets) if Scope.WORK in self.scopes else ""


class TokenRepository(Store):
    """The tokens."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._has_any = False
        self._logged: set[tuple[Any, ...]] = set()
        self._next_use: dict[str, float] = {}
        self._lock = Lock()

    def new(
        self,
        name: str,
        scopes: Iterable[Scope],
        days: int,
        *,
        by: str,
        at: datetime,
        person: str | None = None,
        team: str | None = None,
        queues: Iterable[str] = (),
        datasets: Iterable[str] = (),
        approve: Approve = approve_alone,
    ) -> tuple[Token, TokenText]:
        """Create a token for ``days`` days and return it once; raises ``TokenError``.

        ``person`` is the owner: requests and decisions with any of their tokens are theirs, and
        with ``oidc:`` and their subject also those by the OpenID provider. ``team`` restricts the
        token to the team's objects. A worker's token names the ``queues`` whose runs it claims and
        the ``datasets`` whose reservations it commits and settles by hand; without either it is for
        the queue ``default``.
        """
        allowed = tuple(sorted(set(scopes)))
        if NAME_PATTERN.fullmatch(name) is None:
            raise TokenError(
                f"the name {name[:80]!r} is not valid; use 1 to 64 of the letters A to Z, digits "
                "and . _ @ + -, starting with a letter or digit"
            )
        if not allowed:
            raise TokenError("a token needs a scope; give --scope, one of " + ", ".join(Scope))
        if not 1 <= days <= MAX_DAYS:
            raise TokenError(f"a token is valid for 1 to {MAX_DAYS} days, not {days}")
        owner = None if person is None else _parse_person(person)
        if team is not None:
            _require_team_scopes(team, allowed)
        serves = _parse_serves(allowed, queues, datasets)
        text = generate_token()
        row = {
            "id": text.id,
            "name": name,
            "scopes": " ".join(allowed),
            "digest": text.digest,
            "created_at": at,
            "created_by": by,
            "expires_at": at + timedelta(days=days),
            "person": owner,
            "team": team,
            "serves": json.dumps(serves) if serves else None,
        }
        with self._writer.begin() as connection:
            approve(connection)
            insert_logged(connection, tokens, row, token_entry)
            connection.execute(insert(token_uses).values(token_id=text.id))
            stored = _find(connection, text.id)
        assert stored is not None
        return stored, text

    def revoke(self, token_id: str, reason: str, *, by: str, at: datetime) -> Token:
        """Revoke a token; a revoked token is returned unchanged. Raises ``TokenError``."""
        if len(reason) > 255 or not reason.isprintable():
            raise TokenError("the reason must be one line of at most 255 characters")

        def work(connection: Connection) -> Token:
            stored = _find(connection, token_id)
            if stored is None:
                raise TokenError(
                    f"token {token_id[:80]!r} not found; affidavit tokens list shows all tokens"
                )
            if stored.revoked_at is not None:
                return stored
            row = {"token_id": token_id, "revoked_at": at, "revoked_by": by, "reason": reason}
            connection.execute(insert(token_revocations).values(row))
            body = {"action": "revoked", "name": stored.name, "reason": reason}
            append(connection, "token", token_id, body, actor=by, at=at)
            return replace(stored, revoked_at=at)

        return write(self._engine, work)

    def list_all(self) -> list[Token]:
        """Return every token ever created, oldest first."""
        query = _QUERY.order_by(tokens.c.created_at, tokens.c.id)
        with self._reader.connect() as connection:
            return [_token_of_row(row) for row in connection.execute(query)]

    def has_any(self) -> bool:
        """Return whether a token was ever created."""
        if not self._has_any:
            with self._reader.connect() as connection:
                query = select(tokens.c.id).limit(1)
                self._has_any = connection.execute(query).first() is not None
        return self._has_any

    def find_by_id(self, token_id: str) -> Token | None:
        """Return the token of that id, even if it is expired or revoked."""
        stored = self.read(self._find_logged, token_id)
        return None if stored is None else stored[0]

    def find_all(self, texts: Iterable[TokenText]) -> dict[TokenText, Token | None]:
        """Return the stored token for each text, even if it is expired or revoked."""
        unique = set(texts)
        with self._reader.connect() as connection:
            return {
                text: _match_digest(self._find_logged(connection, text.id), text) for text in unique
            }

    def _find_logged(self, connection: Connection, token_id: str) -> tuple[Token, str] | None:
        """Return the token and its digest, if the row matches its log entry."""
        row = connection.execute(_ONE, {"token_id": token_id}).first()
        if row is None:
            return None
        values = row[: len(tokens.columns)]
        if values not in self._logged:
            if not is_logged(connection, token_entry(row)):
                log.error("token %s is not in the log as it is in the database", token_id)
                return None
            self._logged.add(values)
        # Nearly always there is one entry, which needs no further query.
        if row.revoked_at is None and row.entries > 1 and _is_revoked_in_log(connection, token_id):
            log.error("token %s was revoked in the log, but not in the database", token_id)
            return None
        return _token_of_row(row), row.digest

    def use_is_due(self, token_id: str) -> bool:
        """Return whether a use of the token should be recorded now."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_use.get(token_id, now):
                return False
            self._next_use[token_id] = now + USE_INTERVAL_SECONDS
            return True

    def write_use(self, token_id: str, at: datetime) -> None:
        """Record a use of the token."""
        change = update(token_uses).where(token_uses.c.token_id == token_id)
        try:
            with self._writer.begin() as connection:
                connection.execute(change.values(last_used_at=at))
        except SQLAlchemyError as error:
            # The request was answered, so a missing time of use is not an error.
            log.warning("the use of token %s was not recorded: %s", token_id, error)


def _is_revoked_in_log(connection: Connection, token_id: str) -> bool:
    entries = map(json.loads, logged(connection, token_id))
    return any(
        entry["kind"] == "token" and entry["body"].get("action") == "revoked" for entry in entries
    )


def token_entry(row: Any) -> LogEntry:
    """Build the log entry of a row of ``tokens``."""
    serves = json.loads(row.serves or "{}")
    owners = {"person": row.person, "team": row.team}
    body = {
        "action": "created",
        "name": row.name,
        "scopes": row.scopes.split(),
        "expires_at": row.expires_at.isoformat(timespec="microseconds"),
        "digest": hash_for_log(row.digest),
        **{name: value for name, value in owners.items() if value is not None},
        **{kind: serves[kind] for kind in ("queues", "datasets") if kind in serves},
    }
    actor, at = row.created_by, row.created_at
    return LogEntry(kind="token", subject=row.id, actor=actor, at=at, body=body)


_QUERY = (
    select(tokens, token_revocations.c.revoked_at, token_uses.c.last_used_at)
    .outerjoin(token_revocations, token_revocations.c.token_id == tokens.c.id)
    .outerjoin(token_uses, token_uses.c.token_id == tokens.c.id)
)
# Built once, because every request runs it and building it takes longer than running it.
_ENTRIES = (
    select(func.count())
    .where(log_entries.c.subject == tokens.c.id, log_entries.c.kind == "token")
    .scalar_subquery()
    .label("entries")
)
"""The log's entries of a token: of its creation and, if it was revoked, of that."""
_ONE = _QUERY.add_columns(_ENTRIES).where(tokens.c.id == bindparam("token_id"))


_LEAF = (
    select(func.max(func.coalesce(log_leaves.c.leaf_index, PENDING_LEAF)))
    .join_from(log_entries, log_leaves, isouter=True)
    .where(log_entries.c.kind == "token", log_entries.c.subject == tokens.c.id)
    .scalar_subquery()
    .label("leaf")
)


def last_revocations(connection: Connection) -> dict[str, int]:
    """Return the leaf index of each person's last token revocation, by the actor's name.

    It is ``PENDING_LEAF`` for a revocation without a leaf. Times would be unreliable, because
    clocks can be set back.
    """
    query = _QUERY.add_columns(_LEAF).where(token_revocations.c.revoked_at.is_not(None))
    revoked = connection.execute(query.order_by(_LEAF))
    return {_token_of_row(row).actor.name: row.leaf for row in revoked}


def _parse_person(text: str) -> str:
    """Return the actor name of a person."""
    if PERSON_PATTERN.fullmatch(text) is None:
        raise TokenError(
            f"the person {text[:80]!r} is not valid; use 1 to 64 of the letters A to Z, digits and "
            ". _ @ + -, or oidc: and the person's subject at the OpenID provider"
        )
    return text if text.startswith("oidc:") else f"person:{text}"


def _require_team_scopes(team: str, scopes: Iterable[Scope]) -> None:
    if TEAM_NAME.fullmatch(team) is None:
        raise TokenError(
            f"the team {team[:80]!r} is not valid; use 1 to 64 of the letters a to z, digits "
            "and -, starting and ending with a letter or digit"
        )
    if forbidden := sorted(ORGANISATION_ONLY_SCOPES & set(scopes)):
        raise TokenError(
            f"the scope {forbidden[0]} is for the whole organisation; omit it or the team"
        )


def _parse_serves(
    scopes: Iterable[Scope], queues: Iterable[str], datasets: Iterable[str]
) -> dict[str, list[str]]:
    """Return the queues and data sets of a worker's token; empty for other tokens."""
    targets = {"queues": sorted(set(queues)), "datasets": sorted(set(datasets))}
    for name in targets["queues"] + targets["datasets"]:
        if WORK_TARGET_PATTERN.fullmatch(name) is None:
            raise TokenError(
                f"{name[:80]!r} is not a valid name of a queue or data set; use 1 to 64 of the "
                "letters A to Z, digits and . _ -"
            )
    if Scope.WORK not in scopes:
        if any(targets.values()):
            raise TokenError("queues and data sets require the scope work; add it")
        return {}
    return targets if any(targets.values()) else {"queues": sorted(DEFAULT_QUEUE.queues)}


def _match_digest(stored: tuple[Token, str] | None, text: TokenText) -> Token | None:
    digest = stored[1] if stored is not None else "0" * 64
    is_same = hmac.compare_digest(digest, text.digest)
    return stored[0] if stored is not None and is_same else None


def _find(connection: Connection, token_id: str) -> Token | None:
    row = connection.execute(_ONE, {"token_id": token_id}).first()
    return None if row is None else _token_of_row(row)


def _token_of_row(row: Any) -> Token:
    known = {item.value for item in Scope}
    serves = DEFAULT_QUEUE
    if row.serves is not None:
        targets = json.loads(row.serves).items()
        serves = Serves(**{kind: frozenset(names) for kind, names in targets})
    # Scopes of later releases are ignored.
    scopes = tuple(Scope(entry) for entry in row.scopes.split() if entry in known)
    facts = {**row._mapping, "scopes": scopes, "serves": serves}
    return Token(**{field.name: facts[field.name] for field in fields(Token)})
