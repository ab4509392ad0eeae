"""A service on either database, with people who may do different things to certificates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from affidavit.service.core.database import open_engine
from affidavit.service.keys.keyring import KeysetStore
from affidavit.service.settings import Settings
from affidavit.trust import (
    KeyStore,
    PublicKey,
    Revocation,
    Roots,
    SigningKey,
    draft_keyset,
)
from tests.service.conftest import ONCE, client_of, tokens_for


@dataclass
class Company:
    """A running service: ``ada`` submits, ``bea`` and ``cem`` approve, ``dan`` administers."""

    client: Any
    engine: Engine
    keys: KeyStore
    settings: Settings
    headers: dict[str, dict[str, str]]

    def ask(self, who: str, method: str, path: str, document: Any = None) -> Any:
        """A request of somebody, with a JSON body unless there is none."""
        body = {} if document is None else {"content": json.dumps(document).encode()}
        headers = {**self.headers[who], "content-type": "application/json"}
        return self.client.request(method, path, headers=headers, **body)

    def submit(self, plan: Any, who: str = "ada") -> Any:
        """Send a plan and return the answer."""
        return self.ask(who, "POST", "/v1/certificates", plan)

    def decide(self, who: str, result: dict[str, Any], **changes: Any) -> Any:
        """Approve what ``result`` shows, or something else by ``changes``."""
        certificate = result["certificate"]
        document = {"envelope": certificate["envelope_digest"], **changes}
        return self.ask(who, "POST", f"/v1/certificates/{certificate['id']}/approvals", document)

    def revoke(self, who: str, result: dict[str, Any], **changes: Any) -> Any:
        """Revoke the certificate of ``result``."""
        document = {"code": "plan_error", "reason": "the wrong data set", **changes}
        where = f"/v1/certificates/{result['certificate']['id']}/revocation"
        return self.ask(who, "POST", where, document)

    def current(self, result: dict[str, Any]) -> dict[str, Any]:
        """The current issue of the certificate of ``result``."""
        where = f"/v1/certificates/{result['certificate']['id']}"
        outcome: dict[str, Any] = self.ask("bea", "GET", where).json()
        return outcome

    def issues(self, result: dict[str, Any]) -> list[dict[str, Any]]:
        """All its issues, latest first."""
        where = f"/v1/certificates/{result['certificate']['id']}/issues"
        outcome: list[dict[str, Any]] = self.ask("bea", "GET", where).json()["items"]
        return outcome

    def bundle(self, result: dict[str, Any]) -> bytes:
        """The bundle that ``result`` carries, as a file has it."""
        return json.dumps(result["certificate"]["bundle"]).encode()

    def status(self) -> bytes:
        """The signed status list."""
        answer = self.client.get("/v1/status")
        assert answer.status_code == 200, answer.text
        raw: bytes = answer.content
        return raw

    @property
    def trusted(self) -> tuple[PublicKey, ...]:
        """The organisation's keys."""
        return self.keys.public_keys()

    def change_key(self) -> str:
        """Revoke the key that signs and make another; the id of the one that was revoked."""
        (bad,) = [key.key_id for key in self.trusted]
        self.keys.new("next")
        self.client.app.state.services.keyring._revoked = lambda: {bad}
        return bad

    def publish_revocation(self, since: datetime) -> None:
        """Publish a keyset in which the key that signs is revoked from ``since`` on."""
        (bad,) = self.trusted
        self.keys.new("next")
        root = SigningKey.generate("root")
        created = draft_keyset(
            None,
            roots=Roots.of([root.public], threshold=1),
            keys=self.trusted,
            revoked=[Revocation(key_id=bad.key_id, since=f"{since:%Y-%m-%dT%H:%M:%SZ}")],
            issued_at=datetime.now(UTC),
            expires_at=datetime.now(UTC) + timedelta(days=30),
        ).signed_by(root)
        KeysetStore(self.engine).publish(created.as_bytes(), actor="me", at=datetime.now(UTC))

    def require_approvals(self, number: int) -> None:
        """Make a policy for all data sets that asks for so many approvals."""
        policy = {
            "schema_version": 1,
            "name": "strict",
            "version": 1,
            "datasets": "default",
            "approvals": number,
        }
        answer = self.ask("dan", "POST", "/v1/policies", policy)
        assert answer.status_code in (200, 201), answer.text


SCOPES = {
    "ada": ["submit"],
    "bea": ["approve", "submit"],
    "cem": ["approve"],
    "dan": ["admin"],
    "eve": ["audit"],
}


@pytest.fixture
def company(database_url: str, tmp_path: Path) -> Iterator[Company]:
    """The service with its people."""
    keys = KeyStore(tmp_path / "keys")
    keys.new("test")
    settings = Settings(
        database_url=database_url,
        key_directory=keys.directory,
        workers=1,
        comparison_seconds=ONCE,
    )
    headers = tokens_for(settings, SCOPES)
    engine = open_engine(database_url)
    with client_of(replace(settings, loopback=True)) as client:
        yield Company(client, engine, keys, settings, headers)
    engine.dispose()


@pytest.fixture
def pending(company: Company, plan: Callable[..., Any]) -> dict[str, Any]:
    """What ada was answered where two others have to approve."""
    company.require_approvals(2)
    answer = company.submit(plan())
    assert answer.status_code == 201, answer.text
    result: dict[str, Any] = answer.json()
    return result
