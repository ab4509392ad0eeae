"""Stand-ins for ``certify`` that a worker process can import."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

from affidavit.assessment import Assessment
from affidavit.plan import Plan


def sleep(plan: Plan) -> Assessment:
    """Never done in time."""
    time.sleep(600)
    raise AssertionError(plan)


def spin(plan: object, begun: Path | None = None) -> Assessment:
    """Never done in time, and deaf while at it, as foreign code can be; ``begun`` is made first."""
    if begun is not None:
        begun.touch()
    while plan:
        sum(range(100_000))
    raise AssertionError(plan)


def die(plan: Plan) -> Assessment:
    """Die as the kernel makes a process die that takes too much memory."""
    os.kill(os.getpid(), 9)
    raise AssertionError(plan)


def fault(plan: Plan) -> Assessment:
    """A fault of ours."""
    raise ZeroDivisionError(f"secret {plan}")


def work(seconds: float) -> int:
    """The niceness of the process, after so much processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))
    return os.nice(0)


def wait(seconds: float) -> None:
    """Let that time pass, and use no processor."""
    time.sleep(seconds)


def work_and_fail(seconds: float) -> None:
    """The same work, and then a fault."""
    work(seconds)
    raise ZeroDivisionError


def work_in_a_child(seconds: float) -> None:
    """The same work in a process of its own."""
    if os.fork() == 0:
        work(seconds)
        os._exit(0)
    os.wait()


def work_in_threads(seconds: float) -> None:
    """The same work in two threads at once."""
    end = time.process_time() + seconds
    threads = [threading.Thread(target=hashing_until, args=(end,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hashing_until(end: float) -> None:
    """Hash, which needs no interpreter lock, until the process used so much processor time."""
    while time.process_time() < end:
        hashlib.sha256(bytes(1_000_000))
