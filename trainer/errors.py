"""Failures: why a run cannot start or continue.

::

    RunFailure                 code and what to do; the run's folder is left as it was
    ├── NotCertified           no certificate for this run: nothing is trained (exit code 1)
    ├── Interrupted            asked to stop; it may be resumed (exit code 3)
    └── Diverged               a parameter is no longer finite (exit code 1)

>>> str(RunFailure("no_run", "there is nothing to resume."))
'there is nothing to resume.'
"""

from __future__ import annotations


class RunFailure(Exception):
    """A run that cannot start or continue; ``code`` never changes its meaning."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotCertified(RunFailure):
    """The run differs from its certificate, or has none."""


class Interrupted(RunFailure):
    """The run stopped on request, after a whole step."""


class Diverged(RunFailure):
    """An update was not finite; the steps until then stay charged."""
