"""A small certified run: a plan, its certificate, a model and made-up data."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from affidavit.certificate import issue
from affidavit.plan import Plan, plan_from
from affidavit.trainer.adapters import Group, digest_of_tensors
from affidavit.trainer.loop import Outcome, train
from affidavit.trainer.noise.chacha import Entropy
from affidavit.trainer.settings import Settings
from affidavit.trust import SigningKey
from tests.support.trust import trusting

torch.set_num_threads(1)

RECORDS, STEPS = 60, 12
DEVICE = os.environ.get("AFFIDAVIT_TEST_DEVICE", "cpu")
"""Where runs train; ``make test-gpu`` sets it to cuda."""
KEY = SigningKey.generate("tests")
DOCUMENT: dict[str, Any] = {
    "version": 1,
    "dataset": {"name": "made-up", "size": RECORDS},
    "adjacency": "add_remove",
    "sampling": {"scheme": "poisson", "lot_size": 12},
    "steps": STEPS,
    "releases": [{"name": "all", "count": 2, "clip_norm": 0.5, "noise_multiplier": 2.0}],
    "optimizer": {"name": "dp_sgd", "learning_rate": 0.1},
    "target": {"delta": 1e-3},
}


def plan_with(**changes: Any) -> Plan:
    """The small plan with top-level fields changed, or left out by ``...``."""
    document = {**json.loads(json.dumps(DOCUMENT)), **changes}
    return plan_from({key: value for key, value in document.items() if value is not ...})


def bundle_of(plan: Plan, **changes: Any) -> bytes:
    """A certificate of ``plan``, as a bundle."""
    from affidavit.assessment import certify  # the ranks of a run need not wait for it

    result = certify(plan, second_opinion=False)
    at = datetime.now(UTC).replace(microsecond=0)
    key = changes.get("key", KEY)
    return issue(result, key, requester="tests", issued_at=changes.get("at", at)).bundle


class MadeUpData:
    """Made-up records: x in R³ and a target."""

    def __init__(self, records: int = RECORDS, seed: int = 3) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.x = torch.randn(records, 3, generator=drawn)
        self.y = torch.randn(records, generator=drawn)
        self.asked: list[list[int]] = []

    @property
    def digest(self) -> str:
        return digest_of_tensors(self.x, self.y)

    def __len__(self) -> int:
        return len(self.x)

    def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append(indices.tolist())
        return self.x[indices], self.y[indices]


class SmallModel:
    """Two layers; ``names`` are the releases and the layers whose tensors they have."""

    def __init__(self, releases: dict[str, tuple[str, ...]] | None = None, seed: int = 5) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self._releases = releases or {"all": ("0", "2")}

    def losses(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.module(x).squeeze(1) - y).square()

    def blocks(self) -> dict[str, tuple[Group, ...]]:
        return {
            release: tuple(Group(names=(f"{layer}.weight", f"{layer}.bias")) for layer in layers)
            for release, layers in self._releases.items()
        }

    def made_up(self, records: int) -> tuple[Tensor, Tensor]:
        return torch.randn(records, 3), torch.randn(records)


def entropy_of(seed: int) -> Entropy:
    """Bytes that are the same in every run, for tests that compare two."""
    numbers = count(seed * 1000)
    return lambda length: (next(numbers) % 251 + 1).to_bytes(1, "little") * length


@dataclass
class FinishedRun:
    """A run that was made, its model and what it returned."""

    out: Path
    model: SmallModel
    data: MadeUpData
    outcome: Outcome

    @property
    def values(self) -> Tensor:
        """All parameters, one after the other."""
        return torch.cat(
            [parameter.detach().flatten() for parameter in self.model.module.parameters()]
        )

    @property
    def entries(self) -> list[dict[str, Any]]:
        return entries_of(self.out)


def entries_of(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's record."""
    return [json.loads(line) for line in (out / "record.jsonl").read_text().splitlines()]


def train_small(plan: Plan | None = None, *, out: Path, **arguments: Any) -> FinishedRun:
    """Train ``plan`` into ``out``; ``seed`` makes its keys those of every run with that seed."""
    plan = plan or plan_with()
    model = arguments.pop("model", None) or SmallModel()
    data = arguments.pop("data", None) or MadeUpData()
    settings: dict[str, Any] = {"checkpoint_every": 10, "digest_every": 1}
    settings |= {
        name: arguments.pop(name)
        for name in list(arguments)
        if name in Settings.__dataclass_fields__
    }
    if (seed := arguments.pop("seed", None)) is not None:
        arguments["entropy"] = entropy_of(seed)
    bundle = arguments.pop("bundle", None) or bundle_of(plan)
    outcome = train(
        bundle=bundle,
        trusted=arguments.pop("trusted", trusting(KEY.public)),
        plan=plan,
        data=data,
        model=model,
        out=out,
        settings=Settings(device=DEVICE, **settings),
        quiet=True,
        **arguments,
    )
    model.module.cpu()
    return FinishedRun(out=out, model=model, data=data, outcome=outcome)
