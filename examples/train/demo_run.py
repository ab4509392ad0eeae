"""A certified run from end to end: requested, claimed, trained, held to its certificate, settled.

Starts the service on an SQLite file of its own (below ``$AFFIDAVIT_HOME/demo-run``, made anew
each time), sets a budget, certifies DP-Muon on digits, asks for a run, lets one worker with a
key of its own do it, and prints what the ledger was charged and that the audit finds nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from affidavit.certificate.keys import KeyStore

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("AFFIDAVIT_HOME") or HERE.parents[1] / ".affidavit") / "demo-run"
AFFIDAVIT = (sys.executable, "-m", "affidavit.gate")
BUDGET = {"adjacency": "add_remove", "epsilon": 8, "delta": 1e-4, "reason": "a demonstration"}
START_SECONDS = 60.0

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demonstration; 0 when the run was settled and conforms."""
    shutil.rmtree(HOME, ignore_errors=True)
    os.environ.pop("AFFIDAVIT_TOKEN", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: a second thread only waits
    KeyStore(HOME / "service" / "keys").new("service")
    worker_key = KeyStore(HOME / "worker" / "keys").new("worker")
    KeyStore(HOME / "service" / "worker-keys").keep(worker_key.public)
    command("service", "migrate")
    people, work = token("admin", "submit", "audit"), token("work")
    with service() as base:
        run = settled(base, people, work)
    told = f"run {run['id']}: {run['state']}, {run['code']}"
    console.print(f"{told}; {run['steps']['charged']} steps were charged to the ledger")
    console.print(f"its record ends in {run['record']}")
    audited = command("service", "audit", "verify").returncode == 0
    return 0 if run["code"] == "conformant" and audited else 1


def settled(base: str, people: str, work: str) -> Any:
    """The run, once a worker has done it."""
    plan = (HERE / "digits-dp-muon.yaml").read_bytes()
    yaml = {"content-type": "application/yaml"}
    bearer = {"authorization": f"Bearer {people}"}
    with httpx.Client(base_url=base, timeout=120, headers=bearer) as client:
        _good(client.post("/v1/ledgers/digits-train/budget", json=BUDGET))
        result = _good(client.post("/v1/certificates", content=plan, headers=yaml))
        certificate = result["certificate"]["id"]
        console.print(f"certified: ε ≤ {result['epsilon']['upper']:.4g} ({certificate[:23]}…)")
        wanted = {
            "certificate": certificate,
            "data": "digits:part=train",
            "model": "mlp:64,seed=1,blocks=hidden",
            "output": "digits-dp-muon",
        }
        run = _good(client.post("/v1/runs", json=wanted))
        console.print(f"run {run['id']}: {run['state']}, its cost is reserved")
        (trusted,) = (HOME / "service" / "keys").glob("*.json")
        command(
            "worker", "worker", "--server", base, "--once", "--microbatch", "1024",
            "--keys", str(trusted), "--outputs", str(HOME / "runs"),
            AFFIDAVIT_TOKEN=work,
        )  # fmt: skip
        return _good(client.get(f"/v1/runs/{run['id']}"))


def token(*scopes: str) -> str:
    """A new token of these scopes."""
    asked = [part for scope in scopes for part in ("--scope", scope)]
    return command("service", "tokens", "new", "--name", "demo", *asked, quiet=True).stdout.strip()


def command(
    home: str, *arguments: str, quiet: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """One command of the command line, with the service's home or the worker's."""
    environment = {**os.environ, "AFFIDAVIT_HOME": str(HOME / home), **more}
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if quiet else {}
    return subprocess.run(
        [*AFFIDAVIT, *arguments], env=environment, check=False, text=True, **given
    )


@contextmanager
def service() -> Iterator[str]:
    """The service on a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base, environment = f"http://127.0.0.1:{port}", dict(os.environ)
    environment["AFFIDAVIT_HOME"] = str(HOME / "service")
    with (HOME / "service.log").open("wb") as log:
        process = subprocess.Popen(
            [*AFFIDAVIT, "serve", "--port", str(port)], env=environment, stderr=log
        )
    try:
        end = time.monotonic() + START_SECONDS
        while not _ready(base):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit((HOME / "service.log").read_text())
            time.sleep(0.1)
        yield base
    finally:
        process.terminate()
        process.wait(30)


def _ready(base: str) -> bool:
    try:
        return httpx.get(f"{base}/readyz").is_success
    except httpx.HTTPError:
        return False


def _good(answer: httpx.Response) -> Any:
    if not answer.is_success:
        raise SystemExit(answer.text)
    return answer.json()


if __name__ == "__main__":
    raise SystemExit(main())
