"""RFC 3161 timestamps of checkpoints: a third party's proof of when one existed.

A time-stamping authority signs the hash of a checkpoint together with its own time. A log
that is rewritten later cannot have had that root at that time, whoever holds its database
and key. The timestamp is stored beside the checkpoint, ``FILE.tsr``, in the form that
``openssl ts -verify`` reads. Needs ``pip install 'affidavit[timestamps]'``.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from cryptography.x509 import load_pem_x509_certificates

from affidavit.service.log.checkpoint_publisher import PublishError, post

QUERY = "application/timestamp-query"


class BadTimestamp(Exception):
    """The timestamp is not one of these bytes by a trusted authority."""


def request_timestamp(content: bytes, url: str) -> bytes:
    """The authority's reply for ``content``, DER; raises ``PublishError`` if not granted."""
    from rfc3161_client import TimestampRequestBuilder, decode_timestamp_response
    from rfc3161_client.tsp import PKIStatus

    request = TimestampRequestBuilder().data(content).nonce(nonce=True).build()
    response = post(url, request.as_bytes(), QUERY)
    if not response.is_success:
        raise PublishError(f"the time-stamping authority answered {response.status_code}")
    try:
        reply = decode_timestamp_response(response.content)
    except ValueError as error:
        raise PublishError(
            f"the time-stamping authority's response is not a timestamp: {error}"
        ) from None
    if PKIStatus(reply.status) not in (PKIStatus.GRANTED, PKIStatus.GRANTED_WITH_MODS):
        raise PublishError(f"the time-stamping authority refused: {reply.status_string}")
    if reply.tst_info.nonce != request.nonce:
        raise PublishError("the time-stamping authority's reply has another request's nonce")
    return bytes(reply.as_bytes())


def verify_timestamp(content: bytes, reply: bytes, roots: Path) -> datetime:
    """The time of a valid timestamp of ``content`` by an authority below a root in ``roots``.

    ``roots`` is a PEM file. Raises ``BadTimestamp``.
    """
    from rfc3161_client import VerificationError, VerifierBuilder, decode_timestamp_response

    try:
        response = decode_timestamp_response(reply)
        builder = VerifierBuilder()
        for certificate in load_pem_x509_certificates(roots.read_bytes()):
            builder = builder.add_root_certificate(certificate)
        builder.build().verify_message(response, content)
    except OSError as error:
        raise BadTimestamp(f"{roots} cannot be read: {error.strerror}") from None
    except (ValueError, VerificationError) as error:
        raise BadTimestamp(f"the timestamp is not valid: {error}") from None
    moment: datetime = response.tst_info.gen_time
    return moment
