"""The rules of a policy, one function each, and the facts that they use.

``PolicyFacts`` are the plan and a few results of its accounting. They come from an assessment or
from a signed statement, so that the same rules issue a certificate, check it later, and show which
certificates another policy would refuse.

A rule yields reasons, each with a stable code, a pointer into the plan and a remedy. Rules only
restrict: a policy with one more rule, a lower cap or a shorter list allows no further plan.

>>> sorted(RULES)[:3]
['policy_accountant_version', 'policy_adjacency', 'policy_budget']
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from affidavit.accountants import decimal_down, decimal_up
from affidavit.assessment import Assessment, gaussian_bound_in
from affidavit.assessment.assessment import Verdict, is_refused_by_policy
from affidavit.certificate.policy.document import Policy
from affidavit.plan import Plan, Reason, exact_fraction, plan_from

Budget = Literal["fits", "exceeded", "none", "unknown"]
"""Whether the cost of the run can be reserved; ``unknown`` if no ledger was checked."""
_NOT_STATED = "none is stated"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFacts:
    """The facts about a plan and its accounting.

    ``verdict`` is that of the accounting; ``engines`` are (name, version), and the first one
    decided. ``epsilon`` (nats) and ``delta`` are upper bounds as a certificate states them, rounded
    up. ``unproved`` is the reason why there is no proof, or empty. ``groups`` are records, relation
    and ε of larger groups, and ``unbounded`` is the reason why one is missing. ``mu`` is that of a
    Gaussian curve that bounds the guarantee, and ``no_mu`` the reason why there is none.
    ``cap_needs`` is what the cap on ε needs, or empty.
    """

    plan: Plan
    verdict: Verdict
    epsilon: float | None
    delta: float | None
    engines: tuple[tuple[str, str], ...]
    budget: Budget
    unproved: str = "it has no proof"
    groups: tuple[tuple[int, str, float], ...] = ()
    unbounded: str = _NOT_STATED
    mu: float | None = None
    no_mu: str = _NOT_STATED
    cap_needs: str = ""

    @classmethod
    def of(cls, plan: Plan, assessment: Assessment, budget: Budget = "unknown") -> PolicyFacts:
        """Return the facts of an assessment to which no policy was applied yet."""
        return cls(
            plan=plan,
            verdict=assessment.verdict,
            epsilon=None
            if assessment.epsilon is None
            else float(decimal_up(assessment.epsilon.upper)),
            delta=None if assessment.delta is None else float(decimal_up(assessment.delta.upper)),
            engines=tuple(
                (accountant.name, accountant.version) for accountant in assessment.accountants
            ),
            budget=budget,
            unproved=_unproved(assessment.proof, assessment.proof_problem),
            groups=tuple(
                (bound.records, bound.relation, float(decimal_up(bound.epsilon.upper)))
                for bound in assessment.groups
                if bound.epsilon is not None
            ),
            unbounded=next(
                (_summary(bound.reasons[0]) for bound in assessment.groups if bound.reasons),
                _NOT_STATED,
            ),
            mu=_mu_of(assessment),
            no_mu=_NOT_STATED
            if assessment.gaussian_problem is None
            else _summary(assessment.gaussian_problem),
            cap_needs="" if assessment.cap is None else assessment.cap.needs,
        )

    @classmethod
    def from_predicate(
        cls, predicate: Mapping[str, Any], budget: Budget = "unknown"
    ) -> PolicyFacts:
        """Return the facts of a predicate; raises errors like ``KeyError`` if one is missing."""
        guarantee = predicate["guarantee"]
        return cls(
            plan=plan_from(predicate["plan"]),
            verdict=accounting_verdict(predicate),
            epsilon=None if guarantee is None else float(guarantee["epsilon"]["upper"]),
            delta=None if guarantee is None else float(guarantee["delta"]["upper"]),
            engines=tuple((item["name"], item["version"]) for item in predicate["accountants"]),
            budget=budget,
            unproved=_unproved(predicate.get("proof"), None),
            groups=tuple(
                (int(item["records"]), str(item["relation"]), float(item["epsilon"]["upper"]))
                for item in predicate.get("groups", ())
            ),
            mu=None if guarantee is None else gaussian_bound_in(guarantee)[0],
        )


def _mu_of(assessment: Assessment) -> float | None:
    bound = assessment.mu if assessment.gaussian is None else assessment.gaussian.mu
    return None if bound is None else float(decimal_up(bound))


def _unproved(proof: Any, problem: Reason | None) -> str:
    if problem is not None:
        return _summary(problem)
    return "" if isinstance(proof, Mapping) else "it has no proof"


def _summary(problem: Reason) -> str:
    return f"{problem.code}: {problem.message.rstrip('.')}"


def accounting_verdict(predicate: Mapping[str, Any]) -> Verdict:
    """Return the accounting's verdict: ``certified`` if the policy alone refuses the plan."""
    verdict: Verdict = predicate["verdict"]
    codes = [str(reason["code"]) for reason in predicate["reasons"]]
    return "certified" if is_refused_by_policy(verdict, codes) else verdict


