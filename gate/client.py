"""The HTTP client of a running service, for the commands that talk to it.

The address is ``--server`` or ``AFFIDAVIT_SERVER``. The token is read from ``AFFIDAVIT_TOKEN`` or
from what ``affidavit login`` stored, because every user of a machine can read command lines; an
invalid token is never printed. Commands exit with 2 for an invalid token, with 3 when the service
cannot be reached or fails, and with 1 when it refuses; ``Client`` raises ``Unreachable`` and
``Problem`` instead.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from affidavit.gate.console import fail, stop
from affidavit.gate.credentials import stored_token
from affidavit.gate.exit_codes import Exit

SERVER = "http://127.0.0.1:8321"
TIMEOUT = 30.0
"""Seconds."""
RECONNECT_DELAY = 1.0
"""Seconds before an event stream reconnects."""
MAX_RECONNECTS = 30
"""Failed reconnects in a row before giving up."""
MALFORMED = (400, 413, 415, 422)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""Syntax of a bearer token (RFC 6750)."""

_URL = re.compile(r"https?://[!-~]+")

ServerOption = Annotated[
    str, typer.Option("--server", envvar="AFFIDAVIT_SERVER", help="Base URL of the service.")
]


class Unreachable(Exception):
    """The service did not answer, or did not return a valid document."""


