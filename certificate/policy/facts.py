"""What a policy judges by: the plan, and the few facts of its accounting that rules look at.

They can be had from a fresh assessment and from the signed statement of an old one, so that
the same rules issue a certificate, check it later, and tell which of the certificates at hand
another policy would refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from affidavit.accountants import decimal_up
from affidavit.certificate.assessment import Assessment, Verdict
from affidavit.plan import Plan, plan_from

Budget = Literal["fits", "exceeded", "none", "unknown"]
"""Whether the run's cost can be reserved; there may be no budget, or nobody who knows it."""
CODE_PREFIX = "policy_"
"""Of the code of every reason that a policy gives, and of no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """``verdict`` is the accountancy's own; ``engines`` are (name, version), the first decided.

    ``epsilon`` (nats) and ``delta`` are upper bounds as a certificate states them, rounded up.
    """

    plan: Plan
    verdict: Verdict
    epsilon: float | None
    delta: float | None
    engines: tuple[tuple[str, str], ...]
    budget: Budget

    @classmethod
    def of(cls, plan: Plan, found: Assessment, budget: Budget = "unknown") -> Facts:
        """The facts of an assessment that no policy has judged yet."""
        return cls(
            plan=plan,
            verdict=found.verdict,
            epsilon=None if found.epsilon is None else float(decimal_up(found.epsilon.upper)),
            delta=None if found.delta is None else float(decimal_up(found.delta.upper)),
            engines=tuple(
                (accountant.name, accountant.version) for accountant in found.accountants
            ),
            budget=budget,
        )

    @classmethod
    def said_in(cls, predicate: Mapping[str, Any], budget: Budget = "unknown") -> Facts:
        """The facts that a statement's predicate says; ``KeyError`` and the like if it does not."""
        guarantee = predicate["guarantee"]
        return cls(
            plan=plan_from(predicate["plan"]),
            verdict=accounted(predicate),
            epsilon=None if guarantee is None else float(guarantee["epsilon"]["upper"]),
            delta=None if guarantee is None else float(guarantee["delta"]["upper"]),
            engines=tuple((item["name"], item["version"]) for item in predicate["accountants"]),
            budget=budget,
        )


def accounted(predicate: Mapping[str, Any]) -> Verdict:
    """The accountancy's verdict: ``certified`` where policy alone is why it is refused."""
    verdict: Verdict = predicate["verdict"]
    codes = [str(reason["code"]) for reason in predicate["reasons"]]
    return "certified" if refused_by_policy(verdict, codes) else verdict


def refused_by_policy(verdict: str, codes: Collection[str]) -> bool:
    """Whether policy alone is why a plan is refused, so that its numbers hold.

    >>> refused_by_policy("refused", ["policy_sampler"]), refused_by_policy("refused", ["unsound"])
    (True, False)
    """
    by_policy = bool(codes) and all(code.startswith(CODE_PREFIX) for code in codes)
    return verdict == "refused" and by_policy
