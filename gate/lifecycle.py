"""``affidavit approve``, ``revoke`` and ``status``: what becomes of an issued certificate.

All three ask a running service. An approval names the digest of the envelope that the
approver saw; without one, ``approve`` shows what is there and decides nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from affidavit.certificate import BadEnvelope, StatusList, read_envelope
from affidavit.gate.console import err, out, stop, write
from affidavit.gate.exits import Exit
from affidavit.gate.files import print_json
from affidavit.gate.options import JsonOption
from affidavit.gate.service_client import (
    SERVER,
    CertificateArgument,
    ServerOption,
    ask,
    document_of,
)

DigestOption = Annotated[
    str | None,
    typer.Option("--digest", help="The envelope_digest of what you looked at."),
]
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def approve(
    certificate: CertificateArgument,
    digest: DigestOption = None,
    comment: Annotated[str, typer.Option(help="A word to stand in the certificate.")] = "",
    reject: Annotated[
        bool, typer.Option("--reject", help="Reject it instead; --comment says why.")
    ] = False,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Approve a certificate that awaits it, or reject it; who asked for it cannot."""
    path = _path(certificate)
    if digest is None:
        _show(document_of(ask(server, "GET", path)))
        stop("nothing was decided; give --digest with the digest above to approve exactly that.")
    _require_digest(digest)
    if reject and not comment.strip():
        stop("--reject needs --comment: say why.")
    decision = "reject" if reject else "approve"
    document = {"decision": decision, "envelope": digest, "comment": comment}
    result = document_of(ask(server, "POST", f"{path}/approvals", document))
    if as_json:
        print_json(result)
    else:
        _show(result)


def revoke(
    certificate: CertificateArgument,
    reason: Annotated[
        str,
        typer.Option(
            help="plan_error, accounting_error, run_error, data_withdrawn, policy_violation, "
            "key_compromise or other."
        ),
    ],
    text: Annotated[str, typer.Option("--text", help="The reason in words.")],
    digest: DigestOption = None,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Revoke a certificate for good: its current issue and all before it."""
    if digest is not None:
        _require_digest(digest)
    named = {} if digest is None else {"envelope": digest}
    document = {"code": reason, "reason": text, **named}
    answer = ask(server, "POST", f"{_path(certificate)}/revocation", document)
    kept = document_of(answer)
    if as_json:
        print_json(kept)
        return
    said = "is revoked" if answer.status_code == 201 else "was revoked before"
    out.print(
        f"{kept['certificate_id']} {said} (issue {kept['issue']}, {kept['code']}, "
        f"by {escape(kept['revoked_by'])} at {kept['at']})",
        highlight=False,
    )


def status(
    to: Annotated[
        Path | None, typer.Option("--out", help="Write the list to this file, for verify.")
    ] = None,
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Fetch the signed list of certificates that no longer count; verify checks it."""
    raw = ask(server, "GET", "/v1/status").content
    try:
        found = StatusList.model_validate_json(read_envelope(json.loads(raw)).payload)
    except (BadEnvelope, ValueError, RecursionError):
        err.print(f"[red]✗[/] {escape(server)} did not answer a status list", highlight=False)
        raise typer.Exit(Exit.UNDECIDED) from None
    if to is not None:
        write(to, raw)
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True))
        return
    for item in found.listed:
        out.print(
            f"{item.certificate_id} issue {item.issue} {item.status} since {item.since} "
            f"({escape(item.reason)})",
            highlight=False,
        )
    out.print(
        f"status list {found.sequence} of {escape(found.issuer)}: {len(found.listed)} listed, "
        f"good until {found.next_update}",
        highlight=False,
    )


def _path(certificate: str) -> str:
    if _DIGEST.fullmatch(certificate) is None:
        stop("a certificate's id is sha256: and 64 hexadecimal digits.")
    return f"/v1/certificates/{certificate}"


def _require_digest(digest: str) -> None:
    if _DIGEST.fullmatch(digest) is None:
        stop("--digest is sha256: and 64 hexadecimal digits.")


def _show(result: dict[str, Any]) -> None:
    """What an approver decides about, in a few lines."""
    certificate, epsilon, delta = (result.get(name) for name in ("certificate", "epsilon", "delta"))
    if not isinstance(certificate, dict):
        stop("the service did not answer a certificate.")
    bound = f", ε ≤ {epsilon['upper']} at δ = {delta['upper']}" if epsilon and delta else ""
    out.print(
        f"{escape(str(result.get('verdict')))}{bound} under {escape(str(result.get('adjacency')))}",
        highlight=False,
    )
    for name in ("id", "issue", "status", "envelope_digest"):
        out.print(f"{name} {escape(str(certificate.get(name)))}", highlight=False)
