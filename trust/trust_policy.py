"""The trust policy: what a verifier requires of the log, its witnesses, and freshness.

::

    schema_version: 1
    origin: dp.example.com/log       # the only accepted log
    witnesses:                       # `threshold` of `keys` must have cosigned the checkpoint
      threshold: 2
      keys:
        - w1.example.org+5ae4b2b1+BK1i...
        - w2.example.net+c6f1e2d0+BFb3...
        - w3.example.com+09a8f3c4+BPq0...
    timestamps:                      # instead of witnesses, or with them for an earlier date
      roots: |                       # of time-stamping authorities (RFC 3161), PEM
        -----BEGIN CERTIFICATE-----
        ...
    freshness:
      checkpoint_hours: 24           # the maximum age of the witnesses' cosignatures
      status_hours: 24               # a status list is required, with this maximum age

Under a policy every step is checked: a bundle that is not in the log is rejected, and so is one
whose checkpoint too few witnesses cosigned or, if the policy names authorities and no witnesses, no
authority stamped. A signature from before the revocation of its key is valid only if witnesses
cosigned, or an authority stamped, a checkpoint with it before the revocation, because the holder of
the key determines every other date. The default policy of an organisation is part of its keyset
(``trust``), signed by the root keys.

References: C2SP, tlog-cosignature.md; RFC 3161; TUF specification 1.0.33, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal, Self

from cryptography.x509 import load_pem_x509_certificates
from pydantic import Field, field_validator, model_validator

from affidavit.plan import MalformedPlan, load_yaml
from affidavit.trust.dates import is_ahead
from affidavit.trust.dsse import SignedPart, validated
from affidavit.trust.key import PublicKey
from affidavit.trust.log.cosignature import WitnessKey, stamped_at
from affidavit.trust.log.note import (
    BadNote,
    parse_note,
    require_name,
)

MAX_WITNESSES = 32
Hours = Annotated[int, Field(ge=1, le=24 * 366)]


class BadTrustPolicy(ValueError):
    """The document is not a trust policy; the message names the invalid field."""


class Witnesses(SignedPart):
    """Witnesses, ``threshold`` of which must cosign; keys are verifier keys."""

    threshold: Annotated[int, Field(ge=1, le=MAX_WITNESSES)]
    keys: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_WITNESSES)]

    @model_validator(mode="after")
    def _validate_threshold(self) -> Self:
        # One key under two names is one witness.
        keys = {key.raw for key in self.parsed()}
        if len(keys) < len(self.keys):
            raise ValueError("a witness is listed twice")
        if self.threshold > len(keys):
            raise ValueError(f"a threshold of {self.threshold} cannot be met by {len(keys)} keys")
        return self

    def parsed(self) -> tuple[WitnessKey, ...]:
        """Return the parsed keys; raises ``ValueError``."""
        try:
            return tuple(WitnessKey.parse(key) for key in self.keys)
        except BadNote as error:
            raise ValueError(str(error)) from None


class Timestamps(SignedPart):
    """Authorities (RFC 3161) whose timestamps prove when a checkpoint existed."""

    roots: Annotated[str, Field(max_length=200_000)]

    @field_validator("roots")
    @classmethod
    def _validate_roots(cls, value: str) -> str:
        if not load_pem_x509_certificates(value.encode()):
            raise ValueError("there is no certificate")
        return value


class Freshness(SignedPart):
    """Maximum ages in hours; None is any age, and requires no status list."""

    checkpoint_hours: Hours | None = None
    status_hours: Hours | None = None


class TrustPolicy(SignedPart):
    """The requirements of a verifier beside trusted keys."""

    schema_version: Literal[1]
    origin: str
    witnesses: Witnesses | None = None
    timestamps: Timestamps | None = None
    freshness: Freshness = Freshness()

    @field_validator("origin")
    @classmethod
    def _validate_origin(cls, value: str) -> str:
        try:
            require_name(value)
        except BadNote as error:
            raise ValueError(str(error)) from None
        return value

    def cosigned(self, note: str, now: datetime) -> tuple[datetime, datetime] | None:
        """Return the first and last time of a sufficient cosignature, or None.

        The first is the time by which ``threshold`` witnesses had cosigned, the second the last
        time after which as many did. Times in the future are ignored. Raises ``BadNote`` for an
        invalid cosignature.
        """
        if self.witnesses is None:
            return None
        parsed = parse_note(note)
        times = sorted(
            at
            for key in self.witnesses.parsed()
            if (at := key.cosigned(parsed)) is not None and not is_ahead(at, now)
        )
        threshold = self.witnesses.threshold
        return (times[threshold - 1], times[-threshold]) if len(times) >= threshold else None

    @property
    def has_attestors(self) -> bool:
        """Whether the policy names witnesses or authorities, who attest dates of checkpoints."""
        return self.witnesses is not None or self.timestamps is not None

    def attested(self, note: str, now: datetime) -> tuple[datetime, datetime] | None:
        """Return when others first and last saw the checkpoint, or None if too few did.

        If the policy names witnesses, the threshold must have cosigned; an earlier timestamp proves
        that the checkpoint existed before. Without witnesses a timestamp replaces them. A later
        timestamp is ignored: anyone can have an old checkpoint stamped. Raises ``BadNote`` for an
        invalid cosignature, and ``ModuleNotFoundError`` if timestamps cannot be checked.
        """
        cosigned = self.cosigned(note, now)
        if self.timestamps is None or (self.witnesses is not None and cosigned is None):
            return cosigned
        at = stamped_at(note, self.timestamps.roots.encode())
        if at is None or is_ahead(at, now):
            return cosigned
        first, last = cosigned or (at, at)
        return min(first, at), last

    def dependent_witness(self, trusted: Iterable[PublicKey]) -> str | None:
        """Return the name of a witness with a key of the log itself, or None."""
        log_keys = {key.key.public_bytes_raw() for key in trusted}
        keys = () if self.witnesses is None else self.witnesses.parsed()
        return next((key.name for key in keys if key.raw in log_keys), None)

    def for_past_use(self) -> TrustPolicy:
        """Return the policy without a maximum age of checkpoints, for a use in the past.

        The status list must be as new as ever: it tells whether the certificate was revoked since.
        """
        freshness = Freshness(status_hours=self.freshness.status_hours)
        return self.model_copy(update={"freshness": freshness})


def parse_trust_policy(raw: bytes) -> TrustPolicy:
    """Parse a YAML or JSON document; raises ``BadTrustPolicy``."""
    try:
        return validated(TrustPolicy, load_yaml(raw).data)
    except MalformedPlan as error:
        raise BadTrustPolicy(error.reasons[0].message) from None
    except ValueError as error:
        raise BadTrustPolicy(str(error)) from None
