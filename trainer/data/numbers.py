"""Numbered features with a class each: CSV files, handwritten digits, and canaries among them.

A CSV file is UTF-8 with a header; every column but the label is a finite number, and labels are
whole numbers from 0 to K-1. K is public and has to be said: reading it off the records would
release what they hold. For the same reason features are taken as they stand. What is wrong is
refused with its line and column.

Digits are 1,797 images of 8 x 8 with 16 levels of grey, here from 0 to 1 (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49).

>>> points = Labelled(torch.eye(3), torch.tensor([0, 1, 1]), classes=2)
>>> len(points), points.features, points.collate(torch.tensor([1]))[1].tolist()
(3, 3, [1])

Canaries are made-up records that take part or not, as coins say that nobody saw before. Where a
plan has ``canaries`` the trainer appends them. Each counts as a record of the plan's data set; one
that takes no part has the weight 0 in every loss, so that its gradient is zero and training is as
without it. Features are uniform from 0 to 1 and classes uniform: no person's, and nothing but
memory tells them apart. They are a function of a nonce, to which the first line of the run record
commits. When the run is over, they and their losses are written, and bound ε from below
(``affidavit audit-model``).

Reference: Steinke, Nasr and Jagielski, arXiv:2305.08846.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from affidavit.certificate import Canaries, losses_as_bytes
from affidavit.trainer.adapters import Batch, Group, ModelAdapter, digest_of_tensors
from affidavit.trainer.options import Options, WrongOption

MAX_CLASSES = 100_000
LARGEST = 1e30
"""Features above would overflow in float32 before anything could clip them."""


class WrongData(ValueError):
    """A malformed data file; the message names the place and the remedy."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """Features (N, f) in float32 and classes (N,) from 0.

    ``most_of_a_user`` is the most records of one user; None where nothing says whose they are.
    """

    inputs: Tensor
    labels: Tensor
    classes: int
    most_of_a_user: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def features(self) -> int:
        """The number of features of a record."""
        return self.inputs.shape[1]

    @cached_property
    def digest(self) -> str:
        """The digest of features and classes."""
        return digest_of_tensors(self.inputs, self.labels)

    def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, f) and classes (n,)."""
        return self.inputs[indices], self.labels[indices]


def digits(argument: str) -> Labelled:
    """Scikit-learn's digits; raises ``WrongData`` where scikit-learn is not installed."""
    options = Options.of(argument, "--data digits")
    options.require_no_value()
    part = options.choice("part", ("all", "train", "test"))
    options.require_all_read()
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise WrongData("--data digits needs scikit-learn: install affidavit[trainer].") from None
    result = load_digits()
    inputs = torch.tensor(result.data, dtype=torch.float32) / 16
    labels = torch.tensor(result.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 4
    chosen = {"all": held_out | ~held_out, "test": held_out, "train": ~held_out}[part]
    return Labelled(inputs[chosen], labels[chosen], classes=10)


def csv_file(argument: str) -> Labelled:
    """A CSV file with a header and a column of classes.

    Raises ``WrongOption`` and ``WrongData``.
    """
    options = Options.of(argument, "--data csv")
    path = options.file()
    label, classes = options.text("label"), options.integer("classes", least=2)
    user = options.text("user", "") or None
    options.require_all_read()
    if classes > MAX_CLASSES:
        raise WrongOption(f"--data csv: classes={classes}; at most {MAX_CLASSES} are supported.")
    return read_csv(path, label=label, classes=classes, user=user)


def read_csv(path: Path, *, label: str, classes: int, user: str | None = None) -> Labelled:
    """The records of a file, ``label`` and ``user`` names of columns; raises ``WrongData``."""
    rows = _rows(path)
    _, header = next(rows, (1, []))
    place = _place_of(path, header, label)
    whose = None if user is None else _place_of(path, header, user)
    inputs, labels = [], []
    records: Counter[str] = Counter()
    for line, row in rows:
        if len(row) != len(header):
            raise WrongData(
                f"{path}, line {line}: {len(row)} fields, but the header has {len(header)}."
            )
        labels.append(_label(f"{path}, line {line}, column {label}", row[place], classes))
        if whose is not None:
            records[row[whose].strip()] += 1
        inputs.append(
            [
                _number(f"{path}, line {line}, column {name}", value)
                for at, (name, value) in enumerate(zip(header, row, strict=True))
                if at not in (place, whose)
            ]
        )
    if not inputs:
        raise WrongData(f"{path} has no records below the header.")
    return Labelled(
        torch.tensor(inputs, dtype=torch.float32),
        torch.tensor(labels),
        classes=classes,
        most_of_a_user=max(records.values()) if records else None,
    )


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and fields; lines that are blank are refused like other short ones."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            try:
                for row in reader:
                    yield reader.line_num, row
            except csv.Error as error:
                raise WrongData(f"{path}, line {reader.line_num}: {error}.") from None
    except OSError as error:
        raise WrongData(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise WrongData(f"{path} is not UTF-8 ({error.reason} at byte {error.start}).") from None


def _place_of(path: Path, header: list[str], label: str) -> int:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise WrongData(f"{path}, line 1: duplicate column {twice[0]}; use unique names.")
    if label not in header:
        known = ", ".join(header) or "none"
        raise WrongData(f"{path}, line 1: no column {label}; the columns are {known}.")
    if len(header) < 2:
        raise WrongData(f"{path}, line 1: no feature columns besides {label}.")
    return header.index(label)


def _number(where: str, text: str) -> float:
    try:
        result = float(text) if "_" not in text else math.nan
    except ValueError:
        result = math.nan
    if not abs(result) <= LARGEST:
        raise WrongData(f"{where}: {text!r} is not a finite number (up to {LARGEST:g}).")
    return result


def _label(where: str, text: str, classes: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < classes):
        raise WrongData(f"{where}: {text!r} is not a class from 0 to {classes - 1}.")
    return int(text)


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
                "the plan has canaries, which only --data csv and --data digits support. Certify "
                "it without canaries."
            )
        generator = canaries.generator("records")
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
    """The files that a run leaves for its audit, by name."""
    losses = losses_as_bytes(canary_losses(model, data))
    return {CANARIES: data.canaries.as_bytes(), LOSSES: losses}
