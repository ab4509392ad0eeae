"""Numeric features with a class each: CSV files, handwritten digits, and their canaries.

A CSV file is UTF-8 with a header. Every column except the label is a finite number, and labels are
whole numbers from 0 to K-1. K is public and must be given: reading it off the records would
reveal their content. For the same reason, features are not scaled. An error names its line and
column.

Digits are 1,797 images of 8 x 8 with 16 levels of grey, scaled to 0 to 1 (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49).

>>> points = Labelled(torch.eye(3), torch.tensor([0, 1, 1]), classes=2)
>>> len(points), points.features, points.collate(torch.tensor([1]))[1].tolist()
(3, 3, [1])

Canaries are made-up records that take part or not, by secret coins. If a
plan has ``canaries``, the trainer appends them. Each counts as a record of the plan's data set. A
canary that takes no part has the weight 0 in every loss, so that its gradient is zero and training
is unaffected. Features are uniform from 0 to 1 and classes are uniform, so they belong to no
person, and only memorisation distinguishes them. They are a function of a nonce, to which the first
line of the run record commits. After the run, they and their losses are written; they bound ε from
below (``affidavit audit-model``).

Reference: Steinke, Nasr and Jagielski, arXiv:2305.08846.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from affidavit.evidence import Canaries, losses_as_bytes
from affidavit.trainer.adapters import Batch, Group, ModelAdapter, digest_of_tensors
from affidavit.trainer.data.ownership import choose_records, count_ownership
from affidavit.trainer.sources import Options, WrongOption

MAX_CLASSES = 100_000
MAX_FEATURE = 1e30
"""Features above would overflow in float32 before clipping."""


class WrongData(ValueError):
    """A malformed data file; the message names the place and the remedy."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """Features (N, f) in float32 and classes (N,) from 0.

    ``most_of_a_user`` is the largest number of records of a user, or None if users are unknown, and
    ``most_users_of_a_record`` the largest number of users of a record. ``left_out`` is the number
    of records that were left out so that no user has too many.
    """

    inputs: Tensor
    labels: Tensor
    classes: int
    most_of_a_user: int | None = None
    most_users_of_a_record: int = 1
    left_out: int = 0

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
        """Return features (n, f) and classes (n,)."""
        return self.inputs[indices], self.labels[indices]


def digits(argument: str) -> Labelled:
    """Return scikit-learn's digits; raises ``WrongData`` if scikit-learn is not installed."""
    options = Options.parse(argument, "--data digits")
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
    """Return the records of a CSV file with a header and a column of classes.

    Raises ``WrongOption`` and ``WrongData``.
    """
    options = Options.parse(argument, "--data csv")
    path = options.file()
    label, classes = options.text("label"), options.integer("classes", minimum=2)
    user = options.text("user", "") or None
    separator = options.text("separator", "") if user else ""
    most = options.integer("most", minimum=1) if user and "most" in options.named else None
    options.require_all_read()
    if classes > MAX_CLASSES:
        raise WrongOption(f"--data csv: classes={classes}; at most {MAX_CLASSES} are supported.")
    return read_csv(path, label=label, classes=classes, user=user, separator=separator, most=most)


