"""What a service answers: typed documents, and its two ways to fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from affidavit.client.models import Interval, RunEvent, RunProgress

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


def problem_of(document: Mapping[str, Any]) -> Problem:
    """The error that a problem document describes."""
    return Problem(int(document["status"]), str(document["code"]), str(document["detail"]))


EVENTS: dict[str, type[RunEvent] | type[RunProgress]] = {"state": RunEvent, "progress": RunProgress}
"""The model of each kind of event; other kinds are passed over."""


class EventReader:
    """Server-sent events as models; ``last`` is the id after which to reconnect."""

    def __init__(self) -> None:
        self.last = ""
        self._fields: dict[str, str] = {}

    def restart(self) -> None:
        """Forget the event that a broken connection left incomplete."""
        self._fields = {}

    def read(self, line: str) -> RunEvent | RunProgress | None:
        """The event that ``line`` completes (WHATWG HTML, section 9.2); raises ``ValueError``."""
        name, _, value = line.partition(":")
        if name:
            self._fields[name] = value.removeprefix(" ")
            return None
        if line:
            return None
        fields, self._fields = self._fields, {}
        self.last = fields.get("id", self.last)
        if "data" not in fields:
            return None
        if "event" not in fields:
            raise ValueError("an event of a run has a name")
        model = EVENTS.get(fields["event"])
        return None if model is None else model.model_validate_json(fields["data"])
