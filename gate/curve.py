"""``affidavit curve``: all that a plan's guarantee says, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from affidavit.accountants import NAMES, Bracket, belief, decimal_down, decimal_up
from affidavit.certificate import (
    ALPHAS,
    CURVE_CHARTS,
    FALSE_POSITIVE_RATES,
    Assessment,
    Curves,
    curves,
    draw_curves,
)
from affidavit.gate.console import err, out, print_findings, read, require_engine, stop, write
from affidavit.gate.exits import OF_VERDICT
from affidavit.gate.files import print_json
from affidavit.gate.report import headline

DIGITS = 5


def curve(
    plan: Annotated[str, typer.Argument(help="A plan, YAML or JSON; - reads it from stdin.")],
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the curves to this file.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", help="Draw these only: " + ", ".join(CURVE_CHARTS) + "; repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document of curves.")] = False,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="Use one accountant only: " + ", ".join(NAMES) + "."),
    ] = None,
) -> None:
    """What the guarantee says beside one ε: δ at any ε, attacks, beliefs, as table and picture."""
    kinds = tuple(dict.fromkeys(kind or ()))
    _require_known(kinds, engine, svg)
    file = read(plan, as_json=as_json)
    with err.status("accounting ...") as status:
        found = curves(
            file.plan,
            engine=engine,
            progress=lambda what, points: status.update(
                f"{what} ..." if not points else f"{what}: {points} points"
            ),
        )
    if isinstance(found, Assessment):
        if as_json:
            print_json(found.as_result())
        else:
            print_findings(file.name, file.locate(found.reasons))
        raise typer.Exit(OF_VERDICT[found.verdict])
    if svg is not None:
        write(svg, draw_curves(found, kinds).encode())
    if as_json:
        print_json(found.as_document())
    else:
        _print(found)
        if svg is not None:
            out.print(f"drawn to {escape(str(svg))}", highlight=False)
    raise typer.Exit(OF_VERDICT[found.assessment.verdict])


def _print(found: Curves) -> None:
    out.print(f"[bold]{escape(headline(found.assessment))}[/]", highlight=False)
    out.print(f"by {found.engine['name']} ({found.engine['version']})", highlight=False)
    if found.mu is not None:
        rho = decimal_up(found.rho or 0.0, DIGITS)
        mu = decimal_up(found.mu, DIGITS)
        out.print(f"exactly Gaussian: μ = {mu}, ρ = {rho} (zCDP)", highlight=False)
    for table in _tables(found):
        out.print()
        out.print(table)
    out.print(f"\ncurve {found.digest}", highlight=False)


def _tables(found: Curves) -> list[Table]:
    trade, at = found.trade_off, f"{found.delta:g}"
    tables = [
        _table("ε at δ", ("δ", "ε ≥", "ε ≤"), [(f"{d:g}", *_ends(e)) for d, e in found.epsilon_of]),
        _table("δ at ε", ("ε", "δ ≥", "δ ≤"), [(f"{e:g}", *_ends(d)) for e, d in found.delta_of]),
        _table(
            "membership attack",
            ("false-positive rate", "true-positive rate ≥", "≤"),
            [
                *((f"{r:g}", *_ends(trade.true_positive_rate(r))) for r in FALSE_POSITIVE_RATES),
                ("largest difference", *_ends(trade.advantage)),
            ],
        ),
        _table(
            "belief about one record",
            ("before", f"after, except with probability {at} ≤", "right guesses ≤"),
            [
                (f"{p:g}", decimal_up(belief(p, found.odds_exponent), DIGITS), _ends(guess)[1])
                for p, guess in found.guesses
            ],
        ),
        _table(
            "trade-off function",
            ("type I error", "type II error ≥", "≤"),
            [(f"{a:g}", *_ends(trade.type_two(a))) for a in ALPHAS],
        ),
    ]
    if found.renyi:
        end = "=" if found.mu is not None else "≤"
        rows = [(f"{order:g}", decimal_up(upper, DIGITS)) for order, upper in found.renyi]
        tables.append(_table("Rényi divergence", ("order", f"nats {end}"), rows))
    return tables


def _table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _ends(bracket: Bracket) -> tuple[str, str]:
    return decimal_down(bracket.lower, DIGITS), decimal_up(bracket.upper, DIGITS)


def _require_known(kinds: tuple[str, ...], engine: str | None, svg: Path | None) -> None:
    unknown = [kind for kind in kinds if kind not in CURVE_CHARTS]
    if unknown:
        stop(f"--kind {unknown[0]} is not known; choose among {', '.join(CURVE_CHARTS)}.")
    if kinds and svg is None:
        stop("--kind says what to draw; give --svg FILE too.")
    require_engine(engine)
    if svg is not None and not svg.parent.is_dir():
        stop(f"{svg} cannot be written: {svg.parent} is not a directory.")
