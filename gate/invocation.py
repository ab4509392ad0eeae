"""How a command is invoked: its help, its exit code, and its errors of usage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from affidavit.gate.exit_codes import Exit

COMPLETION = "_AFFIDAVIT_COMPLETE"
"""Environment variable of a shell that requests completions."""


def run_program(name: str, arguments: Sequence[str]) -> int:
    """Run ``python -m affidavit.NAME`` in this process, and return its exit code."""
    app = import_module(f"affidavit.{name}").app
    return invoke(app, app.info.name, arguments)


def invoke(app: typer.Typer, name: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; raises what it raises, but for errors of usage.

    ``command.main`` of Click would exit with 1 if a pipe is closed.
    """
    command = simplify_help(get_command(app))
    try:
        if COMPLETION in os.environ:
            command.main(list(arguments), prog_name=name)
        with command.make_context(name, list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as finished:
        return finished.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as finished:
        if isinstance(finished.__context__, BrokenPipeError):  # Rich exits with 1
            raise finished.__context__ from None
        if finished.code is None or isinstance(finished.code, int):
            return finished.code or 0
        raise
    except Exception as error:
        # Usage errors are exceptions of Click, which Typer does not export.
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        _in_plain_words(error)
        error.show()
        return Exit.USAGE
    return Exit.CERTIFIED


def _in_plain_words(error: Any) -> None:
    """Replace pydantic's words about a value, which Typer shows, by those about plans."""
    cause = error.__cause__
    if hasattr(cause, "errors") and hasattr(error, "message"):
        from affidavit.plan.diagnostics import RULES

        first = cause.errors(include_url=False)[0]
        rule = RULES.get(first["type"].partition("_")[0])
        text = first["msg"].removeprefix("Value error, ")
        error.message = f"{first['input']!r} is not {rule}." if rule else text


def simplify_help(command: Any) -> Any:
    """Give ``command`` and its subcommands plain help, with the names of options as metavars.

    A list of commands shows the whole summary of each.
    """
    command.rich_markup_mode = None
    command.short_help = " ".join((command.help or "").partition("\n\n")[0].split())
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
            parameter.display_type = lambda ctx: None  # noqa: ARG005  # hides Python's type name
        elif not parameter.is_flag and parameter.metavar is None:
            parameter.metavar = parameter.opts[0].lstrip("-").upper()
    for subcommand in getattr(command, "commands", {}).values():
        simplify_help(subcommand)
    return command
