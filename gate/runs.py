"""``affidavit runs`` and ``affidavit conformance``: watch, cancel and verify runs.

Exit codes of ``watch``: 0 the run was settled; 1 it failed or was cancelled, or the service
refused; 3 the service cannot be reached. Of ``verify``: 0 a trusted worker signed these files, and
the run conforms; 1 otherwise; 2 usage. Of ``conformance``: 0 the run did what was certified; 1 it
did not, or that cannot be shown; 2 usage, an unreadable certificate, or a record whose first line
is nested too deeply.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from affidavit import assessment, client, evidence, plan
from affidavit import certificate as certificates
from affidavit import trust as trusts
from affidavit.gate.console import fail, out, print_json, read_file, say, stop, usage_errors
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import (
    DEFAULT_SERVER,
    JsonOption,
    ServerOption,
    TrustOptions,
    VerifierOptions,
    command_group,
    with_options,
)
from affidavit.gate.render import upper_bound
from affidavit.gate.service_commands import connect, print_answer

if TYPE_CHECKING:
    from affidavit.client import RunEvent, RunProgress
    from affidavit.evidence import Conformance, ConformanceFinding, RunProvenance

RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
FINAL_STATES = {"settled": Exit.CERTIFIED, "failed": Exit.BLOCKED, "cancelled": Exit.BLOCKED}

RunArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the run.")]

runs = command_group("Watch, cancel and verify runs.")


@runs.command("watch")
def watch(
    run: RunArgument, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False
) -> None:
    """Follow the state, steps and spent ε of a run until it ends."""
    _require_id(run)
    state = None
    with connect(server) as service:
        for event in service.run_events(run):
            if as_json:
                print_json({"event": "progress", **event.model_dump(mode="json")})
            else:
                say(_event_line(event))
            state = event.state if isinstance(event, client.RunEvent) else state
        if state not in FINAL_STATES:  # the event was sent before we connected
            state = service.run(run).state
    raise typer.Exit(FINAL_STATES.get(str(state), Exit.UNDECIDED))


@runs.command("cancel")
def cancel(
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Reason for the audit log.")] = "",
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Cancel a run: at once if it is queued, after the current step if it is training."""
    _require_id(run)
    with connect(server) as service:
        cancelled = service.cancel_run(run, reason)
    print_answer(cancelled, f"{cancelled.state}, cancellation requested", as_json=as_json)


