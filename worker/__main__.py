"""``python -m affidavit.worker``: what ``affidavit worker`` becomes.

Exit codes: 0 stopped as asked, or with ``--once`` nothing waits; 2 usage, no key to sign with, or
the service takes nothing from this worker; 3 with ``--once``, the service could not be reached.
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

from affidavit.certificate import KeyFailure, KeyStore, SigningPort, Trust, home
from affidavit.certificate.signers import private_halves
from affidavit.worker.handover import place_of
from affidavit.worker.job import Site
from affidavit.worker.queue import Wanting
from affidavit.worker.remote import RemoteQueue
from affidavit.worker.slots import WAIT, Slots

USAGE = 2
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def main(
    queue: Annotated[str, typer.Option(help="The queue to take runs from.")] = "default",
    slots: Annotated[int, typer.Option(min=1, max=256, help="Runs at a time.")] = 1,
    server: Annotated[
        str, typer.Option(envvar="AFFIDAVIT_SERVER", help="Where the service answers.")
    ] = "http://127.0.0.1:8321",
    outputs: Annotated[Path, typer.Option(help="The folder below which runs are kept.")] = Path(
        "runs"
    ),
    keys: Annotated[
        list[Path] | None,
        typer.Option("--keys", help="Public keys of the service to trust, instead of your own."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of this worker; by default the host's.")] = None,
    lease: Annotated[
        int,
        typer.Option(min=1, max=86_400, help="Seconds without a word after which a run is lost."),
    ] = 60,
    gpu: Annotated[bool, typer.Option("--gpu", help="Take runs that need a GPU.")] = False,
    memory: Annotated[int, typer.Option(min=0, help="MiB of memory for each run.")] = 0,
    own_code: Annotated[
        bool,
        typer.Option(
            "--own-code", help="Take runs whose data or model is python:…, which is code."
        ),
    ] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--files",
            help="A folder below which runs may name files as data or model; repeatable. Without "
            "one they may name none.",
        ),
    ] = None,
    microbatch: Annotated[int, typer.Option(min=1, help="Records at a time.")] = 64,
    processes: Annotated[
        int,
        typer.Option(min=1, max=64, help="Processes of each run, by torchrun; one for each GPU."),
    ] = 1,
    wait: Annotated[float, typer.Option(min=0.05, help="Seconds between questions.")] = WAIT,
    once: Annotated[bool, typer.Option("--once", help="End when nothing waits.")] = False,
) -> None:
    """Claim certified runs, train them, and report what they did."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    worker = name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "worker"
    for option, value in (("--queue", queue), ("--name", worker)):
        if NAME.fullmatch(value) is None:
            _stop(f"{option} is {value[:80]!r}: give 1 to 64 of A-Z a-z 0-9 . _ -")
    site = Site(
        source=_source(server, os.environ.get("AFFIDAVIT_TOKEN")),
        name=worker,
        outputs=outputs.resolve(),
        key=_key(),
        keys=_trusted(keys or []),
        lease=lease,
        own_code=own_code,
        files=tuple(path.resolve() for path in files or ()),
        options=(f"--microbatch={microbatch}", *(() if gpu else ("--device=cpu",))),
        processes=processes,
        pause=min(0.5, lease / 6),
    )
    wanting = Wanting(
        queue=queue,
        worker=worker,
        seconds=lease,
        gpu=gpu,
        memory_mib=memory,
        place=_place(site.outputs),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda sent, _: _ask_to_stop(stop, sent))
    slots_of = Slots(site=site, wanting=wanting, count=slots, wait=wait, once=once)
    raise typer.Exit(slots_of.run(stop))


def _ask_to_stop(stop: threading.Event, sent: int) -> None:
    if stop.is_set():
        os._exit(128 + sent)  # trainers die with this process
    stop.set()


def _source(server: str, token: str | None) -> RemoteQueue:
    if re.fullmatch(r"https?://[^/\s]+\S*", server) is None:
        _stop(f"--server is {server[:80]!r}: give http://HOST or https://HOST.")
    if token and re.fullmatch(r"[!-~]+", token) is None:
        _stop("AFFIDAVIT_TOKEN is no token: it has characters that no token has.")
    return RemoteQueue(server, token)


def _place(outputs: Path) -> str:
    try:
        return place_of(outputs)
    except (OSError, UnicodeError) as error:
        _stop(f"--outputs {outputs} cannot be used: {error}")


def _key() -> SigningPort:
    try:
        found = KeyStore(home() / "keys").signing_key(private_halves(os.environ))
    except KeyFailure as failure:
        _stop(str(failure))
    if found is None:
        _stop("there is no key to sign with; make one for this worker: affidavit keys new")
    return found


def _trusted(keys: list[Path]) -> tuple[Path, ...]:
    """The files of trusted keys, which are read for each run: others may come."""
    try:
        Trust(keys).public_keys()
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
