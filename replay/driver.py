"""Start the runs of a replay, compare them, and say what they show.

One process of the loop's interpreter imports PyTorch, and forks for each run. A first run finds the
releases, the private data set and its lots; a control repeats it. Then each chosen record is
removed and made an outlier, the first also zeroed and replaced. Last, all records are mixed, and
those outside of all lots. A difference that refutes must be there again in two more runs, one on
each of the data sets. If it is in the state, they follow that value line by line, to find the line
that changes it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from affidavit.assessment import Execution
from affidavit.evidence import ReplayedFile, ReplayFinding, ReplayRecord
from affidavit.plan import Plan, digest
from affidavit.replay import child
from affidavit.replay.comparison import (
    Record,
    Unstable,
    checks_of,
    compare,
    lot_findings,
    lots_before_releases,
    noise_findings,
    releases_of,
)
from affidavit.replay.confinement import ONLY_BELOW
from affidavit.replay.datasets import NotChanged
from affidavit.replay.errors import ReplayRefused
from affidavit.replay.lines import LINE_BITS
from affidavit.replay.plan_comparison import execution_of, plan_findings
from affidavit.replay.program import (
    COPIED_BYTES,
    OWN_BYTES,
    Program,
    copy_folder,
    digest_files,
    parse_command,
)
from affidavit.replay.recorder import LAST_STEP
from affidavit.replay.settings import (
    KINDS,
    LARGEST_CHANGES,
    Job,
    Kind,
    Neighbour,
    Pause,
    Watch,
)
from affidavit.replay.traced_run import run_traced

PACKAGES = {
    "numpy": ("numpy",),
    "torch": ("numpy", "torch", "torch._dynamo"),
    "opacus": ("opacus", "opacus.accountants.analysis.prv", "scipy.special", "scipy.optimize"),
    "lightning": ("torch", "torch._dynamo"),
    "jax": ("numpy", "jax", "jaxlib.mlir.dialects.mhlo"),
    "jax_privacy": ("jax_privacy", "dp_accounting.pld.accountant"),
    "tensorflow_privacy": ("numpy", "tensorflow_privacy", "keras.src.engine.data_adapter"),
    "affidavit": ("affidavit.library",),
    "guard": ("affidavit.guard.opacus_run",),
    "affidavit.trainer": ("torch", "torch._dynamo", "affidavit.trainer"),
}
"""What to import once, before the runs, if the program names a package."""
FEWEST_MIXED, MOST_MIXED = 4, 200_000
"""Numbers of records outside of all lots that are mixed."""
FIRST_DEADLINE = 300.0
"""Seconds for the first run."""
STEPS, RECORDS = 12, 4
"""The number of releases, and of records that are changed, where the loop is not slow."""
STEP_SECONDS, ALL_SECONDS = 4.0, 60.0
"""Processor time that the steps of a run, and all runs, may take before these numbers shrink."""

Launch = Callable[[Job, float], int | None]
"""Runs a job within a number of seconds, and returns the exit status of its process."""


class _Runner:
    """Runs jobs of one program, each in a new copy of its folder."""

    def __init__(self, folder: Path | None, scratch: Path, options: Job, launch: Launch) -> None:
        self._folder, self._scratch, self._options = folder, scratch, options
        self._launch = launch
        self._number = 0
        self._place = scratch / "place"
        self._place.mkdir()
        self._before: dict[str, str] | None = None
        self._stopped: Path | None = None
        self.seconds = 0.0

    def run(self, deadline: float, **changes: Any) -> tuple[Record, Path]:
        """Run one job, and return its record and folder; raises ``ReplayRefused``."""
        job = replace(self._new_job(), **changes)
        started = time.monotonic()
        status = self._launch(job, deadline)
        self.seconds = time.monotonic() - started
        out, work = Path(job.out), Path(job.folder)
        if not (out / "record.json").exists():
            if job.continues:
                self._stopped = None
                return self.run(deadline, **changes)
            raise _failure(status, deadline, out)
        record: Record = json.loads((out / "record.json").read_text())
        before = self._before or {}
        after = digest_files(work)
        record["files"] = {name: at for name, at in after.items() if before.get(name) != at}
        return record, out

    def stop_before(self, neighbours: Sequence[Neighbour], deadline: float, first: str) -> None:
        """Run the part that all later runs share, if it can stop where the neighbours differ."""
        if any(item.variables for item in neighbours):  # JAX has started threads
            return
        pause = Pause(
            datasets=tuple({at for item in neighbours for at in (item.dataset, *item.copies)}),
            sources=tuple({at for item in neighbours for at in item.sources}),
        )
        job = replace(self._new_job(self._place), first=first, pause=pause)
        work = Path(job.folder)
        has_stopped = self._launch(job, deadline) == 0
        if has_stopped and not any(map(_is_large, work.rglob("*"))):
            self._stopped = work.rename(self._place / "stopped")

    def end_as(self, first: Record) -> bool:
        """Let later runs make as many steps as the first; return whether slow steps ended it."""
        steps = first["releases"] if first["ended"] == LAST_STEP else self._options.steps
        is_slow = steps < self._options.steps
        self._options = replace(self._options, steps=steps, step_seconds=None)
        return is_slow

    def _new_job(self, results: Path | None = None) -> Job:
        """Return a job with a new copy of the folder, and a new folder for its results."""
        work, folder = self._place / "work", self._stopped or self._folder
        results = results or (self._scratch if self._stopped is None else self._place)
        out = results / f"run{self._number}"
        self._number += 1
        shutil.rmtree(work, ignore_errors=True)
        if folder is None:
            work.mkdir()
        else:
            copy_folder(folder, work, COPIED_BYTES if self._stopped is None else OWN_BYTES)
        out.mkdir()
        if self._before is None:
            self._before = digest_files(work)
        return replace(
            self._options, folder=str(work), out=str(out), continues=self._stopped is not None
        )


def _is_large(path: Path) -> bool:
    """Whether a file would be linked, and so not be writable, in a copy of a stopped run's."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size > OWN_BYTES


