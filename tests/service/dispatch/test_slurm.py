"""A real Slurm of one node: one job for one run, its states, and nothing of the service's in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from affidavit.service.dispatch.engine import EngineUnavailable, Job
from affidavit.service.dispatch.engines import Slurm
from tests.support.polling import wait_until
from tests.support.slurm_cluster import SlurmCluster, slurm_cluster

RUN = "6f1c0c9e-7d0b-4b52-9a37-0f5f4f7f9d11"
LIMIT = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as result:
        yield result


@pytest.fixture
def script(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A batch script that writes its arguments and environment, and waits for ``go``."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "job.sh"
    path.write_text(
        "#!/bin/sh\n"
        f"#SBATCH --gpus-per-node=2 --mem=900 --output={tmp_path}/output\n"
        f'echo "$@" > {tmp_path}/arguments.part; env > {tmp_path}/environment\n'
        f"mv {tmp_path}/arguments.part {tmp_path}/arguments\n"
        f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done\n"
    )
    return path


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Job:
    """One of its own for each test: the cluster remembers those that ended."""
    number = sum(map(ord, request.node.name))
    return Job(run=RUN, number=number, queue="gpu", gpus=0, memory=100)


def becomes(engine: Slurm, job: Job, state: str) -> None:
    wait_until(lambda: engine.jobs().get(job.id) == state, LIMIT, said=engine.jobs)


def test_a_run_is_one_job_that_has_what_it_requires(script: Path, job: Job) -> None:
    engine = Slurm(str(script))
    engine.submit(job)
    engine.submit(job)
    becomes(engine, job, "running")
    wait_until((script.parent / "arguments").exists, LIMIT)
    expected = f"--run {RUN} --queue gpu --name {job.id}"
    assert (script.parent / "arguments").read_text().strip() == expected
    listed = subprocess.check_output(["squeue", "--noheader", "--format=%j %m %b"], text=True)
    name, memory, gpus = listed.split()  # not the memory and the GPUs of the script
    assert (name, memory) == (job.id, "100M")
    assert gpus in ("N/A", "gres:gpu:0")
    (script.parent / "go").touch()
    becomes(engine, job, "ended")


def test_a_job_inherits_no_secret_of_the_service(
    script: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://affidavit:secret@db/affidavit")
    monkeypatch.setenv("AFFIDAVIT_KEY_PASSPHRASE", "secret")
    monkeypatch.setenv("AFFIDAVIT_SERVER", "https://affidavit.example.com")
    (script.parent / "go").touch()
    Slurm(str(script)).submit(job)
    wait_until((script.parent / "arguments").exists, LIMIT)
    lines = (script.parent / "environment").read_text().splitlines()
    assert "AFFIDAVIT_SERVER=https://affidavit.example.com" in lines
    assert not any("secret" in line for line in lines)


def test_a_cancelled_job_has_ended(script: Path, job: Job) -> None:
    engine = Slurm(str(script))
    engine.submit(job)
    becomes(engine, job, "running")
    engine.cancel(job.id)
    becomes(engine, job, "ended")
    engine.cancel(job.id)
    engine.cancel("affidavit-unknown")


def test_a_controller_that_is_away_is_said_to_be(
    script: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Slurm(str(script))
    text = Path(os.environ["SLURM_CONF"]).read_text()
    away = script.parent / "slurm.conf"
    away.write_text(text.replace("SlurmctldPort=", "MessageTimeout=2\nSlurmctldPort=1"))
    monkeypatch.setenv("SLURM_CONF", str(away))
    for call in (engine.jobs, lambda: engine.submit(job), lambda: engine.cancel(job.id)):
        with pytest.raises(EngineUnavailable, match=r"(?i)slurm"):
            call()
