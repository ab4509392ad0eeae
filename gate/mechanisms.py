"""``affidavit mechanisms [NAME]``: what each optimiser releases, and what it obliges to.

Exit codes: 0 shown, 2 no such mechanism.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from affidavit.gate.console import out, stop
from affidavit.gate.files import print_json
from affidavit.gate.report import printable
from affidavit.mechanisms import Mechanism, all_mechanisms


def mechanisms(
    name: Annotated[
        str | None, typer.Argument(help="An optimiser, or denoise; left out, all are listed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the description as JSON.")] = False,
) -> None:
    """What an optimiser releases, how sensitive that is, and what it obliges the trainer to."""
    known = all_mechanisms()
    if name is None:
        if as_json:
            print_json({"mechanisms": [item.as_dict() for item in known.values()]})
        else:
            out.print(_table(known))
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
        stop(f"there is no mechanism {printable(name[:80])}; {hint}")
    if as_json:
        print_json(known[name].as_dict())
    else:
        for line in _lines(known[name]):
            out.print(line, highlight=False)


def _table(known: dict[str, Mechanism]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "", "state on raw data", "noise"):
        table.add_column(heading, no_wrap=heading == "name")
    for item in known.values():
        state = "yes, accounted" if item.state_on_raw_data else "none"
        table.add_row(item.name, item.title, state, item.noise_in_words)
    return table


def _lines(found: Mechanism) -> Iterator[str]:
    yield f"[bold]{escape(found.name)}[/]  {escape(found.title)}"
    for label, text in (
        ("releases", found.releases),
        ("sensitivity", found.sensitivity),
        ("proof", found.proof),
        ("post-processing", "; ".join(found.post_processing)),
        ("state on raw data", "; ".join(found.state_on_raw_data) or "none"),
        ("clipping", found.clipping),
        ("noise", found.noise_in_words),
        ("sources", "; ".join(found.sources)),
    ):
        yield f"[bold]{label}:[/] {escape(text)}"
    for obligation in found.obliges:
        yield f"[bold]obliges the trainer:[/] {escape(obligation.text)} ({obligation.code})"
    for field in found.hyperparameters():
        cost = "changes the guarantee" if field["changes_the_guarantee"] else "free"
        yield escape(f"  {field['field']}: {field['takes']}, {field['meaning']} ({cost})")
