"""The lease of a worker on a run: its models and errors, for the service and the worker.

A worker that claims a run gets a lease with a fencing token, a number that grows with every claim,
and a random secret. Every request about the run has both. After the lease has expired and another
worker has claimed the run, requests with the old token are refused (``LeaseLost``), however late
they arrive.

References: C. Gray and D. Cheriton, "Leases", SOSP 1989; M. Kleppmann, "How to do distributed
locking", 2016 (fencing tokens).

>>> Job.read({"run": "../r"})
Traceback (most recent call last):
affidavit.worker.lease.Refused: the service offered a run with an invalid run: '../r'.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, ValidationError

from affidavit.client import DIGEST, ResponseModel
from affidavit.plan import Integer

UUID = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"

Digest = Annotated[str, StringConstraints(strict=True, pattern=DIGEST)]
RunId = Annotated[str, StringConstraints(strict=True, pattern=UUID)]
Secret = Annotated[str, StringConstraints(strict=True, pattern="^[0-9a-f]{64}$")]
Reference = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9][!-~]{0,499}$")]
Output = Annotated[
    str,
    StringConstraints(
        strict=True,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}){0,4}$",
    ),
]
Fence = Annotated[Integer, Field(ge=1, le=2**31 - 1)]
Steps = Annotated[Integer, Field(ge=0, le=2**31 - 1)]


class LeaseLost(Exception):
    """The worker no longer holds the run; the service refuses all further reports."""


class Refused(Exception):
    """The queue refused a request; ``code`` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Job(ResponseModel):
    """A claimed run: what to train, and the fencing token and secret of its lease.

    ``time_limit`` is in seconds from this attempt's first step. Earlier attempts may have charged
    up to ``granted`` steps; ``previous`` is the fencing token of the last one that started.
    """

    run: RunId
    fence: Fence
    secret: Secret = Field(repr=False)
    certificate: Digest
    plan_digest: Digest
    granted: Steps
    previous: Fence | None
    data: Reference
    model: Reference
    output: Output
    time_limit: Annotated[Integer, Field(ge=1)] | None

    @classmethod
    def read(cls, document: Any) -> Self:
        """Parse a job; raises ``Refused`` for an invalid value.

        The values become paths and command lines, for which a worker does not trust the service.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            (name, *_), value = error.errors()[0]["loc"], error.errors()[0]["input"]
            raise Refused(
                "bad_job", f"the service offered a run with an invalid {name}: {str(value)[:80]!r}."
            ) from None


class Renewal(ResponseModel):
    """Whether the worker must stop the run, and the total of steps that it may charge."""

    cancel: bool
    granted: Steps
