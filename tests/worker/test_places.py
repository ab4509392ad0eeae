"""A place has one name, which all workers of it find, whatever befell the first one."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from affidavit.worker.checkpoint_transfer import place_of
from tests.disk import PowerCut, disk


def test_workers_that_start_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        result = list(threads.map(lambda _: place_of(tmp_path / "runs"), range(32)))
    assert len(set(result)) == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".place"]


def test_a_name_that_was_told_outlives_a_power_cut_and_one_that_was_not_hinders_nobody(
    tmp_path: Path,
) -> None:
    for seed in range(40):
        drawn, runs, after = random.Random(seed), tmp_path / f"{seed}", tmp_path / f"{seed} after"
        runs.mkdir()
        told = None
        with disk(runs, drawn.randint(1, 5), drawn) as failing:
            try:
                told = place_of(runs)
                place_of(runs)  # each worker that starts tries to name it
                failing.cut()
            except PowerCut:
                pass
        failing.put(after)
        assert place_of(after) == (told or place_of(after))


def test_invalid_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".place").write_bytes(b"")
    with pytest.raises(OSError, match=r"\.place does not hold a place id"):
        place_of(tmp_path)
