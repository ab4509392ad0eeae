"""The requests of a client, their answers, and when one is sent again.

A request is repeated only if repeating it has no further effect: it reads, its answer is found by
its content, or it has an idempotency key.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Generator, Mapping
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
    Reservation,
    Revocation,
    Run,
    RunEvent,
    RunProgress,
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


class _PolicyForm(BaseModel):
    name: str
    version: int


class _WaivedForm(BaseModel):
    waiver: dict[str, Any] = {}


class _IssueForm(BaseModel):
    id: str
    status: str
    bundle: dict[str, Any]


class _CertificateForm(BaseModel):
    """What must hold of a certificate's document before anything is read from it."""

    verdict: str
    epsilon: Interval | None = None
    delta: Interval | None = None
    reasons: list[dict[str, Any]] = []
    waived: list[_WaivedForm] = []
    policy: _PolicyForm | None = None
    certificate: _IssueForm


@dataclass(frozen=True, slots=True)
class CertificateAnswer:
    """A certificate's result ``document``, as the service gave it."""

    document: dict[str, Any]

    @property
    def id(self) -> str:
        """The certificate's id."""
        return str(self.document["certificate"]["id"])

    @property
    def verdict(self) -> str:
        """The verdict: ``certified``, or why not."""
        return str(self.document["verdict"])

    @property
    def status(self) -> str:
        """``active``, ``pending``, ``revoked`` and so on."""
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


def document_of(response: httpx.Response) -> Any:
    """The JSON document of a response; raises ``Unreachable`` where it is none."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        raise Unreachable(f"{response.url} did not return JSON") from None


def reader_of(model: type[Model]) -> Callable[[httpx.Response], Model]:
    """What reads a response as ``model``; it raises ``Unreachable`` where it is none."""

    def read(response: httpx.Response) -> Model:
        try:
            return model.model_validate_json(response.content)
        except ValueError:
            name = model.__name__
            raise Unreachable(f"{response.url} did not return a {name} document") from None

    return read


def certificate_of(response: httpx.Response) -> CertificateAnswer:
    """The certificate of a response; raises ``Unreachable`` where it has none."""
    document = document_of(response)
    try:
        _CertificateForm.model_validate(document)
    except ValueError:
        raise Unreachable(f"{response.url} did not return a certificate") from None
    return CertificateAnswer(document)


def error_of(response: httpx.Response) -> Exception:
    """The error of an unsuccessful response."""
    document = document_of(response)
    if not isinstance(document, dict) or not {"code", "detail"} <= document.keys():
        return Unreachable(f"{response.url} did not return a problem document")
    return problem_of({**document, "status": response.status_code})


def unreachable(server: str, result: object) -> Unreachable:
    """The error of a service that did not respond, without the number of the system's error."""
    reason = re.sub(r"^\[Errno -?[0-9]+\] ", "", str(result))
    return Unreachable(f"{server} did not respond: {reason}")


def problem_of(document: Mapping[str, Any]) -> Problem:
    """The error that a problem document describes."""
    return Problem(int(document["status"]), str(document["code"]), str(document["detail"]))


EVENTS: dict[str, type[RunEvent] | type[RunProgress]] = {"state": RunEvent, "progress": RunProgress}
"""The model of each kind of event; other kinds are passed over."""
FIELDS = ("id", "event", "data")


TIMEOUT = 30.0
"""Seconds."""
RETRIES = 2
"""Repetitions of a request that failed."""
RETRY_DELAY = 0.25
"""Seconds before the first repetition; each further one waits twice as long."""
MAX_BYTES = 256 * 1024 * 1024
"""Of an answer, when decompressed."""
MAX_SECONDS = 600.0
"""Until an answer is complete."""
MAX_LINE = 64 * 1024
"""Characters of a line of events."""
LONGEST_DELAY = 30.0
"""Seconds, whatever Retry-After says."""
POLL_DELAY = 1.0
"""Seconds between two questions for a certification."""
RECONNECT_DELAY = 1.0
"""Seconds before an event stream reconnects."""
MAX_RECONNECTS = 30
"""Failed reconnects in a row before giving up."""
TEMPORARY = (429, 502, 503, 504)
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
"""What a request raises that no server answers, or whose URL names none."""
FAILURES = (*NO_ANSWER, ValueError, TypeError, RecursionError)
"""What a broken connection or stream raises."""


