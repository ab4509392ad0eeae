"""The command line, as the program itself describes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from affidavit.gate import app
from affidavit.service.__main__ import app as service
from affidavit.trainer import app as trainer
from affidavit.trainer.search import app as search
from affidavit.worker import app as worker

SERVICE: Any = get_command(service)
BECOMES = {
    "affidavit train": get_command(trainer),
    "affidavit search": get_command(search),
    "affidavit worker": get_command(worker),
    **{
        f"affidavit {name}": SERVICE.get_command(None, name) for name in SERVICE.list_commands(None)
    },
}
"""Commands whose process is replaced by another program's, which takes their options."""

TRUST = ("`--keys`", "`--keyset`", "`--root`", "`--trust`")
VERIFICATION = (
    *TRUST,
    "`--require-log`",
    "`--checkpoint-store`",
    "`--consistency`",
    "`--status`",
    "`--require-status`",
)
TOGETHER = {"the verification options": VERIFICATION, "the trust options": TRUST}
"""Options that several commands take together, by the name of the group."""

HEAD = """# The command line

Generated from the program by `make docs`; change `gate/`, not this file.
`affidavit COMMAND --help` says the same.

| exit code | meaning |
|---|---|
| 0 | certified, verified, done |
| 1 | blocked: under-noised, refused, over budget, or a bundle that does not verify |
| 2 | usage, or malformed input |
| 3 | undecided: a claim between the bounds, accountants that disagree, no server, a closed pipe |
| 4 | Affidavit failed, or its output could not be written |
| 130 | interrupted |

Nothing that was not checked ends with 0. What people read is printed in ASCII where the terminal
cannot show it (`epsilon <= 2`); what programs read (`--json`, `--format`) is UTF-8 everywhere.

"""
"""How the page begins."""


def page() -> str:
    """Every command with its arguments and options; what several take is told once."""
    sections = list(_walk(get_command(app), "affidavit"))
    uses = Counter(row for _, command in sections for row in _rows(command))
    most = {name: row for row, _ in reversed(uses.most_common()) for name in row[:1]}
    shared = {row for row in most.values() if uses[row] > 1}
    told = f"## Options of several commands\n\n{_listed(sorted(shared))}\n"
    for group, options in TOGETHER.items():
        told += f"*{group.capitalize()}* are {', '.join(options)}.\n"
    told += "\n"
    return HEAD + told + "\n".join(_section(*section, shared) for section in sections)


def _walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    command = BECOMES.get(path, command)
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        result = command.get_command(None, name)
        if result is not None and not result.hidden:
            yield from _walk(result, f"{path} {name}")


def _rows(command: Any) -> list[tuple[str, str]]:
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    return [(_name(item), _help(item)) for item in shown if item.name != "help"]


def _section(path: str, command: Any, shared: set[tuple[str, str]]) -> str:
    about = re.sub(r"``(.+?)``", r"`\1`", command.help or "").replace("\f", "")
    told = f"## {path}\n\n{about.strip()}\n"
    rows = _rows(command)
    if own := [row for row in rows if row not in shared]:
        told += f"\n{_listed(own)}"
    if also := _grouped([name for name, meaning in rows if (name, meaning) in shared]):
        told += f"\n{'Also' if own else 'Takes'} {', '.join(also)}.\n"
    return told


def _listed(rows: list[tuple[str, str]]) -> str:
    return "".join(f"- {name}: {' '.join(meaning.split())}\n" for name, meaning in rows)


def _grouped(names: list[str]) -> list[str]:
    """The names, with one for the largest group whose options are all among them."""
    for group, options in TOGETHER.items():
        if set(options) <= set(names):
            return [*(name for name in names if name not in options), group]
    return names


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        optional = "" if parameter.required else " (may be left out)"
        return f"`{(parameter.metavar or parameter.name).upper()}`{optional}"
    return ", ".join(f"`{opt}`" for opt in (*parameter.opts, *parameter.secondary_opts))


def _help(parameter: Any) -> str:
    variable = getattr(parameter, "envvar", None)
    also = f" Or the environment variable `{variable}`." if isinstance(variable, str) else ""
    needed = parameter.param_type_name == "option" and parameter.required
    return f"{parameter.help or ''}{also}{' Required.' if needed else ''}"
