"""Kinds of faults that arXiv:2602.17454 found in twelve libraries, each reduced to a few lines.

The reductions follow the paper's and its tests' descriptions: a sensitivity for clipped data while
raw data is added up, bounds and classes inferred from the data, the number of records used as
public, noise that is miscalibrated to zero, scales and loops that follow the data, values that are
not finite, raw data that is read without any mechanism, and selection by a raw score.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from affidavit.replay import replay_command, to_text
from affidavit.replay.driver import Launch, interpreter

LOOP = """\
import random
import affidavit

rows = affidavit.records([0.5, -2.0, 3.0, 1.0, 0.25, 2.5, -0.5, 9.0])

def noisy_sum(values, bound=1.0, noise_multiplier=2.0, noise=None):
    total = sum(values)
    std = bound * noise_multiplier
    noisy = total + random.gauss(0, std if noise is None else noise)
    return affidavit.release(total, noisy, clip_norm=bound, noise_multiplier=noise_multiplier)

def clip(value, bound=1.0):
    return max(-bound, min(bound, value))

# query
with open("result.txt", "w") as file:
    file.write(repr(result))
"""
HONEST = "result = noisy_sum([clip(row) for row in rows])"
FAULTS = {
    "raw data is added up": ("result = noisy_sum(rows)", "sensitivity_exceeded"),
    "bounds are inferred from the data": (
        "low, high = min(rows), max(rows)\n"
        "result = noisy_sum([(row - low) / (high - low) for row in rows])",
        "sensitivity_exceeded",
    ),
    "classes are inferred from the data": (
        "result = [noisy_sum([float(row == kind) for row in rows]) for kind in sorted(set(rows))]",
        "steps_differ",
    ),
    "the number of records is public": (
        HONEST + " / len(rows)",
        "file_differs",
    ),
    "the sensitivity collapses to zero": (
        "result = noisy_sum([clip(row) for row in rows], bound=float(5 - 5))",
        "sensitivity_exceeded",
    ),
    "the scale follows the data": (
        "result = noisy_sum([clip(row, max(rows)) for row in rows], bound=max(rows))",
        "parameters_differ",
    ),
    "the loop follows the data": (
        "result = [noisy_sum([clip(row) for row in rows]) for _ in range(int(max(rows)) % 5)]",
        "steps_differ",
    ),
    "raw data is read without a mechanism": (
        HONEST + " + sum(rows)",
        "file_differs",
    ),
    "the best candidate is selected by a raw score": (
        HONEST + "\nresult = max((result, -result), key=lambda item: item * rows[0])",
        "file_differs",
    ),
    "a value that is not finite passes the clipping": (
        "result = noisy_sum([row / max(1.0, abs(row)) for row in rows])",
        "not_finite_released",
    ),
}
ORDINARY = [*FAULTS][:2]


@pytest.fixture(scope="module")
def small() -> Iterator[Launch]:
    """An interpreter without PyTorch."""
    with interpreter(sys.executable, ["affidavit.library"]) as started:
        yield started


@pytest.mark.by_turns
@pytest.mark.ordinary("none", *ORDINARY)
@pytest.mark.parametrize("name", ["none", *FAULTS])
def test_a_published_kind_of_fault_is_named(tmp_path: Path, small: Launch, name: str) -> None:
    query, code = FAULTS.get(name, (HONEST, ""))
    (tmp_path / "query.py").write_text(LOOP.replace("# query", query))
    command = [sys.executable, "query.py"]
    record = replay_command(command, folder=tmp_path, records=3, launch=small)
    codes = {finding.code for finding in record.findings}
    assert code in codes or not codes, to_text(record)
    assert record.verdict == (
        "not_refuted" if name == "none" or code == "not_finite_released" else "refuted"
    ), to_text(record)
