"""Ask a time-stamping authority for a timestamp (RFC 3161).

A timestamp proves that something existed at a time, also against the holder of the keys that signed
it. Needs ``pip install 'affidavit[timestamps]'``.
"""

from __future__ import annotations

import httpx

from affidavit.client.calls import post_bounded

TIMESTAMP_QUERY_TYPE = "application/timestamp-query"


class NoTimestamp(Exception):
    """The authority gave no timestamp that verifiers accept."""


def request_timestamp(content: bytes, url: str) -> bytes:
    """Request a timestamp for ``content`` from the authority at ``url``; return its reply in DER.

    Raises ``NoTimestamp`` unless the authority granted exactly this request, because verifiers
    accept nothing else.
    """
    from rfc3161_client import TimestampRequestBuilder, decode_timestamp_response
    from rfc3161_client.tsp import PKIStatus

    request = TimestampRequestBuilder().data(content).nonce(nonce=True).build()
    try:
        response = post_bounded(url, request.as_bytes(), TIMESTAMP_QUERY_TYPE)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = f"the time-stamping authority cannot be reached: {type(error).__name__}"
        raise NoTimestamp(why) from None
    if not response.is_success:
        raise NoTimestamp(f"the time-stamping authority answered {response.status_code}")
    try:
        reply = decode_timestamp_response(response.content)
    except ValueError as error:
        raise NoTimestamp(
            f"the time-stamping authority's response is not a timestamp: {error}"
        ) from None
    if reply.status != PKIStatus.GRANTED.value:
        raise NoTimestamp(f"the time-stamping authority refused: {reply.status_string}")
    if reply.tst_info.nonce != request.nonce:
        raise NoTimestamp("the time-stamping authority's reply has another request's nonce")
    if reply.tst_info.message_imprint.message != request.message_imprint.message:
        raise NoTimestamp("the time-stamping authority stamped something else")
    return bytes(reply.as_bytes())
