"""What ``certify`` solves for certifies at the target, and the next worse does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.plan import plan_from

Make = Callable[..., dict[str, Any]]
Answer = Callable[..., tuple[int, dict[str, Any]]]

OPEN = [
    {"name": "hidden", "count": 48, "clip_norm": 0.1, "dimension": 10**6, "weight": 1},
    {"name": "auxiliary", "clip_norm": 0.3, "dimension": 10**8, "weight": 3},
]
PLANS: dict[str, dict[str, Any]] = {
    "full batch": {},
    "full batch, replace_one": {"adjacency": "replace_one"},
    "shuffled": {"adjacency": "zero_out", "sampling": {"scheme": "shuffled", "lot_size": 100}},
    "cyclic": {"adjacency": "replace_one", "sampling": {"scheme": "cyclic", "lot_size": 30}},
    "proportional": {"allocation": "proportional"},
    "optimal": {"allocation": "optimal"},
    "flat": {"clipping": "flat", "releases": [{**entry, "clip_norm": 1} for entry in OPEN]},
    "with an event": {
        "extra": [{"kind": "gaussian", "name": "m", "noise_multiplier": 10, "count": 3}]
    },
    "poisson": {"sampling": {"scheme": "poisson", "lot_size": 20}, "steps": 200},
}


def with_noise(plan: dict[str, Any], result: dict[str, Any], factor: float) -> dict[str, Any]:
    """The plan with the noise that ``result`` requires, times ``factor``."""
    outcome = copy.deepcopy(plan)
    for release, noise in zip(
        outcome["releases"], result["noise_multiplier"]["releases"], strict=True
    ):
        assert release["name"] == noise["name"]
        assert noise["given"] is None
        release["noise_multiplier"] = noise["required"] * factor
    return outcome


@pytest.mark.parametrize("name", PLANS)
def test_the_noise_that_is_found_certifies_and_a_thousandth_less_does_not(
    document: Make, save: Any, answer: Answer, name: str
) -> None:
    plan = document(**{"releases": OPEN, "target": {"epsilon": 2, "delta": 1e-5}, **PLANS[name]})
    code, result = answer("certify", save(plan), "--json")
    assert (code, result["verdict"]) == (0, "certified")
    assert result["epsilon"]["upper"] <= 2
    code, provided = answer("certify", save(with_noise(plan, result, 1)), "--json")
    assert (code, provided["epsilon"]) == (0, result["epsilon"])
    code, less = answer("certify", save(with_noise(plan, result, 1 - 1e-3)), "--json")
    # What shuffled lots cost at least is less than what they are certified for.
    shuffled = plan["sampling"]["scheme"] == "shuffled"
    assert (code, less["verdict"]) == (1, "unproved" if shuffled else "under_noised")


def test_the_optimal_allocation_says_what_it_saves(
    document: Make, save: Any, answer: Answer, run: Any
) -> None:
    path = save(document(releases=OPEN, allocation="optimal"))
    _, result = answer("certify", path, "--json")
    stated = result["allocation"]
    assert stated["saving"] == pytest.approx(
        1 - stated["noise_energy"] / stated["uniform_noise_energy"]
    )
    assert stated["saving"] > 0.1
    assert "less noise energy than uniform" in run("certify", path).stdout


@pytest.mark.ordinary("changes0")
@pytest.mark.parametrize(
    "changes",
    [{}, {"adjacency": "zero_out", "sampling": {"scheme": "shuffled", "lot_size": 100}}],
)
def test_the_most_steps_that_fit_are_found(
    document: Make, save: Any, answer: Answer, changes: dict[str, Any]
) -> None:
    target = {"epsilon": 2, "delta": 1e-5}
    code, result = answer("certify", save(document(steps=None, target=target, **changes)), "--json")
    assert code == 0
    steps = result["sampling"]["steps"]
    verdicts = [
        answer("certify", save(document(steps=item, target=target, **changes)), "--json")[0]
        for item in (steps, steps + 1)
    ]
    assert verdicts == [0, 1]


SAMPLED = {"steps": 200, "target": {"epsilon": 0.5, "delta": 1e-5}}


@pytest.mark.ordinary("changes0")
@pytest.mark.parametrize(
    "changes", [{}, {"sampling": {"scheme": "fixed_size"}, "adjacency": "replace_one"}]
)
def test_the_largest_lot_that_fits_is_found(
    document: Make, save: Any, answer: Answer, changes: dict[str, Any]
) -> None:
    sampling = changes.get("sampling", {"scheme": "poisson"})
    noise = [{"name": "all", "clip_norm": 1, "noise_multiplier": 8}]

    def lots(size: int | None) -> dict[str, Any]:
        changed = {**changes, "sampling": {**sampling, "lot_size": size}}
        return document(**{**SAMPLED, "releases": noise, **changed})

    code, result = answer("certify", save(lots(None)), "--json")
    assert code == 0
    lot = result["sampling"]["lot_size"]
    assert 1 < lot < 999
    assert result["sampling"]["probability"] == lot / 1000
    assert result["epsilon"]["upper"] <= 0.5
    results = [answer("certify", save(lots(item)), "--json") for item in (lot, lot + 1)]
    assert [code for code, _ in results] == [0, 1]
    assert results[0][1]["plan_digest"] != result["plan_digest"]


RECORDS = 60


@pytest.mark.soak
@pytest.mark.parametrize(
    ("epochs", "sigma", "epsilon"),
    [pytest.param(4, 3, 2, marks=pytest.mark.soak), (2.5, 1.5, 3), (20, 9, 1)],
)
def test_the_largest_lot_of_so_many_epochs_is_found(
    document: Make, save: Any, answer: Answer, epochs: float, sigma: float, epsilon: float
) -> None:
    def lots(size: int | None) -> dict[str, Any]:
        return document(
            dataset={"size": RECORDS},
            sampling={"scheme": "poisson", "lot_size": size},
            steps=...,
            epochs=epochs,
            releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}],
            target={"epsilon": epsilon, "delta": 1e-5},
        )

    code, result = answer("certify", save(lots(None)), "--json")
    assert code == 0
    # From the largest downwards: what the smaller ones get does not change which it is.
    largest = next(
        size
        for size in range(RECORDS, 0, -1)
        if certify(plan_from(lots(size)), second_opinion=False).verdict == "certified"
    )
    assert 1 < largest < RECORDS
    assert result["sampling"]["lot_size"] == largest
    assert result["sampling"]["steps"] == -(-epochs * RECORDS // largest)


def test_the_whole_data_set_is_the_largest_lot_where_it_fits(
    document: Make, save: Any, answer: Answer
) -> None:
    sampling = {"scheme": "poisson", "lot_size": None}
    code, result = answer("certify", save(document(sampling=sampling)), "--json")
    assert (code, result["sampling"]["lot_size"]) == (0, 1000)
    sampling = {"scheme": "poisson", "probability": None}
    code, result = answer("certify", save(document(sampling=sampling)), "--json")
    assert (code, result["sampling"]["probability"]) == (0, 1)


def test_the_largest_rate_that_fits_is_found(document: Make, save: Any, answer: Answer) -> None:
    noise = [{"name": "all", "clip_norm": 1, "noise_multiplier": 8}]

    def rate(q: float | None) -> dict[str, Any]:
        sampling = {"scheme": "poisson", "probability": q}
        return document(**{**SAMPLED, "releases": noise, "sampling": sampling})

    code, result = answer("certify", save(rate(None)), "--json")
    assert code == 0
    q = result["sampling"]["probability"]
    codes = [answer("certify", save(rate(item)), "--json")[0] for item in (q, q * (1 + 1e-4))]
    assert codes == [0, 1]


def test_no_lot_is_small_enough(document: Make, save: Any, answer: Answer) -> None:
    plan = document(
        sampling={"scheme": "poisson", "lot_size": None},
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 0.3}],
        steps=10_000,
        target={"epsilon": 0.1, "delta": 1e-6},
    )
    code, result = answer("certify", save(plan), "--json")
    assert (code, result["verdict"]) == (1, "refused")
    (reason,) = result["reasons"]
    assert (reason["code"], reason["pointer"]) == ("no_solution", "/target")
    assert "lot" in reason["message"]
    assert reason["remedy"]
    assert result["sampling"]["probability"] is None


@pytest.mark.parametrize(("sigma", "epsilon"), [(400, 0.01), (None, 0.01), (None, 1e-4)])
def test_small_targets_are_solved_too(
    document: Make, save: Any, answer: Answer, sigma: float | None, epsilon: float
) -> None:
    release = {"name": "all", "clip_norm": 1}
    sampling: dict[str, Any] = {"scheme": "poisson", "lot_size": 10}
    if sigma is not None:
        release["noise_multiplier"] = sigma
        sampling["lot_size"] = None
    plan = document(
        releases=[release], sampling=sampling, target={"epsilon": epsilon, "delta": 1e-5}
    )
    code, result = answer("certify", save(plan), "--json")
    assert code == 0
    assert epsilon * (1 - 0.02) - 2e-6 <= result["epsilon"]["upper"] <= epsilon


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": None, "releases": [{"name": "a", "clip_norm": 1, "noise_multiplier": 1e-3}]},
        {
            "releases": OPEN,
            "extra": [{"kind": "gaussian", "name": "m", "noise_multiplier": 1e-3}],
        },
    ],
)
def test_a_target_that_nothing_meets_is_refused_at_the_target(
    document: Make, save: Any, answer: Answer, changes: dict[str, Any]
) -> None:
    code, result = answer("certify", save(document(**changes)), "--json")
    assert (code, result["verdict"]) == (1, "refused")
    assert result["reasons"][0]["pointer"] == "/target"


def test_under_noised_says_the_noise_that_would_do(
    document: Make, save: Any, answer: Answer
) -> None:
    plan = document(target={"epsilon": 0.2, "delta": 1e-5})
    code, result = answer("certify", save(plan), "--json")
    assert code == 1
    (release,) = result["noise_multiplier"]["releases"]
    assert f"{release['required']:.7g}" in result["reasons"][0]["remedy"]
    plan["releases"][0] = {**plan["releases"][0], "noise_multiplier": release["required"]}
    assert answer("certify", save(plan), "--json")[0] == 0
