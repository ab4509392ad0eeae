"""Runs go on from where one stopped, and differ in nothing that it did."""

from __future__ import annotations

import multiprocessing
import tempfile
from contextlib import closing
from pathlib import Path

from affidavit.replay import child
from affidavit.replay.settings import Job, Pause
from affidavit.replay.stopping import stop


def test_a_run_stops_with_a_lock_and_goes_on_with_equal_names_of_files(tmp_path: Path) -> None:
    """As after a bar of tqdm, which shares a lock, and a cache, which draws a temporary name."""

    def run(job: Job) -> None:
        lock = multiprocessing.RLock()
        names = tempfile._get_candidate_names()  # type: ignore[attr-defined]
        next(names)
        job = stop(job)
        with lock:
            Path(job.out, "name").write_text(next(names))

    def job(name: str, pause: Pause | None = None) -> Job:
        out = tmp_path / name
        out.mkdir()
        is_first = pause is not None
        return Job(folder=str(tmp_path), out=str(out), pause=pause, continues=not is_first)

    with closing(child.Runs(run)) as runs:
        assert runs.launch(job("first", Pause(datasets=(0,), sources=())), 20) == 0
        assert runs.launch(job("second"), 20) == runs.launch(job("third"), 20) == 0
    assert (tmp_path / "second/name").read_text() == (tmp_path / "third/name").read_text()
