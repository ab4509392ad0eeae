"""``affidavit keys``: the signing keys of this computer."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.gate.console import err, out, print_json, read_file, say, stop, usage_errors
from affidavit.gate.options import JsonOption, command_group
from affidavit.trust import (
    OVERLAP,
    SERVICE_ROLES,
    KeyFailure,
    KeyRole,
    KeyStore,
    PublicKey,
    SigningKey,
    home,
)

keys = command_group("Manage signing keys.")

LabelOption = Annotated[str, typer.Option(help="Display name of the key.")]
RolesOption = Annotated[
    list[KeyRole] | None,
    typer.Option("--role", help="What the key may sign; repeatable. Default: everything."),
]
EachRoleOption = Annotated[
    bool,
    typer.Option(
        "--each-role",
        help="One key each for certificates, checkpoints, status lists and run records.",
    ),
]
OverlapOption = Annotated[
    int, typer.Option("--overlap-days", min=0, max=730, help="Days for which old keys stay valid.")
]


@keys.command("new")
def keys_new(
    label: LabelOption = "", roles: RolesOption = None, each_role: EachRoleOption = False
) -> None:
    """Create a signing key in the key directory, or one for each role."""
    requested = [frozenset({role}) for role in _roles(roles, each_role=each_role)]
    with usage_errors():
        for role in requested or (None,):
            _print_new(_store().new(label, roles=role))
    say(f"stored in {_store().directory}")


@keys.command("rotate")
def keys_rotate(
    overlap_days: OverlapOption = OVERLAP.days,
    label: LabelOption = "",
    roles: RolesOption = None,
    each_role: EachRoleOption = False,
) -> None:
    """Create new keys that sign from now on, and limit the validity of the old ones.

    Without --role, every role that has a key of its own gets a new one. Keys that sign only
    certificates stay valid, because their certificates would end with them.
    """
    with usage_errors():
        separate = {role for key in _store().public_keys() for role in key.roles or ()}
        requested = _roles(roles, each_role=each_role) or sorted(separate)
        ending = 0
        for role in requested or (None,):
            new, shortened = _store().rotate(timedelta(days=overlap_days), label, role=role)
            _print_new(new)
            ending += shortened
    out.print(f"{ending} older keys end in {overlap_days} days")


@keys.command("retire")
def keys_retire(key: Annotated[str, typer.Argument(help="Key id, or a unique prefix.")]) -> None:
    """End the validity of a key now.

    If the key signs only certificates, they end with it.
    """
    with usage_errors():
        retired = _store().retire(key)
    out.print(f"{retired.key_id}  signed until {retired.not_after:%Y-%m-%d}")


@keys.command("add")
def keys_add(
    public: Annotated[Path, typer.Argument(help="Public key, PEM.")],
    label: LabelOption = "",
    roles: RolesOption = None,
) -> None:
    """Add a key whose private half is on a hardware token or behind a command."""
    try:
        added = _store().add(read_file(public), label, roles=roles or None)
    except KeyFailure as failure:
        stop(f"{public}: {failure}")
    except OSError as error:
        stop(f"cannot access {error.filename}: {error.strerror}.")
    out.print(f"{added.key_id}  signs until {added.not_after:%Y-%m-%d}")


@keys.command("list")
def keys_list(as_json: JsonOption = False) -> None:
    """List the keys in the key directory, oldest first."""
    with usage_errors():
        public_keys = _store().public_keys()
    if as_json:
        print_json({"keys": [key.as_record() for key in public_keys]})
        return
    for key in public_keys:
        out.print(
            f"{key.key_id}  {key.not_before:%Y-%m-%d} to {key.not_after:%Y-%m-%d}  "
            f"{_signs(key):11}  {escape(key.label)}"
        )
    if not public_keys:
        err.print("No keys yet; create one with `affidavit keys new`.")


def _roles(roles: list[KeyRole] | None, *, each_role: bool) -> list[KeyRole]:
    if each_role and roles:
        stop("give --role or --each-role, not both.")
    return [*SERVICE_ROLES, KeyRole.RUN] if each_role else roles or []


def _signs(key: PublicKey) -> str:
    return ", ".join(sorted(key.roles)) if key.roles else "everything"


def _print_new(key: SigningKey) -> None:
    role = f"  {_signs(key.public)}" if key.public.roles else ""
    out.print(f"{key.key_id}  signs until {key.public.not_after:%Y-%m-%d}{role}")


def _store() -> KeyStore:
    return KeyStore(home() / "keys")
