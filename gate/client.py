"""The connection to a running service, for the commands that talk to it, and ``affidavit login``.

The address is ``--server`` or ``AFFIDAVIT_SERVER``. The token is read from ``AFFIDAVIT_TOKEN`` or
from what ``affidavit login`` stored in a file that only its owner can read, because every user of
a machine can read command lines; an invalid token is never printed. Commands exit with 2 for an
invalid token, with 3 when the service cannot be reached or fails, and with 1 when it refuses.
"""

from __future__ import annotations

import json
import os
import re
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from affidavit.certificate import home, write_atomically
from affidavit.client import Client, Problem, Unreachable, segment
from affidavit.gate.console import fail, say, stop, stop_unwritable
from affidavit.gate.exit_codes import Exit

SERVER = "http://127.0.0.1:8321"
TIMEOUT = 30.0
"""Seconds."""
MALFORMED = (400, 413, 415, 422)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""Syntax of a bearer token (RFC 6750)."""

_URL = re.compile(r"https?://[!-~]+")

ServerOption = Annotated[
    str, typer.Option("--server", envvar="AFFIDAVIT_SERVER", help="Base URL of the service.")
]


@contextmanager
def connect(
    server: str,
    token: str | None = None,
    *,
    timeout: float = TIMEOUT,
    malformed: Exit = Exit.BLOCKED,
) -> Iterator[Client]:
    """A client with ``token``, or that of the environment; its errors end the command.

    ``malformed`` is the exit code for a request that the service calls malformed.
    """
    require_url(server)
    try:
        yield Client(server, token=token or token_for(server), timeout=timeout)
    except Unreachable as error:
        fail(f"{error}. Start it with affidavit serve, or correct --server.", Exit.UNDECIDED)
    except Problem as problem:
        if problem.status in MALFORMED:
            fail(str(problem), malformed)
        fail(str(problem), Exit.UNDECIDED if problem.status >= 500 else Exit.BLOCKED)


def require_url(server: str) -> None:
    """End the command unless ``server`` is an HTTP URL."""
    try:
        valid = _URL.fullmatch(server) is not None and urlsplit(server).port != 0
    except ValueError:
        valid = False
    if not valid:
        stop(f"--server {server[:80]} is not a URL: use http://HOST or https://HOST.")


def token_for(server: str) -> str | None:
    """The token in ``AFFIDAVIT_TOKEN``, or else the one that ``affidavit login`` stored.

    An invalid one ends the command and is not printed.
    """
    token = os.environ.get("AFFIDAVIT_TOKEN")
    if not token:
        return stored_token(server)
    require_token(token, "AFFIDAVIT_TOKEN")
    return token


def require_token(token: str, name: str) -> None:
    """End the command unless ``token`` has the form of one; it is not printed."""
    if _TOKEN.fullmatch(token) is None:
        stop(f"{name} is not valid: use letters A to Z, digits and . _ ~ + / - = only.")


def credentials_file() -> Path:
    """Where tokens are stored."""
    return home() / "credentials.json"


def stored_token(server: str) -> str | None:
    """The token for ``server``; None without one, or where the file cannot be used."""
    token = _tokens().get(server.rstrip("/"))
    return token if isinstance(token, str) else None


def store_token(server: str, token: str) -> Path:
    """Store ``token`` for ``server`` and return the file; raises ``OSError``."""
    path = credentials_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tokens = {**_tokens(), server.rstrip("/"): token}
    write_atomically(path, (json.dumps(tokens, indent=1) + "\n").encode(), mode=0o600)
    return path


def _tokens() -> dict[str, object]:
    try:
        tokens = json.loads(credentials_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return tokens if isinstance(tokens, dict) else {}


def login(server: ServerOption = SERVER) -> None:
    """Check a token with a service, and store it for the commands that call that service.

    Prompts for the token, or reads it from standard input. AFFIDAVIT_TOKEN overrides what is
    stored.
    """
    require_url(server)
    if sys.stdin.isatty():
        token = typer.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline().strip()
    require_token(token, "the token")
    with connect(server, token) as client:
        try:
            client.get("/v1/certificates", {"limit": "1"})
        except Problem as problem:
            if problem.status != 403:  # a valid token without this scope
                raise
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
