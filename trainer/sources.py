"""Sources: the data and model that a command line names, and their options.

``NAME`` or ``NAME:ARGUMENT`` is a built-in adapter, which defines the meaning of the argument.
``python:MODULE:FUNCTION[:ARGUMENT]`` calls your own function, found on
Python's path or in the current folder. A function for data gets the argument
(a text, empty by default) and returns a ``DataAdapter``. A function for a model gets the
argument and the data, for sizes that are public, and returns a ``ModelAdapter``.

>>> load_data("nothing:here")
Traceback (most recent call last):
    ...
affidavit.trainer.sources.UnknownSource: --data nothing: unknown data; choose one of csv...

Arguments of built-in adapters are ``VALUE,name=value,name=value``: at most one value without a
name, first, and named options in any order, each once. Unknown options are refused by name.

>>> options = Options.parse("run/weights,tie=untied,lora=4", "--model mine")
>>> options.value, options.choice("tie", ("exact", "untied")), options.integer("lora", minimum=1)
('run/weights', 'untied', 4)
>>> options.require_all_read()
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from affidavit.trainer.adapters import DataAdapter, ModelAdapter

DATA = {
    "csv": "affidavit.trainer.data.numeric_data:csv_file",
    "digits": "affidavit.trainer.data.numeric_data:digits",
}
"""Built-in data by name; a new adapter is a file and a line here."""
MODELS = {
    "mlp": "affidavit.trainer.models.mlp:mlp",
}
"""Built-in models by name; a new adapter is a file and a line here."""


class UnknownSource(ValueError):
    """An unknown data or model name; the message lists the known ones."""


def load_data(source: str) -> DataAdapter:
    """Load the data named ``source``; raises ``UnknownSource``."""
    function, argument = _resolve(source, DATA, "data")
    result = function(argument)
    if not isinstance(result, DataAdapter):
        raise UnknownSource(f"--data {source}: it does not return a DataAdapter.")
    return result


def load_model(source: str, data: DataAdapter) -> ModelAdapter:
    """Load the model named ``source``; raises ``UnknownSource``."""
    function, argument = _resolve(source, MODELS, "model")
    result = function(argument, data)
    if not isinstance(result, ModelAdapter):
        raise UnknownSource(f"--model {source}: it does not return a ModelAdapter.")
    return result


def _resolve(source: str, known: Mapping[str, str], kind: str) -> tuple[Any, str]:
    """Return the function that ``source`` names, and its argument."""
    name, _, argument = source.partition(":")
    if name == "python":
        module, _, rest = argument.partition(":")
        function, _, argument = rest.partition(":")
        if "" not in sys.path:
            sys.path.insert(0, "")
    elif name in known:
        module, function = known[name].split(":")
    else:
        raise UnknownSource(
            f"--{kind} {name}: unknown {kind}; choose one of {', '.join(sorted(known))}, or "
            "python:MODULE:FUNCTION for your own."
        )
    try:
        result = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownSource(f"--{kind} python:{module}:{function}: {error}.") from None
    if not callable(result):
        raise UnknownSource(f"--{kind} python:{module}:{function}: not a function.")
    return result, argument


FOLDERS: ContextVar[tuple[Path, ...] | None] = ContextVar("FOLDERS", default=None)
"""Folders whose files options may name; None allows all files."""


class WrongOption(ValueError):
    """An option that is unknown, missing or out of range; the message says how to fix it."""


class FileRefused(WrongOption):
    """A file that options may not name here; the message does not reveal whether it exists."""


@dataclass(frozen=True, slots=True)
class Options:
    """Parsed options, of which each must be read. ``where`` begins every message."""

    where: str
    value: str
    named: dict[str, str]
    _read: set[str] = field(default_factory=set)

    @classmethod
    def parse(cls, text: str, where: str) -> Options:
        """Parse ``text``; raises ``WrongOption``."""
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        value = parts.pop(0) if parts and "=" not in parts[0] else ""
        named: dict[str, str] = {}
        for part in parts:
            name, equals, setting = part.partition("=")
            if not (equals and name and setting):
                raise WrongOption(f"{where}: {part!r} is not an option; write name=value.")
            if name in named:
                raise WrongOption(f"{where}: {name} is given twice; give it once.")
            named[name] = setting
        return cls(where, value, named)

    def text(self, name: str, default: str | None = None) -> str:
        """Return an option as text; raises ``WrongOption`` if it is missing without a default."""
        self._read.add(name)
        result = self.named.get(name, default)
        if result is None:
            raise WrongOption(f"{self.where}: {name} is missing; give {name}=VALUE.")
        return result

    def file(self, name: str | None = None) -> Path:
        """Return the path in the option ``name``, or else in the value without a name.

        Raises ``WrongOption``, and ``FileRefused`` for a path that is not below one of ``FOLDERS``
        after following links.
        """
        if name is None and not self.value:
            raise WrongOption(f"{self.where}: the file is missing; name one.")
        result, folders = Path(self.value if name is None else self.text(name)), FOLDERS.get()
        if folders is None:
            return result
        try:
            result = result.resolve()
        except (OSError, RuntimeError):  # circular links
            folders = ()
        if not any(result.is_relative_to(folder.resolve()) for folder in folders):
            raise FileRefused(f"{self.where}: {result} is not in a folder that may be read here.")
        return result

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of ``choices``; the first is the default. Raises ``WrongOption``."""
        result = self.text(name, choices[0])
        if result not in choices:
            raise WrongOption(f"{self.where}: {name}={result}; choose one of {', '.join(choices)}.")
        return result

    def integer(self, name: str, *, minimum: int, default: int | None = None) -> int:
        """Return a whole number of at least ``minimum``. Raises ``WrongOption``."""
        result = self.text(name, None if default is None else str(default))
        if not (result.isascii() and result.isdigit() and int(result) >= minimum):
            raise WrongOption(
                f"{self.where}: {name}={result}; give a whole number of at least {minimum}."
            )
        return int(result)

    def require_all_read(self) -> None:
        """Raise ``WrongOption`` for an option that was never read."""
        if unknown := sorted(set(self.named) - self._read):
            known = ", ".join(sorted(self._read)) or "none"
            raise WrongOption(
                f"{self.where}: unknown option {', '.join(unknown)}; choose from {known}."
            )

    def require_no_value(self) -> None:
        """Raise ``WrongOption`` for a value without a name."""
        if self.value:
            raise WrongOption(f"{self.where}: {self.value!r} is not an option; write name=value.")
