"""Run a program by Triton's interpreter, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys


def interpreted(program: str) -> subprocess.CompletedProcess[str]:
    """The end of ``program`` in a process of its own: Triton chooses when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
