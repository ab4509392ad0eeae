"""Errors of the trainer: why a run cannot start or continue.

::

    RunFailure                 has a code and a remedy; the run's folder is left unchanged
    ├── NotCertified           no certificate covers this run; nothing is trained (exit code 1)
    ├── Interrupted            stopped on request; the run can be resumed (exit code 3)
    └── Diverged               a parameter is no longer finite (exit code 1)
    UnsupportedModel           the model cannot be trained privately (exit code 1)
    MixedRecords               the model or its loss mixes records (exit code 1)

The last two have codes too, which the record of a run that strays from what was probed names.

>>> str(RunFailure("no_run", "there is nothing to resume."))
'there is nothing to resume.'
"""

from __future__ import annotations


class RunFailure(Exception):
    """A run cannot start or continue; ``code`` never changes its meaning."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotCertified(RunFailure):
    """The run differs from its certificate, or has none."""


class Interrupted(RunFailure):
    """The run stopped on request, after a complete step."""


class Diverged(RunFailure):
    """An update was not finite; the steps until then stay charged."""


class UnsupportedModel(ValueError):
    """The model cannot be trained privately; the message says what to change.

    ``outside`` names the tensors that were used outside of the layer that holds them.
    """

    def __init__(
        self, message: str, *, outside: tuple[str, ...] = (), code: str = "unsupported_model"
    ) -> None:
        super().__init__(message)
        self.outside, self.code = outside, code


class MixedRecords(RuntimeError):
    """A layer does not keep one row per record, so per-record gradients are unknown.

    ``path`` is the path of the layer, if one is to blame. ``kernels_failed`` tells that a module
    could not run one record at a time because kernels inside it need all records at once.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        kernels_failed: bool = False,
        code: str = "mixed_records",
    ) -> None:
        super().__init__(message)
        self.path, self.kernels_failed, self.code = path, kernels_failed, code
