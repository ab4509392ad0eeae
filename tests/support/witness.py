"""A witness of one log, in memory, as C2SP's tlog-witness describes one.

Signs with bytes of its own making, so that what checks cosignatures does not check itself.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from affidavit.trust import SigningKey
from affidavit.trust.log import (
    Checkpoint,
    NoteKey,
    WitnessKey,
    merkle_tree,
    open_note,
    parse_note,
    read_checkpoint,
)


def cosign(note: str, name: str, key: SigningKey, at: datetime) -> str:
    """The signature line of a witness for ``note``."""
    seconds = int(at.timestamp())
    signature = key.sign(f"cosignature/v1\ntime {seconds}\n{parse_note(note).text}".encode())
    raw = WitnessKey.of(name, key).key_hash + seconds.to_bytes(8, "big") + signature
    return f"— {name} {base64.b64encode(raw).decode()}\n"


@dataclass
class Witness:
    """Cosigns what extends the newest checkpoint that it saw of ``log``."""

    name: str
    log: NoteKey
    key: SigningKey = field(default_factory=SigningKey.generate)
    last: Checkpoint | None = None

    @property
    def verifier_key(self) -> WitnessKey:
        """Its key as the service is given it."""
        return WitnessKey.of(self.name, self.key)

    def answer(self, body: bytes, _headers: Any = None) -> tuple[int, str, bytes]:
        """Status, media type and content for a request of ``add-checkpoint``."""
        head, _, note = body.decode().partition("\n\n")
        old, *proof = head.split("\n")
        open_note(note, [self.log])
        new = read_checkpoint(note)
        size = 0 if self.last is None else self.last.size
        if old != f"old {size}":
            return 409, "text/x.tlog.size", f"{size}\n".encode()
        try:
            if self.last is not None:
                merkle_tree.verify_consistency(
                    first=size,
                    second=new.size,
                    first_root=self.last.root_hash,
                    second_root=new.root_hash,
                    proof=[base64.b64decode(line, validate=True) for line in proof],
                )
        except merkle_tree.ProofError as error:
            return 422, "text/plain", str(error).encode()
        self.last = new
        return 200, "text/plain", cosign(note, self.name, self.key, datetime.now(UTC)).encode()
