"""How a command is invoked: its help, its exit code, and its errors of usage."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

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
    command.get_params = _with_conversions(command.get_params)
    command.short_help = " ".join((command.help or "").partition("\n\n")[0].split())
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
            parameter.display_type = lambda ctx: None  # noqa: ARG005  # hides Python's type name
        elif not parameter.is_flag and parameter.metavar is None:
            parameter.metavar = parameter.opts[0].lstrip("-").upper()
    if hasattr(command, "get_command"):
        command.get_command = _with_plain_help(command.get_command)
    return command


def _with_plain_help(find_command: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Let a group simplify the help of its commands when it finds them; some it imports then."""
    found: dict[str, Any] = {}

    def find(context: Any, name: str) -> Any:
        if name not in found:
            command = find_command(context, name)
            found[name] = command and simplify_help(command)
        return found[name]

    return find


def _with_conversions(list_parameters: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Let parameters, of which Typer adds ``--help`` late, convert their values by themselves."""

    def convert_in(context: Any) -> list[Any]:
        parameters = list_parameters(context)
        for parameter in parameters:
            built = getattr(parameter, "get_runtime_param", None)
            if built is not None and not isinstance(built, _Conversion):
                parameter.get_runtime_param = _Conversion(parameter)
        return parameters

    return convert_in


class _Conversion:
    """Converts the values of a parameter of Typer; texts and paths without pydantic.

    Typer has pydantic build a validator for each parameter, also for one that is left out, and to
    import pydantic takes longer than most commands.
    """

    def __init__(self, parameter: Any) -> None:
        kind = parameter.type_descriptor.annotation
        self._kind = get_args(kind)[0] if get_origin(kind) is list else kind
        self._build = parameter.get_runtime_param

    def __call__(self) -> _Conversion:
        """Return what converts, as the method does that this replaces."""
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value of ``param`` in its type; raises a usage error."""
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if several and not isinstance(value, str) and all(map(self._is_plain, value)):
            return [self._plain(item) for item in value]
        if not several and self._is_plain(value):
            return self._plain(value)
        return self._build().coerce(value, param=param, ctx=ctx)

    def _is_plain(self, value: Any) -> bool:
        """Whether a value needs no validation: a text, a path, or a default in its type."""
        if get_origin(self._kind) is Literal:
            return isinstance(value, str) and value in get_args(self._kind)
        return type(value) is self._kind or (self._kind is Path and isinstance(value, str | Path))

    def _plain(self, value: Any) -> Any:
        return Path(value) if self._kind is Path else value
