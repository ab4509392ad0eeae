"""Every ``curl`` of the documents, sent as it is written, is answered and not refused."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient

from affidavit.service.settings import Settings
from affidavit.service.web.routes import certificates

ROOT = Path(__file__).resolve().parents[3]
HERE = "http://127.0.0.1:8321"
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
SERVED = {"docs/reference/log.md": "its log is longer; tests/service/log asks for such proofs"}
"""Pages whose request needs more than a plan, and who sends it instead."""


def requests_of(page: Path) -> list[list[str]]:
    blocks = SHELL.findall(page.read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.strip().startswith("curl") and HERE in line]


def send(client: TestClient, words: list[str], headers: dict[str, str]) -> Any:
    options = ArgumentParser()
    options.add_argument("url")
    options.add_argument("-s", action="store_true")
    options.add_argument("-X", default="GET")
    options.add_argument("-H", action="append", default=[])
    options.add_argument("-d", "--data-binary")
    provided = options.parse_args(words[1:])
    stated = {name.lower(): value for name, value in (item.split(": ", 1) for item in provided.H)}
    body: Any = provided.data_binary
    if body is not None and body.startswith("@"):
        body = (ROOT / body[1:]).read_bytes()
    url = urlsplit(provided.url)
    path = f"{url.path}?{url.query}" if url.query else url.path
    return client.request(provided.X, path, headers={**stated, **headers}, content=body)


def test_requests_of_the_readme_are_answered_in_their_order(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "WAIT_SECONDS", 600)
    certified, listed = (send(client, words, {}) for words in requests_of(ROOT / "README.md"))
    assert certified.status_code == 201
    assert certified.json()["verdict"] == "under_noised"
    assert listed.status_code == 200
    assert [item["name"] for item in listed.json()["items"]] == ["e2e-dp-muon-published"]


def test_requests_of_the_pages_are_answered(
    client: TestClient, settings: Settings, token_for: Callable[..., dict[str, str]]
) -> None:
    admin = token_for(settings, "admin")
    pages = {
        str(page.relative_to(ROOT)): result
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if (result := requests_of(page))
    }
    assert pages.keys() > SERVED.keys()
    for page, result in pages.items():
        for words in result if page not in SERVED else ():
            answer = send(client, words, admin)
            assert answer.status_code in {200, 201}, (page, words, answer.text)
