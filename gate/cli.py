"""The table of commands, and their help.

The module of a command is imported when the command runs, so that ``affidavit check`` starts fast.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from affidavit import __version__
from affidavit.gate import invocation

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Plans": {
        "init": ("init", "Write a first plan from questions or a training script."),
        "certify": ("certify", "Certify a plan: the noise it needs, or its ε; signed."),
        "check": ("check", "Fail if a plan is under-noised, refused or malformed."),
        "batch": ("batch", "Certify one plan per line."),
        "curve": ("curve", "Show the whole guarantee: δ at any ε, attack success, beliefs."),
        "diagnose": ("diagnose", "Find the known mistakes that lead to a claimed ε or noise."),
        "compare": ("compare", "Compare two plans, and show which change moved ε."),
        "schema": ("describe", "Print the JSON Schema of a plan, or of one field."),
        "explain": ("describe", "Explain a code or verdict, and what to do."),
    },
    "Mechanisms": {
        "mechanisms": ("describe", "Describe what an optimiser releases, and its obligations."),
        "strategy": ("compare", "Compare correlated noise with independent noise."),
        "advise": ("compare", "Find mechanisms that meet the same ε and δ with less error."),
    },
    "Certificates": {
        "verify": ("verify", "Verify a certificate offline, step by step."),
        "keys": ("keys", "Manage signing keys."),
        "roots": ("keysets", "Manage root keys, which sign keysets offline."),
        "keyset": ("keysets", "Draft, sign, check and publish keysets."),
        "policy": ("policy", "Check policy files."),
    },
    "Training": {
        "train": ("trainer.__main__", "Train exactly what a certificate certifies."),
        "search": ("trainer.search", "Train a random number of times, and release the best."),
        "worker": ("worker.__main__", "Claim certified runs from a service, and train them."),
        "runs": ("runs", "Watch, cancel and verify runs."),
        "replay": ("replay", "Run your loop on neighbouring data, and compare the runs."),
        "conformance": ("runs", "Check that a run did what was certified."),
        "verify-evidence": ("evidence", "Verify an evidence file offline, step by step."),
        "audit-model": ("model", "Measure a lower bound on ε from one run."),
        "sign-model": ("model", "Add certificate, record and a signed claim to a model."),
        "verify-model": ("model", "Verify offline what a model's folder claims."),
    },
    "Calls to a service": {
        "login": ("service_commands", "Check a token, and store it for this service."),
        "open": ("service_commands", "Open the service's pages, or a certificate, in a browser."),
        "ledger": ("service_commands", "Show and spend the privacy budgets of data sets."),
        "approve": ("service_commands", "Approve or reject a pending certificate."),
        "revoke": ("service_commands", "Revoke a certificate permanently."),
        "status": ("service_commands", "Fetch the signed status list for verify."),
        "evidence": ("evidence", "Fetch everything about a run or a certificate in one file."),
        "monitor": ("monitor", "Follow a log from outside, and raise alarms."),
    },
    "Running a service": {
        "serve": ("service.__main__", "Run the HTTP service."),
        "migrate": ("service.__main__", "Migrate the database to this release's schema."),
        "backup": ("service.__main__", "Back up the embedded database."),
        "tokens": ("service.__main__", "Manage access tokens."),
        "audit": ("service.__main__", "Verify the log, and export its checkpoints."),
    },
}
"""The commands by section, each with its module and a summary.

A module of this room has a function or command group of the command's name, with ``_`` for ``-``.
A module of another room is a program with an ``app`` of its own.
"""
COMMANDS = {name: module for section in SECTIONS.values() for name, (module, _) in section.items()}
"""The module of every command."""
EXTRAS = {
    "trainer": ("trainer", "torch"),
    "worker": ("trainer", "torch"),
    "service": ("service", "sqlalchemy"),
}
"""The extra that programs of these rooms need, with a package that it installs."""


class Commands(TyperGroup):
    """The command group, which imports commands lazily."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of all commands, in the order of the sections."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return the command with this name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = COMMANDS[cmd_name]
        if "." in module:
            target: Any = _forward(cmd_name, module)
        else:
            target = getattr(import_module(f"affidavit.gate.{module}"), cmd_name.replace("-", "_"))
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(cmd_name)(target)
            target = single
        command = get_command(target)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the commands by section, without importing them."""
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in section.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that ``args`` name; raises a usage error with similar names."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            similar = get_close_matches(args[0].lower(), COMMANDS, n=2)
            hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
            ctx.fail(f"Unknown command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


def _forward(name: str, program: str) -> typer.Typer:
    """Return a command that runs ``affidavit.PROGRAM``, which parses the options and prints help.

    Its room is imported only then, because the others must work offline and without PyTorch.
    """
    forwarded = typer.Typer(add_completion=False)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    subcommand = [name] if program == "service.__main__" else []

    @forwarded.command(name, add_help_option=False, context_settings=settings)
    def run(context: typer.Context) -> None:
        room = program.partition(".")[0]
        extra, package = EXTRAS[room]
        if find_spec(package) is None and "--help" not in context.args:
            from affidavit.gate.console import stop

            stop(f"affidavit {name} needs {package}; run: pip install 'affidavit[{extra}]'")
        raise typer.Exit(invocation.run_program(program, [*subcommand, *context.args]))

    return forwarded


app = typer.Typer(cls=Commands, name="affidavit", no_args_is_help=True, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Certify differentially private training plans and verify certificates.

    Exit codes: 0 certified; 1 blocked; 2 wrong usage or malformed input; 3 undecided; 4 Affidavit
    failed or could not write its output; 130 interrupted.
    """
    if version:
        typer.echo(__version__)
        raise typer.Exit
