"""Input, output and errors of every command.

Results go to standard output, errors to standard error. With ``--json`` a malformed plan still
prints a result document, so that programs find the reasons on standard output.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from affidavit.gate.exit_codes import Exit
from affidavit.plan import MalformedPlan, Reason, printable, printable_json
from affidavit.trust import write_atomically

if TYPE_CHECKING:
    from affidavit.assessment import Assessment
    from affidavit.mechanisms.plan_files import PlanFile

# Other rooms are imported where they are needed: every command imports this module.

# Rich assumes that a pipe has 80 columns, and would break the numbers of wide tables in two.
_IS_TERMINAL = sys.stdout is not None and sys.stdout.isatty()
_COLUMNS = None if _IS_TERMINAL or "COLUMNS" in os.environ else 200


_COMMAND = re.compile(r"^((?:[^\S\n]|\[[^]\\\n]*\])*+):(?=:)|#(?=#\w{0,9}\\?\[)", re.M)
"""The first character of a command to the host of a pipeline, after Rich's markup if any: at the
start of a line ``::``, or anywhere ``##[``."""


class _Console(Console):
    """A console that no outside text, signed or sent, can control through escape sequences.

    Nor can it give a command to the host of a pipeline, which reads the log.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Render ``text`` with control characters, and the start of commands, as escapes."""
        plain = "".join(char if char in "\n\t" else printable(char) for char in text)
        return super().render_str(_COMMAND.sub(_escape_start, plain), **options)


def _escape_start(match: re.Match[str]) -> str:
    return "\\x23" if match[1] is None else f"{match[1]}\\x3a"


out = _Console(soft_wrap=True, highlight=False, emoji=False, width=_COLUMNS)
err = _Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def say(text: str) -> None:
    """Print one line of plain text, without markup, to standard output."""
    out.print(escape(text))


def show_status(label: str) -> AbstractContextManager[object]:
    """Show ``label`` on a terminal during the block."""
    return err.status(f"{escape(label)} ...") if err.is_terminal else nullcontext()


def load_plan(name: str, *, as_json: bool) -> PlanFile:
    """Read the plan in ``name``; report a malformed plan and exit."""
    from affidavit.mechanisms.plan_files import read_plan

    try:
        return read_plan(name)
    except MalformedPlan as error:
        exit_with_reasons(name, error.reasons, Exit.USAGE, as_json=as_json)


def read_file(path: Path) -> bytes:
    """Read ``path``; report an unreadable file and exit."""
    from affidavit.mechanisms import read_bytes

    try:
        return read_bytes(path)
    except MalformedPlan as error:
        stop(error.reasons[0].message)


def write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write ``path`` atomically with ``mode``; report a failure and exit."""
    try:
        write_atomically(path, content, mode=mode)
    except OSError as error:
        stop_unwritable(path, error)


def as_json_file(document: dict[str, Any]) -> bytes:
    """Return the content of an indented JSON file."""
    return (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()


def print_json(document: dict[str, Any]) -> None:
    """Print a JSON document on one line, and flush it."""
    print_document(printable_json(document))


def print_document(text: str) -> None:
    """Print ``text`` for a program: in UTF-8, whatever the encoding of the terminal."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
    sys.stdout.flush()


def print_reasons(name: str, reasons: tuple[Reason, ...]) -> None:
    """Print one line per reason, with its position in ``name`` and an excerpt."""
    from affidavit.gate.render import print_excerpt, reason_line

    for reason in reasons:
        err.print(escape(reason_line(name, reason)))
        print_excerpt(err, name, reason.line, reason.column, reason.code)


def exit_with_reasons(
    name: str, reasons: tuple[Reason, ...], code: Exit, *, as_json: bool
) -> NoReturn:
    """Report ``reasons`` and exit with ``code``."""
    if as_json:
        from affidavit.assessment import malformed_result

        print_json(malformed_result(reasons))
    else:
        print_reasons(name, reasons)
    raise typer.Exit(code)


def exit_with_assessment(
    file: PlanFile, assessment: Assessment, code: Exit, *, as_json: bool
) -> NoReturn:
    """Report the reasons of an assessment and exit with ``code``."""
    if as_json:
        print_json(assessment.as_result())
    else:
        print_reasons(file.name, file.locate(assessment.reasons))
    raise typer.Exit(code)


def stop(message: str, code: Exit = Exit.USAGE) -> NoReturn:
    """Report an error, by default of usage, and exit."""
    err.print(f"[red]Error:[/] {_escape_lines(message)}")
    raise typer.Exit(code)


def _escape_lines(message: str) -> str:
    return escape("\n".join(map(printable, message.split("\n"))))


@contextmanager
def usage_errors(verified: Path | None = None) -> Iterator[None]:
    """Report unusable keys, keysets and files in the block, and exit.

    A failed verification, such as that of the file ``verified``, exits as blocked.
    """
    from affidavit.trust import KeyFailure, KeysetError, VerificationError

    try:
        yield
    except VerificationError as error:
        place = "" if verified is None else f"{verified}: "
        fail(f"{place}{error.code}: {error.message} {error.remedy}")
    except (KeyFailure, KeysetError) as failure:
        stop(str(failure))
    except OSError as error:
        stop_unwritable(error.filename, error)


def require_writable(*paths: Path | None) -> None:
    """Exit unless ``paths`` can be written; called before work whose result would be lost."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            stop(f"cannot write {path}: {path.parent} is not a directory.")
        if path.is_dir():
            stop(f"cannot write {path}: it is a directory.")
        replaced = path.is_file() or not path.exists()  # pipes and devices are written in place
        if not os.access(path.parent if replaced else path, os.W_OK):
            stop(f"cannot write {path}: permission denied.")


def stop_unwritable(path: Path | str, error: OSError) -> NoReturn:
    """Report that ``path`` cannot be written, and exit; a full disk is a fault, not usage."""
    fault = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
    stop(f"cannot write {path}: {error.strerror}.", Exit.FAULT if fault else Exit.USAGE)


def fail(message: str, code: Exit = Exit.BLOCKED) -> NoReturn:
    """Report a failed check or request and exit with ``code``."""
    err.print(f"[red]✗[/] {_escape_lines(message)}")
    raise typer.Exit(code)
