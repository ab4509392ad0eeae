"""Runs of the small plan, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from affidavit.plan import Plan
from tests.trainer.loop.small_run import FinishedRun, train_small


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., FinishedRun]:
    """``train_small``, in a fresh folder unless ``out`` says otherwise."""
    number = count()

    def make(plan: Plan | None = None, **arguments: Any) -> FinishedRun:
        out = arguments.pop("out", None) or tmp_path / f"run{next(number)}"
        return train_small(plan, out=out, **arguments)

    return make
