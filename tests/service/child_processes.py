"""What tests of the service's tables do in processes of their own, some of which are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from sqlalchemy import Engine, event

from affidavit.service.core.database import open_engine
from affidavit.service.log.sequencer import Sequencer
from affidavit.trust import SigningKey
from tests.support.forked_processes import Forked, call
from tests.support.polling import TIMEOUT_SECONDS

MODULE = "tests.service.forked_service"


def start(work: Callable[[], Any]) -> Forked:
    """``work``, which can be pickled, in a process of its own."""
    return call(MODULE, work)


def killed(number: int, url: str, work: Callable[[Engine], Any]) -> bool:
    """``work`` on ``url``, killed before its statement ``number``; whether it was killed."""
    code = start(partial(_until, number, url, work)).wait(TIMEOUT_SECONDS)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def _until(number: int, url: str, work: Callable[[Engine], Any]) -> None:
    numbers = count(1)

    def die(*_: Any) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = open_engine(url)
    event.listen(engine, "before_cursor_execute", die)
    event.listen(engine, "commit", die)
    work(engine)


def on(store: Callable[[Engine], Any], work: Callable[[Any], Any], engine: Engine) -> None:
    """Do ``work`` with a store of ``engine``."""
    work(store(engine))


def sequence(key: SigningKey, origin: str, engine: Engine) -> None:
    """Sequence the log once."""
    Sequencer(engine, lambda: key, origin=origin).step()
