"""Planted faults fail ``audit-model`` on digits, and the trainer passes.

Runs of one plan, each of a few digits and a canary whose coin is that of one commitment. The runs
share no record, so that together they are one training, of which every canary is a record. All
iterates are released; the score of a canary, its "loss", is what an attack that knows the
fault makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from affidavit.certificate import Audit, Canaries, audit_canaries, certify
from affidavit.plan import Plan, plan_from
from affidavit.trainer import Labelled, digits
from affidavit.trainer.adapters import Batch, Group
from affidavit.trainer.audit.transcript import _config_of
from affidavit.trainer.lot_sampler import LotSampler
from affidavit.trainer.noise.chacha import derived_key
from affidavit.trainer.ratchet import Ratchet
from affidavit.trainer.training_state import RunKeys, TrainingState
from tests.trainer.audit import faults

HIDDEN, CLIP, RATE, DELTA = 6, 0.5, 1e-3, 1e-3
CANCELLING = 100.0
"""How many times as long as a record's features a token is; two of them add up to the record."""

torch.set_num_threads(1)


class Digits(nn.Module):
    """Logits (n, classes) of six matrices over two tokens, and of a normalised constant."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(64, classes, bias=False) for _ in range(HIDDEN))
        self.norm = nn.LayerNorm(classes)
        for layer in self.hidden:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]  # a linear layer's

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([(0.5 + CANCELLING) * x, (0.5 - CANCELLING) * x], 1)
        wave = torch.where(torch.arange(len(self.norm.bias)) % 2 == 0, 1.0, -1.0)
        result = self.norm(wave.expand(len(x), -1))
        for layer in self.hidden:
            result = result + layer(tokens).sum(1)
        assert isinstance(result, Tensor)
        return result


class Adapter:
    """The model as the trainer sees it: a block for each matrix, one for the rest."""

    def __init__(self, classes: int) -> None:
        self.module: nn.Module = Digits(classes)

    def losses(self, batch: Batch) -> Tensor:
        x, y, present = batch
        return functional.cross_entropy(self.module(x), y, reduction="none") * present

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        names = [name for name, _ in self.module.named_parameters()]
        hidden = tuple(Group(names=(name,)) for name in names if name.startswith("hidden"))
        rest = Group(names=tuple(name for name in names if not name.startswith("hidden")))
        return {"hidden": hidden, "auxiliary": (rest,)}

    def made_up(self, records: int) -> Batch:
        return torch.rand(records, 64), torch.zeros(records, dtype=torch.int64), torch.ones(records)

    def direction(self, x: Tensor, y: int) -> dict[str, Tensor]:
        """What a record (64,) of class ``y`` adds to the sum, by plain autograd and division."""
        trained = dict(self.module.named_parameters())
        loss = self.losses((x[None].float(), torch.tensor([y]), torch.ones(1))).sum()
        gradients = torch.autograd.grad(loss, list(trained.values()))
        of = {name: item.double() for name, item in zip(trained, gradients, strict=True)}
        result: dict[str, Tensor] = {}
        for group in (item for groups in self.blocks().values() for item in groups):
            length = torch.stack([of[name].norm() for name in group.names]).norm()
            result |= {name: of[name] * min(1.0, CLIP / float(length)) for name in group.names}
        return result


@dataclass(frozen=True)
class Records:
    """Digits, and the canary as the last record; ``present`` (N,) is 0 where it takes no part."""

    x: Tensor
    y: Tensor
    present: Tensor
    digest: str = ""

    def __len__(self) -> int:
        return len(self.y)

    def collate(self, indices: Tensor) -> Batch:
        return self.x[indices], self.y[indices], self.present[indices]


Made = Callable[[Labelled, np.random.Generator], tuple[Tensor, Tensor]]
"""The features and classes of a run's records, the canary last."""


def apart(data: Labelled, drawn: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A digit that is not 0, and a canary of random signs of class 0."""
    place = int(drawn.choice(np.flatnonzero(data.labels.numpy() > 0)))
    canary = torch.from_numpy(drawn.choice([-1.0, 1.0], 64)).to(data.inputs.dtype)
    return torch.stack([data.inputs[place], canary]), torch.tensor([int(data.labels[place]), 0])


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Poisson lots of one expected record of ``size``, by DP-SGD; ``joint`` is the multiplier."""

    size: int
    steps: int
    joint: float
    classes: int
    made: Made

    def plan(self) -> Plan:
        """A block for each matrix; certified at ``DELTA``."""
        noise = {"clip_norm": CLIP, "noise_multiplier": self.joint * (HIDDEN + 1) ** 0.5}
        return plan_from(
            {
                "version": 1,
                "dataset": {"size": self.size},
                "adjacency": "zero_out",
                "sampling": {"scheme": "poisson", "probability": 1 / self.size},
                "steps": self.steps,
                "releases": [
                    {"name": "hidden", "count": HIDDEN, **noise},
                    {"name": "auxiliary", "count": 1, **noise},
                ],
                "optimizer": {"name": "dp_sgd", "learning_rate": RATE},
                "target": {"delta": DELTA},
                "allow_large_delta": "what an attacker gains is measured, and nothing is released",
            }
        )


APART = Stage(size=2, steps=16, joint=3.0, classes=10, made=apart)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of a run's noisy sums: matched filters by tensor and of all (T,), and lengths (T,)."""

    tensors: Mapping[str, np.ndarray[Any, Any]]
    joined: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]


