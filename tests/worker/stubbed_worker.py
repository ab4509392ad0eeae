"""``python -m tests.worker.stubbed_worker``: a real worker whose training is a short sleep.

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

from affidavit.certificate.certified_plan import certified_plan
from affidavit.certificate.envelope import read_envelope
from affidavit.certificate.execution import Execution
from affidavit.certificate.run_record import START, VERSION, sealed
from affidavit.plan.canonical import digest_of
from affidavit.worker import executor
from affidavit.worker.__main__ import app


def record_of(predicate: dict[str, Any], run: str = "stub") -> bytes:
    """The record of a run that took every step of a certificate and conforms to it."""
    plan, at = certified_plan(predicate), predicate["validity"]["not_before"]
    execution, digest = Execution.of(plan), digest_of(predicate["plan"])
    entries: list[dict[str, Any]] = [
        {
            "type": "header",
            "version": VERSION,
            "run": run,
            "certificate_id": predicate["certificate_id"],
            "plan_digest": digest,
            "started_at": at,
            "code": {"version": "0", "digest": "sha256:0"},
            "generator": {"sampling": "chacha20", "noise": "chacha20"},
            "adjacency": plan.adjacency,
            "unit": plan.dataset.unit,
            "steps": execution.steps,
            "data": {"size": plan.dataset.size, "commitment": "sha256:1"},
            "phases": execution.phases(),
            "optimizer": plan.optimizer.model_dump(mode="json", exclude_none=True),
            "tensors": [
                {
                    "name": f"{release.name}.{number}",
                    "shape": [2],
                    "release": release.name,
                    "block": f"{release.name}[{number}]",
                }
                for release in plan.phases[0].releases
                for number in range(release.count)
            ],
            "parameters": "p0",
            "performance": {"ranks": 1},
        },
        {"type": "checkpoint", "step": 0, "checkpoint": "c0", "parameters": "p0"},
    ]
    for step in range(execution.steps):
        required = execution.at(step)
        entries += [
            {
                "type": "charge",
                "step": step,
                "phase": required.phase,
                "plan_digest": digest,
                "clip_norm": required.clip_norm,
                "noise_std": required.noise_std,
                "divisor": required.divisor,
                "learning_rate": 0.1,
                "key_commitment": f"{run}-{step}",
            },
            {
                "type": "release",
                "step": step,
                "lot_size_commitment": f"l{step}",
                "parameters": f"p{step + 1}",
            },
        ]
    entries.append(
        {
            "type": "final",
            "ended": "completed",
            "charged": execution.steps,
            "released": execution.steps,
            "parameters": f"p{execution.steps}",
            "at": at,
        }
    )
    lines, previous = [], START
    for entry in entries:
        line, previous = sealed(entry, previous)
        lines.append(line)
    return b"".join(lines)


def predicate_of(bundle: bytes) -> dict[str, Any]:
    """What the certificate in ``bundle`` says."""
    found: dict[str, Any] = json.loads(read_envelope(json.loads(bundle)["envelope"]).payload)
    return dict(found["predicate"])


def trained(
    command: Sequence[str],
    _log: IO[bytes],
    watch: Callable[[], Any],
    **_: Any,
) -> executor.Ended:
    """In place of ``executor.run``: no process, and a record as if there had been one."""
    given = dict(
        each[2:].split("=", 1) for each in command if each.startswith("--") and "=" in each
    )
    folder, bundle = Path(given["out"]), Path(given["certificate"])
    began = time.monotonic()
    end = began + float(os.environ["STUB_SECONDS"])
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
        if watch() is not None:
            return executor.Ended(code=-15, stopped="kill")
    folder.mkdir(exist_ok=True)
    (folder / "weights.pt").write_bytes(b"weights")
    (folder / "record.jsonl").write_bytes(record_of(predicate_of(bundle.read_bytes())))
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


if __name__ == "__main__":
    executor.run = trained
    app(prog_name="affidavit worker")