class Problem(Exception):
    """The service refused a request; ``code`` is stable, ``status`` the HTTP status."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.status = status
        self.code = code


class Client:
    """A client of the service at ``server``; methods raise ``Unreachable`` and ``Problem``."""

    def __init__(self, server: str, *, token: str | None = None, timeout: float = TIMEOUT) -> None:
        self.server = server.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout

    def certificate(self, certificate_id: str) -> Any:
        """A certificate's result document."""
        return self.get(f"/v1/certificates/{certificate_id}")

    def submit(self, plan: dict[str, Any]) -> Any:
        """Certify a plan document."""
        return self.post("/v1/certificates", plan)

    def approve(self, certificate_id: str, decision: dict[str, Any]) -> Any:
        """Approve or reject a certificate."""
        return self.post(f"/v1/certificates/{certificate_id}/approvals", decision)

    def revoke(self, certificate_id: str, revocation: dict[str, Any]) -> tuple[Any, bool]:
        """Revoke a certificate; the revocation, and whether it is new."""
        path = f"/v1/certificates/{certificate_id}/revocation"
        response = self.request("POST", path, revocation)
        return _json(response), response.status_code == httpx.codes.CREATED

    def status_list(self) -> bytes:
        """The signed status list."""
        return self.request("GET", "/v1/status").content

    def policy(self, name: str, version: int) -> Any:
        """A version of a policy."""
        return self.get(f"/v1/policies/{_segment(name)}/{version}")

    def publish_keyset(self, envelope: dict[str, Any]) -> Any:
        """Publish a signed keyset."""
        return self.post("/v1/keysets", envelope)

    def ledgers(self, dataset: str, certificate: str | None = None) -> Any:
        """The ledgers of a data set, with a forecast for ``certificate``."""
        query = {} if certificate is None else {"certificate": certificate}
        return self.get(f"/v1/ledgers/{_segment(dataset)}", query)

    def reserve(self, dataset: str, certificate: str, key: str | None = None) -> Any:
        """Reserve the cost of a certified run; ``key`` is an idempotency key."""
        path = f"/v1/ledgers/{_segment(dataset)}/reservations"
        return self.post(path, {"certificate": certificate}, key)

    def release(self, reservation: str, reason: str, key: str | None = None) -> Any:
        """Release a reservation; ``key`` is an idempotency key."""
        path = f"/v1/reservations/{_segment(reservation)}/release"
        return self.post(path, {"reason": reason}, key)

    def run(self, run_id: str) -> Any:
        """The state of a run."""
        return self.get(f"/v1/runs/{run_id}")

    def cancel_run(self, run_id: str, reason: str) -> Any:
        """Cancel a run."""
        return self.post(f"/v1/runs/{run_id}/cancel", {"reason": reason})

    def run_events(self, run_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Server-sent events of a run, name and data, until the service says that it is over.

        Reconnects after the last event; a service that keeps failing raises.
        """
        url, last, failures = f"{self.server}/v1/runs/{run_id}/events", "", 0
        while True:
            headers = {**self._headers, **({"last-event-id": last} if last else {})}
            try:
                with httpx.stream("GET", url, headers=headers, timeout=self._timeout) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    if response.is_success:
                        for event in _blocks(response.iter_lines()):
                            last = event.get("id", last)
                            if "data" in event:
                                yield event.get("event", "message"), dict(json.loads(event["data"]))
                                failures = -1
                        failures = -1
                    else:
                        response.read()
                        if not response.is_server_error or failures == MAX_RECONNECTS:
                            raise _problem(response)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, RecursionError) as e:
                if failures == MAX_RECONNECTS:
                    raise Unreachable(f"{self.server}: {e}") from None
            failures += 1
            time.sleep(RECONNECT_DELAY)

    def get(self, path: str, query: dict[str, str] | None = None) -> Any:
        """The JSON document at ``path``."""
        return _json(self.request("GET", path, query=query))

    def post(self, path: str, document: Any, key: str | None = None) -> Any:
        """Post a JSON document and return the JSON response; ``key`` is an idempotency key."""
        return _json(self.request("POST", path, document, key=key))

    def request(
        self,
        method: str,
        path: str,
        document: Any = None,
        *,
        key: str | None = None,
        query: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request and return its successful response."""
        try:
            response = httpx.request(
                method,
                f"{self.server}{path}",
                json=document,
                params=query or None,
                headers={**self._headers, **({"idempotency-key": key} if key else {})},
                timeout=self._timeout,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"{self.server}: {error}") from None
        if not response.is_success:
            raise _problem(response)
        return response


@contextmanager
def connect(
    server: str, *, timeout: float = TIMEOUT, malformed: Exit = Exit.BLOCKED
) -> Iterator[Client]:
    """A client with the token of the environment; its errors end the command.

    ``malformed`` is the exit code for a request that the service calls malformed.
    """
    require_url(server)
    try:
        yield Client(server, token=token_for(server), timeout=timeout)
    except Unreachable as error:
        fail(str(error), Exit.UNDECIDED)
    except Problem as problem:
        if problem.status in MALFORMED:
            fail(str(problem), malformed)
        fail(str(problem), Exit.UNDECIDED if problem.status >= 500 else Exit.BLOCKED)


def require_url(server: str) -> None:
    """End the command unless ``server`` is an HTTP URL."""
    if _URL.fullmatch(server) is None:
        stop(f"--server {server[:80]} is not a URL: use http://HOST or https://HOST.")


def token_for(server: str) -> str | None:
    """The token in ``AFFIDAVIT_TOKEN``, or else the one that ``affidavit login`` stored.

    An invalid one ends the command and is not printed.
    """
    token = os.environ.get("AFFIDAVIT_TOKEN")
    if not token:
        return stored_token(server)
    require_token(token, "AFFIDAVIT_TOKEN")
    return token


def require_token(token: str, name: str) -> None:
    """End the command unless ``token`` has the form of one; it is not printed."""
    if _TOKEN.fullmatch(token) is None:
        stop(f"{name} is not a token: use letters A to Z, digits and . _ ~ + / - = only.")


def _problem(response: httpx.Response) -> Exception:
    """The error of an unsuccessful response."""
    document = _json(response)
    if not isinstance(document, dict) or not {"code", "detail"} <= document.keys():
        return Unreachable(f"{response.url} did not return a problem document")
    return Problem(response.status_code, str(document["code"]), str(document["detail"]))


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise Unreachable(f"{response.url} did not return JSON") from None


def _segment(name: str) -> str:
    """``name`` as one path segment; dots are encoded so that no client resolves them."""
    return "%2E" * len(name) if name in (".", "..") else quote(name, safe="")


def _blocks(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """The fields of each complete event (WHATWG HTML, section 9.2)."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name:
            fields[name] = value.removeprefix(" ")
        elif not line:
            yield fields
            fields = {}
