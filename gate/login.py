"""``affidavit login`` and ``affidavit open``: a service's token, and its pages."""

from __future__ import annotations

import sys
import webbrowser
from typing import Annotated

import typer

from affidavit.client import Client, Problem, Unreachable, segment
from affidavit.gate.client import (
    SERVER,
    ServerOption,
    require_token,
    require_url,
    store_token,
)
from affidavit.gate.console import fail, say, stop_unwritable
from affidavit.gate.exit_codes import Exit


def login(server: ServerOption = SERVER) -> None:
    """Check a token with a service, and store it for the commands that call that service.

    The token is asked for, or read from standard input. AFFIDAVIT_TOKEN goes before a stored one.
    """
    require_url(server)
    if sys.stdin.isatty():
        token = typer.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline().strip()
    require_token(token, "the token")
    try:
        Client(server, token=token).get("/v1/certificates", {"limit": "1"})
    except Unreachable as error:
        fail(str(error), Exit.UNDECIDED)
    except Problem as problem:
        if problem.status != 403:  # a valid token without this scope
            fail(str(problem), Exit.UNDECIDED if problem.status >= 500 else Exit.BLOCKED)
    try:
        path = store_token(server, token)
    except OSError as error:
        stop_unwritable(str(error.filename), error)
    say(f"stored in {path}")


def open(  # the command's name
    certificate: Annotated[
        str | None, typer.Argument(metavar="ID", help="Certificate id; default: the overview.")
    ] = None,
    server: ServerOption = SERVER,
) -> None:
    """Open the service's pages, or a certificate, in a browser, and print the address."""
    require_url(server)
    path = "/" if certificate is None else f"/certificates/{segment(certificate)}"
    url = server.rstrip("/") + path
    say(url)
    webbrowser.open(url)
