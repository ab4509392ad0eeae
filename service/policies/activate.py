"""Activate a policy: from the moment it is kept, plans of its data sets are judged by it.

Versions of one name count up from 1 without a gap, so that two people who write at once
cannot overwrite each other unseen, and no data set comes under two policies. Certificates
that were issued before keep naming the version that they were judged by; a plan that is
asked for again gets a new certificate, because the policy is part of the question.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from affidavit.certificate import SigningPort
from affidavit.certificate.policy import BUILT_IN, Policy
from affidavit.service.log.entries import append
from affidavit.service.policies.rulebook import Overlap
from affidavit.service.policies.store import KeptPolicy, PolicyStore, change, keep_policy


class Unacceptable(Exception):
    """A policy that is well-formed and cannot be activated here; with a code and a remedy."""

    def __init__(self, code: str, pointer: str, message: str, remedy: str) -> None:
        super().__init__(f"{message} {remedy}")
        self.code = code
        self.pointer = pointer
        self.message = message
        self.remedy = remedy


def activate(
    store: PolicyStore, policy: Policy, key: SigningPort, *, actor: str, at: datetime
) -> tuple[KeptPolicy, bool]:
    """The policy as it is kept, and whether this call activated it.

    Raises ``Unacceptable`` and ``Altered``. A version that is there already is answered as
    it is.
    """
    with store.writer.begin() as connection:
        change(connection)
        rulebook = store.rulebook_in(connection)
        last = rulebook.policies.get(policy.name)
        if last == policy:
            kept = store.version(policy.name, policy.version)
            assert kept is not None
            return kept, False
        _require_next(policy, last)
        try:
            rulebook.with_policy(policy)
        except Overlap as overlap:
            raise Unacceptable(
                "policy_overlap",
                "/datasets",
                f"{overlap}.",
                f"Take it out of a new version of {overlap.other} first.",
            ) from None
        kept = keep_policy(connection, policy, key, actor, at)
        _log(connection, kept, key)
        return kept, True


def _require_next(policy: Policy, last: Policy | None) -> None:
    if policy.name == BUILT_IN.name:
        raise Unacceptable(
            "policy_name_reserved",
            "/name",
            f"{BUILT_IN.name} is the name of the built-in policy.",
            "Choose another name; datasets: default makes it the default.",
        )
    wanted = 1 if last is None else last.version + 1
    if policy.version != wanted:
        raise Unacceptable(
            "policy_version",
            "/version",
            f"the next version of {policy.name} is {wanted}, not {policy.version}.",
            f"Look at what is active, and give your changes as version {wanted}.",
        )


def _log(connection: Connection, kept: KeptPolicy, key: SigningPort) -> None:
    append(
        connection,
        "policy",
        kept.policy.digest(),
        {
            "name": kept.policy.name,
            "version": kept.policy.version,
            "digest": kept.policy.digest(),
            "key_id": key.key_id,
            "policy": kept.policy.as_document(),
        },
        actor=kept.created_by,
        at=kept.created_at,
    )
