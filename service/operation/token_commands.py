"""``affidavit tokens new|list|revoke``: manage tokens on the database's machine.

The commands require no token, because everybody with access to the database is its operator. The
log records the account of the machine that ran them.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from affidavit.service.identity.scopes import Scope

if TYPE_CHECKING:
    from affidavit.service.identity.tokens import Token, TokenRepository

tokens = typer.Typer(
    help="Manage the service's access tokens.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@tokens.command("new")
def _new(
    name: Annotated[str, typer.Option(help="Name of the holder, as certificates show it.")],
    scope: Annotated[
        list[Scope], typer.Option(help="submit, approve, audit, work or admin; repeatable.")
    ],
    days: Annotated[int, typer.Option(help="Days until the token expires, 1 to 366.")] = 90,
    person: Annotated[
        str | None,
        typer.Option(
            help="Owner, so that all tokens of a person count as one; oidc:SUBJECT for a person "
            "who also signs in."
        ),
    ] = None,
    team: Annotated[
        str | None, typer.Option(help="Team whose plans, runs and data sets it sees.")
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(help="Queue whose runs a worker claims; repeatable, default if omitted."),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="Data set whose reservations a worker commits and settles by hand; repeatable."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print it; it is shown only once."""
    with _repository() as (store, now):
        token, text = store.new(
            name,
            scope,
            days,
            by=operator(),
            at=now,
            person=person,
            team=team,
            queues=queue or (),
            datasets=dataset or (),
        )
    if as_json:
        typer.echo(json.dumps({**_record(token), "token": text.text}))
        return
    # Only the token is on standard output, so that it can be piped to a secret store.
    typer.echo(
        f"token {token.id} for {token.name} ({', '.join(token.scopes)}), valid until "
        f"{token.expires_at:%Y-%m-%d}. It is shown this once:",
        err=True,
    )
    typer.echo(text.text)


@tokens.command("list")
def _list(as_json: JsonOption = False) -> None:
    """List all tokens with their expiry and last use."""
    with _repository() as (store, now):
        listed = store.list_all()
    if as_json:
        typer.echo(json.dumps({"tokens": [_record(token) for token in listed]}))
        return
    for token in listed:
        used = f"used {token.last_used_at:%Y-%m-%d %H:%M}" if token.last_used_at else "never used"
        scopes = ",".join(token.scopes) + (token.serves_text and f" ({token.serves_text})")
        parts = [token.id, token.name, scopes, _state(token, now), used]
        parts += [] if token.person is None else [f"of {token.person}"]
        parts += [] if token.team is None else [f"in {token.team}"]
        typer.echo("  ".join(parts))
    if not listed:
        typer.echo("No tokens yet; run `affidavit tokens new`.", err=True)


@tokens.command("revoke")
def _revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id from `tokens list`.")],
    reason: Annotated[str, typer.Option(help="Reason for the audit log.")] = "",
) -> None:
    """Revoke a token immediately."""
    with _repository() as (store, now):
        revoked = store.revoke(token_id, reason, by=operator(), at=now)
    typer.echo(f"{revoked.id} of {revoked.name} is revoked.")


@contextmanager
def _repository() -> Iterator[tuple[TokenRepository, datetime]]:
    """Open the token repository, and read the database's time."""
    # The help of a command needs no database.
    from affidavit.service.core.clock import DatabaseClock
    from affidavit.service.core.database import open_engine
    from affidavit.service.identity.tokens import TokenRepository
    from affidavit.service.operation.database_admin import require_head
    from affidavit.service.settings import Settings

    engine = open_engine(Settings.from_environment().database_url)
    try:
        require_head(engine)
        yield TokenRepository(engine), DatabaseClock(engine).now()
    finally:
        engine.dispose()


def operator() -> str:
    """Return the account that runs the command, as the log names it."""
    try:
        return f"operator:{pwd.getpwuid(os.getuid()).pw_name}"[:255]
    except KeyError:
        return f"operator:uid-{os.getuid()}"


def _state(token: Token, now: datetime) -> str:
    if token.revoked_at is not None:
        return f"revoked {token.revoked_at:%Y-%m-%d}"
    verb = "expired" if token.expires_at <= now else "until"
    return f"{verb} {token.expires_at:%Y-%m-%d}"


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
