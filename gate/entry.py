"""The process of a command: its streams, its exit code, and how failures are reported.

Exit code 1 means that a plan is blocked, but is also Python's code for an uncaught exception.
Therefore ``main`` catches every exception, prints one line, and exits with a code of its own. It
imports little, so that a broken installation is reported the same way.
"""

from __future__ import annotations

import codecs
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from affidavit.gate.exit_codes import Exit

BLAS_TIMEOUT = ("OPENBLAS_THREAD_TIMEOUT", "20")
"""Let idle threads of OpenBLAS sleep after 2^20 cycles, instead of a third of a second."""
COLLECTION_THRESHOLD = 50_000
"""Objects of imported modules live as long as the process: to look for garbage among them again and
again, and at the exit, takes a quarter of the time of ``affidavit certify``."""
NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "__all__")
"""No other package watches what is validated; looking for one reads every installed package."""
_SYMBOLS = "ε δ σ μ ρ Φ Δ Σ α γ κ λ √ ¹ ² ⁻ ₁ ₂ · ≤ ≥ ≠ × → – — … ‖ ✓ ✗ ′"
_WORDS = (
    "epsilon delta sigma mu rho Phi Delta Sigma alpha gamma kappa lambda sqrt 1 ^2 ^- 1 2 "
    "* <= >= != x -> - - ... | ok error: '"
)
ASCII_FORMS = dict(zip(_SYMBOLS.split(), _WORDS.split(), strict=True))
"""ASCII forms of the symbols in messages, for streams that cannot encode them."""


def main() -> NoReturn:
    """Run the command in ``sys.argv`` and exit with its code."""
    for setting in (BLAS_TIMEOUT, NO_PLUGINS):
        os.environ.setdefault(*setting)
    gc.set_threshold(COLLECTION_THRESHOLD)
    code = run(lambda: _command(sys.argv[1:]))
    gc.freeze()
    sys.exit(code)


def run(program: Callable[[], int]) -> int:
    """Run ``program`` and return its exit code; return ``Exit.FAULT`` if it fails. Never raises."""
    if os.path.expanduser("~") == "~":  # a container's user may have neither HOME nor a name
        os.environ["HOME"] = os.devnull  # reads find no file there, and writes fail
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
        error.msg += "; run: pip install --force-reinstall affidavit"
        _report(error)
        return Exit.FAULT
    except BaseException as error:
        _report(error)
        return Exit.FAULT
    return code


def _command(arguments: Sequence[str]) -> int:
    from affidavit.gate.cli import app
    from affidavit.gate.invocation import invoke

    return invoke(app, "affidavit", arguments)


def _prepare_streams() -> None:
    """Replace closed standard streams, and let the others write unencodable symbols in ASCII."""
    codecs.register_error("affidavit", _encode_as_ascii)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # `>&-` closed it. Opening a file takes the lowest free descriptor, which is the same.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until the process ends
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="affidavit")


def _encode_as_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    ascii_text = "".join(ASCII_FORMS.get(char, char) for char in text)
    return ascii_text.encode("ascii", "backslashreplace").decode(), error.end


def _report(error: BaseException) -> None:
    """Print the error and its place on one line, if standard error still works."""
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
    """Redirect unusable streams to null: a failing flush at exit would change the exit code."""
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            except (OSError, ValueError):
                stream.close()
