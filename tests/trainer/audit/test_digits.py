"""Planted faults fail ``audit-model`` on digits, and the trainer passes.

Many canaries take part in one training beside digits: rows of a Hadamard matrix, some classes of
each. Whoever has all iterates solves for how much of each canary is in every noisy sum, and
makes of that its score, the "loss". Where a fault shows only in what one record changes, each
canary has a training of its own; as these share no record, they are together one training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from scipy.stats import beta, binom
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from affidavit.assessment import certify
from affidavit.evidence import (
    Audit,
    Canaries,
    audit_canaries,
)
from affidavit.evidence.model.canary_audit import lower_epsilon
from affidavit.plan import Plan, plan_from
from affidavit.trainer import digits
from affidavit.trainer.adapters import Batch, Group
from affidavit.trainer.noise.chacha import Ratchet, derived_key
from affidavit.trainer.steps.sampling import LotSampler
from affidavit.trainer.steps.training_state import RunKeys, TrainingState
from tests.trainer.audit import faults

HIDDEN, FEATURES, CLIP, RATE = 15, 64, 0.5, 1e-3
CANCELLING = 64.0
"""How many times as long as a record's features a token is; two of them add up to the record."""

torch.set_num_threads(1)


class Digits(nn.Module):
    """Logits (n, classes) of matrices over two tokens, and of a normalised constant."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers = (nn.Linear(FEATURES, classes, bias=False) for _ in range(HIDDEN))
        self.hidden = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(classes)
        for parameter in self.hidden.parameters():
            nn.init.zeros_(parameter)

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
        x = torch.rand(records, FEATURES)
        return x, torch.zeros(records, dtype=torch.int64), torch.ones(records)

    def directions(self, x: Tensor, y: Tensor) -> Sums:
        """What records (n, 64) of classes (n,) add to the sum, by plain gradients and division."""

        def loss(of: Sums, one: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(self.module, of, (one[None],))
            return functional.cross_entropy(logits, label[None])

        trained = {name: item.detach() for name, item in self.module.named_parameters()}
        result: Sums = vmap(grad(loss), (None, 0, 0))(trained, x, y)
        result = {name: item.double().flatten(1) for name, item in result.items()}
        for group in (item for groups in self.blocks().values() for item in groups):
            lengths = torch.cat([result[name] for name in group.names], 1).norm(dim=1)
            for name in group.names:
                result[name] *= (CLIP / lengths).clamp(max=1)[:, None]
        return result


Sums = dict[str, Tensor]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Records:
    """Records (N, 64) of classes (N,); ``present`` (N,) is 0 for one that takes no part."""

    x: Tensor
    y: Tensor
    present: Tensor
    digest: str = ""

    def __len__(self) -> int:
        return len(self.y)

    def collate(self, indices: Tensor) -> Batch:
        return self.x[indices], self.y[indices], self.present[indices]


def plan_of(size: int, steps: int, joint: float, lots: dict[str, Any], delta: float) -> Plan:
    """DP-SGD with a block for each matrix; ``joint`` is the multiplier of all blocks."""
    noise = {"clip_norm": CLIP, "noise_multiplier": joint * (HIDDEN + 1) ** 0.5}
    return plan_from(
        {
            "version": 1,
            "dataset": {"size": size},
            "adjacency": "zero_out",
            "sampling": lots,
            "steps": steps,
            "releases": [
                {"name": "hidden", "count": HIDDEN, **noise},
                {"name": "auxiliary", "count": 1, **noise},
            ],
            "optimizer": {"name": "dp_sgd", "learning_rate": RATE},
            "target": {"delta": delta},
            "allow_large_delta": "what an attacker gains is measured, and nothing is released",
        }
    )


def certified(plan: Plan) -> float:
    """The certified ε."""
    epsilon = certify(plan, second_opinion=False).epsilon
    assert epsilon is not None
    return epsilon.upper


def released(
    plan: Plan, adapter: Adapter, data: Records, kind: type[TrainingState], key: bytes
) -> list[Sums]:
    """The noisy sums of a run's steps, as whoever has all iterates computes them."""
    config = faults.config_of(plan, len(data))
    keys = RunKeys(lots=derived_key(key, "lots"), probes=key)
    drawn, ratchet, before = LotSampler.of, Ratchet(key), _copied(adapter)
    result = []
    with pytest.MonkeyPatch.context() as patch:
        # Who takes no part is in no lot, so that it shows where records of a lot are counted.
        patch.setattr(
            LotSampler, "of", lambda *given: (lot := drawn(*given))[data.present[lot] > 0]
        )
        training = faults.build_of(kind)(config, adapter, data, keys)
        for step in range(config.execution.steps):
            training.step(step, ratchet, lambda _: None)
            ratchet, after = ratchet.next(), _copied(adapter)
            scale = float(Fraction(config.execution.at(step).divisor)) / RATE
            result.append(
                {name: (before[name] - after[name]).flatten()[None] * scale for name in before}
            )
            before = after
    training.close()
    return result


