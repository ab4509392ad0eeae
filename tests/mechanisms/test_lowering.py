"""A plan is lowered to the events of its whole run, or refused with every reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from affidavit.mechanisms.lowering import lower
from affidavit.mechanisms.obligations import ALWAYS, obligations_of
from affidavit.mechanisms.resolve import scaled_noise, with_noise, with_steps
from affidavit.plan import (
    Plan,
    Reason,
    RefusedPlan,
    events,
)

Make = Callable[..., Plan]
PHASE = {
    "sampling": {"scheme": "full_batch"},
    "steps": 3,
    "releases": [{"name": "a", "clip_norm": 1, "noise_multiplier": 5}],
}
SHARED = {"size": 1000, "unit": "user", "contributions_per_user": 3, "users_per_record": 2}
OPEN = [{"name": "a", "clip_norm": 1}]


def refusals(plan: Plan) -> list[Reason]:
    """Every reason for which ``plan`` is refused."""
    with pytest.raises(RefusedPlan) as caught:
        lower(plan)
    return list(caught.value.reasons)


def several(*phases: dict[str, Any]) -> dict[str, Any]:
    """Changes that make the plan one of several phases."""
    return {"sampling": ..., "steps": ..., "releases": ..., "phases": list(phases)}


def test_a_run_is_its_phases_and_its_extra_events_in_sequence(plan_of: Make) -> None:
    extra = [{"kind": "gaussian", "name": "metric", "noise_multiplier": 30, "count": 2}]
    plan = plan_of(**several(PHASE, {**PHASE, "steps": 4}), extra=extra)
    leaf = events.Gaussian(noise_multiplier=5.0)
    assert lower(plan).event() == events.Composed(
        events=(
            events.Repeated(event=leaf, count=3),
            events.Repeated(event=leaf, count=4),
            events.Repeated(event=events.Gaussian(noise_multiplier=30.0), count=2),
        )
    )


def test_extra_events_of_a_user_count_all_its_records(plan_of: Make) -> None:
    extra = [{"kind": "gaussian", "name": "metric", "noise_multiplier": 30}]
    users = {"size": 1000, "unit": "user", "contributions_per_user": 3}
    (_, event) = lower(plan_of(extra=extra, dataset=users)).event().events
    assert event == events.Repeated(event=events.Gaussian(noise_multiplier=10.0), count=1)


def test_scale_multiplies_given_noise_and_stands_in_for_open_noise(plan_of: Make) -> None:
    provided = lower(plan_of(releases=PHASE["releases"]))
    assert provided.event(scale=2.0).events[0].event.noise_multiplier == 10.0  # type: ignore[union-attr]
    both = lower(plan_of(**several(PHASE, {**PHASE, "releases": OPEN})))
    sigmas = [e.event.noise_multiplier for e in both.event(scale=2.0).events]  # type: ignore[union-attr]
    assert sigmas == [5.0, 2.0]


def test_open_steps_are_filled_in_or_asked_for(plan_of: Make) -> None:
    plan = plan_of(steps=None)
    assert lower(plan).event(steps=7) == lower(plan_of(steps=7)).event()
    assert with_steps(plan, 7) == plan_of(steps=7)
    with pytest.raises(ValueError, match="steps"):
        lower(plan).event()


def test_closing_a_plan_leaves_what_was_given(plan_of: Make) -> None:
    plan = plan_of()
    assert with_steps(plan, 99) == plan
    assert with_noise(plan, 99.0) == plan
    by_epochs = plan_of(steps=..., epochs=2)
    assert with_steps(by_epochs, 99) == by_epochs


def test_scaled_noise_is_rounded_up(plan_of: Make) -> None:
    (sigma,) = scaled_noise(plan_of().phases[0], 1 / 3)
    assert sigma == 6.666667


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"noise": {"kind": "matrix", "rows": [[1]]}}, "steps_mismatch", "/noise"),
        ({"participation": {"schema": "single"}}, "participation_mismatch", "/participation"),
        ({"clipping": "randomised"}, "randomised_clipping", "/clipping"),
        ({"clipping": "randomized"}, "randomised_clipping", "/clipping"),
        ({"dataset": SHARED}, "shared_records", "/adjacency"),
    ],
)
def test_what_does_not_fit_the_run_or_its_theorem_is_refused(
    plan_of: Make, changes: dict[str, Any], code: str, pointer: str
) -> None:
    (reason,) = refusals(plan_of(**changes))
    assert (reason.code, reason.pointer) == (code, pointer)
    assert reason.remedy


def test_every_reason_comes_at_once(plan_of: Make) -> None:
    plan = plan_of(
        optimizer={"name": "dp_dice"},
        noise={"kind": "tree"},
        sampling={"scheme": "shuffled", "lot_size": 10},
        extra=[{"kind": "adaptive_clipping_quantile", "name": "s", "noise_std": 10}],
    )
    assert [reason.pointer for reason in refusals(plan)] == [
        "/noise/kind",
        "/optimizer/name",
        "/extra/0/kind",
        "/sampling/scheme",
    ]


def test_a_trainer_is_told_its_sampler_and_all_it_must_always_keep(plan_of: Make) -> None:
    result = obligations_of(lower(plan_of(**several(PHASE, PHASE))))
    assert [entry.code for entry in result].count("sampler_of_the_plan") == 1
    assert result[1:] == ALWAYS
    codes = [alway.code for alway in ALWAYS]
    assert len(set(codes)) == len(codes)
    for item in result:
        assert item.as_dict().keys() == {"code", "text", "checked_by"}
