"""The asynchronous client: the methods of ``Client``, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
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


class AsyncClient:
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
        self._http = httpx.AsyncClient(timeout=timeout)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def certificate(self, certificate_id: str) -> CertificateAnswer:
        """A certificate."""
        return await self.send(calls.certificate(certificate_id))

    async def submit(self, plan: Mapping[str, Any]) -> CertificateAnswer:
        """Certify a plan document; waits for the certificate, however long the service takes."""
        answer = await self.send(calls.submit(plan))
        while isinstance(answer, Certification):
            if answer.state == "running":
                await asyncio.sleep(calls.POLL_DELAY)
            answer = await self.send(calls.outcome(answer))
        return answer

    async def approve(self, certificate_id: str, decision: Mapping[str, Any]) -> CertificateAnswer:
        """Approve or reject a certificate."""
        return await self.send(calls.approve(certificate_id, decision))

    async def revoke(
        self, certificate_id: str, revocation: Mapping[str, Any]
    ) -> tuple[Revocation, bool]:
        """Revoke a certificate; the revocation, and whether it is new."""
        return await self.send(calls.revoke(certificate_id, revocation))

    async def status_list(self) -> bytes:
        """The signed status list."""
        return await self.send(calls.status_list())

    async def policy(self, name: str, version: int) -> PolicyVersion:
        """A version of a policy."""
        return await self.send(calls.policy(name, version))

    async def publish_keyset(self, envelope: Mapping[str, Any]) -> PublishedKeyset:
        """Publish a signed keyset."""
        return await self.send(calls.publish_keyset(envelope))

    async def ledgers(self, dataset: str, certificate: str | None = None) -> list[Ledger]:
        """The ledgers of a data set, with a forecast for ``certificate``."""
        return (await self.send(calls.ledgers(dataset, certificate))).items

    async def reserve(self, dataset: str, certificate: str, key: str | None = None) -> Reservation:
        """Reserve the cost of a certified run; ``key`` is an idempotency key, a new one if None."""
        return await self.send(calls.reserve(dataset, certificate, key))

    async def release(self, reservation: str, reason: str, key: str | None = None) -> Reservation:
        """Release a reservation; ``key`` is an idempotency key, a new one if None."""
        return await self.send(calls.release(reservation, reason, key))

    async def request_run(self, run: Mapping[str, Any], key: str | None = None) -> Run:
        """Request a training run; ``key`` is an idempotency key, a new one if None."""
        return await self.send(calls.request_run(run, key))

    async def run(self, run_id: str) -> Run:
        """The state of a run."""
        return await self.send(calls.run(run_id))

    async def runs(self, **filters: str) -> AsyncIterator[Run]:
        """Every run that the filters of ``GET /v1/runs`` let through, the latest first."""
        page = await self.send(calls.runs("/v1/runs", filters))
        while True:
            for run in page.items:
                yield run
            if page.next is None:
                return
            page = await self.send(calls.runs(page.next, {}))

    async def cancel_run(self, run_id: str, reason: str) -> Run:
        """Cancel a run."""
        return await self.send(calls.cancel_run(run_id, reason))

    async def run_events(self, run_id: str) -> AsyncIterator[RunEvent | RunProgress]:
        """Events of a run, its states and its progress, until the service says that it is over.

        Reconnects after the last event; a service that keeps failing raises.
        """
        url, reader, failures = f"{self.server}/v1/runs/{run_id}/events", EventReader(), 0
        while True:
            headers = {**self._headers, **({"last-event-id": reader.last} if reader.last else {})}
            try:
                async with self._http.stream("GET", url, headers=headers) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    if response.is_success:
                        reader.restart()
                        async for line in response.aiter_lines():
                            if (event := reader.read(line)) is not None:
                                yield event
                                failures = -1
                        failures = -1
                    else:
                        await response.aread()
                        if not response.is_server_error or failures == calls.MAX_RECONNECTS:
                            raise error_of(response)
            except calls.FAILURES as error:
                if failures == calls.MAX_RECONNECTS:
                    raise Unreachable(f"{self.server}: {error}") from None
            failures += 1
            await asyncio.sleep(calls.RECONNECT_DELAY)

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """The JSON document at ``path``."""
        return await self.send(calls.get(path, query))

    async def content(self, path: str) -> bytes:
        """The bytes at ``path``."""
        return await self.send(calls.content(path))

    async def post(self, path: str, document: Any, key: str | None = None) -> Any:
        """Post a JSON document and return the JSON response; ``key`` is an idempotency key."""
        return await self.send(calls.post(path, document, key))

    async def send(self, call: Call[Answer]) -> Answer:
        """Send a request, again if it may be repeated, and return its answer."""
        attempt = 0
        while True:
            response, failure = None, ""
            try:
                options = call.options(self._headers, self._timeout)
                response = await self._http.request(
                    call.method, f"{self.server}{call.target}", **options
                )
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
            await asyncio.sleep(delay)
