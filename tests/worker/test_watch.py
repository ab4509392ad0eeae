"""The watch over a trainer: what it is granted, and when it is asked to stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from affidavit.worker import watch as watching
from affidavit.worker.queue import Job, LeaseLost, Refused, Renewal, Unreachable
from affidavit.worker.watch import HEARS, LEAST, PATIENCE, Watch

LEASE = 30.0
CHECKPOINT = '{"type":"checkpoint"}\n'
CHARGE = '{"digest":"sha256:%064d","type":"charge"}\n'


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Granting:
    """A queue that grants what it is asked for up to ``most``, and notes it."""

    def __init__(self, most: int = 10**6) -> None:
        self.most, self.cancel, self.asked = most, False, list[tuple[int, int, str | None]]()
        self.raises: Exception | None = None

    def renew(self, _job: Job, steps: int, *, wants: int, head: str | None) -> Renewal:
        self.asked.append((steps, wants, head))
        if self.raises is not None:
            raise self.raises
        return Renewal(cancel=self.cancel, granted=min(wants, self.most))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watching, "time", found)
    return found


def job(**more: Any) -> Job:
    given = {"run": "r", "fence": 1, "certificate": "c", "plan_digest": "d", "output": "o"}
    return Job(**{**given, "data": "d", "model": "m", "time_limit": None, **more})


def watch_of(folder: Path, source: Granting, before: str = "", **more: Any) -> Watch:
    """A watch over a record that begins with ``before``, which somebody else wrote."""
    (folder / "record").write_text(before)
    return Watch(
        source=source,  # type: ignore[arg-type]  # a watch does nothing but renew
        job=job(**more),
        record=folder / "record",
        allowance=folder / "allowance",
        lease=LEASE,
        _renewed=watching.time.monotonic(),
    )


def write(watch: Watch, *lines: str) -> None:
    with watch.record.open("a") as stream:
        stream.writelines(lines)


def charges(first: int, last: int) -> list[str]:
    return [CHARGE % step for step in range(first, last)]


@pytest.mark.parametrize("before", ["", CHECKPOINT + CHARGE % 0], ids=["begun", "taken over"])
def test_nothing_is_granted_before_this_attempt_has_a_checkpoint(
    tmp_path: Path, clock: Clock, before: str
) -> None:
    source = Granting()
    watch = watch_of(tmp_path, source, before)
    clock.now += LEASE / 2
    assert watch() is None
    assert source.asked == [(before.count("charge"), 0, None)]
    assert not watch.allowance.exists()
    write(watch, CHECKPOINT)
    assert watch() is None
    assert watch.allowance.read_text() == str(before.count("charge") + LEAST)


def test_it_is_granted_what_it_takes_in_two_thirds_of_a_lease(tmp_path: Path, clock: Clock) -> None:
    source = Granting()
    watch = watch_of(tmp_path, source)
    write(watch, CHECKPOINT)
    watch()
    clock.now += 1
    write(watch, *charges(0, 2))  # two steps a second
    watch()
    assert watch.allowance.read_text() == str(2 + 2 * 20)
    # The line that it tells of is on the disk: another charge was written after it.
    assert source.asked[-1] == (2, 42, f"sha256:{0:064d}")


def test_the_lease_is_renewed_whenever_a_third_of_it_is_over(tmp_path: Path, clock: Clock) -> None:
    source = Granting(most=0)
    watch = watch_of(tmp_path, source)
    for _ in range(12):
        clock.now += LEASE / 12
        watch()
    assert len(source.asked) in (2, 3)


@pytest.mark.parametrize("failure", [Unreachable("away"), Refused("later", "not now")])
def test_a_service_that_does_not_answer_ends_nothing(
    tmp_path: Path, clock: Clock, failure: Exception
) -> None:
    source = Granting()
    source.raises = failure
    watch = watch_of(tmp_path, source)
    write(watch, CHECKPOINT)
    clock.now += LEASE
    assert watch() is None
    assert not watch.allowance.exists()
    source.raises = LeaseLost("gone")
    clock.now += LEASE
    assert watch() == "kill"


def test_one_that_is_cancelled_early_is_asked_once_it_hears(tmp_path: Path, clock: Clock) -> None:
    """It would die of the signal before, and a run without a record is charged in full."""
    source = Granting()
    source.cancel = True
    watch = watch_of(tmp_path, source)
    clock.now += LEASE / 2
    assert watch() is None
    assert watch.reason == "cancelled"
    write(watch, CHECKPOINT)
    assert watch() is None
    clock.now += HEARS + 0.1
    assert watch() == "ask"
    assert not watch.allowance.exists()  # no step is granted to one that is to stop


def test_one_that_never_comes_so_far_is_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    source = Granting()
    source.cancel = True
    watch = watch_of(tmp_path, source)
    clock.now += LEASE / 2
    assert watch() is None
    clock.now += PATIENCE + 0.1
    assert watch() == "ask"


def test_the_time_limit_counts_from_the_first_step(tmp_path: Path, clock: Clock) -> None:
    watch = watch_of(tmp_path, Granting(), time_limit=5)
    clock.now += 6
    assert watch() is None
    write(watch, CHECKPOINT)
    assert watch() is None
    clock.now += 4.9
    assert watch() is None
    clock.now += 0.2
    assert (watch(), watch.reason) == ("ask", "time_limit")


def test_the_lease_is_held_while_the_record_is_judged(tmp_path: Path) -> None:
    """However long that takes; and no more steps are granted for it."""
    source = Granting()
    watch = watch_of(tmp_path, source)
    watch.lease = 0.03
    write(watch, CHECKPOINT, *charges(0, 4))
    with watch.held():
        end = time.monotonic() + 10
        while len(source.asked) < 3:
            assert time.monotonic() < end
            time.sleep(0.005)
    asked = len(source.asked)
    assert {(steps, wants) for steps, wants, _ in source.asked} == {(4, 0)}
    time.sleep(0.05)
    assert len(source.asked) == asked
