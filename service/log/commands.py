"""``affidavit audit``: the log held to the tables, and to what was kept elsewhere.

They read the database and change nothing in it. Exit codes: 0 nothing is wrong, 1
something is, 2 a mistake of use, 3 the database cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sqlalchemy import Connection, select

from affidavit.certificate import KeyFailure, PublicKey
from affidavit.certificate.log import BadNote, Checkpoint, note_key, open_checkpoint
from affidavit.service.database import open_engine
from affidavit.service.log.exports import FileExport
from affidavit.service.log.findings import Finding
from affidavit.service.log.stored_tree import LogDamaged, last_checkpoint, require_superset
from affidavit.service.log.timestamps import BadStamp, stamp, stamped_at
from affidavit.service.migrate import require_head
from affidavit.service.settings import Settings
from affidavit.service.signer import Signers
from affidavit.service.tables import signing_keys

T = TypeVar("T")
WRONG = 1
SHOWN = 100
"""Findings that are printed for people; ``--json`` has all of them."""


class AuditRefused(Exception):
    """The command cannot be carried out as it was given; the message says what to mend."""


def add_parser(commands: Any) -> None:
    """Add ``audit`` and what stands below it to the service's ``commands``."""
    parser = commands.add_parser("audit", help="hold the log to the tables")
    parser.set_defaults(run=run)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verify = verbs.add_parser("verify", help="replay the log and compare it with the tables")
    verify.add_argument(
        "--checkpoint",
        action="append",
        type=Path,
        default=[],
        help="a checkpoint that was kept elsewhere; may be repeated",
    )
    verify.add_argument(
        "--stamp-roots",
        type=Path,
        help="certificates (PEM) of those whose stamps of kept checkpoints, FILE.tsr, are to hold",
    )
    verify.add_argument("--json", action="store_true")
    export = verbs.add_parser("export-checkpoint", help="write the newest checkpoint to a file")
    export.add_argument("file", type=Path, help="a file on another disk or machine")
    export.add_argument("--stamp", help="URL of an RFC 3161 authority; its reply goes to FILE.tsr")
    verbs.add_parser("verifier-key", help="the log's verifier key, for witnesses and auditors")


def run(given: argparse.Namespace, settings: Settings) -> int:
    """Run one of them; raises ``AuditRefused``, ``SchemaNotAtHead`` and SQLAlchemy's errors."""
    # It replays ledgers, and the accountants for that take a second to load.
    from affidavit.service.log.audit import one_state

    engine = open_engine(settings.database_url)
    try:
        require_head(engine)
        with one_state(engine) as connection:
            if given.verb == "export-checkpoint":
                return _export(connection, given.file, given.stamp)
            if given.verb == "verifier-key":
                return _verifier_key(connection)
            kept = [_read(path, connection, settings) for path in given.checkpoint]
            if given.stamp_roots is not None:
                for path in given.checkpoint:
                    _require_stamp(path, given.stamp_roots)
            return _verify(connection, kept, as_json=given.json)
    finally:
        engine.dispose()


def _verify(connection: Connection, kept: Sequence[Checkpoint], *, as_json: bool) -> int:
    from affidavit.service.log.audit import audit, waiting

    with _bar() as bar:
        tasks: dict[str, Any] = {}

        def progress(part: str, done: int, total: int) -> None:
            if part not in tasks:
                tasks[part] = bar.add_task(part, total=total)
            bar.advance(tasks[part], done)

        findings = list(audit(connection, kept, progress))
    still = waiting(connection)
    try:
        last = last_checkpoint(connection)
    except LogDamaged:
        last = None  # told of among the findings
    size = 0 if last is None else last.checkpoint.size
    if as_json:
        _say(
            json.dumps(
                {
                    "consistent": not findings,
                    "entries": size,
                    "waiting": still,
                    "kept_checkpoints": len(kept),
                    "findings": [finding.as_document() for finding in findings],
                }
            )
        )
    else:
        _print(findings, size, still, len(kept))
    return WRONG if findings else 0


def _print(findings: Sequence[Finding], size: int, still: int, kept: int) -> None:
    for finding in findings[:SHOWN]:
        _say(f"{finding.code}  {finding.where}: {finding.message}")
    if len(findings) > SHOWN:
        _say(f"... and {len(findings) - SHOWN} more; --json lists them all.")
    if findings:
        _say(f"The log and the tables differ in {len(findings)} places.")
        return
    _say(f"{size} entries: log and tables say the same; {still} wait for their places.")
    if kept == 0:
        _say(
            "No checkpoint from elsewhere was given (--checkpoint FILE): whoever owns the "
            "database and holds the signing key could have rewritten both."
        )
    else:
        _say(f"It continues the {kept} checkpoints that were kept elsewhere.")


def _export(connection: Connection, path: Path, authority: str | None) -> int:
    try:
        kept = last_checkpoint(connection)
        if kept is None:
            raise AuditRefused("the log has no checkpoint yet; nothing was written.")
        export = FileExport(path)
        before = export.last()
        if before is not None:
            require_superset(connection, before, kept.checkpoint)
    except LogDamaged as damage:
        _say(f"{damage}; {path} was left as it is.")
        return WRONG
    # The stamp first: a checkpoint that lies there without one would look as if it had one.
    reply = None if authority is None else _needing_client(stamp, kept.note.encode(), authority)
    export.send(kept)
    if reply is not None:
        _stamp_of(path).write_bytes(reply)
    _say(f"{kept.checkpoint.size} entries of {kept.checkpoint.origin}, written to {path}.")
    return 0


def _verifier_key(connection: Connection) -> int:
    kept = last_checkpoint(connection)
    if kept is None:
        raise AuditRefused("the log has no checkpoint yet, and so no name.")
    _say(str(note_key(kept.checkpoint.origin, kept.key)))
    return 0


def _require_stamp(path: Path, roots: Path) -> None:
    try:
        reply = _stamp_of(path).read_bytes()
        at = _needing_client(stamped_at, path.read_bytes(), reply, roots)
    except BadStamp as error:
        raise AuditRefused(f"{path}: {error}.") from None
    print(f"{path} was stamped at {at:%Y-%m-%dT%H:%M:%SZ}.", file=sys.stderr)  # noqa: T201


def _stamp_of(path: Path) -> Path:
    return path.with_name(path.name + ".tsr")


def _needing_client(work: Callable[..., T], *given: Any) -> T:
    try:
        return work(*given)
    except ModuleNotFoundError:
        raise AuditRefused("stamps need a client: pip install 'affidavit[timestamps]'") from None


def _read(path: Path, connection: Connection, settings: Settings) -> Checkpoint:
    try:
        found, _ = open_checkpoint(path.read_bytes(), _known(connection, settings))
    except BadNote as error:
        raise AuditRefused(
            f"{path} is not a checkpoint of a key that is known here: {error}."
        ) from None
    return found


def _known(connection: Connection, settings: Settings) -> Iterable[PublicKey]:
    records = [
        json.loads(item) for item in connection.execute(select(signing_keys.c.record)).scalars()
    ]
    with suppress(KeyFailure):  # an auditor's machine has none
        records += Signers(settings.key_directory, settings.halves).public_records()
    return [PublicKey.from_record(record) for record in records]


def _bar() -> Progress:
    """A bar on the terminal; silent where stderr is not one."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _say(text: str) -> None:
    print(text)  # noqa: T201  # what was asked for
