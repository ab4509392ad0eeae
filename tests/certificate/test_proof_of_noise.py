"""A proof starts at the plan: σ_joint and sensitivities are proved, or refused with a code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from affidavit.assessment import certify
from affidavit.certificate import certificate_proof
from affidavit.certificate.issuance import statement
from affidavit.certificate.policy.evaluation import BUILT_IN_EVALUATION, NO_APPROVALS
from affidavit.checker import Unproved
from affidavit.mechanisms import correlation, lower
from affidavit.mechanisms.correlation import Correlation
from affidavit.mechanisms.strategies.participation_mixture import ParticipationMixture
from affidavit.mechanisms.strategies.sensitivity import Sensitivity
from affidavit.mechanisms.strategies.strategy import Strategy
from affidavit.plan import (
    events,
    plan_from,
)

CYCLIC = {"scheme": "cyclic", "lot_size": 100}
APART = {"schema": "min_separation", "participations": 3, "separation": 5}


def plan_document(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "zero_out",
        "dataset": {"size": 1000},
        "sampling": CYCLIC,
        "steps": 24,
        "releases": [
            {"name": "body", "clip_norm": 1.0, "noise_multiplier": 7.0, "count": 3},
            {"name": "head", "clip_norm": 0.3, "noise_multiplier": 11.0},
        ],
        "target": {"delta": 1e-6},
    }
    return {**document, **changes}


def lowered_and_required(document: dict[str, Any], *, bound: int = 0) -> None:
    lowered = lower(plan_from(document))
    certificate_proof._require_noise(lowered, events.alternatives(lowered.event())[bound])


BLT = {"kind": "blt", "decays": [0.9, 0.5], "scales": [0.3, 0.2]}
ROWS = [[0.01 * i * (i > j) + (i == j) for j in range(24)] for i in range(24)]
MATRIX = {"kind": "matrix", "rows": ROWS}
ROUNDED = [
    [1e-15 if j == i + 1 else entry for j, entry in enumerate(row)] for i, row in enumerate(ROWS)
]
FRESH = {"scheme": "poisson", "lot_size": 20}
CUT = {"scheme": "truncated_poisson", "lot_size": 100, "max_lot_size": 150}
GROUPS = {"scheme": "cyclic_poisson", "lot_size": 1, "groups": 2}
EQUAL = [{"name": "all", "clip_norm": 1.0, "noise_multiplier": 7.0, "count": 4}]
WHITE: dict[str, dict[str, Any]] = {
    "fresh lots": {"sampling": FRESH, "noise": {"kind": "sqrt"}},
    "fresh lots, replaced": {
        "sampling": {"scheme": "fixed_size", "lot_size": 20},
        "noise": BLT,
        "adjacency": "replace_one",
    },
    "fresh lots, replaced users": {
        "dataset": {"size": 1000, "unit": "user", "contributions_per_user": 3},
        "sampling": {"scheme": "fixed_size", "lot_size": 20},
        "noise": BLT,
        "adjacency": "replace_one",
    },
    "fresh lots, tree": {"sampling": CUT, "noise": {"kind": "tree"}},
    "groups": {"sampling": GROUPS, "noise": {"kind": "bidiagonal", "lambda": 0.9}},
    "groups, alternating": {"sampling": GROUPS, "noise": {"kind": "bidiagonal", "lambda": -0.9}},
    "groups, matrix": {"sampling": GROUPS, "noise": MATRIX},
    "fresh lots, scheduled": {
        "sampling": FRESH,
        "noise": {"kind": "sqrt"},
        "clip_schedule": [0.5] * 12 + [1.0] * 12,
    },
}
"""Plans whose noise is white noise with other noise beside it."""
KINDS: dict[str, dict[str, Any]] = WHITE | {
    "groups, banded": {"sampling": GROUPS, "noise": {"kind": "banded", "bands": 3}},
    "independent": {},
    "flat": {"clipping": "flat", "releases": EQUAL},
    "replaced": {"adjacency": "replace_one"},
    "bidiagonal": {"noise": {"kind": "bidiagonal", "lambda": 0.9}},
    "alternating": {"noise": {"kind": "bidiagonal", "lambda": -0.9}, "adjacency": "replace_one"},
    "normalized": {"noise": {"kind": "bidiagonal", "lambda": 0.9, "normalized": True}},
    "normalized apart": {
        "noise": {"kind": "bidiagonal", "lambda": 0.9, "normalized": True},
        "participation": APART,
    },
    "coefficients": {"noise": {"kind": "toeplitz", "coefficients": [1.0, 0.5, 0.2]}},
    "inverse": {"noise": {"kind": "toeplitz_inverse", "coefficients": [1.0, -0.5, -0.1]}},
    "root": {"noise": {"kind": "sqrt"}},
    "banded": {"noise": {"kind": "banded", "bands": 4}},
    "blt": {"noise": BLT},
    "blt apart": {"noise": BLT, "participation": APART},
    "dense": {"noise": {"kind": "dense"}},
    "matrix": {"noise": MATRIX},
    "matrix apart": {"noise": MATRIX, "participation": APART},
    "tree": {"noise": {"kind": "tree"}},
    "tree apart": {"noise": {"kind": "tree"}, "participation": APART},
    "restarted": {"noise": {"kind": "tree", "restart": True}},
    "tree, scheduled": {"noise": {"kind": "tree"}, "clip_schedule": [0.5] * 12 + [1.0] * 12},
    "rounded": {"noise": {"kind": "matrix", "rows": ROUNDED}},
    "scheduled": {"noise": {"kind": "sqrt"}, "clip_schedule": [0.5] * 12 + [1.0] * 12},
    "poisson": {"sampling": {"scheme": "poisson", "lot_size": 100}},
    "users": {
        "sampling": {"scheme": "poisson", "lot_size": 100},
        "dataset": {"size": 1000, "unit": "user", "contributions_per_user": 3},
    },
    "bins": {"sampling": {"scheme": "balls_in_bins", "lot_size": 100}, "steps": 20},
    "allocated": {"sampling": {"scheme": "random_allocation", "participations": 6}, "steps": 20},
    "quantile": {
        "sampling": {"scheme": "poisson", "lot_size": 100},
        "extra": [{"kind": "adaptive_clipping_quantile", "name": "quantile", "noise_std": 30}],
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_of_a_plan_is_proved_and_no_more_of_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = plan_document(**KINDS[kind])
    lowered_and_required(document)
    # A lowering that claims a thousandth of a percent more noise is caught.
    own = lower(plan_from(document)).phases[0]
    if own.correlation is not None:
        real = Correlation.at

        def understated(correlation: Correlation, steps: int) -> Any:
            at = real(correlation, steps)
            # What is proved may be less than what was accounted.
            proved = min(at.sensitivity.value, float(certificate_proof._sensitivity(at)))
            return replace(at, sensitivity=Sensitivity(value=proved * (1 - 1e-5), attained=0.0))

        monkeypatch.setattr(Correlation, "at", understated)
    else:
        lowering = "affidavit.mechanisms.lowering.add_same_lot_blocks"
        monkeypatch.setattr(lowering, lambda joint, _: joint * 1.0001)
    with pytest.raises(Unproved, match="noise that was accounted"):
        lowered_and_required(document)


@pytest.mark.parametrize("kind", WHITE)
def test_white_noise_is_no_wider_than_the_largest_singular_value_allows(kind: str) -> None:
    """‖C_S‖ by numpy; a multiplier is what was accounted of it."""
    own = lower(plan_from(plan_document(**WHITE[kind]))).phases[0]
    assert own.correlation is not None
    at = own.correlation.at(24)
    assert at.route == "white_noise"
    strategy = at.strategy.strategy_matrix()
    norms = [np.linalg.norm(strategy[:, first :: at.turn], 2) for first in range(at.turn)]
    assert float(certificate_proof._sensitivity(at)) >= max(norms) * (1 - 1e-12)


UNDISCLOSED = (
    "fresh lots",
    "fresh lots, replaced",
    "fresh lots, replaced users",
    "fresh lots, scheduled",
    "groups",
    "groups, alternating",
    "groups, matrix",
)
"""Plans whose events do not disclose the steps of a record."""


@pytest.mark.ordinary("groups, matrix", "fresh lots, replaced users")
@pytest.mark.parametrize("kind", UNDISCLOSED)
def test_what_participations_add_up_to_is_proved_and_no_less(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = plan_document(**WHITE[kind])
    lowered_and_required(document, bound=1)
    real = correlation.participation_mixture

    def understated(strategy: Strategy, **arguments: Any) -> ParticipationMixture:
        mixture = real(strategy, **arguments)
        return replace(mixture, spacing=mixture.spacing * 0.999)

    monkeypatch.setattr(correlation, "participation_mixture", understated)
    with pytest.raises(Unproved, match="noise that was accounted"):
        lowered_and_required(document, bound=1)


SEPARATED = plan_document(
    sampling={"scheme": "b_min_sep", "lot_size": 20, "separation": 5},
    steps=400,
    noise={"kind": "toeplitz", "coefficients": [1.0, 0.9, 0.8, 0.7, 0.6]},
)
LESS: dict[str, tuple[int, str, Callable[[Any], Any]]] = {
    "participations": (
        1,
        "separated_mixture",
        lambda mixture: replace(mixture, spacing=mixture.spacing * 0.999),
    ),
    "chances": (
        2,
        "disclosed_steps",
        lambda data: replace(data, probability=0.999 * data.probability),
    ),
    "norms": (
        3,
        "disclosed_steps",
        lambda data: replace(data, norms=tuple((s * 0.9999, n) for s, n in data.norms)),
    ),
    "large norms": (
        2,
        "disclosed_steps",
        lambda data: replace(data, norms=((data.norms[0][0], 5), (data.norms[1][0], 400))),
    ),
    "steps": (2, "disclosed_steps", lambda data: replace(data, norms=data.norms[:-1])),
    "what is conceded": (
        3,
        "disclosed_steps",
        lambda data: replace(data, conceded=data.conceded / 1e6),
    ),
}
"""The bound of the plan that each changes, and how it is made smaller than it is."""


@pytest.mark.parametrize("less", LESS)
def test_participations_that_are_apart_are_proved_and_no_fewer(
    less: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, name, change = LESS[less]
    lowered_and_required(SEPARATED, bound=bound)
    real = getattr(correlation, name)

    def understated(*arguments: Any, **named: Any) -> Any:
        result = real(*arguments, **named)
        return None if result is None else change(result)

    monkeypatch.setattr(correlation, name, understated)
    with pytest.raises(Unproved, match="noise that was accounted"):
        lowered_and_required(SEPARATED, bound=bound)


@pytest.mark.soak
@pytest.mark.ordinary("1")
@pytest.mark.parametrize("records", [1, 3])
def test_a_certificate_that_rests_on_participations_is_proved(records: int) -> None:
    document = plan_document(
        sampling={"scheme": "poisson", "lot_size": 5},
        noise={"kind": "sqrt"},
        steps=200,
        dataset={"size": 1000, "unit": "user", "contributions_per_user": records},
        releases=[{"name": "all", "clip_norm": 1.0, "noise_multiplier": 4.0}],
    )
    stated = statement(
        certify(plan_from(document)),
        requester="",
        issued_at=datetime.now(UTC),
        untrusted=False,
        approvals=NO_APPROVALS,
        evaluation=BUILT_IN_EVALUATION,
    )["predicate"]
    signed = certificate_proof.proof_document(stated)
    assert signed["statements"] == ["gaussian_mixture"]
    assert (
        certificate_proof.prove_certificate({**stated, "proof": signed}).epsilon
        == signed["epsilon"]
    )
    thinner = plan_document(**{**document, "sampling": {"scheme": "poisson", "lot_size": 6}})
    with pytest.raises(Unproved):
        certificate_proof.prove_certificate({**stated, "proof": signed, "plan": thinner})
    with pytest.raises(Unproved, match="another bound"):
        certificate_proof.prove_certificate({**stated, "proof": {**signed, "alternative": 2}})


def test_the_bound_that_decides_is_proved_where_one_loss_is_rare() -> None:
    document = plan_document(
        adjacency="add_remove",
        dataset={"size": 500},
        sampling={"scheme": "b_min_sep", "lot_size": 1, "separation": 2},
        steps=3,
        noise={"kind": "banded", "bands": 5},
        releases=[{"name": "all", "clip_norm": 1.0, "noise_multiplier": 0.59}],
        target={"delta": 2e-6},
    )
    assessment = certify(plan_from(document), second_opinion=False)
    assert certificate_proof.with_proof(assessment).proof_problem is None


def test_a_strategy_without_structure_of_many_steps_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certificate_proof.sensitivity, "MAX_ROWS", 10)
    with pytest.raises(Unproved, match="24 steps") as refusal:
        lowered_and_required(plan_document(noise=MATRIX | {"rows": irregular()}))
    assert refusal.value.code == "no_statement"


def irregular() -> list[list[float]]:
    return [[float(i == j) - 0.3 * (i == j + 1) * (i % 2) for j in range(24)] for i in range(24)]


def test_a_bound_without_sampling_has_the_sensitivity_of_the_whole_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling = {"scheme": "cyclic_poisson", "lot_size": 50, "groups": 2}
    document = plan_document(sampling=sampling, noise={"kind": "bidiagonal", "lambda": 0.9})
    lowered_and_required(document, bound=-1)
    real = Correlation.at

    def understated(correlation: Correlation, steps: int) -> Any:
        at = real(correlation, steps)
        assert at.unsampled is not None
        smaller = Sensitivity(value=at.unsampled.value * (1 - 1e-5), attained=0.0)
        return replace(at, unsampled=smaller)

    monkeypatch.setattr(Correlation, "at", understated)
    with pytest.raises(Unproved, match="noise that was accounted"):
        lowered_and_required(document, bound=-1)


def test_an_allocation_of_shuffled_lots_has_their_noise_and_no_more_bins() -> None:
    plan: dict[str, Any] = {
        "version": 1,
        "adjacency": "zero_out",
        "dataset": {"size": 1000},
        "sampling": {"scheme": "shuffled", "lot_size": 6},
        "epochs": 2,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 6}],
        "target": {"delta": 1e-5},
    }

    def is_proved(bins: int, sigma: float, lot: int = 6) -> bool:
        document = {**plan, "sampling": {"scheme": "shuffled", "lot_size": lot}}
        leaf = events.RandomAllocationGaussian(bins=bins, noise_multiplier=sigma)
        return certificate_proof._has_noise_and_lots(
            lower(plan_from(document)), 0, leaf, [(1, Fraction(6))]
        )

    assert is_proved(166, 3.0)
    assert not is_proved(166, 3.001)
    assert not is_proved(167, 3.0)
    # Lots of five leave out no record.
    assert not is_proved(200, 3.0, lot=5)
