"""Commands that run another program of the project: the service, the trainer and the worker.

The command line must work offline and without PyTorch, so it imports none of them. Each command
replaces this process, so that signals reach the program itself.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from affidavit.gate.console import stop
from affidavit.gate.options import JsonOption, command_group

REMEDY = "make install-trainer in a checkout, pip install 'affidavit[trainer]' elsewhere."
PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True}


def _exec(program: str, *arguments: str) -> NoReturn:
    """Replace this process by that of ``affidavit.PROGRAM``."""
    sys.stdout.flush()
    entry = ["-m", "affidavit.gate.entry", program]
    os.execv(sys.executable, [sys.executable, *entry, *arguments])


def _json(as_json: bool) -> list[str]:
    return ["--json"] if as_json else []


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8321,
) -> None:
    """Run the HTTP service."""
    _exec("service", "serve", "--host", host, "--port", str(port))


def migrate() -> None:
    """Migrate the service's database (DATABASE_URL) to this release's schema."""
    _exec("service", "migrate")


def backup(file: Annotated[Path, typer.Argument(help="New file to write.")]) -> None:
    """Back up the embedded database to a new file while the service keeps running."""
    _exec("service", "backup", str(file))


audit = command_group("Audit the service's log.")


@audit.command("verify")
def audit_verify(
    checkpoint: Annotated[
        list[Path] | None, typer.Option(help="A checkpoint stored elsewhere; repeatable.")
    ] = None,
    stamp_roots: Annotated[
        Path | None,
        typer.Option(help="Trusted root certificates (PEM) for the timestamps FILE.tsr."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the audit log against the database; exits 1 if they differ."""
    options = [f"--checkpoint={path}" for path in checkpoint or ()]
    if stamp_roots is not None:
        options.append(f"--stamp-roots={stamp_roots}")
    _exec("service", "audit", "verify", *options, *_json(as_json))


@audit.command("export-checkpoint")
def export_checkpoint(
    file: Annotated[Path, typer.Argument(help="File on another disk or machine.")],
    stamp: Annotated[
        str | None,
        typer.Option(help="URL of an RFC 3161 timestamp authority; its reply goes to FILE.tsr."),
    ] = None,
) -> None:
    """Write the latest checkpoint to a file, if it extends the one already there."""
    options = [] if stamp is None else [f"--stamp={stamp}"]
    _exec("service", "audit", "export-checkpoint", *options, "--", str(file))


@audit.command("verifier-key")
def verifier_key() -> None:
    """Print the log's verifier key, for witnesses and auditors."""
    _exec("service", "audit", "verifier-key")


def witness(
    state: Annotated[Path, typer.Option(help="Folder for its key and the checkpoints seen.")],
    name: Annotated[str, typer.Option(help="Name of the witness, like witness.example.org.")],
    log: Annotated[
        list[str],
        typer.Option(help="Verifier key of a log (`affidavit audit verifier-key`); repeatable."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8322,
) -> None:
    """Cosign checkpoints of other logs, if they extend the last ones seen."""
    logs = [f"--log={key}" for key in log]
    options = [f"--state={state}", f"--name={name}", *logs, f"--host={host}", f"--port={port}"]
    _exec("service", "witness", *options)


tokens = command_group("Manage the service's access tokens.")


@tokens.command("new")
def tokens_new(
    name: Annotated[str, typer.Option(help="Name of the holder, as certificates show it.")],
    scope: Annotated[
        list[str], typer.Option(help="submit, approve, audit, work or admin; repeatable.")
    ],
    days: Annotated[int, typer.Option(help="Days until the token expires, 1 to 366.")] = 90,
    person: Annotated[
        str | None,
        typer.Option(
            help="Owner, so that all tokens of a person count as one; oidc:SUBJECT for a person "
            "who also signs in."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print it; it is shown only once."""
    scopes = [f"--scope={scope_name}" for scope_name in scope]
    owner = [] if person is None else [f"--person={person}"]
    options = [f"--name={name}", *scopes, *owner, f"--days={days}"]
    _exec("service", "tokens", "new", *options, *_json(as_json))


@tokens.command("list")
def tokens_list(as_json: JsonOption = False) -> None:
    """List all tokens with their expiry and last use."""
    _exec("service", "tokens", "list", *_json(as_json))


@tokens.command("revoke")
def tokens_revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id from `tokens list`.")],
    reason: Annotated[str, typer.Option(help="Reason for the audit log.")] = "",
) -> None:
    """Revoke a token immediately."""
    _exec("service", "tokens", "revoke", f"--reason={reason}", "--", token_id)


def _forwarded(name: str, program: str, summary: str, *, needs_torch: bool = True) -> typer.Typer:
    """The command ``name``, whose options are those of ``affidavit.PROGRAM``."""
    forwarded = typer.Typer(add_completion=False)

    @forwarded.command(name, add_help_option=False, context_settings=PASS_THROUGH, help=summary)
    def run(context: typer.Context) -> None:
        if needs_torch and importlib.util.find_spec("torch") is None:
            stop(f"training needs PyTorch: {REMEDY}")
        _exec(program, *context.args)

    return forwarded


train = _forwarded(
    "train", "trainer", "Train exactly what a certificate certifies, and write the run record."
)
search = _forwarded(
    "search",
    "trainer.search",
    "Train a random number of times as certified, and release the best.",
)
worker = _forwarded(
    "worker",
    "worker",
    "Claim certified runs from a service, train them, and report the results.",
    needs_torch=False,
)
