"""One run, from its claim to its report.

1. The certificate is fetched with the status list and verified here, with the worker's own
   keys: it must be certified, valid, not called back, and the one that the run is about.
   Where somebody had the run before, what it needs of theirs is copied.
2. The queue is told that the run begins or goes on; it checks everything again in one
   transaction, and the run's budget is committed. From here on the run costs something.
3. The trainer runs as a process, which verifies once more and refuses anything but the plan.
   Meanwhile the lease is renewed with the number of steps charged so far, and the trainer
   is told how many it may charge (``affidavit.worker.watch``).
4. The record is held against the certificate, sent, signed with the weights' digest, and
   reported. A run whose record does not end is given back where another attempt may help (the
   trainer was killed, or could not write), and else given up and charged in full.

When the lease is lost the trainer is killed, and nothing is reported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from affidavit.certificate import (
    Conformance,
    Demands,
    KeyFailure,
    SigningPort,
    Trust,
    VerificationError,
    conformance,
    verify,
)
from affidavit.plan import PlanError, canonical_json
from affidavit.worker import executor
from affidavit.worker.failures import why
from affidavit.worker.handover import forget, has_ended, place_of, take_over
from affidavit.worker.provenance import provenance
from affidavit.worker.queue import Job, Queue, Refused, Unreachable
from affidavit.worker.watch import Watch

SECRETS = ("AFFIDAVIT_TOKEN", "AFFIDAVIT_SIGNING_KEY", "AFFIDAVIT_PKCS11_PIN_FILE")
"""What the trainer, which runs other people's models, is not given."""
INSISTENCE = 600.0
"""Seconds for which a report is repeated while the service cannot be reached."""

ALLOWANCE = "allowance"
UNFINISHED = 3
"""What a trainer ends with that may be gone on with."""
PART = 256 * 1024
"""Characters of a record that are sent at once."""

log = logging.getLogger("affidavit.worker")

T = TypeVar("T")


class Source(Queue, Protocol):
    """A queue that also hands out what a run is about."""

    def bundle(self, job: Job) -> bytes:
        """The certificate's signed bundle."""

    def status(self) -> bytes:
        """The status list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What a worker's runs have in common.

    ``lease`` in seconds; ``own_code`` lets runs name data and models as ``python:…``, which is
    code that whoever may ask for a run then has executed here. ``files`` are the folders below
    which runs may name files. ``options`` go to the trainer, which is ``processes`` ranks of one
    run.
    """

    source: Source
    name: str
    outputs: Path
    key: SigningPort
    keys: tuple[Path, ...] = ()
    lease: int = 60
    own_code: bool = False
    files: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()
    processes: int = 1
    pause: float = 0.5


def work(site: Site, job: Job) -> str:
    """Do a claimed run; returns a line for the terminal. Raises ``LeaseLost``."""
    began = datetime.now(UTC)
    try:
        folder, predicate = _prepared(site, job)
        resumes = job.previous is not None and _taken_over(site, job, folder)
    except (VerificationError, KeyFailure, PlanError, Refused, OSError, ValueError) as error:
        code, told = str(getattr(error, "code", "not_prepared")), _printable(str(error))
        again = isinstance(error, OSError)
        insist(lambda: site.source.fail(job, code, told, again=again))
        return f"{code}: {told}"
    try:
        insist(lambda: site.source.start(job, job.plan_digest, place_of(site.outputs)))
    except Refused as error:
        return f"{error.code}: {error}"
    watch = Watch(
        source=site.source,
        job=job,
        record=folder / "run" / "record.jsonl",
        allowance=folder / ALLOWANCE,
        lease=site.lease,
    )
    with (folder / "trainer.log").open("wb") as said:
        ended = executor.run(
            _command(site, job, folder, resumes=resumes),
            said,
            watch,
            environment={key: value for key, value in os.environ.items() if key not in SECRETS},
            pause=site.pause,
        )
    if watch.lost is not None:
        raise watch.lost
    with watch.held():
        return _report(site, job, folder, predicate, ended, watch, began)


def insist(say: Callable[[], T]) -> T:
    """``say`` until the service can be reached, for ``INSISTENCE`` seconds."""
    end, pause = time.monotonic() + INSISTENCE, 0.2
    while True:
        try:
            return say()
        except Unreachable:
            if time.monotonic() > end:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 10.0)


