"""The run writer: the files that rank 0 writes for a run, and their order.

A run begins with its header and its first checkpoint, before anything is charged. When it is
resumed, the steps that were charged after the checkpoint are lost: they stay charged, their
rows of the noise are skipped, and the next key is mixed with fresh entropy and saved in
a new checkpoint, before the next charge. At the end, the weights are written, then the last
line; then the checkpoint, which is as secret as the data and no longer needed, is removed.

``opening.json`` has the secret under which the record commits to the data set and to lot
sizes. Show it only to an auditor who has the data.

The header names the release of the trainer by version and by the digest of its sources.

>>> sorted(code_reference())
['digest', 'version']
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

import affidavit
from affidavit.evidence import VERSION, Canaries
from affidavit.plan import Plan
from affidavit.trainer.adapters import DataAdapter
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.noise.chacha import KEY_BYTES, Entropy, Ratchet, commitment_to, derived_key
from affidavit.trainer.run_config import RunConfig
from affidavit.trainer.run_folder import checkpoint_storage
from affidavit.trainer.run_folder.run_log import RunLog
from affidavit.trainer.settings import Trial
from affidavit.trainer.steps.training_state import RunKeys, TrainingState
from affidavit.trust import format_instant

ROOMS = ("plan", "mechanisms", "certificate", "trainer")
"""Parts of this project that a run executes."""


def code_reference() -> dict[str, str]:
    """Return the version, and a digest over path and content of each source file of ``ROOMS``."""
    root = Path(affidavit.__file__).parent
    result = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            result.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return {"version": affidavit.__version__, "digest": "sha256:" + result.hexdigest()}


WEIGHTS_FILE = "weights.pt"
OPENING_FILE = "opening.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSecrets:
    """A run's name, its permanent keys, and the key of the next step."""

    run: str
    keys: RunKeys
    opening: bytes = field(repr=False)
    ratchet: Ratchet

    @classmethod
    def generate(cls, entropy: Entropy) -> RunSecrets:
        """Draw the secrets of a new run."""
        return cls(
            run=secrets.token_hex(16),
            keys=RunKeys(lots=entropy(KEY_BYTES), probes=entropy(KEY_BYTES)),
            opening=entropy(KEY_BYTES),
            ratchet=Ratchet.fresh(entropy),
        )

    def canaries(self, plan: Plan) -> Canaries | None:
        """Return the plan's canaries, which depend only on the opening, so a resumed run keeps
        them.
        """
        if plan.canaries is None:
            return None
        nonce = derived_key(self.opening, "affidavit canaries")
        return Canaries.of(nonce, plan.canaries.count, plan.canaries.guesses)

    def as_state(self) -> dict[str, str]:
        """Return the secrets for a checkpoint."""
        return {
            "run": self.run,
            "lots": self.keys.lots.hex(),
            "probes": self.keys.probes.hex(),
            "opening": self.opening.hex(),
            "next_key": self.ratchet.key.hex(),
        }

    @classmethod
    def from_state(cls, state: dict[str, str]) -> RunSecrets:
        """Return the secrets of a checkpoint."""
        return cls(
            run=state["run"],
            keys=RunKeys(lots=bytes.fromhex(state["lots"]), probes=bytes.fromhex(state["probes"])),
            opening=bytes.fromhex(state["opening"]),
            ratchet=Ratchet(bytes.fromhex(state["next_key"])),
        )


