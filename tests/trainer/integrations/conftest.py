"""Runs of frameworks, with the keys of a loop of one's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState

from tests.trainer.loop.small_run import entropy_of


@pytest.fixture(autouse=True)
def same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test's first run draws the keys of the loop of one's own."""
    monkeypatch.setattr("affidavit.trainer.private_loop.os", SimpleNamespace(urandom=entropy_of(1)))
    AcceleratorState._reset_state(reset_partial_state=True)  # it is one for a whole process
