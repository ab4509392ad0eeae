"""DSSE envelopes: a signature covers the payload's type as well as its bytes.

The signed bytes are the pre-authentication encoding

    "DSSEv1" SP LEN(type) SP type SP LEN(payload) SP payload

so that a payload cannot pass for one of another type. Verification reads the bytes as signed and
never serialises them again. Base64 must be canonical, or two different files could have one
signature.

A ``CosignedEnvelope`` collects the signatures of several keys; each key signs at most once, so that
a threshold counts keys. An ``Envelope`` has exactly one signature.

Reference: secure-systems-lab/dsse, protocol.md, version 1.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from affidavit.plan import canonical_json, digest_of
from affidavit.trust.key import (
    PublicKey,
    SigningPort,
    by_id,
    format_instant,
    parse_instant,
)

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
MAX_SIGNATURES = 64


class BadEnvelope(Exception):
    """The document is not a DSSE envelope in canonical form."""


class SignedPart(BaseModel):
    """A part of a signed document: frozen, no unknown fields, no coercion."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_by_name=True, validate_by_alias=True
    )

    def as_document(self) -> dict[str, Any]:
        """Return the part as JSON data."""
        return self.model_dump(mode="json", by_alias=True)


Model = TypeVar("Model", bound=SignedPart)


def validated(
    kind: type[Model], document: Any, written: Callable[[Any], bytes | str] = canonical_json
) -> Model:
    """Parse ``document`` as a ``kind``; raises ``ValueError`` that names the first invalid field.

    The document is first ``written`` as JSON; canonical JSON writes 1.0 as an integer.
    """
    try:
        return kind.model_validate_json(written(document), by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = "/".join(map(str, first["loc"])) or "the document"
        raise ValueError(f"{where}: {first['msg']}") from None
    except RecursionError:
        raise ValueError("the document is nested too deeply") from None


def _validate_instant(text: str) -> str:
    with contextlib.suppress(ValueError):
        if format_instant(parse_instant(text)) == text:
            return text
    raise PydanticCustomError("not_instant", "a time is text like 2027-01-31T00:00:00Z")


Instant = Annotated[str, Field(strict=True), AfterValidator(_validate_instant)]
Digest = Annotated[str, StringConstraints(strict=True, pattern=r"^sha256:[0-9a-f]{64}$")]


def encode_base64(raw: bytes) -> str:
    """Return ``raw`` in standard base64."""
    return base64.b64encode(raw).decode("ascii")


def decode_base64(text: str) -> bytes:
    """Decode canonical base64; raises ``ValueError`` for any other form."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("not base64") from None
    if encode_base64(raw) != text:
        raise ValueError("not in canonical base64")
    return raw


def _parse_base64(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("base64", "not a string")
    try:
        return decode_base64(value)
    except ValueError as error:
        raise PydanticCustomError("base64", str(error)) from None


Base64 = Annotated[bytes, BeforeValidator(_parse_base64), PlainSerializer(encode_base64)]
"""Bytes that a document writes in canonical base64."""


class EnvelopeSignature(SignedPart):
    """One key's signature."""

    key_id: Annotated[str, Field(alias="keyid")]
    signature: Annotated[Base64, Field(alias="sig")]


class CosignedEnvelope(SignedPart):
    """A payload with the signatures added so far, possibly none."""

    payload: Base64
    payload_type: Annotated[str, Field(alias="payloadType")]
    signatures: Annotated[tuple[EnvelopeSignature, ...], Field(max_length=MAX_SIGNATURES)]

    @model_validator(mode="after")
    def _validate_signers(self) -> Self:
        if len({signature.key_id for signature in self.signatures}) != len(self.signatures):
            raise PydanticCustomError("twice", "a key signed more than once")
        return self

    def signed_by(self, key: SigningPort) -> Self:
        """Add the signature of ``key``; it replaces an earlier one of the same key."""
        created = EnvelopeSignature(key_id=key.key_id, signature=key.sign(self.signed_bytes))
        others = [signature for signature in self.signatures if signature.key_id != key.key_id]
        return self.model_copy(update={"signatures": (*others, created)})

    def signers(self, keys: Iterable[PublicKey]) -> frozenset[str]:
        """Return the ids of the ``keys`` with a valid signature on this envelope."""
        known = by_id(keys)
        return frozenset(
            signature.key_id
            for signature in self.signatures
            if signature.key_id in known
            and known[signature.key_id].accepts(signature.signature, self.signed_bytes)
        )

    @property
    def signed_bytes(self) -> bytes:
        """The signed bytes, which every signature covers."""
        return pre_authentication_encoding(self.payload_type, self.payload)


class Envelope(CosignedEnvelope):
    """A payload with one signature."""

    @property
    def key_id(self) -> str:
        """The id of the signing key."""
        return self.signatures[0].key_id

    @property
    def signature(self) -> bytes:
        """The signature."""
        return self.signatures[0].signature

    @property
    def digest(self) -> str:
        """sha256 of the envelope's RFC 8785 canonical JSON."""
        return digest_of(self.as_document())


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the pre-authentication encoding (PAE) of DSSE.

    >>> pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    b'DSSEv1 29 http://example.com/HelloWorld 11 hello world'
    """
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sign_envelope(payload: bytes, key: SigningPort, payload_type: str = PAYLOAD_TYPE) -> Envelope:
    """Sign ``payload``, by default an in-toto statement."""
    return Envelope(payload_type=payload_type, payload=payload, signatures=()).signed_by(key)


def read_envelope(document: Any) -> Envelope:
    """Parse an envelope with one signature; raises ``BadEnvelope``."""
    envelope = _read(Envelope, document)
    if len(envelope.signatures) != 1:
        raise BadEnvelope("the envelope must have exactly one signature")
    return envelope


def read_cosigned(document: Any) -> CosignedEnvelope:
    """Parse an envelope with any number of signatures; raises ``BadEnvelope``."""
    return _read(CosignedEnvelope, document)


def _read(kind: type[Model], document: Any) -> Model:
    try:
        return validated(kind, document)
    except ValueError as error:
        raise BadEnvelope(f"the envelope: {error}") from None


def in_toto(subjects: Mapping[str, str], predicate_type: str, predicate: Any) -> dict[str, Any]:
    """Return an in-toto Statement v1; ``subjects`` maps names to their hexadecimal sha256."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": n, "digest": {"sha256": digest}} for n, digest in subjects.items()],
        "predicateType": predicate_type,
        "predicate": predicate,
    }


def statement_in(bundle: bytes) -> dict[str, Any]:
    """Return the statement of a bundle that was verified before; it is not verified here."""
    statement: dict[str, Any] = json.loads(read_envelope(json.loads(bundle)["envelope"]).payload)
    return statement
