"""The service's own program, on which the command line must not depend to work offline."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def become_service(*arguments: str) -> NoReturn:
    """Become ``python -m affidavit.service``.

    This process is replaced, so that a signal to it reaches the service.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "affidavit.service", *arguments])
