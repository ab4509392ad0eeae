"""One run: the loop with all hooks, in a process of its own."""

from __future__ import annotations

import functools
import importlib
import io
import os
import platform
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from affidavit.replay import marks
from affidavit.replay.confinement import confine_writes
from affidavit.replay.datasets import Records, kept_rows
from affidavit.replay.lines import LineTrace
from affidavit.replay.randomness import fix_randomness
from affidavit.replay.recorder import LAST_STEP, EnoughSteps, Recorder
from affidavit.replay.settings import Job
from affidavit.replay.stopping import redirect_output
from affidavit.replay.torch_state import TorchState, digest_of, note_objects

PACKAGES = (
    *("numpy", "torch", "opacus", "jax", "jax_privacy"),
    *("tensorflow", "tensorflow_privacy"),
)
"""Packages whose versions are recorded."""

SEED_NAME = "the seed of PyTorch's generator"
OTHER_RELEASES = {
    "jax": "affidavit.replay.jax_releases",
    "tensorflow_privacy": "affidavit.replay.tensorflow_releases",
}
"""What records the releases of a package that is not PyTorch's."""

MOST_PRINTED = 20_000
"""Lines of output that are recorded."""


def run_command(job: Job) -> None:
    """Run a script or module as ``python`` does, in the job's folder."""
    sys.argv = [job.script or job.module or "", *job.arguments]

    def program() -> None:
        if job.script is not None:
            path = str(Path(job.folder) / job.script)
            sys.path[0] = str(Path(path).parent)
            runpy.run_path(path, run_name="__main__")
        else:
            sys.path[0] = job.folder
            runpy.run_module(str(job.module), run_name="__main__", alter_sys=True)

    run_traced(job, program)


def run_traced(job: Job, program: Callable[[], Any]) -> None:
    """Run ``program`` in the job's folder with all hooks, and write its record to ``job.out``."""
    os.chdir(job.folder)
    redirect_output(job)
    lines = LineTrace(job.code or job.folder)
    recorder = Recorder(job, lines)
    written: dict[str, str | None] = {}
    confine_writes(recorder, written)
    records = _install(recorder)
    marks.replayed = (recorder, records)
    fix_randomness(job.clock)
    printed = Printed(lines)
    sys.stdout = sys.stderr = printed
    ended, where, returned = "normally", None, None
    recorder.watch_from(-1)
    lines.start()
    try:
        returned = program()
    except EnoughSteps:
        ended = LAST_STEP
    except SystemExit as exit:
        ended = f"with exit code {exit.code}" if exit.code not in (None, 0) else "normally"
    except BaseException as error:
        lines.stop()
        places = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        where = next(filter(None, (lines.place_of(frame) for frame in reversed(places))), None)
        ended = f"by {type(error).__name__}: {error}"[:500]
    lines.stop()
    state = recorder.state()
    if returned is not None:
        state["what the function returns"] = digest_of(returned)
    recorder.write(
        ended=ended,
        ended_at=where,
        state=state,
        data=records.to_json(),
        printed=printed.entries,
        written=written,
        environment={
            "python": platform.python_version(),
            **{
                name: str(getattr(sys.modules[name], "__version__", ""))
                for name in PACKAGES
                if name in sys.modules
            },
        },
    )


def prepare() -> None:
    """Do what takes time and is the same in all runs."""
    if "tqdm" in sys.modules:  # its thread draws bars by the clock, and would be one more to stop
        sys.modules["tqdm"].tqdm.monitor_interval = 0
    if "torch" in sys.modules:
        note_objects()
    if "opacus" in sys.modules:
        importlib.import_module("affidavit.replay.opacus_releases")
    for name, module in OTHER_RELEASES.items():
        if name in sys.modules:
            importlib.import_module(module)
    if "affidavit.trainer" in sys.modules:
        importlib.import_module("affidavit.trainer.private_loop")
        importlib.import_module("affidavit.replay.trainer_releases")


def _install(recorder: Recorder) -> Records:
    records = Records(recorder)
    others: list[Any] = []
    for name, module in OTHER_RELEASES.items():
        if name in sys.modules:
            others.append(importlib.import_module(module).install(recorder, records))
            recorder.state, recorder.value = others[-1].digests, others[-1].value
    if "torch" not in sys.modules:
        return records
    state = TorchState()
    recorder.state, recorder.keep = state.digests, state.keep
    state.extra += [functools.partial(_entries, other) for other in others]
    state.extra.append(lambda: iter([(SEED_NAME, digest_of(recorder.seeds()))]))
    records.install()
    _align_draws(records)
    _save_by_open()
    if "opacus" in sys.modules:
        from affidavit.replay import opacus_releases

        opacus_releases.install(recorder, state)

    if "affidavit.trainer" in sys.modules:
        from affidavit.replay import trainer_releases

        trainer_releases.install(recorder, records)

    def value(key: str) -> str:
        tensor = state.tensors().get(key)
        return state.digests().get(key, "") if tensor is None else digest_of(tensor)

    recorder.value = value
    return records


def _entries(state: Any) -> Iterator[tuple[str, str]]:
    yield from state.digests().items()


def _align_draws(records: Records) -> None:
    """Let functions that draw by the rows of a lot draw for masked records too."""
    torch = sys.modules["torch"]
    functional = importlib.import_module("torch.nn.functional")
    for module, name in (
        *((functional, name) for name in ("dropout", "dropout1d", "dropout2d", "alpha_dropout")),
        *((torch, name) for name in ("rand_like", "randn_like", "bernoulli")),
    ):
        original = getattr(module, name)

        @functools.wraps(original)
        def draw(item: Any, *args: Any, _draw: Any = original, **kwargs: Any) -> Any:
            rows = kept_rows(records, item)
            if rows is None:
                return _draw(item, *args, **kwargs)
            size, remaining = rows
            places = {row: place for place, row in enumerate(remaining)}
            filled = [places.get(row, 0) for row in range(size)]
            return _draw(item[filled], *args, **kwargs)[list(remaining)] if remaining else item

        setattr(module, name, draw)
    for name in ("rand", "randn"):
        setattr(torch, name, _drawing_for_all(getattr(torch, name), records))


def _drawing_for_all(original: Any, records: Records) -> Any:
    """Return ``torch.rand`` or its like, which draws for a masked record too."""

    @functools.wraps(original)
    def draw(*size: Any, **options: Any) -> Any:
        shape = list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        masked = records.masked
        if masked is None or not shape or shape[0] != len(masked[1]) or not shape[0]:
            return original(*size, **options)
        return original([masked[0], *shape[1:]], **options)[list(masked[1])]

    return draw


def _save_by_open() -> None:
    """Let ``torch.save`` write through ``open``, which is watched."""
    torch: Any = sys.modules["torch"]
    original = torch.save

    @functools.wraps(original)
    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            original(value, file, *args, **kwargs)
            return
        buffer = io.BytesIO()
        original(value, buffer, *args, **kwargs)
        with open(file, "wb") as stream:
            stream.write(buffer.getvalue())

    torch.save = save


class Printed(io.TextIOBase):
    """Standard output and error of the loop: each line and where it is printed."""

    def __init__(self, lines: LineTrace) -> None:
        self._lines, self._part = lines, ""
        self.entries: list[tuple[str | None, str]] = []

    def write(self, text: str) -> int:
        """Record the lines of ``text``."""
        *complete, self._part = (self._part + text).split("\n")
        if complete and len(self.entries) < MOST_PRINTED:
            where = self._lines.current()
            self.entries += [(where, line[:500]) for line in complete]
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of standard output."""
        return "utf-8"