def run(stage: Stage, kind: type[TrainingState], made: Any, present: bool, key: bytes) -> Seen:
    """One run, as whoever has all iterates sees it."""
    x, y = made
    adapter, config = Adapter(stage.classes), _config_of(stage.plan(), stage.size)
    data = Records(x, y, torch.tensor([1.0] * (len(y) - 1) + [float(present)]))
    direction = adapter.direction(x[-1], int(y[-1]))
    keys = RunKeys(lots=derived_key(key, "lots"), probes=key)
    drawn, absent = LotSampler.of, -1 if present else len(y) - 1
    ratchet, steps, before = Ratchet(key), [], _copied(adapter)
    with pytest.MonkeyPatch.context() as patch:
        # Who takes no part is in no lot, so that it shows where records of a lot are counted.
        patch.setattr(LotSampler, "of", lambda *given: (lot := drawn(*given))[lot != absent])
        training = faults.build_of(kind)(config, adapter, data, keys)
        for step in range(stage.steps):
            training.step(step, ratchet, lambda _: None)
            ratchet, after = ratchet.next(), _copied(adapter)
            scale = float(Fraction(config.execution.at(step).divisor)) / RATE
            steps.append({name: (before[name] - after[name]) * scale for name in before})
            before = after
    training.close()
    squares = {name: float(item.square().sum()) for name, item in direction.items()}
    along = {
        name: np.array([float((sums[name] * d).sum()) for sums in steps])
        for name, d in direction.items()
    }
    return Seen(
        tensors={name: along[name] / squares[name] for name in along},
        joined=np.sum(list(along.values()), 0) / sum(squares.values()),
        lengths=np.array([sum(float(s.square().sum()) for s in sums.values()) for sums in steps]),
    )


def _copied(adapter: Adapter) -> dict[str, Tensor]:
    return {name: item.detach().double() for name, item in adapter.module.named_parameters()}


Attack = Callable[[Seen], float]


def certified(seen: Seen) -> float:
    """That of the certified mechanism with lots of a half."""
    return float(np.logaddexp(0, (2 * seen.joined - 1) / (2 * APART.joint**2)).sum())


def louder(seen: Seen) -> float:
    """The greatest matched filter: contributions beyond the clip norm, and noise that is small."""
    return float(seen.joined.max())


def unsettled(seen: Seen) -> float:
    """What is left of noise that is the same in every step."""
    return float(np.ptp(seen.joined))


def bare(seen: Seen) -> float:
    """The tensor without noise."""
    return float(seen.tensors["norm.bias"].max())


def quiet(seen: Seen) -> float:
    """Noise that is divided by more records."""
    return -float(seen.lengths.min())


def audited(
    stage: Stage, attack: Attack, kind: type[TrainingState] = TrainingState, runs: int = 90
) -> Audit:
    """What ``runs`` runs prove at the δ that is certified for ``EPSILON``."""
    canaries = Canaries.of(bytes(31) + bytes([stage.size]), runs, runs // 6 * 2)
    data, losses = digits("part=train"), []
    for index, present in enumerate(canaries.included):
        made = stage.made(data, canaries.drawn(f"run {index}"))
        key = derived_key(canaries.nonce, f"key of run {index}")
        losses.append(-attack(run(stage, kind, made, present, key)))
    return audit_canaries(canaries, losses, delta=DELTA)


def bound() -> float:
    """The certified ε."""
    epsilon = certify(APART.plan(), second_opinion=False).epsilon
    assert epsilon is not None
    return epsilon.upper


@pytest.mark.soak
@pytest.mark.parametrize("attack", [certified, louder, unsettled, bare, quiet])
def test_the_trainer_is_not_accused(attack: Attack) -> None:
    assert audited(APART, attack).epsilon <= bound()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "attack"),
    [
        (faults.Reseeded, unsettled),
        (faults.RealisedLot, quiet),
        (faults.LeftOut, bare),
    ],
)
def test_a_fault_is_found(fault: type[TrainingState], attack: Attack) -> None:
    assert audited(APART, attack, fault).epsilon > bound()
