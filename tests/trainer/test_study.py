"""The study of DP-Muon on text: its plans, its public texts, and the page of its results."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from affidavit.assessment import certify
from affidavit.plan import plan_from

BLOCKS = {
    "all": [("all", 1, 160_000)],
    "hidden": [("hidden", 8, 6912), ("auxiliary", 1, 105_000)],
    "kinds": [
        ("attention-in", 2, 6912), ("attention-out", 2, 2304), ("mlp-in", 2, 9216),
        ("mlp-out", 2, 9216), ("auxiliary", 1, 105_000),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Any:
    return import_module("examples.study.rows")


@pytest.fixture(scope="module")
def page() -> Any:
    return import_module("examples.study.page")


def plan(rows: Any, name: str, epsilon: float = 8.0) -> dict[str, Any]:
    blocks = BLOCKS[rows.ROWS[name].blocks]
    document: dict[str, Any] = rows.plan(name, rows.SIZES["small"], epsilon, blocks, 0.01, 0.002)
    return document


def test_every_row_sees_as_many_records(rows: Any) -> None:
    plans = [plan(rows, name) for name in rows.ROWS]
    assert len({(of["sampling"]["lot_size"], of["steps"]) for of in plans}) == 1
    assert {of["dataset"]["size"] for of in plans} == {4672}


@pytest.mark.parametrize("epsilon", [8.0, 3.0])
@pytest.mark.parametrize("name", ["dp-adam", "dp-muon", "dp-muon-optimal", "dp-matrix"])
def test_rows_cost_what_they_state(rows: Any, name: str, epsilon: float) -> None:
    result = certify(plan_from(plan(rows, name, epsilon)), second_opinion=False)
    assert result.verdict == "certified"
    assert result.epsilon is not None
    assert 0.999 * epsilon < result.epsilon.upper <= epsilon


def test_the_published_noise_costs_more_than_it_was_derived_for(rows: Any) -> None:
    """By its derivation it is ε = 8: a plan of one block with as many steps as blocks and steps."""
    document = plan(rows, "dp-muon-published")
    result = certify(plan_from(document), second_opinion=False)
    assert result.epsilon is not None
    assert result.epsilon.lower > 8.5
    (alone,) = BLOCKS["all"]
    derived = rows.plan("dp-sgd", rows.SIZES["small"], 8.0, [alone], 0.01, 0.01)
    derived |= {"steps": 9 * document["steps"], "target": {"delta": 1e-5}}
    derived["releases"][0]["noise_multiplier"] = document["releases"][0]["noise_multiplier"]
    result = certify(plan_from(derived), second_opinion=False)
    assert result.epsilon is not None
    assert 7.99 < result.epsilon.lower < result.epsilon.upper <= 8


def test_no_meaning_is_in_two_parts_and_none_is_of_e2e(tmp_path: Path) -> None:
    data = import_module("examples.study.data")
    documents = [
        {
            "tripleset": [[f"place {number}", "AREA", "city centre"]],
            "annotations": [
                {"source": "webnlg", "text": f"Place {number} is in the city centre."},
                {"source": "e2e", "text": f"private {number}"},
            ],
        }
        for number in range(7)
    ]
    documents.append(
        {"tripleset": [["a", "B", "c"]], "annotations": [{"source": "e2e", "text": "private"}]}
    )
    (tmp_path / "dart").mkdir()
    (tmp_path / "dart" / "dev.json").write_text(json.dumps(documents))
    parts = [data.public_texts(tmp_path, part) for part in data.PARTS]
    assert sorted(chain.from_iterable(parts)) == sorted(data.public_texts(tmp_path))
    assert [len(part) for part in parts] == [3, 2, 2]
    assert not any("private" in target for part in parts for _, target in part)
    sources = [{source for source, _ in part} for part in parts]
    assert sum(map(len, sources)) == len(set().union(*sources)) == 7


def test_intervals_are_those_of_student(page: Any) -> None:
    """By Fisher's table: 4.303 at two degrees of freedom, and 2.776 at Welch's four."""
    assert page.interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / np.sqrt(3), rel=1e-3))
    told = page.difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert told == f"+1.0000 ± {2.776445 * np.sqrt(2 / 3):.4f}"
    assert page.difference([1.0], [0.5, 0.7]) == "-0.4000"


def test_the_page_is_that_of_its_results(page: Any) -> None:
    """``python -m examples.study.page`` writes it."""
    results = json.loads(page.RESULTS.read_text())
    assert page.PAGE.read_text() == page.page(results)
    assert page.PICTURE.read_text() == page.picture(results["runs"], 8.0)


def test_every_private_run_kept_its_target_and_has_evidence(page: Any, rows: Any) -> None:
    runs = [run for run in json.loads(page.RESULTS.read_text())["runs"] if run["row"] in rows.ROWS]
    assert runs
    for run in runs:
        assert (run["epsilon"] <= run["target"]) == (run["row"] != rows.PUBLISHED)
        assert run["evidence"].startswith("sha256:")
    assert len({run["evidence"] for run in runs}) == len(runs)
