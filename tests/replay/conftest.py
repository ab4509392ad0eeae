"""One interpreter for all replays of a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from affidavit.evidence import ReplayRecord
from affidavit.replay import replay_command
from affidavit.replay.driver import PACKAGES, Launch, interpreter

Replay = Callable[[str], ReplayRecord]


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """An interpreter that has imported Opacus once."""
    with interpreter(sys.executable, [*PACKAGES["torch"], *PACKAGES["opacus"]]) as started:
        yield started


@pytest.fixture
def replay(tmp_path: Path, launch: Launch) -> Replay:
    """Write a loop to ``train.py``, and replay it with two records that change."""

    def replay(loop: str) -> ReplayRecord:
        (tmp_path / "train.py").write_text(loop)
        return replay_command(
            [sys.executable, "train.py"], folder=tmp_path, records=2, launch=launch
        )

    return replay
