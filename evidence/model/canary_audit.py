"""An audit: the lower bound on ε that the losses of canaries prove, from one run.

Canaries are artificial records. A fair coin decides whether each takes part in the training; coins
and records are functions of a nonce that is drawn before. The first line of the run record has the
digest of the file with the nonce, so that the coins cannot be chosen afterwards. After the run the
``guesses`` / 2 canaries with the least loss are guessed to have taken part, and as many with the
greatest loss not to have. The trade-off function of the training bounds the number of right
guesses, jointly over all canaries; many right guesses refute trade-off functions, and with them
every ε and μ below some value.

The number of guesses, δ and the confidence are fixed before. All wrong refutations occur in one
event, so that the bounds hold together (``docs/theorems/one-run-audit.md``). They are about the
presence of a record: ``add_remove`` and ``zero_out``.

>>> lower_epsilon(right=100, guesses=100, canaries=1000, delta=0.0)
3.4929...
>>> lower_epsilon(right=50, guesses=100, canaries=1000, delta=1e-5)
0.0
>>> lower_mu(right=100, guesses=100, canaries=1000)
1.2255...

References: Steinke, Nasr and Jagielski, arXiv:2305.08846 (the audit); Mahloujifar, Melis and
Chaudhuri, arXiv:2410.22235 (the bound).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from affidavit.plan import MalformedPlan, canonical_json, digest_of_bytes, load_json

AUDITABLE = frozenset({"add_remove", "zero_out"})
"""The adjacencies under which neighbours differ in the presence of a record."""
CONFIDENCE = 0.95
"""The probability with which the lower bound of an audit holds at least."""
MAX_CANARIES = 1_000_000
MAX_BYTES = 64 * 1024 * 1024
VERSION = 1
MAX_SEARCHED = 100.0
"""The largest ε and μ that a lower bound can have."""
BISECTIONS = 36
"""The bisections of that range, down to 1e-9."""
_LOSSES = 'losses: give {"losses": [...]} with a finite number each.'
ROUNDING_MARGIN = 1e-9
"""The margin by which a probability must exceed 1, against rounding."""


class BadCanaries(ValueError):
    """The file of canaries or losses cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canaries:
    """``count`` canaries, all functions of ``nonce``, and the number of guesses."""

    nonce: bytes
    count: int
    guesses: int

    @classmethod
    def generate(cls, count: int, guesses: int | None = None) -> Canaries:
        """Return new canaries; ``guesses`` is even, by default a third of ``count``.

        Raises ``BadCanaries``.
        """
        return cls.of(secrets.token_bytes(32), count, guesses)

    @classmethod
    def of(cls, nonce: bytes, count: int, guesses: int | None) -> Canaries:
        """Return the canaries of a nonce of 32 bytes; raises ``BadCanaries``."""
        chosen = max(2, count // 6 * 2) if guesses is None else guesses
        return cls(nonce=nonce, count=count, guesses=chosen)

    def __post_init__(self) -> None:
        if len(self.nonce) != 32:
            raise BadCanaries("nonce: give 32 bytes in hexadecimal.")
        if not 2 <= self.count <= MAX_CANARIES:
            raise BadCanaries(f"count: give 2 to {MAX_CANARIES} canaries.")
        if self.guesses % 2 or not 2 <= self.guesses <= self.count:
            raise BadCanaries(f"guesses: give an even number from 2 to the count, {self.count}.")

    def as_bytes(self) -> bytes:
        """Return the content of the file: canonical JSON."""
        counts = {"count": self.count, "guesses": self.guesses}
        return canonical_json({"version": VERSION, "nonce": self.nonce.hex(), **counts})

    @property
    def commitment(self) -> str:
        """``sha256:`` and the digest of the file."""
        return digest_of_bytes(self.as_bytes())

    def generator(self, purpose: str) -> np.random.Generator:
        """Return a generator for ``purpose``, which is a function of the nonce."""
        seed = hashlib.sha256(self.nonce + purpose.encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(seed, "big")))

    @property
    def included(self) -> tuple[bool, ...]:
        """Whether each canary takes part: a fair coin, which is the first bit of a hash."""
        return tuple(
            hashlib.sha256(self.nonce + b"included" + index.to_bytes(8, "big")).digest()[0] < 128
            for index in range(self.count)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The lower bounds that ``right`` of ``guesses`` guesses about ``canaries`` prove.

    ``epsilon`` in nats holds at ``delta``, and ``mu`` if the training is Gaussian private, with
    probability ``confidence`` over coins and training.
    """

    canaries: int
    guesses: int
    right: int
    delta: float
    confidence: float
    epsilon: float
    mu: float

    def falsifies(self, guarantee: Mapping[str, Any]) -> bool:
        """Whether ε or μ is above a certificate's ``guarantee``."""
        mu = guarantee["mu"]
        above = self.epsilon > float(guarantee["epsilon"]["upper"])
        return above or (mu is not None and self.mu > float(mu))


def read_canaries(raw: bytes) -> Canaries:
    """Parse a file in the exact form of ``as_bytes``; raises ``BadCanaries``."""
    try:
        document = load_json(raw, MAX_BYTES).data
        canaries = Canaries(
            nonce=bytes.fromhex(document["nonce"]),
            count=int(document["count"]),
            guesses=int(document["guesses"]),
        )
    except BadCanaries:
        raise
    except (MalformedPlan, KeyError, TypeError, ValueError):
        raise BadCanaries("this is not a canaries file.") from None
    if canaries.as_bytes() != raw:
        raise BadCanaries("the file is not in the format of `affidavit audit-model new`.")
    return canaries


def read_losses(raw: bytes) -> tuple[float, ...]:
    """Parse the losses of the canaries, in their order; raises ``BadCanaries``."""
    try:
        return losses_of(load_json(raw, MAX_BYTES).data)
    except MalformedPlan:
        raise BadCanaries(_LOSSES) from None


def losses_of(document: Any) -> tuple[float, ...]:
    """Return the losses of a JSON document with a field ``losses``; raises ``BadCanaries``."""
    try:
        losses = document["losses"]
        if any(isinstance(item, bool) or not isinstance(item, int | float) for item in losses):
            raise TypeError
        return tuple(float(item) for item in losses)
    except (KeyError, TypeError, ValueError):
        raise BadCanaries(_LOSSES) from None


def losses_as_bytes(losses: Sequence[float]) -> bytes:
    """Return the content of the file of losses: canonical JSON."""
    return canonical_json({"version": VERSION, "losses": list(losses)})


def audit_canaries(canaries: Canaries, losses: Sequence[float], *, delta: float) -> Audit:
    """Compute what the ``losses`` of ``canaries`` prove.

    Raises ``BadCanaries`` if their numbers differ.
    """
    if len(losses) != canaries.count:
        raise BadCanaries(f"losses: {len(losses)} are given for {canaries.count} canaries.")
    included, half = canaries.included, canaries.guesses // 2
    order = sorted(range(canaries.count), key=lambda index: losses[index])
    right = sum(included[index] for index in order[:half])
    right += sum(not included[index] for index in order[-half:])
    counts = {"right": right, "guesses": canaries.guesses, "canaries": canaries.count}
    return Audit(
        **counts,
        delta=delta,
        confidence=CONFIDENCE,
        epsilon=lower_epsilon(**counts, delta=delta),
        mu=lower_mu(**counts),
    )


Inverse = Callable[[float], float]
"""A function from y to the least x at which a test of type I error x may have power y."""


def lower_epsilon(*, right: int, guesses: int, canaries: int, delta: float) -> float:
    """Return the ε, in nats, below which (ε, ``delta``)-private training is refuted, or 0."""

    def inverse_at(epsilon: float) -> Inverse:
        down, up = math.exp(-epsilon), math.exp(epsilon)
        return lambda y: max(0.0, (y - delta) * down, 1 - delta - up * (1 - y))

    return _largest_refuted(inverse_at, right, guesses, canaries)


def lower_mu(*, right: int, guesses: int, canaries: int) -> float:
    """Return the μ below which μ-Gaussian private training is refuted, or 0."""

    def inverse_at(mu: float) -> Inverse:
        return lambda y: float(ndtr(ndtri(y) - mu))

    return _largest_refuted(inverse_at, right, guesses, canaries)


def _largest_refuted(
    inverse_at: Callable[[float], Inverse], right: int, guesses: int, canaries: int
) -> float:
    """Return the largest refuted parameter, rounded down, of a family ordered by privacy."""
    low, high, alarm = 0.0, MAX_SEARCHED, 1 - CONFIDENCE
    if not is_refuted(inverse_at(low), right, guesses, canaries, alarm):
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if is_refuted(inverse_at(middle), right, guesses, canaries, alarm):
            low = middle
        else:
            high = middle
    return low


def is_refuted(inverse: Inverse, right: int, guesses: int, canaries: int, alarm: float) -> bool:
    """Whether ``right`` right guesses are less probable than ``alarm`` under a trade-off function.

    The loop computes the tail probabilities that are needed at least for probability ``alarm``.
    """
    if right == 0:
        return False
    after, tail = 0.0, alarm  # the probabilities of all counts above i + 1, and of i + 1
    for i in range(right - 1, -1, -1):
        share = ((i + 1) * tail + after) / canaries
        after += tail
        if share > 1:
            return True
        tail = max(tail, (canaries * inverse(share) + after) / (guesses - i))
        if tail > 1 + ROUNDING_MARGIN:
            return True
    return False
