"""One trial of a search: what differs from the plan's run, and what ranks it.

A trial is a run like any other, with a record of its own. It is ranked by its mean loss on data
that is public, so that the comparison costs no more than the certificate says.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from affidavit.trainer.adapters import DataAdapter, ModelAdapter, on_device

SCORE = "score"
"""The file of a trial's folder with its mean loss on the public data."""
RECORDS = 1024
"""Records of the public data at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A trial of the search whose opening has the digest ``search`` and the time ``at``.

    ``score`` names the public data. ``learning_rate`` stands in for the plan's.
    """

    search: str
    at: str
    score: str
    learning_rate: float | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """The trial in a file of ``affidavit search``; raises ``OSError`` or ``ValueError``."""
        document = json.loads(path.read_bytes())
        try:
            return cls(**{name: document[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError):
            raise ValueError("this is no trial of a search.") from None


def mean_loss(model: ModelAdapter, data: DataAdapter) -> float:
    """The mean loss on ``data``; infinite where it is no number."""
    device = next(model.module.parameters()).device
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(data), RECORDS):
            batch = data.collate(torch.arange(first, min(first + RECORDS, len(data))))
            total += float(model.losses(on_device(batch, device)).double().sum())
    return total / len(data) if math.isfinite(total) else math.inf
