"""``affidavit conformance``: a run's record against its certificate, and what it is charged.

Exit codes: 0 the run did what was certified; 1 it did not, or that cannot be shown; 2 usage,
or a certificate that cannot be read, or a record whose first line is nested beyond reading.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate import (
    TIME_FORMAT,
    Conformance,
    ConformanceFinding,
    KeyFailure,
    PlanNotClosed,
    TrustRoot,
    VerificationError,
    verify,
)
from affidavit.certificate import check_conformance as compare
from affidavit.gate.console import err, out, stop
from affidavit.gate.exits import Exit
from affidavit.gate.files import print_json
from affidavit.plan import PlanError


def conformance(
    record: Annotated[Path, typer.Option(help="The run's record, run/record.jsonl.")],
    certificate: Annotated[Path, typer.Option(help="The bundle that the run was certified by.")],
    keys: Annotated[
        list[Path] | None,
        typer.Option("--keys", help="Public keys to trust, instead of your own."),
    ] = None,
    keyset: Annotated[
        list[Path] | None, typer.Option("--keyset", help="The keyset whose keys to trust.")
    ] = None,
    root: Annotated[
        Path | None, typer.Option("--root", help="With --keyset: trusted roots, or the last one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a document.")] = False,
) -> None:
    """Compare what a run did with what was certified; 0 only if it conforms."""
    said, bundle = _read(record), _read(certificate)
    began = _began(record, said)
    try:
        verified = verify(
            bundle, TrustRoot(keys or [], keyset or [], root).public_keys(), now=began
        )
        found = compare(said, verified.predicate)
    except VerificationError as error:
        err.print(
            f"[red]✗ {escape(str(certificate))}: {error.code}:[/] {escape(error.message)} "
            f"{escape(error.remedy)}",
            highlight=False,
        )
        raise typer.Exit(Exit.BLOCKED) from None
    except KeyFailure as failure:
        stop(str(failure))
    except (PlanNotClosed, PlanError, ValueError) as error:
        stop(f"{certificate}: {error}")
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    raise typer.Exit(Exit.CERTIFIED if found.conformant else Exit.BLOCKED)


def _print(found: Conformance) -> None:
    for finding in found.findings:
        out.print(_line(finding), highlight=False)
    verdict = "[green]✓ conformant[/]" if found.conformant else "[red]✗ not conformant[/]"
    out.print(
        f"{verdict}: {found.steps_charged} of {found.steps_certified} certified steps were "
        f"charged, {found.steps_released} released; to charge: {found.steps_to_charge}",
        highlight=False,
    )
    if found.head is not None:
        out.print(f"the record ends in {found.head}", highlight=False)


def _line(finding: ConformanceFinding) -> str:
    sign = "[yellow]·[/]" if finding.noted else "[red]✗[/]"
    where = f"line {finding.line}: " if finding.line else ""
    return f"{sign} {where}{finding.code}: {escape(finding.message)}"


def _began(path: Path, record: bytes) -> datetime | None:
    """When the run says that it began, which the certificate must have been valid at."""
    try:
        header = json.loads(record.split(b"\n", 1)[0])
        return datetime.strptime(header["started_at"], TIME_FORMAT).replace(tzinfo=UTC)
    except (ValueError, KeyError, TypeError):
        return None
    except RecursionError:
        stop(f"{path} is no run record: its first line is nested too deeply to be read.")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        stop(f"{path} cannot be read: {error.strerror}.")
