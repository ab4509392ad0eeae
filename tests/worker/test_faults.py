"""Workers, trainers and disks that fail under a run: it goes on, each step charged once.

``AFFIDAVIT_KILLS`` workers are killed, one after the other, at random steps: one in the tests, ten
in ``make soak``, which does everything on both databases.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from affidavit.evidence import Conformance, check_conformance
from affidavit.trainer.run_folder import checkpoint_storage, run_log, run_writer
from affidavit.trust import read_envelope
from affidavit.worker import job as job_module
from tests.support.forked_processes import Process
from tests.support.polling import TIMEOUT_SECONDS, wait_until
from tests.worker.forked_worker import HELD, HELD_AFTER
from tests.worker.test_runs import LONG, alive, trainers_of

KILLS = int(os.environ.get("AFFIDAVIT_KILLS", "1"))
DATABASES = ["sqlite", "postgresql"] if KILLS > 1 else ["postgresql"]
STEPS = 100 + 200 * KILLS
"""No attempt is granted more than 100 steps beyond those before it while trainers are held."""
LEASE = "2"
LIMIT = 600.0
"""Seconds for what takes a few where nothing else runs."""


def report(shop: Any, found: Any) -> str:
    """How a run ended, and what its worker and trainer had to say last."""
    stated = {name: found[name] for name in ("id", "state", "code", "message", "claims", "steps")}
    return f"{stated}\n{shop.logs()[-6000:]}"


def folder_of(shop: Any, run: str, fence: int) -> Path:
    return Path(shop.home) / "runs" / "tiny" / f"{run}-{fence}" / "run"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a record that may still be written."""
    path = folder / "record.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def charges_of(folder: Path) -> set[tuple[str, int]]:
    """Keys and steps that were charged under a token; empty if nothing ever was."""
    if not (folder / "record.jsonl").exists():
        return set()
    lines = lines_of(folder)
    return {(line["key_commitment"], line["step"]) for line in lines if line["type"] == "charge"}


def trains(shop: Any, run: str, after: int, steps: int) -> int:
    """Wait until an attempt after that token released so many steps, or is held; its token."""
    seen: dict[Path, int] = {}
    attempts: list[int] = []

    def released() -> bool:
        attempts.clear()
        for record in (shop.home / "runs" / "tiny").glob(f"{run}-*/run/record.jsonl"):
            result = record.read_bytes().count(b'"type":"release"')
            if result >= seen.setdefault(record, result) + steps or (record.parent / HELD).exists():
                attempts.append(int(record.parts[-3].rpartition("-")[2]))
        return max(attempts, default=0) > after

    wait_until(released, LIMIT, often=0.01, said=lambda: (shop.run(run), shop.logs()))
    return max(attempts)


def dies(pid: int) -> None:
    """Wait until a process is gone, whose parent is."""
    wait_until(lambda: not alive(pid))


def until_gone(path: Path) -> None:
    wait_until(lambda: not path.exists(), LIMIT, said=lambda: path)


def settled_once(shop: Any, run: str, steps: int) -> Conformance:
    """Hold the last attempt's record against the certificate, and the others' against it."""
    result = shop.run(run)
    last = folder_of(shop, run, result["claims"])
    bundle = json.loads((last.parent / "bundle.json").read_bytes())
    predicate = json.loads(read_envelope(bundle["envelope"]).payload)["predicate"]
    checked = check_conformance((last / "record.jsonl").read_bytes(), predicate)
    assert (checked.conformant, checked.head) == (True, result["record"])
    assert shop.charged(run) == ("settled", steps)
    stored = charges_of(last)
    assert len({key for key, _ in stored}) == len({step for _, step in stored}) == steps
    for fence in range(1, result["claims"]):
        # Whatever another attempt charged, with the key that it used, is charged here.
        assert charges_of(folder_of(shop, run, fence)) <= stored
        # What is secret is removed once the service has settled the run.
        until_gone(folder_of(shop, run, fence) / checkpoint_storage.CHECKPOINT_FILE)
    return checked


@pytest.mark.parametrize("database_url", DATABASES, indirect=True)
def test_a_run_outlives_its_workers(shop: Any) -> None:
    """One is stopped beyond its lease and goes on afterwards; others are killed."""
    drawn = random.Random(STEPS)
    shop.held.touch()  # no attempt may come to the end
    run = shop.request(shop.certify(STEPS))
    zombie = shop.worker("--lease", LEASE, name="w0")
    fence = trains(shop, run, 0, drawn.randint(1, HELD_AFTER))
    zombie.send_signal(signal.SIGSTOP)
    (orphan,) = trainers_of(zombie)
    for number in range(1, KILLS + 1):
        known = shop.run(run)["steps"]["reported"]
        worker = shop.worker("--lease", LEASE, name=f"w{number}")
        trainers: list[int] = []
        # The last one is held where it has charged a step that it has not taken.
        steps = drawn.randint(1, HELD_AFTER) if number < KILLS else HELD_AFTER + 1
        while not trainers:  # a worker that is given no time to renew its lease in loses it
            fence = trains(shop, run, fence, steps)
            trainers = trainers_of(worker)
        (trainer,) = trainers
        if number % 4 == 0:  # five attempts in a row that report no step end the run
            wait_until(lambda least=known + 2: shop.run(run)["steps"]["reported"] >= least)
        worker.send_signal(signal.SIGKILL)
        worker.wait(TIMEOUT_SECONDS)
        if number == 1:
            assert alive(orphan)  # all this time it may do what it was allowed
            zombie.send_signal(signal.SIGTERM)
            zombie.send_signal(signal.SIGCONT)
            assert zombie.wait(TIMEOUT_SECONDS) == 0
            assert "the lease is lost" in (shop.home / "w0" / "log").read_text()
        dies(trainer)
    shop.held.unlink()
    shop.worker("--lease", LEASE, name="last")
    result = shop.wait(run, "settled", "failed", "cancelled", seconds=LIMIT)
    assert (result["state"], result["claims"] >= KILLS + 2) == ("settled", True), report(
        shop, result
    )
    checked = settled_once(shop, run, STEPS)
    assert checked.steps_released < STEPS


