"""Why a guarded run stops: a code that never changes its meaning, what is wrong, what to do.

==========================  ============================================================
code                        what was found
==========================  ============================================================
bad_argument                the guard was not told what it needs to know, or nonsense
unreadable                  certificate, plan or keys cannot be read
under_noised, refused       the certificate's verdict: nothing may be trained
open_plan                   the certificate does not say what its plan left open
unsupported                 a certified plan, or a class of Opacus, that no guard can hold
unknown_obligation          the certificate obliges to something this release does not know
other_sampler               lots are not drawn as certified
other_probability           records are in a lot with another probability, or lots are larger
other_divisor               a sum is not divided by the certified, fixed B
dataset_size                the data has another number of records
other_loader                steps are taken on lots that the guarded loader did not draw
accumulation                a release gathers several lots
clip_norm_above             a record may contribute more than certified
noise_below                 the noise is said to be less than certified
other_blocks                tensors and blocks are not those of the plan
tensor_not_noised           a trainable tensor would be updated without noise
noise_not_as_said           what was seen of the noise is not the noise it is said to be
noise_repeated              noise that was used already is used again
non_finite                  a sum is not finite, which tells of a record
already_trained             releases were made before the guard looked
too_many_steps              every certified step was taken
record_exists, not_written  the record cannot be written
step_lost                   a step was charged and did not come to its end
guard_failure               the guard itself failed, and lets nothing pass
==========================  ============================================================

The codes of ``affidavit.certificate.verification`` (``expired``, ``unknown_key``, ``other_plan``,
...) are used for what it rejects.

>>> str(GuardStop("too_many_steps", "8 steps were certified.", "Certify more."))
'too_many_steps: 8 steps were certified. Certify more.'
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class GuardStop(Exception):
    """A run that must not go on; ``code`` is one of the module's table."""

    def __init__(self, code: str, message: str, remedy: str) -> None:
        super().__init__(f"{code}: {message} {remedy}")
        self.code = code
        self.message = message
        self.remedy = remedy


class Stops:
    """What has stopped a run once stops it for good, whoever caught the exception.

    >>> stops = Stops()
    >>> try:
    ...     with stops.guarded():
    ...         raise KeyError("sampler")
    ... except GuardStop as stop:
    ...     stop.code
    'guard_failure'
    >>> stops.reason.message
    "the guard failed (KeyError: 'sampler')."
    """

    def __init__(self) -> None:
        self.reason: GuardStop | None = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the guard's own code; whatever goes wrong in it stops the run.

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
                "Nothing is released that it did not see; report this with the traceback.",
            )
            raise self.reason from error
