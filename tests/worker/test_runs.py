"""Certified runs from request to settlement, and what happens when something dies on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from affidavit.evidence import check_conformance, read_provenance
from affidavit.gate import app
from affidavit.trust import KeyStore, read_envelope
from examples.train import demo_run
from tests.support.forked_processes import Process
from tests.support.trust import trusting
from tests.worker.conftest import PROGRAM

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
LONG = 20_000


def trainers_of(worker: Process) -> list[int]:
    """The process ids of a worker's trainers."""
    children = Path(f"/proc/{worker.pid}/task")
    return [
        int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_run_is_trained_once_settled_and_signed(shop: Any) -> None:
    """The demonstration does the same on SQLite, with fewer questions."""
    certificate = shop.certify(STEPS)
    run = shop.request(certificate)
    assert shop.run(run)["state"] == "queued"
    assert shop.charged(run) == ("reserved", None)
    shop.worker("--once", module=PROGRAM)
    result = shop.wait(run, "settled", "failed")
    assert (result["state"], result["code"]) == ("settled", "conformant"), (result, shop.logs())
    assert shop.charged(run) == ("settled", STEPS)
    (folder,) = (shop.home / "runs" / "tiny").iterdir()
    reported = read_provenance(
        result["provenance"], trusting(KeyStore(shop.home / "w1/keys").public_keys())
    )
    assert (reported.run, reported.certificate) == (run, certificate)
    statement = json.loads(read_envelope(result["provenance"]).payload)
    weights = subprocess.run(
        ["sha256sum", str(folder / "run" / "weights.pt")],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split()[0]
    assert statement["subject"] == [{"name": "weights.pt", "digest": {"sha256": weights}}]
    bundle = json.loads((folder / "bundle.json").read_bytes())
    predicate = json.loads(read_envelope(bundle["envelope"]).payload)["predicate"]
    checked = check_conformance((folder / "run" / "record.jsonl").read_bytes(), predicate)
    assert checked.conformant
    assert checked.head == result["record"] == reported.record

    # What the operator sees of it afterwards, and what anybody can check without the service.
    command = CliRunner()
    watched = command.invoke(
        app,
        ["runs", "watch", run, "--server", shop.server.url],
        env={"AFFIDAVIT_TOKEN": shop.tokens["submit"]},
    )
    assert watched.exit_code == 0, watched.output
    kinds = ["queued", "claimed", "running", "settled"]
    assert [line.split()[1] for line in watched.output.splitlines() if line[0] == "2"] == kinds
    assert f"step {STEPS} of {STEPS}, ε ≤ " in watched.output
    (key,) = (shop.home / "w1" / "keys").glob("*.json")
    told = ["runs", "verify", str(folder / "provenance.json"), "--keys", str(key)]
    about = [
        "--weights",
        str(folder / "run/weights.pt"),
        "--record",
        str(folder / "run/record.jsonl"),
    ]
    verified = command.invoke(app, [*told, *about])
    assert verified.exit_code == 0, verified.output
    assert certificate in verified.output
    (folder / "run/weights.pt").write_bytes(b"others")
    assert command.invoke(app, [*told, *about]).exit_code == 1


@pytest.mark.soak
def test_the_demonstration_ends_with_a_settled_run(tmp_path: Path) -> None:
    """``make demo-run`` with each database, as far as make tells; on SQLite it is run."""
    for provided, kind in (
        (("ENGINE=ray",), ["postgresql", "ray"]),
        ((), ["postgresql", "local"]),
        (("DATABASE=sqlite",), ["sqlite", "local"]),
    ):
        told = ["make", "--no-print-directory", "-n", "demo-run", *provided]
        lines = subprocess.run(told, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        command = lines.splitlines()[-1].split()
        assert command[-2:] == kind
        assert set(provided) <= set(re.findall(r"\w+=\w+", (ROOT / "README.md").read_text()))
    ran = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=ROOT,
        env={**os.environ, "AFFIDAVIT_HOME": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "settled, conformant; 100 steps were charged to the ledger" in ran.stdout


def test_the_demonstration_knows_no_other_database() -> None:
    with pytest.raises(SystemExit, match="give postgresql or sqlite"):
        demo_run.database("oracle")
