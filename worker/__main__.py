"""``python -m affidavit.worker``: the program behind ``affidavit worker``.

Exit codes: 0 stopped by a signal, or with ``--once`` the queue is empty; 2 usage, no signing key,
or the service refuses this worker; 3 with ``--once``, the service could not be reached.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from affidavit.certificate import KeyFailure, KeyRole, KeyStore, SigningPort, TrustRoot, home
from affidavit.certificate.signers import private_key_source
from affidavit.worker.checkpoint_transfer import place_of
from affidavit.worker.job import WorkerConfig
from affidavit.worker.lease import ClaimRequest
from affidavit.worker.queue import RunQueue
from affidavit.worker.slots import WAIT, Slots

USAGE = 2
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def main(
    queue: Annotated[str, typer.Option(help="Queue to claim runs from.")] = "default",
    slots: Annotated[int, typer.Option(min=1, max=256, help="Number of concurrent runs.")] = 1,
    server: Annotated[
        str, typer.Option(envvar="AFFIDAVIT_SERVER", help="Base URL of the service.")
    ] = "http://127.0.0.1:8321",
    outputs: Annotated[Path, typer.Option(help="Folder for run outputs.")] = Path("runs"),
    keys: Annotated[
        list[Path] | None,
        typer.Option("--keys", help="Trusted public keys of the service, instead of your own."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this worker; default: the host name.")
    ] = None,
    lease: Annotated[
        int,
        typer.Option(min=1, max=86_400, help="Seconds without a heartbeat until a run is lost."),
    ] = 60,
    gpu: Annotated[bool, typer.Option("--gpu", help="Accept runs that need a GPU.")] = False,
    memory: Annotated[int, typer.Option(min=0, help="Memory per run, in MiB.")] = 0,
    own_code: Annotated[
        bool,
        typer.Option(
            "--own-code", help="Accept runs whose data or model is python:…, which executes code."
        ),
    ] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--files",
            help="Folder whose files runs may use as data or model; repeatable. Without it runs "
            "may use no files.",
        ),
    ] = None,
    microbatch: Annotated[int, typer.Option(min=1, help="Records per microbatch.")] = 64,
    processes: Annotated[
        int,
        typer.Option(min=1, max=64, help="Trainer processes per run (torchrun); one per GPU."),
    ] = 1,
    wait: Annotated[
        float, typer.Option(min=0.05, help="Seconds between polls of an empty queue.")
    ] = WAIT,
    once: Annotated[bool, typer.Option("--once", help="Exit when the queue is empty.")] = False,
) -> None:
    """Claim certified runs from a service, train them, and report the results."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    worker = name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "worker"
    for option, value in (("--queue", queue), ("--name", worker)):
        if NAME.fullmatch(value) is None:
            _stop(f"{option} {value[:80]!r} is invalid: use 1 to 64 of A-Z a-z 0-9 . _ -")
    config = WorkerConfig(
        source=_source(server, os.environ.get("AFFIDAVIT_TOKEN")),
        name=worker,
        outputs=outputs.resolve(),
        key=_signing_key(),
        keys=_trusted_keys(keys or []),
        lease=lease,
        own_code=own_code,
        files=tuple(path.resolve() for path in files or ()),
        options=(f"--microbatch={microbatch}", *(() if gpu else ("--device=cpu",))),
        processes=processes,
        pause=min(0.5, lease / 6),
    )
    request = ClaimRequest(
        queue=queue,
        worker=worker,
        seconds=lease,
        gpu=gpu,
        memory_mib=memory,
        place=_place(config.outputs),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: _on_signal(stop, received))
    pool = Slots(config=config, request=request, count=slots, wait=wait, once=once)
    raise typer.Exit(pool.run(stop))


def _on_signal(stop: threading.Event, received: int) -> None:
    if stop.is_set():
        os._exit(128 + received)  # trainers die with this process
    stop.set()


def _source(server: str, token: str | None) -> RunQueue:
    if re.fullmatch(r"https?://[^/\s]+\S*", server) is None:
        _stop(f"--server {server[:80]!r} is not a URL: use http://HOST or https://HOST.")
    if token and re.fullmatch(r"[!-~]+", token) is None:
        _stop("AFFIDAVIT_TOKEN is not a token: it contains invalid characters.")
    return RunQueue(server, token)


def _place(outputs: Path) -> str:
    try:
        return place_of(outputs)
    except (OSError, UnicodeError) as error:
        _stop(f"--outputs {outputs} cannot be used: {error}")


def _signing_key() -> SigningPort:
    try:
        key = KeyStore(home() / "keys").signing_key(
            private_key_source(os.environ), role=KeyRole.RUN
        )
    except KeyFailure as failure:
        _stop(str(failure))
    if key is None:
        _stop("no signing key found; create one for this worker with: affidavit keys new")
    return key


def _trusted_keys(keys: list[Path]) -> tuple[Path, ...]:
    """Check the files of trusted keys, which are read again for each run."""
    try:
        TrustRoot(keys).public_keys()
    except KeyFailure as failure:
        _stop(str(failure))
    return tuple(path.resolve() for path in keys)


def _stop(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(USAGE)


app = typer.Typer(name="affidavit worker", add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="affidavit worker")
