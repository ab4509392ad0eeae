"""``affidavit policy check FILE``, and policies as other commands take them.

A policy file is judged offline, by itself: that it is well-formed, and by which digest
certificates will name it. Exit codes: 0 it is a policy, 2 it is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate.policy import MalformedPolicy, Policy, parse_policy
from affidavit.gate.console import out, print_findings
from affidavit.gate.exits import Exit
from affidavit.gate.files import print_json
from affidavit.gate.options import JsonOption
from affidavit.gate.reading import read_bytes
from affidavit.plan import MalformedPlan, syntax_of

policy = typer.Typer(help="Policies: what an organisation lets through.", no_args_is_help=True)


@policy.callback()
def _group() -> None:
    """Policies: what an organisation lets through."""


@policy.command("check")
def check(
    files: Annotated[list[str], typer.Argument(help="Policies, YAML or JSON; - reads stdin.")],
    as_json: JsonOption = False,
) -> None:
    """Whether each file is a policy, and the digest that certificates will name it by."""
    code = Exit.CERTIFIED
    for name in files:
        try:
            found = parsed(name)
        except MalformedPolicy as error:
            print_findings(name, error.reasons)
            code = Exit.USAGE
            continue
        if as_json:
            print_json({**found.reference(), "policy": found.as_document()})
        else:
            line = f"{name}: {found.name} version {found.version}, for {_datasets(found)}"
            out.print(f"[green]{escape(line)}[/]\n{found.digest()}", highlight=False)
    raise typer.Exit(code)


def parsed(name: str) -> Policy:
    """The policy in a file or on standard input; raises ``MalformedPolicy``."""
    try:
        raw = read_bytes(name)
    except MalformedPlan as error:
        raise MalformedPolicy(*error.reasons) from None
    return parse_policy(raw, syntax_of(name, raw))


def read_policy(path: Path) -> Policy:
    """The policy of an option; a malformed one is told of and ends the command."""
    try:
        return parsed(str(path))
    except MalformedPolicy as error:
        print_findings(str(path), error.reasons)
        raise typer.Exit(Exit.USAGE) from None


def _datasets(found: Policy) -> str:
    if found.datasets == "default":
        return "every data set that no other policy names"
    return ", ".join(found.datasets) or "no data set"