def _prepared(site: Site, job: Job) -> tuple[Path, dict[str, Any]]:
    """The folder of the run with what the trainer reads, and the certificate's predicate."""
    if not site.own_code and any(name.startswith("python:") for name in (job.data, job.model)):
        raise Refused("own_code_refused", "this worker runs built-in data and models only.")
    bundle = insist(lambda: site.source.bundle(job))
    status = insist(site.source.status)
    trusted = Trust(site.keys).public_keys()
    found = verify(bundle, trusted, demands=Demands(status=status, require_status=True))
    predicate: dict[str, Any] = found.statement["predicate"]
    (subject,) = found.statement["subject"]
    if predicate["verdict"] != "certified":
        raise Refused("not_certified", f"the verdict is {predicate['verdict']}.")
    if predicate["certificate_id"] != job.certificate:
        raise Refused("other_certificate", "the bundle is of another certificate.")
    if "sha256:" + subject["digest"]["sha256"] != job.plan_digest:
        raise Refused("other_plan", "the bundle is of another plan.")
    folder = _folder(site, job, job.fence)
    folder.mkdir(mode=0o700, parents=True)
    (folder / "bundle.json").write_bytes(bundle)
    (folder / "status.json").write_bytes(status)
    (folder / "plan.json").write_bytes(canonical_json(predicate["plan"]))
    return folder, predicate


def _folder(site: Site, job: Job, fence: int) -> Path:
    """Where the attempt of that token is kept."""
    return site.outputs / job.output / f"{job.run}-{fence}"


def _taken_over(site: Site, job: Job, folder: Path) -> bool:
    """Whether the run goes on here; where no step was granted before, it begins."""
    assert job.previous is not None  # else nobody had it
    before = _folder(site, job, job.previous) / "run"
    return job.granted > 0 and take_over(before, folder / "run")


def _command(site: Site, job: Job, folder: Path, *, resumes: bool) -> list[str]:
    """The trainer's command line; every value is joined to its option, so none is one."""
    python = (sys.executable, "-m")
    ranks = (*python, "affidavit.trainer.ranks", str(site.processes))
    rank = (*python, "affidavit.worker.child", "launcher")
    return [
        *((*ranks, *rank) if site.processes > 1 else ()),
        *python,
        "affidavit.trainer",
        f"--certificate={folder / 'bundle.json'}",
        f"--plan={folder / 'plan.json'}",
        f"--status={folder / 'status.json'}",
        f"--data={job.data}",
        f"--model={job.model}",
        f"--out={folder / 'run'}",
        f"--allowance={folder / ALLOWANCE}",
        f"--charged-before={job.granted}",
        "--stop-ends",
        *(["--resume"] if resumes else []),
        *([f"--files={path}" for path in site.files] or ["--no-files"]),
        *(f"--keys={path}" for path in site.keys),
        *site.options,
    ]


def _report(
    site: Site,
    job: Job,
    folder: Path,
    predicate: dict[str, Any],
    ended: executor.Ended,
    watch: Watch,
    began: datetime,
) -> str:
    record = folder / "run" / "record.jsonl"
    if not has_ended(record):
        code = watch.reason or ("trainer_killed" if ended.code < 0 else "trainer_failed")
        message = f"the trainer ended with {ended.code}{why(folder / 'trainer.log')}"
        again = watch.reason is None and (ended.code < 0 or ended.code == UNFINISHED)
        watch.renew()
        insist(lambda: site.source.fail(job, code, message, again=again))
        return f"{code}: {message} See {folder / 'trainer.log'}."
    content = record.read_bytes()
    found = conformance(content, predicate)
    _send(site, job, content)
    envelope = _signed(site, job, folder, found, began)
    insist(lambda: site.source.complete(job, envelope))
    forget(folder.parent, job.run)
    told = "conformant" if found.conformant else "NOT CONFORMANT"
    return f"{told}, {found.steps_to_charge} of {found.steps_certified} steps charged"


def _send(site: Site, job: Job, record: bytes) -> None:
    """Send the record; the run is charged in full where it is refused."""
    text = record.decode("utf-8", "replace")
    try:
        for part, place in enumerate(range(0, len(text), PART), start=1):
            lines = text[place : place + PART]
            insist(lambda part=part, lines=lines: site.source.record(job, part, lines))  # type: ignore[misc]
    except Refused as error:
        log.error("run %s: the record was not taken: %s: %s", job.run, error.code, error)


def _signed(
    site: Site, job: Job, folder: Path, found: Conformance, began: datetime
) -> Mapping[str, Any]:
    weights, record = folder / "run" / "weights.pt", folder / "run" / "record.jsonl"
    with record.open("rb") as stream:
        header = json.loads(stream.readline())
    digest = None
    if weights.exists():
        with weights.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    envelope = provenance(
        job, found, site.key, worker=site.name, weights=digest, header=header, began=began
    )
    try:
        (folder / "provenance.json").write_bytes(canonical_json(envelope))
    except OSError as error:
        log.error("run %s: provenance.json was not written: %s", job.run, error)
    return envelope


def _printable(text: str) -> str:
    return "".join(item if item.isprintable() else " " for item in text)[:500]
