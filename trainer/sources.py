"""Sources: the data and model that a command line names.

``NAME`` or ``NAME:ARGUMENT`` is looked up among the built-in adapters; what the argument means
is theirs to say. ``python:MODULE:FUNCTION[:ARGUMENT]`` calls a function of your own, found on
Python's path or in the folder where the command is run. A function for data gets the argument
(a text, empty if there is none) and returns a ``DataAdapter``; one for a model gets the
argument and the data, for sizes that are public, and returns a ``ModelAdapter``.

>>> data_of("nothing:here")
Traceback (most recent call last):
    ...
affidavit.trainer.sources.UnknownSource: --data nothing: unknown data; choose one of bible...
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from affidavit.trainer.adapters import DataAdapter, ModelAdapter
from affidavit.trainer.data.numbers import csv_file, digits
from affidavit.trainer.data.text import bible, generated, jsonl
from affidavit.trainer.models.language import gpt2
from affidavit.trainer.models.mlp import mlp

DATA: dict[str, Callable[[str], DataAdapter]] = {
    "bible": bible,
    "csv": csv_file,
    "digits": digits,
    "generated": generated,
    "jsonl": jsonl,
}
"""From the argument to the data; a new adapter is a file and a line here."""
MODELS: dict[str, Callable[[str, DataAdapter], ModelAdapter]] = {"gpt2": gpt2, "mlp": mlp}
"""From the argument and the data to the model; a new one is a file and a line here."""


class UnknownSource(ValueError):
    """An unknown data or model name; the message lists the known ones."""


def data_of(named: str) -> DataAdapter:
    """The data named ``named``; raises ``UnknownSource``."""
    source, argument = _found(named, DATA, "data")
    result = source(argument)
    if not isinstance(result, DataAdapter):
        raise UnknownSource(f"--data {named}: it does not return a DataAdapter.")
    return result


def model_of(named: str, data: DataAdapter) -> ModelAdapter:
    """The model named ``named``; raises ``UnknownSource``."""
    source, argument = _found(named, MODELS, "model")
    result = source(argument, data)
    if not isinstance(result, ModelAdapter):
        raise UnknownSource(f"--model {named}: it does not return a ModelAdapter.")
    return result


def _found(named: str, known: Mapping[str, Any], kind: str) -> tuple[Any, str]:
    name, _, argument = named.partition(":")
    if name == "python":
        module, _, rest = argument.partition(":")
        function, _, argument = rest.partition(":")
        return _imported(module, function, kind), argument
    if name not in known:
        raise UnknownSource(
            f"--{kind} {name}: unknown {kind}; choose one of {', '.join(sorted(known))}, or "
            "python:MODULE:FUNCTION for your own."
        )
    return known[name], argument


def _imported(module: str, function: str, kind: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        result = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownSource(f"--{kind} python:{module}:{function}: {error}.") from None
    if not callable(result):
        raise UnknownSource(f"--{kind} python:{module}:{function}: not a function.")
    return result
