"""Bearer tokens: their text, and the repository that makes, lists, revokes and finds them.

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

Rules of the repository:

- A token's making and its revocation stand in the transparency log, written in the same
  transaction; neither the token nor its hash does.
- Every request looks the token up, so that a revocation counts from the next request on,
  in every process.
- Rows are found by the public id; the hash is compared in constant time afterwards.
- A use is written at most once a minute, and after the answer.

Its tables:

``tokens``
    One row per token, written once: its id, who it speaks for, what it allows, until
    when, whose it is where that was said, and the SHA-256 of it. The token itself is nowhere.
``token_revocations``
    A token that is revoked gets a row here; no row ever leaves.
``token_uses``
    When a token was last used, to the minute. The only one of the three that changes.
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
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, bindparam, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from affidavit.certificate.log import LogEntry
from affidavit.service.certificate_tables import UtcDateTime, metadata
from affidavit.service.database import Store, write
from affidavit.service.errors import OperatorError
from affidavit.service.identity.actor import (
    DEFAULT_QUEUE,
    NEVER_OF_A_TEAM,
    SERVED,
    Actor,
    Scope,
    Serves,
)
from affidavit.service.identity.four_eyes import Approve, alone
from affidavit.service.log.entries import (
    WAITING,
    append,
    insert_logged,
    log_entries,
    log_leaves,
    logged,
)
from affidavit.service.teams import NAME as TEAM_NAME

# ---- the text ------------------------------------------------------------------------

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


def logged_digest(digest: str) -> str:
    """What the log says of a token's ``digest``, which its readers do not see."""
    return hashlib.sha256(digest.encode()).hexdigest()


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


# ---- the repository ------------------------------------------------------------------

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
PERSON = re.compile(r"(?:oidc:[!-~]{1,200}|[A-Za-z0-9][A-Za-z0-9._@+-]{0,63})")
LONGEST_DAYS = 366
USE_SECONDS = 60.0
"""How often a token's use is written down."""

log = logging.getLogger("affidavit.service")


tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.String(12), primary_key=True),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("scopes", sa.String(255), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("created_by", sa.String(255), nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Column("person", sa.String(255)),
    sa.Column("team", sa.String(64)),
    sa.Column("serves", sa.Text),
    sa.CheckConstraint("expires_at > created_at", name="tokens_expire_later"),
)

token_revocations = sa.Table(
    "token_revocations",
    metadata,
    sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id"), primary_key=True),
    sa.Column("revoked_at", UtcDateTime, nullable=False),
    sa.Column("revoked_by", sa.String(255), nullable=False),
    sa.Column("reason", sa.String(255), nullable=False),
)

token_uses = sa.Table(
    "token_uses",
    metadata,
    sa.Column("token_id", sa.String(12), sa.ForeignKey("tokens.id"), primary_key=True),
    sa.Column("last_used_at", UtcDateTime),
)


class TokenError(OperatorError):
    """A token that cannot be made or revoked as asked; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """What is known of a token; nothing here can be used as one."""

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
        """Who holds it: two tokens of one person, or else of one name in one team, are the same."""
        name = self.name if self.team is None else f"{self.team}/{self.name}"
        return Actor(self.person or f"token:{name}", frozenset(self.scopes), self.team, self.serves)

    @property
    def serves_text(self) -> str:
        """What a worker's token names, for people; empty for another's."""
        by_hand = [f"{name} by hand" for name in sorted(self.serves.datasets)]
        named = sorted(self.serves.queues) + by_hand
        return ", ".join(named) if Scope.WORK in self.scopes else ""


class TokenRepository(Store):
    """The tokens."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._any = False
        self._logged: set[tuple[Any, ...]] = set()
        self._uses: dict[str, float] = {}
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
        approve: Approve = alone,
    ) -> tuple[Token, TokenText]:
        """Make a token for ``days`` days, and return it once; raises ``TokenError``.

        ``person`` is whose it is: what they ask and decide counts as theirs with every token
        of theirs, and with the OpenID provider's where it is ``oidc:`` and their subject.
        ``team`` confines it to that team's objects. A worker's names the ``queues`` whose runs it
        claims and the ``datasets`` whose reservations it commits and settles by hand; without
        either it is for the queue ``default``.
        """
        allowed = tuple(sorted(set(scopes)))
        if NAME.fullmatch(name) is None:
            raise TokenError(
                f"the name {name[:80]!r} is not valid; use 1 to 64 of the letters A to Z, digits "
                "and . _ @ + -, starting with a letter or digit"
            )
        if not allowed:
            raise TokenError("a token needs a scope; give --scope, one of " + ", ".join(Scope))
        if not 1 <= days <= LONGEST_DAYS:
            raise TokenError(f"a token is valid for 1 to {LONGEST_DAYS} days, not {days}")
        owner = None if person is None else _person(person)
        if team is not None:
            _require_of_team(team, allowed)
        serves = _serves(allowed, queues, datasets)
        text = mint()
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
        """Revoke a token from now on; a second time changes nothing. Raises ``TokenError``."""
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

    def all(self) -> list[Token]:
        """Every token that was ever made, oldest first."""
        query = _QUERY.order_by(tokens.c.created_at, tokens.c.id)
        with self._reader.connect() as connection:
            return [_token(row) for row in connection.execute(query)]

    def exist(self) -> bool:
        """Whether a token was ever made; asked of the database until one was."""
        if not self._any:
            with self._reader.connect() as connection:
                query = select(tokens.c.id).limit(1)
                self._any = connection.execute(query).first() is not None
        return self._any

    def with_id(self, token_id: str) -> Token | None:
        """The token of that id, whether or not it still counts."""
        stored = self.read(self._find_logged, token_id)
        return None if stored is None else stored[0]

    def find_all(self, texts: Iterable[TokenText]) -> dict[TokenText, Token | None]:
        """The token that each of ``texts`` is, whether or not it still counts."""
        unique = set(texts)
        with self._reader.connect() as connection:
            return {text: _if_same(self._find_logged(connection, text.id), text) for text in unique}

    def _find_logged(self, connection: Connection, token_id: str) -> tuple[Token, str] | None:
        """The token, if it is as its entry in the log says: a row alone is anybody's."""
        row = connection.execute(_ONE, {"token_id": token_id}).first()
        if row is None:
            return None
        values = row[: len(tokens.columns)]
        if values not in self._logged:
            if token_entry(row).content.decode() not in logged(connection, token_id):
                log.error("token %s is not in the log as it is in the database", token_id)
                return None
            self._logged.add(values)
        return _token(row), row.digest

    def use_is_due(self, token_id: str) -> bool:
        """Whether a use is to be written down now; true once in a while for each token."""
        moment = time.monotonic()
        with self._lock:
            if moment < self._uses.get(token_id, moment):
                return False
            self._uses[token_id] = moment + USE_SECONDS
            return True

    def write_use(self, token_id: str, at: datetime) -> None:
        """Write down that the token was used."""
        change = update(token_uses).where(token_uses.c.token_id == token_id)
        try:
            with self._writer.begin() as connection:
                connection.execute(change.values(last_used_at=at))
        except SQLAlchemyError as error:
            # The request was answered; that its time is not known is no reason to fail.
            log.warning("the use of token %s was not recorded: %s", token_id, error)


