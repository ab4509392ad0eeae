"""Nothing secret is in the database or in the log, after a run that used every secret."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from sqlalchemy import MetaData

from affidavit.service.core.database import open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.settings import Settings
from affidavit.trust import KeyStore, SigningKey
from affidavit.trust.signers import KEY_VARIABLE, EnvironmentKey

KEY = SigningKey.generate("secret")
SEED = KEY.private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
PEM = KEY.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
Plan = Callable[..., dict[str, Any]]


def token_of(url: str) -> str:
    engine = open_engine(url)
    _, token = TokenRepository(engine).new(
        "secret", [Scope.SUBMIT, Scope.AUDIT], 1, by="test", at=datetime.now(UTC)
    )
    engine.dispose()
    return token.text


def secrets(token: str) -> dict[str, bytes]:
    """Every way in which one of the secrets may be written."""
    return {
        "seed": SEED,
        "seed in hexadecimal": SEED.hex().encode(),
        "seed in base64": base64.b64encode(SEED)[:40],
        "PEM": PEM.splitlines()[1].encode(),
        "token": token.encode(),
        "token's secret": token.rpartition("_")[2].encode(),
        "authorization": b"Bearer ",
    }


def require_none(where: str, content: bytes, token: str) -> None:
    assert content
    result = [name for name, secret in secrets(token).items() if secret.lower() in content.lower()]
    assert not result, f"{where} holds the {', '.join(result)}"


def test_a_run_of_the_process_leaves_no_secret_in_its_files_or_lines(
    forked_server: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (forked_server.home / "keys").iterdir():
        path.unlink()
    KeyStore(forked_server.home / "keys").save(KEY.public)
    monkeypatch.setenv(KEY_VARIABLE, PEM)
    token = token_of(f"sqlite:///{forked_server.home / 'affidavit.db'}")
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    forked_server.start()
    with httpx.Client(base_url=forked_server.url, headers=headers) as client:
        created = client.post("/v1/certificates", content=json.dumps(plan()))
        assert created.status_code == 201
        assert client.post("/v1/certificates", content="{").status_code == 400
        assert client.get(f"/v1/certificates?cursor={token}").status_code in (401, 422)
        wrong = {"authorization": f"Bearer {token[:-1]}~"}
        assert client.get("/v1/certificates", headers=wrong).status_code == 401
        assert client.get("/metrics").status_code == 200
    signature = created.json()["certificate"]["bundle"]["envelope"]["signatures"][0]
    assert signature["keyid"] == KEY.key_id
    forked_server.stop(signal.SIGTERM)
    require_none("the log", "".join(forked_server.log).encode(), token)
    files = [path for path in forked_server.home.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"affidavit.db", f"{KEY.key_id}.json"}
    for path in files:
        if content := path.read_bytes():
            require_none(path.name, content, token)


def test_no_table_of_either_database_holds_a_secret(
    database_url: str, settings: Settings, client_of: Any, plan: Plan
) -> None:
    KeyStore(settings.key_directory).save(KEY.public)
    token = token_of(database_url)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    provided = replace(settings, database_url=database_url, halves=EnvironmentKey.of(PEM))
    with client_of(provided) as client:
        created = client.post("/v1/certificates", content=json.dumps(plan()), headers=headers)
        assert created.status_code == 201
    engine = open_engine(database_url)
    reflected = MetaData()
    reflected.reflect(engine)
    assert len(reflected.tables) > 10
    with engine.connect() as connection:
        for table in reflected.tables.values():
            rows = connection.execute(table.select()).all()
            text = b"\n".join(_bytes(value) for row in rows for value in row) or b"empty"
            require_none(table.name, text, token)
    engine.dispose()
    assert PEM not in repr(provided)


def _bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode()
