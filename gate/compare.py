"""``affidavit compare``, ``strategy`` and ``advise``: compare plans and noise mechanisms."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from affidavit import assessment, mechanisms
from affidavit.accountants import decimal_up
from affidavit.gate.console import (
    err,
    exit_with_assessment,
    exit_with_reasons,
    load_plan,
    out,
    print_json,
    require_writable,
    say,
    stop,
    write,
)
from affidavit.gate.exit_codes import Exit, exit_of_verdict, worst
from affidavit.gate.options import JsonOption, PlanArgument
from affidavit.gate.render import plain_table
from affidavit.plan import RefusedPlan

if TYPE_CHECKING:
    from rich.table import Table

    from affidavit.assessment import (
        Advice,
        Assessment,
        MechanismCost,
        PlanComparison,
        StrategyComparison,
    )
    from affidavit.mechanisms.strategies import Strategy
    from affidavit.plan import Plan

COLUMNS = (
    "per step: noise added at a step; rms and max: noise in the sum of all updates so far, over "
    "the steps; buffers: arrays of the model's size that the trainer keeps"
)
"""What the columns of costs mean."""
MAX_VALUE_LENGTH = 32
"""Characters of a value in the table; the JSON document has the whole value."""
MOVE_LABELS = {
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

    Exits with 0 if both are certified and ranked, with 1 if one is not certified, and with 3 if
    their guarantees are not comparable.
    """
    plans = load_plan(first, as_json=as_json), load_plan(second, as_json=as_json)
    with err.status("certifying both plans ...") as status:

        def assess(plan: Plan) -> Assessment:
            result = assessment.certify(plan, second_opinion=False)
            status.update("certifying each change alone ...")
            return result

        comparison = assessment.compare_plans(plans[0].plan, plans[1].plan, assess)
    if as_json:
        print_json(comparison.as_document())
    else:
        _print_comparison(comparison)
    raise typer.Exit(_exit_code(comparison))


def _exit_code(comparison: PlanComparison) -> Exit:
    """Return that of the worse verdict; undecided if two guarantees are not comparable."""
    plans = (comparison.first, comparison.second)
    exits = [exit_of_verdict(plan.verdict, plan.codes) for plan in plans]
    return worst([*exits, Exit.UNDECIDED if comparison.obstacles else Exit.CERTIFIED])


def _print_comparison(comparison: PlanComparison) -> None:
    say(f"first:  {comparison.first.headline}")
    say(f"second: {comparison.second.headline}")
    out.print(f"[bold]{escape(comparison.sentence)}[/]")
    for obstacle in comparison.obstacles:
        say(f"{obstacle.code}: {obstacle.remedy}")
    if not comparison.effects:
        say("The plans are identical.")
        return
    out.print(_change_table(comparison))
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
    for change in comparison.effects:
        for reason in change.reasons:
            say(f"{change.change.pointer} alone: {reason}")


def _change_table(comparison: PlanComparison) -> Table:
    title = "first plan with one field changed at a time"
    table = plain_table(title, ("field", "first", "second"), ("ε ≤", "σ joint", "ε is", "σ is"))
    field, *values = table.columns[:3]
    field.no_wrap = True
    for value in values:
        value.overflow = "fold"
    for effect in comparison.effects:
        moved = (
            MOVE_LABELS.get(direction or "") for direction in (effect.moved, effect.noise_moved)
        )
        table.add_row(
            escape(effect.change.pointer),
            *(escape(value or "-") for value in effect.change.texts(MAX_VALUE_LENGTH)),
            *(number or "" for number in (effect.epsilon_text, effect.noise_text, *moved)),
        )
    return table


# ---- noise mechanisms

EXPORT_SUFFIX = ".npz"


def strategy(
    plan: PlanArgument,
    as_json: JsonOption = False,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", help="Write a chart of the error per step to this SVG file."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Export the injected noise to this .npz file."),
    ] = None,
) -> None:
    """Compare a plan's noise with independent noise: sensitivity, error and buffers."""
    if export is not None and export.suffix != EXPORT_SUFFIX:
        stop(f"--export {export} must end in {EXPORT_SUFFIX}.")
    require_writable(svg, export)
    file = load_plan(plan, as_json=as_json)
    try:
        with err.status("certifying ...") as status:
            result = assessment.compare(file.plan, lambda label: status.update(f"{label} ..."))
    except RefusedPlan as refusal:
        exit_with_reasons(plan, file.locate(refusal.reasons), Exit.BLOCKED, as_json=as_json)
    if isinstance(result, assessment.Assessment):
        exit_with_assessment(file, result, Exit.BLOCKED, as_json=as_json)
    written = _write_files(result, svg, export)
    if as_json:
        print_json({**result.as_document(), "written": written})
    else:
        _print_strategy(result)
        for name, digest in written.items():
            say(f"{name} sha256 {digest}")
    raise typer.Exit(exit_of_verdict(result.assessment.verdict, result.assessment.codes))


