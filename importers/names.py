"""What readers of scripts and documents know of libraries, from the TOML files beside them."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def load_facts(file: str) -> dict[str, Any]:
    """The tables of a file."""
    return tomllib.loads(files(__package__).joinpath(file).read_text(encoding="utf-8"))


NAMES: dict[str, tuple[str, ...]] = {
    key: tuple(names.split())
    for key, names in (load_facts("arrays.toml") | load_facts("names.toml")).items()
}
"""Names of functions, methods, arguments and attributes, several for each key."""
