"""``affidavit evidence`` and ``affidavit verify-evidence``: fetch and verify an evidence file.

Exit codes of ``verify-evidence``: 0 every step holds; 1 a step does not; 2 usage.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from affidavit import client as clients
from affidavit import evidence as evidences
from affidavit.gate.console import print_json, say, stop, usage_errors, write
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import (
    DEFAULT_SERVER,
    JsonOption,
    ServerOption,
    VerifierOptions,
    with_options,
)
from affidavit.gate.service_commands import connect
from affidavit.gate.verification_report import print_rejection, print_steps, steps_as_documents


def evidence(
    subject: Annotated[
        str, typer.Argument(metavar="ID", help="Id of a run, or of a certificate (sha256:…).")
    ],
    file: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("evidence.zip"),
    replay: Annotated[
        Path | None,
        typer.Option(help="Add what `affidavit replay --plan PLAN --record FILE` showed."),
    ] = None,
    stamp: Annotated[
        str | None,
        typer.Option(help="URL of an RFC 3161 timestamp authority, to add its timestamp."),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Fetch everything about a run or a certificate in one file, for an auditor."""
    kind = "certificates" if re.fullmatch(clients.DIGEST, subject) else "runs"
    record = None if replay is None else _read(replay)
    with connect(server) as client:
        content = client.evidence(kind, subject)
    if record is not None or stamp is not None:
        content = _completed(content, record, stamp)
    write(file, content)
    say(f"{file}: {len(content)} bytes. Check it with: affidavit verify-evidence {file}")


def _completed(content: bytes, replay: bytes | None, stamp: str | None) -> bytes:
    """Return the evidence file with a replay record and a timestamp."""
    authority = None if stamp is None else partial(clients.request_timestamp, url=stamp)
    try:
        return evidences.complete_evidence(content, replay, authority)
    except (evidences.EvidenceError, evidences.BadReplayRecord, clients.NoTimestamp) as error:
        stop(str(error))
    except ModuleNotFoundError:
        stop("timestamps need a client; run: pip install 'affidavit[timestamps]'")


@with_options
def verify_evidence(
    file: Annotated[Path, typer.Argument(help="Evidence file, as written by affidavit evidence.")],
    verifier: VerifierOptions,
    stamp_roots: Annotated[
        Path | None,
        typer.Option(help="Trusted root certificates (PEM) for the timestamp in the file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify an evidence file offline, step by step; exits 0 only if every step holds."""
    content = _read(file)
    with usage_errors(file):
        # The keyset must be valid today, but the certificate may have expired since the run.
        trusted, options = verifier.load(past_use=True)
    try:
        roots = None if stamp_roots is None else _read(stamp_roots)
        report = evidences.verify_evidence(content, trusted, options, roots)
    except evidences.EvidenceError as error:
        print_rejection(str(file), error, as_json=as_json)
        raise typer.Exit(Exit.BLOCKED) from None
    _print(report, as_json=as_json)


def _read(file: Path) -> bytes:
    from affidavit.evidence.evidence_file import MAX_BYTES

    try:
        with file.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        stop(f"cannot read {file}: {error.strerror}.")


def _print(report: evidences.EvidenceReport, *, as_json: bool) -> None:
    if as_json:
        steps = steps_as_documents(report.steps, report.unchecked)
        print_json({"verified": True, "about": dict(report.about), "steps": steps})
        return
    print_steps(report.steps, report.unchecked)
    say("the evidence verifies.")
