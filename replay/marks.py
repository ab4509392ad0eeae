"""Lines for loops whose releases or records replay does not find by itself.

>>> import affidavit
>>> x = affidavit.records([1.0, 5.0, 2.0])
>>> lot = affidavit.lot([0, 1])
>>> before = sum(min(x[place], 1.0) for place in lot)
>>> affidavit.release(before, before + 0.3, clip_norm=1.0, noise_multiplier=1.1)
2.3

Outside of a replay each of them returns its argument, and does nothing else.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")

replayed: tuple[Any, Any] | None = None
"""The ``Recorder`` and ``Records`` of the run that this process is, if it is one of a replay."""


def release(before: Any, after: T, *, clip_norm: float, noise_multiplier: float | None = None) -> T:
    """Mark a release, and return the values to continue with.

    ``before`` is the sum of clipped contributions and ``after`` the same with noise: tensors,
    arrays or numbers, or lists, tuples or dicts of them. ``clip_norm`` is the most, in l2, that one
    record can add to all of ``before`` together, and ``noise_multiplier`` times ``clip_norm`` is
    the standard deviation of the noise. Continue with what is returned: a replay puts the first
    run's noisy values in place.
    """
    if replayed is None:
        return after
    continued: T = replayed[0].marked_release(before, after, float(clip_norm), noise_multiplier)
    return continued


def records(*data: Any) -> Any:
    """Mark the private records: a data set, or arrays, tensors or lists of one row for each record.

    Continue with what is returned, one value for each argument: a replay changes a record of it.
    """
    marked = data if replayed is None else replayed[1].marked(data)
    return marked[0] if len(data) == 1 else marked


def lot(places: Any) -> Any:
    """Mark the places of a lot's records in ``records``, before they are read.

    Continue with what is returned: a replay leaves the removed record out. Without this line, a
    loop that reads records by itself gets them without the removed record from ``records``.
    """
    return places if replayed is None else replayed[1].marked_lot(places)