def _copied(adapter: Adapter) -> Sums:
    return {name: item.detach().double() for name, item in adapter.module.named_parameters()}


# Many canaries in one training ------------------------------------------------------------

DIGITS, CLASSES = 20, 5
COUNT, GUESSES, DELTA = FEATURES * CLASSES, 106, 1e-3
FULL, HALF = {"scheme": "full_batch"}, {"scheme": "poisson", "probability": 0.5}
ONCE, QUIET = (plan_of(DIGITS + COUNT, 1, joint, FULL, DELTA) for joint in (1.4, 4.0))
HALVES = plan_of(DIGITS + COUNT, 8, 4.0, HALF, DELTA)


@cache
def crowd(*tensors: str) -> tuple[Tensor, Tensor, Tensor]:
    """Digits, then canaries: x (N, 64), y (N,), and from sums of ``tensors`` to their shares."""
    data, signs = digits("part=train"), torch.from_numpy(hadamard(FEATURES)).float()
    others = torch.nonzero(data.labels >= CLASSES).flatten()[:DIGITS]  # of no canary's class
    x = torch.cat([data.inputs[others], signs.repeat(CLASSES, 1)])
    y = torch.cat([data.labels[others], torch.arange(CLASSES).repeat_interleave(FEATURES)])
    rows = flat(Adapter(10).directions(x, y), *tensors)
    return x, y, torch.linalg.solve(rows @ rows.T, rows)


def flat(sums: Sums, *tensors: str) -> Tensor:
    """The entries of ``tensors``, or of all, side by side; each is (n, entries)."""
    return torch.cat([sums[name] for name in tensors or sums], 1)


def shares(plan: Plan, canaries: Canaries, kind: type[TrainingState], *tensors: str) -> Array:
    """How much of each canary is in each step's sum of ``tensors``, or of all; (T, count)."""
    x, y, inverse = crowd(*tensors)
    present = torch.cat([torch.ones(DIGITS), torch.tensor(canaries.included).float()])
    sums = released(plan, Adapter(10), Records(x, y, present), kind, canaries.nonce)
    return np.stack([(inverse @ flat(item, *tensors)[0])[DIGITS:].numpy() for item in sums])


@dataclass(frozen=True, kw_only=True)
class Attack:
    """From how much of each canary is in each step's sum of ``tensors``, (T, n), to (n,) scores."""

    plan: Plan
    score: Callable[[Array], Array]
    tensors: tuple[str, ...] = ()

    def audit(self, kind: type[TrainingState] = TrainingState, nonce: int = 0) -> Audit:
        """What one run of a trainer proves."""
        canaries = Canaries.of(nonce.to_bytes(32, "big"), COUNT, GUESSES)
        scores = self.score(shares(self.plan, canaries, kind, *self.tensors))
        return audit_canaries(canaries, list(-scores), delta=DELTA)


MATRICES = tuple(f"hidden.{number}.weight" for number in range(HIDDEN))
JOINT = Attack(plan=ONCE, score=lambda seen: seen.sum(0))
"""Noise that is too small over all blocks jointly."""
BEYOND = Attack(plan=QUIET, score=lambda seen: seen.sum(0), tensors=MATRICES)
"""Contributions beyond the clip norm."""
BARE = Attack(plan=QUIET, score=lambda seen: seen.sum(0), tensors=MATRICES[:1])
"""A tensor without noise."""
UNSETTLED = Attack(plan=HALVES, score=lambda seen: np.asarray(np.ptp(seen, 0)))
"""What is left of noise that is the same in every step."""
ATTACKS = {"joint": JOINT, "beyond": BEYOND, "bare": BARE, "unsettled": UNSETTLED}


class LeftOut(faults.LeftOut):
    """Noise passes over a matrix."""

    tensor = MATRICES[0]


@pytest.mark.ordinary("joint", "bare")
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_trainer_is_not_accused(attack: Attack) -> None:
    assert attack.audit().epsilon <= certified(attack.plan)


@pytest.mark.soak
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_correct_runs_are_accused_no_more_often_than_stated(attack: Attack) -> None:
    """200 runs; at the level 0.05 more of them are above ε with probability 1e-4."""
    bound = certified(attack.plan)
    above = sum(attack.audit(nonce=nonce).epsilon > bound for nonce in range(200))
    assert above <= binom.isf(1e-4, 200, 0.05)


@pytest.mark.parametrize(
    ("fault", "attack"),
    [(faults.RootK, JOINT), (LeftOut, BARE), (faults.Reseeded, UNSETTLED)],
)
def test_a_fault_is_found_in_one_run(fault: type[TrainingState], attack: Attack) -> None:
    assert attack.audit(fault).epsilon > certified(attack.plan)


def test_norms_in_bfloat16_are_found_in_one_run() -> None:
    with faults.norms_in_bfloat16():
        assert BEYOND.audit().epsilon > certified(QUIET)


