"""Groups of commands, and the arguments and options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from affidavit.accountants import ENGINE_NAMES

if TYPE_CHECKING:
    from affidavit.certificate import VerificationOptions
    from affidavit.trust import TrustedKeys, TrustRoot


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


@dataclass(frozen=True, kw_only=True)
class TrustOptions:
    """The options that say whose keys a command trusts, and under which policy."""

    keys: KeysOption = None
    keyset: KeysetOption = None
    root: RootOption = None
    trust: TrustOption = None

    def trust_root(self, within: Path | None = None) -> TrustRoot:
        """Return them as one; keysets ``within`` a folder must lie in it."""
        from affidavit.trust import TrustRoot

        return TrustRoot(self.keys, self.keyset, self.root, self.trust, within)


@dataclass(frozen=True, kw_only=True)
class VerifierOptions(TrustOptions):
    """The options of every command that verifies a certificate."""

    require_log: RequireLogOption = False
    checkpoint_store: CheckpointStoreOption = None
    consistency: ConsistencyOption = None
    status: StatusOption = None
    require_status: RequireStatusOption = False

    def load(
        self, *, within: Path | None = None, past_use: bool = False, **others: Any
    ) -> tuple[TrustedKeys, VerificationOptions]:
        """Return the trusted keys, and what is required with ``others``; reads the files.

        ``past_use`` is for a certificate that was used in the past, whose checkpoint may be old.
        Raises ``KeyFailure`` and ``VerificationError``.
        """
        # Imported here because every command imports this module.
        from affidavit.certificate import verification_options

        trusted = self.trust_root(within).load()
        if past_use:
            trusted = trusted.for_past_use()
        return trusted, verification_options(
            trusted,
            checkpoints=self.checkpoint_store,
            consistency=self.consistency,
            status=self.status,
            require_status=self.require_status,
            require_log=self.require_log,
            **others,
        )


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let Typer see the fields of a parameter that is a dataclass as options of the command."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not is_dataclass(group) or not isinstance(group, type):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=item.default,
                annotation=hints[item.name],
            )
            for item in fields(group)
        ]

    @wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: group(**{item.name: values.pop(item.name) for item in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run
