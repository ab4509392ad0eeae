"""Run a real worker as a forked process whose training is a short sleep.

Everything else is real: the worker claims, verifies, starts and renews runs, checks the record
against the certificate, signs and reports. Instead of starting a trainer, ``run`` waits
``STUB_SECONDS`` and writes the record of a conforming run. Each training adds a line to the file
``STUB_TRACE``: worker, run, start and end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from affidavit.assessment import Execution, certified_plan
from affidavit.trust import read_envelope
from affidavit.worker import trainer_process
from affidavit.worker.__main__ import app
from tests.support.run_records import record_of


def trained(
    command: Sequence[str],
    _log: IO[bytes],
    poll: Callable[[], Any],
    **_: Any,
) -> int:
    """In place of ``trainer_process.run``: no process, and a record as if there had been one."""
    options = dict(
        part[2:].split("=", 1) for part in command if part.startswith("--") and "=" in part
    )
    folder, bundle = Path(options["out"]), Path(options["certificate"])
    began = time.monotonic()
    end = began + float(os.environ["STUB_SECONDS"])
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
        if poll() is not None:
            return -15
    encode_line = json.loads(bundle.read_bytes())["envelope"]
    predicate = json.loads(read_envelope(encode_line).payload)["predicate"]
    steps = Execution.of(certified_plan(predicate)).steps
    folder.mkdir(exist_ok=True)
    (folder / "weights.pt").write_bytes(b"weights")
    (folder / "record.jsonl").write_bytes(record_of(predicate, steps).content.encode())
    _trace(bundle.parent.name.rpartition("-")[0], began)
    return 0


def _trace(run: str, began: float) -> None:
    line = {
        "worker": os.getpid(),
        "run": run,
        "began": began,
        "ended": time.monotonic(),
    }
    with Path(os.environ["STUB_TRACE"]).open("a") as trace:
        trace.write(json.dumps(line) + "\n")


def prepare() -> None:
    """Nothing else to import."""


def main(arguments: Sequence[str]) -> Any:
    """``python -m affidavit.worker``, with the stub."""
    trainer_process.run = trained  # type: ignore[assignment]  # fewer parameters
    return app([*arguments], prog_name="affidavit worker")
