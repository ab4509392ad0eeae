"""The verifier's state: the last checkpoint of each log and the newest status list of each issuer.

Only with an earlier state can a verifier detect that a log was rolled back or forked, or that a
signed status list predates a revocation. The checkpoint of each verified bundle is stored if it
extends the stored one. The files are ``checkpoints.json`` (or
``--checkpoint-store``) and ``status-lists.json`` under ``$AFFIDAVIT_HOME``; several processes may
use them at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape

from affidavit.certificate import (
    SeenCheckpoint,
    SeenStatus,
    VerificationOptions,
    current_status,
)
from affidavit.gate.console import err, read_file, stop
from affidavit.mechanisms.plan_files import MAX_BYTES
from affidavit.plan import MalformedPlan, load_json, read_limited
from affidavit.trust import (
    KeyFailure,
    TrustedKeys,
    VerificationError,
    format_instant,
    home,
    locked,
    parse_instant,
    write_atomically,
)
from affidavit.trust.log import (
    BadLogPart,
    BadNote,
    Consistency,
    read_checkpoint,
    read_consistency,
)

VERSION = 1


class BadStore(KeyFailure):
    """A state file is damaged; the message names it and says what to do."""


class Store:
    """A JSON file that several processes update; ``purpose`` names the attack that it detects."""

    field: str
    purpose: str

    def __init__(self, path: Path) -> None:
        self.path = path

    def _load(self) -> dict[str, Any]:
        """Read the stored entries; raises ``BadStore``."""
        try:
            document = json.loads(read_limited(self.path, MAX_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise self._bad(str(error)) from None
        entries = document.get(self.field) if isinstance(document, dict) else None
        if not isinstance(entries, dict) or document.get("version") != VERSION:
            raise self._bad(f"not a file of {self.field}")
        return entries

    def _save(self, entries: dict[str, Any]) -> None:
        document = {"version": VERSION, self.field: entries}
        write_atomically(self.path, (json.dumps(document, indent=1) + "\n").encode())

    def _bad(self, detail: str) -> BadStore:
        return BadStore(
            f"{self.path}: {detail}. The file is needed to detect {self.purpose}: restore it, or "
            "move it away to start over."
        )

    def _warn(self, error: OSError) -> None:
        err.print(
            f"cannot write {escape(str(self.path))} ({error.strerror}): {self.purpose} will not "
            "be detected."
        )


class CheckpointStore(Store):
    """The last checkpoint of each log, by its origin."""

    field = "checkpoints"
    purpose = "a rewritten log"

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path or home() / "checkpoints.json")

    def newest(self) -> dict[str, SeenCheckpoint]:
        """Return the last checkpoint of each log; raises ``BadStore``."""
        return {origin: self._seen(origin, entry) for origin, entry in self._load().items()}

    def _seen(self, origin: str, entry: Any) -> SeenCheckpoint:
        try:
            # Earlier releases stored only the signed note.
            note, at = (entry, None) if isinstance(entry, str) else (entry["note"], entry["seen"])
            if read_checkpoint(note).origin != origin:
                raise ValueError("it belongs to another log")
            return SeenCheckpoint(note, None if at is None else parse_instant(at))
        except (BadNote, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._bad(f"the entry of {origin!r} is not a checkpoint: {error}") from None

    def update(self, note: str | None, compared: Mapping[str, SeenCheckpoint]) -> None:
        """Store ``note``, if any, which extends the ``compared`` checkpoint of its log.

        A larger tree that another process stored meanwhile is kept. A failed write is a warning.
        """
        if note is None:
            return
        checkpoint = read_checkpoint(note)
        try:
            with locked(self.path):
                stored = self.newest().get(checkpoint.origin)
                if stored is not None and stored.note == note:
                    return
                if (
                    stored is None
                    or stored == compared.get(checkpoint.origin)
                    or read_checkpoint(stored.note).size <= checkpoint.size
                ):
                    entry = {"note": note, "seen": format_instant(datetime.now(UTC))}
                    self._save({**self._load(), checkpoint.origin: entry})
        except OSError as error:
            self._warn(error)


class StatusStore(Store):
    """Sequence number and digest of the newest status list, by its issuer."""

    field = "lists"
    purpose = "an outdated status list"

    def __init__(self) -> None:
        super().__init__(home() / "status-lists.json")

    def newest(self) -> dict[str, SeenStatus]:
        """Return the newest list of each issuer; raises ``BadStore``."""
        try:
            return {
                str(issuer): SeenStatus(
                    int(entry["sequence"]), str(entry["digest"]), str(entry.get("key_id", ""))
                )
                for issuer, entry in self._load().items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._bad(str(error)) from None

    def update(self, options: VerificationOptions, trusted: TrustedKeys) -> None:
        """Store the status list if it is valid."""
        if options.status is None:
            return
        try:
            status, envelope = current_status(options.status, trusted, options.status_seen)
        except VerificationError:
            return  # a later step reports it, unless an earlier one fails
        try:
            with locked(self.path):
                last = self.newest().get(status.issuer)
                seen = {} if last is None else {status.issuer: last}
                current_status(options.status, trusted, seen)
                entry = SeenStatus(status.sequence, envelope.digest, envelope.key_id)
                self._save({**self._load(), status.issuer: entry._asdict()})
        except VerificationError:
            return  # another process stored a newer one meanwhile
        except OSError as error:
            self._warn(error)


def _read_consistency(path: Path | None) -> Consistency | None:
    """Return the consistency proof in a file, if one is named; ends the command if it is none."""
    if path is None:
        return None
    try:
        return read_consistency(load_json(read_file(path)).data)
    except MalformedPlan as error:
        stop(f"{path}: {error.reasons[0].message}")
    except BadLogPart as error:
        stop(f"{path} is not a consistency proof: {error}.")


def verification_options(
    trusted: TrustedKeys,
    *,
    checkpoints: CheckpointStore,
    consistency: Path | None,
    status: Path | None,
    **requirements: Any,
) -> VerificationOptions:
    """Return the ``requirements`` with what this verifier saw before, and the files it is given.

    The status list in a file is stored if it is valid. Raises ``BadStore``.
    """
    requirements |= {
        "seen": checkpoints.newest(),
        "consistency": _read_consistency(consistency),
    }
    if status is None:
        return VerificationOptions(**requirements)
    lists = StatusStore()
    options = VerificationOptions(
        **requirements, status=read_file(status), status_seen=lists.newest()
    )
    lists.update(options, trusted)
    return options
