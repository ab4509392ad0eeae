"""Publish checkpoints outside the database, so that its owner cannot rewrite the log.

The owner of the database can drop its triggers and write any row, and with the signing key can sign
the result. A rewritten log contradicts every checkpoint that is stored elsewhere. The setting lists
destinations, separated by commas:

``FILE``
    The newest checkpoint, replaced atomically. When the service starts, the log must extend the
    checkpoint in the file, or nothing is signed.
``https://...``
    Each new checkpoint is posted as ``text/plain``.
``witness+https://...#KEY``
    Posted as C2SP's ``add-checkpoint``, with the proof that it extends the witness's last one.
    While more than half of the witnesses contradict the log, nothing is spent or signed. Its
    cosignatures by ``KEY``, its verifier key, are stored if they are valid, and readers verify
    them again.

Each destination has a thread of its own, so a network that hangs delays neither the log nor another
destination. Failed deliveries are logged and retried. A checkpoint that was superseded meanwhile is
skipped, because the next one covers it.

References: C2SP, tlog-witness.md, tlog-cosignature.md.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import httpx
from sqlalchemy import func, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit import client
from affidavit.plan import Reason
from affidavit.service.core.database import Store
from affidavit.service.core.errors import LogDamaged, NotLogged, OperatorError
from affidavit.service.log.reader import TIMESTAMP_PREFIX, LogReader
from affidavit.service.log.stored_tree import StoredCheckpoint
from affidavit.service.tables.log import log_checkpoints, log_cosignatures
from affidavit.trust import encode_base64, write_atomically
from affidavit.trust.log import (
    BadNote,
    Checkpoint,
    WitnessKey,
    parse_note,
    read_checkpoint,
    timestamp_line,
)

TEXT_TYPE = "text/plain; charset=utf-8"
SIZE_TYPE = "text/x.tlog.size"
PERIOD_SECONDS = 0.5
RETRY_SECONDS = 10.0
STOP_SECONDS = 15.0

log = logging.getLogger("affidavit.service.log")


class PublishError(OperatorError):
    """A checkpoint could not be delivered; the delivery is retried."""


class Contradicted(PublishError):
    """A witness saw more entries than the log has, or another log under its name."""


class NotCosigned(Exception):
    """The witness's response has no valid cosignature of its key."""


class Cosignatures(Store):
    """The cosignatures of checkpoints."""

    def store(self, note: str, response: str, witness: WitnessKey) -> None:
        """Store the earliest cosignature of ``witness`` in ``response`` for a checkpoint.

        Raises ``NotCosigned``, and ``BadNote`` for a malformed response or cosignature.
        """
        lines = [line for line in response.splitlines() if line.startswith(f"— {witness.name} ")]
        signed = parse_note(note + "".join(f"{line}\n" for line in lines))
        at = witness.cosigned(signed)
        if at is None:
            raise NotCosigned(f"the response has no cosignature of {witness.name}")
        cosigned = (line for line in signed.signatures if line.key_hash == witness.key_hash)
        first = min(cosigned, key=lambda line: line.signature)  # it begins with the time
        self._insert(note, str(witness), str(type(signed)("", (first,))).lstrip("\n"), at)

    def store_timestamp(self, note: str, reply: bytes) -> None:
        """Store a time-stamping authority's reply for the checkpoint ``note``."""
        from rfc3161_client import decode_timestamp_response

        at = decode_timestamp_response(reply).tst_info.gen_time
        witness = f"{TIMESTAMP_PREFIX}{hashlib.sha256(reply).hexdigest()}"
        self._insert(note, witness, timestamp_line(reply), at)

    def _insert(self, note: str, witness: str, line: str, at: datetime) -> None:
        with self._reader.connect() as connection:
            checkpoint_id = connection.execute(
                select(func.max(log_checkpoints.c.id)).where(log_checkpoints.c.note == note)
            ).scalar_one()
        row = {"checkpoint_id": checkpoint_id, "witness": witness, "line": line}
        try:
            with self._writer.begin() as connection:
                connection.execute(insert(log_cosignatures).values(**row, cosigned_at=at))
        except IntegrityError:
            return  # another replica stored it


