"""``affidavit tokens``: who may use the service; run by the service, which has the database."""

from __future__ import annotations

from typing import Annotated

import typer

from affidavit.gate.service_program import become_service

tokens = typer.Typer(help="Tokens, by which a service knows who asks.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print a document instead of lines.")]


@tokens.command("new")
def new(
    name: Annotated[str, typer.Option(help="Who holds it, as certificates will say.")],
    scope: Annotated[
        list[str],
        typer.Option(help="submit, approve, audit, work or admin; give it again for more."),
    ],
    days: Annotated[int, typer.Option(help="For how many days it is valid, 1 to 366.")] = 90,
    person: Annotated[
        str | None,
        typer.Option(
            help="Whose it is, so that all their tokens count as one; oidc:SUBJECT for one who "
            "signs in too."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token; standard output is the token, which is shown this once."""
    scopes = [f"--scope={item}" for item in scope]
    whose = [] if person is None else [f"--person={person}"]
    given = [f"--name={name}", *scopes, *whose, f"--days={days}", *_json(as_json)]
    become_service("tokens", "new", *given)


@tokens.command("list")
def show(as_json: JsonOption = False) -> None:
    """The tokens that were made, with their expiry and last use."""
    become_service("tokens", "list", *_json(as_json))


@tokens.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `tokens list` shows it.")],
    reason: Annotated[str, typer.Option(help="A line for the log.")] = "",
) -> None:
    """End a token at once."""
    become_service("tokens", "revoke", f"--reason={reason}", "--", token_id)


def _json(as_json: bool) -> list[str]:
    return ["--json"] if as_json else []
