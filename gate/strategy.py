"""``affidavit strategy`` and ``affidavit advise``: compare noise mechanisms for a plan."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from affidavit.accountants import decimal_up
from affidavit.certificate import Advice, Assessment, MechanismCost, StrategyComparison, compare
from affidavit.certificate import advise as advice_for
from affidavit.gate.console import (
    err,
    out,
    print_json,
    print_reasons,
    read,
    refuse,
    require_writable,
    say,
    stop,
    write,
)
from affidavit.gate.exit_codes import OF_VERDICT, Exit
from affidavit.gate.options import JsonOption, PlanArgument
from affidavit.gate.render import plain_table
from affidavit.mechanisms import content_digest
from affidavit.mechanisms.strategies import Strategy, TooLarge
from affidavit.plan import RefusedPlan

FORMATS = (".json", ".npy", ".npz")


def strategy(
    plan: PlanArgument,
    as_json: JsonOption = False,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", help="Write a chart of the error per step to this SVG file."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Export the injected noise as .json, .npy or .npz."),
    ] = None,
) -> None:
    """Compare a plan's noise with independent noise: sensitivity, error and buffers."""
    if export is not None and export.suffix not in FORMATS:
        stop(f"--export {export} must end in {', '.join(FORMATS)}.")
    require_writable(svg, export)
    file = read(plan, as_json=as_json)
    try:
        with err.status("certifying ...") as status:
            result = compare(file.plan, lambda label: status.update(f"{label} ..."))
    except RefusedPlan as refusal:
        refuse(plan, file.locate(refusal.reasons), Exit.BLOCKED, as_json=as_json)
    if isinstance(result, Assessment):
        if as_json:
            print_json(result.as_result())
        else:
            print_reasons(plan, file.locate(result.reasons))
        raise typer.Exit(Exit.BLOCKED)
    written = _write(result, svg, export)
    if as_json:
        print_json({**result.as_document(), "written": written})
    else:
        _print(result)
        for name, digest in written.items():
            say(f"{name} sha256 {digest}")
    raise typer.Exit(OF_VERDICT[result.assessment.verdict])


def _write(result: StrategyComparison, svg: Path | None, export: Path | None) -> dict[str, str]:
    """Write the requested files; returns their digests by path."""
    contents: dict[Path, bytes] = {}
    if svg is not None:
        contents[svg] = result.picture().encode()
    if export is not None:
        try:
            contents[export] = exported(result.strategy, export.suffix)
        except TooLarge as error:
            stop(f"--export: {error} is too large to write.")
        except NotSquare as error:
            stop(f"--export: {error}.")
    for path, content in contents.items():
        write(path, content)
    return {str(path): content_digest(content) for path, content in contents.items()}


class NotSquare(ValueError):
    """The noise matrix is not square, so no plan can name it by a file."""


def exported(strategy: Strategy, suffix: str) -> bytes:
    """N as a strategy file that a plan can name; its first column where N is Toeplitz.

    Raises ``TooLarge`` and ``NotSquare``.
    """
    column = strategy.noise_coefficients
    noise = strategy.noise_matrix() if column is None else np.trim_zeros(column, "b")
    if noise.ndim == 2 and noise.shape[0] != noise.shape[1]:
        raise NotSquare(f"a {strategy.kind} has noise per node, not per step; name it by kind")
    if suffix == ".json":
        document = (
            {"kind": "toeplitz_inverse", "coefficients": noise.tolist()}
            if noise.ndim == 1
            else {"kind": "matrix", "rows": noise.tolist()}
        )
        return json.dumps(document).encode()
    stream = io.BytesIO()
    if suffix == ".npy":
        np.save(stream, noise)
    else:
        np.savez(stream, noise=noise)
    return stream.getvalue()


