"""Run the service as a forked process, with its accounting in the same process.

Everything else of it is as in production, once it has started. Tests about the program's start,
its end, its secrets or its other processes run ``python -m affidavit.service``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from starlette.concurrency import run_in_threadpool

from affidavit.service.__main__ import main
from affidavit.service.core.pool import AccountingPool
from affidavit.service.dispatch import dispatcher

__all__ = ["IN_PROCESS", "main", "prepare"]


async def _here(_pool: Any, _long: bool, _most: Any, work: Any, *args: Any, **named: Any) -> Any:
    return await run_in_threadpool(work, *args, **named)


IN_PROCESS = {"_run": _here, "warm_up": lambda _: None}
"""Methods of an ``AccountingPool`` that starts no processes."""


def prepare() -> None:
    """Import what a service would, and have it account in its own process."""
    preload = ("affidavit.service.core.accounting_preload", "affidavit.service.web.serve")
    for name in (*preload, "psycopg"):  # which SQLAlchemy imports where a URL names PostgreSQL
        import_module(name)
    # A lease that ended is taken back as soon, and a run handed over, in a quarter of the time.
    dispatcher.PERIOD_SECONDS = 0.5
    # The document of the API takes longer than all else of a start; it is made for who asks for it.
    vars(import_module("affidavit.service.web.serve"))["document_bytes"] = lambda _: None
    for name, method in IN_PROCESS.items():
        setattr(AccountingPool, name, method)
