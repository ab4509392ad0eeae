"""Whenever power is cut: charges stay, no key is used twice, and what ended has its weights."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from affidavit.evidence import check_conformance
from tests.support.power_loss import PowerCut, disk
from tests.support.random_seeds import seeded
from tests.trainer.loop.small_run import STEPS, bundle_of, plan_with, train_small
from tests.trainer.loop.test_crash import has_begun, has_ended, read_complete_entries
from tests.trainer.loop.test_loop import predicate_of

PLAN = plan_with()
BUNDLE = bundle_of(PLAN)


def resume(out: Path) -> None:
    train_small(PLAN, out=out, bundle=BUNDLE, resume=has_begun(out), checkpoint_every=4)


def charges(out: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_complete_entries(out) if entry["type"] == "charge"]


def require_whole(out: Path, charged: list[dict[str, Any]]) -> None:
    """It ended well, and what was charged before still is."""
    result = charges(out)
    assert result[: len(charged)] == charged
    assert [entry["step"] for entry in result] == list(range(STEPS))
    assert len({entry["key_commitment"] for entry in result}) == STEPS
    judged = check_conformance((out / "record.jsonl").read_bytes(), predicate_of(BUNDLE))
    assert judged.findings == ()
    weights = torch.load(io.BytesIO((out / "weights.pt").read_bytes()), weights_only=True)
    assert weights.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.soak)])
def test_what_was_not_synchronised_is_lost_and_nothing_else(tmp_path: Path, every: int) -> None:
    with disk(tmp_path / "whole") as counted:
        resume(tmp_path / "whole")
        counted.cut()
    counted.put(tmp_path / "ended")
    require_whole(tmp_path / "ended", charges(tmp_path / "whole"))
    assert counted.events > 2 * STEPS
    for cut in range(1, counted.events + 1, every):
        before, after = tmp_path / f"before{cut}", tmp_path / f"after{cut}"
        with disk(before, cut) as failing, pytest.raises(PowerCut):
            resume(before)
        failing.put(after)
        charged = charges(after)
        # Every charge but one whose line was being synchronised is there.
        assert len(charges(before)) - len(charged) <= 1
        if not has_ended(after):
            resume(after)
        require_whole(after, charged)


@pytest.mark.soak
def test_power_that_is_cut_again_and_again_takes_no_charge_away(tmp_path: Path) -> None:
    drawn = random.Random(seeded(5))
    charged: list[dict[str, Any]] = []
    out, cuts = tmp_path / "0", 0
    while not has_ended(out):
        try:
            with disk(out, drawn.randint(1, 12), drawn) as failing:
                resume(out)
        except PowerCut:
            cuts += 1
            out = tmp_path / str(cuts)
            failing.put(out)
        # A charge that came back from the disk was on it.
        assert charges(out)[: len(charged)] == charged
        charged = charges(out)
    assert cuts > 2
    require_whole(out, charged)
