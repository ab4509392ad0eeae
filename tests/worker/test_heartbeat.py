"""The heartbeat of a run: steps granted to its trainer, and when the trainer is stopped."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from affidavit.client import Unreachable
from affidavit.worker import heartbeat as heartbeat_module
from affidavit.worker import job as job_module
from affidavit.worker.heartbeat import MIN_STEPS, Heartbeat
from affidavit.worker.lease import Job, LeaseLost, Refused, Renewal
from tests.support.polling import wait_until

LEASE = 30.0
CHECKPOINT = '{"type":"checkpoint"}\n'
HEADER = f'{{"digest":"sha256:{7:064d}","type":"header"}}\n'
CHARGE = '{"digest":"sha256:%064d","type":"charge"}\n'


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Granting:
    """A queue that grants up to ``most`` steps and records the requests."""

    def __init__(self, most: int = 10**6) -> None:
        self.most, self.cancel, self.requests = most, False, list[tuple[int, int, str | None]]()
        self.raises: Exception | None = None

    def renew(self, _job: Job, steps: int, *, wants: int, head: str | None) -> Renewal:
        self.requests.append((steps, wants, head))
        if self.raises is not None:
            raise self.raises
        return Renewal(cancel=self.cancel, granted=min(wants, self.most))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat_module, "time", clock)
    return clock


def job(**more: Any) -> Job:
    provided = {
        "run": "r",
        "fence": 1,
        "secret": "s",
        "certificate": "c",
        "plan_digest": "d",
        "output": "o",
    }
    return Job.model_construct(
        **{**provided, "granted": 0, "data": "d", "model": "m", "time_limit": None, **more}
    )


def heartbeat_of(folder: Path, source: Granting, before: str = "", **more: Any) -> Heartbeat:
    """A heartbeat over a record that begins with ``before``, from an earlier attempt."""
    (folder / "record").write_text(before)
    return Heartbeat(
        source=source,  # type: ignore[arg-type]  # a heartbeat only renews
        job=job(**more),
        record=folder / "record",
        allowance=folder / "allowance",
        lease=LEASE,
        _renewed_at=heartbeat_module.time.monotonic(),
    )


def write(heartbeat: Heartbeat, *lines: str) -> None:
    with heartbeat.record.open("a") as stream:
        stream.writelines(lines)


def charges(first: int, last: int) -> list[str]:
    return [CHARGE % step for step in range(first, last)]


@pytest.mark.parametrize("before", ["", CHECKPOINT + CHARGE % 0], ids=["begun", "taken over"])
def test_no_steps_before_this_attempt_has_a_checkpoint(
    tmp_path: Path, clock: Clock, before: str
) -> None:
    source = Granting()
    heartbeat = heartbeat_of(tmp_path, source, before)
    clock.now += LEASE / 2
    assert heartbeat() is None
    assert source.requests == [(before.count("charge"), 0, None)]
    assert not heartbeat.allowance.exists()
    write(heartbeat, CHECKPOINT)
    assert heartbeat() is None
    assert heartbeat.allowance.read_text() == str(before.count("charge") + MIN_STEPS)


def test_requests_cover_two_thirds_of_a_lease(tmp_path: Path, clock: Clock) -> None:
    source = Granting()
    heartbeat = heartbeat_of(tmp_path, source)
    write(heartbeat, CHECKPOINT)
    heartbeat()
    clock.now += 1
    write(heartbeat, *charges(0, 2))  # two steps a second
    heartbeat()
    assert heartbeat.allowance.read_text() == str(2 + 2 * 20)
    # The reported line is durable: another charge was written after it.
    assert source.requests[-1] == (2, 42, f"sha256:{0:064d}")


def test_the_first_line_is_reported_before_a_step_is_requested(
    tmp_path: Path, clock: Clock
) -> None:
    source = Granting()
    heartbeat = heartbeat_of(tmp_path, source)
    write(heartbeat, HEADER)
    clock.now += LEASE / 2
    heartbeat()
    write(heartbeat, CHECKPOINT)
    heartbeat()
    assert source.requests == [(0, 0, None), (0, MIN_STEPS, f"sha256:{7:064d}")]


def test_lease_is_renewed_every_third(tmp_path: Path, clock: Clock) -> None:
    source = Granting(most=0)
    heartbeat = heartbeat_of(tmp_path, source)
    for _ in range(12):
        clock.now += LEASE / 12
        heartbeat()
    assert len(source.requests) in (2, 3)


@pytest.mark.parametrize("failure", [Unreachable("away"), Refused("later", "not now")])
def test_unreachable_service_does_not_stop_the_trainer(
    tmp_path: Path, clock: Clock, failure: Exception
) -> None:
    source = Granting()
    source.raises = failure
    heartbeat = heartbeat_of(tmp_path, source)
    write(heartbeat, CHECKPOINT)
    clock.now += LEASE
    assert heartbeat() is None
    assert not heartbeat.allowance.exists()
    source.raises = LeaseLost("gone")
    clock.now += LEASE
    assert heartbeat() == "kill"


@pytest.mark.parametrize("written", [(), (CHECKPOINT,)], ids=["starting", "begun"])
def test_a_cancelled_trainer_is_asked_at_once_and_gets_no_steps(
    tmp_path: Path, clock: Clock, written: tuple[str, ...]
) -> None:
    source = Granting()
    source.cancel = True
    heartbeat = heartbeat_of(tmp_path, source)
    write(heartbeat, *written)
    clock.now += LEASE / 2
    assert (heartbeat(), heartbeat.reason) == ("ask", "cancelled")
    assert not heartbeat.allowance.exists()


def test_time_limit_counts_from_the_first_checkpoint(tmp_path: Path, clock: Clock) -> None:
    heartbeat = heartbeat_of(tmp_path, Granting(), time_limit=5)
    clock.now += 6
    assert heartbeat() is None
    write(heartbeat, CHECKPOINT)
    assert heartbeat() is None
    clock.now += 4.9
    assert heartbeat() is None
    clock.now += 0.2
    assert (heartbeat(), heartbeat.reason) == ("ask", "time_limit")


def test_lease_is_renewed_while_a_checkpoint_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large it is; what comes of it is reported once."""
    source, reports = Granting(), list[tuple[str, bool]]()
    source.raises = Unreachable("for a moment")

    def copy(*_: Path) -> bool:
        wait_until(lambda: len(source.requests) >= 3, often=0.005)
        raise OSError("no space left")

    vars(source)["report"] = lambda _, action, **body: reports.append((action, body["again"]))
    monkeypatch.setattr(job_module, "_prepare", lambda *_: {})
    monkeypatch.setattr(job_module, "copy_attempt", copy)
    config: Any = SimpleNamespace(source=source, outputs=tmp_path, lease=0.03)
    assert not job_module.run_job(config, job(previous=1, granted=4))
    assert set(source.requests) == {(0, 0, None)}
    assert reports == [("fail", True)]


def test_lease_is_renewed_while_the_record_is_checked(tmp_path: Path) -> None:
    """However long that takes; no more steps are requested."""
    source = Granting()
    heartbeat = heartbeat_of(tmp_path, source)
    heartbeat.lease = 0.03
    write(heartbeat, CHECKPOINT, *charges(0, 4))
    with heartbeat.keep_alive():
        wait_until(lambda: len(source.requests) >= 3, often=0.005)
    assert {(steps, wants) for steps, wants, _ in source.requests} == {(4, 0)}
    assert "lease" not in {thread.name for thread in threading.enumerate()}  # nobody asks any more
