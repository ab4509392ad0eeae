"""Execute one run, from its claim to its report.

docs/how-to/run-a-worker.md describes what a worker checks and signs. The start of a run commits its
budget. A run without a final record line returns to the queue if a new attempt may help (the
trainer was killed, or could not write); otherwise it fails and is charged in full. If the lease is
lost, the trainer is killed and nothing is reported.

Every attempt at a run has its own folder, ``RUN-FENCE``, and only that attempt writes to it, so a
stale trainer cannot interfere. To resume a run, the record and the checkpoints of the previous
attempt are copied.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from affidavit.certificate import VerificationOptions, verify
from affidavit.evidence import check_conformance, sign_provenance
from affidavit.plan import PlanError, canonical_json
from affidavit.trust import (
    KeyFailure,
    SigningPort,
    TrustRoot,
    VerificationError,
    write_atomically,
)
from affidavit.worker import trainer_process
from affidavit.worker.heartbeat import Heartbeat, has_checkpoint, renew_in_background
from affidavit.worker.lease import Job, Refused
from affidavit.worker.service_client import RunQueueClient

SECRETS = ("AFFIDAVIT_TOKEN", "AFFIDAVIT_SIGNING_KEY", "AFFIDAVIT_PKCS11_PIN_FILE")
"""Environment variables withheld from the trainer, which runs untrusted models."""
ALLOWANCE, STOP = "allowance", "stop"
UNFINISHED = 3
"""Exit code of a trainer whose run may be resumed."""
RECORD = "record.jsonl"
CHECKPOINTS = "checkpoint*"
"""Files, or the folders of a sharded run."""
COPIED_FILES = (CHECKPOINTS, "opening.json", RECORD)
"""Names of the trainer's files, repeated because the worker must not import the trainer. The record
names the checkpoints, so it is copied last."""
MAX_COPY_ATTEMPTS = 10
PART_LENGTH = 256 * 1024
"""Characters of a record sent in one request."""

log = logging.getLogger("affidavit.worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Settings shared by all runs of a worker.

    ``lease`` is in seconds. ``own_code`` allows data and models of the form ``python:…``, so
    that anyone who may submit a run can execute code on this host. Runs may use files in the
    folders ``files``. ``options`` are passed to the trainer, which has ``processes`` ranks on each
    of ``hosts`` nodes of a Ray cluster.
    """

    source: RunQueueClient
    name: str
    outputs: Path
    key: SigningPort
    trust: TrustRoot
    lease: int = 60
    own_code: bool = False
    files: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()
    processes: int = 1
    hosts: int = 1


def run_job(config: WorkerConfig, job: Job) -> bool:
    """Execute a claimed run, and return whether its record conforms.

    Raises ``LeaseLost`` and ``Refused``.
    """
    began, folder = datetime.now(UTC), _folder(config, job, job.fence)
    renew = partial(config.source.renew, job, 0, wants=0, head=None)
    try:
        # Copying a large checkpoint takes longer than a lease.
        with renew_in_background(renew, config.lease):
            predicate = _prepare(config, job, folder)
            # An attempt without granted steps has nothing to resume.
            resumes = bool(job.previous and job.granted) and copy_attempt(
                _folder(config, job, job.previous) / "run", folder / "run"
            )
    except (VerificationError, KeyFailure, PlanError, Refused, OSError, ValueError) as error:
        text = "".join(char if char.isprintable() else " " for char in str(error))[:500]
        code = str(getattr(error, "code", "not_prepared"))
        return _fail(config, job, code, text, again=isinstance(error, OSError))
    # Commits the budget; no step is granted yet.
    started = config.source.report(job, "start", plan_digest=job.plan_digest, wants=0)
    opening = started.get("search")
    if opening is not None:
        write_atomically(folder / "search.json", canonical_json(opening), mode=0o600)
    record = folder / "run" / "record.jsonl"
    heartbeat = Heartbeat(
        source=config.source,
        job=job,
        record=record,
        allowance=folder / ALLOWANCE,
        lease=config.lease,
    )
    with (folder / "trainer.log").open("wb") as output:
        exit_code = trainer_process.run(
            _command(config, job, folder, search=opening is not None, resumes=resumes),
            output,
            heartbeat,
            environment={key: value for key, value in os.environ.items() if key not in SECRETS},
            stop=folder / STOP if opening is None else None,
            pause=min(0.5, config.lease / 6),
        )
    if heartbeat.lost is not None:
        raise heartbeat.lost
    with heartbeat.keep_alive():
        content = record.read_bytes() if record.exists() else b""
        last = content[:-1].rpartition(b"\n")[2]
        if content.endswith(b"\n") and b'"type":"final"' in last:
            return _report(config, job, folder, content, predicate, began)
        code = heartbeat.reason or ("trainer_killed" if exit_code < 0 else "trainer_failed")
        reason = trainer_process.failure_reason(folder / "trainer.log")
        message = f"the trainer exited with {exit_code}{reason}"
        again = heartbeat.reason is None and (exit_code < 0 or exit_code == UNFINISHED)
        return _fail(config, job, code, message, again=again)


def _fail(config: WorkerConfig, job: Job, code: str, message: str, *, again: bool) -> bool:
    log.warning("run %s: %s: %s", job.run, code, message)
    config.source.report(job, "fail", code=code, message=message, again=again)
    return False


