"""``python -m affidavit.worker``: the program behind ``affidavit worker``.

It claims runs from a queue one by one. As the job of an engine it claims only its run (``--run``).
The first SIGTERM or SIGINT lets the current run finish, because an aborted run is charged in full.
The second one kills the worker and its trainer.

Exit codes: 0 stopped by a signal, or nothing left to claim with ``--once`` or ``--run``; 2 usage,
no signing key, no GPU for ``--gpu``, or refused by the service; 3 the service could not be reached
with ``--once`` or ``--run``.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from affidavit import trust as trusts

if TYPE_CHECKING:
    from affidavit.worker.service_client import RunQueueClient

USAGE = 2
CLAIM_SECONDS = 2.0
"""Pause between two claims from an empty queue."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def main(
    queue: Annotated[str, typer.Option(help="Queue to claim runs from.")] = "default",
    run: Annotated[
        str | None, typer.Option("--run", help="Claim only this run, and exit when it ends.")
    ] = None,
    server: Annotated[
        str, typer.Option(envvar="AFFIDAVIT_SERVER", help="Base URL of the service.")
    ] = "http://127.0.0.1:8321",
    outputs: Annotated[Path, typer.Option(help="Folder for run outputs.")] = Path("runs"),
    keys: Annotated[
        list[Path] | None,
        typer.Option(
            "--keys", help="Trusted public keys, as returned by GET /v1/keys, instead of your own."
        ),
    ] = None,
    keyset: Annotated[
        list[Path] | None,
        typer.Option(
            "--keyset",
            help="Keyset whose keys to trust (GET /v1/keyset); repeatable, oldest first.",
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option("--root", help="With --keyset: the trusted roots, or the last keyset seen."),
    ] = None,
    trust: Annotated[
        Path | None,
        typer.Option(
            "--trust",
            help="Trust policy (YAML): log, witnesses and freshness; default: the keyset's.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this worker; default: the host name.")
    ] = None,
    lease: Annotated[
        int,
        typer.Option(min=1, max=86_400, help="Seconds without a heartbeat until a run is lost."),
    ] = 60,
    gpu: Annotated[bool, typer.Option("--gpu", help="Train on GPUs.")] = False,
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
        int, typer.Option(min=1, max=64, help="Trainer processes per run (torchrun); one per GPU.")
    ] = 1,
    hosts: Annotated[
        int, typer.Option(min=1, max=1024, help="Nodes of the Ray cluster that share each run.")
    ] = 1,
    wait: Annotated[
        float, typer.Option(min=0.05, help="Seconds between claims from an empty queue.")
    ] = CLAIM_SECONDS,
    once: Annotated[bool, typer.Option("--once", help="Exit when the queue is empty.")] = False,
) -> None:
    """Claim certified runs from a service, train them one by one, and report the results."""
    from affidavit.worker import claiming
    from affidavit.worker.job import WorkerConfig
    from affidavit.worker.lease import UUID

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    worker = name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "worker"
    for option, value in (("--queue", queue), ("--name", worker)):
        if NAME.fullmatch(value) is None:
            _stop(f"{option} {value[:80]!r} is invalid: use 1 to 64 of A-Z a-z 0-9 . _ -")
    if run is not None and re.fullmatch(UUID, run) is None:
        _stop(f"--run {run[:80]!r} is not a run id.")
    if gpu and hosts == 1:  # the nodes of a Ray cluster have GPUs where this process has none
        _require_cuda(processes)
    trusted = trusts.TrustRoot(keys, keyset, root, trust)
    key = _signing_key(trusted)
    config = WorkerConfig(
        source=_source(server, os.environ.get("AFFIDAVIT_TOKEN")),
        name=worker,
        outputs=outputs.resolve(),
        key=key,
        trust=trusted,
        lease=lease,
        own_code=own_code,
        files=tuple(path.resolve() for path in files or ()),
        options=(f"--microbatch={microbatch}", f"--device={'cuda' if gpu else 'cpu'}"),
        processes=processes,
        hosts=hosts,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: _on_signal(stop, received))
    once = once or run is not None
    raise typer.Exit(claiming.claim_runs(config, queue, run, stop, wait=wait, once=once))


def _on_signal(stop: threading.Event, received: int) -> None:
    if stop.is_set():
        os._exit(128 + received)  # trainers die with this process
    stop.set()


def _require_cuda(devices: int) -> None:
    """Exit before a run is claimed, which would be charged if the trainer had no GPU."""
    usable = "torch.cuda.is_available() and torch.cuda.device_count()"
    program = f"import sys, torch; sys.exit(({usable}) < {devices})"
    if subprocess.run([sys.executable, "-c", program], check=False).returncode:
        _stop(
            f"--gpu: PyTorch finds fewer than {devices} CUDA devices here. Make as many visible, "
            "lower --processes, or leave out --gpu."
        )


def _source(server: str, token: str | None) -> RunQueueClient:
    if re.fullmatch(r"https?://[^/\s]+\S*", server) is None:
        _stop(f"--server {server[:80]!r} is not a URL: use http://HOST or https://HOST.")
    if token and re.fullmatch(r"[!-~]+", token) is None:
        _stop("AFFIDAVIT_TOKEN is not valid: use letters A to Z, digits and . _ ~ + / - = only.")
    from affidavit.worker.service_client import RunQueueClient

    return RunQueueClient(server, token)


def _signing_key(trusted: trusts.TrustRoot) -> trusts.SigningPort:
    """Return the worker's signing key; ``trusted`` can be read, and is read again for each run."""
    from affidavit.trust.signers import own_signing_key

    try:
        key = own_signing_key(trusts.KeyRole.RUN)
        if key is None:
            _stop("no signing key found; create one for this worker with: affidavit keys new")
        trusted.load()
    except (trusts.KeyFailure, trusts.VerificationError) as failure:
        _stop(str(failure))
    return key


def _stop(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(USAGE)


app = typer.Typer(name="affidavit worker", add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="affidavit worker")
