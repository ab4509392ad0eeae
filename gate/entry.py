"""The process of a command: its streams, its exit code, and what happens when Affidavit fails.

Exit code 1 means that a plan is blocked, and Python's own code for an uncaught exception is also 1.
Therefore ``main`` catches everything, prints one line, and exits with a code that means nothing
else. It imports little, so that a broken installation is reported the same way.
"""

from __future__ import annotations

import codecs
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, TextIO

from affidavit.gate.exit_codes import Exit

if TYPE_CHECKING:
    from typer import Typer

COMPLETION = "_AFFIDAVIT_COMPLETE"
"""Set by a shell that asks for completions."""
BLAS_TIMEOUT = ("OPENBLAS_THREAD_TIMEOUT", "20")
"""Idle threads of OpenBLAS sleep after 2^20 cycles; by default they take a third of a second."""
PLAIN = {
    "ε": "epsilon",
    "δ": "delta",
    "σ": "sigma",
    "μ": "mu",
    "ρ": "rho",
    "Φ": "Phi",
    "Δ": "Delta",
    "Σ": "Sigma",
    "α": "alpha",
    "γ": "gamma",
    "κ": "kappa",
    "λ": "lambda",
    "√": "sqrt",
    "¹": "1",
    "²": "^2",
    "⁻": "^-",
    "₁": "1",
    "₂": "2",
    "·": "*",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "×": "x",
    "→": "->",
    "–": "-",
    "—": "-",
    "…": "...",
    "‖": "|",
    "✓": "ok",
    "✗": "error:",
    "′": "'",
}
"""ASCII forms of the symbols in messages, for streams that cannot encode them."""


def main() -> NoReturn:
    """Run the command in ``sys.argv`` and exit with its code."""
    os.environ.setdefault(*BLAS_TIMEOUT)
    sys.exit(run(lambda: _command(sys.argv[1:])))


def run(program: Callable[[], int]) -> int:
    """The exit code of ``program``, also if it fails; never raises."""
    if os.path.expanduser("~") == "~":  # a container's user may have neither HOME nor a name
        os.environ["HOME"] = os.devnull  # where nothing is found, and nothing can be written
    try:
        _prepare_streams()
        code = program()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        _discard_output()
        return Exit.UNDECIDED
    except KeyboardInterrupt:
        _discard_output()
        return Exit.INTERRUPTED
    except ModuleNotFoundError as error:
        error.msg += (
            "; install 'affidavit[gate]' for commands, 'affidavit[service]' for the service"
        )
        _report(error)
        return Exit.FAULT
    except BaseException as error:
        _report(error)
        return Exit.FAULT
    return code


def _program(name: str) -> int:
    """Run ``python -m affidavit.NAME`` in this process."""
    app = importlib.import_module(f"affidavit.{name}").app
    return _invoke(app, app.info.name, sys.argv[1:])


def _code(finished: SystemExit) -> int:
    if isinstance(finished.__context__, BrokenPipeError):  # Rich exits with 1
        raise finished.__context__
    if finished.code is None or isinstance(finished.code, int):
        return finished.code or 0
    raise finished


def _command(arguments: Sequence[str]) -> int:
    from affidavit.gate.cli import app

    return _invoke(app, "affidavit", arguments)


def _invoke(app: Typer, name: str, arguments: Sequence[str]) -> int:
    """Run a command; Click's own way of running one exits with 1 where a pipe is closed."""
    from typer import Abort
    from typer import Exit as Finished
    from typer.main import get_command

    from affidavit.gate.cli import plain

    command = plain(get_command(app))
    try:
        if COMPLETION in os.environ:
            command.main(list(arguments), prog_name=name)
        with command.make_context(name, list(arguments)) as context:
            command.invoke(context)
    except Finished as finished:
        return finished.exit_code
    except Abort:
        raise KeyboardInterrupt from None
    except SystemExit as finished:
        return _code(finished)
    except Exception as error:
        # The exceptions for wrong usage are Click's, which Typer does not export.
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        error.show()
        return Exit.USAGE
    return Exit.CERTIFIED


def _prepare_streams() -> None:
    """Replace a closed standard stream, and print what a stream cannot encode in ASCII."""
    codecs.register_error("affidavit", _plain)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # As after `>&-`. The lowest free descriptor is the one that was closed.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until the process ends
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="affidavit")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    plain = "".join(PLAIN.get(char, char) for char in text)
    return plain.encode("ascii", "backslashreplace").decode(), error.end


def _report(error: BaseException) -> None:
    """Print what failed and where, on one line, if standard error still works."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        _discard_output(sys.stdout)
        print(  # noqa: T201  # the console may be what failed
            f"affidavit: failed, nothing was decided: {text}{place}", file=sys.stderr, flush=True
        )
    except Exception:
        _discard_output()


def _discard_output(*streams: TextIO) -> None:
    """Let Python flush at exit without failing again, which would change the exit code."""
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            _redirect_to_null(stream)


def _redirect_to_null(stream: TextIO) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        stream.close()


if __name__ == "__main__":
    del sys.argv[0]
    sys.exit(run(lambda: _program(sys.argv[0])))
