"""The command line.

It works offline. Exit codes: 0 certified, 1 blocked (under-noised, refused, or a bundle that does
not verify), 2 usage or malformed input, 3 undecided or broken pipe.

The module of a command is imported when the command runs, or when all are listed, so that a
check on every commit starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from affidavit import __version__
from affidavit.gate.console import out

COMMANDS = {
    "certify": "certify",
    "check": "check",
    "batch": "batch",
    "verify": "verify",
    "serve": "programs",
    "migrate": "programs",
    "backup": "programs",
    "curve": "curve",
    "diagnose": "diagnose",
    "mechanisms": "mechanisms",
    "compare": "compare",
    "strategy": "strategy",
    "advise": "strategy",
    "keys": "keys",
    "roots": "keys",
    "keyset": "keyset",
    "policy": "policy",
    "tokens": "programs",
    "ledger": "service_commands",
    "approve": "service_commands",
    "revoke": "service_commands",
    "status": "service_commands",
    "audit": "programs",
    "train": "programs",
    "worker": "programs",
    "runs": "runs",
    "conformance": "conformance",
}
"""Every command, with the module that defines a function or group of that name."""


class Commands(TyperGroup):
    """The command group, which imports commands lazily."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """The names of all commands, in the order above."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command with this name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"affidavit.gate.{COMMANDS[cmd_name]}")
        target = getattr(module, cmd_name)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(cmd_name)(target)
            target = single
        command = get_command(target)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    name="affidavit",
    help="Certify differentially private training plans and verify certificates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Certify differentially private training plans and verify certificates."""
    if version:
        out.print(__version__, highlight=False)
        raise typer.Exit


def main() -> None:
    """RecordEntry point."""
    app()
