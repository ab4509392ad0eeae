"""The rules, one function each: what a plan would have to change to be let through.

A rule looks at the facts and at the policy and gives its reasons, each with a stable code, a
pointer into the plan and a remedy. Rules only ever take away: a policy with one more rule, a
lower cap or a shorter list lets through no plan that the laxer one does not.

>>> from affidavit.certificate.policy.document import BUILT_IN
>>> sorted(RULES)[:3]
['policy_accountant_version', 'policy_adjacency', 'policy_budget']
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from affidavit.accountants import decimal_down, decimal_up
from affidavit.certificate.policy.document import Policy
from affidavit.certificate.policy.facts import Facts
from affidavit.plan import Reason, exactly

Rule = Callable[[Policy, Facts], Iterator[Reason]]
DIGITS = 6


def violations(policy: Policy, facts: Facts) -> tuple[Reason, ...]:
    """Why ``policy`` does not let the plan through; nothing if it does."""
    return tuple(reason for rule in RULES.values() for reason in rule(policy, facts))


def _dataset(policy: Policy, facts: Facts) -> Iterator[Reason]:
    name = facts.plan.dataset.name
    if not policy.covers(name):
        said = "its data set has no name" if name is None else f"the data set is {name}"
        yield Reason(
            code="policy_dataset",
            pointer="/dataset/name",
            message=f"{said}, and the policy {policy.name} is for {_listed(policy.datasets)}.",
            remedy="Take the policy of this data set, or name the data set that is meant.",
        )


def _adjacency(policy: Policy, facts: Facts) -> Iterator[Reason]:
    given = facts.plan.adjacency
    if policy.adjacencies is not None and given not in policy.adjacencies:
        yield _not_allowed("policy_adjacency", "/adjacency", given, policy.adjacencies, policy)


def _unit(policy: Policy, facts: Facts) -> Iterator[Reason]:
    given = facts.plan.dataset.unit
    if policy.units is not None and given not in policy.units:
        yield _not_allowed("policy_unit", "/dataset/unit", given, policy.units, policy)


def _sampler(policy: Policy, facts: Facts) -> Iterator[Reason]:
    for place, phase in enumerate(facts.plan.phases):
        given = phase.sampling.scheme
        if policy.samplers is not None and given not in policy.samplers:
            where = facts.plan.pointer(place, "sampling", "scheme")
            yield _not_allowed("policy_sampler", where, given, policy.samplers, policy)


def _engine(policy: Policy, facts: Facts) -> Iterator[Reason]:
    if policy.engines is None or not facts.engines:
        return
    (name, _), *_ = facts.engines
    if name not in policy.engines:
        yield Reason(
            code="policy_engine",
            pointer="",
            message=f"the engine {name} decided; the policy {policy.name} lets "
            f"{_listed(policy.engines)} decide.",
            remedy="Choose sampling and noise that one of these covers; `certify --engine` shows "
            "which do.",
        )


def _accountant_version(policy: Policy, facts: Facts) -> Iterator[Reason]:
    for name, version in facts.engines:
        least = policy.accountants.get(name)
        if least is not None and not at_least(version, least):
            yield Reason(
                code="policy_accountant_version",
                pointer="",
                message=f"{name} is {version}; the policy {policy.name} asks for {least} or newer.",
                remedy="Certify the plan with a release that has it.",
            )


def _second_opinion(policy: Policy, facts: Facts) -> Iterator[Reason]:
    if policy.second_opinion == "required" and len(facts.engines) == 1:
        yield Reason(
            code="policy_second_opinion",
            pointer="",
            message=f"only {facts.engines[0][0]} was heard; the policy {policy.name} asks for a "
            "second, independent engine.",
            remedy="Choose sampling and noise that two engines cover, and ask for both.",
        )


def _epsilon_cap(policy: Policy, facts: Facts) -> Iterator[Reason]:
    cap = policy.cap(facts.plan.dataset.name).epsilon
    if cap is not None and facts.epsilon is not None and facts.epsilon > cap:
        yield Reason(
            code="policy_epsilon_cap",
            pointer="/target/epsilon",
            message=f"ε ≤ {decimal_up(facts.epsilon, DIGITS)} is proved; the policy {policy.name} "
            f"allows {decimal_down(cap, DIGITS)}.",
            remedy=f"Set target.epsilon to at most {decimal_down(cap, DIGITS)} and raise the noise "
            "to what it needs, or run fewer steps.",
        )


def _delta_cap(policy: Policy, facts: Facts) -> Iterator[Reason]:
    cap = policy.cap(facts.plan.dataset.name).delta
    if cap is not None and facts.delta is not None and facts.delta > cap:
        yield Reason(
            code="policy_delta_cap",
            pointer="/target/delta",
            message=f"the guarantee holds at δ = {decimal_up(facts.delta, DIGITS)}; the policy "
            f"{policy.name} allows {decimal_down(cap, DIGITS)}.",
            remedy=f"Set target.delta to at most {decimal_down(cap, DIGITS)}.",
        )


def _large_delta(policy: Policy, facts: Facts) -> Iterator[Reason]:
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
    elif exactly(facts.delta) * size >= 1:
        yield Reason(
            code="policy_large_delta",
            pointer="/target/delta",
            message=f"δ = {decimal_up(facts.delta, DIGITS)} is not below 1/N = 1/{size}, which the "
            f"policy {policy.name} asks for.",
            remedy="Choose a smaller δ; allow_large_delta does not help under this policy.",
        )


def _budget(policy: Policy, facts: Facts) -> Iterator[Reason]:
    if policy.budget == "optional" or facts.budget == "fits":
        return
    message, remedy = {
        "exceeded": ("its cost does not fit the data set's budget", "Train with a smaller ε."),
        "none": ("the data set has no budget", "Have a budget opened for it."),
        "unknown": ("no ledger was asked for a budget", "Certify the plan at the service."),
    }[facts.budget]
    yield Reason(
        code="policy_budget",
        pointer="/dataset/name",
        message=f"the policy {policy.name} asks that the run can be reserved, and {message}.",
        remedy=remedy,
    )


RULES: Mapping[str, Rule] = {
    "policy_dataset": _dataset,
    "policy_adjacency": _adjacency,
    "policy_unit": _unit,
    "policy_sampler": _sampler,
    "policy_engine": _engine,
    "policy_accountant_version": _accountant_version,
    "policy_second_opinion": _second_opinion,
    "policy_epsilon_cap": _epsilon_cap,
    "policy_delta_cap": _delta_cap,
    "policy_large_delta": _large_delta,
    "policy_budget": _budget,
}
"""Every rule by the code of its reasons, in the order in which they are told."""
WAIVABLE = frozenset(RULES) - {"policy_dataset", "policy_budget"}
"""What an exception may be made of. Which data sets a policy is for is no rule to except from,
and a budget that could be overdrawn by exception would be none."""


def at_least(version: str, least: str) -> bool:
    """Whether an engine's version, such as ``dp-accounting 0.6.0``, is ``least`` or newer.

    What cannot be read is not: neither is a version that comes before its release.

    >>> at_least("dp-accounting 0.10.0", "0.6"), at_least("0.6.0rc1", "0.6")
    (True, False)
    """
    found = re.fullmatch(
        r"(?:.{1,64} )?([0-9]{1,9}(?:\.[0-9]{1,9}){0,9})(?:\.post[0-9]+)?(?:\+\S*)?", version
    )
    return found is not None and _numbers(found[1]) >= _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers without zeros at the end, because 0.6 and 0.6.0 are one release."""
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", version).split("."))


def _not_allowed(
    code: str, pointer: str, given: str, allowed: Sequence[str], policy: Policy
) -> Reason:
    return Reason(
        code=code,
        pointer=pointer,
        message=f"{given} is not allowed by the policy {policy.name}.",
        remedy=f"Use {_listed(allowed, last='or')}, and train so.",
    )


def _listed(names: Sequence[str] | str, last: str = "and") -> str:
    """Names as a person lists them; a long list is cut."""
    if isinstance(names, str):
        return names
    if not names:
        return "none"
    shown = [*names[:5], *([f"{len(names) - 5} more"] if len(names) > 5 else [])]
    return " ".join([", ".join(shown[:-1]), last, shown[-1]]) if len(shown) > 1 else shown[0]
