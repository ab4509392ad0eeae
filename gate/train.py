"""``affidavit train``: the trainer's own program, on which the gate must not depend.

Everything offline works without PyTorch. This process is replaced by the trainer's, so that
a signal to it reaches the training.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from affidavit.gate.console import stop

REMEDY = "make install-trainer in a checkout, pip install 'affidavit[trainer]' elsewhere."

train = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@train.command(
    "train",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def become_trainer(context: typer.Context) -> None:
    """Train exactly what a certificate certifies, and write the record of the run."""
    if importlib.util.find_spec("torch") is None:
        stop(f"training needs PyTorch: {REMEDY}")
    sys.stdout.flush()
    arguments = [sys.executable, "-m", "affidavit.trainer", *context.args]
    os.execv(sys.executable, arguments)
