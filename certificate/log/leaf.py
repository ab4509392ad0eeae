"""What is logged: the bytes of a leaf, and how a certificate's follow from its bundle.

A leaf is RFC 8785 canonical JSON of what happened, to what, through whom and when::

    {"actor":"token:ci","at":"2026-11-21T10:00:00.000000+00:00",
     "body":{"envelope":"sha256:...","plan_digest":"sha256:...","verdict":"certified",...},
     "kind":"certificate","subject":"sha256:..."}

A certificate's entry is made of nothing but its signed envelope, so that whoever holds
the bundle, and no database, comes to the same bytes. ``envelope`` is the sha256 of the
canonical JSON of the whole envelope, signature included; every other field is taken from
the statement, ``supersedes`` only where there was an issue before. A verdict other than
``certified`` makes the entry a ``refusal``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from affidavit.certificate.envelope import Envelope
from affidavit.certificate.log.tree import leaf_hash
from affidavit.certificate.statement import TIME_FORMAT
from affidavit.plan import canonical_json, digest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One thing that happened; ``body`` is JSON data without private values."""

    kind: str
    subject: str
    actor: str
    at: datetime
    body: Mapping[str, Any]

    @property
    def content(self) -> bytes:
        """The bytes of the leaf."""
        return canonical_json(
            {
                "kind": self.kind,
                "subject": self.subject,
                "actor": self.actor,
                "at": self.at.astimezone(UTC).isoformat(timespec="microseconds"),
                "body": dict(self.body),
            }
        )

    @property
    def leaf_hash(self) -> bytes:
        """The hash of the leaf."""
        return leaf_hash(self.content)


def certificate_entry(envelope: Envelope, statement: Mapping[str, Any]) -> Entry:
    """The entry of the certificate that ``envelope`` holds; ``statement`` is its payload.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` when the statement lacks a part.
    """
    predicate = statement["predicate"]
    issued_at = datetime.strptime(predicate["validity"]["not_before"], TIME_FORMAT)
    return Entry(
        kind="certificate" if predicate["verdict"] == "certified" else "refusal",
        subject=predicate["certificate_id"],
        actor=predicate["requester"],
        at=issued_at.replace(tzinfo=UTC),
        body={
            "envelope": envelope.digest,
            "key_id": envelope.key_id,
            "plan_digest": digest_of(predicate["plan"]),
            "policy": predicate["policy"],
            "verdict": predicate["verdict"],
            **({"supersedes": predicate["supersedes"]} if predicate.get("supersedes") else {}),
        },
    )
