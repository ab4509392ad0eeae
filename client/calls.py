"""The requests of a client, their answers, and their retries.

A request is repeated only if that has no further effect: it reads, it is identified by its content,
or it has an idempotency key.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel

from affidavit.client.models import (
    Certification,
    Interval,
    Ledger,
    Page,
    PolicyVersion,
    PublishedKeyset,
    RecordedRequest,
    Reservation,
    Revocation,
    Run,
    RunEvent,
    RunProgress,
    RunTest,
)

Model = TypeVar("Model", bound=BaseModel)


class Unreachable(Exception):
    """The service did not answer, or did not return a valid document."""


class Problem(Exception):
    """The service refused a request; ``code`` is stable, ``status`` the HTTP status."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail


class Recorded(Problem):
    """The request was recorded, and takes effect once enough other people send the same."""


class _PolicyFields(BaseModel):
    name: str
    version: int


class _WaivedFields(BaseModel):
    waiver: dict[str, Any] = {}


class _IssueFields(BaseModel):
    id: str
    status: str
    bundle: dict[str, Any]


class _CertificateFields(BaseModel):
    """The fields that a certificate's document must have before it is used."""

    verdict: str
    epsilon: Interval | None = None
    delta: Interval | None = None
    reasons: list[dict[str, Any]] = []
    waived: list[_WaivedFields] = []
    policy: _PolicyFields | None = None
    certificate: _IssueFields


@dataclass(frozen=True, slots=True)
class CertificateAnswer:
    """A certificate; ``document`` is the service's result document."""

    document: dict[str, Any]

    @property
    def id(self) -> str:
        """The certificate's id."""
        return str(self.document["certificate"]["id"])

    @property
    def verdict(self) -> str:
        """``certified``, ``under_noised``, ``unproved``, ``refused`` or ``undecided``."""
        return str(self.document["verdict"])

    @property
    def status(self) -> str:
        """``active``, ``awaiting_approval``, ``revoked`` and so on."""
        return str(self.document["certificate"]["status"])

    @property
    def epsilon(self) -> float | None:
        """The proved upper bound of ε in nats; None if nothing is certified."""
        bracket = self.document.get("epsilon")
        return None if bracket is None else bracket["upper"]

    @property
    def bundle(self) -> bytes:
        """The signed bundle, for ``affidavit.verify``."""
        return json.dumps(self.document["certificate"]["bundle"], ensure_ascii=False).encode()


def read_document(response: httpx.Response) -> Any:
    """Parse a JSON response; raises ``Unreachable`` if it is not JSON."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        raise Unreachable(f"{response.url} did not return JSON") from None


def read_as(model: type[Model]) -> Callable[[httpx.Response], Model]:
    """Return a function that parses a response as ``model``, or raises ``Unreachable``."""

    def read(response: httpx.Response) -> Model:
        try:
            return model.model_validate_json(response.content)
        except ValueError:
            name = model.__name__
            raise Unreachable(f"{response.url} did not return a {name} document") from None

    return read


def read_certificate(response: httpx.Response) -> CertificateAnswer:
    """Parse a certificate; raises ``Unreachable`` if the response is not a certificate."""
    document = read_document(response)
    try:
        _CertificateFields.model_validate(document)
    except ValueError:
        raise Unreachable(f"{response.url} did not return a certificate") from None
    return CertificateAnswer(document)


def read_error(response: httpx.Response) -> Exception:
    """Return the error of an unsuccessful response."""
    document = read_document(response)
    if not isinstance(document, dict) or not {"code", "detail"} <= document.keys():
        return Unreachable(f"{response.url} did not return a problem document")
    return parse_problem({**document, "status": response.status_code})


def no_response(server: str, result: object) -> Unreachable:
    """Return the error of a service that did not respond, without the system's error number."""
    reason = re.sub(r"^\[Errno -?[0-9]+\] ", "", str(result))
    return Unreachable(f"{server} did not respond: {reason}")


def parse_problem(document: Mapping[str, Any]) -> Problem:
    """Return the error that a problem document (RFC 9457) describes."""
    return Problem(int(document["status"]), str(document["code"]), str(document["detail"]))


