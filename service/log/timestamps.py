"""Ask a time-stamping authority (RFC 3161) for a timestamp of a checkpoint.

A log that is rewritten later cannot have had that root at that time, whoever holds its database
and key. The timestamp is stored beside the exported checkpoint, ``FILE.tsr``, in the form that
``openssl ts -verify`` reads, and with the cosignatures, so that bundles carry it. Needs
``pip install 'affidavit[timestamps]'``.
"""

from __future__ import annotations

from affidavit.service.log.checkpoint_publisher import PublishError, post

QUERY = "application/timestamp-query"


def request_timestamp(content: bytes, url: str) -> bytes:
    """The authority's reply for ``content``, DER; raises ``PublishError`` unless it granted that.

    What it granted with changes no verifier accepts.
    """
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
    if reply.status != PKIStatus.GRANTED.value:
        raise PublishError(f"the time-stamping authority refused: {reply.status_string}")
    if reply.tst_info.nonce != request.nonce:
        raise PublishError("the time-stamping authority's reply has another request's nonce")
    if reply.tst_info.message_imprint.message != request.message_imprint.message:
        raise PublishError("the time-stamping authority stamped something else")
    return bytes(reply.as_bytes())
