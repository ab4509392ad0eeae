"""What the commands that talk to a running service share: its address, a token, its answers.

The address is ``--server`` or ``AFFIDAVIT_SERVER``; the token is ``AFFIDAVIT_TOKEN`` and
nothing else, because what stands on a command line is there for every user of a machine
to read; a text that can be no token ends the command (exit code 2) and is not repeated. A
service that cannot be reached, or that cannot answer now, decides nothing (exit code 3); one
that refuses is told of with its code (exit code 1).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.markup import escape

from affidavit.gate.console import err, stop
from affidavit.gate.exits import Exit

SERVER = "http://127.0.0.1:8321"
SECONDS = 30.0
PAUSE = 1.0
"""Seconds before events are asked for again."""
MOST = 30
"""How often in a row that is in vain."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What the service takes for one (RFC 6750)."""

ServerOption = Annotated[
    str, typer.Option("--server", envvar="AFFIDAVIT_SERVER", help="Where the service answers.")
]
CertificateArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The certificate's id, sha256: and 64 digits.")
]


def ask(server: str, method: str, path: str, document: Any = None) -> httpx.Response:
    """The service's answer if it is a good one; otherwise tell of it and end the command."""
    url = f"{server.rstrip('/')}{path}"
    body: dict[str, Any] = {} if document is None else {"json": document}
    try:
        answer = httpx.request(method, url, headers=authorization(), timeout=SECONDS, **body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _end(f"{server} did not answer as a service does: {error}", Exit.UNDECIDED)
    if not answer.is_success:
        _end_by(answer)
    return answer


def authorization() -> dict[str, str]:
    """The header with the token, if there is one.

    Raises ``typer.Exit`` for a text that is none, which is a secret all the same and not shown.
    """
    token = os.environ.get("AFFIDAVIT_TOKEN")
    if not token:
        return {}
    if _TOKEN.fullmatch(token) is None:
        stop("AFFIDAVIT_TOKEN is not a token: one has letters A to Z, digits and . _ ~ + / - =.")
    return {"authorization": f"Bearer {token}"}


def _end_by(answer: httpx.Response) -> NoReturn:
    """Tell of a problem and end the command."""
    try:
        problem = answer.json()
        told = f"{problem['code']}: {problem['detail']}"
    except (ValueError, KeyError, TypeError) as error:
        told, code = f"{answer.url} did not answer as a service does: {error}", Exit.UNDECIDED
    else:
        code = Exit.UNDECIDED if answer.status_code >= 500 else Exit.BLOCKED
    _end(told, code)


def events(server: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events, name and data, until the service says that all were told.

    A stream that ends is asked for again from the last event on. A service that cannot be reached,
    or cannot answer now, ends the command when that does not change for a while.
    """
    url, last, in_vain = f"{server.rstrip('/')}{path}", "", 0
    while True:
        headers = {**authorization(), **({"last-event-id": last} if last else {})}
        try:
            with httpx.stream("GET", url, headers=headers, timeout=SECONDS) as answer:
                if answer.status_code == 204:
                    return
                if answer.is_success:
                    for event in _blocks(answer.iter_lines()):
                        last = event.get("id", last)
                        if "data" in event:
                            yield event.get("event", "message"), dict(json.loads(event["data"]))
                            in_vain = -1
                    in_vain = -1
                elif answer.read() is not None and (answer.status_code < 500 or in_vain == MOST):
                    _end_by(answer)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, RecursionError) as error:
            if in_vain == MOST:
                _end(f"{server} did not answer as a service does: {error}", Exit.UNDECIDED)
        in_vain += 1
        time.sleep(PAUSE)


def _blocks(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """The fields of each block that ended (WHATWG HTML, section 9.2)."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name:
            fields[name] = value.removeprefix(" ")
        elif not line:
            yield fields
            fields = {}


def document_of(answer: httpx.Response) -> Any:
    """The JSON of an answer; ends the command if there is none."""
    try:
        return answer.json()
    except ValueError:
        _end(f"{answer.url} did not answer in JSON", Exit.UNDECIDED)


def _end(told: str, code: Exit) -> NoReturn:
    err.print(f"[red]✗[/] {escape(told)}", highlight=False)
    raise typer.Exit(code)
