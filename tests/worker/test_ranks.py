"""A run of several processes: trained as one, and gone to the last of them when the worker is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Forked, fork
from tests.support.polling import TIMEOUT_SECONDS, wait_until
from tests.support.processes import find_processes, parent_of
from tests.worker.conftest import PROGRAM

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "worker.sbatch"
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
STEPS = 24
LIMIT = TIMEOUT_SECONDS
LEASE = 2


def ranks_of(run: str) -> list[int]:
    """The process ids of the trainers of a run, not of what started them."""
    return find_processes(
        lambda words: (
            words[1:3] == [b"-m", b"affidavit.trainer"]
            and any(run.encode() in word for word in words)
        )
    )


def by_slurm(shop: Any, *options: str) -> Any:
    """The recipe for Slurm, on a node without GPUs."""
    site = shop.home_of("w2")
    (site / "token").write_text(shop.tokens["work"])
    (site / "service-keys.json").symlink_to(shop.trusted)
    programs = site / "programs"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "srun").chmod(0o755)
    return shop.begin(
        ["bash", str(SCRIPT), *options],
        site,
        PATH=f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        AFFIDAVIT_SERVER=shop.server.url,
        AFFIDAVIT_SITE=str(site),
        AFFIDAVIT_OUTPUTS=str(shop.home / "runs"),
        SLURM_JOB_ID="1",
        SLURM_CPUS_PER_TASK="2",
    )


@pytest.mark.soak
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_two_processes_train_one_run_and_none_outlives_its_worker(shop: Any) -> None:
    """The worker is killed in the middle; one in an allocation of Slurm goes on with two."""
    run = shop.request(shop.certify(STEPS))
    worker = shop.worker("--processes", "2", "--lease", str(LEASE), module=PROGRAM)
    shop.begun(run)
    ranks = ranks_of(run)
    assert len(ranks) == 2
    worker.send_signal(signal.SIGKILL)
    worker.wait(TIMEOUT_SECONDS)
    wait_until(lambda: not ranks_of(run), LIMIT, said=shop.logs)
    time.sleep(LEASE + 0.5)  # then the lease of the worker that was killed is certainly over

    allocated = by_slurm(
        shop, "--processes", "2", "--lease", "5", "--wait", "0.1", "--queue", "default"
    )
    wait_until(lambda: len(ranks_of(run)) == 2, LIMIT, said=shop.logs)
    for pid in {*ranks_of(run), *map(parent_of, ranks_of(run))}:
        os.kill(pid, signal.SIGTERM)  # as Slurm does to every process of a job: nothing stops
    result = shop.wait(run, "settled", "failed", seconds=TIMEOUT_SECONDS)
    assert (result["state"], result["code"]) == ("settled", "conformant"), (result, shop.logs())
    assert allocated.wait(LIMIT) == 0  # nothing waits any more
    assert result["worker"] == "slurm-1"
    assert result["claims"] == 2
    assert shop.charged(run) == ("settled", STEPS)
    (record,) = (shop.home / "runs" / "tiny").glob("*-2/run/record.jsonl")
    assert record.read_text().count('"ranks":2') >= 2  # as it began and as it went on


def launched(log: Path, *arguments: str) -> Forked:
    """``affidavit.trainer.distributed.ranks`` as a worker starts it."""
    with log.open("wb") as said:
        ranks = ["ranks", *arguments]
        return fork("tests.trainer.loop.forked_ranks", ranks, os.environ, said.fileno())


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    rank = ["sleep", f"1000.{os.getpid()}"]
    child = [sys.executable, "-m", "affidavit.worker.exec_with_parent", "launcher"]
    launcher = launched(tmp_path / "log", "2", *child, *rank)
    words = [word.encode() for word in rank]
    wait_until(lambda: len(find_processes(lambda found: found[:2] == words)) == 2, LIMIT)
    launcher.kill()
    launcher.wait(TIMEOUT_SECONDS)
    wait_until(lambda: not find_processes(lambda found: found[:2] == words), LIMIT)


@pytest.mark.ordinary("not *-3")
@pytest.mark.parametrize(
    ("rank", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("import os; raise SystemExit(3 if os.environ['RANK'] == '1' else 0)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_group_ends_as_the_rank_did_that_failed(tmp_path: Path, rank: str, code: int) -> None:
    log = tmp_path / "log"
    assert launched(log, "2", sys.executable, "-c", rank).wait(LIMIT) == code, log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("given", [[], ["2"], ["0", "true"], ["x", "true"]])
def test_what_is_no_number_of_processes_is_usage(given: list[str]) -> None:
    command = [sys.executable, "-m", "affidavit.trainer.distributed.ranks", *given]
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=LIMIT)
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: ")
