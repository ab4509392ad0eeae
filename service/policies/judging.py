"""Judging a plan by the rules in force, and noticing when they change meanwhile.

A question is a plan, its policy and the waivers in force for whoever asks; its certificate's
id follows from it before any accounting. Accounting takes its time, so the rules are looked
at again in the transaction that keeps the certificate: if they are others by then, what was
found is judged by those, and the certificate names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from sqlalchemy import Connection

from affidavit.certificate import Assessment, certificate_id
from affidavit.certificate.policy import Budget, Policy, Waiver
from affidavit.plan import Plan
from affidavit.service.policies.rulebook import Rulebook
from affidavit.service.policies.store import PolicyStore, rely


class RulesChanged(Exception):
    """The rules are others than those that a certificate was judged by."""


@dataclass(frozen=True)
class Question:
    """A plan under the policy and the waivers that are in force for whoever asks."""

    plan: Plan
    requester: str
    policy: Policy
    waivers: tuple[Waiver, ...]

    @cached_property
    def id(self) -> str:
        """The id of its certificate."""
        return certificate_id(self.plan, self.policy, self.waivers)

    def with_id(self, known: str) -> Question:
        """This question; its id was worked out before."""
        self.__dict__["id"] = known  # where cached_property keeps it
        return self


def budget_of(found: Assessment, ledger: Mapping[str, Any] | None) -> Budget:
    """Whether the run fits its data set's budget; ``ledger`` is where that stands, if anywhere.

    What is not certified costs nothing, so that it is not told of a budget too.
    """
    if found.verdict != "certified":
        return "fits"
    if ledger is None:
        return "none"
    return "fits" if ledger["fits"] else "exceeded"


def waits_for_budget(verdict: str, result: str) -> bool:
    """Whether a result, as it is kept, is a refusal that another budget may end.

    A budget is no part of the question, so such a plan is judged anew when it is sent again.
    """
    return verdict == "refused" and '"code": "policy_budget"' in result


def question(store: PolicyStore, plan: Plan, requester: str) -> Question:
    """The question as it stands now; raises ``Altered``."""
    return question_by(store.rulebook(), plan, requester)


def require_unchanged(store: PolicyStore, connection: Connection, *asked: Question) -> None:
    """Hold the rules still until the transaction ends; raises ``RulesChanged``, ``Altered``."""
    rely(connection)
    rules = store.rulebook_in(connection)
    if any(question_by(rules, item.plan, item.requester) != item for item in asked):
        raise RulesChanged


def question_by(rules: Rulebook, plan: Plan, requester: str) -> Question:
    """The question by ``rules``."""
    granted = rules.waivers_of(plan, requester, datetime.now(UTC))
    return Question(plan, requester, rules.policy_of(plan.dataset.name), granted)
