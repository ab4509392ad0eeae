"""The keyset: which keys may sign, signed by root keys that stay offline.

A keyset is a numbered document: the keys that sign, each with its roles and its window, those
that were revoked, and the root keys with a threshold t. It is signed by t of its own root keys, and
each version also by t of the roots of the version before, so that the roots themselves
can be replaced without telling anybody again (as in TUF, whose keys only sign
metadata and never come near the service). A version names the digest of the one before.

``revoked`` names an instant: certificates that the key signed for an earlier one still count, if
a log includes them whose checkpoint another key signed, because whoever holds the key can put
any date on what it signs. Its checkpoints and status lists count no more. A revocation names the
first moment at which a stranger may have had the key, and the window's start where nobody knows.

``trust`` is the default trust policy of those who verify by the keyset, ``administrators`` how many
people a budget or a policy needs at the service.

The payload is RFC 8785 canonical JSON, so that a version has one digest.

>>> from datetime import UTC, datetime
>>> from affidavit.certificate.keys.key import SigningKey
>>> root, signer = SigningKey.generate(), SigningKey.generate("service")
>>> now = datetime.now(UTC)
>>> first = draft_keyset(None, roots=Roots.of([root.public], threshold=1), keys=[signer.public],
...               revoked=[], issued_at=now, expires_at=signer.public.not_after)
>>> [key.label for key in read_keyset(first.signed_by(root).as_bytes()).keyset.public_keys()]
['service']

References: TUF specification 1.0.33, section 5.3 (root rotation, rollback, expiry).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from affidavit.certificate.dsse import (
    BadEnvelope,
    CosignedEnvelope,
    Digest,
    Instant,
    Model,
    SignedPart,
    read_cosigned,
    validated,
)
from affidavit.certificate.keys.key import (
    KeyFailure,
    KeyRole,
    PublicKey,
    SigningPort,
    format_instant,
    parse_instant,
)
from affidavit.certificate.verification.trust_policy import TrustPolicy
from affidavit.plan import CodedError, MalformedPlan, canonical_json, load_json

KEYSET_TYPE = "https://affidavit.dev/keyset/v1"
PAYLOAD_TYPE = "application/vnd.affidavit.keyset.v1+json"
MAX_BYTES = 1024 * 1024
MAX_ROOTS, MAX_KEYS = 32, 1024
NO_END = "9999-12-31T23:59:59Z"


class KeysetError(CodedError):
    """A keyset that cannot be used."""


def _is_none(value: object) -> bool:
    return value is None


KeyId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Label = Annotated[str, Field(max_length=255)]


class RootKey(SignedPart):
    """A key that signs keysets and nothing else; it has no window of its own."""

    key_id: KeyId
    algorithm: Literal["ed25519"] = "ed25519"
    public_key: str
    label: Label = ""

    def public(self) -> PublicKey:
        """The key; raises ``KeyFailure`` when the record does not hold it."""
        always = {"not_before": "1970-01-01T00:00:00Z", "not_after": NO_END}
        return PublicKey.from_record({**self.model_dump(), **always})


class KeyEntry(SignedPart):
    """A key, what it signs, and from when to when; both ends belong to it.

    Without ``roles`` it signs everything, as each key did before there were roles.
    """

    key_id: KeyId
    algorithm: Literal["ed25519"]
    public_key: str
    not_before: Instant
    not_after: Instant
    label: Label = ""
    # A keyset of before there were roles has the bytes that it had.
    roles: Annotated[
        Annotated[tuple[KeyRole, ...], Field(min_length=1)] | None, Field(exclude_if=_is_none)
    ] = None

    def public(self) -> PublicKey:
        """The key; raises ``KeyFailure`` when the record does not hold it."""
        return PublicKey.from_record(self.model_dump(mode="json"))


class Revocation(SignedPart):
    """A key whose signatures count no more from ``since`` on."""

    key_id: KeyId
    since: Instant
    reason: Annotated[str, Field(max_length=1000)] = ""


class Roots(SignedPart):
    """Root keys, ``threshold`` of which have to sign."""

    threshold: Annotated[int, Field(ge=1, le=MAX_ROOTS)]
    keys: Annotated[tuple[RootKey, ...], Field(min_length=1, max_length=MAX_ROOTS)]

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        ids = _unique(self.keys, "root key")
        if self.threshold > len(ids):
            raise ValueError(f"a threshold of {self.threshold} cannot be met by {len(ids)} keys")
        return self

    @classmethod
    def of(cls, keys: Iterable[PublicKey], threshold: int) -> Self:
        """The roots of these keys; raises ``KeysetError``."""
        parts = [
            _without(key.as_record(), "development", "not_before", "not_after") for key in keys
        ]
        return read_model(cls, {"threshold": threshold, "keys": parts})

    def signed(self, envelope: CosignedEnvelope) -> bool:
        """Whether enough of these keys have signed ``envelope``."""
        return len(envelope.signers(key.public() for key in self.keys)) >= self.threshold


class Keyset(SignedPart):
    """One version of the keyset."""

    type_: Annotated[Literal["https://affidavit.dev/keyset/v1"], Field(alias="_type")]
    version: Annotated[int, Field(ge=1, le=2**53 - 1)]
    previous: Digest | None
    issued_at: Instant
    expires_at: Instant
    roots: Roots
    keys: Annotated[tuple[KeyEntry, ...], Field(max_length=MAX_KEYS)]
    revoked: Annotated[tuple[Revocation, ...], Field(max_length=MAX_KEYS)] = ()
    trust: Annotated[TrustPolicy | None, Field(exclude_if=_is_none)] = None
    administrators: Annotated[
        Annotated[int, Field(ge=2, le=10)] | None, Field(exclude_if=_is_none)
    ] = None

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if (self.previous is None) != (self.version == 1):
            raise ValueError("the first version, and no other, has no previous one")
        if self.expires_at <= self.issued_at:
            raise ValueError("it would expire before its issue date")
        known = _unique(self.keys, "key")
        if shared := known & {key.key_id for key in self.roots.keys}:
            raise ValueError(f"{min(shared)[:16]} is a root key and cannot sign certificates")
        if self.trust and (name := self.trust.dependent(key.public() for key in self.keys)):
            raise ValueError(
                f"the witness {name} has a key of this keyset, so it would witness itself"
            )
        if missing := _unique(self.revoked, "revoked key") - known:
            raise ValueError(f"the revoked key {min(missing)[:16]} is not among the keys")
        for key in self.keys:
            if key.not_after < key.not_before:
                raise ValueError(f"the window of {key.key_id[:16]} ends before it begins")
        return self

    def public_keys(self) -> tuple[PublicKey, ...]:
        """The keys with their windows, revoked ones too: they may have signed before."""
        since = self.revoked_since()
        return tuple(replace(key.public(), revoked_from=since.get(key.key_id)) for key in self.keys)

    def revoked_since(self) -> dict[str, datetime]:
        """From when on each revoked key's signatures do not count, by key id."""
        return {item.key_id: parse_instant(item.since) for item in self.revoked}


