"""The trainer's own loop passes a replay unchanged, and faults around it are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from affidavit.evidence import ReplayRecord
from affidavit.replay import run, to_text
from affidavit.trainer.clipping.private_model import PrivateModel
from tests.support.trust import trusting
from tests.trainer.loop.small_run import KEY
from tests.trainer.loop.test_examples import loaded, short


def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReplayRecord:
    """A replay of the example of a loop of one's own."""
    example = loaded("plain_loop")
    path, _, content = short(example.PLAN, tmp_path)
    monkeypatch.setattr(example, "PLAN", path)
    monkeypatch.setattr(
        "affidavit.trainer.private_loop.trusted_or_own", lambda _: trusting(KEY.public)
    )
    (tmp_path / "bundle.json").write_bytes(content)
    return run(lambda: example.main(tmp_path / "bundle.json", Path("run")), records=1)


@pytest.mark.soak
def test_the_example_passes_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = replayed(tmp_path, monkeypatch)
    assert record.verdict == "not_refuted", to_text(record)
    assert record.steps == 3
    assert record.largest_move is not None
    assert 0.5 < record.largest_move <= 1.001


@pytest.mark.soak
def test_sums_that_are_not_clipped_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = PrivateModel.sums

    def scaled(owner: PrivateModel) -> dict[str, Any]:
        return {name: 3 * value for name, value in sums(owner).items()}

    monkeypatch.setattr(PrivateModel, "sums", scaled)
    record = replayed(tmp_path, monkeypatch)
    moved = [item.message for item in record.findings if item.code == "sensitivity_exceeded"]
    assert record.verdict == "refuted", to_text(record)
    assert "moves by 3 clip norms" in str(moved[0]), to_text(record)
