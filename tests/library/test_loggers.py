"""What trackers are told is what real ones held; ``real_trackers`` recorded those."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import affidavit
from affidavit.trust import SigningKey
from tests.library.real_trackers import answer, recorded


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "record.jsonl"
    path.write_text("{}\n")
    return path


def tracker(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A module of that name, with these functions alone."""
    module = ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("store", ["mlflow file", "mlflow sqlite"])
def test_mlflow_is_told_what_its_stores_recorded(
    monkeypatch: pytest.MonkeyPatch, record: Path, store: str
) -> None:
    told: dict[str, Any] = {"parameters": {}, "metrics": {}, "spent": [], "files": []}
    tracker(
        monkeypatch,
        "mlflow",
        log_params=lambda values: told["parameters"].update(
            {name: str(value) for name, value in values.items()}
        ),
        log_metrics=told["metrics"].update,
        log_metric=lambda _, value, step: told["spent"].append([step, value]),
        log_artifact=lambda path, folder: told["files"].append(f"{folder}/{Path(path).name}"),
    )
    affidavit.log_to_mlflow(answer(), record=record, key=SigningKey.generate("logs"))
    assert told == recorded(store)


def test_wandb_is_told_what_it_wrote_offline(monkeypatch: pytest.MonkeyPatch, record: Path) -> None:
    told: dict[str, Any] = {"parameters": {}, "metrics": {}, "spent": [], "files": []}
    artifact = SimpleNamespace(add_file=lambda _, name, **__: told["files"].append(name))
    tracker(monkeypatch, "wandb", Artifact=lambda *_, **__: artifact)
    run: Any = SimpleNamespace(
        id="1",
        offline=True,
        config=told["parameters"],
        summary=told["metrics"],
        define_metric=lambda *_, **__: None,
        log=lambda row: told["spent"].append([row["privacy/step"], row["privacy/epsilon_spent"]]),
        log_artifact=lambda _: None,
    )
    affidavit.log_to_wandb(answer(), run, record=record, key=SigningKey.generate("logs"))
    assert told == recorded("wandb offline")


def test_what_was_spent_rises_to_what_is_certified() -> None:
    spent = [value for _, value in affidavit.epsilon_over_steps(answer())]
    assert spent == sorted(spent)
    assert spent[-1] == answer().epsilon


def test_steps_of_one_lot_scheme_that_bind_each_other_are_told_as_a_whole() -> None:
    lots = {"scheme": "fixed_size", "lot_size": 100}
    bound = affidavit.certify(answer().plan, adjacency="replace_one", sampling=lots).require()
    assert affidavit.epsilon_over_steps(bound) == [(60, bound.epsilon)]


def test_nothing_is_logged_of_what_is_not_certified_or_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tracker(monkeypatch, "mlflow")  # a call of it would be an AttributeError
    weak = affidavit.certify(answer().plan, epsilon=0.01)
    with pytest.raises(affidavit.NotCertified):
        affidavit.log_to_mlflow(weak)
    with pytest.raises(FileNotFoundError):
        affidavit.log_to_mlflow(answer(), record=tmp_path / "none.jsonl")
