"""``affidavit curve``: its document, tables and pictures, and its exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy.stats import norm

from affidavit.plan import digest_of

Make = Callable[..., dict[str, Any]]
Answer = Callable[..., tuple[int, dict[str, Any]]]
POISSON = {"sampling": {"scheme": "poisson", "lot_size": 20}, "steps": 50}


def test_a_gaussian_run_is_told_exactly(document: Make, save: Any, answer: Answer) -> None:
    code, result = answer("curve", save(document()), "--json")
    assert code == 0
    mu = 10**0.5 / 20
    assert result["accountant"]["name"] == "gaussian"
    assert result["mu"] == pytest.approx(mu, rel=1e-12)
    assert result["rho"] == pytest.approx(mu**2 / 2, rel=1e-12)
    assert result["renyi"]["exact"]
    for item in result["renyi"]["divergence_at_order"]:
        assert item["upper"] == pytest.approx(item["order"] * mu**2 / 2, rel=1e-12)
    assert result["advantage"]["upper"] == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-9)
    for entry in result["trade_off"]:
        exact = norm.cdf(norm.isf(entry["type_one"]) - mu)
        assert entry["type_two"]["lower"] <= exact + 1e-12
        assert entry["type_two"]["upper"] >= exact - 1e-12
        assert entry["type_two"]["upper"] - entry["type_two"]["lower"] <= 1e-3
    assert digest_of({k: v for k, v in result.items() if k != "digest"}) == result["digest"]


def test_a_sampled_run_agrees_with_its_certificate(
    document: Make, save: Any, answer: Answer
) -> None:
    plan = save(document(**POISSON))
    _, result = answer("certify", plan, "--json")
    code, outcome = answer("curve", plan, "--json")
    assert code == 0
    (at_target,) = [e for e in outcome["epsilon_at_delta"] if e["delta"] == 1e-5]
    assert at_target["epsilon"] == result["epsilon"]
    assert outcome["plan_digest"] == result["plan_digest"]
    assert outcome["mu"] is None
    assert outcome["rho"] is None
    # No Rényi divergence converts to less than the tight ε.
    assert not outcome["renyi"]["exact"]
    assert outcome["renyi"]["divergence_at_order"]
    for rate in outcome["true_positive_rate"]:
        ends, alarms = rate["true_positive_rate"], rate["false_positive_rate"]
        assert alarms - 1e-9 <= ends["upper"] <= alarms + outcome["advantage"]["upper"] + 1e-9
        assert ends["lower"] <= ends["upper"]
    for item in outcome["posterior"]:
        assert item["prior"] <= item["belief"]["upper"] <= 1
        assert max(item["prior"], 1 - item["prior"]) <= item["right_guess"]["lower"]
        assert item["belief"]["except_with_probability"] == 1e-5
    assert answer("curve", plan, "--json")[1] == outcome


def test_the_picture_has_every_panel_or_those_asked_for(
    document: Make, save: Any, run: Any, tmp_path: Path
) -> None:
    whole, one = tmp_path / "all.svg", tmp_path / "one.svg"
    plan = save(document())
    assert run("curve", plan, "--svg", str(whole)).exit_code == 0
    assert run("curve", plan, "--svg", str(one), "--kind", "attack").exit_code == 0
    panels = [
        len(list(ElementTree.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}g")))
        for path in (whole, one)
    ]
    assert panels == [10, 2]  # a panel is a group with a clipped one inside
    assert "Membership attack" in one.read_text()


def test_the_tables_are_printed(document: Make, save: Any, run: Any) -> None:
    printed = run("curve", save(document(**POISSON))).stdout
    for title in ("ε at δ", "δ at ε", "membership attack", "belief about one record"):
        assert title in printed


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target": {"epsilon": 0.1, "delta": 1e-5}}, 1),
        ({"target": {"delta": 0.5}}, 1),
        ({"sampling": {"scheme": "nonsense"}}, 2),
    ],
)
def test_exit_codes_are_those_of_a_certificate(
    document: Make, save: Any, answer: Answer, changes: dict[str, Any], code: int
) -> None:
    result = answer("curve", save(document(**changes)), "--json")
    assert result[0] == code
    assert result[1]["verdict"] in ("under_noised", "refused")
    assert ("profile" in result[1]) == (result[1]["verdict"] == "under_noised")


def test_reasons_of_a_refusal_name_the_field(document: Make, save: Any, run: Any) -> None:
    path = save(document(target={"delta": 0.5}))
    finished = run("curve", path)
    assert finished.exit_code == 1
    assert "large_delta" in finished.stderr
    assert "/target/delta" in finished.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--kind", "attack"],
        ["--svg", "/nowhere/out.svg"],
        ["--svg", "{tmp}/out.svg", "--kind", "nonsense"],
        ["--engine", "nonsense"],
    ],
)
def test_a_wrong_option_writes_nothing(
    document: Make, save: Any, run: Any, tmp_path: Path, options: list[str]
) -> None:
    requested = [option.format(tmp=tmp_path) for option in options]
    finished = run("curve", save(document()), *requested)
    assert finished.exit_code == 2
    assert "error" in finished.stderr.lower()
    assert not list(tmp_path.glob("*.svg"))
