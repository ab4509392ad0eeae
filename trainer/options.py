"""Options: the part of ``--data`` and ``--model`` after the colon.

``VALUE,name=value,name=value``: at most one value without a name, first, and named ones in
any order, each once. What is not known is refused by name.

>>> options = Options.of("run/gpt2,tie=untied,lora=4", "--model gpt2")
>>> options.first, options.choice("tie", ("exact", "untied")), options.integer("lora", least=1)
('run/gpt2', 'untied', 4)
>>> options.require_all_read()
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS: ContextVar[tuple[Path, ...] | None] = ContextVar("FOLDERS", default=None)
"""The folders below which options may name files; None where they may anywhere."""


class WrongOption(ValueError):
    """An option that is unknown, missing or out of range; the message says how to fix it."""


class FileRefused(WrongOption):
    """A file that options may not name here; the message does not say whether it exists."""


@dataclass(frozen=True, slots=True)
class Options:
    """The given options. Reading one marks it; options that were never read are refused."""

    where: str
    first: str
    named: dict[str, str]
    _read: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, text: str, where: str) -> Options:
        """The options in ``text``; ``where`` begins every message. Raises ``WrongOption``."""
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        first = parts.pop(0) if parts and "=" not in parts[0] else ""
        named: dict[str, str] = {}
        for part in parts:
            name, equals, value = part.partition("=")
            if not (equals and name and value):
                raise WrongOption(f"{where}: {part!r} is not an option; write name=value.")
            if name in named:
                raise WrongOption(f"{where}: {name} is given twice; give it once.")
            named[name] = value
        return cls(where, first, named)

    def text(self, name: str, default: str | None = None) -> str:
        """An option that is a text; without ``default`` it must be given.

        Raises ``WrongOption``.
        """
        self._read.add(name)
        result = self.named.get(name, default)
        if result is None:
            raise WrongOption(f"{self.where}: {name} is missing; give {name}=VALUE.")
        return result

    def file(self, name: str | None = None) -> Path:
        """A file or folder, of the option ``name`` or else of the value without one.

        Raises ``WrongOption``, and ``FileRefused`` for what is not below one of ``FOLDERS``,
        wherever links lead.
        """
        if name is None and not self.first:
            raise WrongOption(f"{self.where}: the file is missing; name one.")
        result, folders = Path(self.first if name is None else self.text(name)), FOLDERS.get()
        if folders is None:
            return result
        try:
            result = result.resolve()
        except (OSError, RuntimeError):  # links that lead in a circle
            folders = ()
        if not any(result.is_relative_to(folder.resolve()) for folder in folders):
            raise FileRefused(f"{self.where}: {result} is not in a folder that may be read here.")
        return result

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of ``choices``; the first is the default.

        Raises ``WrongOption``.
        """
        result = self.text(name, choices[0])
        if result not in choices:
            raise WrongOption(f"{self.where}: {name}={result}; choose one of {', '.join(choices)}.")
        return result

    def integer(self, name: str, *, least: int, default: int | None = None) -> int:
        """A whole number of at least ``least``. Raises ``WrongOption``."""
        result = self.text(name, None if default is None else str(default))
        if not (result.isascii() and result.isdigit() and int(result) >= least):
            raise WrongOption(
                f"{self.where}: {name}={result}; give a whole number of at least {least}."
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
        """Raise ``WrongOption`` where a value without a name is given."""
        if self.first:
            raise WrongOption(f"{self.where}: {self.first!r} is not an option; write name=value.")
