"""Runs of the small model in processes of their own, which may be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from affidavit.plan import Plan
from affidavit.trainer.settings import Supervision
from tests.support.forked_processes import Forked, call
from tests.support.polling import TIMEOUT_SECONDS
from tests.support.trust import trusting
from tests.trainer.loop.small_run import KEY, train_small

MODULE = "tests.trainer.loop.forked_ranks"
CALLS = ("write", "fsync", "replace", "ftruncate", "unlink")
"""What changes files."""


class Watched(Supervision):
    """A supervision that makes the file ``waits`` beside its allowance once a step is refused."""

    __slots__ = ()

    def wait_until_allowed(self, step: int, is_stop_requested: Callable[[], bool]) -> bool:
        """The same, noting that it waits."""
        assert self.allowance is not None
        waits = self.allowance.with_name("waits")

        def noted() -> bool:
            waits.touch()
            return is_stop_requested()

        return Supervision.wait_until_allowed(self, step, noted)


def start_run(
    plan: Plan, out: Path, *, dies_at: int = 0, calls: Sequence[str] = CALLS, **arguments: Any
) -> Forked:
    """Start ``train_small``, which dies at its ``dies_at``-th call of ``calls``, if any."""
    work = partial(train_small, plan, out=out, trusted=trusting(KEY.public), **arguments)
    return call(MODULE, partial(_until, dies_at, tuple(calls), work))


def is_killed(plan: Plan, out: Path, **arguments: Any) -> bool:
    """Whether such a run was killed; fails if it ended otherwise than by its last step."""
    code = start_run(plan, out, **arguments).wait(TIMEOUT_SECONDS)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def _until(number: int, calls: Sequence[str], work: partial[Any]) -> None:
    """Half of what the last call writes is written."""
    left = [number]
    for name in calls:
        real = getattr(os, name)

        def counted(*arguments: Any, real: Any = real, name: str = name, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name == "write":
                    stream, content = arguments
                    real(stream, bytes(content)[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(os, name, counted)
    work()
