"""``affidavit strategy``: what a plan's noise costs, and what independent noise would."""

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
from affidavit.certificate import Assessment, MechanismCost, StrategyComparison, compare
from affidavit.gate.console import err, out, print_findings, read, refuse, stop, write
from affidavit.gate.exits import OF_VERDICT, Exit
from affidavit.gate.files import print_json
from affidavit.gate.report import headline
from affidavit.mechanisms.strategies import Strategy, TooLarge, content_digest
from affidavit.plan import RefusedPlan

FORMATS = (".json", ".npy", ".npz")


def strategy(
    plan: Annotated[str, typer.Argument(help="A plan, YAML or JSON; - reads it from stdin.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw the error of each step to this file.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Write the injected noise, as .json, .npy or .npz."),
    ] = None,
) -> None:
    """Sensitivity, errors and buffers of a plan's noise, beside independent noise."""
    if export is not None and export.suffix not in FORMATS:
        stop(f"--export {export} must end in {', '.join(FORMATS)}.")
    file = read(plan, as_json=as_json)
    try:
        with err.status("certifying ...") as status:
            found = compare(file.plan, lambda what: status.update(f"{what} ..."))
    except RefusedPlan as refusal:
        refuse(plan, file.locate(refusal.reasons), Exit.BLOCKED, as_json=as_json)
    if isinstance(found, Assessment):
        if as_json:
            print_json(found.as_result())
        else:
            print_findings(plan, file.locate(found.reasons))
        raise typer.Exit(Exit.BLOCKED)
    written = _write(found, svg, export)
    if as_json:
        print_json({**found.as_document(), "written": written})
    else:
        _print(found)
        for name, digest in written.items():
            out.print(f"{escape(name)} sha256 {digest}", highlight=False)
    raise typer.Exit(OF_VERDICT[found.assessment.verdict])


def _write(found: StrategyComparison, svg: Path | None, export: Path | None) -> dict[str, str]:
    """Files that were asked for, whole or not at all, with the digests to name them by."""
    contents: dict[Path, bytes] = {}
    if svg is not None:
        contents[svg] = found.picture().encode()
    if export is not None:
        try:
            contents[export] = exported(found.strategy, export.suffix)
        except TooLarge as error:
            stop(f"--export: {error} is too large to write.")
        except NotSquare as error:
            stop(f"--export: {error}.")
    for path, content in contents.items():
        write(path, content)
    return {str(path): content_digest(content) for path, content in contents.items()}


class NotSquare(ValueError):
    """Noise that no plan can name by a file."""


def exported(strategy: Strategy, suffix: str) -> bytes:
    """N as a strategy file that a plan can name; its first column where N is Toeplitz.

    Raises ``TooLarge`` and ``NotSquare``.
    """
    column = strategy.noise_coefficients
    noise = strategy.noise_matrix() if column is None else np.trim_zeros(column, "b")
    if noise.ndim == 2 and noise.shape[0] != noise.shape[1]:
        raise NotSquare(f"a {strategy.kind} has a noise a node, not a step; name it by its kind")
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


def _print(found: StrategyComparison) -> None:
    out.print(f"[bold]{escape(headline(found.assessment))}[/]", highlight=False)
    for entry in found.assessment.strategies:
        bound = "exactly" if entry["exact"] else "at most"
        turns = entry["participation"]
        out.print(
            f"{entry['kind']} noise over {found.strategy.steps} steps: sensitivity {bound} "
            f"{decimal_up(entry['sensitivity'], 6)} for {turns['participations']} participations "
            f"({turns['schema']}, {turns['separation']} apart)",
            highlight=False,
        )
    streaming = found.strategy.streaming
    out.print(
        f"a trainer keeps {streaming.buffers} buffers: {escape(streaming.recurrence)}",
        highlight=False,
    )
    out.print(table("noise in clip norms", found.rows))
    for remark in found.remarks:
        out.print(escape(remark), highlight=False)
    for row in found.rows:
        for reason in row.reasons:
            out.print(f"{escape(row.label)}: {escape(str(reason))}", highlight=False)
    for warning in found.assessment.warnings:
        out.print(f"[yellow]warning[/] {warning.code}: {escape(warning.message)}", highlight=False)


def table(title: str, rows: tuple[MechanismCost, ...]) -> Table:
    """Rows of mechanisms with what each costs."""
    found = Table(title=title, title_justify="left", box=None, pad_edge=False)
    found.add_column("mechanism")
    found.add_column("sampler", min_width=len("cyclic_poisson"))
    for heading in ("σ", "ε ≤", "per step", "rms", "max", "buffers"):
        found.add_column(heading, justify="right")
    for row in rows:
        found.add_row(
            escape(row.label),
            row.sampler,
            _number(None if row.assessment is None else row.assessment.joint),
            _epsilon(row),
            *(_number(item) for item in (row.step, row.rms, row.max)),
            "" if row.buffers is None else str(row.buffers),
        )
    return found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _epsilon(row: MechanismCost) -> str:
    """The certified ε, with its confidence where it rests on draws; or the verdict."""
    found = row.assessment
    if found is None or found.epsilon is None:
        return "refused"
    chance = "" if found.confidence is None else f" {found.confidence}"
    return decimal_up(found.epsilon.upper, 6) + chance
