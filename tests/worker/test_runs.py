"""Certified runs from request to settlement, and what happens when something dies on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from affidavit.certificate.conformance import conformance
from affidavit.certificate.envelope import read_envelope
from affidavit.certificate.keys import KeyStore
from affidavit.worker.provenance import read_provenance

STEPS = 4
LONG = 20_000


def trainers_of(worker: subprocess.Popen[bytes]) -> list[int]:
    """The process ids of a worker's trainers."""
    children = Path(f"/proc/{worker.pid}/task")
    return [
        int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_is_trained_once_settled_and_signed(shop: Any) -> None:
    certificate = shop.certify(STEPS)
    run = shop.request(certificate)
    assert shop.run(run)["state"] == "queued"
    assert shop.charged(run) == ("reserved", None)
    shop.worker("--once")
    found = shop.wait(run, "settled", "failed")
    assert (found["state"], found["code"]) == ("settled", "conformant"), (found, shop.logs())
    assert shop.charged(run) == ("settled", STEPS)
    (folder,) = (shop.home / "runs" / "tiny").iterdir()
    reported = read_provenance(found["provenance"], KeyStore(shop.home / "w1/keys").public_keys())
    assert (reported.run, reported.certificate) == (run, certificate)
    statement = json.loads(read_envelope(found["provenance"]).payload)
    weights = subprocess.run(
        ["sha256sum", str(folder / "run" / "weights.pt")],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split()[0]
    assert statement["subject"] == [{"name": "weights.pt", "digest": {"sha256": weights}}]
    bundle = json.loads((folder / "bundle.json").read_bytes())
    predicate = json.loads(read_envelope(bundle["envelope"]).payload)["predicate"]
    checked = conformance((folder / "run" / "record.jsonl").read_bytes(), predicate)
    assert checked.conformant
    assert checked.head == found["record"] == reported.record


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_faults_end_a_run_once_with_its_charge(shop: Any) -> None:
    """Worker killed; then trainer killed, cancelled and too late, side by side."""
    certificate = shop.certify(LONG)
    killed = shop.request(certificate)
    worker = shop.worker("--lease", "2")
    shop.begun(killed)
    (trainer,) = trainers_of(worker)
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)

    shop.worker("--lease", "3", "--slots", "3", name="w2")
    assert shop.wait(killed, "failed")["code"] == "lease_lost"
    assert not alive(trainer)

    orphaned = shop.request(certificate)
    shop.begun(orphaned)
    (trainer,) = trainers_of(shop.workers[-1])
    stopped, late = shop.request(certificate), shop.request(certificate, time_limit=1)
    shop.begun(stopped)
    assert shop.ask("POST", f"/v1/runs/{stopped}/cancel", body={"reason": "no"})["cancel_asked"]
    os.kill(trainer, signal.SIGKILL)
    assert shop.wait(orphaned, "failed")["code"] == "trainer_killed"
    assert shop.wait(late, "failed")["code"] == "time_limit"
    assert shop.wait(stopped, "cancelled")["steps"]["charged"] == LONG
    for run in (killed, orphaned, late, stopped):
        assert shop.charged(run) == ("settled", LONG)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_zombie_is_fenced_off(shop: Any) -> None:
    """A worker that is stopped beyond its lease finds, woken, that nothing it says counts."""
    run = shop.request(shop.certify(LONG))
    zombie = shop.worker("--lease", "2")
    shop.begun(run)
    zombie.send_signal(signal.SIGSTOP)
    other = shop.worker("--lease", "2", name="w2")
    ended = shop.wait(run, "failed")
    other.kill()
    (trainer,) = trainers_of(zombie)
    zombie.send_signal(signal.SIGTERM)  # it ends once the run that it thinks it has is over
    zombie.send_signal(signal.SIGCONT)
    assert zombie.wait(20) == 0
    assert not alive(trainer)
    assert "the lease is lost" in (shop.home / "w1" / "log").read_text()
    assert shop.run(run) == ended
    assert shop.charged(run) == ("settled", LONG)
