"""Runs of the small plan, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from affidavit.plan import Plan
from tests.trainer.loop.made import Ran, ran


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """``ran``, in a fresh folder unless ``out`` says otherwise."""
    number = count()

    def make(plan: Plan | None = None, **arguments: Any) -> Ran:
        out = arguments.pop("out", None) or tmp_path / f"run{next(number)}"
        return ran(plan, out=out, **arguments)

    return make
