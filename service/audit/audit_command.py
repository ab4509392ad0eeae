"""``affidavit audit``: verify the audit log against the database and external checkpoints.

Exit codes: 0 no findings, 1 findings, 2 wrong usage, 3 the database cannot be reached. What a
command needs is imported when it runs: its help needs no database.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

audit = typer.Typer(
    help="Audit the service's log.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@audit.command("verify")
def _verify(
    checkpoint: Annotated[
        list[Path] | None, typer.Option(help="A checkpoint stored elsewhere; repeatable.")
    ] = None,
    stamp_roots: Annotated[
        Path | None,
        typer.Option(help="Trusted root certificates (PEM) for the timestamps FILE.tsr."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Verify the audit log against the database; exits 1 if they differ."""
    from affidavit.service.audit import offline_audit

    return offline_audit.verify(checkpoint or [], stamp_roots, as_json=as_json)


@audit.command("export-checkpoint")
def _export_checkpoint(
    file: Annotated[Path, typer.Argument(help="File on another disk or machine.")],
    stamp: Annotated[
        str | None,
        typer.Option(help="URL of an RFC 3161 timestamp authority; its reply goes to FILE.tsr."),
    ] = None,
) -> int:
    """Write the latest checkpoint to a file, if it extends the one already there."""
    from affidavit.service.audit import offline_audit

    return offline_audit.export_checkpoint(file, stamp)


@audit.command("verifier-key")
def _verifier_key() -> None:
    """Print the log's verifier key, for witnesses and auditors."""
    from affidavit.service.audit import offline_audit

    typer.echo(offline_audit.verifier_key())
