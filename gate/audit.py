"""``affidavit audit``: the log held to the tables; run by the service, which has the database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from affidavit.gate.options import JsonOption
from affidavit.gate.service_program import become_service

audit = typer.Typer(help="The service's log, held to its tables.", no_args_is_help=True)


@audit.command("verify")
def verify(
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(help="A checkpoint that was kept elsewhere; may be repeated."),
    ] = None,
    stamp_roots: Annotated[
        Path | None,
        typer.Option(help="Certificates (PEM) of those whose stamps, FILE.tsr, are to hold."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay the log, and say where it and the tables differ; 1 if they do."""
    given = [f"--checkpoint={path}" for path in checkpoint or ()]
    if stamp_roots is not None:
        given.append(f"--stamp-roots={stamp_roots}")
    become_service("audit", "verify", *given, *(["--json"] if as_json else []))


@audit.command("export-checkpoint")
def export_checkpoint(
    file: Annotated[Path, typer.Argument(help="Best on another disk or machine.")],
    stamp: Annotated[
        str | None, typer.Option(help="URL of an RFC 3161 authority; its reply goes to FILE.tsr.")
    ] = None,
) -> None:
    """Write the newest checkpoint to a file, if it continues the one that lies there."""
    given = [] if stamp is None else [f"--stamp={stamp}"]
    become_service("audit", "export-checkpoint", *given, "--", str(file))


@audit.command("verifier-key")
def verifier_key() -> None:
    """The log's verifier key, for witnesses and auditors."""
    become_service("audit", "verifier-key")