class FileDestination:
    """A file, preferably on another disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def last(self) -> Checkpoint | None:
        """Return the checkpoint in the file; raises ``LogDamaged`` for another content."""
        try:
            return read_checkpoint(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, BadNote) as error:
            raise LogDamaged(f"the checkpoint in {self._path} cannot be read: {error}") from None

    def send(self, stored: StoredCheckpoint) -> None:
        """Replace the file atomically. Raises ``PublishError``."""
        try:
            write_atomically(self._path, stored.note.encode())
        except OSError as error:
            raise PublishError(f"{self._path} cannot be written: {error.strerror}") from None


class UrlDestination:
    """A URL that accepts the note."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def name(self) -> str:
        """The host only, because a URL may contain a secret."""
        return httpx.URL(self._url).host

    def send(self, stored: StoredCheckpoint) -> None:
        """Post the note. Raises ``PublishError``."""
        response = post(self._url, stored.note.encode(), TEXT_TYPE)
        if not response.is_success:
            raise PublishError(f"{self.name} answered {response.status_code}")


class WitnessDestination(UrlDestination):
    """A witness, which accepts only checkpoints that extend its last one."""

    def __init__(
        self,
        url: str,
        log: LogReader,
        key: WitnessKey | None = None,
        cosignatures: Cosignatures | None = None,
    ) -> None:
        super().__init__(url)
        self._log = log
        self._key = key
        self._cosignatures = cosignatures
        self._size = 0

    def send(self, stored: StoredCheckpoint) -> None:
        """Post the note with its proof, and again if the witness is at another size.

        Raises ``PublishError``, and ``Contradicted`` if the witness saw entries that the log lacks.
        """
        response = post(self._url, self._body(stored).encode(), TEXT_TYPE)
        media = response.headers.get("content-type", "").partition(";")[0]
        if response.status_code == httpx.codes.CONFLICT and media == SIZE_TYPE:
            self._size = _parse_size(response.text)
            if self._size > stored.checkpoint.size:
                with suppress(NotLogged, LogDamaged):
                    stored = self._log.latest()  # another replica may have sent it meanwhile
            response = post(self._url, self._body(stored).encode(), TEXT_TYPE)
        if response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            raise Contradicted(f"the witness {self.name} saw another log under this name")
        if response.status_code != httpx.codes.OK:
            raise PublishError(f"the witness {self.name} answered {response.status_code}")
        self._size = stored.checkpoint.size
        if self._key is None or self._cosignatures is None:
            return
        try:
            self._cosignatures.store(stored.note, response.text, self._key)
        except (NotCosigned, BadNote) as error:
            raise PublishError(f"the witness {self.name}: {error}") from None

    def _body(self, stored: StoredCheckpoint) -> str:
        size = stored.checkpoint.size
        hashes: tuple[bytes, ...] = ()
        if self._size > size:
            raise Contradicted(
                f"the witness {self.name} has seen {self._size} entries, but the log has {size}"
            )
        if self._size > 0:
            try:
                hashes = self._log.consistency(self._size, size).hashes
            except (NotLogged, LogDamaged) as error:
                raise PublishError(str(error)) from None
        lines = "".join(f"{encode_base64(hash_)}\n" for hash_ in hashes)
        return f"old {self._size}\n{lines}\n{stored.note}"


Destination = FileDestination | UrlDestination


def destinations(
    setting: str, log: LogReader, cosignatures: Cosignatures | None = None
) -> tuple[Destination, ...]:
    """Parse the destinations in a setting; raises ``PublishError`` for a bad verifier key."""
    parts = (part.strip() for part in setting.split(","))
    return tuple(_parse_destination(part, log, cosignatures) for part in parts if part)


