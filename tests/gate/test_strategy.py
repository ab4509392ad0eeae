"""``strategy`` and ``advise``: what is printed, what is written, and the exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import Result

from affidavit.gate import compare as compare_commands

Document = Callable[..., dict[str, Any]]
Answer = Callable[..., tuple[int, dict[str, Any]]]
Run = Callable[..., Result]
Save = Callable[..., str]

CORRELATED: dict[str, Any] = {
    "dataset": {"name": "toy", "size": 400},
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 20},
    "steps": 40,
    "releases": [{"name": "all", "clip_norm": 1}],
    "noise": {"kind": "bidiagonal", "lambda": 0.8},
    "target": {"epsilon": 4, "delta": 1e-4},
}


@pytest.fixture
def plan(save: Save, document: Document) -> Callable[..., str]:
    return lambda **changes: save(document(**CORRELATED | changes))


def test_the_document_has_what_a_trainer_and_a_reader_need(
    plan: Callable[..., str], answer: Answer
) -> None:
    code, result = answer("strategy", plan(), "--json")
    assert (code, result["verdict"]) == (0, "certified")
    strategy = result["strategy"]
    assert strategy["kind"] == "bidiagonal"
    assert strategy["exact"] is True
    assert strategy["streaming"]["form"] == "moving_average"
    assert strategy["streaming"]["coefficients"] == [1.0, -0.8]
    assert strategy["streaming"]["buffers"] == 1
    assert [row["sampler"] for row in result["comparison"]] == ["cyclic", "cyclic", "poisson"]
    assert all(row["epsilon"]["upper"] <= 4 for row in result["comparison"])
    assert result["remarks"]


def test_people_see_sensitivity_errors_and_the_comparison(
    plan: Callable[..., str], run: Run
) -> None:
    result = run("strategy", plan())
    assert result.exit_code == 0
    for stated in ("sensitivity exactly", "1 buffers", "per step", "rms", "independent", "poisson"):
        assert stated in result.stdout


def test_an_under_noised_plan_is_measured_and_blocks(
    plan: Callable[..., str], answer: Answer
) -> None:
    weak = [{"name": "all", "clip_norm": 1, "noise_multiplier": 1}]
    code, result = answer("strategy", plan(releases=weak), "--json")
    assert (code, result["verdict"]) == (1, "under_noised")
    assert result["comparison"][0]["rms_error"] > 0


def test_a_refused_plan_blocks_with_its_reason(plan: Callable[..., str], answer: Answer) -> None:
    code, result = answer("strategy", plan(adjacency="add_remove"), "--json")
    assert (code, result["verdict"]) == (1, "refused")
    assert result["reasons"][0]["code"] == "removal_moves_records"


@pytest.mark.parametrize("command", ["strategy", "advise"])
def test_a_malformed_plan_is_a_usage_error(command: str, save: Save, answer: Answer) -> None:
    code, result = answer(command, save("{}"), "--json")
    assert (code, result["verdict"]) == (2, "refused")


@pytest.mark.parametrize("noise", [{"kind": "bidiagonal", "lambda": 0.8}, {"kind": "dense"}])
def test_an_exported_strategy_can_be_named_by_a_plan_and_costs_the_same(
    noise: dict[str, Any], plan: Callable[..., str], answer: Answer, tmp_path: Path
) -> None:
    target = tmp_path / "noise.npz"
    _, first = answer("strategy", plan(noise=noise), "--export", str(target), "--json")
    named = {"kind": "matrix", "file": target.name, "sha256": first["written"][str(target)]}
    _, again = answer("strategy", plan(noise=named), "--json")
    for key in ("rms_error", "max_error", "step_noise"):
        assert again["comparison"][0][key] == pytest.approx(first["comparison"][0][key], rel=1e-5)


def test_the_picture_is_written_whole(plan: Callable[..., str], run: Run, tmp_path: Path) -> None:
    target = tmp_path / "errors.svg"
    assert run("strategy", plan(), "--svg", str(target)).exit_code == 0
    assert ElementTree.parse(target).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("command", "option"), [("strategy", "--svg"), ("strategy", "--export"), ("advise", "--svg")]
)
def test_a_folder_that_is_missing_is_named_before_any_work(
    command: str,
    option: str,
    plan: Callable[..., str],
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(compare_commands, "assessment")
    missing = run(command, plan(), option, str(tmp_path / "nowhere" / "a.npz"))
    assert missing.exit_code == 2
    assert "cannot write" in missing.stderr


def test_an_export_of_another_kind_is_refused_before_any_work(
    plan: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    result = run("strategy", plan(), "--export", str(tmp_path / "noise.npy"))
    assert result.exit_code == 2
    assert ".npz" in result.stderr
    assert not (tmp_path / "noise.npy").exists()


def test_noise_that_no_plan_can_name_by_a_file_is_not_exported(
    plan: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    target = tmp_path / "noise.npz"
    result = run("strategy", plan(noise={"kind": "tree"}), "--export", str(target))
    assert result.exit_code == 2
    assert "by kind" in result.stderr
    assert not target.exists()


@pytest.mark.soak
@pytest.mark.usefixtures("few_draws")
def test_advice_names_the_front_and_who_is_comparable_with_whom(
    plan: Callable[..., str], run: Run
) -> None:
    result = run("advise", plan(adjacency="add_remove", sampling={
        "scheme": "poisson", "lot_size": 20}, noise={"kind": "independent"}))  # fmt: skip
    assert result.exit_code == 0
    for stated in ("under add_remove", "under zero_out", "Pareto front", "not comparable", "BLT-2"):
        assert stated in result.stdout


@pytest.mark.soak
@pytest.mark.usefixtures("few_draws")
def test_advice_as_a_document_and_a_picture(
    plan: Callable[..., str], answer: Answer, tmp_path: Path
) -> None:
    target = tmp_path / "front.svg"
    code, result = answer("advise", plan(), "--json", "--svg", str(target))
    assert code == 0
    assert ElementTree.parse(target).getroot().tag.endswith("svg")
    (group,) = result["groups"]
    assert group["adjacency"] == "zero_out"
    assert set(group["pareto"]) <= {row["mechanism"] for row in group["mechanisms"]}
    assert all(row["conditions"] for row in group["mechanisms"])
    errors = [row["rms_error"] for row in group["mechanisms"] if row["verdict"] == "certified"]
    assert len(errors) >= 7
    assert np.all(np.isfinite(errors))


def test_a_plan_without_a_budget_gets_no_advice(plan: Callable[..., str], run: Run) -> None:
    noise = [{"name": "all", "clip_norm": 1, "noise_multiplier": 9}]
    result = run("advise", plan(target={"delta": 1e-4}, releases=noise))
    assert result.exit_code == 2
    assert "no_budget" in result.stderr
