"""``affidavit mechanisms [NAME]``: describe the mechanisms of the optimisers.

Exit codes: 0 shown, 2 unknown mechanism.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from affidavit.certificate import printable
from affidavit.gate.console import out, print_json, stop
from affidavit.gate.options import JsonOption
from affidavit.mechanisms import Mechanism, all_mechanisms


def mechanisms(
    name: Annotated[
        str | None, typer.Argument(help="Optimiser, or denoise; without it all are listed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe what an optimiser releases, its sensitivity, and its obligations for the trainer."""
    known = all_mechanisms()
    if name is None:
        if as_json:
            print_json({"mechanisms": [mechanism.as_dict() for mechanism in known.values()]})
        else:
            out.print(_table(known))
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
        stop(f"unknown mechanism {printable(name[:80])}; {hint}")
    if as_json:
        print_json(known[name].as_dict())
    else:
        for line in _lines(known[name]):
            out.print(line)


def _table(known: dict[str, Mechanism]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "", "state on raw data", "noise"):
        table.add_column(heading, no_wrap=heading == "name")
    for mechanism in known.values():
        state = "yes, accounted" if mechanism.state_on_raw_data else "none"
        table.add_row(mechanism.name, mechanism.title, state, mechanism.noise_in_words)
    return table


def _lines(mechanism: Mechanism) -> Iterator[str]:
    yield f"[bold]{escape(mechanism.name)}[/]  {escape(mechanism.title)}"
    for label, text in (
        ("releases", mechanism.releases),
        ("sensitivity", mechanism.sensitivity),
        ("proof", mechanism.proof),
        ("post-processing", "; ".join(mechanism.post_processing)),
        ("state on raw data", "; ".join(mechanism.state_on_raw_data) or "none"),
        ("clipping", mechanism.clipping),
        ("noise", mechanism.noise_in_words),
        ("sources", "; ".join(mechanism.sources)),
    ):
        yield f"[bold]{label}:[/] {escape(text)}"
    for obligation in mechanism.obliges:
        yield f"[bold]trainer obligation:[/] {escape(obligation.text)} ({obligation.code})"
    for field in mechanism.hyperparameters():
        cost = "changes the guarantee" if field["changes_the_guarantee"] else "free"
        yield escape(f"  {field['field']}: {field['takes']}, {field['meaning']} ({cost})")
