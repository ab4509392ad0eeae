"""What ``certify`` solves for certifies at the target, and the next worse does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

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
    "flat": {"clipping": "flat", "releases": [{**each, "clip_norm": 1} for each in OPEN]},
    "with an event": {
        "extra": [{"kind": "gaussian", "name": "m", "noise_multiplier": 10, "count": 3}]
    },
    "poisson": {"sampling": {"scheme": "poisson", "lot_size": 20}, "steps": 200},
}


def with_noise(plan: dict[str, Any], result: dict[str, Any], factor: float) -> dict[str, Any]:
    """The plan with the noise that ``result`` requires, times ``factor``."""
    found = copy.deepcopy(plan)
    for release, noise in zip(
        found["releases"], result["noise_multiplier"]["releases"], strict=True
    ):
        assert release["name"] == noise["name"]
        assert noise["given"] is None
        release["noise_multiplier"] = noise["required"] * factor
    return found


@pytest.mark.parametrize("name", PLANS)
def test_the_noise_that_is_found_certifies_and_a_thousandth_less_does_not(
    document: Make, save: Any, answer: Answer, name: str
) -> None:
    plan = document(**{"releases": OPEN, "target": {"epsilon": 2, "delta": 1e-5}, **PLANS[name]})
    code, found = answer("certify", save(plan), "--json")
    assert (code, found["verdict"]) == (0, "certified")
    assert found["epsilon"]["upper"] <= 2
    code, given = answer("certify", save(with_noise(plan, found, 1)), "--json")
    assert (code, given["epsilon"]) == (0, found["epsilon"])
    code, less = answer("certify", save(with_noise(plan, found, 1 - 1e-3)), "--json")
    assert (code, less["verdict"]) == (1, "under_noised")


def test_the_optimal_allocation_says_what_it_saves(
    document: Make, save: Any, answer: Answer, run: Any
) -> None:
    path = save(document(releases=OPEN, allocation="optimal"))
    _, result = answer("certify", path, "--json")
    said = result["allocation"]
    assert said["saving"] == pytest.approx(1 - said["noise_energy"] / said["uniform_noise_energy"])
    assert said["saving"] > 0.1
    assert "less noise energy than uniform" in run("certify", path).stdout


@pytest.mark.parametrize(
    ("changes", "lots"),
    [({}, 1), ({"adjacency": "zero_out", "sampling": {"scheme": "shuffled", "lot_size": 100}}, 10)],
)
def test_the_most_steps_that_fit_are_found(
    document: Make, save: Any, answer: Answer, changes: dict[str, Any], lots: int
) -> None:
    target = {"epsilon": 2, "delta": 1e-5}
    code, found = answer("certify", save(document(steps=None, target=target, **changes)), "--json")
    assert code == 0
    steps = found["sampling"]["steps"]
    assert steps % lots == 0
    verdicts = [
        answer("certify", save(document(steps=each, target=target, **changes)), "--json")[0]
        for each in (steps, steps + 1)
    ]
    assert verdicts == [0, 1]


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
