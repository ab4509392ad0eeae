"""``affidavit tokens new|list|revoke``: tokens, made where the database is.

Whoever can reach the database's file or knows its password is its operator already, so
these commands ask for no token; the log says which account of the machine ran them.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import sys
from datetime import datetime
from typing import Any

from affidavit.service.clock import DatabaseClock
from affidavit.service.database import open_engine
from affidavit.service.identity.actor import Scope
from affidavit.service.identity.tokens import (
    LONGEST_DAYS,
    Token,
    TokenError,
    TokenRepository,
)
from affidavit.service.operation.database_admin import require_head
from affidavit.service.settings import Settings

DAYS = 90


def add_parser(commands: Any) -> None:
    """Add ``tokens`` and what stands below it to the service's ``commands``."""
    tokens = commands.add_parser("tokens", help="manage access tokens")
    tokens.set_defaults(run=run)
    verbs = tokens.add_subparsers(dest="verb", required=True)
    new = verbs.add_parser("new", help="create a token; it is shown once")
    new.add_argument("--name", required=True, help="the holder's name, as certificates show it")
    new.add_argument(
        "--person",
        help="the person it belongs to, whose tokens count as one; oidc:SUBJECT for a person who "
        "also signs in",
    )
    new.add_argument("--team", help="team whose plans, runs and data sets it sees")
    new.add_argument(
        "--queue", action="append", help="queue whose runs a worker claims; default if omitted"
    )
    new.add_argument(
        "--dataset",
        action="append",
        help="data set whose reservations a worker commits and settles by hand",
    )
    new.add_argument("--scope", action="append", required=True, help=", ".join(Scope))
    new.add_argument(
        "--days", type=int, default=DAYS, help=f"1 to {LONGEST_DAYS}, {DAYS} if omitted"
    )
    new.add_argument("--json", action="store_true")
    listing = verbs.add_parser("list", help="list tokens, without their secrets")
    listing.add_argument("--json", action="store_true")
    revoke = verbs.add_parser("revoke", help="revoke a token")
    revoke.add_argument("id", help="the token's id, as tokens list shows it")
    revoke.add_argument("--reason", default="", help="one line, recorded in the log")


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Run one of them; raises ``TokenError``, ``SchemaNotAtHead`` and SQLAlchemy's errors."""
    engine = open_engine(settings.database_url)
    try:
        require_head(engine)
        store, now = TokenRepository(engine), DatabaseClock(engine).now
        match options.verb:
            case "new":
                _new(store, options, now())
            case "list":
                _list(store, now(), as_json=options.json)
            case _:
                revoked = store.revoke(options.id, options.reason, by=operator(), at=now())
                _say(f"{revoked.id} of {revoked.name} is revoked and no longer lets anybody in.")
    finally:
        engine.dispose()


def operator() -> str:
    """The account of this machine that runs the command, as the log names it."""
    try:
        return f"operator:{pwd.getpwuid(os.getuid()).pw_name}"[:255]
    except KeyError:
        return f"operator:uid-{os.getuid()}"


def _new(store: TokenRepository, options: argparse.Namespace, now: datetime) -> None:
    token, text = store.new(
        options.name,
        _scopes(options.scope),
        options.days,
        by=operator(),
        at=now,
        person=options.person,
        team=options.team,
        queues=options.queue or (),
        datasets=options.dataset or (),
    )
    if options.json:
        _say(json.dumps({**_record(token), "token": text.text}))
        return
    # The token alone on standard output, so that it can be piped to where it is kept.
    print(  # noqa: T201  # what was asked for
        f"token {token.id} for {token.name} ({', '.join(token.scopes)}), valid until "
        f"{token.expires_at:%Y-%m-%d}. It is shown this once:",
        file=sys.stderr,
    )
    _say(text.text)


def _scopes(names: list[str]) -> list[Scope]:
    unknown = [name for name in names if name not in set(Scope)]
    if unknown:
        raise TokenError(
            f"--scope {unknown[0][:80]!r} is not known; give one of {', '.join(Scope)}"
        )
    return [Scope(name) for name in names]


def _list(store: TokenRepository, now: datetime, *, as_json: bool) -> None:
    tokens = store.all()
    if as_json:
        _say(json.dumps({"tokens": [_record(token) for token in tokens]}))
        return
    for token in tokens:
        used = f"used {token.last_used_at:%Y-%m-%d %H:%M}" if token.last_used_at else "never used"
        scopes = ",".join(token.scopes) + (token.serves_text and f" ({token.serves_text})")
        _say(f"{token.id}  {token.name}  {scopes}  {_state(token, now)}  {used}{_whose(token)}")
    if not tokens:
        print("No tokens yet; run `affidavit tokens new`.", file=sys.stderr)  # noqa: T201


def _state(token: Token, now: datetime) -> str:
    if token.revoked_at is not None:
        return f"revoked {token.revoked_at:%Y-%m-%d}"
    verb = "expired" if token.expires_at <= now else "until"
    return f"{verb} {token.expires_at:%Y-%m-%d}"


def _whose(token: Token) -> str:
    person = "" if token.person is None else f"  of {token.person}"
    return person if token.team is None else f"{person}  in {token.team}"


def _record(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "person": token.person,
        "team": token.team,
        "scopes": list(token.scopes),
        "queues": sorted(token.serves.queues) if Scope.WORK in token.scopes else [],
        "datasets": sorted(token.serves.datasets),
        "created_at": _instant(token.created_at),
        "created_by": token.created_by,
        "expires_at": _instant(token.expires_at),
        "revoked_at": _instant(token.revoked_at),
        "last_used_at": _instant(token.last_used_at),
    }


def _instant(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat().replace("+00:00", "Z")


def _say(line: str) -> None:
    print(line)  # noqa: T201  # what was asked for