@runs.command("replay")
def replay(
    run: RunArgument,
    record: Annotated[Path, typer.Argument(help="File of `affidavit replay --record`.")],
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Add what a replay on the run's plan showed, to its evidence; a run has one replay."""
    _require_id(run)
    try:
        showed = evidence.read_replay_record(read_file(record))
    except evidence.BadReplayRecord as error:
        stop(f"{record}: {error}")
    with connect(server) as service:
        added = service.add_replay(run, showed.model_dump(mode="json"))
    print_answer(added, f"added a replay: {added.verdict.replace('_', ' ')}", as_json=as_json)


@runs.command("audit")
def audit(
    run: RunArgument,
    canaries: Annotated[Path, typer.Option(help="The run's canaries.json.")],
    losses: Annotated[Path, typer.Option(help="The run's canary-losses.json.")],
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Add what the canaries of a run showed, to its evidence; a run has one audit."""
    _require_id(run)
    try:
        of_run = evidence.read_canaries(read_file(canaries))
        measured = evidence.read_losses(read_file(losses))
    except evidence.BadCanaries as error:
        stop(str(error))
    with connect(server) as service:
        added = service.add_audit(run, json.loads(of_run.as_bytes()), measured)
    print_answer(added, f"added an audit: {added.verdict.replace('_', ' ')}", as_json=as_json)


@runs.command("verify")
@with_options
def verify(
    provenance: Annotated[Path, typer.Argument(help="The run's provenance.json.")],
    signer: TrustOptions,
    weights: Annotated[
        Path | None, typer.Option(help="Weights file that the provenance must name.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Run record that the provenance must name.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify offline who signed a run's provenance, and that weights and record match it."""
    with usage_errors():
        trusted = signer.trust_root().load()
    checked = ["signature"]
    try:
        report = evidence.read_provenance(json.loads(read_file(provenance)), trusted, later=True)
        if weights is not None:
            _require_weights(report, weights)
            checked.append("weights")
        if record is not None:
            _require_record(report, record)
            checked.append("record")
    except OSError as error:
        stop(f"cannot read {error.filename}: {error.strerror}.")
    except evidence.BadProvenance as error:
        fail(str(error))
    except (ValueError, RecursionError):
        fail(f"{provenance} is not a JSON document.")
    document = {
        **asdict(report),
        "subject": f"{report.subject[0]} sha256:{report.subject[1]}",
        "finished": report.finished.isoformat(),
        "checked": ", ".join(checked),
    }
    if as_json:
        print_json(document)
    else:
        for name, value in document.items():
            say(f"{name.replace('_', ' ')}: {value}")
    raise typer.Exit(Exit.CERTIFIED if report.conformant else Exit.BLOCKED)


def _event_line(event: RunEvent | RunProgress) -> str:
    if isinstance(event, client.RunEvent):
        at = event.model_dump(mode="json")["at"]
        return " ".join(filter(None, (at, event.event, event.code, event.worker, event.message)))
    cost = ""
    if event.spent is not None:
        epsilon, delta = upper_bound(event.spent.epsilon), upper_bound(event.spent.delta)
        cost = f", ε ≤ {epsilon} at δ = {delta} spent"
    return f"step {event.steps} of {event.certified}{cost}"


def _require_weights(report: RunProvenance, path: Path) -> None:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if report.subject != ("weights.pt", digest):
        raise evidence.BadProvenance(
            f"it names {report.subject[0]} {report.subject[1]}, but {path} is {digest}."
        )


def _require_record(report: RunProvenance, path: Path) -> None:
    """Raise ``BadProvenance`` unless the chain is intact and ends with the signed line."""
    head = evidence.START
    try:
        with path.open("rb") as stream:
            for line in stream:
                head = evidence.decode_line(line, head)["digest"]
    except evidence.BrokenLine as error:
        raise evidence.BadProvenance(f"{path}: {error.code}: {error}") from None
    if head != report.record:
        raise evidence.BadProvenance(
            f"it names a record that ends in {report.record}, but {path} ends in {head}."
        )


def _require_id(run: str) -> None:
    if RUN_ID.fullmatch(run) is None:
        stop(f"{run[:80]!r} is not a run id, like 6f1c0c9e-7d0b-4b52-9a37-0f5f4f7f9d11.")


@with_options
def conformance(
    record: Annotated[Path, typer.Option(help="Run record, run/record.jsonl.")],
    certificate: Annotated[Path, typer.Option(help="Certificate bundle of the run.")],
    verifier: VerifierOptions,
    as_json: JsonOption = False,
) -> None:
    """Check that a run did what was certified; exits 0 only if it conforms."""
    content, bundle = read_file(record), read_file(certificate)
    started_at = _started_at(record, content)
    with usage_errors(certificate):
        # The keyset must be valid today, but the certificate may have expired since the run began.
        trusted, options = verifier.load(past_use=True, used_at=started_at)
        verified = certificates.verify(bundle, trusted, options=options)
    try:
        report = evidence.check_conformance(content, verified.predicate)
    except (assessment.PlanNotClosed, plan.PlanError, ValueError) as error:
        stop(f"{certificate}: {error}")
    if as_json:
        print_json(report.as_dict())
    else:
        _print_conformance(report)
    raise typer.Exit(Exit.CERTIFIED if report.conformant else Exit.BLOCKED)


def _print_conformance(report: Conformance) -> None:
    for finding in report.findings:
        out.print(_finding_line(finding))
    verdict = "[green]✓ conformant[/]" if report.conformant else "[red]✗ not conformant[/]"
    out.print(
        f"{verdict}: {report.steps_charged} of {report.steps_certified} certified steps were "
        f"charged, {report.steps_released} released; steps to charge: {report.steps_to_charge}"
    )
    if report.head is not None:
        say(f"the record ends with {report.head}")


def _finding_line(finding: ConformanceFinding) -> str:
    mark = "[yellow]·[/]" if finding.noted else "[red]✗[/]"
    place = f"line {finding.line}: " if finding.line else ""
    return f"{mark} {place}{finding.code}: {escape(finding.message)}"


def _started_at(path: Path, record: bytes) -> datetime | None:
    """Return the recorded start of the run, at which the certificate must have been valid."""
    try:
        header = json.loads(record.split(b"\n", 1)[0])
        return trusts.parse_instant(header["started_at"])
    except (ValueError, KeyError, TypeError):
        return None
    except RecursionError:
        stop(f"{path} is not a run record: its first line is nested too deeply.")
