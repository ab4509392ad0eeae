"""What the README says about opening the pages: its lines, run as written, lead to a page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from affidavit.service.__main__ import main
from affidavit.service.settings import Settings
from affidavit.trust import KeyStore

README = Path(__file__).resolve().parents[4] / "README.md"
PROGRAM = "affidavit "
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def test_the_commands_of_the_readme_open_the_pages(
    tmp_path: Path,
    client_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = README.read_text()
    text = text.partition("## HTTP API")[2]
    lines = re.findall(rf"^{PROGRAM}(.*)$", "".join(re.findall(BLOCK, text)), re.MULTILINE)
    lines.remove("serve")  # what it does as a process is tried where processes are
    assert len(lines) == 2
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.setenv("AFFIDAVIT_WORKERS", "1")
    KeyStore(tmp_path / "keys").new("test")
    for line in lines:
        assert main(shlex.split(line)) == 0
    token = capsys.readouterr().out.split()[-1]
    with client_of(Settings.from_environment()) as browser:
        requested = browser.get("/", headers={"accept": "text/html"})
        (csrf,) = re.findall(r'name="csrf" value="([^"]+)"', requested.text)
        page = browser.post("/sign-in", data={"csrf": csrf, "next": "/", "token": token})
        assert "<title>Overview · Affidavit</title>" in page.text
        browser.cookies.clear()
        program = {"authorization": f"Bearer {token}"}
        assert browser.get("/v1/runs", headers=program).json()["items"] == []
        assert browser.get("/audit.csv", headers=program).text.startswith("index,kind,subject,")
