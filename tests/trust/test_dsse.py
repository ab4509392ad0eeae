"""The envelope is DSSE as other implementations read and write it."""

from __future__ import annotations

import json

import pytest
from securesystemslib.dsse import Envelope as TheirEnvelope
from securesystemslib.exceptions import VerificationError as TheirRefusal
from securesystemslib.signer import CryptoSigner, SSlibKey

from affidavit.certificate.issuance import Certificate
from affidavit.trust import (
    BadEnvelope,
    SigningKey,
    read_envelope,
    sign_envelope,
)
from affidavit.trust.dsse import PAYLOAD_TYPE, pre_authentication_encoding


def their_key(key: SigningKey) -> SSlibKey:
    return SSlibKey.from_crypto(key.public.key, keyid=key.key_id)


def test_they_verify_what_we_sign(certificate: Certificate, key: SigningKey) -> None:
    document = json.loads(certificate.bundle)["envelope"]
    theirs = TheirEnvelope.from_dict(document)
    theirs.verify([their_key(key)], 1)
    assert json.loads(theirs.payload) == certificate.statement
    with pytest.raises(TheirRefusal):
        theirs.verify([their_key(SigningKey.generate())], 1)


def test_we_read_what_they_sign(key: SigningKey) -> None:
    theirs = TheirEnvelope(payload=b'{"a": 1}', payload_type=PAYLOAD_TYPE, signatures={})
    theirs.sign(CryptoSigner(key.private, their_key(key)))
    envelope = read_envelope(theirs.to_dict())
    assert envelope.payload == b'{"a": 1}'
    assert key.public.accepts(envelope.signature, envelope.signed_bytes)


def test_the_encoding_is_theirs(key: SigningKey) -> None:
    for payload in (b"", b"hello", b"\x00\xff" * 40):
        envelope = sign_envelope(payload, key)
        theirs = TheirEnvelope(payload=payload, payload_type=PAYLOAD_TYPE, signatures={})
        assert envelope.signed_bytes == theirs.pae()
        assert envelope.signed_bytes == pre_authentication_encoding(PAYLOAD_TYPE, payload)


def test_what_is_written_is_read_back(key: SigningKey) -> None:
    envelope = sign_envelope(b"payload", key)
    assert read_envelope(envelope.as_document()) == envelope


@pytest.mark.parametrize("document", [None, [], {}, {"payload": "", "payloadType": ""}, "x"])
def test_other_shapes_are_refused(document: object) -> None:
    with pytest.raises(BadEnvelope):
        read_envelope(document)


@pytest.mark.parametrize("field", ["payload", "sig"])
@pytest.mark.parametrize(
    ("value", "wrong"),
    [(1, "not a string"), ("@@@@", "not base64"), ("YR==", "not in canonical base64")],
)
def test_a_refusal_names_the_field_and_what_is_wrong_with_it(
    key: SigningKey, field: str, value: object, wrong: str
) -> None:
    document = sign_envelope(b"payload", key).as_document()
    (document if field == "payload" else document["signatures"][0])[field] = value
    with pytest.raises(BadEnvelope, match=f"{field}: {wrong}$"):
        read_envelope(document)
