"""Commands that run another program of the project: the service, the trainer and the worker.

The command line must work offline and without PyTorch, so it imports none of them. Each command
replaces this process, so that signals reach the program itself.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import NoReturn

import typer

from affidavit.gate.console import stop

REMEDY = "make install-trainer in a checkout, pip install 'affidavit[trainer]' elsewhere."
PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True}


def _exec(program: str, *arguments: str) -> NoReturn:
    """Replace this process by that of ``affidavit.PROGRAM``."""
    sys.stdout.flush()
    entry = ["-m", "affidavit.gate.entry", program]
    os.execv(sys.executable, [sys.executable, *entry, *arguments])


def _forwarded(name: str, *program: str, needs_torch: bool = False) -> typer.Typer:
    """The command ``name``, whose options and help are those of ``affidavit.PROGRAM``."""
    forwarded = typer.Typer(add_completion=False)

    @forwarded.command(name, add_help_option=False, context_settings=PASS_THROUGH)
    def run(context: typer.Context) -> None:
        asks = "--help" in context.args
        if needs_torch and not asks and importlib.util.find_spec("torch") is None:
            stop(f"training needs PyTorch: {REMEDY}")
        _exec(*program, *context.args)

    return forwarded


train = _forwarded("train", "trainer.__main__", needs_torch=True)
search = _forwarded("search", "trainer.search", needs_torch=True)
worker = _forwarded("worker", "worker.__main__")
serve = _forwarded("serve", "service.__main__", "serve")
migrate = _forwarded("migrate", "service.__main__", "migrate")
backup = _forwarded("backup", "service.__main__", "backup")
tokens = _forwarded("tokens", "service.__main__", "tokens")
audit = _forwarded("audit", "service.__main__", "audit")
witness = _forwarded("witness", "service.__main__", "witness")
