"""``affidavit roots``: the root keys, which sign keysets and are kept offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from affidavit.certificate import (
    KeyFailure,
    KeysetError,
    Roots,
    SigningKey,
    read_public_keys,
    write_private,
)
from affidavit.gate.console import out, stop, write
from affidavit.gate.files import as_json_file

roots = typer.Typer(help="Root keys: they sign keysets, offline.", no_args_is_help=True)


@roots.command("new")
def roots_new(
    directory: Annotated[
        Path, typer.Option("--out", help="A directory on the medium that keeps the key.")
    ],
    label: Annotated[str, typer.Option(help="Who holds the key.")] = "",
) -> None:
    """Make a root key: NAME.pem to keep secret and NAME.json to hand to the others."""
    key = SigningKey.generate(label)
    name = f"root-{key.key_id[:16]}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(directory / f"{name}.pem", key.private)
    except OSError as error:
        stop(f"{error.filename} cannot be written: {error.strerror}.")
    write(directory / f"{name}.json", as_json_file(key.public.as_record()))
    out.print(f"{key.key_id}  keep {directory / name}.pem offline", highlight=False)


@roots.command("trust")
def roots_trust(
    records: Annotated[list[Path], typer.Argument(help="The root keys' public records.")],
    threshold: Annotated[int, typer.Option(min=1, help="How many of them have to sign.")],
    file: Annotated[Path, typer.Option("--out", help="The file for verifiers.")],
) -> None:
    """Write the roots as verifiers trust them (`verify --root FILE`)."""
    write(file, as_json_file(read_roots(records, threshold).model_dump(mode="json")))


def read_roots(records: list[Path], threshold: int) -> Roots:
    """The roots of these record files; ends the command when they are none."""
    try:
        keys = [key for record in records for key in read_public_keys(record)]
        return Roots.of(keys, threshold)
    except (KeyFailure, KeysetError) as failure:
        stop(str(failure))
