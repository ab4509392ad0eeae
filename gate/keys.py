"""``affidavit keys`` and ``affidavit roots``: signing keys and offline root keys."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from affidavit.certificate import (
    OVERLAP,
    KeyFailure,
    KeysetError,
    KeyStore,
    Roots,
    SigningKey,
    home,
    read_public_keys,
    write_private,
)
from affidavit.gate.console import (
    as_json_file,
    err,
    out,
    print_json,
    say,
    stop,
    stop_unwritable,
    write,
)
from affidavit.gate.options import JsonOption

keys = typer.Typer(help="Manage signing keys.", no_args_is_help=True, add_completion=False)

LabelOption = Annotated[str, typer.Option(help="Display name of the key.")]
OverlapOption = Annotated[
    int,
    typer.Option("--overlap-days", min=0, max=730, help="Days that old keys still sign."),
]


@keys.command("new")
def keys_new(label: LabelOption = "") -> None:
    """Create a signing key in the key directory."""
    try:
        key = _store().new(label)
    except OSError as error:
        stop_unwritable(error.filename, error)
    out.print(f"{key.key_id}  signs until {key.public.not_after:%Y-%m-%d}", highlight=False)
    say(f"stored in {_store().directory}")


@keys.command("rotate")
def keys_rotate(overlap_days: OverlapOption = OVERLAP.days, label: LabelOption = "") -> None:
    """Create a new key that signs from now on, and limit the validity of the old ones."""
    try:
        new, shortened = _store().rotate(timedelta(days=overlap_days), label)
    except KeyFailure as failure:
        stop(str(failure))
    except OSError as error:
        stop_unwritable(error.filename, error)
    out.print(f"{new.key_id}  signs until {new.public.not_after:%Y-%m-%d}", highlight=False)
    out.print(f"{shortened} older keys end in {overlap_days} days", highlight=False)


@keys.command("retire")
def keys_retire(
    key: Annotated[str, typer.Argument(help="Key id, or a unique prefix.")],
) -> None:
    """End the validity of a key now; its earlier signatures remain valid."""
    try:
        retired = _store().retire(key)
    except KeyFailure as failure:
        stop(str(failure))
    except OSError as error:
        stop_unwritable(error.filename, error)
    out.print(f"{retired.key_id}  signed until {retired.not_after:%Y-%m-%d}", highlight=False)


@keys.command("add")
def keys_add(
    public: Annotated[Path, typer.Argument(help="Public key, PEM.")], label: LabelOption = ""
) -> None:
    """Add a key whose private half is on a hardware token or behind a command."""
    try:
        added = _store().add(public.read_bytes(), label)
    except KeyFailure as failure:
        stop(f"{public}: {failure}")
    except OSError as error:
        stop(f"cannot access {error.filename}: {error.strerror}.")
    out.print(f"{added.key_id}  signs until {added.not_after:%Y-%m-%d}", highlight=False)


@keys.command("list")
def keys_list(as_json: JsonOption = False) -> None:
    """List the keys in the key directory, oldest first."""
    try:
        public_keys = _store().public_keys()
    except KeyFailure as failure:
        stop(str(failure))
    if as_json:
        print_json({"keys": [key.as_record() for key in public_keys]})
        return
    for key in public_keys:
        out.print(
            f"{key.key_id}  {key.not_before:%Y-%m-%d} to {key.not_after:%Y-%m-%d}  "
            f"{escape(key.label)}",
            highlight=False,
        )
    if not public_keys:
        err.print("No keys yet; create one with `affidavit keys new`.", highlight=False)


def _store() -> KeyStore:
    return KeyStore(home() / "keys")


roots = typer.Typer(
    help="Manage root keys, which sign keysets offline.", no_args_is_help=True, add_completion=False
)


@roots.command("new")
def roots_new(
    directory: Annotated[Path, typer.Option("--out", help="Directory on the offline medium.")],
    label: Annotated[str, typer.Option(help="Holder of the key.")] = "",
) -> None:
    """Create a root key: NAME.pem to keep secret, NAME.json to share."""
    key = SigningKey.generate(label)
    name = f"root-{key.key_id[:16]}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(directory / f"{name}.pem", key.private)
    except OSError as error:
        stop_unwritable(error.filename, error)
    write(directory / f"{name}.json", as_json_file(key.public.as_record()))
    out.print(f"{key.key_id}  keep {directory / name}.pem offline", highlight=False)


@roots.command("trust")
def roots_trust(
    records: Annotated[list[Path], typer.Argument(help="Public records of the root keys.")],
    threshold: Annotated[int, typer.Option(min=1, help="Number of roots that must sign.")],
    file: Annotated[Path, typer.Option("--out", help="File for verifiers.")],
) -> None:
    """Write the trusted roots for verifiers (`verify --root FILE`)."""
    write(file, as_json_file(read_roots(records, threshold).model_dump(mode="json")))


def read_roots(records: list[Path], threshold: int) -> Roots:
    """Read the roots from these public records; reports invalid ones and exits."""
    try:
        keys = [key for record in records for key in read_public_keys(record)]
        return Roots.of(keys, threshold)
    except (KeyFailure, KeysetError) as failure:
        stop(str(failure))
