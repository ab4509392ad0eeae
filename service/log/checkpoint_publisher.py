"""Publish checkpoints outside the database, so that its owner cannot rewrite the log.

Whoever owns the database can drop its triggers and write any row; whoever also has the
signing key can sign the result. A rewritten log cannot be made to agree with a checkpoint
that is kept elsewhere. The setting lists destinations, separated by commas:

``FILE``
    The newest checkpoint, replaced atomically. When the service starts, the log must extend
    the checkpoint in the file, or nothing is signed.
``https://...``
    Each new checkpoint is posted as it is, ``text/plain``.
``witness+https://...#KEY``
    Posted as C2SP's ``add-checkpoint``, with the proof that it extends the witness's last one.
    While more than half of the witnesses say that it does not, nothing is spent or signed. The
    witness is ``affidavit witness`` or any other. Its cosignatures are kept and served if they are
    by ``KEY``, its verifier key.

Publishing runs in threads of its own, so that a network that hangs does not stop the log, nor a
witness that never ends its answer the other destinations.
What cannot be delivered is logged and retried; a checkpoint that is superseded meanwhile is
skipped, because the next one covers it.

Reference: C2SP, tlog-witness.md.
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

from affidavit.certificate import encode_base64, write_atomically
from affidavit.certificate.log import (
    BadNote,
    Checkpoint,
    WitnessKey,
    parse_note,
    read_checkpoint,
    timestamp_line,
)
from affidavit.client import read_at_most
from affidavit.plan import Reason
from affidavit.service.database import Store
from affidavit.service.errors import OperatorError
from affidavit.service.log.entries import log_checkpoints, log_cosignatures
from affidavit.service.log.reader import STAMPS, LogReader
from affidavit.service.log.stored_tree import LogDamaged, NotLogged, StoredCheckpoint

TIMEOUT = 10.0
TEXT = "text/plain; charset=utf-8"
SIZE_TYPE = "text/x.tlog.size"
STAMP_QUERY = "application/timestamp-query"
MAX_BYTES = 100_000
"""Of an answer that are read."""
PERIOD = 0.5
RETRY = 10.0
"""Seconds before a failed delivery is retried."""
STOP_SECONDS = 15.0

log = logging.getLogger("affidavit.service.log")


class PublishError(OperatorError):
    """A checkpoint could not be delivered; it is retried."""


class Contradicted(PublishError):
    """A witness saw more of the log than there is, or another one."""


class NotCosigned(Exception):
    """The witness's answer holds no valid cosignature of its key; the text says why."""


class Cosignatures(Store):
    """The cosignatures of checkpoints."""

    def keep(self, note: str, answer: str, witness: WitnessKey) -> None:
        """Store the earliest line of ``witness`` in ``answer`` under the checkpoint ``note``.

        Raises ``NotCosigned``, and ``BadNote`` for an answer or a cosignature that is none.
        """
        lines = [line for line in answer.splitlines() if line.startswith(f"— {witness.name} ")]
        signed = parse_note(note + "".join(f"{line}\n" for line in lines))
        at = witness.cosigned(signed)
        if at is None:
            raise NotCosigned(f"the answer has no cosignature of {witness.name}")
        own = (line for line in signed.signatures if line.key_hash == witness.key_hash)
        first = min(own, key=lambda line: line.signature)  # which begins with the time
        self._keep(note, str(witness), str(type(signed)("", (first,))).lstrip("\n"), at)

    def keep_timestamp(self, note: str, reply: bytes) -> None:
        """Store a time-stamping authority's reply for the checkpoint ``note``."""
        from rfc3161_client import decode_timestamp_response

        at = decode_timestamp_response(reply).tst_info.gen_time
        witness = f"{STAMPS}{hashlib.sha256(reply).hexdigest()}"
        self._keep(note, witness, timestamp_line(reply), at)

    def _keep(self, note: str, witness: str, line: str, at: datetime) -> None:
        with self._reader.connect() as connection:
            checkpoint_id = connection.execute(
                select(func.max(log_checkpoints.c.id)).where(log_checkpoints.c.note == note)
            ).scalar_one()
        row = {"checkpoint_id": checkpoint_id, "witness": witness, "line": line}
        try:
            with self._writer.begin() as connection:
                connection.execute(insert(log_cosignatures).values(**row, cosigned_at=at))
        except IntegrityError:
            return  # another replica had it cosigned too


class FileDestination:
    """A file, preferably on another disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def last(self) -> Checkpoint | None:
        """The checkpoint in the file; raises ``LogDamaged`` if it holds anything else."""
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
    """A URL that accepts the note as it is."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def name(self) -> str:
        """The host alone, because a URL may contain a secret."""
        return httpx.URL(self._url).host

    def last(self) -> Checkpoint | None:
        """None: a URL is not read back."""
        return None

    def send(self, stored: StoredCheckpoint) -> None:
        """Post the note. Raises ``PublishError``."""
        response = post(self._url, stored.note.encode(), TEXT)
        if not response.is_success:
            raise PublishError(f"{self.name} answered {response.status_code}")


