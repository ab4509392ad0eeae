"""Checkpoints kept outside the database, which is what stops its owner.

Whoever owns the database can drop its triggers and write any row; who has the signing key
as well can sign what he wrote. A checkpoint that lies elsewhere is what such a log cannot
be made to agree with.

``FILE``
    The newest checkpoint, replaced in one step. When the service starts, the log has to
    continue the one in the file, or nothing is signed.
``https://...``
    Each new checkpoint is posted as it is, ``text/plain``.
``witness+https://...``
    Posted as C2SP's ``add-checkpoint``, with the proof that it continues the one that the
    witness has. The witness is another service's ``POST /v1/log/witness``, or any other.

Reference: C2SP, tlog-witness.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import httpx

from affidavit.certificate import write_whole
from affidavit.certificate.log import BadNote, Checkpoint, read_checkpoint, written
from affidavit.service.log.proofs import LogReader, NothingLogged
from affidavit.service.log.stored_tree import Kept, LogDamaged

SECONDS = 10.0
TEXT = "text/plain; charset=utf-8"
SIZE_TYPE = "text/x.tlog.size"


class ExportFailed(Exception):
    """A checkpoint did not get where it should be; it is tried again."""


class Export(Protocol):
    """A place outside the database."""

    @property
    def name(self) -> str:
        """What the service's log calls it."""
        ...

    def last(self) -> Checkpoint | None:
        """The checkpoint that lies there, where it can be asked for."""
        ...

    def send(self, kept: Kept) -> None:
        """Put a checkpoint there; raises ``ExportFailed``."""
        ...


class FileExport:
    """A file, best on another disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def last(self) -> Checkpoint | None:
        """What the file holds; raises ``LogDamaged`` when that is no checkpoint."""
        try:
            return read_checkpoint(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, BadNote) as error:
            raise LogDamaged(
                f"the checkpoint kept in {self._path} cannot be read: {error}"
            ) from None

    def send(self, kept: Kept) -> None:
        """Replace the file, on the disk before it has its name. Raises ``ExportFailed``."""
        try:
            write_whole(self._path, kept.note.encode())
        except OSError as error:
            raise ExportFailed(f"{self._path} cannot be written: {error.strerror}") from None


class UrlExport:
    """A URL that takes the note as it is."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def name(self) -> str:
        """The host, for a URL may carry a secret."""
        return httpx.URL(self._url).host

    def last(self) -> Checkpoint | None:
        """Unknown."""
        return None

    def send(self, kept: Kept) -> None:
        """Post it. Raises ``ExportFailed``."""
        answer = post(self._url, kept.note.encode(), TEXT)
        if not answer.is_success:
            raise ExportFailed(f"{self.name} answered {answer.status_code}")


class WitnessExport:
    """A witness, which takes a checkpoint only if it continues the last one that it took."""

    def __init__(self, url: str, log: LogReader) -> None:
        self._url = url
        self._log = log
        self._size = 0

    @property
    def name(self) -> str:
        """The witness's host."""
        return httpx.URL(self._url).host

    def last(self) -> Checkpoint | None:
        """Unknown; the witness itself refuses what does not continue it."""
        return None

    def send(self, kept: Kept) -> None:
        """Post it with the proof, once more if the witness has another checkpoint.

        Raises ``ExportFailed``.
        """
        answer = post(self._url, self._body(kept).encode(), TEXT)
        media = answer.headers.get("content-type", "").partition(";")[0]
        if answer.status_code == httpx.codes.CONFLICT and media == SIZE_TYPE:
            self._size = _size(answer.text)
            answer = post(self._url, self._body(kept).encode(), TEXT)
        if answer.status_code != httpx.codes.OK:
            raise ExportFailed(f"the witness {self.name} answered {answer.status_code}")
        self._size = kept.checkpoint.size

    def _body(self, kept: Kept) -> str:
        hashes: tuple[bytes, ...] = ()
        if self._size > kept.checkpoint.size:
            raise ExportFailed(
                f"the witness {self.name} saw {self._size} entries, more than there are"
            )
        if self._size > 0:
            try:
                hashes = self._log.consistency(self._size, kept.checkpoint.size).hashes
            except (NothingLogged, LogDamaged) as error:
                raise ExportFailed(str(error)) from None
        lines = "".join(f"{written(hash_)}\n" for hash_ in hashes)
        return f"old {self._size}\n{lines}\n{kept.note}"


def exports_of(setting: str, log: LogReader) -> tuple[Export, ...]:
    """The exports that a setting names, separated by commas."""
    found: list[Export] = []
    for item in filter(None, (part.strip() for part in setting.split(","))):
        if item.startswith(("witness+http://", "witness+https://")):
            found.append(WitnessExport(item.removeprefix("witness+"), log))
        elif item.startswith(("http://", "https://")):
            found.append(UrlExport(item))
        else:
            found.append(FileExport(Path(item)))
    return tuple(found)


def kept_in(exports: Iterable[Export]) -> list[Checkpoint]:
    """The checkpoints that lie at the places that can be asked; raises ``LogDamaged``."""
    found = (export.last() for export in exports)
    return [item for item in found if item is not None]


def post(url: str, content: bytes, media: str) -> httpx.Response:
    """The answer to a POST; raises ``ExportFailed`` when there is none."""
    try:
        return httpx.post(url, content=content, headers={"Content-Type": media}, timeout=SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        host = httpx.URL(url).host if isinstance(error, httpx.HTTPError) else "the URL"
        raise ExportFailed(f"{host} cannot be reached: {type(error).__name__}") from None


def _size(text: str) -> int:
    line = text.strip()
    if not (line.isascii() and line.isdecimal() and len(line) < 17):
        raise ExportFailed("the witness did not say how far it is")
    return int(line)
