"""What the service is told of a trainer that failed: a code, and words that no record is in.

What a trainer says may quote the data that it was given, a cell that is no number, say, and so
it stays on this host. Of all its words none leaves it but a code of ``MEANINGS``, which are the
trainer's own.

>>> import tempfile
>>> with tempfile.NamedTemporaryFile() as log:
...     _ = log.write(b"bad_source data.csv, line 3, column age: 'forty' is no finite number.")
...     log.flush()
...     print(why(Path(log.name)))
: bad_source, its data or model cannot be read as it is named. The worker's log says more.
"""

from __future__ import annotations

from pathlib import Path

MEANINGS = {
    "bad_checkpoint": "the checkpoint cannot be gone on with.",
    "bad_source": "its data or model cannot be read as it is named.",
    "beyond_allowance": "a step was charged that was not granted.",
    "blocks": "the model has other blocks than the plan.",
    "broken_record": "the record cannot be read.",
    "diverged": "a parameter is not finite any more.",
    "file_refused": "the worker lets runs name files below the folders of its --files only.",
    "no_checkpoint": "there is no checkpoint to go on from.",
    "not_anew": "a run that began cannot begin again.",
    "not_written": "the disk took no more.",
    "open_plan": "something in the plan is left to be solved.",
    "other_run": "what is in its folder is another run.",
    "other_strategy": "the noise strategy is another one.",
    "out_of_memory": "memory ran out; a smaller --microbatch takes less.",
    "rank_lost": "one of its processes ended.",
    "ranks_differ": "its processes have different parameters.",
    "run_in_use": "another process has its folder.",
    "too_many_steps": "the record has more steps than are certified.",
    "unsupported_model": "the model cannot be trained privately.",
}
"""What the trainer's codes mean; one that is not here is kept to the worker's log."""

_END = 65536
"""Bytes at the end of a log that are looked through."""


def why(log: Path) -> str:
    """How a trainer failed by the end of its log, to be said after its exit code."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _END))
        lines = stream.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        code = line.partition(" ")[0]
        if code in MEANINGS:
            return f": {code}, {MEANINGS[code]} The worker's log says more."
    return ". The worker's log says more."
