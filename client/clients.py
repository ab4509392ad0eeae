"""The clients: every method is one request of ``calls``, which ``AsyncClient`` sends awaited.

>>> Client("http://127.0.0.1:8321").certificate.__doc__
'A certificate.'
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
    MAX_BYTES,
    MAX_SECONDS,
    Answer,
    Body,
    Call,
    conversation,
    error_of,
    read_at_most,
)
from affidavit.client.models import Run, RunEvent, RunProgress

P = ParamSpec("P")


class Method(Generic[P, Answer]):
    """A request as a method: the blocking client returns its answer, the other one awaits it."""

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
        """The method of ``client``."""
        if client is None:
            return self

        @wraps(self.call)
        def method(*values: P.args, **named: P.kwargs) -> Any:
            return client.send(self.call(*values, **named))

        return method


class _Requests:
    """What both clients have: their address, their token, and the methods that are one request."""

    def __init__(
        self, server: str, token: str | None = None, *, timeout: float = calls.TIMEOUT
    ) -> None:
        self.server = server.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout

    certificate = Method(calls.certificate)
    submit = Method(calls.submit)
    approve = Method(calls.approve)
    revoke = Method(calls.revoke)
    status_list = Method(calls.status_list)
    policy = Method(calls.policy)
    publish_keyset = Method(calls.publish_keyset)
    ledgers = Method(calls.ledgers)
    reserve = Method(calls.reserve)
    release = Method(calls.release)
    request_run = Method(calls.request_run)
    run = Method(calls.run)
    cancel_run = Method(calls.cancel_run)
    get = Method(calls.get)
    content = Method(calls.content)
    post = Method(calls.post)

    def _options(self, call: Call[Any]) -> Mapping[str, Any]:
        """The arguments of httpx for ``call``."""
        options = call.options(self._headers, self._timeout)
        return {"method": call.method, "url": f"{self.server}{call.target}", **options}

    def _events(self, run_id: str) -> EventStream:
        return EventStream(self.server, run_id, self._headers)


class EventStream:
    """The events of a run, over as many connections as that takes."""

    def __init__(self, server: str, run_id: str, headers: Mapping[str, str]) -> None:
        self._server = server
        self._headers = headers
        self._failures = 0
        self._last = ""
        self._rest = ""
        self._fields: dict[str, str] = {}
        self.url = f"{server}/v1/runs/{run_id}/events"

    @property
    def headers(self) -> dict[str, str]:
        """Of the next request, which goes on after the last event."""
        return {**self._headers, **({"last-event-id": self._last} if self._last else {})}

    def read(self, text: str) -> Iterator[RunEvent | RunProgress]:
        """The events that ``text`` completes (WHATWG HTML, section 9.2); raises ``ValueError``."""
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > calls.MAX_LINE:
            raise ValueError(f"a line of events is longer than {calls.MAX_LINE} characters")
        for line in lines:
            name, _, value = line.removesuffix("\r").partition(":")
            if name in calls.FIELDS:
                self._fields[name] = value.removeprefix(" ")
            if not line.rstrip("\r") and (event := self._complete()) is not None:
                self._failures = 0
                yield event

    def _complete(self) -> RunEvent | RunProgress | None:
        fields, self._fields = self._fields, {}
        self._last = fields.get("id", self._last)
        if "data" not in fields:
            return None
        if "event" not in fields:
            raise ValueError("an event of a run has a name")
        model = calls.EVENTS.get(fields["event"])
        return None if model is None else model.model_validate_json(fields["data"])

    def _restart(self) -> None:
        """Forget the event that a broken connection left incomplete."""
        self._rest, self._fields = "", {}

    def is_over(self, response: httpx.Response) -> bool:
        """Whether the service has no more events; raises what a refusal that is final is."""
        self._restart()
        if response.is_success:
            self._failures = 0
        elif not response.is_server_error or self._failures == calls.MAX_RECONNECTS:
            raise error_of(response)
        else:
            self._failures += 1
        return response.status_code == httpx.codes.NO_CONTENT

    def fail(self, error: Exception) -> None:
        """Count a broken connection; raises ``Unreachable`` after too many."""
        if self._failures == calls.MAX_RECONNECTS:
            raise calls.unreachable(self._server, error) from None
        self._failures += 1
        self._restart()


class Client(_Requests):
    """A client of the service at ``server``; methods raise ``Unreachable`` and ``Problem``.

    Reads, and requests whose repetition has no further effect, are sent again when the service
    does not answer or is busy.
    """

    def __init__(
        self, server: str, token: str | None = None, *, timeout: float = calls.TIMEOUT
    ) -> None:
        super().__init__(server, token, timeout=timeout)
        self._http = httpx.Client(timeout=timeout)
        # Whoever needs the connections closed at once uses `with` or `close`.
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
        steps = conversation(call, self.server)
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
                return read_at_most(response, MAX_BYTES, MAX_SECONDS)
        except calls.NO_ANSWER as error:
            return error

    def runs(self, **filters: str) -> Iterator[Run]:
        """The runs that match the filters of ``GET /v1/runs``, latest first."""
        page = self.send(calls.runs("/v1/runs", filters))
        while True:
            yield from page.items
            if page.next is None:
                return
            page = self.send(calls.runs(page.next, {}))

    def run_events(self, run_id: str) -> Iterator[RunEvent | RunProgress]:
        """The states and progress of a run, until the service ends the stream.

        Reconnects after the last event; a service that keeps failing raises.
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
                        answer = read_at_most(response, MAX_BYTES, MAX_SECONDS)
                    if events.is_over(answer):
                        return
            except calls.FAILURES as error:
                events.fail(error)
            time.sleep(calls.RECONNECT_DELAY)


async def _whole(response: httpx.Response) -> httpx.Response:
    """What ``read_at_most`` returns."""
    body = Body(MAX_BYTES, MAX_SECONDS)
    async for part in response.aiter_bytes():
        body.add(part)
    return body.of(response)


class AsyncClient(_Requests):
    """The asynchronous client: the methods of ``Client``, awaited."""

    def __init__(
        self, server: str, token: str | None = None, *, timeout: float = calls.TIMEOUT
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
        steps = conversation(call, self.server)
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
                return await _whole(response)
        except calls.NO_ANSWER as error:
            return error

    async def runs(self, **filters: str) -> AsyncIterator[Run]:
        """The runs that match the filters of ``GET /v1/runs``, latest first."""
        page = await self.send(calls.runs("/v1/runs", filters))
        while True:
            for run in page.items:
                yield run
            if page.next is None:
                return
            page = await self.send(calls.runs(page.next, {}))

    async def run_events(self, run_id: str) -> AsyncIterator[RunEvent | RunProgress]:
        """The states and progress of a run, until the service ends the stream.

        Reconnects after the last event; a service that keeps failing raises.
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
                        answer = await _whole(response)
                    if events.is_over(answer):
                        return
            except calls.FAILURES as error:
                events.fail(error)
            await asyncio.sleep(calls.RECONNECT_DELAY)
