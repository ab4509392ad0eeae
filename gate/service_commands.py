"""Commands for a service: ``login``, ``open``, ``ledger``, ``approve``, ``revoke``, ``status``.

The service decides, and the commands print its answer. Its address is ``--server`` or
``AFFIDAVIT_SERVER``. Every user of a machine can read command lines, so the token comes from
``AFFIDAVIT_TOKEN`` or from the file in which ``affidavit login`` stored it. An invalid token is
never printed.

Exit codes: 0 done, 1 the service refused, 2 usage or a malformed request, 3 no answer.
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
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.markup import escape

from affidavit import certificate as certificates
from affidavit import client as service_client
from affidavit import trust as trusts
from affidavit.accountants import decimal_down, decimal_up
from affidavit.gate.console import fail, out, print_json, say, stop, stop_unwritable, write
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import DEFAULT_SERVER, JsonOption, ServerOption, command_group
from affidavit.gate.render import upper_bound
from affidavit.trust import home, write_atomically

if TYPE_CHECKING:
    from affidavit.client import CertificateAnswer, Client, Ledger, Reservation, ResponseModel

TIMEOUT_SECONDS = 30.0
LEDGER_TIMEOUT_SECONDS = 150.0
"""The service may have to compose many runs."""
MALFORMED_STATUSES = (400, 413, 415, 422)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""Syntax of a bearer token (RFC 6750)."""
_URL = re.compile(r"https?://[!-~]+")

CertificateArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Certificate id: sha256: and 64 hexadecimal digits.")
]
DigestOption = Annotated[
    str | None, typer.Option("--digest", help="The envelope_digest that you reviewed.")
]
DatasetArgument = Annotated[str, typer.Argument(help="Name of the data set, as in plans.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Idempotency key: repeating a request has no further effect."),
]


# ---- the connection -----------------------------------------------------------------


@contextmanager
def connect(
    server: str,
    token: str | None = None,
    *,
    timeout: float = TIMEOUT_SECONDS,
    malformed: Exit = Exit.BLOCKED,
) -> Iterator[Client]:
    """Connect with ``token`` or the stored one; report errors of the client and exit.

    ``malformed`` is the exit code for a request that the service calls malformed.
    """
    require_url(server)
    try:
        yield service_client.Client(server, token=token or token_for(server), timeout=timeout)
    except service_client.Unreachable as error:
        fail(f"{error}. Start it with affidavit serve, or correct --server.", Exit.UNDECIDED)
    except service_client.Problem as problem:
        if problem.status in MALFORMED_STATUSES:
            fail(str(problem), malformed)
        fail(str(problem), Exit.UNDECIDED if problem.status >= 500 else Exit.BLOCKED)


def require_url(server: str) -> None:
    """Exit unless ``server`` is an HTTP URL."""
    try:
        valid = _URL.fullmatch(server) is not None and urlsplit(server).port != 0
    except ValueError:
        valid = False
    if not valid:
        stop(f"--server {server[:80]} is not a URL: use http://HOST or https://HOST.")


def token_for(server: str) -> str | None:
    """Return the token in ``AFFIDAVIT_TOKEN``, or the one that ``affidavit login`` stored."""
    if token := os.environ.get("AFFIDAVIT_TOKEN"):
        _require_token(token, "AFFIDAVIT_TOKEN")
        return token
    stored = _stored_tokens().get(server.rstrip("/"))
    return stored if isinstance(stored, str) else None


def credentials_file() -> Path:
    """Return the path of the file with stored tokens."""
    return home() / "credentials.json"


def _stored_tokens() -> dict[str, object]:
    try:
        tokens = json.loads(credentials_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return tokens if isinstance(tokens, dict) else {}


def _require_token(token: str, name: str) -> None:
    if _TOKEN.fullmatch(token) is None:
        stop(f"{name} is not valid: use letters A to Z, digits and . _ ~ + / - = only.")


def login(server: ServerOption = DEFAULT_SERVER) -> None:
    """Check a token with a service, and store it for the commands that call that service.

    Prompts for the token, or reads it from standard input. AFFIDAVIT_TOKEN overrides a stored
    token.
    """
    require_url(server)
    if sys.stdin.isatty():
        token = typer.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline().strip()
    if not token:
        stop("no token was given; pipe one to standard input, or run login on a terminal.")
    _require_token(token, "the token")
    with connect(server, token) as client:
        try:
            client.get("/v1/certificates", {"limit": "1"})
        except service_client.Problem as problem:
            if problem.status != 403:  # a valid token without this scope
                raise
    path = credentials_file()
    tokens = {**_stored_tokens(), server.rstrip("/"): token}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(tokens, indent=1) + "\n").encode(), mode=0o600)
    except OSError as error:
        stop_unwritable(str(error.filename), error)
    say(f"stored in {path}")