EVENT_MODELS: dict[str, type[RunEvent] | type[RunProgress]] = {
    "state": RunEvent,
    "progress": RunProgress,
}
"""The model of each kind of event; other kinds are ignored."""
EVENT_FIELDS = ("id", "event", "data")
TIMEOUT_SECONDS = 30.0
MAX_RETRIES = 2
FIRST_RETRY_SECONDS = 0.25
"""Pause before the first retry; each later pause is twice as long."""
MAX_RETRY_SECONDS = 30.0
"""Longest pause, even if Retry-After is longer."""
RETRIED_STATUSES = (429, 502, 503, 504)
MAX_RESPONSE_BYTES = 256 * 1024 * 1024
"""Largest decompressed response."""
MAX_RESPONSE_SECONDS = 600.0
MAX_LINE_LENGTH = 64 * 1024
"""Longest line of an event stream, in characters."""
POLL_SECONDS = 1.0
"""Pause between two requests for a certification."""
RECONNECT_SECONDS = 1.0
"""Pause before an event stream reconnects."""
MAX_RECONNECTS = 30
"""Consecutive failures after which an event stream gives up."""
TRANSPORT_ERRORS = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
"""Errors of a request without a response, or with an invalid URL."""
STREAM_ERRORS = (*TRANSPORT_ERRORS, ValueError, TypeError, RecursionError)
"""Errors of a broken connection or event stream."""


class BoundedBody:
    """The decompressed body of a streamed response, limited in size and time."""

    def __init__(self, max_bytes: int, max_seconds: float) -> None:
        self._content = bytearray()
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self._end = time.monotonic() + max_seconds

    def add(self, part: bytes) -> None:
        """Append a part; raises ``httpx.HTTPError`` beyond a limit."""
        self._content += part
        if len(self._content) > self._max_bytes:
            raise httpx.RemoteProtocolError(f"the answer is longer than {self._max_bytes} bytes")
        if time.monotonic() > self._end:
            raise httpx.ReadTimeout(f"the answer took longer than {self._max_seconds:g} s")

    def complete(self, response: httpx.Response) -> httpx.Response:
        """Return ``response`` with this body."""
        headers = response.headers.copy()
        headers.pop("content-encoding", None)
        return httpx.Response(
            response.status_code,
            headers=headers,
            content=bytes(self._content),
            request=response.request,
        )


def read_bounded(response: httpx.Response, max_bytes: int, max_seconds: float) -> httpx.Response:
    """Read a streamed ``response`` of at most ``max_bytes`` when decompressed.

    Raises ``httpx.HTTPError`` if it is larger, or takes longer than ``max_seconds``.
    """
    body = BoundedBody(max_bytes, max_seconds)
    for part in response.iter_bytes():
        body.add(part)
    return body.complete(response)


POST_SECONDS = 10.0
MAX_POST_BYTES = 100_000


