"""The run record of a guarded loop, as ``affidavit.certificate.run_record`` defines it.

A header and a first checkpoint when the guard has seen that everything fits; then, for each
step, a charge that is on the disk before its noise may leave the process, and what came of
it; at the end the last line. A guarded run is not resumed: a record that breaks off is charged
every certified step, since nobody can show that it ran fewer.

What the guard does not know it leaves out (None): it reads no data, so that nothing is
committed to of the data set or of lot sizes.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     record = RunRecord(Path(folder) / "run")
...     record.append({"type": "checkpoint", "step": 0, "checkpoint": "", "parameters": None})
...     len((Path(folder) / "run" / NAME).read_bytes().splitlines())
1
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import affidavit
from affidavit.certificate import (
    START,
    TIME_FORMAT,
    VERSION,
    RecordEntry,
    StepRequirement,
    encode_line,
    fsync_directory,
)
from affidavit.gate.guard.bound import Bound
from affidavit.gate.guard.stopping import GuardStop

NAME = "record.jsonl"


class RunRecord:
    """A record that only grows, each line but releases on the disk before ``append`` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.head = START
        self.charged = self.released = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            self._stream: int | None = os.open(self.path, flags, 0o600)
            fsync_directory(folder)
        except FileExistsError:
            raise GuardStop(
                "record_exists",
                f"{self.path} is there: {folder} holds a run already.",
                "Choose another folder (record=); a run that broke off stays charged.",
            ) from None
        except OSError as error:
            raise self._not_written(error) from None

    def append(self, entry: RecordEntry, *, durable: bool = True) -> None:
        """Write one line, and unless ``durable`` is false have it on the disk.

        Raises ``GuardStop`` where it cannot be written.
        """
        if self._stream is None:
            raise GuardStop("step_lost", "the record has ended.", "Begin a run of its own.")
        line, digest = encode_line(entry, self.head)
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._stream, left) :]
            if durable:
                os.fsync(self._stream)
        except OSError as error:
            raise self._not_written(error) from None
        self.head = digest

    def begin(
        self,
        bound: Bound,
        *,
        loop: str,
        generator: Mapping[str, str],
        tensors: list[dict[str, Any]],
        parameters: str | None,
    ) -> None:
        """The header, and the checkpoint that a run begins from."""
        plan = bound.plan
        self.append(
            {
                "type": "header",
                "version": VERSION,
                "run": secrets.token_hex(16),
                "certificate_id": bound.certificate_id,
                "plan_digest": bound.plan_digest,
                "started_at": _now(),
                "code": {**_code(), "loop": loop},
                "generator": dict(generator),
                "adjacency": plan.adjacency,
                "unit": plan.dataset.unit,
                "steps": bound.execution.steps,
                "data": {"size": plan.dataset.size, "commitment": None},
                "phases": bound.execution.phases(),
                "optimizer": plan.optimizer.model_dump(mode="json", exclude_none=True),
                "tensors": tensors,
                "parameters": parameters,
                "performance": {},
            }
        )
        self.append({"type": "checkpoint", "step": 0, "checkpoint": None, "parameters": parameters})

    def charge(
        self,
        bound: Bound,
        required: StepRequirement,
        *,
        clip_norm: Mapping[str, float],
        noise_std: Mapping[str, float],
        commitment: str,
    ) -> None:
        """The next step is spent, whatever becomes of it."""
        self.append(
            {
                "type": "charge",
                "step": self.charged,
                "phase": required.phase,
                "plan_digest": bound.plan_digest,
                "clip_norm": dict(clip_norm),
                "noise_std": dict(noise_std),
                "divisor": required.divisor,
                "learning_rate": None,
                "key_commitment": commitment,
            }
        )
        self.charged += 1

    def release(self, parameters: str | None) -> None:
        """What the step that was charged last came to."""
        self.append(
            {
                "type": "release",
                "step": self.charged - 1,
                "lot_size_commitment": None,
                "parameters": parameters,
            },
            durable=False,
        )
        self.released += 1

    def end(self, parameters: str | None) -> None:
        """The last line of a run that took every certified step."""
        self.append(
            {
                "type": "final",
                "ended": "completed",
                "charged": self.charged,
                "released": self.released,
                "parameters": parameters,
                "at": _now(),
            }
        )
        self.close()

    def close(self) -> None:
        """Give the file back; nothing is written any more."""
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None

    def _not_written(self, error: OSError) -> GuardStop:
        return GuardStop(
            "not_written",
            f"{self.path} cannot be written: {error.strerror}.",
            "Mend that and begin a run in another folder (record=).",
        )


def _now() -> str:
    return datetime.now(UTC).strftime(TIME_FORMAT)


def _code() -> dict[str, str]:
    """This release, and the sources of the guard."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return {"version": affidavit.__version__, "digest": "sha256:" + found.hexdigest()}
