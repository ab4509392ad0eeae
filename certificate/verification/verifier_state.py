"""The verifier's state: the last checkpoint of each log and the newest status list of each issuer.

Only with an earlier state can a verifier detect that a log was rolled back or forked, or that a
signed status list predates a revocation. The checkpoint of each verified bundle is stored if it
extends the stored one, by ``VerificationOptions.remember``. The files are ``checkpoints.json`` (or
``--checkpoint-store``) and ``status-lists.json`` under ``$AFFIDAVIT_HOME``; several processes may
use them at once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from affidavit.certificate.verification.status_list import current_status
from affidavit.certificate.verification.verification_result import (
    SeenCheckpoint,
    SeenStatus,
    VerificationOptions,
)
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

log = logging.getLogger("affidavit.certificate")


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
        log.warning(
            "cannot write %s (%s): %s will not be detected.",
            self.path,
            error.strerror,
            self.purpose,
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

    def update(self, note: str, compared: Mapping[str, SeenCheckpoint]) -> None:
        """Store ``note``, which extends the ``compared`` checkpoint of its log.

        A larger tree that another process stored meanwhile is kept. A failed write is a warning.
        """
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


def _read(path: Path) -> bytes:
    try:
        return read_limited(path, MAX_BYTES)
    except OSError as error:
        raise KeyFailure(f"cannot read {path}: {error.strerror}.") from None


def _read_consistency(path: Path | None) -> Consistency | None:
    """Return the consistency proof in a file, if one is named; raises ``KeyFailure``."""
    if path is None:
        return None
    try:
        return read_consistency(load_json(_read(path)).data)
    except MalformedPlan as error:
        raise KeyFailure(f"{path}: {error.reasons[0].message}") from None
    except BadLogPart as error:
        raise KeyFailure(f"{path} is not a consistency proof: {error}.") from None


def verification_options(
    trusted: TrustedKeys,
    *,
    checkpoints: Path | None = None,
    consistency: Path | None = None,
    status: Path | None = None,
    **requirements: Any,
) -> VerificationOptions:
    """Return the ``requirements`` with what this verifier saw before, and the files it is given.

    ``checkpoints`` is the file of the last checkpoints seen, by default the verifier's own, in
    which a verification also stores the one that it sees. The status list in a file is stored if
    it is valid. Raises ``KeyFailure`` for files that cannot be used.
    """
    store = CheckpointStore(checkpoints)
    seen = store.newest()
    requirements |= {
        "seen": seen,
        "remember": lambda note: store.update(note, seen),
        "consistency": _read_consistency(consistency),
    }
    if status is None:
        return VerificationOptions(**requirements)
    lists = StatusStore()
    options = VerificationOptions(**requirements, status=_read(status), status_seen=lists.newest())
    lists.update(options, trusted)
    return options