class RunWriter:
    """Writes the run log and the result files of one run."""

    def __init__(
        self,
        run_log: RunLog,
        opening: bytes,
        config: RunConfig,
        performance: dict[str, Any],
        trial: Trial | None,
    ) -> None:
        self.run_log, self._opening, self._trial = run_log, opening, trial
        self._config, self._performance = config, performance

    def write_header(
        self,
        training: TrainingState,
        data: DataAdapter,
        run: str,
        parameters: str,
        canaries: str | None,
    ) -> None:
        """Write the first line, and the secret that opens its commitments.

        ``canaries`` is the commitment to the plan's canaries, if it has any.
        """
        opening = {"run": run, "secret": self._opening.hex(), "data": data.digest}
        checkpoint_storage.write(
            self.run_log.folder / OPENING_FILE, (json.dumps(opening, indent=2) + "\n").encode()
        )
        config, plan = self._config, self._config.plan
        self.run_log.append(
            {
                "type": "header",
                "version": VERSION,
                "run": run,
                "certificate_id": config.certificate_id,
                "plan_digest": config.plan_digest,
                "started_at": self._now(),
                "code": code_reference(),
                "generator": {"sampling": "chacha20", "noise": "chacha20"},
                "adjacency": plan.adjacency,
                "unit": plan.dataset.unit,
                "steps": config.execution.steps,
                "data": {
                    "size": len(data),
                    "commitment": self.commit_to_data(data),
                    **({"digest": "given"} if getattr(data, "digest_is_given", False) else {}),
                },
                "phases": config.execution.phases(),
                "optimizer": plan.optimizer.model_dump(mode="json", exclude_none=True),
                "tensors": training.layout.as_entries(),
                "parameters": parameters,
                "performance": self._performance,
                **({} if canaries is None else {"canaries": canaries}),
                **({} if self._trial is None else {"search": self._trial.search}),
            }
        )

    def _now(self) -> str:
        """Return the time, or the start of a trial's search, which hides the trial's number."""
        if self._trial is not None:
            return self._trial.at
        return format_instant(datetime.now(UTC))

    def commit_to_data(self, data: DataAdapter) -> str:
        """Return the commitment to the data set."""
        return commitment_to(self._opening, "data", data.digest)

    def require_same_run(self, training: TrainingState, data: DataAdapter) -> None:
        """Raise ``RunFailure`` unless the record is of this certificate, data and model."""
        header = self.run_log.progress.header
        assert header is not None  # a record without one is not resumed
        for what, then, now_ in (
            ("certificate", header["certificate_id"], self._config.certificate_id),
            ("plan", header["plan_digest"], self._config.plan_digest),
            ("data", header["data"]["commitment"], self.commit_to_data(data)),
            ("model", header["tensors"], training.layout.as_entries()),
        ):
            if then != now_:
                raise RunFailure(
                    "other_run",
                    f"{self.run_log.folder} contains a run with a different {what}. Use the one "
                    "that the run started with, or choose another folder.",
                )

    def write_resumed(
        self, step: int, from_step: int, parameters: str, *, durable: bool = True
    ) -> None:
        """Record that the run resumes."""
        self.run_log.append(
            {
                "type": "resumed",
                "step": step,
                "from_step": from_step,
                "lost": step - from_step,
                "parameters": parameters,
                "performance": self._performance,
                "at": self._now(),
            },
            durable=durable,
        )

    def charge(
        self, step: int, public: dict[str, Any], ratchet: Ratchet, *, durable: bool = True
    ) -> None:
        """Charge ``step`` on disk, whatever happens to it.

        A step that is not taken here need not be ``durable``.
        """
        self.run_log.append(
            {
                "type": "charge",
                "step": step,
                "plan_digest": self._config.plan_digest,
                **public,
                "key_commitment": ratchet.commitment,
            },
            durable=durable,
        )

    def release(
        self,
        step: int,
        records: int,
        parameters: str | None,
        clip_counts: Mapping[str, float] | None = None,
    ) -> None:
        """Record the release of ``step``, with a commitment to the ``records`` of its lot.

        ``clip_counts`` are the noisy counts for adapted clip norms.
        """
        counts = {} if clip_counts is None else {"clip_counts": dict(clip_counts)}
        self.run_log.append(
            {
                "type": "release",
                "step": step,
                "lot_size_commitment": commitment_to(
                    self._opening, f"lot size of step {step}", str(records)
                ),
                "parameters": parameters,
                **counts,
            },
            durable=False,
        )

    def strayed(self, step: int, code: str) -> None:
        """Record that ``step`` was stopped, because model or loop strayed from what was probed.

        The text of the error may have private numbers, so only its ``code`` is written.
        """
        self.run_log.append({"type": "strayed", "step": step, "code": code})

    def end(
        self,
        ended: str,
        *,
        weights: Mapping[str, Tensor] | None,
        files: Mapping[str, bytes],
        parameters: str,
        noise_test: Mapping[str, Any],
    ) -> None:
        """Write the weights, if any, and the last line; then remove the checkpoint.

        Each tensor has its parameter's shape, and ``parameters`` is their digest. ``files`` are
        written beside the weights, by their names.
        """
        progress = self.run_log.progress
        if weights is not None:
            files = {WEIGHTS_FILE: checkpoint_storage.serialize_state(dict(weights)), **files}
        for name, content in files.items():
            path = self.run_log.folder / name
            partial = path.with_suffix(".part")
            checkpoint_storage.write(partial, content)
            checkpoint_storage.put_in_place(partial, path)
        self.run_log.append(
            {
                "type": "final",
                "ended": ended,
                "charged": progress.charged,
                "released": progress.released,
                "parameters": parameters,
                "at": self._now(),
                "noise_test": dict(noise_test),
            }
        )
        checkpoint_storage.remove(self.run_log.folder)
