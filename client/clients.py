"""The blocking and the asynchronous client; every method is a request of ``calls``.

>>> Client("http://127.0.0.1:8321").certificate.__doc__
'Fetch a certificate.'
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import wraps
from typing import Any, Generic, ParamSpec, Self, overload

import httpx

from affidavit.client import calls
from affidavit.client.calls import (
    MAX_RESPONSE_BYTES,
    MAX_RESPONSE_SECONDS,
    Answer,
    BoundedBody,
    Call,
    exchange,
    read_bounded,
    read_error,
)
from affidavit.client.models import Run, RunEvent, RunProgress

P = ParamSpec("P")


class ClientMethod(Generic[P, Answer]):
    """A request as a method of both clients; that of ``AsyncClient`` is a coroutine."""

    def __init__(self, call: Callable[P, Call[Answer]]) -> None:
        self.call = call
        self.__doc__ = call.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, Answer]: ...
    @overload
    def __get__(
        self, client: AsyncClient, owner: type
    ) -> Callable[P, Coroutine[Any, Any, Answer]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        """Return the method of ``client``."""
        if client is None:
            return self

        @wraps(self.call)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self.call(*args, **kwargs))

        return method


class _ClientBase:
    """The address, the token and the methods of both clients."""

    def __init__(
        self, server: str, token: str | None = None, *, timeout: float = calls.TIMEOUT_SECONDS
    ) -> None:
        if not server.startswith(("http://", "https://")):
            raise ValueError(f"{server!r} is not a URL: use http://HOST or https://HOST")
        self.server = server.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout

    certificate = ClientMethod(calls.certificate)
    submit = ClientMethod(calls.submit)
    approve = ClientMethod(calls.approve)
    revoke = ClientMethod(calls.revoke)
    status_list = ClientMethod(calls.status_list)
    evidence = ClientMethod(calls.evidence)
    policy = ClientMethod(calls.policy)
    publish_keyset = ClientMethod(calls.publish_keyset)
    ledgers = ClientMethod(calls.ledgers)
    reserve = ClientMethod(calls.reserve)
    release = ClientMethod(calls.release)
    request_run = ClientMethod(calls.request_run)
    run = ClientMethod(calls.run)
    cancel_run = ClientMethod(calls.cancel_run)
    add_replay = ClientMethod(calls.add_replay)
    add_audit = ClientMethod(calls.add_audit)
    get = ClientMethod(calls.get)
    content = ClientMethod(calls.content)
    post = ClientMethod(calls.post)

    def _options(self, call: Call[Any]) -> Mapping[str, Any]:
        return call.options(self.server, self._headers, self._timeout)

    def _events(self, run_id: str) -> EventStream:
        return EventStream(self.server, run_id, self._headers)


class EventStream:
    """The events of a run, over one connection or several."""

    def __init__(self, server: str, run_id: str, headers: Mapping[str, str]) -> None:
        self._server = server
        self._headers = headers
        self._failures = 0
        self._last_event_id = ""
        self._partial_line = ""
        self._fields: dict[str, str] = {}
        self.url = f"{server}/v1/runs/{run_id}/events"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the next request, which continues after the last event."""
        return {
            **self._headers,
            **({"last-event-id": self._last_event_id} if self._last_event_id else {}),
        }

    def read(self, text: str) -> Iterator[RunEvent | RunProgress]:
        """Yield the events that ``text`` completes (WHATWG HTML, 9.2); raises ``ValueError``."""
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        if len(self._partial_line) > calls.MAX_LINE_LENGTH:
            raise ValueError(f"a line of events is longer than {calls.MAX_LINE_LENGTH} characters")
        for line in lines:
            name, _, value = line.removesuffix("\r").partition(":")
            if name in calls.EVENT_FIELDS:
                self._fields[name] = value.removeprefix(" ")
            if not line.rstrip("\r") and (event := self._take_event()) is not None:
                self._failures = 0
                yield event

    def _take_event(self) -> RunEvent | RunProgress | None:
        fields, self._fields = self._fields, {}
        self._last_event_id = fields.get("id", self._last_event_id)
        if "data" not in fields:
            return None
        if "event" not in fields:
            raise ValueError("an event has no name")
        model = calls.EVENT_MODELS.get(fields["event"])
        return None if model is None else model.model_validate_json(fields["data"])

    def _discard_partial_event(self) -> None:
        """Discard the event that a broken connection left incomplete."""
        self._partial_line, self._fields = "", {}

    def has_ended(self, response: httpx.Response) -> bool:
        """Whether the service has no more events; raises ``Problem`` for a permanent error."""
        self._discard_partial_event()
        if response.is_success:
            self._failures = 0
        elif not response.is_server_error or self._failures == calls.MAX_RECONNECTS:
            raise read_error(response)
        else:
            self._failures += 1
        return response.status_code == httpx.codes.NO_CONTENT

    def count_failure(self, error: Exception) -> None:
        """Count a broken connection; raises ``Unreachable`` after ``MAX_RECONNECTS``."""
        if self._failures == calls.MAX_RECONNECTS:
            raise calls.no_response(self._server, error) from None
        self._failures += 1
        self._discard_partial_event()


