"""Other libraries' documents: what they say is taken, what they leave open is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

GAUSSIAN = dp_accounting.GaussianDpEvent(2.3395)
STEP = dp_accounting.PoissonSampledDpEvent(0.02, GAUSSIAN)
BLOCKS = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.SelfComposedDpEvent(GAUSSIAN, 4))
TWO_SIGMAS = dp_accounting.ComposedDpEvent([GAUSSIAN, dp_accounting.GaussianDpEvent(3.0)])


def _step(sigma: float) -> dp_accounting.DpEvent:
    return dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(sigma))


STATE = {"history": [[1.1, 0.01, 1000], [0.9, 0.01, 100]], "mechanism": "prv"}
JAX = {
    "iterations": 500, "strategy": [1.0], "epsilon": None, "delta": None, "sampling_prob": 0.02,
    "noise_multiplier": 1.3, "accountant": "NeighboringRelation.ADD_OR_REMOVE_ONE",
}  # fmt: skip
SCRIPT = """\
import argparse
from opacus import PrivacyEngine
SIGMA = 0.7
parser = argparse.ArgumentParser()
parser.add_argument("--max-grad-norm", type=float, default=1.5)
args = parser.parse_args()
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=SIGMA,
    max_grad_norm=args.max_grad_norm,{more}
)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


def as_json(event: Any) -> Any:
    """What a team writes: the named tuple's fields, all the way down."""
    if hasattr(event, "_asdict"):
        return {key: as_json(value) for key, value in event._asdict().items()}
    return [as_json(each) for each in event] if isinstance(event, list) else event


def given(file: str, **fields: Any) -> None:
    lines = [f'[tool.affidavit.given."{file}"]']
    lines += [f"{key} = {_toml(value)}" for key, value in fields.items()]
    Path("pyproject.toml").write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def missing(document: dict[str, Any]) -> set[str]:
    (plan,) = document["plans"]
    return {each["pointer"] for each in plan["findings"] if each["blocks"]}


@pytest.mark.parametrize(
    ("event", "joint"),
    [
        (dp_accounting.SelfComposedDpEvent(STEP, 200),) * 2,
        (
            dp_accounting.SelfComposedDpEvent(BLOCKS, 50),
            dp_accounting.SelfComposedDpEvent(_step(2.3395 / 2), 50),
        ),
        (dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(STEP, 100), GAUSSIAN]),)
        * 2,
        (
            dp_accounting.PoissonSampledDpEvent(0.02, TWO_SIGMAS),
            _step((2.3395**-2 + 3.0**-2) ** -0.5),
        ),
        (
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.ComposedDpEvent([STEP, STEP, dp_accounting.NoOpDpEvent()]), 30
            ),
            dp_accounting.SelfComposedDpEvent(STEP, 60),
        ),
        (dp_accounting.ComposedDpEvent([STEP, dp_accounting.LaplaceDpEvent(5.0)]),) * 2,
    ],
)
def test_an_event_costs_what_its_own_library_says(checked: Any, event: Any, joint: Any) -> None:
    """``joint`` is the same with the Gaussians of one sample as one."""
    Path("event.json").write_text(json.dumps(as_json(event.to_named_tuple())))
    given("event.json", adjacency="add_remove", target={"delta": 1e-6})
    code, document = checked("event.json")
    assert code == 0, document
    theirs = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(joint)
    found = document["plans"][0]["result"]["epsilon"]["upper"]
    assert found == pytest.approx(theirs.get_epsilon(1e-6), rel=2e-3, abs=1e-3)
    assert any(each["rule"] == "assumed" for each in document["plans"][0]["findings"])


def _documents() -> Iterator[tuple[str, str, set[str]]]:
    event = json.dumps(as_json(STEP.to_named_tuple()))
    yield "event.json", event, {"/adjacency", "/target"}
    state = {"/adjacency", "/target", "/phases/0/sampling/scheme"}
    yield "state.json", json.dumps(STATE), state
    yield "jax.json", json.dumps(JAX), {"/target"}
    yield "train.py", SCRIPT.replace("{more}", ""), {"/adjacency", "/sampling", "/target"}