def read_csv(
    path: Path,
    *,
    label: str,
    classes: int,
    user: str | None = None,
    separator: str = "",
    most: int | None = None,
) -> Labelled:
    """Return the records of a file; ``label`` and ``user`` are columns.

    A cell of ``user`` has several users if it contains ``separator``. With ``most``, records are
    left out so that no user has more of them. Raises ``WrongData``.
    """
    rows = _read_rows(path)
    _, header = next(rows, (1, []))
    place = _find_column(path, header, label)
    whose = None if user is None else _find_column(path, header, user)
    inputs, labels = [], []
    users: list[list[str]] = []
    for line, row in rows:
        if len(row) != len(header):
            raise WrongData(
                f"{path}, line {line}: {len(row)} fields, but the header has {len(header)}."
            )
        labels.append(_parse_label(f"{path}, line {line}, column {label}", row[place], classes))
        if whose is not None:
            names = row[whose].split(separator) if separator else [row[whose]]
            users.append([name.strip() for name in names if name.strip()] or [""])
        inputs.append(
            [
                _parse_number(f"{path}, line {line}, column {name}", value)
                for at, (name, value) in enumerate(zip(header, row, strict=True))
                if at not in (place, whose)
            ]
        )
    if not inputs:
        raise WrongData(f"{path} has no records below the header.")
    chosen = range(len(inputs)) if most is None else choose_records(users, most)
    ownership = count_ownership([users[record] for record in chosen]) if users else None
    return Labelled(
        torch.tensor([inputs[record] for record in chosen], dtype=torch.float32),
        torch.tensor([labels[record] for record in chosen]),
        classes=classes,
        most_of_a_user=None if ownership is None else ownership.contributions_per_user,
        most_users_of_a_record=1 if ownership is None else ownership.users_per_record,
        left_out=len(inputs) - len(chosen),
    )


def _read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line numbers and fields; blank lines are refused like other short ones."""
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


def _find_column(path: Path, header: list[str], label: str) -> int:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise WrongData(f"{path}, line 1: duplicate column {twice[0]}; use unique names.")
    if label not in header:
        known = ", ".join(header) or "none"
        raise WrongData(f"{path}, line 1: no column {label}; the columns are {known}.")
    if len(header) < 2:
        raise WrongData(f"{path}, line 1: no feature columns besides {label}.")
    return header.index(label)


def _parse_number(where: str, text: str) -> float:
    try:
        result = float(text) if "_" not in text else math.nan
    except ValueError:
        result = math.nan
    if not abs(result) <= MAX_FEATURE:
        raise WrongData(f"{where}: {text!r} is not a finite number (up to {MAX_FEATURE:g}).")
    return result


def _parse_label(where: str, text: str, classes: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < classes):
        raise WrongData(f"{where}: {text!r} is not a class from 0 to {classes - 1}.")
    return int(text)


CANARIES, LOSSES = "canaries.json", "canary-losses.json"
"""Files in a run's folder: its canaries, and their losses after the run."""


@dataclass(frozen=True, eq=False)
class AuditedData:
    """Records (N, f) with classes, followed by canaries; ``weights`` (N,) are 0 or 1."""

    records: Labelled
    weights: Tensor
    canaries: Canaries

    @classmethod
    def build(cls, data: object, canaries: Canaries) -> AuditedData:
        """Append ``canaries`` to ``data``.

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
        """Return features (n, f), classes (n,), and weights (n,)."""
        return self.records.collate(indices), self.weights[indices]


class AuditedModel:
    """A model whose losses are weighted, so that a record of weight 0 takes no part."""

    def __init__(self, model: ModelAdapter) -> None:
        self.model = model
        self.module: nn.Module = model.module

    def losses(self, batch: Batch) -> Tensor:
        """Return the model's losses times their weights; (n,)."""
        records, weights = batch
        return self.model.losses(records) * weights

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """Return the model's own blocks."""
        return self.model.blocks()

    def made_up(self, records: int) -> Batch:
        """Return the model's own made-up records, each of weight 1."""
        return self.model.made_up(records), torch.ones(records)


def canary_losses(model: AuditedModel, data: AuditedData) -> list[float]:
    """Return the loss of each canary under the current model, whether or not it took part."""
    first = len(data) - data.canaries.count
    batch, _ = data.collate(torch.arange(first, len(data)))
    parameter = next(model.module.parameters())
    with torch.no_grad():
        moved = tuple(item.to(parameter.device) for item in batch)
        return [float(loss) for loss in model.model.losses(moved).cpu()]


def audit_files(data: AuditedData, model: AuditedModel) -> dict[str, bytes]:
    """Return the files that a run leaves for its audit, by name."""
    losses = losses_as_bytes(canary_losses(model, data))
    return {CANARIES: data.canaries.as_bytes(), LOSSES: losses}
