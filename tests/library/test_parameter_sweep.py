"""A sweep is every combination, each as it is certified alone, as rows, frames and lines."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import pytest

import affidavit

mpl.use("agg")
GRID: dict[str, Any] = {"noise_multiplier": [1.0, 2.0], "steps": [10, 100, 1000]}


@pytest.fixture(scope="module")
def swept() -> affidavit.Sweep:
    return affidavit.sweep(_plan(), GRID)


def _plan() -> affidavit.Plan:
    return affidavit.Plan.dp_sgd(
        adjacency="add_remove",
        sampling="poisson",
        probability=0.01,
        steps=1,
        noise_multiplier=1.0,
        delta=1e-5,
    )


def test_each_row_is_what_its_plan_gets_alone(swept: affidavit.Sweep) -> None:
    rows = swept.rows()
    assert len(swept) == len(rows) == 6
    for row in rows:
        alone = affidavit.certify(
            _plan(),
            second_opinion=False,
            noise_multiplier=row["noise_multiplier"],
            steps=row["steps"],
        )
        assert alone.epsilon == row["epsilon"]
        assert row["epsilon_lower"] <= row["epsilon"]
    assert [row["steps"] for row in rows] == [10, 100, 1000] * 2


def test_a_target_is_swept_beside_what_is_proved() -> None:
    result = affidavit.sweep(_plan(), {"noise_multiplier": [None], "epsilon": [1.0, 2.0]}).rows()
    assert [row["target_epsilon"] for row in result] == [1.0, 2.0]
    assert all(row["epsilon"] <= row["target_epsilon"] for row in result)
    assert result[0]["noise_multiplier"] > result[1]["noise_multiplier"]


@pytest.mark.soak
def test_lines_of_a_plot(swept: affidavit.Sweep) -> None:
    ax = swept.plot()
    assert ax.get_xlabel() == "steps"
    for line, noise in zip(ax.get_lines(), GRID["noise_multiplier"], strict=True):
        expected = [row for row in swept if row["noise_multiplier"] == noise]
        assert list(line.get_ydata()) == [row["epsilon"] for row in expected]
    with pytest.raises(ValueError, match="unknown column"):
        swept.plot("nothing")


@pytest.mark.parametrize("kind", ["profile", "trade-off", "attack", "renyi", "belief"])
def test_every_curve_is_drawn(kind: str, request: pytest.FixtureRequest) -> None:
    curve = request.getfixturevalue("curve")
    ax = curve.plot(kind=kind, label="this plan")
    assert ax.get_lines()
    with pytest.raises(ValueError, match="kind"):
        curve.plot(kind="another")


@pytest.fixture(scope="module")
def curve() -> affidavit.Curve:
    return affidavit.curve(_plan(), noise_multiplier=2.0)


@pytest.mark.parametrize("grid", [{}, {"steps": []}, {"steps": range(10**6)}])
def test_a_grid_of_no_plan_or_too_many_is_told(grid: Any) -> None:
    with pytest.raises(ValueError, match="plans"):
        affidavit.sweep(_plan(), grid)
