"""A command imports what its answer needs: help, codes and keys need no accountant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "e2e-dp-sgd-published.yaml"
NUMERICAL = {"scipy", "flint", "dp_accounting", "affidavit.assessment.diagnosis"}
COUNT = """
import os, sys
from affidavit.gate.entry import run, _command
def leave(code, exit=os._exit):
    os.write(2, f"\\nimported: {' '.join(sys.modules)}\\n".encode())
    exit(code)
os._exit = leave  # of the child process that reads a repository
code = run(lambda: _command(sys.argv[1:]))
sys.stdout.flush()
print("imported:", *sys.modules, file=sys.stderr)
sys.exit(code)
"""


def imported(tmp_path: Path, *arguments: str) -> set[str]:
    """The modules of a process that runs a command, and of its child."""
    homes = {
        "AFFIDAVIT_HOME": str(tmp_path / "home"),
        "AFFIDAVIT_CACHE": str(tmp_path / "cache"),
        "DATABASE_URL": f"sqlite:///{tmp_path / 'database'}",
    }
    command = [sys.executable, "-c", COUNT, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **homes}, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("imported:")]
    return {name for line in lines for name in line.split()[1:]}


MODELS = {"affidavit.plan.document", "affidavit.accountants.protocol", "affidavit.trust.keyset"}
"""Modules that define many models, which costs as much as importing the command line."""
UNUSED = MODELS | {
    *("pydantic", "numpy", "rich.table", "sqlalchemy", "alembic"),
    "affidavit.importers.documents",
}
"""What help, codes, keys and cached results do not need."""


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("command", "unused"),
    [
        ("--help", set()),
        ("batch --help", set()),
        ("certify --help", UNUSED),
        ("check --help", UNUSED),
        ("compare --help", UNUSED),
        ("serve --help", UNUSED),
        ("explain under_noised", UNUSED),
        ("explain unknown_field", set()),
        ("schema sampling.scheme", UNUSED),
        ("keys list", UNUSED),
        ("tokens list", set()),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_command_that_computes_nothing_imports_no_numerics(
    tmp_path: Path, command: str, unused: set[str]
) -> None:
    loaded = imported(tmp_path, *command.split())
    assert "affidavit.gate.entry" in loaded
    assert loaded & (NUMERICAL | {"fastapi", "alembic", "httpx"} | unused) == set()


MODULES_OF_HELP = 560
"""Those of all commands together, of which Typer and Rich are half."""
HELP_OF_ALL = """
import sys
from importlib import import_module
from typer.main import get_command
from affidavit.gate.cli import COMMANDS, app
from affidavit.gate.invocation import simplify_help
group = simplify_help(get_command(app))
def print_help(command, name):
    with command.make_context(name, [], resilient_parsing=True) as context:
        print(command.get_help(context))
        for below in getattr(command, "list_commands", lambda _: ())(context):
            print_help(command.get_command(context, below), below)
for name, module in COMMANDS.items():
    if "." in module:  # a program of its own
        program = get_command(import_module(f"affidavit.{module}").app)
        print_help(simplify_help(program), name)
    else:
        print_help(group.get_command(None, name), name)
print("imported:", *sys.modules)
"""


def test_the_help_of_every_command_needs_no_models_and_no_client() -> None:
    command = [sys.executable, "-c", HELP_OF_ALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, _, names = done.stdout.rpartition("imported:")
    assert "--forecast" in text
    assert "--claimed-epsilon" in text
    assert "--microbatch" in text
    assert "export-checkpoint" in text
    loaded = set(names.split())
    assert loaded & (NUMERICAL | UNUSED | {"httpx", "pebble", "affidavit.client.models"}) == set()
    assert len(loaded) < MODULES_OF_HELP, sorted(loaded)


def test_a_check_imports_what_the_plan_needs_and_a_cached_one_nothing(tmp_path: Path) -> None:
    first, second = (imported(tmp_path, "check", str(EXAMPLE)) for _ in range(2))
    assert "scipy" in first
    unused = {"fft", "linalg", "optimize", "stats"}
    assert first & {"flint", *(f"scipy.{name}" for name in unused)} == set()
    assert "ruamel.yaml" in second
    assert second & (NUMERICAL | UNUSED) == set()
