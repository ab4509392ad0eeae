"""``affidavit compare``: which of two plans protects more, and which change moved ε."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from affidavit.accountants import decimal_up
from affidavit.certificate import Assessment, ChangeEffect, PlanComparison, certify, compare_plans
from affidavit.gate.console import err, out, read
from affidavit.gate.exits import OF_VERDICT, Exit, worst
from affidavit.gate.files import print_json
from affidavit.gate.report import headline
from affidavit.plan import ABSENT, Plan

SHOWN = 32
"""Characters of a value in the table; the document has it whole."""
MOVED = {
    "raised": "raised",
    "lowered": "lowered",
    "unmoved": "not moved",
    "not_told_apart": "not told apart",
    None: "",
}


def compare(
    first: Annotated[str, typer.Argument(help="A plan, YAML or JSON; - reads it from stdin.")],
    second: Annotated[str, typer.Argument(help="The plan to compare it with.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Two plans field by field, each change made alone, and whose guarantee is stronger.

    Exits 0 where both are certified and ranked, 1 where one is not certified, and 3 where
    their guarantees do not mean the same and so are not ranked.
    """
    plans = read(first, as_json=as_json), read(second, as_json=as_json)
    with err.status("certifying both plans ...") as status:

        def assess(plan: Plan) -> Assessment:
            found = certify(plan, second_opinion=False)
            status.update("certifying each change alone ...")
            return found

        found = compare_plans(plans[0].plan, plans[1].plan, assess)
    if as_json:
        print_json(found.as_document())
    else:
        _print(found)
    raise typer.Exit(exit_of(found))


def exit_of(found: PlanComparison) -> Exit:
    """The worse verdict's; could not decide where two proved guarantees are not ranked."""
    exits = [OF_VERDICT[item.verdict] for item in (found.first, found.second)]
    return worst([*exits, Exit.UNDECIDED if found.obstacles else Exit.CERTIFIED])


def _print(found: PlanComparison) -> None:
    out.print(f"first:  {escape(headline(found.first))}", highlight=False)
    out.print(f"second: {escape(headline(found.second))}", highlight=False)
    out.print(f"[bold]{escape(found.sentence)}[/]", highlight=False)
    for obstacle in found.obstacles:
        out.print(f"{obstacle.code}: {escape(obstacle.remedy)}", highlight=False)
    if not found.alone:
        out.print("The plans are the same.", highlight=False)
        return
    out.print(_table(found))
    for what, each in (("ε", found.strongest), ("the noise", found.strongest_on_noise)):
        if each is not None:
            out.print(f"{what} is moved furthest by {escape(each.change.pointer)}", highlight=False)
    if found.act_together:
        out.print("No single change moves ε that way: they act together.", highlight=False)
    for item in found.alone:
        for reason in item.reasons:
            out.print(
                f"{escape(item.change.pointer)} alone: {escape(str(reason))}", highlight=False
            )


def _table(found: PlanComparison) -> Table:
    title = "the first plan with one field changed at a time"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("field", no_wrap=True)
    for heading in ("first", "second"):
        table.add_column(heading, overflow="fold")
    for heading in ("ε ≤", "σ joint", "ε is", "σ is"):
        table.add_column(heading, justify="right")
    for item in found.alone:
        table.add_row(
            escape(item.change.pointer),
            _value(item.change.before),
            _value(item.change.after),
            *_figures(item),
            MOVED[item.moved],
            MOVED[item.noise_moved],
        )
    return table


def _figures(each: ChangeEffect) -> tuple[str, str]:
    found = each.assessment
    if found is None:
        return "", ""
    epsilon = found.verdict if found.epsilon is None else decimal_up(found.epsilon.upper, 6)
    return epsilon, "" if found.joint is None else f"{found.joint:.5g}"


def _value(value: Any) -> str:
    if value is ABSENT:
        return "-"
    text = str(value)
    return escape(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")
