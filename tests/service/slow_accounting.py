"""Stand-ins for ``certify`` that a worker process can import."""

from __future__ import annotations

import os
import time

from affidavit.assessment import Assessment
from affidavit.plan import Plan


def sleep(plan: Plan) -> Assessment:
    """Never done in time."""
    time.sleep(600)
    raise AssertionError(plan)


def spin(plan: Plan) -> Assessment:
    """Never done in time, and deaf while at it, as foreign code can be."""
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


def nap(seconds: float) -> int:
    """The niceness of the process, after a while."""
    time.sleep(seconds)
    return os.nice(0)
