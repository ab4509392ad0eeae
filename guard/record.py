"""The run record of a guarded loop, in the format of ``affidavit.evidence.run_record``.

A header and a first checkpoint after the initial checks; for each step a charge, on disk before
its noise leaves the process, and a release; and a final line. A guarded run cannot be resumed: an
incomplete record is charged all certified steps, because nobody can prove that it ran fewer.

Unknown values are None: the guard reads no data, so it commits neither to the data set nor to the
lot sizes.

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
from affidavit.assessment import StepRequirement
from affidavit.evidence import (
    START,
    VERSION,
    RecordEntry,
    encode_line,
)
from affidavit.guard.certified_run import CertifiedRun
from affidavit.guard.errors import GuardStop
from affidavit.trust import (
    format_instant,
    fsync_directory,
    write_all,
)

NAME = "record.jsonl"


class RunRecord:
    """An append-only record; every line except releases is durable when ``append`` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.head = START
        self.charged = self.released = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._stream: int | None = os.open(self.path, flags, 0o600)
            fsync_directory(folder)
        except FileExistsError:
            raise GuardStop(
                "record_exists",
                f"{self.path} exists: {folder} already contains a run.",
                "Choose another folder (record=); an interrupted run stays charged.",
            ) from None
        except OSError as error:
            raise self._not_written(error) from None

    def append(self, entry: RecordEntry, *, durable: bool = True) -> None:
        """Append one line, and sync it to disk if ``durable``.

        Raises ``GuardStop`` if it cannot be written.
        """
        if self._stream is None:
            raise GuardStop("step_lost", "the record has ended.", "Start a new run.")
        line, digest = encode_line(entry, self.head)
        try:
            write_all(self._stream, line)
            if durable:
                os.fsync(self._stream)
        except OSError as error:
            raise self._not_written(error) from None
        self.head = digest

    def begin(
        self,
        certified: CertifiedRun,
        *,
        loop: str,
        generator: Mapping[str, str],
        tensors: list[dict[str, Any]],
        parameters: str | None,
    ) -> None:
        """Write the header and the first checkpoint."""
        plan = certified.plan
        self.append(
            {
                "type": "header",
                "version": VERSION,
                "run": secrets.token_hex(16),
                "certificate_id": certified.certificate_id,
                "plan_digest": certified.plan_digest,
                "started_at": format_instant(datetime.now(UTC)),
                "code": {**_code(), "loop": loop},
                "generator": dict(generator),
                "adjacency": plan.adjacency,
                "unit": plan.dataset.unit,
                "steps": certified.execution.steps,
                "data": {"size": plan.dataset.size, "commitment": None},
                "phases": certified.execution.phases(),
                "optimizer": plan.optimizer.model_dump(mode="json", exclude_none=True),
                "tensors": tensors,
                "parameters": parameters,
                "performance": {},
            }
        )
        self.append({"type": "checkpoint", "step": 0, "checkpoint": None, "parameters": parameters})

    def charge(
        self,
        certified: CertifiedRun,
        required: StepRequirement,
        *,
        clip_norm: Mapping[str, float],
        noise_std: Mapping[str, float],
        commitment: str,
    ) -> None:
        """Charge the next step, which stays charged if it fails afterwards."""
        self.append(
            {
                "type": "charge",
                "step": self.charged,
                "phase": required.phase,
                "plan_digest": certified.plan_digest,
                "clip_norm": dict(clip_norm),
                "noise_std": dict(noise_std),
                "divisor": required.divisor,
                "learning_rate": None,
                "key_commitment": commitment,
            }
        )
        self.charged += 1

    def release(self, parameters: str | None) -> None:
        """Record the release of the last charged step."""
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
        """Write the final line of a complete run."""
        self.append(
            {
                "type": "final",
                "ended": "completed",
                "charged": self.charged,
                "released": self.released,
                "parameters": parameters,
                "at": format_instant(datetime.now(UTC)),
            }
        )
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None

    def _not_written(self, error: OSError) -> GuardStop:
        return GuardStop(
            "not_written",
            f"cannot write {self.path}: {error.strerror}.",
            "Fix this and start a run in another folder (record=).",
        )


def _code() -> dict[str, str]:
    """Return this release and a digest of the guard's sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return {"version": affidavit.__version__, "digest": "sha256:" + digest.hexdigest()}
