"""The configuration of a run, from a certificate and a plan.

The certificate is verified offline with the keys that the user trusts, and its subject is compared
with the digest of the plan. From then on, the *certified* plan is the only source
of privacy parameters: sampler, lot size, steps, clip norms, noise (the required noise if
the plan left it open), adjacency, divisor. No option changes one. Everything that
this trainer cannot fulfil is refused here, before any data is read:

* a verdict other than certified, an expired or untrusted certificate, another plan;
* a data set of another size than the plan's;
* an obligation that this release does not know;
* correlated noise whose coefficients differ here from those that were certified;
* a run that is to be repeated and selected from, except as a trial of its search.

>>> OBLIGATIONS >= {"noise_once_per_lot", "empty_lot_counts"}
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from affidavit.assessment import (
    STEP_OBLIGATIONS,
    Execution,
    NotTrainable,
    certified_execution,
)
from affidavit.certificate import VerificationOptions, verify
from affidavit.mechanisms import Correlation
from affidavit.mechanisms.strategies import Strategy, coefficients_digest
from affidavit.plan import MAX_MATRIX_STEPS, Plan, PlanError, digest
from affidavit.trainer.errors import NotCertified
from affidavit.trust import TrustedKeys, VerificationError

OBLIGATIONS = STEP_OBLIGATIONS | {
    "inject_the_strategy",
    "noise_recurrence",
    "keep_the_noise_state",
    "combine_before_clipping",
    "error_feedback_form",
    "one_divisor",
    "error_state_is_private",
    "recentred_clipping_count",
    "round_to_the_grid",
    "insert_the_canaries",
    "records_of_a_user",
}
"""Codes of the obligations that this trainer fulfils."""

SEARCH_OBLIGATIONS = frozenset({"repetitions_are_drawn", "score_is_accounted"})
"""Codes of the obligations that ``affidavit search`` fulfils for its trials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A certified run: its closed plan and its certificate."""

    certificate_id: str
    plan_digest: str
    plan: Plan
    execution: Execution
    strategies: tuple[Strategy | None, ...]
    guarantee: dict[str, Any]

    @property
    def summary(self) -> str:
        """The guarantee of the whole run, in words."""
        epsilon, delta = self.guarantee["epsilon"]["upper"], self.guarantee["delta"]["upper"]
        return f"ε ≤ {epsilon} at δ = {delta} under {self.guarantee['adjacency']}"


def bind(
    bundle: bytes,
    trusted: TrustedKeys,
    plan: Plan,
    *,
    records: int,
    most_of_a_user: int | None = None,
    most_users: int = 1,
    own_parts: bool = False,
    options: VerificationOptions | None = None,
    search: bool = False,
) -> RunConfig:
    """Return the run of ``plan`` that ``bundle`` certifies, on ``records`` records and canaries.

    ``most_of_a_user`` is the largest number of records of a user, if the data has users, and
    ``most_users`` that of users of a record. ``own_parts`` is whether some own a part of a record
    (``PartOwners``). ``options`` are further requirements on the certificate. ``search`` tells that
    this is one of the runs to select from. Raises ``NotCertified``.
    """
    try:
        predicate = verify(bundle, trusted, plan=plan, options=options).predicate
    except VerificationError as error:
        raise NotCertified(error.code, f"{error.message} {error.remedy}") from None
    _require_search(plan, search=search)
    fulfilled = OBLIGATIONS | SEARCH_OBLIGATIONS if search else OBLIGATIONS
    try:
        execution = certified_execution(predicate, fulfilled)
        strategies = strategies_of(execution)
    except NotTrainable as error:
        raise NotCertified(error.code, str(error)) from None
    except PlanError as error:
        reason = error.reasons[0]
        raise NotCertified(reason.code, str(reason)) from None
    except ValueError as error:
        raise NotCertified("open_plan", f"{error}. Certify the plan again.") from None
    closed = execution.plan
    _require_runnable(closed, records)
    _require_ownership(closed, most_of_a_user, most_users)
    if own_parts and closed.dataset.unit == "user" and closed.adjacency != "replace_one":
        raise NotCertified(
            "parts_of_a_group",
            f"the plan was certified under {closed.adjacency}, but some users own a part of a "
            "group, whose clipped sum then moves by up to twice the clip norm. Certify the plan "
            "under replace_one, or train on records instead of groups.",
        )
    _require_same_strategies(predicate["strategies"], strategies)
    return RunConfig(
        certificate_id=predicate["certificate_id"],
        plan_digest=digest(plan),
        plan=closed,
        execution=execution,
        strategies=strategies,
        guarantee=predicate["guarantee"],
    )


def strategies_of(execution: Execution) -> tuple[Strategy | None, ...]:
    """Return the strategy of each phase, or None for independent noise."""
    plan = execution.plan
    return tuple(
        None
        if phase.noise.kind == "independent"
        else Correlation(plan=plan, index=index).at(execution.lengths[index]).strategy
        for index, phase in enumerate(plan.phases)
    )


def _require_search(plan: Plan, *, search: bool) -> None:
    selects = any(event.kind == "repeat_and_select" for event in plan.extra)
    if selects and not search:
        raise NotCertified(
            "unsupported",
            "/extra: the certificate covers repeated runs with a selection (repeat_and_select), "
            "not a single run. Use affidavit search.",
        )
    if search and not selects:
        raise NotCertified(
            "unsupported",
            "/extra: the certificate covers one run, not a search. Certify a plan with "
            "repeat_and_select.",
        )


def _require_runnable(plan: Plan, records: int) -> None:
    size = plan.dataset.size
    if size is None:
        raise NotCertified(
            "dataset_size",
            "dataset.size is missing from the plan, so a mean has no divisor. Certify the plan "
            "with dataset.size.",
        )
    canaries = 0 if plan.canaries is None else plan.canaries.count
    if size != records + canaries:
        what = f"{size}, {canaries} of them canaries" if canaries else f"{size}"
        raise NotCertified(
            "dataset_size",
            f"the data has {records} records, but the plan was certified for {what}. Use the "
            "certified data set, or certify the plan for this size.",
        )
    names = [{(release.name, release.count) for release in phase.releases} for phase in plan.phases]
    if any(name != names[0] for name in names):
        raise NotCertified(
            "unsupported",
            "the phases release different blocks, but every tensor is trained in all phases. Give "
            "every phase the same releases.",
        )


def _require_ownership(plan: Plan, records: int | None, users: int) -> None:
    allowed, sharing = plan.dataset.records_per_unit, plan.dataset.users_per_record or 1
    if records is None:
        if allowed > 1 or sharing > 1:
            raise NotCertified(
                "records_of_a_user",
                f"the plan was certified for users of at most {allowed} records, but the data does "
                "not name the user of each record. Name the column (--data "
                "csv:PATH,...,user=COLUMN), pass users= to private, or define most_of_a_user in "
                "your data adapter.",
            )
        return
    if plan.dataset.unit == "example":
        return
    if records > allowed:
        raise NotCertified(
            "records_of_a_user",
            f"a user has {records} records, but the plan was certified for at most {allowed}. "
            "Remove records (affidavit.trainer.choose_records, or most= of --data csv), or certify "
            f"the plan with contributions_per_user: {records}.",
        )
    if users > sharing:
        raise NotCertified(
            "users_of_a_record",
            f"a record has {users} users, but the plan was certified for {sharing} at most. "
            f"Certify the plan with users_per_record: {users}, under zero_out or replace_one.",
        )


def _require_same_strategies(
    certified: Sequence[dict[str, Any]], strategies: Sequence[Strategy | None]
) -> None:
    here = [strategy for strategy in strategies if strategy is not None]
    if len(here) != len(certified):
        raise NotCertified("other_strategy", "the correlated noise differs from the certificate's.")
    for entry, strategy in zip(certified, here, strict=True):
        if not _is_same(entry, strategy):
            raise NotCertified(
                "other_strategy",
                f"the {entry.get('kind')} noise that this machine constructs differs from the "
                "certified noise. Certify the plan on this machine, or write the coefficients "
                "into the plan.",
            )


def _is_same(entry: dict[str, Any], strategy: Strategy) -> bool:
    arrays = strategy.coefficients
    if "digest" in entry and (not arrays or entry["digest"] != coefficients_digest(arrays)):
        return False
    if "coefficients" in entry:
        return list(entry["coefficients"]) == list(strategy.streaming.coefficients)
    if "noise_sha256" in entry and strategy.steps <= MAX_MATRIX_STEPS:
        doubles = strategy.noise_matrix().astype("<f8").tobytes(order="C")
        return bool(entry["noise_sha256"] == hashlib.sha256(doubles).hexdigest())
    return True