@dataclass(frozen=True, slots=True)
class SignedKeyset:
    """A keyset with the envelope it came in."""

    keyset: Keyset
    envelope: CosignedEnvelope

    @property
    def digest(self) -> str:
        """``sha256:`` and the digest of the payload, which the next version names."""
        return "sha256:" + hashlib.sha256(self.envelope.payload).hexdigest()

    def signed_by(self, key: SigningPort) -> SignedKeyset:
        """This, signed by ``key`` too."""
        return replace(self, envelope=self.envelope.signed_by(key))

    def as_bytes(self) -> bytes:
        """The file to keep and to hand out."""
        return canonical_json(self.envelope.as_document())


def draft_keyset(
    previous: SignedKeyset | None,
    *,
    roots: Roots,
    keys: Iterable[PublicKey],
    revoked: Iterable[Revocation],
    issued_at: datetime,
    expires_at: datetime,
    trust: TrustPolicy | None = None,
    administrators: int | None = None,
) -> SignedKeyset:
    """The version after ``previous``, without a signature; raises ``KeysetError``."""
    document = {
        "_type": KEYSET_TYPE,
        "version": 1 if previous is None else previous.keyset.version + 1,
        "previous": None if previous is None else previous.digest,
        "issued_at": format_instant(issued_at),
        "expires_at": format_instant(expires_at),
        "roots": roots.model_dump(mode="json"),
        "keys": [_without(key.as_record(), "development") for key in keys],
        "revoked": [item.model_dump(mode="json") for item in revoked],
        **({} if trust is None else {"trust": trust.model_dump(mode="json")}),
        **({} if administrators is None else {"administrators": administrators}),
    }
    keyset = read_model(Keyset, document)
    payload = canonical_json(keyset.as_document())
    envelope = CosignedEnvelope(payload_type=PAYLOAD_TYPE, payload=payload, signatures=())
    return SignedKeyset(keyset, envelope)


def read_keyset(raw: bytes) -> SignedKeyset:
    """The keyset of a file's bytes, whoever signed it; raises ``KeysetError``."""
    try:
        envelope = read_cosigned(load_json(raw, MAX_BYTES).data)
        if envelope.payload_type != PAYLOAD_TYPE:
            raise _malformed("the envelope does not contain a keyset.")
        document = load_json(envelope.payload, MAX_BYTES).data
    except BadEnvelope as error:
        raise _malformed(f"{error}.") from None
    except MalformedPlan as error:
        raise _malformed(error.reasons[0].message) from None
    keyset = read_model(Keyset, document)
    if canonical_json(keyset.as_document()) != envelope.payload:
        raise _malformed("the payload is not in canonical JSON.")
    return SignedKeyset(keyset, envelope)


def read_model(kind: type[Model], document: Any) -> Model:
    """``document`` as a ``kind`` whose every key is what its id says; raises ``KeysetError``."""
    try:
        model = validated(kind, document)
        roots = getattr(getattr(model, "roots", None), "keys", ())
        for key in (*getattr(model, "keys", ()), *roots):
            key.public()
    except KeyFailure as failure:
        raise _malformed(str(failure)) from None
    except ValueError as error:
        raise _malformed(f"{error}.") from None
    return model


def _unique(parts: Iterable[RootKey | KeyEntry | Revocation], what: str) -> set[str]:
    ids = [part.key_id for part in parts]
    if len(set(ids)) != len(ids):
        raise ValueError(f"a {what} is listed twice")
    return set(ids)


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


def _malformed(message: str) -> KeysetError:
    return KeysetError("keyset_malformed", message, "Fetch the keyset again (GET /v1/keyset).")
