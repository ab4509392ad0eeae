"""Run records without a run: what a trainer would have written, or what a liar might."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from affidavit.assessment import Execution, certified_plan
from affidavit.evidence import START, encode_line
from affidavit.plan import digest_of


def digest() -> str:
    return "sha256:" + secrets.token_hex(32)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Chain:
    """The keys of an attempt from a step on: the same for whoever has its checkpoint."""

    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def key(self, step: int) -> str:
        return digest_of({"chain": self.name, "step": step})


class Record:
    """A record as it grows; ``chain`` has the keys of the steps to come."""

    def __init__(self, predicate: Mapping[str, Any], **header: Any) -> None:
        self.predicate = dict(predicate)
        self._more = header
        self.execution = Execution.of(certified_plan(self.predicate))
        self.lines: list[bytes] = []
        self.head, self.parameters = START, digest()
        self.charged = self.released = 0
        self.checkpoint_at, self.checkpoint_parameters = 0, self.parameters
        self.chain = Chain()
        self.charge_heads: list[str] = []
        self._header()
        self.checkpoint()

    @property
    def content(self) -> str:
        return b"".join(self.lines).decode()

    def copy(self) -> Record:
        created = Record.__new__(Record)
        created.__dict__ |= self.__dict__
        created.lines, created.charge_heads = [*self.lines], [*self.charge_heads]
        return created

    def add(self, entry: dict[str, Any]) -> None:
        line, self.head = encode_line(entry, self.head)
        self.lines.append(line)

    def _header(self) -> None:
        plan = self.execution.plan
        names = [
            {"name": f"{release.name}{n}", "release": release.name, "block": f"{release.name}/{n}"}
            for release in plan.phases[0].releases
            for n in range(release.count)
        ]
        self.add(
            {
                "type": "header",
                "version": 1,
                "run": secrets.token_hex(16),
                "certificate_id": self.predicate["certificate_id"],
                "plan_digest": digest_of(self.predicate["plan"]),
                "started_at": now(),
                "code": {"version": "0", "digest": digest()},
                "generator": {"sampling": "chacha20", "noise": "chacha20"},
                "adjacency": plan.adjacency,
                "unit": plan.dataset.unit,
                "steps": self.execution.steps,
                "data": {"size": plan.dataset.size, "commitment": digest()},
                "phases": self.execution.phases(),
                "optimizer": plan.optimizer.model_dump(mode="json", exclude_none=True),
                "tensors": names,
                "parameters": self.parameters,
                "performance": {},
                **({} if plan.canaries is None else {"canaries": digest()}),
                **self._more,
            }
        )

    def checkpoint(self) -> None:
        self.checkpoint_at, self.checkpoint_parameters = self.charged, self.parameters
        at = {"step": self.charged, "parameters": self.parameters}
        self.add({"type": "checkpoint", **at, "checkpoint": digest()})

    def charge(self, **changes: Any) -> None:
        required = self.execution.at(min(self.charged, self.execution.steps - 1))
        self.add(
            {
                "type": "charge",
                "step": self.charged,
                "phase": required.phase,
                "plan_digest": digest_of(self.predicate["plan"]),
                "clip_norm": required.clip_norm,
                "noise_std": required.noise_std,
                "divisor": required.divisor,
                "learning_rate": 0.1,
                "key_commitment": self.chain.key(self.charged),
                **changes,
            }
        )
        self.charge_heads.append(self.head)
        self.charged += 1

    def release(self) -> None:
        self.parameters = digest()
        self.released += 1
        stated = {"lot_size_commitment": digest(), "parameters": self.parameters}
        self.add({"type": "release", "step": self.charged - 1, **stated})

    def step(self, **changes: Any) -> None:
        self.charge(**changes)
        self.release()

    def _resumed(self) -> None:
        self.parameters = self.checkpoint_parameters
        lost = self.charged - self.checkpoint_at
        at = {"step": self.charged, "from_step": self.checkpoint_at, "lost": lost}
        stated = {"parameters": self.parameters, "performance": {}, "at": now()}
        self.add({"type": "resumed", **at, **stated})

    def go_on(self, granted: int) -> None:
        """Go on behind ``granted`` steps, each charged with the key that it had."""
        while self.charged < granted:
            self._resumed()
            self.charge()
        self._resumed()
        self.chain = Chain()
        self.checkpoint()

    def end(self, ended: str = "completed") -> Record:
        counts = {"charged": self.charged, "released": self.released}
        stated = {"parameters": self.parameters, "at": now()}
        self.add({"type": "final", "ended": ended, **counts, **stated})
        return self


def record_of(predicate: Mapping[str, Any], steps: int, **header: Any) -> Record:
    """The record of a run of so many steps, ended early where that are not all."""
    created = Record(predicate, **header)
    for _ in range(steps):
        created.step()
    return created.end("completed" if steps == created.execution.steps else "stopped")


def replay_record(plan_digest: str) -> dict[str, Any]:
    """What a replay on the plan showed, as JSON data."""
    checks = dict.fromkeys(("sensitivity", "non_interference", "noise", "lots"), "shown")
    return {
        **{"type": "affidavit.replay/1", "verdict": "not_refuted", "program": "train.py"},
        **{"plan": plan_digest, "steps": 3, "neighbours": 2, "checks": checks},
        **{"largest_move": 0.5, "ended": "steps", "environment": {}},
        **dict.fromkeys(("files", "findings", "notes", "releases", "unstable"), ()),
    }