def _failure(status: int | None, deadline: float, out: Path) -> ReplayRefused:
    if status == -9:
        return ReplayRefused(
            "replay_too_slow",
            f"a run took over {deadline:.0f} s.",
            "Replay a smaller model, or fewer steps (--steps).",
        )
    log = out / "stderr"
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    return ReplayRefused(
        "replay_failed",
        f"a run ended without a record (status {status}). {' '.join(last)[:300]}",
        "Install affidavit for the interpreter that the command names, and start the loop alone.",
    )


def run(
    function: Callable[[], object],
    *,
    folder: str | Path | None = None,
    steps: int | None = None,
    records: int | None = None,
    plan: Plan | None = None,
) -> ReplayRecord:
    """Replay a function that trains, in forks of this process, and return its record.

    What the function returns is compared too. It runs in a copy of ``folder``, by default in an
    empty folder. ``steps`` is the number of releases, 12 by default, and ``records`` that of the
    records that are changed, 4 by default; of a slow loop they are fewer by default. Noise and lots
    are compared with ``plan``, if there is one.
    Raises ``ReplayRefused`` for a loop that cannot be replayed.
    """
    _require_fork()
    source = inspect.getsourcefile(function)
    code = Path(source or ".").resolve().parent

    runs = child.Runs(lambda job: run_traced(job, function))
    name = getattr(function, "__qualname__", type(function).__qualname__)
    options = _job(steps, code=str(code))
    place = None if folder is None else Path(folder).resolve()
    with closing(runs):
        return _replay(place, code, options, runs.launch, records, plan, shown=f"{name}()")


def replay_command(
    command: list[str],
    *,
    folder: str | Path = ".",
    steps: int | None = None,
    records: int | None = None,
    plan: Plan | None = None,
    launch: Launch | None = None,
) -> ReplayRecord:
    """Replay ``python train.py ...`` in ``folder``, and return its record.

    ``steps`` is the number of releases, 12 by default, and ``records`` that of the records that are
    changed, 4 by default; of a slow loop they are fewer by default. Noise and lots are compared
    with ``plan``, if there is one.
    ``launch`` is that of an ``interpreter`` which has started, for several replays.
    Raises ``ReplayRefused`` for a loop that cannot be replayed.
    """
    program = parse_command(command, folder)
    _require_fork()
    options = _job(steps, script=program.script, module=program.module, arguments=program.arguments)
    started = interpreter(program.interpreter, *_packages(program))
    with started if launch is None else nullcontext(launch) as launch:
        shown = " ".join(command)
        return _replay(program.folder, program.folder, options, launch, records, plan, shown=shown)


def _job(steps: int | None, **options: Any) -> Job:
    seconds = STEP_SECONDS if steps is None else None
    return Job(folder="", out="", steps=steps or STEPS, step_seconds=seconds, **options)


def _require_fork() -> None:
    if not hasattr(os, "fork"):
        raise ReplayRefused("system_unsupported", "replay needs fork.", "Run it on Linux or macOS.")


