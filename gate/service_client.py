"""What the commands that talk to a running service share: its address, a token, its answers.

The address is ``--server`` or ``AFFIDAVIT_SERVER``; the token is ``AFFIDAVIT_TOKEN`` and
nothing else, because what stands on a command line is there for every user of a machine
to read. A service that cannot be reached, or that cannot answer now, decides nothing
(exit code 3); one that refuses is told of with its code (exit code 1).
"""

from __future__ import annotations

import os
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.markup import escape

from affidavit.gate.console import err
from affidavit.gate.exits import Exit

SERVER = "http://127.0.0.1:8321"
SECONDS = 30.0

ServerOption = Annotated[
    str, typer.Option("--server", envvar="AFFIDAVIT_SERVER", help="Where the service answers.")
]
CertificateArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The certificate's id, sha256: and 64 digits.")
]


def ask(server: str, method: str, path: str, document: Any = None) -> httpx.Response:
    """The service's answer if it is a good one; otherwise tell of it and end the command."""
    token = os.environ.get("AFFIDAVIT_TOKEN")
    headers = {} if not token else {"authorization": f"Bearer {token}"}
    url = f"{server.rstrip('/')}{path}"
    body: dict[str, Any] = {} if document is None else {"json": document}
    try:
        answer = httpx.request(method, url, headers=headers, timeout=SECONDS, **body)
        problem = {} if answer.is_success else answer.json()
        told = "" if answer.is_success else f"{problem['code']}: {problem['detail']}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        _end(f"{server} did not answer as a service does: {error}", Exit.UNDECIDED)
    if not answer.is_success:
        _end(told, Exit.UNDECIDED if answer.status_code >= 500 else Exit.BLOCKED)
    return answer


def document_of(answer: httpx.Response) -> Any:
    """The JSON of an answer; ends the command if there is none."""
    try:
        return answer.json()
    except ValueError:
        _end(f"{answer.url} did not answer in JSON", Exit.UNDECIDED)


def _end(told: str, code: Exit) -> NoReturn:
    err.print(f"[red]✗[/] {escape(told)}", highlight=False)
    raise typer.Exit(code)
