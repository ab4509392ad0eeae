"""``affidavit keys``: the signing keys of the key directory, and their rotation."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate import OVERLAP, KeyFailure, KeyStore, home
from affidavit.gate.console import err, out, stop
from affidavit.gate.files import print_json
from affidavit.gate.options import JsonOption

keys = typer.Typer(help="Signing keys.", no_args_is_help=True)

LabelOption = Annotated[str, typer.Option(help="A name for people to know the key by.")]
OverlapOption = Annotated[
    int, typer.Option("--overlap-days", min=0, max=730, help="How long the old keys still sign.")
]


@keys.command("new")
def keys_new(label: LabelOption = "") -> None:
    """Create a signing key; its private half stays in the key directory."""
    try:
        key = _store().new(label)
    except OSError as error:
        stop(f"{error.filename} cannot be written: {error.strerror}.")
    out.print(f"{key.key_id}  signs until {key.public.not_after:%Y-%m-%d}", highlight=False)
    out.print(f"kept in {_store().directory}", highlight=False)


@keys.command("rotate")
def keys_rotate(overlap_days: OverlapOption = OVERLAP.days, label: LabelOption = "") -> None:
    """Make a new key, which signs from now on, and let the others' windows end."""
    try:
        made, shortened = _store().rotate(timedelta(days=overlap_days), label)
    except KeyFailure as failure:
        stop(str(failure))
    except OSError as error:
        stop(f"{error.filename} cannot be written: {error.strerror}.")
    out.print(f"{made.key_id}  signs until {made.public.not_after:%Y-%m-%d}", highlight=False)
    out.print(f"{shortened} older windows end in {overlap_days} days", highlight=False)


@keys.command("retire")
def keys_retire(
    key: Annotated[str, typer.Argument(help="The key's id, or the beginning of it.")],
) -> None:
    """Close a key's window now; what it signed before keeps counting."""
    try:
        retired = _store().retire(key)
    except KeyFailure as failure:
        stop(str(failure))
    except OSError as error:
        stop(f"{error.filename} cannot be written: {error.strerror}.")
    out.print(f"{retired.key_id}  signed until {retired.not_after:%Y-%m-%d}", highlight=False)


@keys.command("add")
def keys_add(
    public: Annotated[Path, typer.Argument(help="The public key, PEM.")], label: LabelOption = ""
) -> None:
    """Record a key whose private half is in a token or behind a command."""
    try:
        added = _store().add(public.read_bytes(), label)
    except KeyFailure as failure:
        stop(f"{public}: {failure}")
    except OSError as error:
        stop(f"{error.filename}: {error.strerror}.")
    out.print(f"{added.key_id}  signs until {added.not_after:%Y-%m-%d}", highlight=False)


@keys.command("list")
def keys_list(as_json: JsonOption = False) -> None:
    """The keys in the key directory, oldest first."""
    try:
        found = _store().public_keys()
    except KeyFailure as failure:
        stop(str(failure))
    if as_json:
        print_json({"keys": [key.as_record() for key in found]})
        return
    for key in found:
        out.print(
            f"{key.key_id}  {key.not_before:%Y-%m-%d} to {key.not_after:%Y-%m-%d}  "
            f"{escape(key.label)}",
            highlight=False,
        )
    if not found:
        err.print("No keys yet; run `affidavit keys new`.", highlight=False)


def _store() -> KeyStore:
    return KeyStore(home() / "keys")
