"""Groups of commands, and the arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from affidavit.accountants import ENGINE_NAMES


def command_group(summary: str) -> typer.Typer:
    """Return a group of commands, which prints its help if no command is named."""
    return typer.Typer(help=summary, no_args_is_help=True, add_completion=False)


PlanArgument = Annotated[
    str, typer.Argument(help="Plan file, YAML or JSON; - reads standard input.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _known_accountant(name: str | None) -> str | None:
    if name is not None and name not in ENGINE_NAMES:
        raise typer.BadParameter(f"unknown accountant {name}; choose one of {ACCOUNTANTS}.")
    return name


DEFAULT_SERVER = "http://127.0.0.1:8321"
ServerOption = Annotated[
    str, typer.Option("--server", envvar="AFFIDAVIT_SERVER", help="Base URL of the service.")
]
ACCOUNTANTS = ", ".join(ENGINE_NAMES)
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", callback=_known_accountant, help=f"Use only this accountant: {ACCOUNTANTS}."
    ),
]
SecondOpinionOption = Annotated[
    bool,
    typer.Option("--second-opinion", help="Also run a second accountant on each plan."),
]
PolicyFileOption = Annotated[
    Path | None, typer.Option("--policy", help="Also apply this policy file, YAML or JSON.")
]
KeysOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--keys", help="Trusted public keys, as returned by GET /v1/keys, instead of your own."
    ),
]
KeysetOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--keyset", help="Keyset whose keys to trust (GET /v1/keyset); repeatable, oldest first."
    ),
]
RootOption = Annotated[
    Path | None,
    typer.Option("--root", help="With --keyset: the trusted roots, or the last keyset seen."),
]
StatusOption = Annotated[
    Path | None,
    typer.Option("--status", help="Signed status list, as written by `affidavit status --out`."),
]
RequireStatusOption = Annotated[
    bool, typer.Option("--require-status", help="Reject a bundle without a revocation check.")
]
RequireLogOption = Annotated[
    bool,
    typer.Option(
        "--require-log",
        help="Reject a bundle without a proof of inclusion in a consistent log.",
    ),
]
LogOriginOption = Annotated[
    str | None, typer.Option("--log-origin", help="Name of the only accepted log.")
]
CheckpointStoreOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint-store",
        help="File with the last checkpoint seen of each log, instead of your own.",
    ),
]
ConsistencyOption = Annotated[
    Path | None,
    typer.Option(
        "--consistency",
        help="Consistency proof from the last checkpoint seen (GET /v1/log/proof/consistency).",
    ),
]
TrustOption = Annotated[
    Path | None,
    typer.Option(
        "--trust", help="Trust policy (YAML): log, witnesses and freshness; default: the keyset's."
    ),
]
