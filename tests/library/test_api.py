"""``import affidavit``: every question is answered with bounds that other libraries meet."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from opacus.accountants import RDPAccountant

import affidavit
from affidavit.plan import PlanFields, as_document, with_fields
from affidavit.plan.document import Dataset, Phase, PlanDocument, Release, Sampling, Target
from affidavit.plan.optimizer import Optimizer
from affidavit.trust import KeyStore, SigningKey, TrustedKeys

POISSON: Any = {
    "adjacency": "add_remove",
    "sampling": "poisson",
    "size": 60_000,
    "lot_size": 600,
    "steps": 1000,
    "delta": 1e-5,
}
QUICK: Any = {"second_opinion": False}
EVENT = dp_accounting.SelfComposedDpEvent(
    dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.1)), 1000
)
EXAMPLES = Path(__file__).parents[2] / "examples"
MUON = EXAMPLES / "e2e-dp-muon-published.yaml"


@pytest.fixture(scope="module")
def plan() -> affidavit.Plan:
    return affidavit.Plan.dp_sgd(noise_multiplier=1.1, **POISSON)


def test_every_name_of_the_stub_is_there() -> None:
    stub = Path(affidavit.__file__).with_suffix(".pyi").read_text()
    names = [line.rpartition(" ")[2] for line in stub.splitlines() if line.startswith("from")]
    assert names == [name for name in names if getattr(affidavit, name) is not None]
    assert set(names) <= set(dir(affidavit))


def test_type_checkers_know_every_field_that_a_question_takes() -> None:
    parts = (PlanDocument, Phase, Release, Dataset, Sampling, Optimizer, Target)
    names = {name for part in parts for name in part.model_fields}
    shared = {"version", "count", "scheme"}  # of a document, a release, and `sampling`
    assert names - shared <= PlanFields.__annotations__.keys()
    for name in PlanFields.__annotations__:
        with_fields({}, **{name: {}})


def test_importing_loads_no_library() -> None:
    code = (
        "import sys, affidavit; print(sorted({'numpy', 'pydantic', 'scipy', 'dp_accounting', "
        "'httpx', 'matplotlib', 'typer'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_epsilon_is_a_bound_on_both_sides(plan: affidavit.Plan) -> None:
    peer = PLDAccountant(value_discretization_interval=1e-3).compose(EVENT)
    bound = affidavit.epsilon(plan)
    assert bound.lower <= peer.get_epsilon(1e-5) <= bound * (1 + 1e-3)
    assert bound.lower < bound.upper == bound


def test_delta_and_epsilon_are_inverse(plan: affidavit.Plan) -> None:
    at = affidavit.epsilon(plan)
    assert affidavit.delta(plan, epsilon=at.upper) <= 1e-5 * (1 + 1e-3)
    assert affidavit.delta(plan, epsilon=at.lower) >= 1e-5 * (1 - 1e-3)
    peer = PLDAccountant(value_discretization_interval=1e-3).compose(EVENT)
    at_one = affidavit.delta(plan, epsilon=1.0)
    assert 1 / 60_000 < at_one.lower <= peer.get_delta(1.0) <= at_one * (1 + 1e-2)


def test_what_is_solved_for_meets_the_target_and_no_less_does(plan: affidavit.Plan) -> None:
    sigma = affidavit.noise_multiplier(plan, epsilon=2.0)
    assert affidavit.epsilon(plan, noise_multiplier=sigma) <= 2
    assert affidavit.epsilon(plan, noise_multiplier=sigma * 0.999) > 2
    count = affidavit.steps(plan, epsilon=2.0)
    assert affidavit.epsilon(plan, steps=count) <= 2 < affidavit.epsilon(plan, steps=count + 1)


def test_one_noise_multiplier_for_one_question() -> None:
    built = affidavit.Plan.dp_muon(
        blocks={"hidden": 48, "auxiliary": 1},
        adjacency="add_remove",
        sampling="poisson",
        size=42_043,
        lot_size=1024,
        steps=410,
        epsilon=8.0,
        delta=8e-6,
    )
    assert affidavit.noise_multiplier(built) == affidavit.noise_multiplier(MUON) == 4.778266
    assert affidavit.certify(built, **QUICK).noise_multiplier == 4.778266
    assert 4.778266 in affidavit.certify(MUON, **QUICK).assessment.releases[0].as_dict().values()


def test_every_form_of_a_plan_is_the_same_plan(plan: affidavit.Plan, tmp_path: Path) -> None:
    document = as_document(plan)
    text = "\n".join(f"{key}: {value}" for key, value in document.items()).replace("'", '"')
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    opacus = RDPAccountant()
    opacus.history = [(1.1, 0.01, 1000)]
    given: Any = {"adjacency": "add_remove", "delta": 1e-5}
    bounds = {
        affidavit.epsilon(plan),
        affidavit.epsilon(document),
        affidavit.epsilon(text),
        affidavit.epsilon(text.encode()),
        affidavit.epsilon(file),
        affidavit.epsilon(str(file)),
        affidavit.epsilon(EVENT, **given),
        affidavit.epsilon(opacus, sampling="poisson", **given),
        affidavit.epsilon(plan, noise_multiplier=np.float64(1.1), steps=np.int64(1000)),
        affidavit.epsilon({**document, "steps": np.arange(1001)[-1]}),
    }
    assert len(bounds) == 1


def test_what_an_object_does_not_say_is_asked_for_and_what_it_says_stands() -> None:
    with pytest.raises(affidavit.MalformedPlan, match="at /adjacency"):
        affidavit.epsilon(EVENT, delta=1e-5)
    with pytest.raises(affidavit.MalformedPlan, match="given_conflict"):
        affidavit.epsilon(EVENT, delta=1e-5, adjacency="add_remove", probability=0.02)
    with pytest.raises(affidavit.MalformedPlan, match="cannot be read as a plan"):
        affidavit.epsilon(object())
    with pytest.raises(affidavit.MalformedPlan, match=r"nowhere\.yaml"):
        affidavit.certify("nowhere.yaml")


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"sampling": "poison"}, "poisson"),
        ({"optimizer": "adamw"}, "dp_adamw"),
        ({"lr": 0.1}, "learning_rate"),
        ({"sigma": 1.0}, "noise_multiplier"),
        ({"adjacency": "add_or_remove_one"}, "add_remove"),
    ],
)
def test_a_wrong_name_or_value_names_the_right_one(fields: Any, meant: str) -> None:
    with pytest.raises(affidavit.MalformedPlan, match=f"Did you mean {meant}\\?"):
        affidavit.Plan.dp_sgd(**{**POISSON, "noise_multiplier": 1.0, **fields})


def test_a_refusal_is_an_answer_and_no_number() -> None:
    refused = affidavit.certify(MUON, sampling="shuffled", adjacency="add_remove")
    assert refused.verdict == "refused"
    assert refused.epsilon is None
    with pytest.raises(affidavit.NotCertified) as error:
        affidavit.epsilon(MUON, sampling="shuffled", adjacency="add_remove")
    assert error.value.reasons == refused.reasons
    with pytest.raises(affidavit.NotCertified, match="under_noised"):
        affidavit.check(MUON)
    assert affidavit.epsilon(MUON) > 61.9


def test_a_bound_rounds_up_however_it_is_written() -> None:
    for value in (1.0000001, 7.98505, 0.1, 1e-300, 123456.789):
        bound = affidavit.Bound(value, lower=value / 2)
        for spec in (".3f", ".3g", ".1e", ".17g", "10.2f", ""):
            assert Decimal(format(bound, spec).strip()) >= Decimal(repr(value)), spec
        again = pickle.loads(pickle.dumps(bound))
        assert (again, again.lower) == (bound, bound.lower)
    with pytest.raises(ValueError, match="lower <= upper"):
        affidavit.Bound(1.0, lower=2.0)


def test_a_certificate_is_signed_and_verified(plan: affidavit.Plan, tmp_path: Path) -> None:
    key, other = KeyStore(tmp_path / "own").new("me"), SigningKey.generate("other")
    trusted = affidavit.keys.trusted(tmp_path / "own" / f"{key.public.key_id}.json")
    answer = affidavit.certify(plan, epsilon=2.0, noise_multiplier=None, **QUICK)
    certificate = answer.write(tmp_path / "bundle.json", key)
    verified = affidavit.verify(tmp_path / "bundle.json", plan=answer.source, trusted=trusted)
    assert verified.predicate["certificate_id"] == certificate.id
    with pytest.raises(affidavit.VerificationError):
        affidavit.verify(certificate.bundle, plan=plan, trusted=trusted)
    with pytest.raises(affidavit.VerificationError):
        affidavit.verify(certificate.bundle, trusted=TrustedKeys((other.public,), policy=None))
    with pytest.raises(TypeError, match=r"affidavit\.keys\.trusted"):
        affidavit.verify(certificate.bundle, trusted=[key.public])  # type: ignore[arg-type]


def test_a_solved_plan_is_closed(plan: affidavit.Plan) -> None:
    answer = affidavit.certify(plan, epsilon=2.0, noise_multiplier=None, **QUICK)
    assert not answer.plan.is_open
    assert affidavit.check(answer.plan).noise_multiplier == answer.noise_multiplier


@pytest.mark.soak
def test_a_curve_agrees_with_the_questions(plan: affidavit.Plan) -> None:
    curve = affidavit.curve(plan)
    assert curve.epsilon(1e-5).lower <= affidavit.epsilon(plan)
    assert affidavit.epsilon(plan).lower <= curve.epsilon(1e-5)
    assert curve.epsilon(1e-7) > curve.epsilon(1e-5)
    assert 0 < curve.advantage.lower <= curve.advantage < 1
    assert curve.type_two(0.0).upper == pytest.approx(1, abs=1e-3)


def test_a_curve_has_the_lower_ends_of_its_certificate() -> None:
    answer = affidavit.certify(
        {
            "version": 1,
            "adjacency": "zero_out",
            "dataset": {"size": 40},
            "sampling": {"scheme": "b_min_sep", "lot_size": 10, "separation": 2},
            "steps": 4,
            "noise": {"kind": "toeplitz", "coefficients": [0.8, 0.6]},
            "releases": [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 4.0}],
            "target": {"delta": 1e-6},
        },
        **QUICK,
    )
    tables: Any = SimpleNamespace(engine={"name": answer.assessment.accountants[0].name})
    assert answer.epsilon is not None
    assert affidavit.Curve(answer, tables).epsilon(1e-6).lower == answer.epsilon.lower > 0


@pytest.mark.soak
def test_results_show_themselves(plan: affidavit.Plan) -> None:
    answer = affidavit.certify(plan, **QUICK)
    swept = affidavit.sweep(plan, {"steps": [100, 200]})
    for result in (answer, affidavit.curve(plan), swept):
        shown = result._repr_html_()
        assert shown.startswith("<")
        assert repr(result)
    assert str(answer.epsilon)[:5] in answer._repr_html_()


def test_diagnose_and_compare() -> None:
    found = affidavit.diagnose(MUON, claimed_epsilon="7.9852")
    assert not found.holds
    assert found.explanations[0].mistakes == ("independent_blocks",)
    compared = affidavit.compare(MUON, EXAMPLES / "e2e-dp-muon-corrected.yaml")
    assert compared.ranking == "second"
    with pytest.raises(ValueError, match="claimed_epsilon"):
        affidavit.diagnose(MUON)


def test_a_claim_is_a_number_of_any_kind() -> None:
    assert affidavit.diagnose(MUON, claimed_epsilon=np.float32(7.5)).claim.epsilon == 7.5


def test_a_wrong_claim_and_a_wrong_engine_are_named() -> None:
    for claimed in (-1.0, "x", float("nan"), 10**400):
        with pytest.raises(affidavit.MalformedPlan, match="claim"):
            affidavit.diagnose(MUON, claimed_epsilon=claimed)
    with pytest.raises(ValueError, match="fourier"):
        affidavit.epsilon(MUON, engine="furier")


def test_events_of_dp_accounting_that_release_nothing_or_everything() -> None:
    step, nothing = EVENT.event, dp_accounting.NoOpDpEvent()
    empty = dp_accounting.ComposedDpEvent([nothing, dp_accounting.SelfComposedDpEvent(nothing, 3)])
    never = dp_accounting.PoissonSampledDpEvent(0.0, step.event)
    ours = affidavit.PrivacyAccountant().compose(empty).compose(never, 5)
    assert ours.get_epsilon(1e-5) == ours.get_delta(0.0) == 0.0
    with pytest.raises(ValueError, match="ε"):
        ours.get_delta(-1.0)
    nested = dp_accounting.ComposedDpEvent([empty, dp_accounting.SelfComposedDpEvent(step, 500)])
    ours.compose(dp_accounting.SelfComposedDpEvent(nested, 2))
    assert ours.get_epsilon(1e-5) == affidavit.epsilon(EVENT, adjacency="add_remove", delta=1e-5)
    ours.compose(dp_accounting.ComposedDpEvent([step, dp_accounting.NonPrivateDpEvent()]))
    assert ours.get_epsilon(1e-5) == math.inf
    assert not ours.supports(dp_accounting.SelfComposedDpEvent(step, -1))
    without = dp_accounting.SampledWithoutReplacementDpEvent(60_000, 600, step.event)
    with pytest.raises(dp_accounting.UnsupportedEventError, match="REPLACE_ONE"):
        ours.compose(without)


class Partition(Enum):
    EQUAL_SPLIT = 2


@dataclass
class Configuration:
    """The fields of jax-privacy 2.0's ``BandMFExecutionPlanConfig``, which needs JAX."""

    iterations: int = 1000
    strategy: Any = field(default_factory=lambda: np.array([1.0]))
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = 1.1
    l2_clip_norm: float = 1.0
    sampling_prob: float = 0.01
    partition_type: Partition = Partition.EQUAL_SPLIT
    dtype: Any = np.float32
    accountant: Any = field(default_factory=PLDAccountant)
    noise_seed: int | None = None


def test_a_configuration_of_jax_privacy_is_read(plan: affidavit.Plan) -> None:
    assert affidavit.epsilon(Configuration(), delta=1e-5) == affidavit.epsilon(plan)
    with pytest.raises(affidavit.MalformedPlan, match="EQUAL_SPLIT"):
        affidavit.load(Configuration(strategy=np.array([1.0, 0.5])), delta=1e-5)


@pytest.mark.parametrize(
    "answer",
    [
        lambda: affidavit.certify(MUON, **QUICK),
        lambda: affidavit.compare(MUON, affidavit.load(MUON, steps=400)),
        lambda: affidavit.diagnose(MUON, claimed_epsilon="7.98"),
        lambda: affidavit.sweep(MUON, {"steps": [10, 20]}),
    ],
)
def test_results_show_themselves_on_a_line_and_as_a_table(answer: Any) -> None:
    result = answer()
    assert "\n" not in repr(result)
    assert len(repr(result)) < 300
    assert result._repr_html_().startswith(("<p>", "<table>"))
