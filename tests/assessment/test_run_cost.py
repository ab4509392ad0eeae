"""The cost of a certified run: in full, or of the steps that were run if those add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from affidavit.accountants.privacy_filter import divergences
from affidavit.assessment import CertificateDiffers, certify, run_of
from affidavit.certificate.issuance import issue
from affidavit.plan import (
    Plan,
    events,
)
from affidavit.trust import SigningKey, read_envelope

POISSON = {"scheme": "poisson", "lot_size": 20}
SHUFFLED = {"scheme": "shuffled", "lot_size": 100}
CYCLIC = {"scheme": "cyclic", "lot_size": 100}
BINS = {"scheme": "balls_in_bins", "lot_size": 100}
BEST_OF = {
    "kind": "repeat_and_select",
    "name": "best",
    "distribution": "geometric",
    "mean": 3,
}
OPEN = [{"name": "all", "clip_norm": 1}]


def said_of(plan: Plan) -> tuple[str, dict[str, Any]]:
    """The engine that decides about ``plan``, and the predicate of its certificate."""
    created = issue(
        certify(plan, second_opinion=False),
        SigningKey.generate(),
        requester="ada",
        issued_at=datetime.now(UTC),
    )
    envelope = read_envelope(json.loads(created.bundle)["envelope"])
    stated = json.loads(envelope.payload)["predicate"]
    return stated["accountants"][0]["name"], stated


@pytest.mark.ordinary("not changes3-*")
@pytest.mark.parametrize(
    ("changes", "steps", "like"),
    [
        ({"sampling": POISSON, "steps": 100}, 40, 40),
        ({"steps": 100}, 40, 40),
        # Ten lots an epoch: one step of an epoch is a participation.
        ({"sampling": SHUFFLED, "adjacency": "zero_out", "steps": 30}, 11, 20),
        ({"sampling": BINS, "steps": 30}, 11, 30),
        ({"noise": {"kind": "bidiagonal", "lambda": 0.5}, "sampling": CYCLIC,
          "adjacency": "zero_out", "steps": 30}, 11, 30),
        ({"extra": [BEST_OF]}, 4, 10),
    ],
)  # fmt: skip
def test_steps_that_add_up_cost_what_they_are_and_all_others_everything(
    plan_of: Callable[..., Plan], changes: dict[str, Any], steps: int, like: int
) -> None:
    plan = plan_of(**changes)
    engine, stated = said_of(plan)
    run = run_of(plan, engine, predicate=stated)
    assert divergences(run.event_of(steps)) == divergences(run.event_of(like))
    assert run.cost_of(steps).within(run.cost_of(run.steps))


def test_no_step_costs_nothing_but_a_metric_is_charged(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    engine, stated = said_of(plan)
    assert run_of(plan, engine, predicate=stated).event_of(0) == events.Composed(events=())
    metric = {"kind": "gaussian", "name": "loss", "noise_multiplier": 30}
    beside = plan_of(extra=[metric])
    engine, stated = said_of(beside)
    assert max(divergences(run_of(beside, engine, predicate=stated).event_of(0))) > 0


def test_noise_that_was_solved_for_is_the_certificates(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(releases=OPEN, target={"epsilon": 2, "delta": 1e-5})
    engine, stated = said_of(plan)
    assert 1.9 < run_of(plan, engine, predicate=stated).epsilon <= 2
    stated["noise_multiplier"]["releases"][0]["required"] = "1.5"
    with pytest.raises(CertificateDiffers):
        run_of(plan, engine, predicate=stated)


def test_a_rate_or_length_that_differs_from_the_certificate_is_refused(
    plan_of: Callable[..., Plan],
) -> None:
    plan = plan_of(sampling=POISSON, steps=100)
    engine, stated = said_of(plan)
    for field, value in (("probability", "0.03"), ("steps", 101), ("lot_size", 21)):
        (entry,) = stated["sampling"]
        with pytest.raises(CertificateDiffers):
            run_of(plan, engine, predicate={**stated, "sampling": [{**entry, field: value}]})


def test_steps_beyond_the_run_are_no_part_of_it(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    engine, stated = said_of(plan)
    for steps in (-1, 11):
        with pytest.raises(ValueError, match="between 0 and 10"):
            run_of(plan, engine, predicate=stated).event_of(steps)
