"""``affidavit worker``: the worker's own program, on which the gate must not depend.

This process is replaced by the worker's, so that a signal to it reaches the worker.
"""

from __future__ import annotations

import os
import sys

import typer

worker = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@worker.command(
    "worker",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def become_worker(context: typer.Context) -> None:
    """Claim certified runs from a service, train them, and report what they did."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "affidavit.worker", *context.args])
