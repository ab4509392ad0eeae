"""``affidavit witness``: a witness for logs, as a small server with its own folder.

Run it on another machine than the log, by somebody else than the log's operator. The folder holds
the witness's key (``keys``, created at the first start) and the last checkpoint of each log
(``checkpoints.json``). A checkpoint is on the disk before its cosignature is sent, so a witness
that is killed and restarted never cosigns a second history. One process at a time uses the folder.
A folder restored from a backup has lost its newest checkpoints: start another witness under another
name instead.

``POST /add-checkpoint`` responds as C2SP's tlog-witness does: 200 with the cosignature, 400 for a
malformed request, 403 if no known key of the log signed, 404 for an unknown log, 409 with the size
that the witness has seen, 422 for an invalid proof.

Reference: C2SP, tlog-witness.md.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from affidavit.certificate import KeyRole, KeyStore, SigningPort, write_atomically
from affidavit.certificate.log import (
    Addition,
    BadNote,
    Checkpoint,
    NoteKey,
    NotSigned,
    ProofError,
    SizeConflict,
    UnknownLog,
    WitnessKey,
    cosign,
    read_addition,
    read_checkpoint,
    require_extension,
    require_name,
    require_signed,
)
from affidavit.service.errors import OperatorError
from affidavit.service.log.checkpoint_publisher import SIZE_TYPE, TEXT_TYPE

MAX_BYTES = 64 * 1024
READ_SECONDS = 10.0
VERSION = 1

log = logging.getLogger("affidavit.witness")


class FolderWitness:
    """A witness of ``logs`` with its state in a folder; safe to use from several threads.

    Raises ``OperatorError`` if another process uses the folder.
    """

    def __init__(self, folder: Path, name: str, logs: Sequence[NoteKey]) -> None:
        self._name = name
        self._logs = tuple(logs)
        self._turn = Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = folder / "checkpoints.json"
        self._folder_lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._folder_lock.close()
            raise OperatorError(
                f"another witness is using {folder}; choose another --state."
            ) from None
        try:
            self._notes = self._read()
            self.key = self._signer(KeyStore(folder / "keys"))
        except BaseException:
            self._folder_lock.close()
            raise

    def add(self, request: Addition) -> str:
        """Store a checkpoint and return the cosignature.

        Raises ``UnknownLog``, ``NotSigned``, ``BadNote``, ``SizeConflict``, ``ProofError``, and
        ``OSError`` if the checkpoint cannot be stored.
        """
        require_signed(request, self._logs)
        origin = request.checkpoint.origin
        with self._turn:
            last = self.last(origin)
            require_extension(last, request)
            if last is None or last.size < request.checkpoint.size:
                self._store(origin, request.note)
            return cosign(request.note, self._name, self.key, datetime.now(UTC))

    def last(self, origin: str) -> Checkpoint | None:
        """Return the newest checkpoint of a log."""
        note = self._notes.get(origin)
        return None if note is None else read_checkpoint(note)

    def close(self) -> None:
        """Release the folder."""
        self._folder_lock.close()

    def _store(self, origin: str, note: str) -> None:
        notes = {**self._notes, origin: note}
        document = {"version": VERSION, "checkpoints": notes}
        content = (json.dumps(document, indent=1) + "\n").encode()
        write_atomically(self._file, content, mode=0o600)
        self._notes = notes

    def _signer(self, keys: KeyStore) -> SigningPort:
        if not keys.public_keys():
            if self._notes:  # with a new key it would be another witness
                raise OperatorError(f"{keys.directory} has no key; restore it.")
            keys.new("witness", roles=(KeyRole.WITNESS,))
        # The key's validity is irrelevant: trust policies name the key itself.
        key = keys.find(keys.public_keys()[0])
        if key is None:
            raise OperatorError(f"the private half of the key in {keys.directory} is missing.")
        return key

    def _read(self) -> dict[str, str]:
        try:
            document: Any = json.loads(self._file.read_text(encoding="utf-8"))
            if document["version"] != VERSION:
                raise ValueError("another version")
            notes = {str(origin): str(note) for origin, note in document["checkpoints"].items()}
            if any(read_checkpoint(note).origin != origin for origin, note in notes.items()):
                raise ValueError("a checkpoint of another log")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, BadNote) as error:
            raise OperatorError(
                f"{self._file} cannot be read ({error}), so the seen checkpoints are unknown. "
                "Start a witness with another folder and another name."
            ) from None
        return notes


def witness_app(witness: FolderWitness) -> Starlette:
    """Build the server with its one route."""

    async def add_checkpoint(request: Request) -> Response:
        content = await _body(request)
        if content is None:
            return _text(413, f"the request has more than {MAX_BYTES} bytes, or did not arrive")
        return await run_in_threadpool(_respond, witness, content)

    return Starlette(routes=[Route("/add-checkpoint", add_checkpoint, methods=["POST"])])


def _respond(witness: FolderWitness, content: bytes) -> Response:
    try:
        addition = read_addition(content)
    except BadNote as error:
        return _text(400, f"{error}")
    try:
        return Response(witness.add(addition), headers={"Content-Type": TEXT_TYPE})
    except UnknownLog:
        return _text(404, "this witness does not know that log")
    except (NotSigned, BadNote):
        return _text(403, "no known key of that log signed the checkpoint")
    except SizeConflict as conflict:
        return Response(f"{conflict.size}\n", 409, headers={"Content-Type": SIZE_TYPE})
    except ProofError as error:
        return _text(422, f"the proof does not hold: {error}")
    except OSError as error:
        log.error("a checkpoint could not be stored: %s", error)
        return _text(503, "the checkpoint could not be stored")


async def _body(request: Request) -> bytes | None:
    content = b""
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > MAX_BYTES:
                    return None
    except (TimeoutError, ClientDisconnect):
        return None
    return content


def _text(status: int, text: str) -> Response:
    return Response(f"{text}\n", status, headers={"Content-Type": TEXT_TYPE})


# ---- The command -----------------------------------------------------------------------


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
    from affidavit.service.operation.telemetry import configure_logging
    from affidavit.service.serve import listen, run_until_stopped

    server = FolderWitness(state, name, _log_keys(name, log))
    try:
        with listen(host, port) as listening:
            configure_logging()
            print(WitnessKey.of(name, server.key), file=sys.stdout, flush=True)  # noqa: T201
            run_until_stopped(witness_app(server), listening)
    finally:
        server.close()


def _log_keys(name: str, log: Sequence[str]) -> list[NoteKey]:
    try:
        require_name(name)
        return [NoteKey.parse(text) for text in log]
    except BadNote as error:
        raise OperatorError(f"{error}; check --name and --log.") from None
