"""Waiting for the log of a service that runs."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import select

from affidavit.service.tables.log import log_pending
from tests.support.polling import TIMEOUT_SECONDS


def until_logged(services: Any) -> None:
    """Give every entry its place, or wait for the sequencer of ``services`` that is at it."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while True:
        services.sequencer.step()
        with services.engine.connect() as connection:
            if connection.execute(select(log_pending.c.entry_id).limit(1)).first() is None:
                return
        assert time.monotonic() < end
        time.sleep(0.01)
