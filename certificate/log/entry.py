"""Log entries: the bytes of a leaf, and the proof of a certificate's place in the log.

A leaf is RFC 8785 canonical JSON of one event: its kind, subject, actor and time::

    {"actor":"token:ci","at":"2026-11-21T10:00:00.000000+00:00",
     "body":{"envelope":"sha256:...","plan_digest":"sha256:...","verdict":"certified",...},
     "kind":"certificate","subject":"sha256:..."}

A certificate's entry derives from its signed envelope alone, so anyone who holds the bundle
computes the same bytes without a database. ``envelope`` is the sha256 of the canonical JSON of
the whole envelope, signature included; every other field comes from the statement,
``supersedes`` only where there was an earlier issue. A verdict other than ``certified`` makes
the entry a ``refusal``.

A bundle's ``log`` part gives the place and its proof::

    {"leafIndex": 17, "treeSize": 1204, "inclusionProof": ["base64", ...],
     "checkpoint": "affidavit.example.com/log\\n1204\\n..."}

``treeSize``, which the checkpoint repeats, is optional. Consistency proofs are documents of
their own, ``{"first": 900, "second": 1204, "hashes": ["base64", ...]}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from affidavit.certificate.dsse import Envelope
from affidavit.certificate.keys import parse_instant
from affidavit.certificate.log.note import BadNote, decode_base64, encode_base64
from affidavit.certificate.log.tree import HASH_BYTES, MOST_LEAVES, leaf_hash
from affidavit.plan import canonical_json, digest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
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


def certificate_entry(envelope: Envelope, statement: Mapping[str, Any]) -> LogEntry:
    """The entry of the certificate that ``envelope`` holds; ``statement`` is its payload.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` when the statement lacks a part.
    """
    predicate = statement["predicate"]
    return LogEntry(
        kind="certificate" if predicate["verdict"] == "certified" else "refusal",
        subject=predicate["certificate_id"],
        actor=predicate["requester"],
        at=parse_instant(predicate["validity"]["not_before"]),
        body={
            "envelope": envelope.digest,
            "key_id": envelope.key_id,
            "plan_digest": digest_of(predicate["plan"]),
            "policy": predicate["policy"],
            "verdict": predicate["verdict"],
            **({"supersedes": predicate["supersedes"]} if predicate.get("supersedes") else {}),
        },
    )


MOST_HASHES = 128
"""More than any proof in a tree of 2^53 leaves has."""


class BadLogPart(Exception):
    """A document about a log does not have the form of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inclusion:
    """A certificate's place in a log, with the proof for the tree of ``checkpoint``."""

    leaf_index: int
    tree_size: int | None
    proof: tuple[bytes, ...]
    checkpoint: str

    def as_document(self) -> dict[str, Any]:
        """The part as JSON data."""
        return {
            "leafIndex": self.leaf_index,
            **({} if self.tree_size is None else {"treeSize": self.tree_size}),
            "inclusionProof": [encode_base64(item) for item in self.proof],
            "checkpoint": self.checkpoint,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Consistency:
    """A proof that the tree of ``second`` leaves begins with that of ``first``."""

    first: int
    second: int
    hashes: tuple[bytes, ...]

    def as_document(self) -> dict[str, Any]:
        """The proof as JSON data."""
        return {
            "first": self.first,
            "second": self.second,
            "hashes": [encode_base64(hash_) for hash_ in self.hashes],
        }


def read_inclusion(document: Any) -> Inclusion:
    """The part of JSON data; raises ``BadLogPart`` for any other shape."""
    fields = _fields(document, {"leafIndex", "inclusionProof", "checkpoint"}, {"treeSize"})
    if not isinstance(fields["checkpoint"], str):
        raise BadLogPart("checkpoint is not a string")
    return Inclusion(
        leaf_index=_count(fields["leafIndex"], "leafIndex"),
        tree_size=_count(fields["treeSize"], "treeSize") if "treeSize" in fields else None,
        proof=_hashes(fields["inclusionProof"], "inclusionProof"),
        checkpoint=fields["checkpoint"],
    )


def read_consistency(document: Any) -> Consistency:
    """A proof as ``GET /v1/log/proof/consistency`` answers it; raises ``BadLogPart``."""
    fields = _fields(document, {"first", "second", "hashes"}, set())
    return Consistency(
        first=_count(fields["first"], "first"),
        second=_count(fields["second"], "second"),
        hashes=_hashes(fields["hashes"], "hashes"),
    )


def _fields(document: Any, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(document, dict) or not required <= document.keys() <= required | optional:
        raise BadLogPart(f"it must have exactly the fields {', '.join(sorted(required))}")
    return document


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_LEAVES:
        raise BadLogPart(f"{what} is not a number of leaves")
    return value


def _hashes(document: Any, what: str) -> tuple[bytes, ...]:
    if not isinstance(document, list) or len(document) > MOST_HASHES:
        raise BadLogPart(f"{what} is not a list of at most {MOST_HASHES} hashes")
    return tuple(_hash(item, what) for item in document)


def _hash(value: Any, what: str) -> bytes:
    if not isinstance(value, str):
        raise BadLogPart(f"{what} contains invalid base64")
    try:
        result = decode_base64(value, what)
    except BadNote as error:
        raise BadLogPart(str(error)) from None
    if len(result) != HASH_BYTES:
        raise BadLogPart(f"{what} contains an entry that is not a hash of {HASH_BYTES} bytes")
    return result