class Client(_ClientBase):
    """A client of the service at ``server``; methods raise ``Unreachable`` and ``Problem``.

    Requests whose repetition has no further effect are retried if the service does not answer or is
    busy.
    """

    def __init__(
        self, server: str, token: str | None = None, *, timeout: float = calls.TIMEOUT_SECONDS
    ) -> None:
        super().__init__(server, token, timeout=timeout)
        self._http = httpx.Client(timeout=timeout)
        # To close the connections earlier, use `with` or `close`.
        weakref.finalize(self, self._http.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(self, call: Call[Answer]) -> Answer:
        """Send a request, with retries if it may be repeated, and return its answer."""
        steps = exchange(call, self.server)
        step, result = next(steps), None
        while True:
            try:
                if isinstance(step, Call):
                    result = self._respond(step)
                else:
                    time.sleep(step)
                step = steps.send(result)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def _respond(self, call: Call[Answer]) -> httpx.Response | Exception:
        try:
            with self._http.stream(**self._options(call)) as response:
                return read_bounded(response, MAX_RESPONSE_BYTES, MAX_RESPONSE_SECONDS)
        except calls.TRANSPORT_ERRORS as error:
            return error

    def runs(self, **filters: str) -> Iterator[Run]:
        """Yield the runs that match the filters of ``GET /v1/runs``, latest first."""
        page = self.send(calls.runs("/v1/runs", filters))
        while True:
            yield from page.items
            if page.next is None:
                return
            page = self.send(calls.runs(page.next, {}))

    def run_events(self, run_id: str) -> Iterator[RunEvent | RunProgress]:
        """Yield the states and progress of a run, until the service ends the stream.

        A broken connection is resumed after the last event. Raises after ``MAX_RECONNECTS``
        consecutive failures.
        """
        events = self._events(run_id)
        while True:
            try:
                with self._http.stream("GET", events.url, headers=events.headers) as response:
                    if response.is_success:
                        for text in response.iter_text():
                            yield from events.read(text)
                        answer = response
                    else:
                        answer = read_bounded(response, MAX_RESPONSE_BYTES, MAX_RESPONSE_SECONDS)
                    if events.has_ended(answer):
                        return
            except calls.STREAM_ERRORS as error:
                events.count_failure(error)
            time.sleep(calls.RECONNECT_SECONDS)


async def _read_bounded_async(response: httpx.Response) -> httpx.Response:
    body = BoundedBody(MAX_RESPONSE_BYTES, MAX_RESPONSE_SECONDS)
    async for part in response.aiter_bytes():
        body.add(part)
    return body.complete(response)


class AsyncClient(_ClientBase):
    """The asynchronous client: the methods of ``Client``, awaited."""

    def __init__(
        self, server: str, token: str | None = None, *, timeout: float = calls.TIMEOUT_SECONDS
    ) -> None:
        super().__init__(server, token, timeout=timeout)
        self._http = httpx.AsyncClient(timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(self, call: Call[Answer]) -> Answer:
        """Send a request, with retries if it may be repeated, and return its answer."""
        steps = exchange(call, self.server)
        step, result = next(steps), None
        while True:
            try:
                if isinstance(step, Call):
                    result = await self._respond(step)
                else:
                    await asyncio.sleep(step)
                step = steps.send(result)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    async def _respond(self, call: Call[Answer]) -> httpx.Response | Exception:
        try:
            async with self._http.stream(**self._options(call)) as response:
                return await _read_bounded_async(response)
        except calls.TRANSPORT_ERRORS as error:
            return error

    async def runs(self, **filters: str) -> AsyncIterator[Run]:
        """Yield the runs that match the filters of ``GET /v1/runs``, latest first."""
        page = await self.send(calls.runs("/v1/runs", filters))
        while True:
            for run in page.items:
                yield run
            if page.next is None:
                return
            page = await self.send(calls.runs(page.next, {}))

    async def run_events(self, run_id: str) -> AsyncIterator[RunEvent | RunProgress]:
        """Yield the states and progress of a run, until the service ends the stream.

        A broken connection is resumed after the last event. Raises after ``MAX_RECONNECTS``
        consecutive failures.
        """
        events = self._events(run_id)
        while True:
            try:
                async with self._http.stream("GET", events.url, headers=events.headers) as response:
                    if response.is_success:
                        async for text in response.aiter_text():
                            for event in events.read(text):
                                yield event
                        answer = response
                    else:
                        answer = await _read_bounded_async(response)
                    if events.has_ended(answer):
                        return
            except calls.STREAM_ERRORS as error:
                events.count_failure(error)
            await asyncio.sleep(calls.RECONNECT_SECONDS)