def open(  # the command's name
    certificate: Annotated[
        str | None, typer.Argument(metavar="ID", help="Certificate id; default: the overview.")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Open the service's pages, or a certificate, in a browser, and print the address."""
    require_url(server)
    path = "/" if certificate is None else f"/certificates/{service_client.segment(certificate)}"
    url = server.rstrip("/") + path
    say(url)
    webbrowser.open(url)


def print_answer(answer: ResponseModel, text: str, *, as_json: bool) -> None:
    """Print an answer of the service as JSON, or ``text``."""
    if as_json:
        print_json(answer.model_dump(mode="json"))
    else:
        say(text)


# ---- ledgers ------------------------------------------------------------------------


ledger = command_group("Show and spend the privacy budgets of data sets on a service.")


@ledger.command("show")
def ledger_show(
    dataset: DatasetArgument,
    certificate: Annotated[
        str | None, typer.Option("--forecast", help="How many more runs of this certificate fit.")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show what a data set's budgets have spent, by each composition, and what remains."""
    with connect(server, timeout=LEDGER_TIMEOUT_SECONDS, malformed=Exit.USAGE) as client:
        ledgers = client.ledgers(dataset, certificate)
    if as_json:
        print_json({"items": [entry.model_dump(mode="json") for entry in ledgers]})
        return
    for entry in ledgers:
        _print_ledger(entry)


@ledger.command("reserve")
def ledger_reserve(
    dataset: DatasetArgument,
    certificate: Annotated[str, typer.Argument(help="Certificate id of the run.")],
    key: KeyOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Reserve the cost of a certified run; refused if it would exceed the budget."""
    with connect(server, timeout=LEDGER_TIMEOUT_SECONDS, malformed=Exit.USAGE) as client:
        reserved = client.reserve(dataset, certificate, key)
    print_answer(reserved, _reservation_line(reserved), as_json=as_json)


@ledger.command("release")
def ledger_release(
    reservation: Annotated[str, typer.Argument(metavar="ID", help="Id of the reservation.")],
    reason: Annotated[str, typer.Option("--reason", help="Reason for the audit log.")] = "",
    key: KeyOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Release the reservation of a run that never started."""
    with connect(server, timeout=LEDGER_TIMEOUT_SECONDS, malformed=Exit.USAGE) as client:
        released = client.release(reservation, reason, key)
    print_answer(released, _reservation_line(released), as_json=as_json)


def _print_ledger(entry: Ledger) -> None:
    from rich.table import Table

    budget, spent = entry.budget, entry.spent
    exhausted = " [red]exhausted[/]" if entry.exhausted else ""
    out.print(
        f"{escape(entry.dataset)}, one {entry.unit}, {entry.adjacency}: budget ε = "
        f"{decimal_down(budget.epsilon)} at δ = {decimal_down(budget.delta)} "
        f"(version {budget.version}){exhausted}"
    )
    composed = None if spent.composed is None else spent.composed.epsilon
    table = Table("", "ε", box=None)
    for label, epsilon in (
        ("spent, by the privacy filter (decides)", upper_bound(spent.filter.epsilon)),
        (
            "spent, if all runs had been fixed in advance",
            "not composed by any accountant" if composed is None else upper_bound(composed.upper),
        ),
        (f"plain sum, δ = {upper_bound(spent.sum.delta)}", upper_bound(spent.sum.epsilon)),
        ("remaining, by the privacy filter", decimal_down(entry.remaining.epsilon)),
    ):
        table.add_row(label, epsilon)
    out.print(table)
    if entry.forecast is not None:
        say(entry.forecast.message)
    for reservation in entry.entries:
        say(f"  {_reservation_line(reservation)}")


def _reservation_line(reservation: Reservation) -> str:
    steps, charged = reservation.steps, reservation.charged
    progress = f"{steps.run} of " if steps.run is not None else ""
    return (
        f"{reservation.id} {reservation.state}: {reservation.name}, {progress}"
        f"{steps.certified} steps, ε ≤ {upper_bound(charged.epsilon)} at "
        f"δ = {upper_bound(charged.delta)}"
    )


# ---- certificates -------------------------------------------------------------------


def approve(
    certificate: CertificateArgument,
    digest: DigestOption = None,
    comment: Annotated[str, typer.Option(help="Comment to record in the certificate.")] = "",
    reject: Annotated[
        bool, typer.Option("--reject", help="Reject instead; requires --comment.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Approve or reject a pending certificate; its requester cannot.

    Without --digest, the certificate is shown and nothing is decided.
    """
    _require_digest("a certificate id", certificate)
    if digest is None:
        with connect(server) as client:
            _print_certificate(client.certificate(certificate))
        stop("nothing was decided; to approve this certificate, pass its digest with --digest.")
    _require_digest("--digest", digest)
    if reject and not comment.strip():
        stop("--reject needs --comment with the reason.")
    decision = "reject" if reject else "approve"
    with connect(server) as client:
        result = client.approve(
            certificate, {"decision": decision, "envelope": digest, "comment": comment}
        )
    if as_json:
        print_json(result.document)
    else:
        _print_certificate(result)


def revoke(
    certificate: CertificateArgument,
    reason: Annotated[
        str,
        typer.Option(
            help="plan_error, accounting_error, run_error, data_withdrawn, policy_violation, "
            "key_compromise or other."
        ),
    ],
    text: Annotated[str, typer.Option("--text", help="Explanation of the reason.")],
    digest: DigestOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Revoke a certificate permanently: its current issue and all earlier ones."""
    _require_digest("a certificate id", certificate)
    if digest is not None:
        _require_digest("--digest", digest)
    envelope = {} if digest is None else {"envelope": digest}
    with connect(server) as client:
        revocation, new = client.revoke(certificate, {"code": reason, "reason": text, **envelope})
    state = "is revoked" if new else "was already revoked"
    line = (
        f"{revocation.certificate_id} {state} (issue {revocation.issue}, "
        f"{revocation.code}, by {revocation.revoked_by} at {revocation.at.isoformat()})"
    )
    print_answer(revocation, line, as_json=as_json)


def status(
    file: Annotated[
        Path | None, typer.Option("--out", help="Write the list to this file, for verify.")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Fetch the signed status list of revoked certificates, for verify."""
    with connect(server) as client:
        content = client.status_list()
    try:
        status_list = certificates.StatusList.model_validate_json(
            trusts.read_envelope(json.loads(content)).payload
        )
    except (trusts.BadEnvelope, ValueError, RecursionError):
        fail(f"{server} did not return a status list", Exit.UNDECIDED)
    if file is not None:
        write(file, content)
    if as_json:
        print_json(status_list.model_dump(mode="json", by_alias=True))
        return
    for entry in status_list.listed:
        say(
            f"{entry.certificate_id} issue {entry.issue} {entry.status} since {entry.since} "
            f"({entry.reason})"
        )
    say(
        f"status list {status_list.sequence} of {status_list.issuer}: {len(status_list.listed)} "
        f"listed, valid until {status_list.next_update}"
    )


def _require_digest(name: str, value: str) -> None:
    if re.fullmatch(service_client.DIGEST, value) is None:
        stop(f"{name} must be sha256: and 64 hexadecimal digits.")


def _print_certificate(answer: CertificateAnswer) -> None:
    """Print the facts on which an approver decides."""
    result, certificate = answer.document, answer.document["certificate"]
    epsilon, delta = result.get("epsilon"), result.get("delta")
    bound = ""
    if epsilon and delta:
        bound = f", ε ≤ {decimal_up(epsilon['upper'])} at δ = {decimal_up(delta['upper'])}"
    say(f"{answer.verdict}{bound} under {result.get('adjacency')}")
    for name in ("id", "issue", "status", "envelope_digest"):
        say(f"{name} {certificate.get(name)}")