def _print(result: StrategyComparison) -> None:
    out.print(f"[bold]{escape(result.assessment.headline)}[/]")
    for entry in result.assessment.strategies:
        bound = "exactly" if entry["exact"] else "at most"
        turns = entry["participation"]
        out.print(
            f"{entry['kind']} noise over {result.strategy.steps} steps: sensitivity {bound} "
            f"{decimal_up(entry['sensitivity'], 6)} for {turns['participations']} participations "
            f"({turns['schema']}, {turns['separation']} apart)"
        )
    streaming = result.strategy.streaming
    out.print(f"the trainer keeps {streaming.buffers} buffers: {escape(streaming.recurrence)}")
    out.print(table("noise in clip norms", result.rows))
    for remark in result.remarks:
        say(remark)
    for row in result.rows:
        for reason in row.reasons:
            say(f"{row.label}: {reason}")
    for warning in result.assessment.warnings:
        out.print(f"[yellow]warning[/] {warning.code}: {escape(warning.message)}")


def table(title: str, rows: tuple[MechanismCost, ...]) -> Table:
    """A table of mechanisms and their costs."""
    columns = plain_table(
        title, ("mechanism", "sampler"), ("σ", "ε ≤", "per step", "rms", "max", "buffers")
    )
    columns.columns[1].min_width = len("cyclic_poisson")
    for row in rows:
        columns.add_row(
            escape(row.label),
            row.sampler,
            _number(None if row.assessment is None else row.assessment.joint),
            _epsilon(row),
            *(_number(item) for item in (row.step, row.rms, row.max)),
            "" if row.buffers is None else str(row.buffers),
        )
    return columns


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _epsilon(row: MechanismCost) -> str:
    """The certified ε, with its confidence where it rests on draws; or the verdict."""
    result = row.assessment
    if result is None or result.epsilon is None:
        return "refused"
    return decimal_up(result.epsilon.upper, 6) + result.chance


def advise(
    plan: PlanArgument,
    as_json: JsonOption = False,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", help="Write a chart of error against memory to this SVG file."),
    ] = None,
) -> None:
    """Compare mechanisms that meet the plan's ε and δ: noise per step, error, buffers."""
    require_writable(svg)
    file = read(plan, as_json=as_json)
    try:
        with err.status("certifying ...") as status:
            result = advice_for(file.plan, lambda label: status.update(f"{label} ..."))
    except RefusedPlan as refusal:
        refuse(plan, file.locate(refusal.reasons), Exit.USAGE, as_json=as_json)
    if svg is not None:
        write(svg, result.picture().encode())
    if as_json:
        print_json(result.as_document())
    else:
        _print_advice(result)
        if svg is not None:
            say(f"written to {svg}")
    raise typer.Exit(Exit.CERTIFIED if result.certified else Exit.BLOCKED)


def _print_advice(result: Advice) -> None:
    out.print(
        f"[bold]for ε = {result.epsilon:g} at δ = {decimal_up(result.delta, 6)} over "
        f"{result.steps} steps[/], noise in clip norms"
    )
    for adjacency, rows in result.groups:
        out.print()
        out.print(table(f"under {adjacency}", rows))
        front = "; ".join(row.label for row in result.front(rows))
        out.print(f"Pareto front of rms error and buffers: {escape(front) or 'empty'}")
        for row in rows:
            for reason in row.reasons:
                say(f"{row.label}: {reason}")
    out.print()
    for line in _conditions(result):
        say(line)


def _conditions(result: Advice) -> list[str]:
    """Which rows are comparable, and the assumption of each sampler."""
    lines = [
        "within a group rows protect the same neighbours, if lots are drawn as the row states:"
    ]
    seen: dict[str, str] = {}
    for _, rows in result.groups:
        for row in rows:
            if row.assessment is not None and row.assessment.assumptions:
                seen.setdefault(row.sampler, row.assessment.assumptions[-1])
    lines += [f"  {sampler}: {assumption}" for sampler, assumption in seen.items()]
    if len(result.groups) > 1:
        lines.append(
            "rows of different groups are not comparable: under zero_out a record becomes a zero "
            "contribution and nothing else moves; under add_remove a fixed order cannot be "
            "certified, because a removal moves the other records."
        )
    return lines
