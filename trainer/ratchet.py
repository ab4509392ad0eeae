"""The ratchet: one key a step, each made from the one before and none found from a later one.

K_(t+1) = H(K_t), with H a derived key (HKDF). Step t has the key K_t, from which what it draws
is derived by purpose: its noise, and its lot where lots are independent. A checkpoint holds
the next key alone, so that whoever reads it learns nothing of noise that was already drawn.
A run that goes on stirs fresh entropy in, so that no two runs from one checkpoint, or from
a copy of its folder, ever share a key.

Reference: RFC 5869 (HKDF).

>>> ratchet = Ratchet(bytes(32))
>>> ratchet.next().key == derived_key(bytes(32), "affidavit next")
True
>>> len({Ratchet.fresh().commitment for _ in range(3)})
3
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from affidavit.trainer.noise.chacha import KEY_BYTES, derived_key

Entropy = Callable[[int], bytes]
"""From a number of bytes to as many fresh ones; ``os.urandom`` but in tests."""


@dataclass(frozen=True, slots=True)
class Ratchet:
    """The key of one step."""

    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls, entropy: Entropy = os.urandom) -> Ratchet:
        """The first key of a run."""
        return cls(entropy(KEY_BYTES))

    def next(self) -> Ratchet:
        """The key of the next step."""
        return Ratchet(derived_key(self.key, "affidavit next"))

    def stirred(self, entropy: Entropy = os.urandom) -> Ratchet:
        """A key that depends on this one and on fresh entropy."""
        fresh = hashlib.sha256(self.key + entropy(KEY_BYTES)).digest()
        return Ratchet(derived_key(fresh, "affidavit stirred"))

    def key_for(self, purpose: str) -> bytes:
        """This step's key for one purpose."""
        return derived_key(self.key, f"affidavit step {purpose}")

    @property
    def commitment(self) -> str:
        """What a run record says of the key; equal only for equal keys."""
        stated = derived_key(self.key, "affidavit commitment")
        return "sha256:" + hashlib.sha256(stated).hexdigest()


def committed(secret: bytes, about: str, value: str) -> str:
    """A commitment to ``value``, which whoever has ``secret`` can open by computing it again."""
    key = derived_key(secret, f"affidavit committed {about}")
    return "sha256:" + hashlib.sha256(key + value.encode()).hexdigest()
