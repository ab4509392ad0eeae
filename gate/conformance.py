"""``affidavit conformance``: check a run record against its certificate.

Exit codes: 0 the run did what was certified; 1 it did not, or that cannot be shown; 2 usage, an
unreadable certificate, or a record whose first line is nested too deeply.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate import (
    Conformance,
    ConformanceFinding,
    PlanNotClosed,
    TrustRoot,
    VerificationOptions,
    check_conformance,
    parse_instant,
    verify,
)
from affidavit.gate.console import out, print_json, read_file, say, stop, usage_errors
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import JsonOption, KeysetOption, KeysOption, RootOption
from affidavit.plan import PlanError


def conformance(
    record: Annotated[Path, typer.Option(help="Run record, run/record.jsonl.")],
    certificate: Annotated[Path, typer.Option(help="Certificate bundle of the run.")],
    keys: KeysOption = None,
    keyset: KeysetOption = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a run did what was certified; exits 0 only if it conforms."""
    content, bundle = read_file(record), read_file(certificate)
    started_at = _started_at(record, content)
    with usage_errors(certificate):
        trusted, policy = TrustRoot(keys, keyset, root).load()
        # Its key counts today; it may have expired since the run began.
        trust = None if policy is None else policy.of_any_age()
        options = VerificationOptions(trust=trust, used_at=started_at)
        verified = verify(bundle, trusted, options=options)
    try:
        report = check_conformance(content, verified.predicate)
    except (PlanNotClosed, PlanError, ValueError) as error:
        stop(f"{certificate}: {error}")
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report)
    raise typer.Exit(Exit.CERTIFIED if report.conformant else Exit.BLOCKED)


def _print(report: Conformance) -> None:
    for finding in report.findings:
        out.print(_line(finding))
    verdict = "[green]✓ conformant[/]" if report.conformant else "[red]✗ not conformant[/]"
    out.print(
        f"{verdict}: {report.steps_charged} of {report.steps_certified} certified steps were "
        f"charged, {report.steps_released} released; steps to charge: {report.steps_to_charge}"
    )
    if report.head is not None:
        say(f"the record ends with {report.head}")


def _line(finding: ConformanceFinding) -> str:
    sign = "[yellow]·[/]" if finding.noted else "[red]✗[/]"
    where = f"line {finding.line}: " if finding.line else ""
    return f"{sign} {where}{finding.code}: {escape(finding.message)}"


def _started_at(path: Path, record: bytes) -> datetime | None:
    """The recorded start of the run, when the certificate must have been valid."""
    try:
        header = json.loads(record.split(b"\n", 1)[0])
        return parse_instant(header["started_at"])
    except (ValueError, KeyError, TypeError):
        return None
    except RecursionError:
        stop(f"{path} is not a run record: its first line is nested too deeply.")
