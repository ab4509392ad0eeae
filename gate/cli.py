"""The command line: what people and pipelines ask, and the service's own commands.

It works offline. Exit codes: 0 certified, 1 blocked (under-noised, refused, or a bundle
that does not verify), 2 usage or malformed input, 3 could not decide, or nobody read on.

A command's file is loaded when the command is run, or when all are listed: a gate that runs
on every commit should not wait for what another command needs.
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
    "serve": "serve",
    "migrate": "serve",
    "backup": "serve",
    "curve": "curve",
    "diagnose": "diagnose",
    "mechanisms": "mechanisms",
    "compare": "compare",
    "strategy": "strategy",
    "advise": "advise",
    "keys": "keys",
    "roots": "roots",
    "keyset": "keyset",
    "policy": "policy",
    "tokens": "tokens",
    "ledger": "ledger",
    "approve": "lifecycle",
    "revoke": "lifecycle",
    "status": "lifecycle",
    "audit": "audit",
    "train": "train",
    "worker": "worker",
    "runs": "runs",
    "conformance": "conformance",
}
"""Every command, with the file of this folder that has it, a function or a group by that name."""


class Commands(TyperGroup):
    """The commands, each loaded when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Their names, in the order above."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"affidavit.gate.{COMMANDS[cmd_name]}")
        found = getattr(module, cmd_name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(cmd_name)(found)
            found = alone
        command = get_command(found)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    name="affidavit",
    help="Certify differentially private training plans, and check what was certified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Certify differentially private training plans, and check what was certified."""
    if version:
        out.print(__version__, highlight=False)
        raise typer.Exit


def main() -> None:
    """Entry point."""
    app()
