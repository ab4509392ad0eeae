"""A service and a worker of one's own on this machine, in a folder, for examples."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from affidavit.trust import KeyStore

AFFIDAVIT = (sys.executable, "-m", "affidavit")
START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class LocalService:
    """The service, with its keys and those of its worker below ``folder``."""

    folder: Path

    def create(self) -> None:
        """Make a key for each and the tables of the database; nothing that exists is made anew."""
        if not self.keys("worker"):
            KeyStore(self.folder / "service" / "keys").new("service")
            worker_key = KeyStore(self.folder / "worker" / "keys").new("worker")
            KeyStore(self.folder / "service" / "worker-keys").save(worker_key.public)
        self.command("service", "migrate")

    def keys(self, home: str) -> list[Path]:
        """The public keys of the service or the worker."""
        return sorted((self.folder / home / "keys").glob("*.json"))

    def token(self, *scopes: str) -> str:
        """A new token of these scopes."""
        requested = [part for scope in scopes for part in ("--scope", scope)]
        return self.command(
            "service", "tokens", "new", "--name", "demo", *requested, quiet=True
        ).stdout.strip()

    def command(
        self, home: str, *arguments: str, quiet: bool = False, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """One command of the command line, with the service's home or the worker's."""
        environment = {**os.environ, "AFFIDAVIT_HOME": str(self.folder / home), **more}
        provided = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if quiet else {}
        return subprocess.run(
            [*AFFIDAVIT, *arguments], env=environment, check=False, text=True, **provided
        )

    @contextmanager
    def serve(self, port: int, **dispatch: str) -> Iterator[str]:
        """The service on a loopback port; its address."""
        base, environment = f"http://127.0.0.1:{port}", {**os.environ, **dispatch}
        environment["AFFIDAVIT_HOME"] = str(self.folder / "service")
        with (self.folder / "service.log").open("wb") as log:
            process = subprocess.Popen(
                [*AFFIDAVIT, "serve", "--port", str(port)], env=environment, stderr=log
            )
        try:
            end = time.monotonic() + START_SECONDS
            while not _ready(base):
                if process.poll() is not None:
                    raise SystemExit((self.folder / "service.log").read_text())
                if time.monotonic() > end:
                    raise SystemExit(f"the service is not ready after {START_SECONDS:.0f} seconds")
                time.sleep(0.1)
            yield base
        finally:
            process.terminate()
            process.wait(30)


def require(answer: httpx.Response) -> Any:
    """The JSON of a good answer; raises ``SystemExit`` with a bad one."""
    if not answer.is_success:
        raise SystemExit(answer.text)
    return answer.json()


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ready(base: str) -> bool:
    try:
        return httpx.get(f"{base}/readyz").is_success
    except httpx.HTTPError:
        return False