class WitnessDestination(UrlDestination):
    """A witness, which accepts a checkpoint only if it extends the last one."""

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
        """Post the note with its proof, again if the witness is at another size.

        Raises ``PublishError``, and ``Contradicted`` if the witness saw what the log does not have.
        """
        response = post(self._url, self._body(stored).encode(), TEXT)
        media = response.headers.get("content-type", "").partition(";")[0]
        if response.status_code == httpx.codes.CONFLICT and media == SIZE_TYPE:
            self._size = _parse_size(response.text)
            if self._size > stored.checkpoint.size:
                with suppress(NotLogged, LogDamaged):
                    stored = self._log.latest()  # another replica may have sent it meanwhile
            response = post(self._url, self._body(stored).encode(), TEXT)
        if response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            raise Contradicted(f"the witness {self.name} saw another log under this name")
        if response.status_code != httpx.codes.OK:
            raise PublishError(f"the witness {self.name} answered {response.status_code}")
        self._size = stored.checkpoint.size
        if self._key is None or self._cosignatures is None:
            return
        try:
            self._cosignatures.keep(stored.note, response.text, self._key)
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
    """The destinations in a setting, separated by commas.

    Raises ``PublishError`` for a witness's verifier key that is none.
    """
    parts = (part.strip() for part in setting.split(","))
    return tuple(_destination(part, log, cosignatures) for part in parts if part)


def _destination(text: str, log: LogReader, cosignatures: Cosignatures | None) -> Destination:
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
    """The checkpoints that can be read back from ``places``; raises ``LogDamaged``."""
    checkpoints = (place.last() for place in places)
    return [checkpoint for checkpoint in checkpoints if checkpoint is not None]


def post(url: str, content: bytes, media: str) -> httpx.Response:
    """The response to a POST; raises ``PublishError`` if there is none, or it is too much."""
    sent = {"Content-Type": media, "Accept-Encoding": "identity"}
    try:
        with httpx.stream("POST", url, content=content, headers=sent, timeout=TIMEOUT) as response:
            return read_at_most(response, MAX_BYTES, TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        host = httpx.URL(url).host if isinstance(error, httpx.HTTPError) else "the URL"
        raise PublishError(f"{host} cannot be reached: {type(error).__name__}") from None


def request_timestamp(content: bytes, url: str) -> bytes:
    """A time-stamping authority's reply for ``content`` (RFC 3161, DER).

    A log that is rewritten later cannot have had that root at that time, whoever holds its
    database and key. Raises ``PublishError`` unless the authority granted the very request: what
    it granted with changes no verifier accepts. Needs ``pip install 'affidavit[timestamps]'``.
    """
    from rfc3161_client import TimestampRequestBuilder, decode_timestamp_response
    from rfc3161_client.tsp import PKIStatus

    request = TimestampRequestBuilder().data(content).nonce(nonce=True).build()
    response = post(url, request.as_bytes(), STAMP_QUERY)
    if not response.is_success:
        raise PublishError(f"the time-stamping authority answered {response.status_code}")
    try:
        reply = decode_timestamp_response(response.content)
    except ValueError as error:
        raise PublishError(
            f"the time-stamping authority's response is not a timestamp: {error}"
        ) from None
    if reply.status != PKIStatus.GRANTED.value:
        raise PublishError(f"the time-stamping authority refused: {reply.status_string}")
    if reply.tst_info.nonce != request.nonce:
        raise PublishError("the time-stamping authority's reply has another request's nonce")
    if reply.tst_info.message_imprint.message != request.message_imprint.message:
        raise PublishError("the time-stamping authority stamped something else")
    return bytes(reply.as_bytes())


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
        """Start a thread for each destination: one that hangs delays no other."""
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
        """That most witnesses saw another log; fewer than that cannot stop the service."""
        witnesses = [place for place in self._places if isinstance(place, WitnessDestination)]
        if 2 * len(self._contradicted) <= len(witnesses):
            return None
        return Reason(
            code="log_damaged",
            message=f"{len(self._contradicted)} of {len(witnesses)} witnesses saw more of the log "
            "than there is, or another one: the database was rolled back.",
            remedy="Restore the database from a newer backup, or start another log.",
        )

    def publish(self) -> bool:
        """Deliver the newest checkpoint everywhere; returns whether all destinations have it."""
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
        pause = PERIOD
        while not self._stopped.wait(pause):
            pause = PERIOD if self._deliver(place) else RETRY
        self._deliver(place)
