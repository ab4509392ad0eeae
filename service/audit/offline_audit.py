"""What the ``affidavit audit`` commands do, on the machine of the database.

They read the database; only ``export_checkpoint`` with an authority adds a timestamp to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console
from sqlalchemy import Connection, select

from affidavit.client import NoTimestamp, request_timestamp
from affidavit.plan import printable
from affidavit.service.core.database import open_engine
from affidavit.service.core.errors import LogDamaged, OperatorError
from affidavit.service.keys.keyring import Keyring
from affidavit.service.log.checkpoint_publisher import (
    Cosignatures,
    FileDestination,
)
from affidavit.service.log.stored_tree import (
    key_of,
    last_checkpoint,
    require_superset,
)
from affidavit.service.operation.database_admin import require_head
from affidavit.service.settings import Settings
from affidavit.service.tables.certificates import signing_keys
from affidavit.trust import (
    KeyFailure,
    KeyStore,
    PublicKey,
)
from affidavit.trust.log import (
    BadNote,
    BadTimestamp,
    Checkpoint,
    note_key,
    open_checkpoint,
    verify_timestamp,
)

if TYPE_CHECKING:
    from affidavit.service.audit.comparison import AuditFinding

T = TypeVar("T")
EXIT_INCONSISTENT = 1
MAX_PRINTED_FINDINGS = 100
"""Findings printed as text; ``--json`` prints all of them."""


def verify(checkpoints: Sequence[Path], stamp_roots: Path | None, *, as_json: bool) -> int:
    """Compare the log with the database; return 1 if they differ, else 0.

    It must extend all ``checkpoints``. ``stamp_roots`` are the root certificates of the timestamps
    beside them.
    """
    settings = Settings.from_environment()
    with _snapshot(settings) as connection:
        external = [_read(path, connection, settings) for path in checkpoints]
        if stamp_roots is not None:
            for path in checkpoints:
                _require_timestamp(path, stamp_roots)
        folders = (settings.worker_keys, settings.key_directory)
        keys = [KeyStore(folder).public_keys() for folder in folders]
        return _compare(connection, external, *keys, as_json=as_json)


def export_checkpoint(file: Path, authority: str | None) -> int:
    """Write the latest checkpoint to ``file``, if it extends the one there; else return 1."""
    with _snapshot(Settings.from_environment()) as connection:
        return _export(connection, file, authority)


def verifier_key() -> str:
    """Return the log's verifier key; raises ``OperatorError`` for a log without a checkpoint."""
    with _snapshot(Settings.from_environment()) as connection:
        newest = last_checkpoint(connection)
    if newest is None:
        raise OperatorError("the log has no checkpoint yet, and so no origin.")
    return str(note_key(newest.checkpoint.origin, newest.key))


@contextmanager
def _snapshot(settings: Settings) -> Iterator[Connection]:
    """Open a snapshot of the database; raises ``SchemaNotAtHead`` and SQLAlchemy's errors."""
    # The import loads the accountants, which takes a second.
    from affidavit.service.core.database import snapshot

    engine = open_engine(settings.database_url, bounded=False)
    try:
        require_head(engine)
        with snapshot(engine) as connection:
            yield connection
    finally:
        engine.dispose()


def _compare(
    connection: Connection,
    external: Sequence[Checkpoint],
    *keys: Sequence[PublicKey],
    as_json: bool,
) -> int:
    from affidavit.service.audit.audit import audit as findings_of
    from affidavit.service.audit.audit import count_pending

    with Console(stderr=True).status("Comparing the log with the database"):
        findings = list(findings_of(connection, external, *keys))
    pending = count_pending(connection)
    try:
        last = last_checkpoint(connection)
    except LogDamaged:
        last = None  # reported among the findings
    size = 0 if last is None else last.checkpoint.size
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "consistent": not findings,
                    "entries": size,
                    "waiting": pending,
                    "kept_checkpoints": len(external),
                    "findings": [finding.as_document() for finding in findings],
                }
            )
        )
    else:
        _print_findings(findings, size, pending, len(external))
    return EXIT_INCONSISTENT if findings else 0


def _print_findings(
    findings: Sequence[AuditFinding], size: int, pending: int, external: int
) -> None:
    for finding in findings[:MAX_PRINTED_FINDINGS]:
        typer.echo(printable(f"{finding.code}  {finding.where}: {finding.message}"))
    if len(findings) > MAX_PRINTED_FINDINGS:
        typer.echo(f"... and {len(findings) - MAX_PRINTED_FINDINGS} more; --json prints them all.")
    if findings:
        typer.echo(f"The log and the database differ: {len(findings)} findings.")
        return
    typer.echo(f"Verified {size} entries: the log and the database agree; {pending} pending.")
    if external == 0:
        typer.echo(
            "No external checkpoint was given (--checkpoint FILE): the owner of the database and "
            "the signing key could have rewritten both."
        )
    else:
        typer.echo(f"The log extends all {external} external checkpoints.")


def _export(connection: Connection, path: Path, authority: str | None) -> int:
    try:
        newest = last_checkpoint(connection)
        if newest is None:
            raise OperatorError("the log has no checkpoint yet; nothing was written.")
        destination = FileDestination(path)
        previous = destination.last()
        if previous is not None:
            require_superset(connection, previous, newest.checkpoint)
    except LogDamaged as damage:
        typer.echo(f"{damage}; {path} was not changed.")
        return EXIT_INCONSISTENT
    # The timestamp comes first, so that no old one remains beside a new checkpoint.
    note = newest.note.encode()
    reply = (
        None if authority is None else _call_timestamp_client(request_timestamp, note, authority)
    )
    destination.send(newest)
    if reply is not None:
        _timestamp_path(path).write_bytes(reply)
        Cosignatures(connection.engine).store_timestamp(newest.note, reply)
    typer.echo(f"Wrote {newest.checkpoint.size} entries of {newest.checkpoint.origin} to {path}.")
    return 0


def _require_timestamp(path: Path, roots: Path) -> None:
    try:
        reply = _timestamp_path(path).read_bytes()
        at = _call_timestamp_client(verify_timestamp, path.read_bytes(), reply, roots.read_bytes())
    except OSError as error:
        raise OperatorError(f"{error.filename} cannot be read: {error.strerror}.") from None
    except BadTimestamp as error:
        raise OperatorError(f"{path}: {error}.") from None
    typer.echo(f"{path} was timestamped at {at:%Y-%m-%dT%H:%M:%SZ}.", err=True)


def _timestamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".tsr")


def _call_timestamp_client(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except ModuleNotFoundError:
        raise OperatorError(
            "timestamps need a client; run: pip install 'affidavit[timestamps]'"
        ) from None
    except NoTimestamp as error:
        raise OperatorError(f"{error}.") from None


def _read(path: Path, connection: Connection, settings: Settings) -> Checkpoint:
    try:
        checkpoint, _ = open_checkpoint(path.read_bytes(), [*_public_keys(connection, settings)])
    except BadNote as error:
        raise OperatorError(f"{path} is not a checkpoint of a known key: {error}.") from None
    return checkpoint


def _public_keys(connection: Connection, settings: Settings) -> Iterator[PublicKey]:
    records = list(connection.execute(select(signing_keys.c.record)).scalars())
    with suppress(KeyFailure):  # an auditor's machine has no keys
        local = Keyring(settings.key_directory, settings.halves).public_records()
        records += map(json.dumps, local)
    for record in records:
        with suppress(LogDamaged):  # reported by the audit
            yield key_of(record)