RuleCheck = Callable[[Policy, PolicyFacts], Iterator[Reason]]
DIGITS = 6


def violations(policy: Policy, facts: PolicyFacts) -> tuple[Reason, ...]:
    """Return the reasons why ``policy`` does not allow the plan; empty if it does."""
    return tuple(reason for rule in RULES.values() for reason in rule(policy, facts))


def _dataset(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    name = facts.plan.dataset.name
    if not policy.covers(name):
        stated = "its data set has no name" if name is None else f"the data set is {name}"
        yield Reason(
            code="policy_dataset",
            pointer="/dataset/name",
            message=f"{stated}, and the policy {policy.name} is for {_listed(policy.datasets)}.",
            remedy="Use this data set's policy, or name the intended data set.",
        )


def _adjacency(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    provided = facts.plan.adjacency
    if policy.adjacencies is not None and provided not in policy.adjacencies:
        yield _not_allowed("policy_adjacency", "/adjacency", provided, policy.adjacencies, policy)


def _unit(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    provided = facts.plan.dataset.unit
    if policy.units is not None and provided not in policy.units:
        yield _not_allowed("policy_unit", "/dataset/unit", provided, policy.units, policy)


def _sampler(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    for place, phase in enumerate(facts.plan.phases):
        provided = phase.sampling.scheme
        if policy.samplers is not None and provided not in policy.samplers:
            where = facts.plan.pointer(place, "sampling", "scheme")
            yield _not_allowed("policy_sampler", where, provided, policy.samplers, policy)


def _engine(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    if policy.engines is None or not facts.engines:
        return
    (name, _), *_ = facts.engines
    if name not in policy.engines:
        yield Reason(
            code="policy_engine",
            message=f"the engine {name} decided; the policy {policy.name} lets "
            f"{_listed(policy.engines)} decide.",
            remedy="Choose sampling and noise that one of these covers; `certify --engine` shows "
            "which do.",
        )


def _accountant_version(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    for name, version in facts.engines:
        least = policy.accountants.get(name)
        if least is not None and not at_least(version, least):
            yield Reason(
                code="policy_accountant_version",
                message=f"{name} is {version}; the policy {policy.name} asks for {least} or newer.",
                remedy="Certify the plan with a release that has it.",
            )


def _second_opinion(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    if policy.second_opinion == "required" and len(facts.engines) == 1:
        yield Reason(
            code="policy_second_opinion",
            message=f"only {facts.engines[0][0]} was used; the policy {policy.name} asks for a "
            "second engine.",
            remedy="Choose sampling and noise that two engines cover, and ask for both.",
        )


def _proof(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    if policy.proof == "required" and facts.epsilon is not None and facts.unproved:
        yield Reason(
            code="policy_proof",
            message=f"the policy {policy.name} asks for a proof that the checker accepts, and "
            f"there is none ({facts.unproved}).",
            remedy="Certify it with --prove, or choose sampling and noise that the checker covers.",
        )


def _epsilon_cap(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    cap = policy.cap(facts.plan.dataset.name).epsilon
    if cap is not None and facts.epsilon is not None and facts.epsilon > cap:
        yield Reason(
            code="policy_epsilon_cap",
            pointer="/target/epsilon",
            message=f"ε ≤ {decimal_up(facts.epsilon, DIGITS)} is proved; the policy {policy.name} "
            f"allows {decimal_down(cap, DIGITS)}.",
            remedy=f"Set target.epsilon to at most {decimal_down(cap, DIGITS)}. This needs "
            f"{_cap_needs(facts, cap)}, with the rest of the plan unchanged.",
        )


def _cap_needs(facts: PolicyFacts, cap: float) -> str:
    target = facts.plan.target.epsilon
    if target is not None and target <= cap:
        return "no more than the plan's own target does"
    return facts.cap_needs or "more noise or fewer steps"


def _group_cap(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    cap = policy.group_cap
    if cap is None or facts.epsilon is None:
        return
    relation = cap.relation or facts.plan.adjacency
    bounds = [
        epsilon
        for records, by, epsilon in facts.groups
        if records >= cap.records and by == relation
    ]
    unit = facts.plan.dataset.unit
    group = f"{cap.records} {unit}{'' if cap.records == 1 else 's'} under {relation}"
    allowed = decimal_down(cap.epsilon, DIGITS)
    if not bounds:
        yield Reason(
            code="policy_group_cap",
            pointer="/adjacency" if relation != facts.plan.adjacency else "",
            message=f"the policy {policy.name} asks for ε ≤ {allowed} of {group}, and no bound of "
            f"them is proved ({facts.unbounded}).",
            remedy="Certify it with --records and --relation, or choose sampling and noise for "
            "which such groups are bounded.",
        )
    elif min(bounds) > cap.epsilon:
        yield Reason(
            code="policy_group_cap",
            pointer="/target/epsilon",
            message=f"ε ≤ {decimal_up(min(bounds), DIGITS)} is proved of {group}; the policy "
            f"{policy.name} allows {allowed}.",
            remedy="Lower target.epsilon and raise the noise to what it needs, or run fewer steps.",
        )


def _mu_cap(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    cap = policy.cap(facts.plan.dataset.name).mu
    if cap is None or facts.epsilon is None:
        return
    allowed = decimal_down(cap, DIGITS)
    if facts.mu is None:
        yield Reason(
            code="policy_mu_cap",
            message=f"the policy {policy.name} asks for μ ≤ {allowed}, and no Gaussian curve is "
            f"proved to bound the guarantee at every ε ({facts.no_mu}).",
            remedy="Certify it with --mu, or choose sampling and noise for which there is one.",
        )
    elif facts.mu > cap:
        yield Reason(
            code="policy_mu_cap",
            pointer="/target/epsilon",
            message=f"μ ≤ {decimal_up(facts.mu, DIGITS)} is proved; the policy {policy.name} "
            f"allows {allowed}.",
            remedy="Lower target.epsilon and raise the noise to what it needs, or run fewer steps.",
        )


def _delta_cap(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    cap = policy.cap(facts.plan.dataset.name).delta
    if cap is not None and facts.delta is not None and facts.delta > cap:
        yield Reason(
            code="policy_delta_cap",
            pointer="/target/delta",
            message=f"the guarantee holds at δ = {decimal_up(facts.delta, DIGITS)}; the policy "
            f"{policy.name} allows {decimal_down(cap, DIGITS)}.",
            remedy=f"Set target.delta to at most {decimal_down(cap, DIGITS)}.",
        )


def _large_delta(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    if policy.allow_large_delta or facts.delta is None:
        return
    size = facts.plan.dataset.size
    if size is None:
        yield Reason(
            code="policy_large_delta",
            pointer="/dataset/size",
            message=f"the policy {policy.name} asks for δ below 1/N, and N is not given.",
            remedy="Give dataset.size.",
        )
    elif exact_fraction(facts.delta) * size >= 1:
        yield Reason(
            code="policy_large_delta",
            pointer="/target/delta",
            message=f"δ = {decimal_up(facts.delta, DIGITS)} is not below 1/N = 1/{size}, which the "
            f"policy {policy.name} asks for.",
            remedy="Choose a smaller δ; allow_large_delta does not help under this policy.",
        )


def _budget(policy: Policy, facts: PolicyFacts) -> Iterator[Reason]:
    if policy.budget == "optional" or facts.budget == "fits":
        return
    message, remedy = {
        "exceeded": ("its cost does not fit the data set's budget", "Train with a smaller ε."),
        "none": ("the data set has no budget", "Ask for a budget for it."),
        "unknown": ("no ledger was checked for a budget", "Certify the plan at the service."),
    }[facts.budget]
    yield Reason(
        code="policy_budget",
        pointer="/dataset/name",
        message=f"the policy {policy.name} asks that the run can be reserved, and {message}.",
        remedy=remedy,
    )


RULES: Mapping[str, RuleCheck] = {
    "policy_dataset": _dataset,
    "policy_adjacency": _adjacency,
    "policy_unit": _unit,
    "policy_sampler": _sampler,
    "policy_engine": _engine,
    "policy_accountant_version": _accountant_version,
    "policy_second_opinion": _second_opinion,
    "policy_proof": _proof,
    "policy_epsilon_cap": _epsilon_cap,
    "policy_group_cap": _group_cap,
    "policy_delta_cap": _delta_cap,
    "policy_mu_cap": _mu_cap,
    "policy_large_delta": _large_delta,
    "policy_budget": _budget,
}
"""Every rule by the code of its reasons, in the order in which they are reported."""
WAIVABLE = frozenset(RULES) - {"policy_dataset", "policy_budget"}
"""The rules that can be waived: not the data sets of a policy, and not the budget."""


def at_least(version: str, least: str) -> bool:
    """Whether an engine's version, such as ``dp-accounting 0.6.0``, is ``least`` or newer.

    Unreadable versions and pre-releases never are.

    >>> at_least("dp-accounting 0.10.0", "0.6"), at_least("0.6.0rc1", "0.6")
    (True, False)
    """
    result = re.fullmatch(
        r"(?:.{1,64} )?([0-9]{1,9}(?:\.[0-9]{1,9}){0,9})(?:\.post[0-9]+)?(?:\+\S*)?", version
    )
    return result is not None and _numbers(result[1]) >= _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers without trailing zeros, because 0.6 and 0.6.0 are one release."""
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", version).split("."))


def _not_allowed(
    code: str, pointer: str, value: str, allowed: Sequence[str], policy: Policy
) -> Reason:
    return Reason(
        code=code,
        pointer=pointer,
        message=f"{value} is not allowed by the policy {policy.name}.",
        remedy=f"Use {_listed(allowed, last='or')}, and train so.",
    )


def _listed(names: Sequence[str] | str, last: str = "and") -> str:
    """Join names as in a sentence; a long list is shortened."""
    if isinstance(names, str):
        return names
    if not names:
        return "none"
    shown = [*names[:5], *([f"{len(names) - 5} more"] if len(names) > 5 else [])]
    return " ".join([", ".join(shown[:-1]), last, shown[-1]]) if len(shown) > 1 else shown[0]