def _parse_destination(text: str, log: LogReader, cosignatures: Cosignatures | None) -> Destination:
    if text.startswith(("witness+http://", "witness+https://")):
        url, _, key = text.removeprefix("witness+").partition("#")
        try:
            witness = WitnessKey.parse(key) if key else None
        except BadNote as error:
            raise PublishError(
                f"AFFIDAVIT_CHECKPOINT_EXPORT: {error}; give witness+URL#KEY with the verifier key "
                "that the witness prints."
            ) from None
        return WitnessDestination(url, log, witness, cosignatures)
    if text.startswith(("http://", "https://")):
        return UrlDestination(text)
    return FileDestination(Path(text))


def published_checkpoints(places: Iterable[Destination]) -> list[Checkpoint]:
    """Read the checkpoints back from the files among ``places``; raises ``LogDamaged``."""
    checkpoints = (place.last() for place in places if isinstance(place, FileDestination))
    return [checkpoint for checkpoint in checkpoints if checkpoint is not None]


def post(url: str, content: bytes, media: str) -> httpx.Response:
    """Send a POST; raises ``PublishError`` if the response is missing or too large."""
    try:
        return client.post_bounded(url, content, media)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        host = httpx.URL(url).host if isinstance(error, httpx.HTTPError) else "the URL"
        raise PublishError(f"{host} cannot be reached: {type(error).__name__}") from None


def _parse_size(text: str) -> int:
    line = text.strip()
    if not (line.isascii() and line.isdecimal() and len(line) < 17):
        raise PublishError("the witness did not answer with its tree size")
    return int(line)


class CheckpointPublisher:
    """The publishing threads of one process; ``newest`` returns its newest checkpoint."""

    def __init__(
        self, places: Sequence[Destination], newest: Callable[[], StoredCheckpoint | None]
    ) -> None:
        self._places = places
        self._newest = newest
        self._sent: dict[Destination, str] = {}
        self._contradicted: set[Destination] = set()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start a thread for each destination."""
        for place in self._places:
            thread = threading.Thread(
                target=self._run, args=(place,), name="publisher", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Deliver the newest checkpoint, then stop."""
        self._stopped.set()
        end = time.monotonic() + STOP_SECONDS
        while self._threads:
            self._threads.pop().join(max(0.0, end - time.monotonic()))

    @property
    def problem(self) -> Reason | None:
        """The problem that most witnesses contradict the log; a minority cannot stop it."""
        witnesses = [place for place in self._places if isinstance(place, WitnessDestination)]
        if 2 * len(self._contradicted) <= len(witnesses):
            return None
        return Reason(
            code="log_damaged",
            message=f"{len(self._contradicted)} of {len(witnesses)} witnesses saw more entries "
            "than the log has, or another log: the database was rolled back.",
            remedy="Restore the database from a newer backup, or start another log.",
        )

    def publish(self) -> bool:
        """Deliver the newest checkpoint; return whether all destinations have it."""
        delivered = [self._deliver(place) for place in self._places]
        return all(delivered)

    def _deliver(self, place: Destination) -> bool:
        newest = self._newest()
        if newest is None or self._sent.get(place) == newest.note:
            return True
        try:
            place.send(newest)
        except PublishError as failure:
            log.error("a checkpoint was not published to %s: %s", place.name, failure)
            if isinstance(failure, Contradicted):
                self._contradicted.add(place)
            return False
        except Exception:
            log.exception("publishing a checkpoint failed unexpectedly; it is retried")
            return False
        self._contradicted.discard(place)
        self._sent[place] = newest.note
        return True

    def _run(self, place: Destination) -> None:
        pause = PERIOD_SECONDS
        while not self._stopped.wait(pause):
            pause = PERIOD_SECONDS if self._deliver(place) else RETRY_SECONDS
        self._deliver(place)