@contextmanager
def interpreter(path: str, packages: Sequence[str], others: Sequence[str] = ()) -> Iterator[Launch]:
    """Start a process that imports packages and forks for each run, and yield its launch.

    Of the ``others``, it imports what is installed.
    """
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    process = subprocess.Popen(
        [path, "-m", "affidavit.replay.child", *packages, "--", *others],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )

    def launch(job: Job, deadline: float) -> int | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"job": job.to_json(), "deadline": deadline}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return process.wait()
        answer = process.stdout.readline()
        return json.loads(answer)["status"] if answer else process.wait()

    try:
        yield launch
    finally:
        process.kill()
        process.communicate()


def _packages(program: Program) -> tuple[list[str], list[str]]:
    """Return what the folder's scripts need to have imported, and what the program imports.

    Importing it in each run would take time. Files of the folder are left to the runs.
    """
    paths = sorted(islice(program.folder.glob("**/*.py"), 500))
    text = "".join(path.read_text(errors="ignore") for path in paths)
    own = {part for path in paths for part in (*path.parts, path.stem)}
    imported = _imports(program.source.read_text(errors="ignore"))
    known = [part for name, parts in PACKAGES.items() if name in text for part in parts]
    return known, [name for name in dict.fromkeys(imported) if name.partition(".")[0] not in own]


