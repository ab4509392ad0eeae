"""Log entries: the bytes of a leaf, and the proof of a certificate's place in the log.

A leaf is RFC 8785 canonical JSON of one event: its kind, subject, actor and time::

    {"actor":"token:ci","at":"2026-11-21T10:00:00.000000+00:00",
     "body":{"envelope":"sha256:...","plan_digest":"sha256:...","verdict":"certified",...},
     "kind":"certificate","subject":"sha256:..."}

A certificate's entry derives from its signed envelope alone, so that anyone with the bundle
computes the same bytes without a database. ``envelope`` is the sha256 of the canonical JSON of the
envelope with its signature. Every other field comes from the statement; ``supersedes`` is present
if there was an earlier issue. The entry of a verdict other than ``certified`` is a ``refusal``.

Everybody sees hashes of leaves, and the fields of most entries could be guessed. The leaf of every
other kind therefore has a random ``salt``, so that its hash is a commitment that hides the entry.
A certificate's hash is one already, because nobody guesses the signature in ``envelope``.

A bundle's ``log`` part gives the place and its proof::

    {"leafIndex": 17, "treeSize": 1204, "inclusionProof": ["base64", ...],
     "checkpoint": "affidavit.example.com/log\\n1204\\n..."}

``treeSize``, which the checkpoint repeats, is optional. Consistency proofs are documents of
their own, ``{"first": 900, "second": 1204, "hashes": ["base64", ...]}``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from affidavit.plan import canonical_json, digest_of
from affidavit.trust.dsse import (
    Base64,
    Envelope,
    Model,
    SignedPart,
    encode_base64,
    validated,
)
from affidavit.trust.key import parse_instant
from affidavit.trust.log import merkle_tree

UNSALTED_KINDS = frozenset({"certificate", "refusal"})
"""The kinds of entries whose leaves follow from a signed envelope alone."""
SALT_BYTES = 16


def new_salt(kind: str) -> bytes | None:
    """Return a random salt for an entry of ``kind``, or None if its leaf has none."""
    return None if kind in UNSALTED_KINDS else secrets.token_bytes(SALT_BYTES)


def leaf_content(content: str, salt: bytes | None) -> bytes:
    """Return the bytes of the leaf of an entry: its canonical JSON, with the salt if it has one.

    >>> leaf_content('{"kind":"grant","subject":"d"}', bytes(16))
    b'{"kind":"grant","salt":"AAAAAAAAAAAAAAAAAAAAAA==","subject":"d"}'
    """
    if salt is None:
        return content.encode()
    # "subject" is the last name, and a quotation mark within its value is escaped.
    before, name, subject = content.rpartition(',"subject":')
    return f'{before},"salt":"{encode_base64(salt)}"{name}{subject}'.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
    """One logged event; ``body`` is JSON data without private values."""

    kind: str
    subject: str
    actor: str
    at: datetime
    body: Mapping[str, Any]

    @property
    def content(self) -> bytes:
        """The canonical JSON, without a salt."""
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
        """The hash of the leaf, for kinds without a salt."""
        return merkle_tree.leaf_hash(self.content)


def certificate_entry(envelope: Envelope, statement: Mapping[str, Any]) -> LogEntry:
    """Return the entry of the certificate in ``envelope``, whose payload is ``statement``.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` if the statement lacks a field.
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


MAX_HASHES = 128
"""More hashes than a proof in a tree of 2^53 leaves has."""


class BadLogPart(Exception):
    """The document is malformed."""


def _require_size(size: int | None) -> int:
    if size is None:
        raise PydanticCustomError("null", "not a number of leaves")
    return size


def _validate_hash(value: bytes) -> bytes:
    if len(value) != merkle_tree.HASH_BYTES:
        raise PydanticCustomError("hash", f"not a hash of {merkle_tree.HASH_BYTES} bytes")
    return value


Hashes = Annotated[
    tuple[Annotated[Base64, AfterValidator(_validate_hash)], ...], Field(max_length=MAX_HASHES)
]
Leaves = Annotated[int, Field(ge=0, le=merkle_tree.MAX_LEAVES)]


class Inclusion(SignedPart):
    """A certificate's place in a log, with the proof for the tree of ``checkpoint``."""

    leaf_index: Annotated[Leaves, Field(alias="leafIndex")]
    tree_size: Annotated[
        Leaves | None,
        AfterValidator(_require_size),
        Field(alias="treeSize", exclude_if=lambda size: size is None),
    ] = None
    proof: Annotated[Hashes, Field(alias="inclusionProof")]
    checkpoint: str


class Consistency(SignedPart):
    """A proof that the tree of ``second`` leaves begins with that of ``first``."""

    first: Leaves
    second: Leaves
    hashes: Hashes


def read_inclusion(document: Any) -> Inclusion:
    """Parse the log part of a bundle; raises ``BadLogPart``."""
    return _read(Inclusion, document)


def read_consistency(document: Any) -> Consistency:
    """Parse an answer of ``GET /v1/log/proof/consistency``; raises ``BadLogPart``."""
    return _read(Consistency, document)


def _read(kind: type[Model], document: Any) -> Model:
    try:
        return validated(kind, document, json.dumps)
    except ValueError as error:
        raise BadLogPart(str(error)) from None
