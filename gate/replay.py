"""``affidavit replay -- python train.py``: run a loop on neighbouring data, and compare.

Exit codes: 0 not refuted by what ran; 1 refuted; 2 usage; 3 the loop cannot be replayed, or what
differs decides nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from affidavit import replay as replays
from affidavit.gate.console import (
    as_json_file,
    load_plan,
    print_json,
    require_writable,
    say,
    stop,
    write,
)
from affidavit.gate.exit_codes import Exit
from affidavit.gate.options import JsonOption

USAGE = ("command_unknown", "system_unsupported")
EXITS = {"not_refuted": Exit.CERTIFIED, "refuted": Exit.BLOCKED, "undecided": Exit.UNDECIDED}


def replay(
    command: Annotated[
        list[str], typer.Argument(metavar="-- python SCRIPT", help="The command to replay.")
    ],
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Releases of each run, at most: 12, or fewer if they are slow."),
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(
            min=1, help="Records to change, 1 of them in 4 ways: 4, or fewer if runs are slow."
        ),
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="Plan to compare the noise, rate and steps with.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="File to write the replay record to, as JSON.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run your loop on data that differs in one record, and compare all that it does."""
    require_writable(record)
    try:
        planned = None if plan is None else load_plan(plan, as_json=as_json).plan
        shown = replays.replay_command(command, steps=steps, records=records, plan=planned)
    except replays.ReplayRefused as refused:
        stop(str(refused), Exit.USAGE if refused.code in USAGE else Exit.UNDECIDED)
    document = shown.model_dump(mode="json")
    if record is not None:
        write(record, as_json_file(document))
    if as_json:
        print_json(document)
    else:
        say(replays.to_text(shown))
    raise typer.Exit(EXITS[shown.verdict])