def _imports(source: str) -> Iterator[str]:
    """Yield the modules that a program imports, and the names that it imports from them."""
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (item.name for item in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module
                yield from (f"{node.module}.{item.name}" for item in node.names)


def _replay(
    folder: Path | None,
    code: Path,
    options: Job,
    launch: Launch,
    records: int | None,
    plan: Plan | None,
    *,
    shown: str,
) -> ReplayRecord:
    execution = None if plan is None else execution_of(plan)
    with tempfile.TemporaryDirectory(prefix="affidavit-replay-") as scratch:
        options = replace(options, clock=time.time())  # keys and certificates are valid then
        runner = _Runner(folder, Path(scratch).resolve(), options, launch)
        return _compare_runs(runner, code, records, execution, shown)


def _compare_runs(
    runner: _Runner, code: Path, requested: int | None, execution: Execution | None, shown: str
) -> ReplayRecord:
    first, out = runner.run(FIRST_DEADLINE)
    deadline = 30 + 10 * runner.seconds
    if first["ended"].startswith("by "):
        raise ReplayRefused(
            "loop_failed",
            f"the loop ended {first['ended']} ({first['ended_at']}).",
            "Start it by itself, with its data, and correct this."
            if (of_replay := _remedy_in_replay(first["ended"])) is None
            else of_replay,
        )
    is_slow = runner.end_as(first)
    runner.stop_before(_neighbours(first, requested or RECORDS), deadline, str(out))
    control, _ = runner.run(deadline, first=str(out))
    records = requested or _records_within(first["seconds"], control["seconds"])
    is_slow |= records < (requested or RECORDS)
    neighbours = _neighbours(first, records)
    unstable = Unstable.of(first, control)
    findings = noise_findings(first) + lot_findings(first)
    if execution is not None:
        findings += plan_findings(first, execution)
    largest: float | None = None
    removed: Record | None = None
    sums: Path | None = None
    for neighbour in neighbours:
        second, place = runner.run(
            deadline,
            first=str(out),
            neighbour=neighbour,
            removed=None if sums is None else str(sums),
        )
        if neighbour.kind == "removed":
            if sums is not None:
                shutil.rmtree(sums)
            removed, sums = second, place
        if second["ended"].startswith(f"by {NotChanged.__name__}: "):
            raise ReplayRefused(
                "record_not_changed",
                f"replay cannot change a record {second['ended'].partition(': ')[2]}.",
                "Mark the records with a line: x, y = affidavit.records(x, y).",
            )
        differences, moved = compare(first, second, unstable, neighbour, removed)
        new = [item for item in differences if _is_new(item, findings)]
        if any(item.refutes for item in new):
            watch = _watch_of(new)
            limit = deadline if watch is None else 3 * deadline
            again, _ = runner.run(limit, first=str(out), watch=watch)
            repeated, _ = runner.run(limit, first=str(out), watch=watch, neighbour=neighbour)
            unstable |= Unstable.of(first, again) | Unstable.of(second, repeated)
            differences, moved = compare(first, second, unstable, neighbour, removed)
            new = [
                _located(item, watch, again, repeated)
                for item in differences
                if _is_new(item, findings)
            ]
        findings += new
        if moved is not None:
            largest = max(largest or 0.0, moved)
    findings = _without_known(findings)
    if not releases_of(first) and not any(item.refutes for item in findings):
        raise ReplayRefused(
            "no_release_seen",
            "the loop made no release that replay knows, and nothing differed.",
            "Mark each release with a line, noisy = affidavit.release(sums, noisy, clip_norm=C, "
            "noise_multiplier=S). Those of Opacus, jax-privacy and TF Privacy need no line.",
        )
    names = tuple(unstable.names())
    checks = checks_of(first, findings, moved=largest is not None, unstable=bool(names))
    verdicts = {check for _, check in checks}
    return ReplayRecord(
        verdict="refuted"
        if "refuted" in verdicts
        else "undecided"
        if "undecided" in verdicts
        else "not_refuted",
        program=shown,
        plan=None if execution is None else digest(execution.plan),
        steps=len(releases_of(first)),
        neighbours=len(neighbours),
        checks=checks,
        largest_move=largest,
        files=_files(first, code),
        findings=tuple(findings),
        notes=tuple(_notes(first, unstable.files_besides_logs(), records if is_slow else None)),
        releases=tuple(sorted({event["origin"] for event in releases_of(first)})),
        ended=first["ended"],
        unstable=names,
        environment=first["environment"],
    )


def _remedy_in_replay(ended: str) -> str | None:
    """Return what to do for a loop that ends so in a replay alone, or None."""
    if any(name in ended for name in ("RANK", "WORLD_SIZE", "MASTER_")):
        return (
            "A replay is one process: set RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 "
            "MASTER_ADDR=localhost MASTER_PORT=29500 for it."
        )
    if ended.startswith(f"by PermissionError: a replay {ONLY_BELOW}"):
        return "Name a path below the folder in which replay starts; each run has a copy of it."
    return None


def _files(first: Record, code: Path) -> tuple[ReplayedFile, ...]:
    """Return the files of ``code`` of which lines ran."""
    ran: dict[str, list[int]] = {}
    for line in first["lines"]["ran"]:
        name = first["lines"]["files"][line >> LINE_BITS]
        ran.setdefault(name, []).append(line & ((1 << LINE_BITS) - 1))
    return tuple(
        ReplayedFile(
            path=name,
            sha256=hashlib.sha256((code / name).read_bytes()).hexdigest(),
            lines=tuple(lines),
        )
        for name, lines in sorted(ran.items())
        if (code / name).is_file()
    )


def _without_known(findings: list[ReplayFinding]) -> list[ReplayFinding]:
    """Return the findings without notes and branches that another one is about."""
    places = {item.where for item in findings if item.code != "branch_by_record"}
    refuting = [item for item in findings if item.refutes]
    return refuting + [
        item
        for item in findings
        if not item.refutes
        and _is_new(item, refuting)
        and (item.code != "branch_by_record" or item.where not in places)
    ]


def _is_new(item: ReplayFinding, findings: list[ReplayFinding]) -> bool:
    """Whether no finding that fails as much has the same code, and subject or line."""
    others = [
        other for other in findings if other.code == item.code and other.refutes >= item.refutes
    ]
    if item.code in ("sensitivity_exceeded", "records_mixed"):
        return not others
    return all((other.subject or other.where) != (item.subject or item.where) for other in others)


def _watch_of(findings: Sequence[ReplayFinding]) -> Watch | None:
    """Return the value to follow to find the line that changes it, if a finding is about one."""
    for item in findings:
        if item.code == "state_differs" and item.subject and item.release is not None:
            return Watch(key=item.subject, release=item.release - 1)
    return None


def _located(
    finding: ReplayFinding, watch: Watch | None, again: Record, repeated: Record
) -> ReplayFinding:
    """Return a finding about the followed value with the line that changes it."""
    if watch is None or finding.code != "state_differs" or finding.subject != watch.key:
        return finding
    values = again["lines"]["watched"], repeated["lines"]["watched"]
    for pair in zip_longest(*values):
        if pair[0] != pair[1]:  # the first to change alone does so by the record
            where, *_ = min(filter(None, pair), key=lambda change: change[2])
            return finding.model_copy(update={"where": where})
    return finding


def _neighbours(first: Record, count: int) -> list[Neighbour]:
    """Choose records, the first to be changed in all ways, and mix records last.

    Preferred are one that a release reads twice, one that is longer than the others of its lot, one
    that is shorter, the first of the first lot, the last of the last, one of the second, one that
    another loader reads, and one that nothing reads.
    """
    private = first["data"]["private"]
    if not private:
        raise ReplayRefused(
            "no_records_seen",
            "replay saw no data set that the private training reads.",
            "Mark the records with a line: x, y = affidavit.records(x, y), or "
            "affidavit.records(dataset). Opacus' make_private is found without it. Of a file that "
            "only defines functions, pass the one that trains to affidavit.replay.run.",
        )
    members = {tuple(item) for data in private for item in data["members"]}
    whole = {data["members"][0][0]: data for data in private}

    def neighbour(kind: Kind, dataset: int, record: int, other: int, **options: Any) -> Neighbour:
        return Neighbour(
            kind=kind,
            dataset=dataset,
            record=record,
            other=other,
            copies=tuple(whole[dataset]["copies"]),
            sources=tuple(whole[dataset]["sources"]),
            variables=tuple(whole[dataset]["variables"]),
            size=whole[dataset]["size"],
            **options,
        )

    events = [event for event in first["events"] if event["kind"] == "lot"]
    lots = [[tuple(item) for item in event["records"]] for event in events if event["is_private"]]
    inside = {item for lot in lots for item in lot}
    read = {tuple(item) for event in events for item in event["records"] if item[0] in whole}
    longest, shortest = (
        {tuple(event[name]) for event in events if name in event} & inside
        for name in ("longest", "shortest")
    )
    twice = [
        tuple(item) for lot in lots_before_releases(first) for item in lot if lot.count(item) > 1
    ]
    draw = random.Random(0)
    chosen: list[tuple[int, int]] = []
    for group in (
        twice,
        longest,
        shortest,
        *(lot[:1] for lot in lots[:1]),
        *(lot[-1:] for lot in lots[-1:]),
        *lots[1:2],
        read - inside,
        members - read,
        *reversed(lots),
    ):
        rest = sorted(item for item in set(group) if item not in chosen)
        if rest and len(chosen) < count:
            chosen.append(draw.choice(rest))
    rest = sorted(members - set(chosen))
    chosen += draw.sample(rest, min(len(rest), count - len(chosen)))
    result: list[Neighbour] = []
    for dataset, record in chosen:
        others = sorted(
            at
            for number, at in read | members
            if (number, at) != (dataset, record) and number == dataset
        )
        other = draw.choice(others) if others else record
        has_lots = any(lot[0][0] == dataset for lot in lots if lot)
        result += [
            neighbour(kind, dataset, record, other, drops=kind == "removed" and not has_lots)
            for kind in (LARGEST_CHANGES if result else KINDS)
            if whole[dataset]["is_removable"] or kind != "removed"
        ]
    result.append(replace(result[0], kind="not_finite", drops=False))
    for dataset in sorted({dataset for dataset, _ in chosen}):
        rows = tuple(whole[dataset]["rows"])
        result.append(neighbour("mixed", dataset, 0, 0, rows=rows))
        unread = [at for at in rows or range(whole[dataset]["size"]) if (dataset, at) not in inside]
        if len(unread) in range(FEWEST_MIXED, MOST_MIXED):
            result.append(neighbour("mixed", dataset, unread[0], 0, rows=tuple(unread)))
    return result


def _records_within(first: float, other: float) -> int:
    """Return how many records can be changed in the time for all runs, one at least.

    ``first`` are the seconds of the first run, which one more repeats, and ``other`` those of each
    later one: 7 for the first record, and 2 for each other.
    """
    runs = (ALL_SECONDS - 2 * first - other) / max(other, 1e-3)
    return max(1, min(RECORDS, 1 + int(runs - 7) // 2))


def _notes(
    first: Record, unstable_files: Sequence[str], fewer_records: int | None
) -> Iterator[str]:
    if any(event["origin"].endswith(".add_noise") for event in releases_of(first)):
        yield (
            "divisor_follows_size: Opacus divides by a size that follows the number of records; "
            "replay keeps that number, so it does not test this (opacus#571)."
        )
    for name, where in first["written"].items():
        if name.startswith("outside: "):
            yield f"write_forbidden: {name.removeprefix('outside: ')} was not written ({where})."
    if fewer_records is not None:
        yield (
            f"loop_is_slow: for the time that they take, runs had {first['releases']} releases and "
            f"changed {fewer_records} records; --steps {STEPS} --records {RECORDS} shows more."
        )
    if unstable_files:
        yield (
            f"file_not_compared: {', '.join(unstable_files)} differs between two runs on the same "
            "data, so replay does not show whether it depends on records."
        )
