"""RFC 3161 stamps of checkpoints: somebody else's word for when one existed.

A time-stamping authority signs the hash of a checkpoint's bytes with its time. A log that
is rewritten later cannot have had that root then, whoever holds its database and its key.
The stamp lies beside the checkpoint, ``FILE.tsr``, as ``openssl ts -verify`` reads it too.
It needs ``pip install 'affidavit[timestamps]'``.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from cryptography.x509 import load_pem_x509_certificates

from affidavit.service.log.exports import ExportFailed, post

QUERY = "application/timestamp-query"


class BadStamp(Exception):
    """The stamp is not one of these bytes by an authority that is trusted."""


def stamp(content: bytes, url: str) -> bytes:
    """The authority's reply about ``content``, which says that it was granted.

    Raises ``ExportFailed``.
    """
    from rfc3161_client import TimestampRequestBuilder, decode_timestamp_response
    from rfc3161_client.tsp import PKIStatus

    request = TimestampRequestBuilder().data(content).nonce(nonce=True).build()
    answer = post(url, request.as_bytes(), QUERY)
    if not answer.is_success:
        raise ExportFailed(f"the time-stamping authority answered {answer.status_code}")
    try:
        reply = decode_timestamp_response(answer.content)
    except ValueError as error:
        raise ExportFailed(f"the time-stamping authority's answer is no stamp: {error}") from None
    if PKIStatus(reply.status) not in (PKIStatus.GRANTED, PKIStatus.GRANTED_WITH_MODS):
        raise ExportFailed(f"the time-stamping authority refused: {reply.status_string}")
    if reply.tst_info.nonce != request.nonce:
        raise ExportFailed("the time-stamping authority answered another request")
    return bytes(reply.as_bytes())


def stamped_at(content: bytes, reply: bytes, roots: Path) -> datetime:
    """When ``content`` was stamped, by an authority below one of the PEM certificates ``roots``.

    Raises ``BadStamp``.
    """
    from rfc3161_client import VerificationError, VerifierBuilder, decode_timestamp_response

    try:
        found = decode_timestamp_response(reply)
        builder = VerifierBuilder()
        for certificate in load_pem_x509_certificates(roots.read_bytes()):
            builder = builder.add_root_certificate(certificate)
        builder.build().verify_message(found, content)
    except OSError as error:
        raise BadStamp(f"{roots} cannot be read: {error.strerror}") from None
    except (ValueError, VerificationError) as error:
        raise BadStamp(f"the stamp does not hold: {error}") from None
    moment: datetime = found.tst_info.gen_time
    return moment
