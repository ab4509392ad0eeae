"""The schema of an empty database: the service's tables, and what they refuse.

It is made of the tables as this release has them (``database_admin.metadata``) and stamped as
the newest revision. A revision changes a database that an earlier release made, so whoever changes
a table adds one.

Reference: Alembic, Building an Up to Date Database from Scratch.
"""

from __future__ import annotations

from collections.abc import Mapping

from alembic import op

from affidavit.migrations.triggers import install, protect, refuse
from affidavit.service.operation.database_admin import metadata

CHANGING = frozenset(
    {"certifications", "log_pending", "run_leases", "saved_views", "sessions", "token_uses"}
)
"""Queues, counters and what is not evidence; every other table only grows."""

_SAME_ISSUE = (
    "certificate_id = NEW.certificate_id AND untrusted = NEW.untrusted AND issue = NEW.issue"
)
_ITS_ENVELOPE = (
    "id = NEW.certificate_id AND untrusted = NEW.untrusted AND issue = NEW.issue "
    "AND envelope_digest = NEW.envelope_digest"
)

RULES: Mapping[str, Mapping[str, str]] = {
    "approvals": {
        "four eyes: who asked for a certificate cannot approve it": (
            "EXISTS (SELECT 1 FROM requests WHERE certificate_id = NEW.certificate_id "
            "AND requester = NEW.approver)"
        ),
        "four eyes: who asked for this issue is not known": (
            f"EXISTS (SELECT 1 FROM requests WHERE {_SAME_ISSUE} AND requester LIKE 'anonymous@%')"
        ),
        "this envelope awaits no approval": (
            f"NOT EXISTS (SELECT 1 FROM certificates WHERE {_ITS_ENVELOPE} "
            "AND approvals_given < approvals_required)"
        ),
        "this issue is superseded": (
            "EXISTS (SELECT 1 FROM certificates WHERE id = NEW.certificate_id "
            "AND untrusted = NEW.untrusted AND issue > NEW.issue)"
        ),
        "this issue is revoked": f"EXISTS (SELECT 1 FROM revocations WHERE {_SAME_ISSUE})",
        # Of a unique constraint alone, INSERT OR REPLACE in SQLite would remove the old row.
        "approvals is append-only: this approver has decided": (
            f"EXISTS (SELECT 1 FROM approvals WHERE {_SAME_ISSUE} AND approver = NEW.approver)"
        ),
        "this issue is rejected": (
            f"EXISTS (SELECT 1 FROM approvals WHERE {_SAME_ISSUE} AND decision = 'reject')"
        ),
    },
    "certificates": {
        "an issue was left out": (
            "NEW.issue > 1 AND NOT EXISTS (SELECT 1 FROM certificates WHERE id = NEW.id "
            "AND untrusted = NEW.untrusted AND issue = NEW.issue - 1)"
        ),
        "it names more approvals than were given": (
            "NEW.approvals_given > 0 AND NEW.approvals_given > (SELECT count(*) FROM approvals "
            "WHERE certificate_id = NEW.id AND untrusted = NEW.untrusted "
            "AND issue = NEW.issue - 1 AND decision = 'approve')"
        ),
    },
    "revocations": {
        "there is no such envelope": (
            f"NOT EXISTS (SELECT 1 FROM certificates WHERE {_ITS_ENVELOPE})"
        ),
        "revocations is append-only: this issue is revoked": (
            f"EXISTS (SELECT 1 FROM revocations WHERE {_SAME_ISSUE})"
        ),
    },
    "status_lists": {
        "the sequence number of status lists only grows": (
            "NEW.sequence <= (SELECT max(sequence) FROM status_lists)"
        ),
    },
}
"""What a new row must not be, by table: the message and the condition in SQL."""

PERSONAL_TOKEN = {
    "four eyes: this token is a person''s, who decides by their own name": (
        "NEW.approver LIKE 'token:%' AND EXISTS (SELECT 1 FROM tokens "
        "WHERE 'token:' || name = NEW.approver AND person IS NOT NULL)"
    ),
}
"""A person who approves by a token would not be recognised as the requester."""

WAITING = {
    "this entry has no place in the tree yet": (
        "NOT EXISTS (SELECT 1 FROM log_leaves WHERE entry_id = OLD.entry_id)"
    ),
}
"""What was logged counts while it waits (``log.entries.logged``); it must not vanish then."""


def create() -> None:
    """Create the tables, protect those that only grow, and install the guards."""
    install()
    metadata.create_all(op.get_bind(), checkfirst=False)
    for table in metadata.sorted_tables:
        if table.name not in CHANGING:
            protect(table.name)
    for name, rules in RULES.items():
        refuse(name, rules)
    refuse("approvals", PERSONAL_TOKEN, trigger="approvals_guard_person")
    for event in ("UPDATE", "DELETE"):
        refuse("log_pending", WAITING, f"log_pending_guard_{event.lower()}", event)
