"""Errors of guarded runs: a stable code, a message and a remedy.

==========================  ============================================================
code                        meaning
==========================  ============================================================
bad_argument                an argument of the guard is missing or invalid
unreadable                  certificate, plan or keys cannot be read
under_noised, unproved,
refused                     the certificate's verdict: nothing may be trained
open_plan                   the certificate does not solve its plan's unknowns
unsupported                 a certified plan, or a class of Opacus, that the guard cannot enforce
unknown_obligation          the certificate has an obligation that this release does not know
other_sampler               lots are not drawn as certified
other_probability           the sampling probability or lot size is not the certified one
other_divisor               a sum is not divided by the certified, fixed B
dataset_size                the data has another number of records
other_loader                a step uses lots that the guarded loader did not draw
accumulation                a release combines several lots
clip_norm_above             a record may contribute more than certified
noise_below                 the declared noise is less than certified
other_blocks                tensors and blocks are not those of the plan
tensor_not_noised           a trainable tensor would be updated without noise
noise_not_as_said           the measured noise is not the declared noise
noise_repeated              noise is used twice
non_finite                  a sum is not finite, which reveals information about a record
already_trained             releases were made before the guard started
too_many_steps              all certified steps were taken
record_exists, not_written  the record cannot be written
step_lost                   a step was charged but did not finish
guard_failure               the guard itself failed, so that nothing is released
==========================  ============================================================

Verification errors keep their codes of ``affidavit.certificate`` (``expired``, ``unknown_key``,
``other_plan``, ...).

>>> str(GuardStop("too_many_steps", "8 steps were certified.", "Certify more."))
'too_many_steps: 8 steps were certified. Certify more.'
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from affidavit.plan import CodedError


class GuardStop(CodedError):
    """The run must stop; ``code`` is one of the module's table."""

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
