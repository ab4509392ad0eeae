"""The keyset: the signing keys of an organisation, signed by root keys that stay offline.

A keyset is a numbered document: the signing keys, each with its roles and its window, the revoked
keys, and the root keys with a threshold t. It is signed by t of its own root keys, and each version
also by t of the roots of the previous version, so that the roots themselves can be replaced without
a new configuration of the verifiers (as in TUF). A version names the digest of the previous one.

A revocation has an instant ``since``: the first moment at which a stranger may have had the key, or
the start of its window if that is unknown. Certificates that the key signed earlier stay valid if a
log contains them whose checkpoint another key signed, because the holder of the key can write any
date. Checkpoints and status lists of the key are no longer valid.

``trust`` is the default trust policy of verifiers, ``administrators`` the number of people who must
agree on a budget or a policy at the service.

The payload is RFC 8785 canonical JSON, so that a version has one digest.

>>> from datetime import UTC, datetime
>>> from affidavit.trust.key import SigningKey
>>> root, signer = SigningKey.generate(), SigningKey.generate("service")
>>> now = datetime.now(UTC)
>>> first = draft_keyset(None, roots=Roots.of([root.public], threshold=1), keys=[signer.public],
...               revoked=[], issued_at=now, expires_at=signer.public.not_after)
>>> [key.label for key in read_keyset(first.signed_by(root).as_bytes()).keyset.public_keys()]
['service']

References: TUF specification 1.0.33, section 5.3 (root rotation, rollback, expiry).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from affidavit.plan import MalformedPlan, canonical_json, digest_of_bytes, load_json
from affidavit.trust.dsse import (
    BadEnvelope,
    CosignedEnvelope,
    Digest,
    Instant,
    Model,
    SignedPart,
    read_cosigned,
    validated,
)
from affidavit.trust.errors import KeysetError
from affidavit.trust.key import (
    KeyFailure,
    KeyRole,
    PublicKey,
    SigningPort,
    format_instant,
    parse_instant,
)
from affidavit.trust.trust_policy import TrustPolicy

KEYSET_TYPE = "https://affidavit.dev/keyset/v1"
PAYLOAD_TYPE = "application/vnd.affidavit.keyset.v1+json"
MAX_BYTES = 1024 * 1024
MAX_ROOTS, MAX_KEYS = 32, 1024


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
        """Return the key; raises ``KeyFailure`` if the record is malformed."""
        window = {"not_before": "1970-01-01T00:00:00Z", "not_after": "9999-12-31T23:59:59Z"}
        return PublicKey.from_record({**self.model_dump(), **window})


class KeyEntry(SignedPart):
    """A key with its roles and its window, whose ends are included.

    A key without ``roles`` has every role, as all keys did before roles were added.
    """

    key_id: KeyId
    algorithm: Literal["ed25519"]
    public_key: str
    not_before: Instant
    not_after: Instant
    label: Label = ""
    # Left out if None: the bytes of a keyset from before roles were added do not change.
    roles: Annotated[
        Annotated[tuple[KeyRole, ...], Field(min_length=1)] | None, Field(exclude_if=_is_none)
    ] = None

    def public(self) -> PublicKey:
        """Return the key; raises ``KeyFailure`` if the record is malformed."""
        return PublicKey.from_record(self.model_dump(mode="json"))


class Revocation(SignedPart):
    """The revocation of a key: its signatures from ``since`` on are not valid."""

    key_id: KeyId
    since: Instant
    reason: Annotated[str, Field(max_length=1000)] = ""


class Roots(SignedPart):
    """Root keys, ``threshold`` of which must sign."""

    threshold: Annotated[int, Field(ge=1, le=MAX_ROOTS)]
    keys: Annotated[tuple[RootKey, ...], Field(min_length=1, max_length=MAX_ROOTS)]

    @model_validator(mode="after")
    def _validate_threshold(self) -> Self:
        ids = _unique_ids(self.keys, "root key")
        if self.threshold > len(ids):
            raise ValueError(f"a threshold of {self.threshold} cannot be met by {len(ids)} keys")
        return self

    @classmethod
    def of(cls, keys: Iterable[PublicKey], threshold: int) -> Self:
        """Return the roots with these keys; raises ``KeysetError``."""
        parts = [
            _without(key.as_record(), "development", "not_before", "not_after") for key in keys
        ]
        return read_model(cls, {"threshold": threshold, "keys": parts})

    def accept(self, envelope: CosignedEnvelope) -> bool:
        """Whether ``threshold`` of these keys signed ``envelope``."""
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
    def _validate(self) -> Self:
        if (self.previous is None) != (self.version == 1):
            raise ValueError("the first version, and no other, has no previous one")
        if self.expires_at <= self.issued_at:
            raise ValueError("it would expire before its issue date")
        known = _unique_ids(self.keys, "key")
        if shared := known & {key.key_id for key in self.roots.keys}:
            raise ValueError(f"{min(shared)[:16]} is a root key and cannot sign certificates")
        if self.trust and (name := self.trust.dependent_witness(key.public() for key in self.keys)):
            raise ValueError(
                f"the witness {name} has a key of this keyset, so it would witness itself"
            )
        if missing := _unique_ids(self.revoked, "revoked key") - known:
            raise ValueError(f"the revoked key {min(missing)[:16]} is not among the keys")
        for key in self.keys:
            if key.not_after < key.not_before:
                raise ValueError(f"the window of {key.key_id[:16]} ends before it begins")
        return self

    def public_keys(self) -> tuple[PublicKey, ...]:
        """Return all keys with their windows; a revoked key may have signed earlier."""
        since = self.revoked_since()
        return tuple(replace(key.public(), revoked_from=since.get(key.key_id)) for key in self.keys)

    def revoked_since(self) -> dict[str, datetime]:
        """Return the instants of the revocations by key id."""
        return {item.key_id: parse_instant(item.since) for item in self.revoked}


@dataclass(frozen=True, slots=True)
class SignedKeyset:
    """A keyset with its envelope."""

    keyset: Keyset
    envelope: CosignedEnvelope

    @property
    def digest(self) -> str:
        """``sha256:`` and the digest of the payload, to which the next version refers."""
        return digest_of_bytes(self.envelope.payload)

    def signed_by(self, key: SigningPort) -> SignedKeyset:
        """Add the signature of ``key``."""
        return replace(self, envelope=self.envelope.signed_by(key))

    def as_bytes(self) -> bytes:
        """Return the bytes of the file to store and to distribute."""
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
    """Return the version after ``previous``, without a signature; raises ``KeysetError``."""
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
    """Parse a keyset; its signatures are not checked. Raises ``KeysetError``."""
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
    """Parse ``document`` as a ``kind`` and check that every key matches its id.

    Raises ``KeysetError``.
    """
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


def _unique_ids(parts: Iterable[RootKey | KeyEntry | Revocation], kind: str) -> set[str]:
    ids = [part.key_id for part in parts]
    if len(set(ids)) != len(ids):
        raise ValueError(f"a {kind} is listed twice")
    return set(ids)


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


def _malformed(message: str) -> KeysetError:
    return KeysetError("keyset_malformed", message, "Fetch the keyset again (GET /v1/keyset).")
