"""``affidavit policy check FILE``: validate policy files offline, and print their digests.

Exit codes: 0 valid, 2 not a valid policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from affidavit import mechanisms
from affidavit.certificate import policy as policies
from affidavit.gate.console import out, print_json, print_reasons
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import JsonOption, command_group
from affidavit.plan import MalformedPlan, syntax_of

if TYPE_CHECKING:
    from affidavit.certificate.policy import Policy

policy = command_group("Check policy files.")


@policy.callback()
def _group() -> None:
    """Check policy files."""


@policy.command("check")
def check(
    files: Annotated[
        list[str], typer.Argument(help="Policy files, YAML or JSON; - reads standard input.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Validate policy files, and print the digest that certificates will name."""
    code = Exit.CERTIFIED
    for name in files:
        try:
            checked = _parse_file(name)
        except policies.MalformedPolicy as error:
            print_reasons(name, error.reasons)
            code = Exit.USAGE
            continue
        if as_json:
            print_json({**checked.reference(), "policy": checked.as_document()})
        else:
            line = f"{name}: {checked.name} version {checked.version}, for {_datasets(checked)}"
            out.print(f"[green]{escape(line)}[/]\n{checked.digest()}")
    raise typer.Exit(code)


def _parse_file(name: str) -> Policy:
    """Parse a policy file or standard input; raises ``MalformedPolicy``."""
    try:
        raw = mechanisms.read_bytes(name)
    except MalformedPlan as error:
        raise policies.MalformedPolicy(*error.reasons) from None
    return policies.parse_policy(raw, syntax_of(name, raw))


def read_policy(path: Path) -> Policy:
    """Read a policy file; report a malformed one and exit."""
    try:
        return _parse_file(str(path))
    except policies.MalformedPolicy as error:
        print_reasons(str(path), error.reasons)
        raise typer.Exit(Exit.USAGE) from None


def _datasets(policy: Policy) -> str:
    if policy.datasets == "default":
        return "every data set not named by another policy"
    return ", ".join(policy.datasets) or "no data set"