def _prepare(config: WorkerConfig, job: Job, folder: Path) -> dict[str, Any]:
    """Write the trainer's inputs to ``folder``, and return the certificate's predicate."""
    if not config.own_code and any(name.startswith("python:") for name in (job.data, job.model)):
        raise Refused("own_code_refused", "this worker only runs built-in data and models.")
    bundle = config.source.bundle(job)
    status = config.source.status()
    options = VerificationOptions(status=status, require_status=True)
    verified = verify(bundle, config.trust.load(), options=options)
    predicate: dict[str, Any] = verified.statement["predicate"]
    (subject,) = verified.statement["subject"]
    if predicate["verdict"] != "certified":
        raise Refused("not_certified", f"the verdict is {predicate['verdict']}.")
    if predicate["certificate_id"] != job.certificate:
        raise Refused("other_certificate", "the bundle contains a different certificate.")
    if "sha256:" + subject["digest"]["sha256"] != job.plan_digest:
        raise Refused("other_plan", "the bundle certifies a different plan.")
    folder.mkdir(mode=0o700, parents=True)
    (folder / "bundle.json").write_bytes(bundle)
    (folder / "status.json").write_bytes(status)
    (folder / "plan.json").write_bytes(canonical_json(predicate["plan"]))
    return predicate


def _folder(config: WorkerConfig, job: Job, fence: int | None) -> Path:
    """Return the folder of the attempt with this fencing token."""
    return config.outputs / job.output / f"{job.run}-{fence}"


def _command(
    config: WorkerConfig, job: Job, folder: Path, *, search: bool, resumes: bool
) -> list[str]:
    """Return the trainer's command; in ``--option=value``, no value is read as an option."""
    python = (sys.executable, "-m")
    inputs = (
        f"--certificate={folder / 'bundle.json'}",
        f"--plan={folder / 'plan.json'}",
        f"--status={folder / 'status.json'}",
        f"--data={job.data}",
        f"--model={job.model}",
        *([f"--files={path}" for path in config.files] or ["--no-files"]),
        *config.trust.arguments(),
        *config.options,
    )
    if search:
        return [*python, "affidavit.trainer.search", f"--out={folder}", *inputs]
    launcher = ("ranks",) if config.hosts == 1 else ("ray_ranks", str(config.hosts))
    program = f"affidavit.trainer.distributed.{launcher[0]}"
    ranks = (*python, program, *launcher[1:], str(config.processes))
    rank = (*python, "affidavit.worker.exec_with_parent", "launcher")
    return [
        *((*ranks, *rank) if config.processes * config.hosts > 1 else ()),
        *python,
        "affidavit.trainer",
        f"--out={folder / 'run'}",
        f"--allowance={folder / ALLOWANCE}",
        f"--charged-before={job.granted}",
        f"--stop={folder / STOP}",
        *(["--resume"] if resumes else []),
        *inputs,
    ]


def _report(
    config: WorkerConfig,
    job: Job,
    folder: Path,
    record: bytes,
    predicate: dict[str, Any],
    began: datetime,
) -> bool:
    """Check and upload the record, sign it with the weights' digest, and complete the run."""
    report = check_conformance(record, predicate)
    text = record.decode("utf-8", "replace")
    try:
        for part, start in enumerate(range(0, len(text), PART_LENGTH), start=1):
            config.source.report(job, "record", part=part, lines=text[start : start + PART_LENGTH])
    except Refused as error:  # a run without a record is charged in full
        log.error("run %s: the record was refused: %s: %s", job.run, error.code, error)
    weights = folder / "run" / "weights.pt"
    digest = None
    if weights.exists():
        with weights.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    envelope = sign_provenance(
        config.key,
        report,
        **job.model_dump(include={"run", "fence", "data", "model"}),
        worker=config.name,
        weights=digest,
        header=json.loads(record.partition(b"\n")[0]),
        began=began,
    )
    try:
        (folder / "provenance.json").write_bytes(canonical_json(envelope))
    except OSError as error:
        log.error("run %s: provenance.json was not written: %s", job.run, error)
    config.source.report(job, "complete", provenance=envelope)
    delete_checkpoints(folder.parent, job.run)
    verdict = "conformant" if report.conformant else "NOT CONFORMANT"
    charged = f"{report.steps_to_charge} of {report.steps_certified} steps charged"
    log.info("run %s: %s, %s", job.run, verdict, charged)
    return report.conformant


def copy_attempt(previous: Path, run: Path) -> bool:
    """Copy the attempt in ``previous`` to ``run``; return False if there is nothing to resume.

    Copies again if a checkpoint changed meanwhile. Raises ``OSError``.
    """
    for _ in range(MAX_COPY_ATTEMPTS):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(mode=0o700)
        versions = _versions(previous)
        for path in (path for name in COPIED_FILES for path in previous.glob(name)):
            with suppress(FileNotFoundError):  # a later checkpoint replaced it
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, run / path.name)
        if _versions(previous) == versions:
            break
    record = run / RECORD
    if record.exists() and has_checkpoint(record.read_bytes()):
        os.sync()
        return True
    shutil.rmtree(run)
    return False


def delete_checkpoints(folder: Path, run: str) -> None:
    """Delete the checkpoints of all attempts at a finished run; they are secret."""
    for path in folder.glob(f"{run}-*/run/{CHECKPOINTS}"):
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()


def _versions(folder: Path) -> list[tuple[str, int, int]]:
    """Return the name, inode and modification time of each checkpoint in a folder."""
    versions = []
    for path in sorted(folder.glob(CHECKPOINTS)):
        with suppress(FileNotFoundError):
            stat = path.stat()
            versions.append((path.name, stat.st_ino, stat.st_mtime_ns))
    return versions
