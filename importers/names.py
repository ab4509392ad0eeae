"""Load the names of libraries' functions and arguments from the TOML files of this package."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def load_facts(file: str) -> dict[str, Any]:
    """Load a TOML file of this package."""
    return tomllib.loads(files(__package__).joinpath(file).read_text(encoding="utf-8"))


NAMES: dict[str, tuple[str, ...]] = {
    key: tuple(names.split()) for key, names in load_facts("names.toml").items()
}
"""Groups of names of functions, methods, arguments and attributes."""
