"""Commands for a running service: ``ledger``, ``approve``, ``revoke`` and ``status``.

The service decides; the commands print its answer. An approval names the digest of the envelope
that the approver saw; without one, ``approve`` shows the certificate and decides nothing. Exit
codes: 0 done, 1 the service refused, 2 usage or a malformed request, 3 no answer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from affidavit.accountants import decimal_down, decimal_up
from affidavit.certificate import BadEnvelope, StatusList, read_envelope
from affidavit.client import CertificateAnswer, Ledger, Reservation
from affidavit.gate.client import SERVER, ServerOption, connect
from affidavit.gate.console import fail, out, print_json, say, stop, write
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import JsonOption, command_group
from affidavit.gate.render import upper_bound

LEDGER_TIMEOUT = 150.0
"""Seconds; the service may have to compose many runs."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

CertificateArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Certificate id: sha256: and 64 hexadecimal digits.")
]
DigestOption = Annotated[
    str | None, typer.Option("--digest", help="The envelope_digest that you reviewed.")
]
DatasetArgument = Annotated[str, typer.Argument(help="Name of the data set, as in plans.")]
ReservationArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the reservation.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Idempotency key: repeating a request has no further effect."),
]

ledger = command_group("Show and spend the privacy budgets of data sets on a service.")


@ledger.command("show")
def ledger_show(
    dataset: DatasetArgument,
    certificate: Annotated[
        str | None, typer.Option("--forecast", help="How many more runs of this certificate fit.")
    ] = None,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show what a data set's budgets have spent, by each composition, and what remains."""
    with connect(server, timeout=LEDGER_TIMEOUT, malformed=Exit.USAGE) as client:
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
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Reserve the cost of a certified run; refused if it would exceed the budget."""
    with connect(server, timeout=LEDGER_TIMEOUT, malformed=Exit.USAGE) as client:
        reservation = client.reserve(dataset, certificate, key)
    _print_reservation(reservation, as_json=as_json)


@ledger.command("release")
def ledger_release(
    reservation: ReservationArgument,
    reason: Annotated[str, typer.Option("--reason", help="Reason for the audit log.")] = "",
    key: KeyOption = None,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Release the reservation of a run that never started."""
    with connect(server, timeout=LEDGER_TIMEOUT, malformed=Exit.USAGE) as client:
        released = client.release(reservation, reason, key)
    _print_reservation(released, as_json=as_json)


def approve(
    certificate: CertificateArgument,
    digest: DigestOption = None,
    comment: Annotated[str, typer.Option(help="Comment to record in the certificate.")] = "",
    reject: Annotated[
        bool, typer.Option("--reject", help="Reject instead; requires --comment.")
    ] = False,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Approve or reject a pending certificate; its requester cannot."""
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
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Revoke a certificate permanently: its current issue and all earlier ones."""
    _require_digest("a certificate id", certificate)
    if digest is not None:
        _require_digest("--digest", digest)
    envelope = {} if digest is None else {"envelope": digest}
    with connect(server) as client:
        revocation, new = client.revoke(certificate, {"code": reason, "reason": text, **envelope})
    if as_json:
        print_json(revocation.model_dump(mode="json"))
        return
    state = "is revoked" if new else "was already revoked"
    say(
        f"{revocation.certificate_id} {state} (issue {revocation.issue}, "
        f"{revocation.code}, by {revocation.revoked_by} at {revocation.at.isoformat()})"
    )


def status(
    file: Annotated[
        Path | None, typer.Option("--out", help="Write the list to this file, for verify.")
    ] = None,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Fetch the signed status list of revoked certificates, for verify."""
    with connect(server) as client:
        raw = client.status_list()
    try:
        status_list = StatusList.model_validate_json(read_envelope(json.loads(raw)).payload)
    except (BadEnvelope, ValueError, RecursionError):
        fail(f"{server} did not return a status list", Exit.UNDECIDED)
    if file is not None:
        write(file, raw)
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
    if DIGEST.fullmatch(value) is None:
        stop(f"{name} must be sha256: and 64 hexadecimal digits.")


def _print_certificate(answer: CertificateAnswer) -> None:
    """What an approver decides about, in a few lines."""
    result, certificate = answer.document, answer.document["certificate"]
    epsilon, delta = result.get("epsilon"), result.get("delta")
    bound = ""
    if epsilon and delta:
        bound = f", ε ≤ {decimal_up(epsilon['upper'])} at δ = {decimal_up(delta['upper'])}"
    say(f"{answer.verdict}{bound} under {result.get('adjacency')}")
    for name in ("id", "issue", "status", "envelope_digest"):
        say(f"{name} {certificate.get(name)}")


def _print_ledger(entry: Ledger) -> None:
    budget, spent = entry.budget, entry.spent
    full = " [red]exhausted[/]" if entry.exhausted else ""
    out.print(
        f"{escape(entry.dataset)}, one {entry.unit}, {entry.adjacency}: budget ε = "
        f"{decimal_down(budget.epsilon)} at δ = {decimal_down(budget.delta)} "
        f"(version {budget.version}){full}"
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


def _print_reservation(reservation: Reservation, *, as_json: bool) -> None:
    if as_json:
        print_json(reservation.model_dump(mode="json"))
    else:
        say(_reservation_line(reservation))


def _reservation_line(reservation: Reservation) -> str:
    steps, charged = reservation.steps, reservation.charged
    progress = f"{steps.run} of " if steps.run is not None else ""
    return (
        f"{reservation.id} {reservation.state}: {reservation.name}, {progress}"
        f"{steps.certified} steps, ε ≤ {upper_bound(charged.epsilon)} at "
        f"δ = {upper_bound(charged.delta)}"
    )
