"""Errors of guarded runs: a stable code, a message and a remedy.

docs/reference/codes.md lists the codes. Verification errors keep their codes of
``affidavit.certificate`` (``expired``, ``unknown_key``, ``other_plan``, ...).

>>> str(GuardStop("too_many_steps", "8 steps were certified.", "Certify more."))
'too_many_steps: 8 steps were certified. Certify more.'
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from affidavit.plan import CodedError


class GuardStop(CodedError):
    """The run must stop; ``code`` is stable."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message} {self.remedy}"


class StopState:
    """Whether a run is stopped; it stays stopped even if the exception is caught.

    >>> stop_state = StopState()
    >>> try:
    ...     with stop_state.guarded():
    ...         raise KeyError("sampler")
    ... except GuardStop as stop:
    ...     stop.code
    'guard_failure'
    >>> stop_state.reason.message
    "the guard failed (KeyError: 'sampler')."
    """

    def __init__(self) -> None:
        self.reason: GuardStop | None = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run code of the guard; any error in it stops the run.

        Raises ``GuardStop``.
        """
        if self.reason is not None:
            raise self.reason
        try:
            yield
        except GuardStop as stop:
            self.reason = stop
            raise
        except Exception as error:
            self.reason = GuardStop(
                "guard_failure",
                f"the guard failed ({type(error).__name__}: {error}).",
                "Nothing was released; please report this with the traceback.",
            )
            raise self.reason from error
