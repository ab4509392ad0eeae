"""``affidavit advise``: the mechanisms that meet a plan's budget, each certified, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate import Advice
from affidavit.certificate import advise as advice_for
from affidavit.gate.console import err, out, read, refuse, write
from affidavit.gate.exits import Exit
from affidavit.gate.files import print_json
from affidavit.gate.strategy import table
from affidavit.plan import RefusedPlan


def advise(
    plan: Annotated[str, typer.Argument(help="A plan, YAML or JSON; - reads it from stdin.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw error against memory to this file.")
    ] = None,
) -> None:
    """Mechanisms for the plan's ε and δ: noise per step, error of the sum, buffers."""
    file = read(plan, as_json=as_json)
    try:
        with err.status("certifying ...") as status:
            found = advice_for(file.plan, lambda what: status.update(f"{what} ..."))
    except RefusedPlan as refusal:
        refuse(plan, file.locate(refusal.reasons), Exit.USAGE, as_json=as_json)
    if svg is not None:
        write(svg, found.picture().encode())
    if as_json:
        print_json(found.as_document())
    else:
        _print(found)
        if svg is not None:
            out.print(f"drawn to {escape(str(svg))}", highlight=False)
    raise typer.Exit(Exit.CERTIFIED if found.certified else Exit.BLOCKED)


def _print(found: Advice) -> None:
    out.print(
        f"[bold]for ε = {found.epsilon:g} at δ = {found.delta:g} over {found.steps} steps[/], "
        "noise in clip norms",
        highlight=False,
    )
    for adjacency, rows in found.groups:
        out.print()
        out.print(table(f"under {adjacency}", rows))
        front = ", ".join(row.label for row in found.front(rows))
        out.print(f"Pareto front of rms error and buffers: {escape(front) or 'empty'}")
        for row in rows:
            for reason in row.reasons:
                out.print(f"{escape(row.label)}: {escape(str(reason))}", highlight=False)
    out.print()
    for line in _conditions(found):
        out.print(escape(line), highlight=False)


def _conditions(found: Advice) -> list[str]:
    """Who is comparable with whom, and on what each row rests."""
    said = ["within a group rows protect the same neighbours, if lots are drawn as the row says:"]
    seen: dict[str, str] = {}
    for _, rows in found.groups:
        for row in rows:
            if row.assessment is not None and row.assessment.assumptions:
                seen.setdefault(row.sampler, row.assessment.assumptions[-1])
    said += [f"  {sampler}: {assumption}" for sampler, assumption in seen.items()]
    if len(found.groups) > 1:
        said.append(
            "rows of different groups are not comparable: under zero_out a record becomes a zero "
            "contribution and nothing else moves; under add_remove a fixed order cannot be "
            "certified, because a removal moves the other records."
        )
    return said
