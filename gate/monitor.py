"""``affidavit monitor``: follow a log from outside, and exit with 1 at the first alarm.

Run it regularly and on another machine than the service. It stores the last checkpoint in a file
and compares the log with it. Exit codes: 0 no alarm, 1 an alarm, 2 usage, 3 the log cannot be read.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.markup import escape

from affidavit import certificate as certificates
from affidavit.gate.console import fail, out, print_json, read_file, say, stop, usage_errors
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import (
    JsonOption,
    LogOriginOption,
    TrustOptions,
    with_options,
)
from affidavit.gate.service_commands import require_url, token_for
from affidavit.plan import MalformedPlan, load_json
from affidavit.trust import home

if TYPE_CHECKING:
    from affidavit.certificate import CheckpointStore
    from affidavit.certificate.verification.monitoring import MonitorReport, MonitorState
    from affidavit.gate.log_source import HttpSource


@with_options
def monitor(
    url: Annotated[
        str, typer.Argument(help="Prefix of the log, like https://dp.example.com/v1/tlog.")
    ],
    signer: TrustOptions,
    log_origin: LogOriginOption = None,
    state: Annotated[
        Path | None, typer.Option(help="File with the last checkpoints seen, instead of your own.")
    ] = None,
    checkpoint: Annotated[
        list[Path] | None, typer.Option(help="Checkpoint seen elsewhere; repeatable.")
    ] = None,
    bundle: Annotated[
        list[Path] | None,
        typer.Option(help="Certificate bundle whose checkpoint must be from this log; repeatable."),
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Repeat every this many seconds, until an alarm.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Follow a log; exit with 1 on split views, unknown signers and missing entries."""
    from affidavit.certificate.verification.monitoring import MonitorState
    from affidavit.gate.log_source import HttpSource, Unreadable

    require_url(url)
    parts = urlsplit(url)
    source = HttpSource(url, token_for(f"{parts.scheme}://{parts.netloc}"))
    store = certificates.CheckpointStore(state or home() / "monitor.json")
    elsewhere = [read_file(path).decode(errors="replace") for path in checkpoint or ()]
    elsewhere += map(_checkpoint_of_bundle, bundle or ())
    while True:
        with usage_errors():
            trusted = signer.trust_root().load()
        try:
            options = certificates.VerificationOptions(log_origin=log_origin)
            origin = log_origin or (trusted.policy.origin if trusted.policy else None)
            known = MonitorState(trusted=trusted, options=options, elsewhere=elsewhere)
            report = _follow_once(source, store, known, origin)
        except Unreadable as error:
            if every is None:
                fail(str(error), Exit.UNDECIDED)
            say(str(error))
        except certificates.BadStore as failure:
            stop(str(failure))
        else:
            _print(report, as_json=as_json)
            if report.alarms:
                raise typer.Exit(Exit.BLOCKED)
        if every is None:
            return
        time.sleep(every)


def _follow_once(
    source: HttpSource, store: CheckpointStore, known: MonitorState, origin: str | None
) -> MonitorReport:
    """Follow the log once, and store its checkpoint unless there is an alarm."""
    from affidavit.certificate.verification.monitoring import check_log

    seen = store.newest()
    if origin is None and len(seen) == 1:
        (origin,) = seen
    if origin is None:
        # The log names itself; its signature is checked like that of every checkpoint.
        origin = source.checkpoint().partition("\n")[0]
    options = replace(known.options, log_origin=origin)
    report = check_log(source, replace(known, options=options, last=seen.get(origin)))
    if not report.alarms:
        store.update(report.note, seen)
    return report


def _print(report: MonitorReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.as_dict())
        return
    for alarm in report.alarms:
        out.print(f"[red]✗ {alarm.code}:[/] {escape(alarm.message)}")
    if not report.alarms:
        out.print(
            f"[green]✓[/] {escape(report.origin)}: {report.size} entries, {report.entries} new"
        )


def _checkpoint_of_bundle(path: Path) -> str:
    from affidavit.gate.log_source import MAX_RESPONSE_BYTES
    from affidavit.trust.log import BadLogPart, read_inclusion

    try:
        document = load_json(read_file(path), MAX_RESPONSE_BYTES).data
        return read_inclusion(document["log"]).checkpoint
    except MalformedPlan as error:
        stop(f"{path}: {error.reasons[0].message}")
    except (BadLogPart, KeyError, TypeError):
        stop(f"{path} has no log proof; fetch the bundle from the service.")
