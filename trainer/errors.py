"""Failures: why a run does not start, or does not go on.

::

    RunFailure                 code and what to do; the run's folder is left as it was
    ├── NotCertified           no certificate for this run: nothing is trained (exit code 1)
    ├── Interrupted            asked to stop; it may be resumed (exit code 3)
    └── Diverged               a parameter is not finite any more (exit code 1)

>>> str(RunFailure("no_run", "there is nothing to resume."))
'there is nothing to resume.'
"""

from __future__ import annotations


class RunFailure(Exception):
    """A run that cannot start or go on; ``code`` never changes its meaning."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotCertified(RunFailure):
    """What is at hand is not what was certified, or nothing was."""


class Interrupted(RunFailure):
    """Somebody asked the run to stop, and it did after a whole step."""


class Diverged(RunFailure):
    """An update left the numbers; the steps until then stay charged."""