class Body:
    """The body of a streamed response: at most ``most`` bytes when decompressed, in ``seconds``."""

    def __init__(self, most: int, seconds: float) -> None:
        self._content = bytearray()
        self._most = most
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def add(self, part: bytes) -> None:
        """One more part; raises ``httpx.HTTPError`` where it is too much or too late."""
        self._content += part
        if len(self._content) > self._most:
            raise httpx.RemoteProtocolError(f"the answer is longer than {self._most} bytes")
        if time.monotonic() > self._end:
            raise httpx.ReadTimeout(f"the answer takes longer than {self._seconds:g} s")

    def of(self, response: httpx.Response) -> httpx.Response:
        """``response``, with this body."""
        headers = response.headers.copy()
        headers.pop("content-encoding", None)
        return httpx.Response(
            response.status_code,
            headers=headers,
            content=bytes(self._content),
            request=response.request,
        )


def read_at_most(response: httpx.Response, most: int, seconds: float) -> httpx.Response:
    """A streamed ``response`` as a whole, of ``most`` bytes when decompressed.

    Raises ``httpx.HTTPError`` where it is more, or takes longer than ``seconds``.
    """
    body = Body(most, seconds)
    for part in response.iter_bytes():
        body.add(part)
    return body.of(response)


Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[Answer]):
    """One request; ``read`` returns its answer, or the call that follows after ``pause`` seconds.

    ``repeatable`` lets it be sent again.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], Answer | Call[Answer]]
    pause: float = 0.0
    document: Any = None
    query: Mapping[str, str] | None = None
    key: str | None = None
    repeatable: bool = False
    waits: bool = False
    """Whether the service may answer with 202 before the timeout, and the answer is polled."""

    @property
    def target(self) -> str:
        """The path and the query; invalid Unicode is sent too, for the service to refuse."""
        query = f"?{urlencode(self.query, errors='surrogatepass')}" if self.query else ""
        return f"{self.path}{query}"

    def options(self, headers: Mapping[str, str], timeout: float) -> dict[str, Any]:
        """The arguments of httpx for this request."""
        key = {"idempotency-key": self.key} if self.key else {}
        body: dict[str, Any] = {}
        if self.method == "POST":
            text = json.dumps(self.document, allow_nan=False, separators=(",", ":"))
            body["content"] = text.encode("ascii")
            key["content-type"] = "application/json"
        if self.waits:
            key["prefer"] = f"wait={int(timeout / 2)}"
        return {**body, "headers": {**headers, **key}, "timeout": timeout}

    def delay(self, attempt: int, response: httpx.Response | None) -> float | None:
        """Seconds until the request is sent again; None if it is not, after ``attempt`` tries."""
        if attempt >= RETRIES or not self.repeatable:
            return None
        if response is not None and response.status_code not in TEMPORARY:
            return None
        delay = RETRY_DELAY * float(2**attempt)
        stated = "" if response is None else response.headers.get("retry-after", "")
        asked_for = float(stated) if stated.isdecimal() else 0.0
        return min(LONGEST_DELAY, max(delay, asked_for))


def get(path: str, query: Mapping[str, str] | None = None) -> Call[Any]:
    """The JSON document at ``path``."""
    return _get(path, document_of, query)


def content(path: str) -> Call[bytes]:
    """The bytes at ``path``."""
    return _get(path, lambda response: response.content)


def post(path: str, document: Any, key: str | None = None) -> Call[Any]:
    """Post a JSON document and return the JSON response; ``key`` is an idempotency key."""
    return Call(
        method="POST",
        path=path,
        read=document_of,
        document=document,
        key=key,
        repeatable=key is not None,
    )


def conversation(
    call: Call[Answer], server: str
) -> Generator[Call[Answer] | float, httpx.Response | Exception | None, Answer]:
    """The answer of ``call``, from the responses to the calls that this yields to be sent.

    It yields seconds to wait as well. Raises ``Unreachable`` and ``Problem``.
    """
    attempt = 0
    while True:
        result = yield call
        response = result if isinstance(result, httpx.Response) else None
        if response is not None and response.is_success:
            answer = call.read(response)
            if not isinstance(answer, Call):
                return answer
            call, attempt = answer, 0
            yield call.pause
            continue
        delay = call.delay(attempt, response)
        if delay is None:
            raise unreachable(server, result) if response is None else error_of(response)
        attempt += 1
        yield delay


def submit(plan: Mapping[str, Any]) -> Call[CertificateAnswer]:
    """Certify a plan document; waits for the certificate as long as the service takes.

    The same plan always gets the same certificate. A plan that takes longer than a request is
    answered with a certification, which is polled.
    """
    call = post("/v1/certificates", plan)
    return replace(call, read=_submitted, repeatable=True, waits=True)


def _submitted(response: httpx.Response) -> CertificateAnswer | Call[CertificateAnswer]:
    accepted = response.status_code == httpx.codes.ACCEPTED
    return _polled(response) if accepted else certificate_of(response)


def _polled(response: httpx.Response) -> Call[CertificateAnswer]:
    """What comes after a certification: its next state, or its certificate.

    Raises ``Problem`` where it failed.
    """
    certification = reader_of(Certification)(response)
    if certification.problem is not None:
        raise problem_of(certification.problem)
    if certification.certificate is not None:
        return certificate(certification.certificate)
    path = f"/v1/certifications/{segment(certification.id)}"
    return Call(method="GET", path=path, read=_polled, repeatable=True, pause=POLL_DELAY)


def certificate(certificate_id: str) -> Call[CertificateAnswer]:
    """A certificate."""
    return _get(f"/v1/certificates/{segment(certificate_id)}", certificate_of)


def approve(certificate_id: str, decision: Mapping[str, Any]) -> Call[CertificateAnswer]:
    """Approve or reject a certificate."""
    path = f"/v1/certificates/{segment(certificate_id)}/approvals"
    return replace(post(path, decision), read=certificate_of)


def revoke(certificate_id: str, revocation: Mapping[str, Any]) -> Call[tuple[Revocation, bool]]:
    """Revoke a certificate; the revocation, and whether it is new."""
    read, path = reader_of(Revocation), f"/v1/certificates/{segment(certificate_id)}/revocation"
    return replace(
        post(path, revocation),
        read=lambda response: (read(response), response.status_code == httpx.codes.CREATED),
    )


def status_list() -> Call[bytes]:
    """The signed status list."""
    return content("/v1/status")


def policy(name: str, version: int) -> Call[PolicyVersion]:
    """A version of a policy."""
    return _get(f"/v1/policies/{segment(name)}/{version}", reader_of(PolicyVersion))


def publish_keyset(envelope: Mapping[str, Any]) -> Call[PublishedKeyset]:
    """Publish a signed keyset."""
    return _change("/v1/keysets", PublishedKeyset, envelope)


def ledgers(dataset: str, certificate: str | None = None) -> Call[list[Ledger]]:
    """The ledgers of a data set, with a forecast for ``certificate``."""
    query = {} if certificate is None else {"certificate": certificate}
    read = reader_of(Page[Ledger])
    return _get(f"/v1/ledgers/{segment(dataset)}", lambda response: read(response).items, query)


def reserve(dataset: str, certificate: str, key: str | None = None) -> Call[Reservation]:
    """Reserve the cost of a certified run; ``key`` is an idempotency key, a new one if None."""
    path = f"/v1/ledgers/{segment(dataset)}/reservations"
    return _change(path, Reservation, {"certificate": certificate}, key or new_key())


def release(reservation: str, reason: str, key: str | None = None) -> Call[Reservation]:
    """Release a reservation; ``key`` is an idempotency key, a new one if None."""
    path = f"/v1/reservations/{segment(reservation)}/release"
    return _change(path, Reservation, {"reason": reason}, key or new_key())


def run(run_id: str) -> Call[Run]:
    """The state of a run."""
    return _get(f"/v1/runs/{segment(run_id)}", reader_of(Run))


def runs(path: str, filters: Mapping[str, str]) -> Call[Page[Run]]:
    """Read the page of runs at ``path``."""
    return _get(path, reader_of(Page[Run]), filters)


def request_run(run: Mapping[str, Any], key: str | None = None) -> Call[Run]:
    """Request a training run; ``key`` is an idempotency key, a new one if None."""
    return _change("/v1/runs", Run, run, key or new_key())


def cancel_run(run_id: str, reason: str) -> Call[Run]:
    """Cancel a run; not repeated, because the answer says whether this call stopped it."""
    return _change(f"/v1/runs/{segment(run_id)}/cancel", Run, {"reason": reason})


def _get(
    path: str,
    read: Callable[[httpx.Response], Answer | Call[Answer]],
    query: Mapping[str, str] | None = None,
) -> Call[Answer]:
    return Call(method="GET", path=path, read=read, query=query, repeatable=True)


def _change(path: str, model: type[Model], document: Any, key: str | None = None) -> Call[Model]:
    return replace(post(path, document, key), read=reader_of(model))


def segment(name: str) -> str:
    """``name`` as one path segment; dots are encoded so that no client resolves them."""
    return (
        "%2E" * len(name) if name in (".", "..") else quote(name, safe="", errors="surrogatepass")
    )


def new_key() -> str:
    """A new idempotency key."""
    return str(uuid.uuid4())
