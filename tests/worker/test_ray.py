"""A real Ray cluster of two nodes of which something dies; a batch, ranks and a search over both.

Part of ``make soak``: a cluster takes half a minute to start, and more to notice a death.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from affidavit.evidence import SearchOpening
from tests.service.conftest import Server
from tests.support import ray_cluster
from tests.support.polling import TIMEOUT_SECONDS, wait_until
from tests.support.processes import find_processes, parent_of
from tests.support.ray_cluster import RayCluster
from tests.trainer.loop.small_run import KEY, bundle_of, entries_of, plan_with, train_small
from tests.worker.test_faults import LIMIT, report, settled_once
from tests.worker.test_runs import alive

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4000
SHORT = 100


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    program = ray_cluster.program()
    if program is None:
        pytest.fail("there is no Ray: make install-ray")
    with ray_cluster.ray_cluster(program, nodes=2) as result:
        yield result


@pytest.fixture
def job(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the cluster starts, once the test has written it; the service knows where."""
    monkeypatch.setenv("AFFIDAVIT_DISPATCH", f"ray://127.0.0.1:{cluster.dashboard}")
    monkeypatch.setenv("AFFIDAVIT_JOB", str(tmp_path / "job"))
    return tmp_path / "job"


def write(job: Path, shop: Any, python: str = sys.executable) -> None:
    """The site of the nodes: where the service is, with what token and key, and outputs."""
    variables = {
        "AFFIDAVIT_TOKEN": shop.tokens["work"],
        "AFFIDAVIT_HOME": str(shop.home_of("w1")),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    words = [
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *(python, "-m", "affidavit.worker", "--server", shop.server.url, "--lease", "10"),
        *("--keys", str(shop.trusted), "--outputs", str(shop.home / "runs")),
    ]
    job.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    job.chmod(0o755)


def workers_of(run: str) -> list[int]:
    """The process ids of the workers of a run."""
    return find_processes(lambda words: b"affidavit.worker" in words and run.encode() in words)


def kill_job(_cluster: RayCluster, _shop: Any, run: str) -> None:
    for pid in workers_of(run):
        os.kill(pid, signal.SIGKILL)


def kill_node(cluster: RayCluster, _shop: Any, run: str) -> None:
    """The node of the job; if that is the head, as in ``kill_head``."""
    (pid, *_) = workers_of(run)
    nodes = {os.getpgid(node.pid): node for node in cluster.nodes}
    parents, current = [], pid
    while current > 1:
        parents.append(current)
        current = parent_of(current)
    (node,) = (node for group, node in nodes.items() if group in parents)
    if node is cluster.nodes[0]:
        kill_head(cluster, _shop, run)
        return
    cluster.kill(node)
    kill_job(cluster, _shop, run)


def kill_head(cluster: RayCluster, _shop: Any, run: str) -> None:
    for node in cluster.nodes:
        cluster.kill(node)
    kill_job(cluster, _shop, run)
    cluster.nodes.clear()
    cluster.start_head()


def kill_service(_cluster: RayCluster, shop: Any, _run: str) -> None:
    shop.server.stop(signal.SIGKILL)
    shop.server.start()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("death", [kill_job, kill_node, kill_head, kill_service])
def test_a_run_outlives_what_it_runs_on(
    cluster: RayCluster, job: Path, shop: Any, death: Callable[[RayCluster, Any, str], None]
) -> None:
    write(job, shop)
    run = shop.request(shop.certify(STEPS))
    if death is kill_service:  # between commit and hand-over, and afterwards
        kill_service(cluster, shop, run)
    wait_until(lambda: shop.run(run)["steps"]["reported"] > 20, LIMIT, said=shop.logs)
    first = workers_of(run)
    assert first
    death(cluster, shop, run)
    result = shop.wait(run, "settled", "failed", "cancelled", seconds=LIMIT)
    assert (result["state"], result["code"]) == ("settled", "conformant"), report(shop, result)
    settled_once(shop, run, STEPS)
    assert result["claims"] >= 1 + (death is not kill_service)
    wait_until(lambda: not any(map(alive, workers_of(run))))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_two_services_hand_a_run_over_once(cluster: RayCluster, job: Path, shop: Any) -> None:
    write(job, shop)
    replica = Server(shop.home, forked=True)
    replica.start()
    certificate = shop.certify(SHORT)
    runs = [shop.request(certificate) for _ in range(3)]
    for run in runs:
        result = shop.wait(run, "settled", "failed", "cancelled", seconds=LIMIT)
        assert (result["state"], result["claims"]) == ("settled", 1), report(shop, result)
        settled_once(shop, run, SHORT)
    listed = httpx.get(
        f"http://127.0.0.1:{cluster.dashboard}/api/jobs/", timeout=TIMEOUT_SECONDS
    ).json()
    jobs = [item["submission_id"] for item in listed if item["submission_id"]]
    assert sorted(jobs) == sorted(f"affidavit-{run}-1" for run in runs)
    replica.stop(signal.SIGKILL)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_run_that_asks_for_two_hosts_gets_both_nodes(
    cluster: RayCluster, job: Path, shop: Any
) -> None:
    write(job, shop, str(Path(cluster.ray).parent / "python"))
    run = shop.request(shop.certify(SHORT), requirements={"hosts": 2})
    result = shop.wait(run, "settled", "failed", "cancelled", seconds=LIMIT)
    assert (result["state"], result["code"]) == ("settled", "conformant"), report(shop, result)
    settled_once(shop, run, SHORT)
    (record,) = (shop.home / "runs" / "tiny").glob(f"{run}-1/run/record.jsonl")
    assert '"ranks":2' in record.read_text()


def of_ray(cluster: RayCluster, *words: str) -> subprocess.Popen[bytes]:
    """A program of the environment that has Ray, as a driver of the cluster."""
    environment = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "RAY_ADDRESS": cluster.address,
        "OMP_NUM_THREADS": "1",
    }
    python = str(Path(cluster.ray).parent / "python")
    return subprocess.Popen([python, "-m", *words], env={**os.environ, **environment}, cwd=ROOT)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that ranks on all nodes see, with the certificate of the small run."""
    (tmp_path / "bundle.json").write_bytes(bundle_of(plan_with()))
    (tmp_path / "keys.json").write_text(json.dumps(KEY.public.as_record()))
    return tmp_path


def ranks(cluster: RayCluster, folder: Path, *what: str) -> int:
    """How ranks of two nodes end."""
    python = str(Path(cluster.ray).parent / "python")
    rank = [python, "-m", "affidavit.worker.exec_with_parent", "launcher", python, "-m"]
    command = [
        "affidavit.trainer.distributed.ray_ranks",
        "2",
        "1",
        *rank,
        "tests.trainer.loop.rank",
    ]
    return of_ray(cluster, *command, str(folder), *what).wait(LIMIT)


def test_ranks_on_two_nodes_train_as_one_process_does(cluster: RayCluster, shared: Path) -> None:
    assert ranks(cluster, shared) == 0
    one, other = (torch.load(shared / f"values.{rank}") for rank in (0, 1))
    alone = train_small(None, out=shared / "alone", seed=1)
    for name, value in alone.model.module.state_dict().items():
        assert torch.equal(one[name], other[name])
        assert torch.allclose(one[name], value, atol=1e-6)
    assert entries_of(shared / "run")[0]["performance"]["ranks"] == 2


@pytest.mark.parametrize(
    ("what", "code"), [(["die", "6"], "rank_lost"), (["stray"], "ranks_differ")]
)
def test_a_rank_on_another_node_that_dies_or_strays_stops_the_run(
    cluster: RayCluster, shared: Path, what: list[str], code: str
) -> None:
    assert ranks(cluster, shared, *what) != 0
    assert (shared / "failure.0").read_text() == code
    assert entries_of(shared / "run")[-1]["type"] != "final"


def test_a_search_is_trials_of_ray_tune(cluster: RayCluster, tmp_path: Path) -> None:
    """Its nodes share the folder; of the trials nothing is left but the best."""
    plan = plan_with(
        dataset={"name": "digits-train", "size": 1438},
        sampling={"scheme": "poisson", "lot_size": 64},
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
        clipping="flat",
        target={"epsilon": 200, "delta": 1e-5},
        extra=[{"kind": "repeat_and_select", "name": "s", "distribution": "poisson", "mean": 3}],
    )
    (tmp_path / "plan.json").write_text(plan.model_dump_json(exclude_none=True, by_alias=True))
    (tmp_path / "bundle.json").write_bytes(bundle_of(plan))
    (tmp_path / "keys.json").write_text(json.dumps(KEY.public.as_record()))
    out = tmp_path / "out"
    files = ("certificate=bundle", "plan=plan", "keys=keys")
    options = [f"--{name}={tmp_path / file}.json" for name, file in (f.split("=") for f in files)]
    options += ["--data=digits:part=train", "--model=mlp:8,seed=1,blocks=all", "--device=cpu"]
    opening = SearchOpening.create("sha256:" + 64 * "0", {}, "digits:part=test")
    (selection,) = plan.extra
    while opening.trials(selection) < 2:
        opening = SearchOpening.create(opening.certificate, {}, opening.score)
    out.mkdir()
    (out / "search.json").write_text(json.dumps(opening.as_document()))
    assert of_ray(cluster, "affidavit.trainer.search", *options, f"--out={out}").wait(LIMIT) == 0
    assert {path.name for path in out.iterdir()} == {"search.json", "run"}
    assert entries_of(out / "run")[0]["search"] == opening.digest
