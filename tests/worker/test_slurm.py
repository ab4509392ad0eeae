"""A real Slurm of one node of which something dies: the recipe's run is executed once.

Part of ``make soak``, as with Ray.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import wait_until
from tests.support.processes import find_processes
from tests.support.slurm_cluster import SlurmCluster, slurm_cluster, small_recipe
from tests.worker.test_faults import LIMIT, report, settled_once
from tests.worker.test_ray import ROOT, STEPS
from tests.worker.test_runs import alive

pytestmark = pytest.mark.soak


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster, and the service's settings for it."""
    with slurm_cluster() as result:
        for name, value in result.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.setenv("AFFIDAVIT_DISPATCH", "slurm")
        monkeypatch.setenv("AFFIDAVIT_JOB", str(tmp_path / "worker.sbatch"))
        monkeypatch.setenv("AFFIDAVIT_SITE", str(tmp_path / "site"))
        yield result


def workers_of(run: str) -> list[int]:
    """The process ids of the workers of a run, not of what started them."""
    return find_processes(
        lambda words: (
            {b"worker", b"worker.__main__"} & {*words}
            and run.encode() in words
            and not words[0].endswith(b"srun")
        )
    )


def write(folder: Path, shop: Any) -> None:
    """The site, and the script for a node that is small."""
    site = folder / "site"
    shutil.copytree(shop.home_of("w1"), site)
    exports = {
        "PYTHONPATH": ROOT / "src",
        "AFFIDAVIT_SERVER": shop.server.url,
        "AFFIDAVIT_OUTPUTS": shop.home / "runs",
    }
    own = [*(f"export {name}={value}" for name, value in exports.items()), "set -euo pipefail"]
    script = small_recipe(site, shop.tokens["work"], shop.trusted, memory=400)
    script = script.replace("--once", "--once --lease 10").replace(own[-1], "\n".join(own), 1)
    (folder / "worker.sbatch").write_text(script)


def kill_job(_cluster: SlurmCluster, _shop: Any, run: str) -> None:
    for pid in workers_of(run):
        os.kill(pid, signal.SIGKILL)


def cancel_job(cluster: SlurmCluster, _shop: Any, run: str) -> None:
    cluster.run("scancel", "--full", "--signal=KILL", f"--name=affidavit-{run}-1")


def kill_node(cluster: SlurmCluster, shop: Any, run: str) -> None:
    cluster.kill("slurmd")
    kill_job(cluster, shop, run)
    cluster.start_node()


def kill_controller(cluster: SlurmCluster, _shop: Any, _run: str) -> None:
    cluster.kill("slurmctld")
    cluster.start_controller()


def kill_service(_cluster: SlurmCluster, shop: Any, _run: str) -> None:
    shop.server.stop(signal.SIGKILL)
    shop.server.start()


GOES_ON = (kill_controller, kill_service)
"""Deaths that the job outlives."""


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("death", [kill_job, cancel_job, kill_node, *GOES_ON])
def test_a_run_outlives_what_it_runs_on(
    cluster: SlurmCluster,
    tmp_path: Path,
    shop: Any,
    death: Callable[[SlurmCluster, Any, str], None],
) -> None:
    write(tmp_path, shop)
    run = shop.request(shop.certify(STEPS))
    wait_until(lambda: shop.run(run)["steps"]["reported"] > 20, LIMIT, said=shop.logs)
    first = workers_of(run)
    assert first
    death(cluster, shop, run)
    result = shop.wait(run, "settled", "failed", "cancelled", seconds=LIMIT)
    assert (result["state"], result["code"]) == ("settled", "conformant"), report(shop, result)
    settled_once(shop, run, STEPS)
    assert result["claims"] == 1 + (death not in GOES_ON)
    wait_until(lambda: not any(map(alive, workers_of(run))))
