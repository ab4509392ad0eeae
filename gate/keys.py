"""``affidavit keys``: the signing keys of the key directory."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate.keys import KeyFailure, KeyStore, home
from affidavit.gate.console import err, out, stop
from affidavit.gate.files import print_json
from affidavit.gate.options import JsonOption

keys = typer.Typer(help="Signing keys.", no_args_is_help=True)


@keys.command("new")
def keys_new(
    label: Annotated[str, typer.Option(help="A name for people to know the key by.")] = "",
) -> None:
    """Create a signing key; its private half stays in the key directory."""
    try:
        key = _store().new(label)
    except OSError as error:
        stop(f"{error.filename} cannot be written: {error.strerror}.")
    out.print(f"{key.key_id}  signs until {key.public.not_after:%Y-%m-%d}", highlight=False)
    out.print(f"kept in {_store().directory}", highlight=False)


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