# A training of its own for each canary -----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Lots of one expected record of ``size``: digits, and a canary of class 0.

    With ``opposite`` the others contribute the opposite of the canary, so that a lot without
    them stands out.
    """

    plan: Plan
    opposite: bool = False

    def runs(self, canaries: Canaries, kind: type[TrainingState]) -> Iterator[tuple[Array, Array]]:
        """Of each canary's run how much of it is in every noisy sum, (T,), and their lengths."""
        data, size = digits("part=train"), self.plan.dataset.size
        assert size is not None
        for index, included in enumerate(canaries.included):
            drawn = canaries.generator(f"run {index}")
            canary = torch.from_numpy(drawn.choice([-1.0, 1.0], FEATURES)).float()
            if self.opposite:
                x, y = canary.expand(size, -1), torch.tensor([1] * (size - 1) + [0])
            else:
                places = drawn.choice(np.flatnonzero(data.labels.numpy() > 0), size - 1)
                x = torch.cat([data.inputs[places], canary[None]])
                y = torch.cat([data.labels[places], torch.tensor([0])])
            adapter = Adapter(2 if self.opposite else 10)
            direction = flat(adapter.directions(x[-1:], y[-1:]))[0]
            present = torch.tensor([1.0] * (size - 1) + [float(included)])
            key = derived_key(canaries.nonce, f"key of run {index}")
            sums = released(self.plan, adapter, Records(x, y, present), kind, key)
            noisy = torch.cat([flat(item) for item in sums])
            yield (
                (noisy @ direction / direction.square().sum()).numpy(),
                noisy.square().sum(1).numpy(),
            )


COUNTED = Alone(plan=plan_of(2, 8, 10.0, HALF, DELTA))
EIGHTH = {"scheme": "poisson", "probability": 0.125}
DISPLACED = Alone(plan=plan_of(8, 8, 0.3, EIGHTH, 0.5), opposite=True)


def counted(kind: type[TrainingState]) -> Audit:
    """By the least noise of a step: that of the largest lot, where lots are counted."""
    canaries = Canaries.of(bytes(32), 60, 20)
    scores = [float(lengths.min()) for _, lengths in COUNTED.runs(canaries, kind)]
    return audit_canaries(canaries, scores, delta=DELTA)


def displaced(kind: type[TrainingState]) -> Audit:
    """By the greatest share of the canary in a step, guessing about all of them."""
    canaries = Canaries.of(bytes(32), 60, 60)
    scores = [-float(seen.max()) for seen, _ in DISPLACED.runs(canaries, kind)]
    return audit_canaries(canaries, scores, delta=0.5)


def independent_epsilon(right: int, runs: int, *, delta: float, alarm: float) -> float:
    """The lower bound on ε, in nats, if ``right`` of ``runs`` independent guesses are right.

    (ε, δ)-DP allows at most the rate (e^ε + δ) / (e^ε + 1). The bound on the rate is Clopper and
    Pearson's (Biometrika 26 (1934) 404), which fails with probability at most ``alarm``.
    """
    if right <= runs / 2 + 1:
        return 0.0
    rate = float(beta.ppf(alarm, right, runs - right + 1))
    return math.log(max(1.0, (rate - delta) / (1 - rate)))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.0, 0.3), (0.5, 0.05), (2.0, 0.01)])
@pytest.mark.parametrize("alarm", [0.05, 1e-5])
def test_a_true_claim_is_falsified_no_more_often_than_stated(
    epsilon: float, delta: float, alarm: float
) -> None:
    """Over the worst mechanisms, those with P(S) = e^ε P'(S) + δ, computed exactly."""
    runs, counts = 60, np.arange(31)
    wrong = [
        independent_epsilon(right, runs, delta=delta, alarm=alarm) > epsilon
        for right in range(runs + 1)
    ]
    for outside in np.linspace(0, (1 - delta) / (math.exp(epsilon) + 1), 7):
        inside = math.exp(epsilon) * outside + delta
        right = np.convolve(binom.pmf(counts, 30, inside), binom.pmf(counts, 30, 1 - outside))
        assert float(right[wrong].sum()) <= alarm


def of_separate_trainings(result: Audit) -> float:
    """The bound for trainings that share nothing, so that right guesses are independent."""
    alarm = 1 - result.confidence
    return independent_epsilon(result.right, result.guesses, delta=result.delta, alarm=alarm)


@pytest.mark.soak
def test_a_divisor_that_counts_records_is_found() -> None:
    assert counted(TrainingState).epsilon <= certified(COUNTED.plan)
    assert counted(faults.RealisedLot).epsilon > certified(COUNTED.plan)


@pytest.mark.soak
def test_shuffled_lots_are_found_by_trainings_that_share_nothing() -> None:
    assert of_separate_trainings(displaced(TrainingState)) <= certified(DISPLACED.plan)
    assert of_separate_trainings(displaced(faults.Shuffled)) > certified(DISPLACED.plan)


def test_one_training_cannot_show_shuffled_lots() -> None:
    """At the δ at which they cost most, all guesses may be right in one training of a δ share."""
    assert lower_epsilon(right=60, guesses=60, canaries=60, delta=0.5) == 0