@pytest.mark.parametrize("database_url", DATABASES, indirect=True)
def test_what_befalls_a_trainer(shop: Any) -> None:
    """Killed, a full disk, cancelled, too late; and two runs of one certificate side by side."""
    shop.held.touch()
    # A run of which all is granted, as of a short one on a fast machine, ends with its trainer.
    certificate, endless = shop.certify(LONG), shop.certify(LONG)
    killed = shop.request(certificate)
    full = shop.request(certificate, model="mlp:200,seed=1,blocks=all")
    # A busy machine loses none.
    workers = [shop.worker("--lease", "12", name=f"w{number}") for number in range(1, 5)]
    stopped, late = shop.request(endless), shop.request(endless, time_limit=2)
    for run in (killed, full, stopped):
        trains(shop, run, 0, 3)
    os.kill(trainer_of(killed, *workers)[0], signal.SIGKILL)
    disk_full(full, *workers)
    shop.held.unlink()
    for run in (killed, full):
        trains(shop, run, 1, 3)  # another attempt goes on
    for run in (killed, full, stopped):
        asked = shop.ask("POST", f"/v1/runs/{run}/cancel", body={"reason": "no"})
        assert asked["cancel_asked"]
    ends = dict.fromkeys((killed, full, stopped), ("cancelled", "cancelled"))
    for run, end in {**ends, late: ("failed", "time_limit")}.items():
        result = shop.wait(run, "settled", "failed", "cancelled", seconds=LIMIT)
        assert (result["state"], result["code"]) == end, report(shop, result)
        assert result["claims"] >= (2 if run in (killed, full) else 1), report(shop, result)
        charged = result["steps"]["charged"]
        assert 0 < charged < LONG, report(shop, result)
        settled_once(shop, run, charged)
        assert (folder_of(shop, run, result["claims"]) / run_writer.WEIGHTS_FILE).exists()


def trainer_of(run: str, *workers: Process) -> tuple[int, Path]:
    """The process that trains a run, and the run's folder, into which it writes its log."""
    result: list[tuple[int, Path]] = []

    def is_alone() -> bool:
        result.clear()
        for pid in (pid for worker in workers for pid in trainers_of(worker)):
            with suppress(FileNotFoundError):  # it has ended
                log = Path(f"/proc/{pid}/fd/1").readlink()
                if run in str(log):
                    result.append((pid, log.parent / "run"))
        return len(result) == 1

    wait_until(is_alone, LIMIT, said=lambda: (run, result))
    return result[0]


def disk_full(run: str, *workers: Process) -> None:
    """Let the run's trainer write no file as large as its checkpoint any more."""
    pid, folder = trainer_of(run, *workers)
    size = (folder / checkpoint_storage.CHECKPOINT_FILE).stat().st_size // 2
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


def test_the_worker_knows_the_trainers_files() -> None:
    for name in (
        checkpoint_storage.PARTIAL_FILE,
        checkpoint_storage.CHECKPOINT_FILE,
        checkpoint_storage.FOLDER_PATTERN,
    ):
        assert fnmatch(name, job_module.CHECKPOINTS)
    assert {run_log.RECORD_FILE, run_writer.OPENING_FILE} < set(job_module.COPIED_FILES)


def test_a_checkpoint_of_several_ranks_is_copied_and_deleted_too(tmp_path: Path) -> None:
    previous, run = tmp_path / "r-1" / "run", tmp_path / "r-2" / "run"
    (previous / "checkpoint-7").mkdir(parents=True)
    (previous / "checkpoint-7" / "state.pt").write_text("secret")
    run.parent.mkdir()
    assert not job_module.copy_attempt(previous, run)  # no record names it
    assert not run.exists()
    (previous / run_log.RECORD_FILE).write_text('{"type":"checkpoint"}\n')
    (previous / "other").write_text("not copied")
    assert job_module.copy_attempt(previous, run)
    assert (run / "checkpoint-7" / "state.pt").read_text() == "secret"
    assert {path.name for path in run.iterdir()} == {"checkpoint-7", run_log.RECORD_FILE}
    job_module.delete_checkpoints(tmp_path, "r")
    assert not [*tmp_path.glob("r-*/run/checkpoint*")]
