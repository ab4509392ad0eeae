"""A plan's unknown is solved for to the last record."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from affidavit.assessment import certify
from affidavit.plan import Plan


@pytest.mark.ordinary("not 30-1.5-*")
@pytest.mark.parametrize(
    ("size", "epochs", "sigma", "epsilon", "lot", "steps"),
    [
        # The last lot of a longer run, of 17, 33 and 21 records, is smaller than these.
        (30, 1.5, 2.0, 2.5, 23, 2),
        (60, 1, 2.0, 2.0, 60, 1),
        (30, 1.75, 3.0, 1.75, 27, 2),
        (30, 3, 20.0, 1.0, 30, 3),
    ],
)
def test_of_so_many_epochs_the_largest_lot_may_be_that_of_a_shorter_run(
    plan_of: Callable[..., Plan],
    size: int,
    epochs: float,
    sigma: float,
    epsilon: float,
    lot: int,
    steps: int,
) -> None:
    def lots(lot_size: int | None) -> Plan:
        return plan_of(
            dataset={"size": size},
            sampling={"scheme": "poisson", "lot_size": lot_size},
            steps=...,
            epochs=epochs,
            releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}],
            target={"epsilon": epsilon, "delta": 1e-5},
        )

    def fits(lot_size: int) -> bool:
        return certify(lots(lot_size), second_opinion=False).verdict == "certified"

    (result,) = certify(lots(None), second_opinion=False).sampling
    assert (result["lot_size"], result["steps"]) == (lot, steps)
    assert fits(lot)
    assert not any(fits(larger) for larger in range(lot + 1, size + 1))
