"""Transcripts: what an observer of all iterates sees of a run, along the canary's direction.

A run is the trainer's own training, step by step, under DP-SGD without momentum at learning
rate 1, so that two iterates differ by the released mean; times the divisor that the plan
states, that is the noisy sum of every tensor. Of each sum S with the canary's share D two
numbers are kept: the matched filter ⟨S, D⟩/‖D‖², which is 1 where the canary took part and
noise was left out, and the length of what is orthogonal to D, over the noise that was
certified. Nothing else of the run is read: no lot, no norm, no noise.

A canary sits on the clip norm of every block at once, in a known direction. Its model has six
hidden matrices, each a block, and an auxiliary block of an embedding and of a normalisation's
scale and shift. A record's loss is linear in the parameters, so that its gradient G is the same at
every step whatever the parameters have become, and each block of G is ``REACH`` times its clip
norm long. Inside, each matrix's gradient is a sum over two tokens that nearly cancel: where norms
are taken in too few digits they come out far too small. A record has an amplitude, +1 for a
canary, -1 for one that contributes the opposite and 0 for one that contributes nothing, and
``sign`` turns all of them at once: the worst data set of the definition, chosen by whoever
attacks.

>>> model = CanaryModel()
>>> {release: len(groups) for release, groups in model.blocks().items()}
{'hidden': 6, 'auxiliary': 1}
>>> [round(float(share.norm()), 2) for share in model.direction(0.5).values()]
[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.29, 0.29, 0.29]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from affidavit.certificate import Execution, noise_std
from affidavit.plan import Plan, digest
from affidavit.trainer.adapters import Batch, DataAdapter, Group, ModelAdapter, digest_of_tensors
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.noise.chacha import Ratchet, derived_key
from affidavit.trainer.run_config import RunConfig, strategies_of
from affidavit.trainer.settings import Settings
from affidavit.trainer.steps.training_state import RunKeys, TrainingState

HIDDEN, WIDTH, WORDS = 6, 8, 3
REACH = 50.0
"""How many times a canary's gradient is as long as what it is clipped to, for a clip norm of 1."""
CANCELLING = 100.0
"""How many times a token's part is as long as what is left of two of them."""


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(HIDDEN))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, records: int) -> Tensor:
        """The same for every record, (records, WIDTH)."""
        tokens = torch.zeros(records, 2, WIDTH)
        tokens[:, 0, 0], tokens[:, 1, 0] = CANCELLING / 2, -CANCELLING / 2
        tokens[:, :, 1] = 0.5
        result = sum(layer(tokens).sum(1) for layer in self.hidden)
        wave = torch.where(torch.arange(WIDTH) % 2 == 0, 1.0, -1.0).expand(records, -1)
        words = self.words(torch.zeros(records, 1, dtype=torch.int64)).squeeze(1)
        assert isinstance(result, Tensor)
        return result + (words + self.norm(wave)) / 3**0.5


class CanaryModel:
    """The model as the trainer sees it; a batch has the amplitudes (n,) of its records."""

    def __init__(self) -> None:
        self.module: nn.Module = _Module()
        self.sign = 1.0

    def losses(self, batch: Batch) -> Tensor:
        """Linear in every parameter; (n,)."""
        result: Tensor = self.module(len(batch))[:, 0] * batch * (REACH * self.sign)
        return result

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """A block for each matrix, one for all the rest."""
        names = [name for name, _ in self.module.named_parameters()]
        hidden = [name for name in names if name.startswith("hidden")]
        rest = tuple(name for name in names if name not in hidden)
        return {
            "hidden": tuple(Group(names=(name,)) for name in hidden),
            "auxiliary": (Group(names=rest),),
        }

    def made_up(self, records: int) -> Batch:
        """Canaries of different amplitudes."""
        return torch.linspace(0.5, 1.0, records)

    def direction(self, clip_norm: float) -> dict[str, Tensor]:
        """What a canary adds to the sum at sign 1 when each block is clipped exactly; by name.

        From plain autograd in float64 and the definition of clipping, not from the trainer.

        Each has the shape of its parameter.
        """
        trained = dict(self.module.named_parameters())
        loss = self.losses(torch.ones(1)).sum() / self.sign
        gradients = torch.autograd.grad(loss, list(trained.values()))
        of = {name: entry.double() for name, entry in zip(trained, gradients, strict=True)}
        result: dict[str, Tensor] = {}
        for group in (item for groups in self.blocks().values() for item in groups):
            joint = torch.stack([of[name].norm() for name in group.names]).norm()
            factor = min(1.0, clip_norm / float(joint))
            result |= {name: of[name] * factor for name in group.names}
        return result


