"""As a process of its own: exit codes, streams and no traceback, whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., dict[str, Any]]


@pytest.mark.soak
def test_certify_from_a_pipe(affidavit: Any, document: Make) -> None:
    done = affidavit("certify", "-", "--json", stdin=json.dumps(document()))
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["verdict"] == "certified"


def test_a_malformed_plan_has_a_place_and_no_traceback(affidavit: Any, save: Any) -> None:
    path = save("version: 1\nsteps: .inf\n", "plan.yaml")
    done = affidavit("check", path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"{path}:2:1: not_finite /steps: ")
    assert "Traceback" not in done.stderr


def test_a_key_a_bundle_and_its_verification(
    affidavit: Any, run: Any, save: Any, document: Make, tmp_path: Any
) -> None:
    path, bundle = save(document()), str(tmp_path / "bundle.json")
    assert run("keys", "new").exit_code == 0
    assert run("certify", path, "--out", bundle).exit_code == 0
    assert affidavit("verify", bundle, "--plan", path).returncode == 0


@pytest.mark.ordinary("arguments2")
@pytest.mark.parametrize("arguments", [("certify",), ("certify", "--json"), ("check",)])
def test_output_that_nobody_reads_decides_nothing_and_says_nothing(
    save: Any, document: Make, arguments: tuple[str, ...]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "affidavit", *arguments, save(document())],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        env=dict(os.environ),
        timeout=300,
    )
    os.close(writer)
    assert done.returncode == 3
    assert done.stderr == b""


def test_the_gate_needs_no_service() -> None:
    code = (
        "import sys, affidavit.gate.cli; service = {'affidavit.service', 'fastapi', 'sqlalchemy'}; "
        "print(sorted(service & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "[]\n"