def _write_files(
    result: StrategyComparison, svg: Path | None, export: Path | None
) -> dict[str, str]:
    """Write the requested files, and return their digests by path."""
    from affidavit.mechanisms.strategies import TooLarge

    contents: dict[Path, bytes] = {}
    if svg is not None:
        contents[svg] = result.picture().encode()
    if export is not None:
        try:
            contents[export] = _export_noise(result.strategy)
        except TooLarge as error:
            stop(f"--export: {error} is too large to write.")
    for path, content in contents.items():
        write(path, content)
    return {str(path): mechanisms.content_digest(content) for path, content in contents.items()}


def _export_noise(strategy: Strategy) -> bytes:
    """Return N as a noise file for plans; if N is Toeplitz, its first column.

    Raises ``TooLarge``. A matrix that is not square is reported, because no plan can name it.
    """
    import numpy as np

    column = strategy.noise_coefficients
    noise = strategy.noise_matrix() if column is None else np.trim_zeros(column, "b")
    if noise.ndim == 2 and noise.shape[0] != noise.shape[1]:
        stop(f"--export: a {strategy.kind} has noise per node, not per step; name it by kind.")
    stream = io.BytesIO()
    np.savez(stream, noise=noise)
    return stream.getvalue()


def _print_strategy(result: StrategyComparison) -> None:
    out.print(f"[bold]{escape(result.assessment.headline)}[/]")
    for entry in result.assessment.strategies:
        bound = "exactly" if entry["exact"] else "at most"
        participation = entry["participation"]
        out.print(
            f"{entry['kind']} noise over {result.strategy.steps} steps: sensitivity {bound} "
            f"{decimal_up(entry['sensitivity'], 6)} for "
            f"{participation['participations']} participations "
            f"({participation['schema']}, {participation['separation']} apart)"
        )
    streaming = result.strategy.streaming
    out.print(f"the trainer keeps {streaming.buffers} buffers: {escape(streaming.recurrence)}")
    out.print(_cost_table("noise in clip norms", result.rows))
    say(COLUMNS)
    for remark in result.remarks:
        say(remark)
    for row in result.rows:
        for reason in row.reasons:
            say(f"{row.label}: {reason}")
    for warning in result.assessment.warnings:
        out.print(f"[yellow]warning[/] {warning.code}: {escape(warning.message)}")


def _cost_table(title: str, rows: tuple[MechanismCost, ...]) -> Table:
    table = plain_table(
        title, ("mechanism", "sampler"), ("σ", "ε ≤", "per step", "rms", "max", "buffers")
    )
    table.columns[1].min_width = len("cyclic_poisson")
    for row in rows:
        table.add_row(
            escape(row.label),
            row.sampler,
            _format_number(None if row.assessment is None else row.assessment.joint),
            _epsilon_or_verdict(row),
            *(_format_number(item) for item in (row.step, row.rms, row.max)),
            "" if row.buffers is None else str(row.buffers),
        )
    return table


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _epsilon_or_verdict(row: MechanismCost) -> str:
    """Return the certified ε, with the confidence of a sampled bound, or "refused"."""
    result = row.assessment
    if result is None or result.epsilon is None:
        return "refused"
    return decimal_up(result.epsilon.upper, 6) + result.confidence_suffix


def advise(
    plan: PlanArgument,
    as_json: JsonOption = False,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", help="Write a chart of error against memory to this SVG file."),
    ] = None,
) -> None:
    """Compare mechanisms that meet the plan's ε and δ by noise per step, error and buffers."""
    require_writable(svg)
    file = load_plan(plan, as_json=as_json)
    try:
        with err.status("certifying ...") as status:
            result = assessment.advise(file.plan, lambda label: status.update(f"{label} ..."))
    except RefusedPlan as refusal:
        exit_with_reasons(plan, file.locate(refusal.reasons), Exit.USAGE, as_json=as_json)
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
    say(COLUMNS)
    for adjacency, rows in result.groups:
        out.print()
        out.print(_cost_table(f"under {adjacency}", rows))
        front = "; ".join(row.label for row in result.front(rows))
        out.print(f"none has both less rms error and fewer buffers than: {escape(front) or '-'}")
        for row in rows:
            for reason in row.reasons:
                say(f"{row.label}: {reason}")
    out.print()
    for line in _comparability_lines(result):
        say(line)


def _comparability_lines(result: Advice) -> list[str]:
    """Return which rows are comparable, and the assumption of each sampler."""
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
