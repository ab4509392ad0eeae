"""Backups as the documents say to make and restore them; an old one is noticed."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from affidavit.certificate import verify
from affidavit.service.__main__ import main
from affidavit.service.settings import Settings
from affidavit.trust import PublicKey
from tests.service.operation.log_waiting import until_logged
from tests.support import postgresql_server
from tests.support.database_owner import statements
from tests.support.trust import trusting

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "backup-and-restore.md"


def commands(database: str, what: str) -> str:
    """The commands of the page in the section of that database."""
    section = PAGE.read_text().partition(f"## {database}\n")[2]
    (result,) = re.findall(
        rf"^### {what}\n.*?```sh\n(.*?)```", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE
    )
    return str(result)


@dataclass(frozen=True)
class Place:
    """A service's database and the directory in which its operator works."""

    kind: str
    url: str
    home: Path
    directory: Path

    def paste(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run lines of the page as an operator would."""
        programs = postgresql_server.binaries() or Path()
        command = text.replace("affidavit ", f"{shlex.quote(sys.executable)} -m affidavit ")
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.directory,
            env={
                "PATH": f"{programs}:/usr/bin:/bin",
                "HOME": str(self.directory),
                "AFFIDAVIT_HOME": str(self.home),
                "DATABASE_URL": self.url.replace("+psycopg", ""),
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            },
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(params=[pytest.param("SQLite", marks=pytest.mark.soak), "PostgreSQL"])
def place(request: pytest.FixtureRequest, settings: Settings, tmp_path: Path) -> Place:
    url: str = request.getfixturevalue(f"{request.param.lower()}_url")
    (tmp_path / "work").mkdir()
    return Place(request.param, url, settings.key_directory.parent, tmp_path / "work")


def restored(place: Place) -> Place:
    """A place with an empty database to restore into, in the same home."""
    if place.kind == "SQLite":
        return place
    server, _, name = place.url.rpartition("/")
    statements(f"{server}/postgres", f"CREATE DATABASE {name}_anew")
    return replace(place, url=f"{server}/{name}_anew")


def test_a_restored_backup_is_whole_and_an_old_one_is_noticed(
    place: Place,
    settings: Settings,
    client_of: Any,
    plan: Callable[..., Any],
    post: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(place.home))
    monkeypatch.setenv("DATABASE_URL", place.url)
    newer = place.directory / "newer.txt"
    with client_of(replace(settings, database_url=place.url)) as client:
        stored = post(client, plan(steps=1)).json()["certificate"]["id"]
        until_logged(client.app.state.services)
        created = place.paste(commands(place.kind, "Back up"))  # while the service works
        assert created.returncode == 0, created.stderr
        post(client, plan(steps=2))
        until_logged(client.app.state.services)
        assert main(["audit", "export-checkpoint", str(newer)]) == 0
    after = restored(place)
    done = after.paste(commands(place.kind, "Restore"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verified 1 entries" in done.stdout

    monkeypatch.setenv("DATABASE_URL", after.url)
    capsys.readouterr()
    assert main(["audit", "verify", "--checkpoint", str(newer)]) == 1
    assert "checkpoint" in capsys.readouterr().out
    assert main(["audit", "verify"]) == 0  # without the checkpoint nobody could tell

    with client_of(replace(settings, database_url=after.url)) as client:
        keys = [PublicKey.from_record(item) for item in client.get("/v1/keys").json()["keys"]]
        bundle = client.get(f"/v1/certificates/{stored}/bundle").content
        assert 10 not in verify(bundle, trusting(keys)).unchecked


def test_a_backup_replaces_nothing_and_is_private(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("DATABASE_URL", settings.database_url)
    target = tmp_path / "copy.db"
    assert main(["backup", str(target)]) == 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    before = target.read_bytes()
    assert main(["backup", str(target)]) == 2
    assert "exists" in capsys.readouterr().err
    assert target.read_bytes() == before
    assert main(["backup", str(tmp_path / "none" / "copy.db")]) == 2
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path / 'absent.db'}")
    assert main(["backup", str(tmp_path / "other.db")]) == 2
    assert not (tmp_path / "absent.db").exists()
    (tmp_path / "text.db").write_text("This is no database, but long enough to look.\n" * 99)
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path / 'text.db'}")
    assert main(["backup", str(tmp_path / "other.db")]) == 2
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    assert main(["backup", str(tmp_path / "other.db")]) == 2
    assert "pg_dump" in capsys.readouterr().err
    assert not [path.name for path in tmp_path.iterdir() if "other" in path.name]
