"""The blocking client."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from affidavit.client import calls
from affidavit.client.calls import Answer, Call
from affidavit.client.models import (
    Certification,
    Ledger,
    PolicyVersion,
    PublishedKeyset,
    Reservation,
    Revocation,
    Run,
    RunEvent,
    RunProgress,
)
from affidavit.client.responses import CertificateAnswer, EventReader, Unreachable, error_of


class Client:
    """A client of the service at ``server``; methods raise ``Unreachable`` and ``Problem``.

    Reads, and requests whose repetition has no further effect, are sent again when the service
    does not answer or is busy.
    """

    def __init__(
        self, server: str, token: str | None = None, *, timeout: float = calls.TIMEOUT
    ) -> None:
        self.server = server.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._http = httpx.Client(timeout=timeout)
        # Whoever needs the connections closed at once uses `with` or `close`.
        weakref.finalize(self, self._http.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def certificate(self, certificate_id: str) -> CertificateAnswer:
        """A certificate."""
        return self.send(calls.certificate(certificate_id))

    def submit(self, plan: Mapping[str, Any]) -> CertificateAnswer:
        """Certify a plan document; waits for the certificate, however long the service takes."""
        answer = self.send(calls.submit(plan))
        while isinstance(answer, Certification):
            if answer.state == "running":
                time.sleep(calls.POLL_DELAY)
            answer = self.send(calls.outcome(answer))
        return answer

    def approve(self, certificate_id: str, decision: Mapping[str, Any]) -> CertificateAnswer:
        """Approve or reject a certificate."""
        return self.send(calls.approve(certificate_id, decision))

    def revoke(self, certificate_id: str, revocation: Mapping[str, Any]) -> tuple[Revocation, bool]:
        """Revoke a certificate; the revocation, and whether it is new."""
        return self.send(calls.revoke(certificate_id, revocation))

    def status_list(self) -> bytes:
        """The signed status list."""
        return self.send(calls.status_list())

    def policy(self, name: str, version: int) -> PolicyVersion:
        """A version of a policy."""
        return self.send(calls.policy(name, version))

    def publish_keyset(self, envelope: Mapping[str, Any]) -> PublishedKeyset:
        """Publish a signed keyset."""
        return self.send(calls.publish_keyset(envelope))

    def ledgers(self, dataset: str, certificate: str | None = None) -> list[Ledger]:
        """The ledgers of a data set, with a forecast for ``certificate``."""
        return self.send(calls.ledgers(dataset, certificate)).items

    def reserve(self, dataset: str, certificate: str, key: str | None = None) -> Reservation:
        """Reserve the cost of a certified run; ``key`` is an idempotency key, a new one if None."""
        return self.send(calls.reserve(dataset, certificate, key))

    def release(self, reservation: str, reason: str, key: str | None = None) -> Reservation:
        """Release a reservation; ``key`` is an idempotency key, a new one if None."""
        return self.send(calls.release(reservation, reason, key))

    def request_run(self, run: Mapping[str, Any], key: str | None = None) -> Run:
        """Request a training run; ``key`` is an idempotency key, a new one if None."""
        return self.send(calls.request_run(run, key))

    def run(self, run_id: str) -> Run:
        """The state of a run."""
        return self.send(calls.run(run_id))

    def runs(self, **filters: str) -> Iterator[Run]:
        """Every run that the filters of ``GET /v1/runs`` let through, the latest first."""
        page = self.send(calls.runs("/v1/runs", filters))
        while True:
            yield from page.items
            if page.next is None:
                return
            page = self.send(calls.runs(page.next, {}))

    def cancel_run(self, run_id: str, reason: str) -> Run:
        """Cancel a run."""
        return self.send(calls.cancel_run(run_id, reason))

    def run_events(self, run_id: str) -> Iterator[RunEvent | RunProgress]:
        """Events of a run, its states and its progress, until the service says that it is over.

        Reconnects after the last event; a service that keeps failing raises.
        """
        url, reader, failures = f"{self.server}/v1/runs/{run_id}/events", EventReader(), 0
        while True:
            headers = {**self._headers, **({"last-event-id": reader.last} if reader.last else {})}
            try:
                with self._http.stream("GET", url, headers=headers) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    if response.is_success:
                        for event in reader.all(response.iter_lines()):
                            yield event
                            failures = -1
                        failures = -1
                    else:
                        response.read()
                        if not response.is_server_error or failures == calls.MAX_RECONNECTS:
                            raise error_of(response)
            except calls.FAILURES as error:
                if failures == calls.MAX_RECONNECTS:
                    raise Unreachable(f"{self.server}: {error}") from None
            failures += 1
            time.sleep(calls.RECONNECT_DELAY)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """The JSON document at ``path``."""
        return self.send(calls.get(path, query))

    def content(self, path: str) -> bytes:
        """The bytes at ``path``."""
        return self.send(calls.content(path))

    def post(self, path: str, document: Any, key: str | None = None) -> Any:
        """Post a JSON document and return the JSON response; ``key`` is an idempotency key."""
        return self.send(calls.post(path, document, key))

    def send(self, call: Call[Answer]) -> Answer:
        """Send a request, again if it may be repeated, and return its answer."""
        attempt = 0
        while True:
            response, failure = None, ""
            try:
                options = call.options(self._headers, self._timeout)
                response = self._http.request(call.method, f"{self.server}{call.target}", **options)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                failure = str(error)
            if response is not None and response.is_success:
                return call.read(response)
            delay = call.delay(attempt, response)
            if delay is None:
                raise (
                    Unreachable(f"{self.server}: {failure}")
                    if response is None
                    else error_of(response)
                )
            attempt += 1
            time.sleep(delay)