def token_entry(row: Any) -> LogEntry:
    """The entry that logs a row of ``tokens``."""
    serves = json.loads(row.serves or "{}")
    owners = {"person": row.person, "team": row.team}
    body = {
        "action": "created",
        "name": row.name,
        "scopes": row.scopes.split(),
        "expires_at": row.expires_at.isoformat(timespec="microseconds"),
        "digest": logged_digest(row.digest),
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
# Built once: this is asked for every request, and building it costs more than running it.
_ONE = _QUERY.where(tokens.c.id == bindparam("token_id"))


_LEAF = (
    select(func.max(func.coalesce(log_leaves.c.leaf_index, WAITING)))
    .join_from(log_entries, log_leaves, isouter=True)
    .where(log_entries.c.kind == "token", log_entries.c.subject == tokens.c.id)
    .scalar_subquery()
    .label("leaf")
)


def last_revocations(connection: Connection) -> dict[str, int]:
    """The leaf of each person's last revocation of a token, by the names of what they do.

    ``WAITING`` for one that has no leaf yet. Times would say less: clocks are put back.
    """
    query = _QUERY.add_columns(_LEAF).where(token_revocations.c.revoked_at.is_not(None))
    revoked = connection.execute(query.order_by(_LEAF))
    return {_token(row).actor.name: row.leaf for row in revoked}


def _person(text: str) -> str:
    """The name under which everything that a person does is recorded."""
    if PERSON.fullmatch(text) is None:
        raise TokenError(
            f"the person {text[:80]!r} is not valid; use 1 to 64 of the letters A to Z, digits and "
            ". _ @ + -, or oidc: and the person's subject at the OpenID provider"
        )
    return text if text.startswith("oidc:") else f"person:{text}"


def _require_of_team(team: str, scopes: Iterable[Scope]) -> None:
    if TEAM_NAME.fullmatch(team) is None:
        raise TokenError(
            f"the team {team[:80]!r} is not valid; use 1 to 64 of the letters a to z, digits "
            "and -, starting and ending with a letter or digit"
        )
    if wrong := sorted(NEVER_OF_A_TEAM & set(scopes)):
        raise TokenError(f"the scope {wrong[0]} is for the whole organisation; omit it or the team")


def _serves(
    scopes: Iterable[Scope], queues: Iterable[str], datasets: Iterable[str]
) -> dict[str, list[str]]:
    """What a worker's token names; nothing for another token."""
    named = {"queues": sorted(set(queues)), "datasets": sorted(set(datasets))}
    for name in named["queues"] + named["datasets"]:
        if SERVED.fullmatch(name) is None:
            raise TokenError(
                f"{name[:80]!r} is not a valid name of a queue or data set; use 1 to 64 of the "
                "letters A to Z, digits and . _ -"
            )
    if Scope.WORK not in scopes:
        if any(named.values()):
            raise TokenError("queues and data sets require the scope work; add it")
        return {}
    return named if any(named.values()) else {"queues": sorted(DEFAULT_QUEUE.queues)}


def _if_same(stored: tuple[Token, str] | None, text: TokenText) -> Token | None:
    digest = stored[1] if stored is not None else "0" * 64
    same = hmac.compare_digest(digest, text.digest)
    return stored[0] if stored is not None and same else None


def _find(connection: Connection, token_id: str) -> Token | None:
    row = connection.execute(_ONE, {"token_id": token_id}).first()
    return None if row is None else _token(row)


def _token(row: Any) -> Token:
    known = {item.value for item in Scope}
    serves = DEFAULT_QUEUE
    if row.serves is not None:
        named = json.loads(row.serves).items()
        serves = Serves(**{kind: frozenset(names) for kind, names in named})
    # A scope that a later release knew is none that we could grant.
    scopes = tuple(Scope(entry) for entry in row.scopes.split() if entry in known)
    facts = {**row._mapping, "scopes": scopes, "serves": serves}
    return Token(**{field.name: facts[field.name] for field in fields(Token)})
