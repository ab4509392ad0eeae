"""One run, from its claim to its report.

1. The certificate is fetched with the status list and verified here, with the worker's own
   keys: it must be certified, valid, not called back, and the one that the run is about.
2. The queue is told that the run begins; it checks everything again in one transaction, and
   the run's budget is committed. From here on the run costs something.
3. The trainer runs as a process, which verifies once more and refuses anything but the plan.
   Meanwhile the lease is renewed with the number of steps charged so far.
4. The record is held against the certificate, signed with the weights' digest, and reported.
   A run whose record does not end is given up, and is charged in full.

When the lease is lost the trainer is killed, and nothing is reported.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from affidavit.certificate.conformance import Conformance, conformance
from affidavit.certificate.keys import KeyFailure, SigningPort
from affidavit.certificate.trusting import Trust
from affidavit.certificate.verification import Demands, VerificationError
from affidavit.certificate.verify import verify
from affidavit.plan.canonical import canonical_json
from affidavit.plan.reasons import PlanError
from affidavit.worker import executor
from affidavit.worker.provenance import provenance
from affidavit.worker.queue import Job, LeaseLost, Queue, Refused, Unreachable

SECRETS = ("AFFIDAVIT_TOKEN", "AFFIDAVIT_SIGNING_KEY", "AFFIDAVIT_PKCS11_PIN_FILE")
"""What the trainer, which runs other people's models, is not given."""
INSISTENCE = 600.0
"""Seconds for which a report is repeated while the service cannot be reached."""

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
    code that whoever may ask for a run then has executed here. ``options`` go to the trainer.
    """

    source: Source
    name: str
    outputs: Path
    key: SigningPort
    keys: tuple[Path, ...] = ()
    lease: int = 60
    own_code: bool = False
    options: tuple[str, ...] = ()
    pause: float = 0.5


def work(site: Site, job: Job) -> str:
    """Do a claimed run; returns a line for the terminal. Raises ``LeaseLost``."""
    began = datetime.now(UTC)
    try:
        folder, predicate = _prepared(site, job)
    except (VerificationError, KeyFailure, PlanError, Refused, OSError, ValueError) as error:
        code, told = str(getattr(error, "code", "not_prepared")), _printable(str(error))
        insist(lambda: site.source.fail(job, code, told))
        return f"{code}: {told}"
    try:
        insist(lambda: site.source.start(job, job.plan_digest))
    except Refused as error:
        return f"{error.code}: {error}"
    watch = _Watch(site, job, folder / "run" / "record.jsonl")
    with (folder / "trainer.log").open("wb") as log:
        ended = executor.run(
            _command(site, job, folder),
            log,
            watch,
            environment={key: value for key, value in os.environ.items() if key not in SECRETS},
            pause=site.pause,
        )
    if watch.lost is not None:
        raise watch.lost
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
    folder = site.outputs / job.output / f"{job.run}-{job.fence}"
    folder.mkdir(mode=0o700, parents=True)
    (folder / "bundle.json").write_bytes(bundle)
    (folder / "status.json").write_bytes(status)
    (folder / "plan.json").write_bytes(canonical_json(predicate["plan"]))
    return folder, predicate


def _command(site: Site, job: Job, folder: Path) -> list[str]:
    """The trainer's command line; every value is joined to its option, so none is one."""
    return [
        sys.executable,
        "-m",
        "affidavit.trainer",
        f"--certificate={folder / 'bundle.json'}",
        f"--plan={folder / 'plan.json'}",
        f"--status={folder / 'status.json'}",
        f"--data={job.data}",
        f"--model={job.model}",
        f"--out={folder / 'run'}",
        *(f"--keys={path}" for path in site.keys),
        *site.options,
    ]


@dataclass
class _Watch:
    """What happens to a run from outside while it trains."""

    site: Site
    job: Job
    record: Path
    steps: int = 0
    reason: str | None = None
    lost: LeaseLost | None = None
    _began: float = field(default_factory=time.monotonic)
    _renewed: float = field(default_factory=time.monotonic)
    _read: int = 0

    def __call__(self) -> executor.Stop | None:
        now, limit = time.monotonic(), self.job.time_limit
        if now - self._renewed > self.site.lease / 3:
            self._renewed = now
            self._renew()
        if self.lost is not None:
            return "kill"
        if self.reason is None and limit is not None and now - self._began > limit:
            self.reason = "time_limit"
        return None if self.reason is None else "ask"

    def _renew(self) -> None:
        self._count()
        try:
            if self.site.source.renew(self.job, self.steps) and self.reason is None:
                self.reason = "cancelled"
        except LeaseLost as lost:
            self.lost = lost
        except (Unreachable, Refused):
            pass  # the lease says how long this may go on

    def _count(self) -> None:
        """Steps charged in the whole lines that were written since."""
        try:
            with self.record.open("rb") as stream:
                stream.seek(self._read)
                whole = stream.read().rpartition(b"\n")[0]
        except OSError:
            return
        self.steps += whole.count(b'"type":"charge"')
        self._read += len(whole) + 1 if whole else 0


def _report(
    site: Site,
    job: Job,
    folder: Path,
    predicate: dict[str, Any],
    ended: executor.Ended,
    watch: _Watch,
    began: datetime,
) -> str:
    record = folder / "run" / "record.jsonl"
    found = conformance(record.read_bytes(), predicate) if record.exists() else None
    if found is None or any(each.code == "unfinished" for each in found.findings):
        code = watch.reason or ("trainer_killed" if ended.code < 0 else "trainer_failed")
        message = f"the trainer ended with {ended.code}: {_last_line(folder / 'trainer.log')}"
        insist(lambda: site.source.fail(job, code, message))
        return f"{code}: {message}"
    envelope = _signed(site, job, folder, found, began)
    insist(lambda: site.source.complete(job, envelope))
    told = "conformant" if found.conformant else "NOT CONFORMANT"
    return f"{told}, {found.steps_to_charge} of {found.steps_certified} steps charged"


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
    (folder / "provenance.json").write_bytes(canonical_json(envelope))
    return envelope


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_bytes()[-4000:].splitlines() if line.strip()]
    return _printable(lines[-1].decode(errors="replace") if lines else "it said nothing.")


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)[:500]
