"""A pytest fixture that fails a test whose training a replay does not pass.

Name this module in ``pytest_plugins`` of the topmost ``conftest.py``; installing the package alone
changes no run of pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from affidavit.evidence import ReplayRecord
    from affidavit.plan import Plan


class Replay(Protocol):
    """What the fixture returns: ``affidavit.replay.run``, whose options it takes."""

    def __call__(
        self,
        function: Callable[[], object],
        *,
        folder: str | Path | None = ...,
        steps: int = ...,
        records: int = ...,
        plan: Plan | None = ...,
    ) -> ReplayRecord:
        """Replay ``function``, and fail with the report unless nothing refutes it."""


@pytest.fixture
def affidavit_replay() -> Replay:
    """Replay a function that trains; the test fails with the report unless it passes."""
    from affidavit import replay

    def passed(function: Callable[[], object], **options: object) -> ReplayRecord:
        record = replay.run(function, **options)  # type: ignore[arg-type]
        if record.verdict != "not_refuted":
            pytest.fail(replay.to_text(record), pytrace=False)
        return record

    return passed
