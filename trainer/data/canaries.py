"""Canaries in the data: made-up records that take part or not, as coins say that nobody saw before.

Where a plan has ``canaries`` the trainer appends them to numbered features with classes (``csv``,
``digits``). Each counts as a record of the plan's data set; one that takes no part has the weight
0 in every loss, so that its gradient is zero and training is as without it. Features are
uniform from 0 to 1 and classes uniform: no person's, and nothing but memory tells them apart. They
are a function of a nonce, to which the first line of the run record commits. When the run is over,
they and their losses are written, and bound ε from below (``affidavit audit-model``).

Reference: Steinke, Nasr and Jagielski, arXiv:2305.08846.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from affidavit.certificate import Canaries, losses_as_bytes
from affidavit.trainer.adapters import Batch, Group, ModelAdapter, digest_of_tensors
from affidavit.trainer.data.numbers import Labelled, WrongData

CANARIES, LOSSES = "canaries.json", "canary-losses.json"
"""Files of a run's folder: its canaries, and what they lose when it is over."""


@dataclass(frozen=True, eq=False)
class AuditedData:
    """Records (N, f) with classes and, after them, canaries; ``weights`` (N,) are 0 or 1."""

    records: Labelled
    weights: Tensor
    canaries: Canaries

    @classmethod
    def of(cls, data: object, canaries: Canaries) -> AuditedData:
        """``data`` with ``canaries`` after its records.

        Raises ``WrongData`` for data without features and classes.
        """
        if not isinstance(data, Labelled):
            raise WrongData(
                "the plan has canaries, which are made up for csv and digits alone. Certify it "
                "without canaries."
            )
        generator = canaries.drawn("records")
        inputs = torch.from_numpy(generator.random((canaries.count, data.features)))
        labels = torch.from_numpy(generator.integers(0, data.classes, canaries.count))
        joined = Labelled(
            torch.cat([data.inputs, inputs.to(data.inputs.dtype)]),
            torch.cat([data.labels, labels.to(data.labels.dtype)]),
            classes=data.classes,
        )
        weights = torch.cat([torch.ones(len(data)), torch.tensor(canaries.included).float()])
        return cls(joined, weights, canaries)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def features(self) -> int:
        """How many numbers a record has."""
        return self.records.features

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.records.classes

    @cached_property
    def digest(self) -> str:
        """The digest of features, classes and weights."""
        return digest_of_tensors(self.records.inputs, self.records.labels, self.weights)

    def collate(self, indices: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Features (n, f) and classes (n,), and weights (n,)."""
        return self.records.collate(indices), self.weights[indices]


class AuditedModel:
    """A model whose losses are weighted, so that a record of weight 0 takes no part."""

    def __init__(self, model: ModelAdapter) -> None:
        self.model = model
        self.module: nn.Module = model.module

    def losses(self, batch: Batch) -> Tensor:
        """The model's losses by their weights; (n,)."""
        records, weights = batch
        return self.model.losses(records) * weights

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """The model's own."""
        return self.model.blocks()

    def made_up(self, records: int) -> Batch:
        """The model's own, each of weight 1."""
        return self.model.made_up(records), torch.ones(records)


def canary_losses(model: AuditedModel, data: AuditedData) -> list[float]:
    """The loss of each canary under the model as it is, whether or not it took part."""
    first = len(data) - data.canaries.count
    batch, _ = data.collate(torch.arange(first, len(data)))
    parameter = next(model.module.parameters())
    with torch.no_grad():
        moved = tuple(item.to(parameter.device) for item in batch)
        return [float(loss) for loss in model.model.losses(moved).cpu()]


def audit_files(data: AuditedData, model: AuditedModel) -> dict[str, bytes]:
    """What a run leaves for its audit, by the names of the files."""
    losses = losses_as_bytes(canary_losses(model, data))
    return {CANARIES: data.canaries.as_bytes(), LOSSES: losses}
