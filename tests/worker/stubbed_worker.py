"""A forked process (``tests/forked.py``): a real worker whose training is a short sleep.

Everything else is the worker's own: it claims, verifies, begins, renews, holds the record
against the certificate, signs and reports. Instead of starting a trainer the executor waits
``STUB_SECONDS`` and writes the record of a run that conforms. Each training is a line of the
file ``STUB_TRACE``: worker, slot, run, and when it began and ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from affidavit.certificate import Execution, certified_plan, read_envelope
from affidavit.worker import executor
from affidavit.worker.__main__ import app
from tests.service.runs.records import record_of


def trained(
    command: Sequence[str],
    _log: IO[bytes],
    watch: Callable[[], Any],
    **_: Any,
) -> executor.Ended:
    """In place of ``executor.run``: no process, and a record as if there had been one."""
    given = dict(
        item[2:].split("=", 1) for item in command if item.startswith("--") and "=" in item
    )
    folder, bundle = Path(given["out"]), Path(given["certificate"])
    began = time.monotonic()
    end = began + float(os.environ["STUB_SECONDS"])
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
        if watch() is not None:
            return executor.Ended(code=-15, stopped="kill")
    sealed = json.loads(bundle.read_bytes())["envelope"]
    predicate = json.loads(read_envelope(sealed).payload)["predicate"]
    steps = Execution.of(certified_plan(predicate)).steps
    folder.mkdir(exist_ok=True)
    (folder / "weights.pt").write_bytes(b"weights")
    (folder / "record.jsonl").write_bytes(record_of(predicate, steps).content.encode())
    _trace(bundle.parent.name.rpartition("-")[0], began)
    return executor.Ended(code=0, stopped=None)


def _trace(run: str, began: float) -> None:
    line = {
        "worker": os.getpid(),
        "slot": threading.current_thread().name,
        "run": run,
        "began": began,
        "ended": time.monotonic(),
    }
    with Path(os.environ["STUB_TRACE"]).open("a") as trace:
        trace.write(json.dumps(line) + "\n")


def prepare() -> None:
    """Nothing more is to be imported."""


def main(arguments: Sequence[str]) -> Any:
    """``python -m affidavit.worker``, with the stub."""
    executor.run = trained  # type: ignore[assignment]  # it needs less
    return app([*arguments], prog_name="affidavit worker")
