"""A certificate in a log in memory, for the tests of log proofs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from affidavit.assessment import certify
from affidavit.certificate.issuance import Certificate, issue
from affidavit.plan import plan_from
from affidavit.trust import KeyRole, SigningKey, read_envelope
from affidavit.trust.log import (
    Consistency,
    Inclusion,
    certificate_entry,
    merkle_tree,
    sign_checkpoint,
)

ORIGIN = "example.com/log"
NOW = datetime.now(UTC).replace(microsecond=0)


def key_for(*roles: KeyRole) -> SigningKey:
    """A key for ``roles``, or for all, whose window was open before ``NOW``."""
    key = SigningKey.generate("test", roles=roles or None)
    return replace(key, public=replace(key.public, not_before=NOW - timedelta(hours=1)))


KEY = key_for()


@dataclass
class Log:
    """A log in memory with a certificate at ``index``."""

    nodes: dict[merkle_tree.Place, bytes]
    index: int
    certificate: Certificate

    def root(self, size: int) -> bytes:
        (result,) = merkle_tree.assemble([merkle_tree.Range(0, size)], self.nodes)
        return result

    def checkpoint(
        self,
        size: int,
        *,
        key: SigningKey = KEY,
        origin: str = ORIGIN,
        root: bytes | None = None,
        at: datetime = NOW,
    ) -> str:
        hashed = self.root(size) if root is None else root
        return sign_checkpoint(key, origin=origin, size=size, root_hash=hashed, at=at)

    def part(self, size: int, **checkpoint: Any) -> dict[str, Any]:
        return Inclusion(
            leaf_index=self.index,
            tree_size=size,
            proof=tuple(
                merkle_tree.assemble(merkle_tree.inclusion_path(self.index, size), self.nodes)
            ),
            checkpoint=self.checkpoint(size, **checkpoint),
        ).as_document()

    def bundle(self, size: int, **checkpoint: Any) -> dict[str, Any]:
        return {**json.loads(self.certificate.bundle), "log": self.part(size, **checkpoint)}

    def consistency(self, first: int, second: int) -> Consistency:
        hashes = tuple(
            merkle_tree.assemble(merkle_tree.consistency_path(first, second), self.nodes)
        )
        return Consistency(first=first, second=second, hashes=hashes)


def log_of(certificate: Certificate, index: int, size: int, salt: bytes = b"") -> Log:
    envelope = read_envelope(json.loads(certificate.bundle)["envelope"])
    own = certificate_entry(envelope, certificate.statement).leaf_hash
    tree, nodes = merkle_tree.Frontier(), {}
    for item in range(size):
        nodes.update(
            tree.append(own if item == index else merkle_tree.leaf_hash(salt + b"%d" % item))
        )
    return Log(nodes, index, certificate)


def certified(document: dict[str, Any], key: SigningKey) -> Certificate:
    """A certificate of the plan in ``document``."""
    result = certify(plan_from(document), second_opinion=False)
    return issue(result, key, requester="tests", issued_at=NOW)
