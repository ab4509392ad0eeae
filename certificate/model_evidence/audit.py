"""An audit: the lower bound on ε that the losses of canaries prove, from one run.

Canaries are made-up records. For each a fair coin says whether it takes part in the training; coins
and records are functions of a nonce that is drawn before. The file with the nonce is committed to
by its digest in the first line of the run record, so that nobody can choose the coins afterwards.
When the run is over, the ``guesses`` / 2 canaries with the least loss are guessed to have taken
part, and as many with the greatest loss not to have. How many of these guesses are right is
bounded by the trade-off function of the training, jointly over all canaries; so many right guesses
refute trade-off functions, and with them every ε and μ below some value.

Number of guesses, δ and confidence are fixed before. Whatever is refuted wrongly is refuted in one
event, so that the bounds hold together (``docs/theorems/one-run-audit.md``). They are about what
changes with a record's presence: ``add_remove`` and ``zero_out``.

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

from affidavit.plan import MalformedPlan, canonical_json, load_json

AUDITABLE = frozenset({"add_remove", "zero_out"})
"""Adjacencies under which a canary's taking part is what neighbours differ in."""
CONFIDENCE = 0.95
"""Probability at least with which the lower end of an audit is one."""
MAX_CANARIES = 1_000_000
MAX_BYTES = 64 * 1024 * 1024
VERSION = 1
LARGEST = 100.0
"""ε and μ beyond which a lower bound is not searched."""
HALVINGS = 36
"""Of that range, until it is settled to 1e-9."""
ROUNDING = 1e-9
"""By how much a probability must be above 1, for the sake of rounding."""


class BadCanaries(ValueError):
    """A file of canaries or losses cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canaries:
    """``count`` canaries, all of them functions of ``nonce``, and how many guesses are made."""

    nonce: bytes
    count: int
    guesses: int

    @classmethod
    def fresh(cls, count: int, guesses: int | None = None) -> Canaries:
        """New ones; a third of them is guessed about unless another even number is given.

        Raises ``BadCanaries``.
        """
        return cls.of(secrets.token_bytes(32), count, guesses)

    @classmethod
    def of(cls, nonce: bytes, count: int, guesses: int | None) -> Canaries:
        """Those of a nonce of 32 bytes; raises ``BadCanaries``."""
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
        """The file: canonical JSON."""
        return canonical_json(
            {
                "version": VERSION,
                "nonce": self.nonce.hex(),
                "count": self.count,
                "guesses": self.guesses,
            }
        )

    @property
    def commitment(self) -> str:
        """``sha256:`` and the digest of the file."""
        return "sha256:" + hashlib.sha256(self.as_bytes()).hexdigest()

    def drawn(self, purpose: str) -> np.random.Generator:
        """A generator for ``purpose``, a function of the nonce."""
        seed = hashlib.sha256(self.nonce + purpose.encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(seed, "big")))

    @property
    def included(self) -> tuple[bool, ...]:
        """Whether each canary takes part: a fair coin, the first bit of a hash."""
        return tuple(
            hashlib.sha256(self.nonce + b"included" + index.to_bytes(8, "big")).digest()[0] < 128
            for index in range(self.count)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """``right`` of ``guesses`` guesses about ``canaries`` prove that ε is at least ``epsilon``.

    ε in nats at ``delta``, with probability ``confidence`` over coins and training; and, if the
    training is Gaussian private, that its parameter is at least ``mu``.
    """

    canaries: int
    guesses: int
    right: int
    delta: float
    confidence: float
    epsilon: float
    mu: float

    def falsifies(self, guarantee: Mapping[str, Any]) -> bool:
        """Whether ε or μ is above what a certificate's ``guarantee`` says."""
        mu = guarantee["mu"]
        above = self.epsilon > float(guarantee["epsilon"]["upper"])
        return above or (mu is not None and self.mu > float(mu))


def read_canaries(raw: bytes) -> Canaries:
    """The canaries of a file; raises ``BadCanaries`` unless it is written as ``as_bytes`` does."""
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
    """The losses of canaries in their order; raises ``BadCanaries``."""
    try:
        losses = load_json(raw, MAX_BYTES).data["losses"]
        if any(isinstance(item, bool) or not isinstance(item, int | float) for item in losses):
            raise TypeError
        return tuple(float(item) for item in losses)
    except (MalformedPlan, KeyError, TypeError, ValueError):
        raise BadCanaries('losses: give {"losses": [...]} with a finite number each.') from None


def losses_as_bytes(losses: Sequence[float]) -> bytes:
    """The file of losses: canonical JSON."""
    return canonical_json({"version": VERSION, "losses": list(losses)})


def audit_canaries(canaries: Canaries, losses: Sequence[float], *, delta: float) -> Audit:
    """What the ``losses`` of ``canaries`` prove; raises ``BadCanaries`` for another number."""
    if len(losses) != canaries.count:
        raise BadCanaries(f"losses: {len(losses)} are given for {canaries.count} canaries.")
    included, half = canaries.included, canaries.guesses // 2
    order = sorted(range(canaries.count), key=lambda index: losses[index])
    right = sum(included[index] for index in order[:half])
    right += sum(not included[index] for index in order[-half:])
    made = {"right": right, "guesses": canaries.guesses, "canaries": canaries.count}
    return Audit(
        **made,
        delta=delta,
        confidence=CONFIDENCE,
        epsilon=lower_epsilon(**made, delta=delta),
        mu=lower_mu(**made),
    )


Inverse = Callable[[float], float]
"""From y to the least x at which a test of type I error x may have power y."""


def lower_epsilon(*, right: int, guesses: int, canaries: int, delta: float) -> float:
    """The ε, in nats, below which (ε, ``delta``)-private training is refuted; 0 where none is."""

    def inverse_at(epsilon: float) -> Inverse:
        down, up = math.exp(-epsilon), math.exp(epsilon)
        return lambda y: max(0.0, (y - delta) * down, 1 - delta - up * (1 - y))

    return _largest_refuted(inverse_at, right, guesses, canaries)


def lower_mu(*, right: int, guesses: int, canaries: int) -> float:
    """The μ below which μ-Gaussian private training is refuted; 0 where none is."""

    def inverse_at(mu: float) -> Inverse:
        return lambda y: float(ndtr(ndtri(y) - mu))

    return _largest_refuted(inverse_at, right, guesses, canaries)


def _largest_refuted(
    inverse_at: Callable[[float], Inverse], right: int, guesses: int, canaries: int
) -> float:
    """The safe side of where a family that is less private the larger its parameter is refuted."""
    low, high, alarm = 0.0, LARGEST, 1 - CONFIDENCE
    if not refuted(inverse_at(low), right, guesses, canaries, alarm):
        return 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if refuted(inverse_at(middle), right, guesses, canaries, alarm):
            low = middle
        else:
            high = middle
    return low


def refuted(inverse: Inverse, right: int, guesses: int, canaries: int, alarm: float) -> bool:
    """Whether so many right guesses have a probability below ``alarm`` under a trade-off function.

    Walks down the tail probabilities that are needed at least if they had it.
    """
    if right == 0:
        return False
    after, tail = 0.0, alarm  # of all counts above i + 1, and of i + 1
    for i in range(right - 1, -1, -1):
        share = ((i + 1) * tail + after) / canaries
        after += tail
        if share > 1:
            return True
        tail = max(tail, (canaries * inverse(share) + after) / (guesses - i))
        if tail > 1 + ROUNDING:
            return True
    return False
