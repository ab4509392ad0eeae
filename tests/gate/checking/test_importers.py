"""Other libraries' documents: what they say is taken, what they leave open is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import attr
import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from affidavit.importers import DP_EVENT_REMEDIES, dp_event, jax_privacy
from affidavit.importers.dp_event import EVENT_FIELDS
from affidavit.importers.scripts import importer
from affidavit.importers.scripts.syntax import Script, parse_script
from affidavit.plan import MalformedPlan

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
    return [as_json(item) for item in event] if isinstance(event, list) else event


def declare(file: str, **fields: Any) -> None:
    lines = [f'[tool.affidavit.given."{file}"]']
    lines += [f"{key} = {_toml(value)}" for key, value in fields.items()]
    Path("pyproject.toml").write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def missing(document: dict[str, Any]) -> set[str]:
    (plan,) = document["plans"]
    return {item["pointer"] for item in plan["findings"] if item["blocks"]}


@pytest.mark.ordinary("not event1-*")
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
    declare("event.json", adjacency="add_remove", target={"delta": 1e-6})
    code, document = checked("event.json")
    assert code == 0, document
    theirs = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(joint)
    result = document["plans"][0]["result"]["epsilon"]["upper"]
    assert result == pytest.approx(theirs.get_epsilon(1e-6), rel=2e-3, abs=1e-3)
    assert any(item["rule"] == "assumed" for item in document["plans"][0]["findings"])


def _documents() -> Iterator[tuple[str, str, set[str]]]:
    event = json.dumps(as_json(STEP.to_named_tuple()))
    yield "event.json", event, {"/adjacency", "/target"}
    state = {"/adjacency", "/target", "/phases/0/sampling/scheme"}
    yield "state.json", json.dumps(STATE), state
    yield "jax.json", json.dumps(JAX), {"/target"}
    lacking = {"/adjacency", "/target", "/steps", "/sampling/lot_size", "/dataset/size"}
    yield "train.py", SCRIPT.replace("{more}", ""), lacking


@pytest.mark.parametrize(("name", "text", "asked"), tuple(_documents()))
def test_what_is_left_open_is_asked_for(
    checked: Any, name: str, text: str, asked: set[str]
) -> None:
    Path(name).write_text(text)
    code, document = checked(name)
    assert code == 2
    assert missing(document) == asked
    blocking = [item for item in document["plans"][0]["findings"] if item["blocks"]]
    assert all(f'[tool.affidavit.given."{name}"]' in entry["remedy"] for entry in blocking)


@pytest.mark.soak
def test_a_sampler_holds_for_every_phase_once_it_is_given(checked: Any) -> None:
    Path("state.json").write_text(json.dumps(STATE))
    fields = {"adjacency": "add_remove", "sampling": {"scheme": "poisson"}}
    declare("state.json", **fields, target={"delta": 1e-5})
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
    result = document["plans"][0]["result"]["epsilon"]["upper"]
    assert result == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)


def test_a_finding_stands_at_the_script_s_line(checked: Any) -> None:
    Path("train.py").write_text(SCRIPT.replace("{more}", "\n    poisson_sampling=True,"))
    fields = {"adjacency": "zero_out", "dataset": {"size": 60000}, "steps": 1000}
    target = {"epsilon": 1.0, "delta": 1e-5}
    declare("train.py", **fields, sampling={"lot_size": 600}, target=target)
    code, document = checked("train.py")
    (result,) = [item for item in document["plans"][0]["findings"] if item["blocks"]]
    assert (code, result["rule"], result["line"]) == (1, "under_noised", 12)
    assert "from 0.7 to" in result["remedy"]


@pytest.mark.parametrize("change", ["SIGMA = 0.9\n", "SIGMA += 1\nSIGMA = f()\n"])
def test_a_name_with_two_values_has_none(checked: Any, change: str) -> None:
    Path("train.py").write_text(SCRIPT.replace("engine =", change + "engine =", 1))
    code, document = checked("train.py")
    assert code == 2
    assert document["plans"][0]["findings"][0]["rule"] == "not_imported"


def test_what_is_given_may_not_contradict(checked: Any) -> None:
    Path("jax.json").write_text(json.dumps(JAX))
    declare("jax.json", steps=499, target={"delta": 1e-5})
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
    bands["partition_type"] = "INDEPENDENT"
    Path("jax.json").write_text(json.dumps(JAX | bands))
    code, document = checked("jax.json")
    assert code == 0, document
    result = document["plans"][0]["result"]
    assert result["strategy"]["kind"] == "toeplitz"
    assert result["sampling"]["scheme"] == "cyclic_poisson"


def test_lots_of_groups_in_turn_follow_from_the_size_of_the_data_set(checked: Any) -> None:
    bands = {"strategy": [1.0, 0.5], "delta": 1e-5, "partition_type": "INDEPENDENT"}
    Path("jax.json").write_text(json.dumps(JAX | bands))
    results = []
    for given, code in (("", 0), ("lot_size = 99", 2), ("lot_size = 100", 0)):
        Path("pyproject.toml").write_text(
            "[tool.affidavit.given.'jax.json'.dataset]\nsize = 10_000\n"
            f"[tool.affidavit.given.'jax.json'.sampling]\n{given}\n"
        )
        ended, document = checked("jax.json")
        assert ended == code, document
        results.append(document["plans"][0]["result"])
    assert results[0] == results[2]


BANDS = {
    "iterations": 100, "sampling_prob": 0.2, "noise_multiplier": 1.0, "num_examples": 1000,
    "neighboring_relation": "REPLACE_SPECIAL", "delta": 1e-5,
}  # fmt: skip


@pytest.mark.soak
def test_the_scale_of_a_strategy_changes_nothing(checked: Any) -> None:
    """jax-privacy multiplies its noise by the norm, and accounts for b groups at sampling_prob."""
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.0)), 50
    )
    theirs = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL).compose(event)
    expected = theirs.get_epsilon(1e-5)
    for scale in (0.1, 1.0, 0.4472135954999579 * 2, 7.0):
        Path("jax.json").write_text(json.dumps(BANDS | {"strategy": [scale, scale / 2]}))
        code, document = checked("jax.json")
        assert code == 0, document
        result = document["plans"][0]["result"]["epsilon"]["upper"]
        assert expected - 1e-3 < result < expected + 2e-3


@pytest.mark.ordinary("None-*")
@pytest.mark.parametrize(
    ("size", "relation"), [(None, "ADD_OR_REMOVE_ONE"), (1000, "REPLACE_SPECIAL")]
)
def test_expected_participations_stand_for_the_sampling_probability(
    checked: Any, size: int | None, relation: str
) -> None:
    """10 expected participations in 100 iterations of two bands: 50 rounds at 0.2."""
    config = {"iterations": 100, "expected_participations": 10, "strategy": [1.0, 0.5]}
    config |= {"noise_multiplier": 1.0, "num_examples": size}
    Path("jax.json").write_text(json.dumps(config))
    fields: dict[str, Any] = {"dataset": {"size": 1000}} if size is None else {}
    lot = {"lot_size": 100} if size is None else {}
    declare("jax.json", target={"delta": 1e-5}, **fields, **({"sampling": lot} if lot else {}))
    code, document = checked("jax.json")
    assert code == 0, document
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.0)), 50
    )
    theirs = PLDAccountant(dp_accounting.NeighboringRelation[relation]).compose(event)
    result = document["plans"][0]["result"]
    assert result["epsilon"]["upper"] == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
    Path("jax.json").write_text(json.dumps(config | {"noise_multiplier": None}))
    assert checked("jax.json")[0] == 2


def test_k_of_t_steps_are_read_of_events_and_of_configurations(checked: Any) -> None:
    event = {
        "module_name": "dp_accounting.dp_event", "class_name": "RandomAllocationDpEvent",
        "event": _gaussian(noise_multiplier=2.0), "num_selected": 5, "num_steps": 50,
    }  # fmt: skip
    config = {"iterations": 50, "expected_participations": 5.0, "strategy": [1.0]}
    config |= {"noise_multiplier": 2.0, "sub_strategy": "CyclicInnerStrategy.RANDOM_ALLOCATION"}
    lots = {"scheme": "random_allocation", "participations": 5}
    results = []
    for document in (event, config):
        Path("k.json").write_text(json.dumps(document))
        declare("k.json", target={"delta": 1e-5}, adjacency="add_remove")
        code, answer = checked("k.json")
        assert code == 0, answer
        results.append(answer["plans"][0]["result"])
        assert results[-1]["sampling"].items() >= lots.items()
    assert results[0]["epsilon"] == results[1]["epsilon"]
    twice = {"class_name": "SelfComposedDpEvent", "count": 2, "event": event}
    assert len(dp_event.read(twice).data["phases"]) == 2
    for change in ({"expected_participations": 2.5}, {"strategy": [1.0, 0.5]}):
        with pytest.raises(MalformedPlan):
            jax_privacy.read_participations({**config, **change})


@pytest.mark.parametrize("strategy", [[0.1, 0.05], [3, 4], [1e-9, 1e9, -1.0], [0.7, 0.0, 1e-300]])
def test_a_strategy_s_norm_is_never_taken_for_less(strategy: list[float]) -> None:
    partial = jax_privacy.read(BANDS | {"strategy": strategy})
    square = sum(Fraction(item) ** 2 for item in partial.data["noise"]["coefficients"])
    assert 1 <= square < 1 + Fraction(1, 10**14)


def _jax(**fields: Any) -> dict[str, Any]:
    return BANDS | {"strategy": [1.0, 0.5]} | fields


def _gaussian(**fields: Any) -> dict[str, Any]:
    return {"class_name": "GaussianDpEvent", "noise_multiplier": 1.0} | fields


def _sample(**fields: Any) -> dict[str, Any]:
    sample = {"class_name": "PoissonSampledDpEvent", "sampling_probability": 0.5}
    return sample | {"event": _gaussian()} | fields


def _state(*entry: Any, **fields: Any) -> dict[str, Any]:
    return {"history": [[1.0, 0.01, 10], list(entry)], "mechanism": "prv"} | fields


WITHOUT = {"class_name": "SampledWithoutReplacementDpEvent", "event": _gaussian()}
CUT = {
    "class_name": "TruncatedSubsampledGaussianDpEvent", "dataset_size": 1000,
    "sampling_probability": 0.1, "truncated_batch_size": 200, "noise_multiplier": 1.0,
}  # fmt: skip
NOT_RECORDS = [
    ("noise_multiplier", {"class_name": "GaussianDpEvent"}),
    ("noise_multiplier", {"class_name": "LaplaceDpEvent"}),
    ("noise_multiplier", _sample(event=_gaussian(noise_multiplier=None))),
    ("noise_multiplier", _gaussian(noise_multiplier="1")),
    ("noise_multiplier", _gaussian(noise_multiplier=True)),
    ("noise_multiplier", _gaussian(noise_multiplier=[1.0])),
    ("noise_multiplier", _gaussian(noise_multiplier=0)),
    ("sigma", _gaussian(sigma=0.5)),
    ("GaussianDpEvent", _gaussian(module_name="mine")),
    ("sampling_probability", _sample(sampling_probability=None)),
    ("sampling_probability", _sample(sampling_probability=1.5)),
    ("sampling_prob", _sample(sampling_prob=0.5)),
    ("event", {"class_name": "SelfComposedDpEvent", "count": 3}),
    ("count", {"class_name": "SelfComposedDpEvent", "event": _gaussian()}),
    ("count", {"class_name": "SelfComposedDpEvent", "event": _gaussian(), "count": "3"}),
    ("count", _sample(event={"class_name": "SelfComposedDpEvent", "event": _gaussian()})),
    ("events", {"class_name": "ComposedDpEvent"}),
    ("sample_size", WITHOUT | {"source_dataset_size": 10}),
    ("source_dataset_size", WITHOUT | {"sample_size": 10}),
    *((field, CUT | {field: None}) for field in CUT if field != "class_name"),
    ("noise_multiplier", _state(None, 0.01, 10)),
    ("sample_rate", _state(1.0, None, 10)),
    ("sample_rate", _state(1.0, "0.01", 10)),
    ("num_steps", _state(1.0, 0.01, None)),
    ("num_steps", _state(1.0, 0.01, 2.5)),
    ("history", _state(1.0, 0.01)),
    ("mechanism", _state(1.0, 0.01, 10, mechanism=None)),
    ("noise", _state(1.0, 0.01, 10, noise=0.1)),
    ("iterations", _jax(iterations=None)),
    ("iterations", _jax(iterations=True)),
    ("iterations", _jax(iterations=1)),
    ("sampling_prob", _jax(sampling_prob=None)),
    ("sampling_prob", _jax(sampling_prob="0.2")),
    ("num_examples", _jax(num_examples="1000")),
    ("noise_multiplier", _jax(noise_multiplier=False)),
    ("noise_multiplyer", _jax(noise_multiplyer=0.1, noise_multiplier=None)),
    ("l2_clip_norm", _jax(l2_clip_norm=None)),
    ("delta", _jax(delta="1e-5")),
    ("epsilon", _jax(epsilon=[8])),
    ("truncated_batch_size", _jax(strategy=[1.0], truncated_batch_size="9")),
    ("column_normalize", _jax(column_normalize=None)),
    ("strategy", _jax(strategy=[1.0, None])),
    ("strategy", _jax(strategy=[0.0, 1.0])),
    ("strategy", _jax(strategy=[1.7e308, 1.7e308])),
    ("accountant", _jax(accountant="ADD_OR_REMOVE")),
    ("accountant", _jax(accountant="ADD_OR_REMOVE_ONE")),
    ("partition_type", _jax(neighboring_relation="ADD_OR_REMOVE_ONE")),
    ("partition_type", _jax(partition_type=2)),
]


@pytest.mark.ordinary("*record*[05]")
@pytest.mark.parametrize(("field", "record"), NOT_RECORDS)
def test_a_record_has_nothing_to_solve_for(checked: Any, field: str, record: Any) -> None:
    Path("record.json").write_text(json.dumps(record))
    target = {"epsilon": 8.0, "delta": 1e-5}
    declare("record.json", adjacency="zero_out", sampling={"scheme": "poisson"}, target=target)
    code, document = checked("record.json")
    (result,) = document["plans"][0]["findings"]
    assert (code, result["rule"]) == (2, "not_imported")
    assert field in result["message"]


def _told(document: dict[str, Any]) -> str:
    result = document["plans"][0]["findings"]
    return " ".join(item["message"] for item in result if item["rule"] == "assumed")


def test_a_calibration_of_the_library_s_own_is_not_what_is_certified(checked: Any) -> None:
    Path("jax.json").write_text(json.dumps(_jax(noise_multiplier=None, epsilon=8.0)))
    code, document = checked("jax.json")
    assert code == 0, document
    assert "calibrates its own" in _told(document)


OPTION = """\
import argparse
p = argparse.ArgumentParser(description="x")
p.add_argument("-s", "--sigma", type=float, default=4.0)
args = p.parse_args()
"""
BODY = "engine.make_private(module=m, noise_multiplier={noise}, max_grad_norm=1.0{more})\n"
KNOWN = [
    ("SIGMA = 4.0\n", "SIGMA"),
    ("SIGMA = 4.0\ndef f():\n    return SIGMA\n", "SIGMA"),
    (OPTION, "args.sigma"),
    (OPTION + "print(args)\nargs.device = 'cpu'\n", "args.sigma"),
    (OPTION.replace("args = p.parse_args", "args, _ = p.parse_known_args"), "args.sigma"),
    (OPTION.replace("argparse.A", "A").replace("import ", "from argparse import ArgumentParser #"),
     "args.sigma"),
    ("SIGMA = 4.0\ndef train(SIGMA): pass\n", "SIGMA"),
    ("SIGMA = 4.0\nf = lambda SIGMA: 0\n", "SIGMA"),
    ("SIGMA = 4.0\ndef f():\n    SIGMA = 0.5\n", "SIGMA"),
    (OPTION + "def f(args): pass\n", "args.sigma"),
    (OPTION.replace("p.add_argument(", "p.add_argument_group().add_argument("), "args.sigma"),
    (OPTION + "p = argparse = other()\n", "args.sigma"),
    ("def make_private(noise_multiplier): pass\n", "4.0"),
    ("from other import make_private\n", "4.0"),
]  # fmt: skip
UNKNOWN_NAMES = [
    "SIGMA /= 8", "SIGMA: float = 0.5", "SIGMA, C = 0.5, 1.0", "for SIGMA in [0.5]: pass",
    "if (SIGMA := 0.5): pass", "with f() as SIGMA: pass", "import SIGMA",
    "from x import y as SIGMA",
    "from x import *", "try: f()\nexcept E as SIGMA: pass", "def SIGMA(): pass",
    "class SIGMA: pass",
    "def f():\n  global SIGMA\n  SIGMA = 0.5", "del SIGMA", "[0 for SIGMA in x]",
    "globals()['SIGMA'] = 0.5",
    "match x:\n  case SIGMA: pass", "match x:\n  case [*SIGMA]: pass",
    "match x:\n  case {**SIGMA}: pass", "sys.modules[__name__].SIGMA = 0.5", "exec('SIGMA = 0.5')",
]  # fmt: skip
UNKNOWN_OPTIONS = [
    "args.sigma = 0.5", "args.sigma /= 8", "setattr(args, 'sigma', 0.5)",
    "vars(args)['sigma'] = 0.5", "args.__dict__.update(sigma=0.5)", "p.set_defaults(sigma=0.5)",
    "args = other()",
    "q = argparse.ArgumentParser()\nq.add_argument('--sigma', default=0.5)",
    "p.add_argument('--noise', dest='sigma', default=0.5)", "p.add_argument(name, default=0.5)",
    "p.add_argument('--noise', **more)", "configure(p)", "configure(args)",
    "a = p\n", "a.default = 0.5",
]  # fmt: skip
CHANGED_OPTIONS = [
    ("p.parse_args()", "p.parse_args(['--sigma', '0.5'])"),
    ("p.parse_args()", "p.parse_args(argv)"),
    ("default=4.0", "default=other"), ("default=4.0", "default=4.0, required=True"),
    ('"-s", "--sigma"', '"sigma"'), ('description="x"', "parents=[other]"),
    ("argparse.ArgumentParser", "Parser"), ("import argparse", "import other as argparse"),
    ("p = argparse", "argparse = other()\np = argparse"), ("args =", "if x: p = other()\nargs ="),
]  # fmt: skip


def _script(before: str, noise: str, more: str = "") -> str:
    return f"from opacus import PrivacyEngine\n{before}" + BODY.format(noise=noise, more=more)


@pytest.mark.parametrize(("before", "noise"), KNOWN)
def test_a_name_that_is_bound_once_is_known(before: str, noise: str) -> None:
    partial = importer.read(_script(before, noise).encode())
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 4.0
    defaults = any("at their defaults: noise_multiplier" in item for item in partial.assumed)
    assert defaults == noise.startswith("args")


@pytest.mark.parametrize(
    "script",
    [
        *(_script(f"SIGMA = 4.0\n{change}\n", "SIGMA") for change in UNKNOWN_NAMES),
        *(_script(f"{change}\nSIGMA = 4.0\n", "SIGMA") for change in UNKNOWN_NAMES),
        *(_script(f"{OPTION}{change}\n", "args.sigma") for change in UNKNOWN_OPTIONS),
        *(_script(OPTION.replace(*change), "args.sigma") for change in CHANGED_OPTIONS),
        _script("if x:\n  SIGMA = 4.0\n", "SIGMA"),
        _script("SIGMA = OTHER = 4.0\n", "SIGMA"),
        _script(OPTION + "class cfg:\n  sigma = 0.5\n", "cfg.sigma"),
        _script("", "4.0", ", **cfg"),
        _script("", "4.0", ", *cfg"),
        _script("", "True"),
        _script("", "1e400"),
        _script("", "0x" + "f" * 9000),
        _script("", "1+2j"),
        _script("", "..."),
        _script("class E:\n  def make_private(self, **more): pass\n", "4.0"),
        _script("", "4.0").replace("engine.", ""),
        _script("", "4.0").replace("opacus", "other"),
        _script("", "4.0") + "f = engine.make_private\n",
        _script("", "4.0") + "optimizer.noise_multiplier *= 0.9\n",
    ],
)
def test_what_a_script_leaves_in_doubt_is_not_read(script: str) -> None:
    dynamic = {getattr(node, "lineno", 0) for node in Script(parse_script(script)).dynamic}
    codes, open_lines = list[str](), set[int]()
    try:
        partial = importer.read(script.encode())
    except MalformedPlan as refused:
        codes = [reason.code for reason in refused.reasons]
    else:
        assert partial is not None
        open_lines = {use.line for use in partial.open_uses}
    assert codes == ["not_imported"] or (dynamic and dynamic <= open_lines)


@pytest.mark.parametrize(
    ("name", "text", "fields"),
    [
        ("train.py", _script("", "4.0", ", poisson_sampling=False"),
         {"sampling": {"scheme": "poisson"}}),
        ("jax.json", json.dumps({k: v for k, v in _jax().items() if k != "neighboring_relation"}),
         {"adjacency": "add_remove"}),
    ],
)  # fmt: skip
def test_what_a_document_rules_out_cannot_be_given(
    checked: Any, name: str, text: str, fields: dict[str, Any]
) -> None:
    Path(name).write_text(text)
    declare(name, **fields)
    code, document = checked(name)
    assert (code, document["plans"][0]["findings"][0]["rule"]) == (2, "given_conflict")


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (dp_accounting.ZCDpEvent(0.1), "ZCDpEvent"),
        (
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.dp_event.RepeatAndSelectDpEvent(STEP, 2.0, 1.0), 2
            ),
            "outermost",
        ),
        (dp_accounting.SingleEpochTreeAggregationDpEvent(1.0, 8), "kind: tree"),
        (dp_accounting.SampledWithReplacementDpEvent(100, 10, GAUSSIAN), "fixed_size"),
    ],
)
def test_a_kind_that_is_not_read_is_named_with_what_to_do(
    checked: Any, event: dp_accounting.DpEvent, named: str
) -> None:
    Path("event.json").write_text(json.dumps(as_json(event.to_named_tuple())))
    code, document = checked("event.json")
    (finding,) = document["plans"][0]["findings"]
    assert (code, finding["rule"]) == (2, "not_imported")
    assert named in json.dumps(finding)


@pytest.mark.parametrize(
    ("event", "named"),
    [
        ({"class_name": "ExponentialMechanismDpEvent", "epsilon": 1.0}, "ε-DP"),
        ({"class_name": "PermuteAndFlipDpEvent", "epsilon": 1.0}, "ε-DP"),
        ({"class_name": "DiscreteGaussianDpEvent", "sigma": 2.0, "sensitivity": 1.0}, "exact_grid"),
        ({"class_name": "EpsilonDeltaDpEvent", "epsilon": 1.0, "delta": 1e-6}, "lower end"),
    ],
)
def test_a_kind_of_the_development_tree_is_named_with_what_to_do(
    checked: Any, event: dict[str, Any], named: str
) -> None:
    module = {"module_name": "dp_accounting.dp_event"}
    step = as_json(STEP.to_named_tuple())
    run = {**module, "class_name": "ComposedDpEvent", "events": [step, {**module, **event}]}
    Path("event.json").write_text(json.dumps(run))
    code, document = checked("event.json")
    (finding,) = document["plans"][0]["findings"]
    assert (code, finding["rule"]) == (2, "not_imported")
    assert event["class_name"] in json.dumps(finding)
    assert named in json.dumps(finding, ensure_ascii=False)


DEVELOPMENT_KINDS = {
    "EpsilonDeltaDpEvent",
    "DiscreteGaussianDpEvent",
    "ExponentialMechanismDpEvent",
    "PermuteAndFlipDpEvent",
    "RandomAllocationDpEvent",
}
"""The kinds of dp-accounting's later trees that its release does not have."""


def test_every_kind_of_event_is_read_with_all_its_fields_or_has_a_remedy() -> None:
    kinds = {
        name: {field.name for field in attr.fields(kind)}
        for name, kind in vars(dp_accounting.dp_event).items()
        if name.endswith("DpEvent") and name != "DpEvent"
    }
    assert len(kinds) > 15
    assert all(set(EVENT_FIELDS[name]) == kinds[name] for name in EVENT_FIELDS.keys() & kinds)
    assert kinds.keys() | DEVELOPMENT_KINDS == EVENT_FIELDS.keys() | DP_EVENT_REMEDIES.keys()
