"""The compose file names what there is, keeps secrets out, and writes where it may."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from affidavit.service.operation.database_admin import grant_application, upgrade
from tests.deploy.manifests import ROOT, documents, image, parsed, variables
from tests.support import postgresql_server
from tests.support.free_ports import free_port
from tests.support.polling import TIMEOUT_SECONDS

(COMPOSE,) = documents(ROOT / "docker-compose.yml")
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ("migrate", "service", "worker")


def test_our_commands_are_those_of_the_programs() -> None:
    options = {name: parsed(SERVICES[name]["command"]) for name in OURS}
    built = image()
    assert options["service"]["port"] == int(built["EXPOSE"])
    (published,) = SERVICES["service"]["ports"]
    assert published == f"127.0.0.1:{built['EXPOSE']}:{built['EXPOSE']}"
    assert options["worker"]["server"] == f"http://service:{built['EXPOSE']}"
    mounts = [service.split(":")[1] for service in SERVICES["worker"]["volumes"]]
    for path in (*options["worker"]["keys"], options["worker"]["outputs"]):
        assert any(Path(path).is_relative_to(mount) for mount in mounts)
    for name in ("service", "worker"):
        assert any(built["AFFIDAVIT_HOME"] in item for item in SERVICES[name]["volumes"])


def test_variables_are_read_and_secrets_come_from_outside() -> None:
    for name in OURS:
        provided = SERVICES[name]["environment"]
        assert provided.keys() <= variables(), name
    for name, service in SERVICES.items():
        for variable, value in service["environment"].items():
            if re.search("PASSWORD|TOKEN|URL", variable):
                assert "${" in value, (name, variable)


def test_nothing_writes_to_its_root_and_all_that_answers_is_watched() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert "/tmp" in service["tmpfs"], name
    assert {name for name, entry in SERVICES.items() if "test" in entry.get("healthcheck", {})} == {
        "database",
        "service",
    }
    # A read-only root is given configurations by mounts, which files are and lines are not.
    assert all("file" in item for item in COMPOSE["configs"].values())


def test_what_waits_waits_for_what_there_is() -> None:
    for service in SERVICES.values():
        for name, requested in service.get("depends_on", {}).items():
            if requested["condition"] == "service_healthy":
                assert "test" in SERVICES[name]["healthcheck"]
    used = {
        item.split(":")[0]
        for service in SERVICES.values()
        for item in service.get("volumes", [])
        if not item.startswith(".")
    }
    assert used == COMPOSE["volumes"].keys()


def test_the_roles_are_made_and_the_service_may_not_rewrite(tmp_path: Path) -> None:
    """The script as the image of PostgreSQL runs it, and the two commands after it."""
    programs = postgresql_server.binaries()
    if programs is None or not (programs / "psql").exists():
        pytest.fail("there is no psql: install PostgreSQL")
    with postgresql_server.cluster(programs, free_port()) as server:
        script = COMPOSE["configs"]["roles"]["file"]
        told = SERVICES["database"]["environment"]
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PGHOST": "127.0.0.1",
            "PGPORT": str(server.port),
            "POSTGRES_USER": "affidavit",
            "POSTGRES_DB": "postgres",
            **{name: f"o'{name}$" for name in told if name.endswith("_PASSWORD")},
        }
        subprocess.run(
            [ROOT / script], env=environment, cwd=tmp_path, check=True, timeout=TIMEOUT_SECONDS
        )
        owner = server.url.replace("affidavit@", "affidavit_owner@") + "/postgres"
        upgrade(owner)
        grant_application(owner, SERVICES["migrate"]["environment"]["AFFIDAVIT_DATABASE_APP_ROLE"])
        engine = create_engine(f"{server.url}/postgres")
        with engine.connect() as connection:
            query = "SELECT rolname, rolsuper, rolpassword IS NOT NULL FROM pg_authid"
            roles = {row[0]: tuple(row[1:]) for row in connection.execute(text(query))}
            may = "SELECT has_table_privilege('affidavit_app', 'log_entries', :what)"
            rights = {
                what: connection.execute(text(may), {"what": what}).scalar()
                for what in ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE")
            }
        engine.dispose()
        server.stop(signal.SIGQUIT)
    assert roles["affidavit_owner"] == roles["affidavit_app"] == (False, True)
    assert {what for what, granted in rights.items() if granted} == {"SELECT", "INSERT"}
