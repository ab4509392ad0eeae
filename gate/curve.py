"""``affidavit curve``: print the privacy curves of a plan, and draw them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from affidavit import accountants, assessment
from affidavit.accountants import decimal_down, decimal_up
from affidavit.assessment.charts import CURVE_KINDS
from affidavit.gate.console import (
    err,
    exit_with_assessment,
    load_plan,
    out,
    print_json,
    require_writable,
    say,
    stop,
    write,
)
from affidavit.gate.exit_codes import exit_of_verdict
from affidavit.gate.options import EngineOption, JsonOption, PlanArgument
from affidavit.gate.render import gaussian_bound_line, plain_table

if TYPE_CHECKING:
    from rich.table import Table

DIGITS = 5


def curve(
    plan: PlanArgument,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw the curves to this SVG file.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help="Draw only: " + ", ".join(CURVE_KINDS) + "; repeatable."),
    ] = None,
    as_json: JsonOption = False,
    engine: EngineOption = None,
) -> None:
    """Show the whole guarantee: δ at any ε, attack success and beliefs, as tables or a chart."""
    kinds = tuple(dict.fromkeys(kind or ()))
    unknown = [name for name in kinds if name not in CURVE_KINDS]
    if unknown:
        stop(f"unknown --kind {unknown[0]}; choose from {', '.join(CURVE_KINDS)}.")
    if kinds and svg is None:
        stop("--kind needs --svg FILE.")
    require_writable(svg)
    file = load_plan(plan, as_json=as_json)
    with err.status("accounting ...") as status:
        result = assessment.curves(
            file.plan,
            engine=engine,
            progress=lambda label, points: status.update(
                f"{label} ..." if not points else f"{label}: {points} points"
            ),
        )
    if isinstance(result, assessment.Assessment):
        exit_with_assessment(
            file, result, exit_of_verdict(result.verdict, result.codes), as_json=as_json
        )
    if svg is not None:
        write(svg, assessment.draw_curves(result, kinds).encode())
    if as_json:
        print_json(result.as_document())
    else:
        _print(result)
        if svg is not None:
            say(f"written to {svg}")
    raise typer.Exit(exit_of_verdict(result.assessment.verdict, result.assessment.codes))


def _print(result: assessment.Curves) -> None:
    out.print(f"[bold]{escape(result.assessment.headline)}[/]")
    out.print(f"by {result.engine['name']} ({result.engine['version']})")
    if result.mu is not None:
        rho = decimal_up(result.rho or 0.0, DIGITS)
        mu = decimal_up(result.mu, DIGITS)
        out.print(f"exactly Gaussian: μ = {mu}, ρ = {rho} (zCDP)")
    elif (bound := result.gaussian_bound) is not None:
        out.print(gaussian_bound_line(bound))
    for table in _tables(result):
        out.print()
        out.print(table)
    out.print(f"\ncurve {result.digest}")


def _tables(result: assessment.Curves) -> list[Table]:
    trade_off, delta = result.trade_off, decimal_up(result.delta, DIGITS)
    tables = [
        _table("ε at δ", ("δ", "ε ≥", "ε ≤"), _rows(result.epsilon_of)),
        _table("δ at ε", ("ε", "δ ≥", "δ ≤"), _rows(result.delta_of)),
        _table(
            "membership attack",
            ("false-positive rate", "true-positive rate ≥", "≤"),
            [
                *(
                    (f"{r:g}", *_bounds(trade_off.true_positive_rate(r)))
                    for r in assessment.FALSE_POSITIVE_RATES
                ),
                ("largest difference", *_bounds(trade_off.advantage)),
            ],
        ),
        _table(
            "belief about one record",
            ("before", f"after, except with probability {delta} ≤", "right guesses ≤"),
            [
                (
                    f"{p:g}",
                    decimal_up(accountants.belief(p, result.odds_exponent), DIGITS),
                    _bounds(guess)[1],
                )
                for p, guess in result.guesses
            ],
        ),
        _table(
            "trade-off function",
            ("type I error", "type II error ≥", "≤"),
            [(f"{a:g}", *_bounds(trade_off.type_two(a))) for a in assessment.ALPHAS],
        ),
    ]
    if result.renyi:
        relation = "=" if result.mu is not None else "≤"
        rows = [(f"{order:g}", decimal_up(upper, DIGITS)) for order, upper in result.renyi]
        tables.append(_table("Rényi divergence", ("order", f"nats {relation}"), rows))
    return tables


def _table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = plain_table(title, (), headings)
    for row in rows:
        table.add_row(*row)
    return table


def _rows(brackets: Iterable[tuple[float, accountants.Bracket]]) -> list[tuple[str, ...]]:
    return [(f"{at:g}".replace("e-0", "e-"), *_bounds(bracket)) for at, bracket in brackets]


def _bounds(bracket: accountants.Bracket) -> tuple[str, str]:
    return decimal_down(bracket.lower, DIGITS), decimal_up(bracket.upper, DIGITS)
