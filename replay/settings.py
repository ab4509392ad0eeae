"""What one run of a replay is told, as JSON from the driver to the child.

>>> job = Job(folder="/tmp/a", out="/tmp/b", neighbour=Neighbour(kind="zeroed", dataset=0, record=3,
...     other=5))
>>> Job.from_json(job.to_json()) == job
True
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal["removed", "zeroed", "replaced", "outlier", "not_finite", "mixed"]
KINDS: tuple[Kind, ...] = ("removed", "outlier", "zeroed", "replaced")
"""What is done to the first chosen record. It is also made not finite, and ``mixed`` gives each
record the values and label of two others."""
LARGEST_CHANGES = KINDS[:2]
"""What is done to the other chosen records: each change is a run."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A data set with one changed record: ``record`` of data set ``dataset``, in order of making.

    Its ``copies`` are data sets with the same records, which are changed too. ``other`` is the
    record whose values or label it gets. ``sources`` are the loaded arrays that hold the record;
    without any, the data set's own arrays are changed when it is made. A removed record is masked
    in lots, unless ``drops``: then its row is left out. ``variables`` of functions hold the
    ``size`` records of a loop whose lots are places: ``main.x``.

    A ``mixed`` data set has all its records changed, or those at ``rows``. It is joined to the
    given one by a path of neighbours, so whatever depends on it depends on one record of some two
    neighbours of the path.
    """

    kind: Kind
    dataset: int
    record: int
    other: int
    copies: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    variables: tuple[str, ...] = ()
    size: int = 0
    drops: bool = False
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A value of the state to follow line by line, from a release on; -1 is the beginning."""

    key: str
    release: int


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Where a run stops to be continued several times: before the first record that may differ.

    That is when one of these ``datasets`` is made, or ``sources`` loaded.
    """

    datasets: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: in ``folder``, written to ``out``, with releases from the run in ``first``.

    ``code`` is the folder whose lines are traced, that of the script by default. ``steps`` is the
    number of releases, ``lots`` those of one pass over a loader, and ``lot_records`` the number of
    records that a lot is thinned to. ``memory`` is in bytes. ``removed`` has the sums of the run
    without the changed record. A run with ``pause`` stops there, and one that ``continues`` goes on
    from where that one stopped. ``clock`` is the time at its start, in seconds since 1970. A run
    with ``step_seconds`` ends early when its steps have taken so much of the processor.
    """

    folder: str
    out: str
    code: str | None = None
    script: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()
    steps: int = 12
    lots: int = 2
    lot_records: int = 12
    memory: int = 16 << 30
    first: str | None = None
    removed: str | None = None
    neighbour: Neighbour | None = None
    watch: Watch | None = None
    pause: Pause | None = None
    continues: bool = False
    clock: float = 0.0
    step_seconds: float | None = None

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job of one line."""
        fields = json.loads(text)
        fields["arguments"] = tuple(fields["arguments"])
        if fields["neighbour"] is not None:
            for name in ("copies", "sources", "variables", "rows"):
                fields["neighbour"][name] = tuple(fields["neighbour"][name])
            fields["neighbour"] = Neighbour(**fields["neighbour"])
        if fields["watch"] is not None:
            fields["watch"] = Watch(**fields["watch"])
        if fields["pause"] is not None:
            fields["pause"] = Pause(**{name: tuple(at) for name, at in fields["pause"].items()})
        return cls(**fields)
