"""``affidavit ledger``: a running service's budgets, and reservations against them.

The service decides; this command asks it and prints what it says. Its address is ``--server``
or ``AFFIDAVIT_SERVER``, the token the value of ``AFFIDAVIT_TOKEN``. Exit codes: 0 done, 1 the
service refused (over budget, a certificate that cannot be reserved for), 2 what was asked is
malformed, 3 the service cannot be asked.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from affidavit.gate.console import err, out
from affidavit.gate.exits import Exit
from affidavit.gate.files import print_json
from affidavit.gate.options import JsonOption
from affidavit.gate.service_client import SERVER, ServerOption, authorization

SECONDS = 150.0

ledger = typer.Typer(help="Budgets of data sets, on a running service.", no_args_is_help=True)

DatasetArgument = Annotated[str, typer.Argument(help="The data set, as plans name it.")]
ReservationArgument = Annotated[str, typer.Argument(metavar="ID", help="The reservation.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Idempotency key: the same one again does nothing twice."),
]


@ledger.command("show")
def show(
    dataset: DatasetArgument,
    certificate: Annotated[
        str | None, typer.Option("--forecast", help="How many more runs of this certificate fit.")
    ] = None,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """What was spent of a data set's budgets, by each composition, and what is left."""
    query = {} if certificate is None else {"certificate": certificate}
    found = _ask("GET", server, f"/v1/ledgers/{_segment(dataset)}", query=query)
    if as_json:
        print_json(found)
        return
    for item in found["ledgers"]:
        _print_ledger(item)


@ledger.command("reserve")
def reserve(
    dataset: DatasetArgument,
    certificate: Annotated[str, typer.Argument(help="The id of the run's certificate.")],
    key: KeyOption = None,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Reserve the cost of a certified run; refused when it would pass the budget."""
    path = f"/v1/ledgers/{_segment(dataset)}/reservations"
    found = _ask("POST", server, path, {"certificate": certificate}, key)
    _print_reservation(found, as_json=as_json)


@ledger.command("release")
def release(
    reservation: ReservationArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is logged.")] = "",
    key: KeyOption = None,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Give back what was reserved for a run that never began."""
    path = f"/v1/reservations/{_segment(reservation)}/release"
    found = _ask("POST", server, path, {"reason": reason}, key)
    _print_reservation(found, as_json=as_json)


def _segment(name: str) -> str:
    """``name`` as one part of a path, which no client takes for a step within it."""
    return "%2E" * len(name) if name in (".", "..") else quote(name, safe="")


def _ask(
    method: str,
    server: str,
    path: str,
    body: dict[str, Any] | None = None,
    key: str | None = None,
    query: dict[str, str] | None = None,
) -> Any:
    """The service's answer; ends the command where there is none or it is a refusal."""
    headers = authorization()
    if key is not None:
        headers["idempotency-key"] = key
    try:
        answer = httpx.request(
            method,
            f"{server.rstrip('/')}{path}",
            json=body,
            params=query or None,
            headers=headers,
            timeout=SECONDS,
        )
        said = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        err.print(f"[red]error[/] {escape(server)}: {escape(str(error))}", highlight=False)
        raise typer.Exit(Exit.UNDECIDED) from None
    if not answer.is_success:
        raise _refused(answer.status_code, said)
    return said


def _refused(status: int, said: Any) -> typer.Exit:
    """The end of the command that was refused, once its reason is told."""
    code, detail = "http_error", f"status {status}"
    if isinstance(said, dict):
        code, detail = str(said.get("code", code)), str(said.get("detail", detail))
    err.print(f"[red]✗[/] {escape(code)}: {escape(detail)}", highlight=False)
    if status in (400, 413, 415, 422):
        return typer.Exit(Exit.USAGE)
    return typer.Exit(Exit.UNDECIDED if status >= 500 else Exit.BLOCKED)


def _print_ledger(found: dict[str, Any]) -> None:
    budget, spent = found["budget"], found["spent"]
    full = " [red]exhausted[/]" if found["exhausted"] else ""
    out.print(
        f"{escape(found['dataset'])}, one {found['unit']}, {found['adjacency']}: budget ε = "
        f"{budget['epsilon']} at δ = {budget['delta']} (version {budget['version']}){full}",
        highlight=False,
    )
    composed = spent["composed"]["epsilon"]
    rows = [
        ("spent, by the filter (decides)", spent["filter"]["epsilon"]),
        ("spent, had all been fixed in advance", _upper(composed)),
        (f"plain sum, δ = {spent['sum']['delta']}", spent["sum"]["epsilon"]),
        ("left, by the filter", found["remaining"]["epsilon"]),
    ]
    table = Table("", "ε", box=None)
    for what, epsilon in rows:
        table.add_row(what, epsilon)
    out.print(table)
    if "forecast" in found:
        out.print(found["forecast"]["message"], highlight=False)
    for item in found["entries"]:
        out.print(f"  {_line(item)}", highlight=False)


def _print_reservation(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        out.print(_line(found), highlight=False)


def _line(each: dict[str, Any]) -> str:
    steps = each["steps"]
    ran = f"{steps['run']} of " if steps["run"] is not None else ""
    return (
        f"{each['id']} {each['state']}: {escape(str(each['name']))}, {ran}{steps['certified']} "
        f"steps, ε ≤ {each['charged']['epsilon']} at δ = {each['charged']['delta']}"
    )


def _upper(epsilon: dict[str, Any] | None) -> str:
    return "not composed by any engine" if epsilon is None else f"{epsilon['upper']:.6g}"