@dataclass(frozen=True)
class CanaryData:
    """Records by their amplitudes, (N,)."""

    amplitudes: Tensor

    @property
    def digest(self) -> str:
        """The digest of the amplitudes."""
        return digest_of_tensors(self.amplitudes)

    def __len__(self) -> int:
        return len(self.amplitudes)

    def collate(self, indices: Tensor) -> Tensor:
        """Amplitudes of the records. Shape (n,), for indices of shape (n,)."""
        return self.amplitudes[indices]


Array = NDArray[np.float64]

Build = Callable[[RunConfig, ModelAdapter, DataAdapter, RunKeys], TrainingState]
"""The trainer under attack: from a run's configuration to its training state."""


def training_of(
    config: RunConfig, model: ModelAdapter, data: DataAdapter, keys: RunKeys
) -> TrainingState:
    """The trainer as it is."""
    return TrainingState(
        config, model, data, settings=Settings(), peers=Peers.alone("cpu"), keys=keys
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcripts:
    """Of R runs of T steps and G tensors: matched filters (R, T, G), lengths (R, T).

    ``weights`` (G,) are those by which the matched filters of one step are joined best under
    the certified noise; ``joint`` is the certified multiplier of what comes out.
    """

    matched: Array
    lengths: Array
    weights: Array
    joint: float

    @property
    def filtered(self) -> Array:
        """One number a step, over all blocks jointly, (R, T)."""
        result: Array = self.matched @ self.weights
        return result

    def part(self, first: int, last: int) -> Transcripts:
        """Runs from ``first`` to before ``last``."""
        return Transcripts(
            matched=self.matched[first:last],
            lengths=self.lengths[first:last],
            weights=self.weights,
            joint=self.joint,
        )


def observe(
    plan: Plan,
    amplitudes: Sequence[float],
    signs: Sequence[float],
    runs: int,
    *,
    key: bytes,
    build: Build = training_of,
) -> Transcripts:
    """Transcripts of ``runs`` runs of a closed plan on records of ``amplitudes``.

    ``signs`` has that of each step. Keys are derived from ``key``, so that an audit can be
    repeated.
    """
    config, model = config_of(plan, len(amplitudes)), CanaryModel()
    data = CanaryData(torch.tensor(amplitudes))
    release = plan.phases[0].releases[0]
    directions = model.direction(release.clip_norm)
    squares = np.array([float(direction.square().sum()) for direction in directions.values()])
    scale = noise_std(release)
    matched, lengths = [], []
    start = {name: item.clone() for name, item in model.module.state_dict().items()}
    for run in range(runs):
        model.module.load_state_dict(start)
        own = derived_key(key, f"audit run {run}")
        keys = RunKeys(lots=derived_key(own, "lots"), probes=derived_key(own, "probes"))
        training = build(config, model, data, keys)
        try:
            steps = list(_released(training, config, model, signs, Ratchet(own)))
        finally:
            training.close()
        matched.append([[float((s[n] * d).sum()) for n, d in directions.items()] for s in steps])
        lengths.append([_length(s, directions, squares) / scale for s in steps])
    signed = np.array(matched) * np.array(signs)[:, None] / squares
    return Transcripts(
        matched=signed,
        lengths=np.array(lengths),
        weights=squares / squares.sum(),
        joint=scale / float(np.sqrt(squares.sum())),
    )


def config_of(plan: Plan, size: int) -> RunConfig:
    """``plan`` for as many records as there are, configured without a certificate."""
    dataset = plan.dataset.model_copy(update={"size": size})
    closed = plan.model_copy(update={"dataset": dataset})
    execution = Execution.of(closed)
    return RunConfig(
        certificate_id="audit",
        plan_digest=digest(closed),
        plan=closed,
        execution=execution,
        strategies=strategies_of(execution),
        guarantee={},
    )


Sums = dict[str, torch.Tensor]


def _released(
    training: TrainingState,
    config: RunConfig,
    model: CanaryModel,
    signs: Sequence[float],
    ratchet: Ratchet,
) -> list[Sums]:
    result, before = [], _copied(model)
    for step, sign in enumerate(signs):
        model.sign = sign
        training.step(step, ratchet, lambda _: None)
        ratchet, after = ratchet.next(), _copied(model)
        divisor = float(Fraction(config.execution.at(step).divisor))
        result.append({name: (before[name] - after[name]) * divisor for name in before})
        before = after
    model.sign = 1.0
    return result


def _copied(model: CanaryModel) -> Sums:
    return {name: item.detach().double() for name, item in model.module.named_parameters()}


def _length(sums: Sums, directions: Sums, squares: Array) -> float:
    """Root mean square of all entries once the canary's direction is taken out."""
    total, entries = 0.0, 0
    for (name, direction), square in zip(directions.items(), squares, strict=True):
        along = float((sums[name] * direction).sum()) ** 2 / square
        total += float(sums[name].square().sum()) - along
        entries += direction.numel() - 1
    return float(np.sqrt(max(total, 0.0) / entries))
