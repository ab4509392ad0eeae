"""One interpreter for all replays of a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from affidavit.evidence import ReplayRecord
from affidavit.replay import replay_command
from affidavit.replay.driver import PACKAGES, Launch, interpreter

Replay = Callable[..., ReplayRecord]


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """An interpreter that has imported Opacus once."""
    with interpreter(sys.executable, [*PACKAGES["torch"], *PACKAGES["opacus"]]) as started:
        yield started


@pytest.fixture
def replay(tmp_path: Path, launch: Launch) -> Replay:
    """Write a loop to ``train.py``, and replay it with records that change, two by default."""

    def replay(loop: str, records: int = 2) -> ReplayRecord:
        (tmp_path / "train.py").write_text(loop)
        return replay_command(
            [sys.executable, "train.py"], folder=tmp_path, records=records, launch=launch
        )

    return replay
