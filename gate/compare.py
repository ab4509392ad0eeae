"""``affidavit compare``: compare two plans, and show which change moved ε."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from affidavit.certificate import Assessment, PlanComparison, certify, compare_plans
from affidavit.gate.console import err, out, print_json, read, say
from affidavit.gate.exit_codes import OF_VERDICT, Exit, worst
from affidavit.gate.options import JsonOption, PlanArgument
from affidavit.gate.render import plain_table
from affidavit.plan import Plan

SHOWN = 32
"""Maximum characters of a value in the table; the JSON document has all."""
MOVED = {
    "raised": "raised",
    "lowered": "lowered",
    "unmoved": "not moved",
    "not_told_apart": "not told apart",
}


def compare(
    first: PlanArgument,
    second: Annotated[str, typer.Argument(help="Plan to compare with the first.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two plans field by field, each change alone, and rank their guarantees.

    Exits 0 if both are certified and ranked, 1 if one is not certified, and 3 if their
    guarantees are not comparable.
    """
    plans = read(first, as_json=as_json), read(second, as_json=as_json)
    with err.status("certifying both plans ...") as status:

        def assess(plan: Plan) -> Assessment:
            assessment = certify(plan, second_opinion=False)
            status.update("certifying each change alone ...")
            return assessment

        comparison = compare_plans(plans[0].plan, plans[1].plan, assess)
    if as_json:
        print_json(comparison.as_document())
    else:
        _print(comparison)
    raise typer.Exit(exit_of(comparison))


def exit_of(comparison: PlanComparison) -> Exit:
    """The worse verdict; undecided if two proved guarantees are not comparable."""
    exits = [OF_VERDICT[plan.verdict] for plan in (comparison.first, comparison.second)]
    return worst([*exits, Exit.UNDECIDED if comparison.obstacles else Exit.CERTIFIED])


def _print(comparison: PlanComparison) -> None:
    say(f"first:  {comparison.first.headline}")
    say(f"second: {comparison.second.headline}")
    out.print(f"[bold]{escape(comparison.sentence)}[/]")
    for obstacle in comparison.obstacles:
        say(f"{obstacle.code}: {obstacle.remedy}")
    if not comparison.alone:
        say("The plans are identical.")
        return
    out.print(_table(comparison))
    for quantity, strongest in (
        ("ε", comparison.strongest),
        ("noise", comparison.strongest_on_noise),
    ):
        if strongest is not None:
            say(f"{quantity}: the largest change comes from {strongest.change.pointer}")
    if len(comparison.contributions) > 1:
        say("One after the other, in this order, the changes add to ε:")
    for part in comparison.contributions:
        fields = ", ".join(change.pointer for change in part.changes)
        say(f"  {part.difference:+f} to ε ≤ {part.after.epsilon_text}: {fields}")
    if comparison.act_together:
        say("No single change moves ε in that direction; only their combination does.")
    for change in comparison.alone:
        for reason in change.reasons:
            say(f"{change.change.pointer} alone: {reason}")


def _table(comparison: PlanComparison) -> Table:
    title = "first plan with one field changed at a time"
    table = plain_table(title, ("field", "first", "second"), ("ε ≤", "σ joint", "ε is", "σ is"))
    field, *values = table.columns[:3]
    field.no_wrap = True
    for value in values:
        value.overflow = "fold"
    for effect in comparison.alone:
        moved = (MOVED.get(way or "") for way in (effect.moved, effect.noise_moved))
        table.add_row(
            escape(effect.change.pointer),
            *(escape(value or "-") for value in effect.change.texts(SHOWN)),
            *(number or "" for number in (effect.alone, effect.noise, *moved)),
        )
    return table
