"""The run_writer: what rank 0 writes of a run, and the order in which it does.

A run begins with its header and its first checkpoint, before anything is charged. When it
goes on, the steps that were charged after the checkpoint's are lost: they stay charged, their
rows of the noise are passed over, and the next key is stirred with fresh entropy and kept in
a new checkpoint, before the next charge. At the end the weights are written, then the last
line; then the checkpoint, which is as secret as the data and of no more use, is removed.

``opening.json`` holds the secret under which the record commits to the data set and to lot
sizes; show it to an auditor who has the data, and to nobody else.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from affidavit.trainer import checkpoint
from affidavit.trainer.adapters import DataAdapter
from affidavit.trainer.code import code_reference
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.noise.chacha import KEY_BYTES
from affidavit.trainer.ratchet import Entropy, Ratchet, committed
from affidavit.trainer.run_config import RunConfig
from affidavit.trainer.run_log import RunLog
from affidavit.trainer.training_state import RunKeys, TrainingState

WEIGHTS = "weights.pt"
OPENING = "opening.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSecrets:
    """A run's keys for good, its name, and the key of the step to come."""

    run: str
    keys: RunKeys
    opening: bytes = field(repr=False)
    ratchet: Ratchet

    @classmethod
    def fresh(cls, entropy: Entropy) -> RunSecrets:
        """Those of a new run."""
        return cls(
            run=secrets.token_hex(16),
            keys=RunKeys(lots=entropy(KEY_BYTES), probes=entropy(KEY_BYTES)),
            opening=entropy(KEY_BYTES),
            ratchet=Ratchet.fresh(entropy),
        )

    def as_state(self) -> dict[str, str]:
        """For a checkpoint."""
        return {
            "run": self.run,
            "lots": self.keys.lots.hex(),
            "probes": self.keys.probes.hex(),
            "opening": self.opening.hex(),
            "next_key": self.ratchet.key.hex(),
        }

    @classmethod
    def of_state(cls, state: dict[str, str]) -> RunSecrets:
        """Those of a checkpoint."""
        return cls(
            run=state["run"],
            keys=RunKeys(lots=bytes.fromhex(state["lots"]), probes=bytes.fromhex(state["probes"])),
            opening=bytes.fromhex(state["opening"]),
            ratchet=Ratchet(bytes.fromhex(state["next_key"])),
        )


class RunWriter:
    """The run log and the checkpoints of one run."""

    def __init__(self, run_log: RunLog, opening: bytes) -> None:
        self.run_log, self._opening = run_log, opening

    def header(
        self,
        config: RunConfig,
        training: TrainingState,
        data: DataAdapter,
        run: str,
        performance: Any,
        canaries: str | None = None,
    ) -> None:
        """The first line, and the secret that opens its commitments.

        ``canaries`` is the digest of their file, where some are in the data.
        """
        opening = {"run": run, "secret": self._opening.hex(), "data": data.digest}
        checkpoint.write(
            self.run_log.folder / OPENING, (json.dumps(opening, indent=2) + "\n").encode()
        )
        plan = config.plan
        self.run_log.append(
            {
                "type": "header",
                "version": VERSION,
                "run": run,
                "certificate_id": config.certificate_id,
                "plan_digest": config.plan_digest,
                "started_at": now(),
                "code": code_reference(),
                "generator": {"sampling": "chacha20", "noise": "chacha20"},
                "adjacency": plan.adjacency,
                "unit": plan.dataset.unit,
                "steps": config.execution.steps,
                "data": {"size": len(data), "commitment": self.of_data(data)},
                "phases": config.execution.phases(),
                "optimizer": plan.optimizer.model_dump(mode="json", exclude_none=True),
                "tensors": training.layout.as_entries(),
                "parameters": training.digest(),
                "performance": performance,
                **({} if canaries is None else {"canaries": canaries}),
            }
        )

    def of_data(self, data: DataAdapter) -> str:
        """The commitment to the data set."""
        return committed(self._opening, "data", data.digest)

    def require_same_run(
        self, config: RunConfig, training: TrainingState, data: DataAdapter
    ) -> None:
        """Raise ``RunFailure`` unless the record is of this certificate, data and model."""
        header = self.run_log.progress.header
        assert header is not None  # a record without one is not resumed
        for what, then, now_ in (
            ("certificate", header["certificate_id"], config.certificate_id),
            ("plan", header["plan_digest"], config.plan_digest),
            ("data", header["data"]["commitment"], self.of_data(data)),
            ("model", header["tensors"], training.layout.as_entries()),
        ):
            if then != now_:
                raise RunFailure(
                    "other_run",
                    f"{self.run_log.folder} holds a run with another {what}. Give the one that it "
                    "was begun with, or choose another folder.",
                )

    def resumed(
        self,
        step: int,
        from_step: int,
        parameters: str,
        performance: Any,
        *,
        durable: bool = True,
    ) -> None:
        """Where the run goes on."""
        self.run_log.append(
            {
                "type": "resumed",
                "step": step,
                "from_step": from_step,
                "lost": step - from_step,
                "parameters": parameters,
                "performance": performance,
                "at": now(),
            },
            durable=durable,
        )

    def charge(
        self,
        step: int,
        plan_digest: str,
        public: dict[str, Any],
        ratchet: Ratchet,
        *,
        durable: bool = True,
    ) -> None:
        """``step`` is spent, whatever becomes of it; on the disk when this returns.

        Unless ``durable`` is false, for a step that is not taken here.
        """
        self.run_log.append(
            {
                "type": "charge",
                "step": step,
                "plan_digest": plan_digest,
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
        """What ``step`` came to; ``records`` of its lot are committed to.

        ``clip_counts`` are the noisy counts that clip norms follow, where they are adapted.
        """
        counts = {} if clip_counts is None else {"clip_counts": dict(clip_counts)}
        self.run_log.append(
            {
                "type": "release",
                "step": step,
                "lot_size_commitment": committed(
                    self._opening, f"lot size of step {step}", str(records)
                ),
                "parameters": parameters,
                **counts,
            },
            durable=False,
        )

    def checkpoint(self, training: TrainingState, step: int, secrets: RunSecrets) -> None:
        """The state before ``step``, with the key of that step."""
        state = {"step": step, "secrets": secrets.as_state(), **training.state()}
        checkpoint.save(self.run_log, state, step=step, parameters=training.digest())

    def end(self, ended: str, training: TrainingState) -> None:
        """Weights unless the run diverged, the last line, and no checkpoint any more."""
        progress = self.run_log.progress
        if ended != "diverged":
            path = self.run_log.folder / WEIGHTS
            partial = path.with_suffix(".part")
            checkpoint.write(partial, checkpoint.packed(dict(training.module.state_dict())))
            checkpoint.put_in_place(partial, path)
        self.run_log.append(
            {
                "type": "final",
                "ended": ended,
                "charged": progress.charged,
                "released": progress.released,
                "parameters": training.digest(),
                "at": now(),
                "noise_test": training.noise_test.as_entry(),
            }
        )
        checkpoint.remove(self.run_log.folder)


def now() -> str:
    """This second in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