@pytest.mark.parametrize(("name", "text", "asked"), tuple(_documents()))
def test_what_is_left_open_is_asked_for(
    checked: Any, name: str, text: str, asked: set[str]
) -> None:
    Path(name).write_text(text)
    code, document = checked(name)
    assert code == 2
    assert missing(document) == asked
    blocking = [each for each in document["plans"][0]["findings"] if each["blocks"]]
    assert all(f'[tool.affidavit.given."{name}"]' in each["remedy"] for each in blocking)


def test_a_sampler_holds_for_every_phase_once_it_is_given(checked: Any) -> None:
    Path("state.json").write_text(json.dumps(STATE))
    fields = {"adjacency": "add_remove", "sampling": {"scheme": "poisson"}}
    given("state.json", **fields, target={"delta": 1e-5})
    code, document = checked("state.json")
    assert code == 0
    event = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(s)), t
            )
            for s, q, t in STATE["history"]
        ]
    )
    theirs = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(event)
    found = document["plans"][0]["result"]["epsilon"]["upper"]
    assert found == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)


def test_a_finding_stands_at_the_script_s_line(checked: Any) -> None:
    Path("train.py").write_text(SCRIPT.replace("{more}", "\n    poisson_sampling=True,"))
    fields = {"adjacency": "add_remove", "dataset": {"size": 60000}, "steps": 1000}
    target = {"epsilon": 1.0, "delta": 1e-5}
    given("train.py", **fields, sampling={"lot_size": 600}, target=target)
    code, document = checked("train.py")
    (found,) = [each for each in document["plans"][0]["findings"] if each["blocks"]]
    assert (code, found["rule"], found["line"]) == (1, "under_noised", 12)
    assert "from 0.7 to" in found["remedy"]


@pytest.mark.parametrize("change", ["SIGMA = 0.9\n", "SIGMA += 1\nSIGMA = f()\n"])
def test_a_name_with_two_values_has_none(checked: Any, change: str) -> None:
    Path("train.py").write_text(SCRIPT.replace("engine =", change + "engine =", 1))
    code, document = checked("train.py")
    assert code == 2
    assert document["plans"][0]["findings"][0]["rule"] == "not_imported"


def test_what_is_given_may_not_contradict(checked: Any) -> None:
    Path("jax.json").write_text(json.dumps(JAX))
    given("jax.json", steps=499, target={"delta": 1e-5})
    code, document = checked("jax.json")
    assert (code, document["plans"][0]["findings"][0]["rule"]) == (2, "given_conflict")


@pytest.mark.parametrize(
    "event",
    [
        {"class_name": "MixtureOfGaussiansDpEvent", "standard_deviation": 1},
        {"class_name": "PoissonSampledDpEvent", "sampling_probability": 0.1},
        {"class_name": "SelfComposedDpEvent", "count": 1e9, "event": {"class_name": "x"}},
        {"class_name": "SelfComposedDpEvent", "count": True, "event": {"class_name": "x"}},
        {"class_name": "ComposedDpEvent", "events": {}},
        {"class_name": "DpEvent", "module_name": "os"},
    ],
)
def test_kinds_that_are_not_listed_are_refused(checked: Any, event: Any) -> None:
    Path("event.json").write_text(json.dumps(event))
    code, document = checked("event.json")
    assert (code, document["plans"][0]["findings"][0]["rule"]) == (2, "not_imported")


def test_bands_are_groups_in_turn_with_correlated_noise(checked: Any) -> None:
    bands = {"strategy": [1.0, 0.5], "delta": 1e-5, "num_examples": 10_000}
    Path("jax.json").write_text(json.dumps(JAX | bands))
    code, document = checked("jax.json")
    assert code == 0, document
    result = document["plans"][0]["result"]
    assert result["strategy"]["kind"] == "toeplitz"
    assert result["sampling"]["scheme"] == "cyclic_poisson"
