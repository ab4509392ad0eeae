"""The trainer's own loop passes a replay unchanged, and faults around it are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from affidavit.evidence import ReplayRecord
from affidavit.replay import run, to_text
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.steps.sampling import LotSampler
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
    assert set(dict(record.checks).values()) == {"shown"}
    assert record.largest_move is not None
    assert 0.5 < record.largest_move <= 1.001


DRAW, SUMS = LotSampler.of, PrivateModel.sums


@pytest.mark.soak
@pytest.mark.parametrize(
    ("owner", "method", "fault", "code"),
    [
        (
            PrivateModel,
            "sums",
            lambda owner: {name: 3 * value for name, value in SUMS(owner).items()},
            "sensitivity_exceeded",
        ),
        (LotSampler, "of", lambda owner, *_: DRAW(owner, 0, bytes(32)), "lots_repeated"),
        (LotSampler, "of", lambda owner, *at: DRAW(owner, *at)[::3], "lots_other_rate"),
    ],
)
def test_a_fault_of_the_trainer_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    fault: Any,
    code: str,
) -> None:
    """One of its noise is stopped by the trainer itself."""
    monkeypatch.setattr(owner, method, fault)
    record = replayed(tmp_path, monkeypatch)
    assert record.verdict == "refuted", to_text(record)
    assert code in [item.code for item in record.findings], to_text(record)
