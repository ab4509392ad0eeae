"""The pytest fixture passes an honest function, and fails with the report of another."""

from __future__ import annotations

import random

import pytest

import affidavit
from affidavit.replay.pytest_plugin import Replay, affidavit_replay

__all__ = ["affidavit_replay"]
"""Imported, because only the topmost ``conftest.py`` may name plugins."""


def noisy_sum(bound: float) -> float:
    rows = affidavit.records([0.5, -2.0, 3.0, 1.0, 0.25, 2.5])
    total = sum(max(-bound, min(bound, row)) for row in rows)
    noisy = total + random.gauss(0, 2.0)
    return float(affidavit.release(total, noisy, clip_norm=1.0, noise_multiplier=2.0))


def test_an_honest_function_passes(affidavit_replay: Replay) -> None:
    assert affidavit_replay(lambda: noisy_sum(1.0), records=2).steps == 1


def test_a_function_that_clips_too_late_fails_its_test(affidavit_replay: Replay) -> None:
    with pytest.raises(pytest.fail.Exception, match="sensitivity_exceeded"):
        affidavit_replay(lambda: noisy_sum(2.0), records=6)
