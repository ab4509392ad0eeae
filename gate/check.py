"""``affidavit check``: the gate that fails when a plan may not run as it stands."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate.certify import certify as assess
from affidavit.gate.console import out, print_findings
from affidavit.gate.exits import OF_VERDICT, Exit, worst
from affidavit.gate.reading import read_plan
from affidavit.gate.report import headline, printable
from affidavit.plan.reasons import MalformedPlan


def check(
    plans: Annotated[list[str], typer.Argument(help="Plans to check.")],
) -> None:
    """The gate: fail when a plan is under-noised, refused or malformed."""
    exits = []
    for name in plans:
        try:
            file = read_plan(name)
        except MalformedPlan as error:
            print_findings(name, error.reasons)
            exits.append(Exit.USAGE)
            continue
        assessment = assess(file.plan, second_opinion=False)
        print_findings(name, file.locate(assessment.reasons))
        if assessment.verdict == "certified":
            out.print(
                f"[green]{escape(printable(name))}: {escape(headline(assessment))}[/]",
                highlight=False,
            )
        exits.append(OF_VERDICT[assessment.verdict])
    raise typer.Exit(worst(exits))
