"""Judging a plan by the rules in force, and noticing when they change meanwhile.

A question is a plan, its policy and the waivers in force for whoever asks; its certificate's
id follows from it before any accounting. Accounting takes its time, so the rules are looked
at again in the transaction that keeps the certificate: if they are others by then, what was
found is judged by those, and the certificate names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection

from affidavit.certificate.issue import certificate_id
from affidavit.certificate.policy.document import Policy
from affidavit.certificate.policy.waiver import Waiver
from affidavit.plan.model import Plan
from affidavit.service.policies.rulebook import Rulebook
from affidavit.service.policies.store import PolicyStore, rely


class RulesChanged(Exception):
    """The rules are others than those that a certificate was judged by."""


@dataclass(frozen=True, slots=True)
class Question:
    """A plan under the policy and the waivers that are in force for whoever asks."""

    plan: Plan
    requester: str
    policy: Policy
    waivers: tuple[Waiver, ...]

    @property
    def id(self) -> str:
        """The id of its certificate."""
        return certificate_id(self.plan, self.policy, self.waivers)


def question(store: PolicyStore, plan: Plan, requester: str) -> Question:
    """The question as it stands now; raises ``Altered``."""
    return _question(store.rulebook(), plan, requester)


def require_unchanged(store: PolicyStore, connection: Connection, asked: Question) -> None:
    """Hold the rules still until the transaction ends; raises ``RulesChanged``, ``Altered``."""
    rely(connection)
    if _question(store.rulebook_in(connection), asked.plan, asked.requester) != asked:
        raise RulesChanged


def _question(rules: Rulebook, plan: Plan, requester: str) -> Question:
    granted = rules.waivers_of(plan, requester, datetime.now(UTC))
    return Question(plan, requester, rules.policy_of(plan.dataset.name), granted)