def post_bounded(url: str, content: bytes, media: str) -> httpx.Response:
    """Send a POST to a service of another kind, whose answer is short.

    Raises ``httpx.HTTPError`` if it is missing or too large, and ``httpx.InvalidURL``.
    """
    sent = {"Content-Type": media, "Accept-Encoding": "identity"}
    with httpx.stream("POST", url, content=content, headers=sent, timeout=POST_SECONDS) as response:
        return read_bounded(response, MAX_POST_BYTES, POST_SECONDS)


Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[Answer]):
    """One request, sent after ``pause`` seconds; ``read`` returns its answer or the next call.

    A ``repeatable`` call is retried. ``key`` is an idempotency key.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], Answer | Call[Answer]]
    pause: float = 0.0
    document: Any = None
    query: Mapping[str, str] | None = None
    key: str | None = None
    repeatable: bool = False
    prefers_wait: bool = False
    """Whether to request an answer before the timeout: 202 if it is not done, to be polled."""

    def options(self, server: str, headers: Mapping[str, str], timeout: float) -> dict[str, Any]:
        """Return the arguments of ``httpx.Client.stream``."""
        # Invalid Unicode is sent too, for the service to refuse.
        query = f"?{urlencode(self.query, errors='surrogatepass')}" if self.query else ""
        added = {"idempotency-key": self.key} if self.key else {}
        content = None
        if self.method == "POST":
            text = json.dumps(self.document, allow_nan=False, separators=(",", ":"))
            content = text.encode("ascii")
            added["content-type"] = "application/json"
        if self.prefers_wait:
            added["prefer"] = f"wait={int(timeout / 2)}"
        return {
            "method": self.method,
            "url": f"{server}{self.path}{query}",
            "content": content,
            "headers": {**headers, **added},
            "timeout": timeout,
        }

    def retry_delay(self, attempt: int, response: httpx.Response | None) -> float | None:
        """Return the seconds until the retry after ``attempt`` retries, or None for no retry."""
        if attempt >= MAX_RETRIES or not self.repeatable:
            return None
        if response is not None and response.status_code not in RETRIED_STATUSES:
            return None
        delay = FIRST_RETRY_SECONDS * float(2**attempt)
        header = "" if response is None else response.headers.get("retry-after", "")
        retry_after = float(header) if header.isdecimal() else 0.0
        return min(MAX_RETRY_SECONDS, max(delay, retry_after))


def get(path: str, query: Mapping[str, str] | None = None) -> Call[Any]:
    """Fetch the JSON document at ``path``."""
    return _get(path, read_document, query)


def content(path: str) -> Call[bytes]:
    """Fetch the bytes at ``path``."""
    return _get(path, lambda response: response.content)


def post(path: str, document: Any, key: str | None = None) -> Call[Any]:
    """Post a JSON document and return the JSON response; ``key`` is an idempotency key."""
    return Call(
        method="POST",
        path=path,
        read=read_document,
        document=document,
        key=key,
        repeatable=key is not None,
    )


def _refuse_recorded(response: httpx.Response) -> None:
    """Raise ``Recorded`` for a request that waits for other people."""
    if response.status_code == httpx.codes.ACCEPTED:
        with suppress(ValueError):
            waiting = RecordedRequest.model_validate_json(response.content)
            raise Recorded(response.status_code, waiting.code, waiting.detail)


def exchange(
    call: Call[Answer], server: str
) -> Generator[Call[Answer] | float, httpx.Response | Exception | None, Answer]:
    """Yield the calls to send and the seconds to wait, and return the answer of ``call``.

    The response to each call is sent back into the generator, so that both clients share it. Raises
    ``Unreachable`` and ``Problem``.
    """
    attempt = 0
    while True:
        result = yield call
        response = result if isinstance(result, httpx.Response) else None
        if response is not None and response.is_success:
            _refuse_recorded(response)
            answer = call.read(response)
            if not isinstance(answer, Call):
                return answer
            call, attempt = answer, 0
            yield call.pause
            continue
        delay = call.retry_delay(attempt, response)
        if delay is None:
            raise no_response(server, result) if response is None else read_error(response)
        attempt += 1
        yield delay


def submit(plan: Mapping[str, Any]) -> Call[CertificateAnswer]:
    """Certify a plan document, and wait for the certificate.

    The same plan always gets the same certificate. If a plan takes longer than a request, its
    certification is polled.
    """
    call = post("/v1/certificates", plan)
    return replace(call, read=_read_submission, repeatable=True, prefers_wait=True)


def _read_submission(response: httpx.Response) -> CertificateAnswer | Call[CertificateAnswer]:
    accepted = response.status_code == httpx.codes.ACCEPTED
    return _read_certification(response) if accepted else read_certificate(response)


def _read_certification(response: httpx.Response) -> Call[CertificateAnswer]:
    """Return the call for the certificate, or for the next state of the certification.

    Raises ``Problem`` if the certification failed.
    """
    certification = read_as(Certification)(response)
    if certification.problem is not None:
        raise parse_problem(certification.problem)
    if certification.certificate is not None:
        return certificate(certification.certificate)
    path = f"/v1/certifications/{segment(certification.id)}"
    return Call(
        method="GET", path=path, read=_read_certification, repeatable=True, pause=POLL_SECONDS
    )


def certificate(certificate_id: str) -> Call[CertificateAnswer]:
    """Fetch a certificate."""
    return _get(f"/v1/certificates/{segment(certificate_id)}", read_certificate)


def approve(certificate_id: str, decision: Mapping[str, Any]) -> Call[CertificateAnswer]:
    """Approve or reject a certificate."""
    path = f"/v1/certificates/{segment(certificate_id)}/approvals"
    return replace(post(path, decision), read=read_certificate)


def revoke(certificate_id: str, revocation: Mapping[str, Any]) -> Call[tuple[Revocation, bool]]:
    """Revoke a certificate; return the revocation, and whether it is new."""
    read, path = read_as(Revocation), f"/v1/certificates/{segment(certificate_id)}/revocation"
    return replace(
        post(path, revocation),
        read=lambda response: (read(response), response.status_code == httpx.codes.CREATED),
    )


def evidence(kind: str, subject: str) -> Call[bytes]:
    """Fetch the evidence file of one of the ``runs`` or ``certificates``."""
    return content(f"/v1/{kind}/{segment(subject)}/evidence")


def status_list() -> Call[bytes]:
    """Fetch the signed status list."""
    return content("/v1/status")


def policy(name: str, version: int) -> Call[PolicyVersion]:
    """Fetch a version of a policy."""
    return _get(f"/v1/policies/{segment(name)}/{version}", read_as(PolicyVersion))


def publish_keyset(envelope: Mapping[str, Any]) -> Call[PublishedKeyset]:
    """Publish a signed keyset."""
    return _post_model("/v1/keysets", PublishedKeyset, envelope)


def ledgers(dataset: str, certificate: str | None = None) -> Call[list[Ledger]]:
    """Fetch the ledgers of a data set, with a forecast for ``certificate``."""
    query = {} if certificate is None else {"certificate": certificate}
    read = read_as(Page[Ledger])
    return _get(f"/v1/ledgers/{segment(dataset)}", lambda response: read(response).items, query)


def reserve(dataset: str, certificate: str, key: str | None = None) -> Call[Reservation]:
    """Reserve the cost of a certified run; ``key`` is an idempotency key, a new one if None."""
    path = f"/v1/ledgers/{segment(dataset)}/reservations"
    return _post_model(
        path, Reservation, {"certificate": certificate}, key or new_idempotency_key()
    )


def release(reservation: str, reason: str, key: str | None = None) -> Call[Reservation]:
    """Release a reservation; ``key`` is an idempotency key, a new one if None."""
    path = f"/v1/reservations/{segment(reservation)}/release"
    return _post_model(path, Reservation, {"reason": reason}, key or new_idempotency_key())


def run(run_id: str) -> Call[Run]:
    """Fetch a run."""
    return _get(f"/v1/runs/{segment(run_id)}", read_as(Run))


def runs(path: str, filters: Mapping[str, str]) -> Call[Page[Run]]:
    """Fetch the page of runs at ``path``."""
    return _get(path, read_as(Page[Run]), filters)


def request_run(run: Mapping[str, Any], key: str | None = None) -> Call[Run]:
    """Request a training run; ``key`` is an idempotency key, a new one if None."""
    return _post_model("/v1/runs", Run, run, key or new_idempotency_key())


def cancel_run(run_id: str, reason: str) -> Call[Run]:
    """Cancel a run; not retried, because the answer says whether this call cancelled it."""
    return _post_model(f"/v1/runs/{segment(run_id)}/cancel", Run, {"reason": reason})


def add_replay(run_id: str, record: Mapping[str, Any]) -> Call[RunTest]:
    """Add what a replay of the training script on the run's plan showed."""
    call = _post_model(f"/v1/runs/{segment(run_id)}/replay", RunTest, record)
    return replace(call, repeatable=True)


def add_audit(run_id: str, canaries: Mapping[str, Any], losses: Sequence[float]) -> Call[RunTest]:
    """Add an audit of the run's canaries, which the service computes from their losses."""
    audit = {"canaries": canaries, "losses": losses}
    call = _post_model(f"/v1/runs/{segment(run_id)}/audit", RunTest, audit)
    return replace(call, repeatable=True)


def _get(
    path: str,
    read: Callable[[httpx.Response], Answer | Call[Answer]],
    query: Mapping[str, str] | None = None,
) -> Call[Answer]:
    return Call(method="GET", path=path, read=read, query=query, repeatable=True)


def _post_model(
    path: str, model: type[Model], document: Any, key: str | None = None
) -> Call[Model]:
    return replace(post(path, document, key), read=read_as(model))


def segment(name: str) -> str:
    """Encode ``name`` as one path segment, also ``.`` and ``..``, which clients would resolve."""
    return (
        "%2E" * len(name) if name in (".", "..") else quote(name, safe="", errors="surrogatepass")
    )


def new_idempotency_key() -> str:
    """Return a new idempotency key."""
    return str(uuid.uuid4())
