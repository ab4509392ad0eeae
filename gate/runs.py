"""``affidavit runs``: watch a run, stop it, and check offline what was signed of it.

Exit codes of ``watch``: 0 the run was settled; 1 it failed or was cancelled, or the service
refuses; 3 the service cannot be reached. Of ``verify``: 0 what is given is what a trusted worker
signed, of a run that conforms; 1 it is not; 2 usage.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from affidavit.certificate import (
    START,
    BadProvenance,
    BrokenLine,
    KeyFailure,
    RunProvenance,
    TrustRoot,
    decode_line,
    read_provenance,
)
from affidavit.gate.console import err, out, stop
from affidavit.gate.exits import Exit
from affidavit.gate.files import print_json
from affidavit.gate.options import JsonOption
from affidavit.gate.service_client import SERVER, ServerOption, ask, document_of, events

RUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
OVER = {"settled": Exit.CERTIFIED, "failed": Exit.BLOCKED, "cancelled": Exit.BLOCKED}

RunArgument = Annotated[str, typer.Argument(metavar="ID", help="The run, as it was answered.")]

runs = typer.Typer(
    help="Watch a run, cancel it, verify what was signed of it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@runs.command("watch")
def watch(run: RunArgument, server: ServerOption = SERVER, as_json: JsonOption = False) -> None:
    """Show states, steps and the ε spent so far, until the run is over."""
    _require_id(run)
    state = None
    for name, data in events(server, f"/v1/runs/{run}/events"):
        if as_json:
            out.print(json.dumps({"event": name, **data}), markup=False, highlight=False)
        elif told := _told(name, data):
            out.print(escape(told), highlight=False)
        state = data.get("state") if name == "state" else state
    if state not in OVER:  # told of before, or by another
        state = document_of(ask(server, "GET", f"/v1/runs/{run}"))["state"]
    raise typer.Exit(OVER.get(str(state), Exit.UNDECIDED))


@runs.command("cancel")
def cancel(
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Why, in words.")] = "",
    server: ServerOption = SERVER,
    as_json: JsonOption = False,
) -> None:
    """Stop a run: at once if it waits, after the step that it is in if it trains."""
    _require_id(run)
    found = document_of(ask(server, "POST", f"/v1/runs/{run}/cancel", {"reason": reason}))
    if as_json:
        print_json(found)
    else:
        out.print(f"{found['state']}, and it is asked to stop", highlight=False)


@runs.command("verify")
def verify(
    provenance: Annotated[Path, typer.Argument(help="provenance.json of a run.")],
    keys: Annotated[
        list[Path], typer.Option("--keys", help="Public keys of workers that you trust.")
    ],
    weights: Annotated[
        Path | None, typer.Option(help="The weights that it has to be about.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="The run record that it has to be about.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check offline who signed a run's provenance, and that weights and record are its."""
    try:
        document = json.loads(provenance.read_bytes())
        found = read_provenance(document, TrustRoot(keys).public_keys(), later=True)
        if weights is not None:
            _require_weights(found, weights)
        if record is not None:
            _require_record(found, record)
    except OSError as error:
        stop(f"{error.filename} cannot be read: {error.strerror}.")
    except KeyFailure as failure:
        stop(str(failure))
    except BadProvenance as error:
        _block(str(error))
    except (ValueError, RecursionError):
        _block(f"{provenance} is no JSON document.")
    told = _document(found, weights=weights is not None, record=record is not None)
    if as_json:
        print_json(told)
    else:
        for name, value in told.items():
            out.print(f"{name.replace('_', ' ')}: {escape(str(value))}", highlight=False)
    raise typer.Exit(Exit.CERTIFIED if found.conformant else Exit.BLOCKED)


def _told(name: str, data: dict[str, Any]) -> str:
    """An event as a line; empty where there is nothing to tell."""
    if name == "state":
        found = [data.get(item) for item in ("at", "event", "code", "worker", "message")]
        return " ".join(str(entry) for entry in found if entry)
    spent = data.get("spent")
    paid = f", ε ≤ {spent['epsilon']} at δ = {spent['delta']} spent" if spent else ""
    return f"step {data.get('steps')} of {data.get('certified')}{paid}"


def _require_weights(found: RunProvenance, path: Path) -> None:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if found.subject != ("weights.pt", digest):
        raise BadProvenance(
            f"it is about {found.subject[0]} {found.subject[1]}, and {path} is {digest}."
        )


def _require_record(found: RunProvenance, path: Path) -> None:
    """Raise unless the chain holds to the line that was signed, and ends there."""
    head = START
    try:
        with path.open("rb") as stream:
            for line in stream:
                head = decode_line(line, head)["digest"]
    except BrokenLine as error:
        raise BadProvenance(f"{path}: {error.code}: {error}") from None
    if head != found.record:
        raise BadProvenance(
            f"it is about a record that ends in {found.record}, and {path} in {head}."
        )


def _document(found: RunProvenance, *, weights: bool, record: bool) -> dict[str, Any]:
    checked = ["signature", *(["weights"] if weights else []), *(["record"] if record else [])]
    return {
        "run": found.run,
        "conformant": found.conformant,
        "findings": found.summary,
        "steps_to_charge": found.steps_to_charge,
        "certificate": found.certificate,
        "plan_digest": found.plan_digest,
        "data": found.data,
        "model": found.model,
        "code": found.code,
        "subject": f"{found.subject[0]} sha256:{found.subject[1]}",
        "record": found.record,
        "worker": found.worker,
        "key": found.key_id,
        "finished": found.finished_at.isoformat(),
        "checked": ", ".join(checked),
    }


def _require_id(run: str) -> None:
    if RUN.fullmatch(run) is None:
        stop(f"{run[:80]!r} is no id of a run; it looks like 6f1c0c9e-7d0b-4b52-9a37-0f5f4f7f9d11.")


def _block(message: str) -> NoReturn:
    err.print(f"[red]✗[/] {escape(message)}", highlight=False)
    raise typer.Exit(Exit.BLOCKED)
