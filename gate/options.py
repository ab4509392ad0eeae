"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from affidavit.accountants import NAMES

PlanArgument = Annotated[str, typer.Argument(help="A plan, YAML or JSON; - reads it from stdin.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result document.")]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="Use one accountant only: " + ", ".join(NAMES) + "."),
]
PolicyFileOption = Annotated[
    Path | None,
    typer.Option("--policy", help="Judge by this policy file too, YAML or JSON."),
]
