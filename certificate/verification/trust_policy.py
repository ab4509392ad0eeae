"""What a verifier relies on besides keys: the log, its witnesses, and freshness.

::

    schema_version: 1
    origin: dp.example.com/log       # the only log that counts
    witnesses:                       # `threshold` of `keys` cosigned the checkpoint
      threshold: 2
      keys:
        - w1.example.org+5ae4b2b1+BK1i...
        - w2.example.net+c6f1e2d0+BFb3...
        - w3.example.com+09a8f3c4+BPq0...
    timestamps:                      # in place of witnesses, or beside them for an earlier date
      roots: |                       # of time-stamping authorities (RFC 3161), PEM
        -----BEGIN CERTIFICATE-----
        ...
    freshness:
      checkpoint_hours: 24           # how long ago the witnesses may have cosigned
      status_hours: 24               # a status list is needed, signed no longer ago

Under a policy nothing is left unchecked: a bundle that is not in the log is rejected, and so is one
whose checkpoint too few witnesses cosigned, or, where it names authorities and no witnesses, none
stamped. What a key signed before it was revoked counts only if witnesses cosigned, or an authority
stamped, a checkpoint with it before the revocation, because every other date comes from whoever
holds the key. The default policy of an organisation is part of its keyset (``trust``), signed by
the root keys.

References: C2SP, tlog-cosignature.md; RFC 3161; TUF specification 1.0.33, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated, Literal, Self

from cryptography.x509 import load_pem_x509_certificates
from pydantic import Field, field_validator, model_validator

from affidavit.certificate.dsse import SignedPart, validated
from affidavit.certificate.keys.key import KeyRole, PublicKey
from affidavit.certificate.log.cosignature import WitnessKey, stamped_at
from affidavit.certificate.log.note import BadNote, parse_note, require_name
from affidavit.plan import MalformedPlan, load_yaml

MAX_WITNESSES = 32
AHEAD = timedelta(minutes=5)
"""How far another's clock may be ahead of the verifier's."""
Hours = Annotated[int, Field(ge=1, le=24 * 366)]


class BadTrustPolicy(ValueError):
    """The document is not a trust policy; the message names the field."""


class Witnesses(SignedPart):
    """Witnesses, ``threshold`` of which have to cosign; keys are verifier keys."""

    threshold: Annotated[int, Field(ge=1, le=MAX_WITNESSES)]
    keys: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_WITNESSES)]

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        # Of the keys themselves: one under two names is one witness.
        keys = {key.raw for key in self.parsed()}
        if len(keys) < len(self.keys):
            raise ValueError("a witness is listed twice")
        if self.threshold > len(keys):
            raise ValueError(f"a threshold of {self.threshold} cannot be met by {len(keys)} keys")
        return self

    def parsed(self) -> tuple[WitnessKey, ...]:
        """The keys; raises ``ValueError``."""
        try:
            return tuple(WitnessKey.parse(key) for key in self.keys)
        except BadNote as error:
            raise ValueError(str(error)) from None


class Timestamps(SignedPart):
    """Authorities (RFC 3161) whose timestamps say when a checkpoint existed, as witnesses do."""

    roots: Annotated[str, Field(max_length=200_000)]

    @field_validator("roots")
    @classmethod
    def _certificates(cls, value: str) -> str:
        if not load_pem_x509_certificates(value.encode()):
            raise ValueError("there is no certificate")
        return value


class Freshness(SignedPart):
    """How old at most, in hours; None is any age, and for status lists none at all."""

    checkpoint_hours: Hours | None = None
    status_hours: Hours | None = None


class TrustPolicy(SignedPart):
    """What a verifier relies on beside keys."""

    schema_version: Literal[1]
    origin: str
    witnesses: Witnesses | None = None
    timestamps: Timestamps | None = None
    freshness: Freshness = Freshness()

    @field_validator("origin")
    @classmethod
    def _origin(cls, value: str) -> str:
        try:
            require_name(value)
        except BadNote as error:
            raise ValueError(str(error)) from None
        return value

    def cosigned(self, note: str, now: datetime) -> tuple[datetime, datetime] | None:
        """When the threshold was first reached, and how recently it still is; None if never.

        The first is the time by which ``threshold`` witnesses had cosigned, the second the last
        time after which as many did. A time that is yet to come does not count. Raises ``BadNote``
        for a false cosignature.
        """
        if self.witnesses is None:
            return None
        parsed = parse_note(note)
        times = sorted(
            at
            for key in self.witnesses.parsed()
            if (at := key.cosigned(parsed)) is not None and at <= now + AHEAD
        )
        threshold = self.witnesses.threshold
        return (times[threshold - 1], times[-threshold]) if len(times) >= threshold else None

    @property
    def dated_by_others(self) -> bool:
        """Whether it names anybody else who says when a checkpoint existed."""
        return self.witnesses is not None or self.timestamps is not None

    def seen(self, note: str, now: datetime) -> tuple[datetime, datetime] | None:
        """When others first saw the checkpoint, and how recently; None if too few did.

        Where witnesses are named, the threshold of them has to have cosigned; an earlier timestamp
        says that the checkpoint existed before. Without witnesses a timestamp stands for them. A
        later one says nothing: anybody can have an old checkpoint stamped.
        Raises ``BadNote`` for a false cosignature, and ``ModuleNotFoundError`` where timestamps
        cannot be checked.
        """
        cosigned = self.cosigned(note, now)
        if self.timestamps is None or (self.witnesses is not None and cosigned is None):
            return cosigned
        at = stamped_at(note, self.timestamps.roots.encode())
        if at is None or at > now + AHEAD:
            return cosigned
        first, last = cosigned or (at, at)
        return min(first, at), last

    def dependent(self, trusted: Iterable[PublicKey]) -> str | None:
        """The name of a witness that has a key of the log itself; None if there is none."""
        own = {
            key.key.public_bytes_raw()
            for key in trusted
            if any(key.may(role) for role in KeyRole if role is not KeyRole.WITNESS)
        }
        keys = () if self.witnesses is None else self.witnesses.parsed()
        return next((key.name for key in keys if key.raw in own), None)

    def of_any_age(self) -> TrustPolicy:
        """This, for what is over: how fresh a proof is now says nothing about it."""
        return self.model_copy(update={"freshness": Freshness()})

    def stale(self, hours: int | None, at: datetime, now: datetime) -> bool:
        """Whether ``at`` lies longer ago than ``hours``."""
        return hours is not None and at < now - timedelta(hours=hours)


def parse_trust_policy(raw: bytes) -> TrustPolicy:
    """The policy of a YAML or JSON document; raises ``BadTrustPolicy``."""
    try:
        return validated(TrustPolicy, load_yaml(raw).data)
    except MalformedPlan as error:
        raise BadTrustPolicy(error.reasons[0].message) from None
    except ValueError as error:
        raise BadTrustPolicy(str(error)) from None
