"""The loop: a certified run from its first step to its last, across crashes.

``train`` binds the run to its certificate, begins or resumes its record, and takes the steps:

    charge t (on the disk) -> lot t -> clipped sums -> noise t, once -> update -> release t

A step that was charged counts whether or not it was finished. When a run goes on, steps that
were charged and are not in the checkpoint are lost: training continues with the step after them,
with its own lot, row of the noise and key. So no key is used for two lots, no row of
correlated noise twice, and there are never more steps than certified. The same is done with
steps that another process may have charged of this run (``affidavit.trainer.settings``).

Guarantees
    * At most T steps are charged in all attempts together; each has a key that no other has.
    * The parameters do not depend on the microbatch or the number of processes, up to rounding.
    * Nothing private is written but to the checkpoint and ``opening.json`` (mode 0600).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from affidavit.certificate import PublicKey, VerificationOptions
from affidavit.plan import Plan
from affidavit.trainer.adapters import Batch, DataAdapter, ModelAdapter
from affidavit.trainer.data.numbers import AuditedData, AuditedModel, WrongData, audit_files
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.errors import Diverged, Interrupted, RunFailure
from affidavit.trainer.noise.chacha import Entropy, Ratchet
from affidavit.trainer.progress import shown
from affidavit.trainer.run_config import RunConfig, bind
from affidavit.trainer.run_folder import checkpoint
from affidavit.trainer.run_folder.run_log import RunLog, holds_a_run
from affidavit.trainer.run_folder.run_writer import RunSecrets, RunWriter
from affidavit.trainer.settings import Settings, Supervision, Trial
from affidavit.trainer.steps.training_state import TrainingState


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended; ``head`` is the digest of the record's last line."""

    ended: str
    charged: int
    released: int
    head: str
    guarantee: str


def train(
    *,
    bundle: bytes,
    trusted: Iterable[PublicKey],
    plan: Plan,
    data: DataAdapter,
    model: ModelAdapter,
    out: Path,
    settings: Settings | None = None,
    resume: bool = False,
    quiet: bool = False,
    peers: Peers | None = None,
    now: datetime | None = None,
    options: VerificationOptions | None = None,
    entropy: Entropy = os.urandom,
    supervision: Supervision | None = None,
    trial: Trial | None = None,
) -> Outcome:
    """Train what ``bundle`` certifies of ``plan``, and write record and weights to ``out``.

    ``trial`` says which search this is a repetition of.
    Raises ``NotCertified``, ``Interrupted``, ``Diverged`` or another ``RunFailure``, and
    ``UnsupportedModel`` or ``MixedRecords`` for a model that does not keep records apart.
    """
    settings = settings or Settings()
    config = bind(
        bundle,
        trusted,
        plan,
        records=len(data),
        most_of_a_user=getattr(data, "most_of_a_user", None),
        now=now,
        options=options,
        search=trial is not None,
    )
    run = Run(
        config=config,
        model=model,
        data=data,
        settings=settings,
        peers=peers or Peers.alone(settings.device_type),
        quiet=quiet,
        entropy=entropy,
        supervision=supervision or Supervision(),
        trial=trial,
    )
    try:
        return run.steps(run.entered(out, resume=resume))
    finally:
        run.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """What follows a step: a checkpoint, a digest of the parameters."""

    keep: bool
    digest: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A run that has its record, before step ``first``."""

    training: TrainingState
    first: int
    secrets: RunSecrets


class Run:
    """One attempt at a run, on one rank; only rank 0 has a writer."""

    def __init__(
        self,
        *,
        config: RunConfig,
        model: ModelAdapter,
        data: DataAdapter,
        settings: Settings,
        peers: Peers,
        quiet: bool,
        entropy: Entropy,
        supervision: Supervision,
        optimizer: torch.optim.Optimizer | None = None,
        collated: Callable[[Tensor], Batch] | None = None,
        trial: Trial | None = None,
    ) -> None:
        self._optimizer, self._collated, self._trial = optimizer, collated, trial
        self._audit: tuple[AuditedData, AuditedModel] | None = None
        self.config, self._model, self._data = config, model, data
        self._settings, self._peers = settings, peers
        self.shows_private = settings.show_private
        self._quiet = quiet or not peers.is_leader
        self._entropy, self._supervision = entropy, supervision
        self._checkpoints = checkpoint.CheckpointSchedule(settings.checkpoint_every)
        self._digests = checkpoint.CheckpointSchedule(settings.digest_every)
        self._run_log: RunLog | None = None
        self._open_writer: RunWriter | None = None
        self._machine: TrainingState | None = None

    def entered(self, out: Path, *, resume: bool | None) -> Begun:
        """The run in ``out``, resumed or begun; by default as what rank 0 finds there requires."""
        if resume is None:
            resume = self._peers.run_on_leader(lambda: holds_a_run(out))
        return self.resumed(out) if resume else self.begun(out)

    def begun(self, out: Path) -> Begun:
        """A run from its first step that nobody else may have charged."""
        charged = self._supervision.charged
        _require_anew(self.config, charged)
        secrets = self._peers.run_on_leader(lambda: RunSecrets.fresh(self._entropy))
        training = self._built(secrets)
        if training.shards is None:
            training.load(
                checkpoint.unpacked(
                    self._peers.run_on_leader(lambda: checkpoint.packed(training.state()))
                )
            )
        else:
            shared = self._peers.run_on_leader(
                lambda: checkpoint.packed(training.replicated_state())
            )
            training.load_replicated_state(checkpoint.unpacked(shared))
        parameters = training.digest()

        def begin() -> None:
            self._run_log = RunLog.begun(out)
            self._open_writer = self._written_to(self._run_log, secrets)
            canaries = None if self._audit is None else self._audit[0].canaries.commitment
            self._writer.header(training, self._data, secrets.run, parameters, canaries=canaries)

        self._peers.run_on_leader(begin)
        self._keep(training, 0, secrets, parameters)
        if charged:
            secrets = self._past(training, secrets, first=0, known=0, charged=charged)
        return Begun(training=training, first=charged, secrets=secrets)

    def resumed(self, out: Path) -> Begun:
        """A run from its checkpoint; what was charged after it is lost."""

        def reopen() -> tuple[bytes, str | None, int]:
            run_log = self._run_log = RunLog.resumed(out)
            _require_going_on(run_log)
            state, folder = checkpoint.load(run_log)
            secrets = RunSecrets.of_state(state["secrets"])
            self._open_writer = self._written_to(run_log, secrets)
            return checkpoint.packed(state), folder, run_log.progress.charged

        content, folder, charged = self._peers.run_on_leader(reopen)
        state = checkpoint.unpacked(content)
        secrets = RunSecrets.of_state(state["secrets"])
        training = self._built(secrets)
        self._peers.run_on_leader(lambda: self._writer.require_same_run(training, self._data))
        if folder is not None:
            state = checkpoint.load_sharded(out / folder, state, training.shards)
        training.load(state)
        known, charged = charged, _all_charged(self.config, charged, self._supervision)
        secrets = self._past(training, secrets, first=state["step"], known=known, charged=charged)
        return Begun(training=training, first=charged, secrets=secrets)

    def _past(
        self, training: TrainingState, secrets: RunSecrets, *, first: int, known: int, charged: int
    ) -> RunSecrets:
        """Pass over the steps from ``first`` on that were ``charged``, and stir the next key.

        Those up to ``known`` are in the record; the others are written there now, each as one
        that was charged and lost.
        """
        parameters, ratchet = training.digest(), secrets.ratchet
        others: list[tuple[int, Ratchet]] = []
        for lost in range(first, charged):
            training.skip_step(lost, ratchet)
            if lost >= known:
                others.append((lost, ratchet))
            ratchet = ratchet.next()
        ratchet = self._peers.run_on_leader(lambda: ratchet.reseeded(self._entropy))
        secrets = replace(secrets, ratchet=ratchet)

        def go_on() -> None:
            for lost, key in others:
                self._writer.resumed(lost, first, parameters, durable=False)
                self._writer.charge(lost, training.public_parameters(lost), key, durable=False)
            self._writer.resumed(charged, first, parameters)

        self._peers.run_on_leader(go_on)
        self._keep(training, charged, secrets, parameters)
        return secrets

    def _keep(
        self, training: TrainingState, step: int, secrets: RunSecrets, parameters: str
    ) -> None:
        """A checkpoint of the state before ``step``, with the key of that step."""

        def state() -> checkpoint.State:
            return {"step": step, "secrets": secrets.as_state(), **training.state()}

        def log() -> RunLog:
            return self._writer.run_log

        at: Any = {"step": step, "parameters": parameters}
        if training.shards is None:
            self._peers.run_on_leader(lambda: checkpoint.save(log(), state(), **at))
            return
        room = Path(
            self._peers.run_on_leader(lambda: mkdtemp(prefix="checkpoint-", dir=log().folder))
        )
        digest = checkpoint.save_sharded(room, state(), self._peers)
        self._peers.run_on_leader(lambda: checkpoint.adopt(log(), room.name, digest, **at))

    def _built(self, secrets: RunSecrets) -> TrainingState:
        """The training; the plan's canaries are put into data and model first."""
        if (canaries := secrets.canaries(self.config.plan)) is not None:
            try:
                self._audit = AuditedData.of(self._data, canaries), AuditedModel(self._model)
            except WrongData as error:
                raise RunFailure("unsupported", str(error)) from None
            self._data, self._model = self._audit
        self._machine = TrainingState(
            self.config,
            self._model,
            self._data,
            settings=self._settings,
            peers=self._peers,
            keys=secrets.keys,
            optimizer=self._optimizer,
        )
        try:
            self._machine.require_separate_records(self._model, self._collated)
        except torch.OutOfMemoryError:
            raise RunFailure(
                "out_of_memory",
                f"out of memory at --microbatch {self._settings.microbatch} before the first step; "
                "use a smaller --microbatch.",
            ) from None
        return self._machine

    def _written_to(self, run_log: RunLog, secrets: RunSecrets) -> RunWriter:
        performance = self._settings.as_entry(ranks=self._peers.size)
        return RunWriter(run_log, secrets.opening, self.config, performance, self._trial)

    @property
    def _writer(self) -> RunWriter:
        assert self._open_writer is not None  # only rank 0 asks, once the run log is open
        return self._open_writer

    def steps(self, begun: Begun) -> Outcome:
        """Every step from the first; raises as ``train``."""
        training, first, secrets = begun.training, begun.first, begun.secrets
        steps = self.config.execution.steps
        progress = nullcontext() if self._quiet else shown(steps, self.config.summary)
        with progress as show, _asked_to_stop(self._supervision.stop) as requested:
            for step in range(first, steps):
                due = self.charged(training, step, secrets, requested)
                if due is None and self._supervision.stop is not None:
                    return self.ended_by("stopped", training)
                if due is None:
                    raise Interrupted(
                        "interrupted",
                        f"stopped on request before step {step + 1} of {steps}; continue with "
                        "--resume.",
                    )
                losses: list[Tensor] = []
                seen = losses.append if self.shows_private else lambda _: None
                try:
                    records = training.step(step, secrets.ratchet, seen)
                except torch.OutOfMemoryError:
                    raise RunFailure(
                        "out_of_memory",
                        f"out of memory at --microbatch {self._settings.microbatch}; resume with "
                        "--resume and a smaller --microbatch. The step stays charged.",
                    ) from None
                except Diverged:
                    self.ended_by("diverged", training)
                    raise
                secrets = self.taken(training, step, records, secrets, due)
                if show is not None:
                    show(step + 1, float(torch.cat(losses).mean()) if losses else None)
        return self.ended_by("completed", training)

    def charged(
        self,
        training: TrainingState,
        step: int,
        secrets: RunSecrets,
        stop_requested: Callable[[], bool],
    ) -> Due | None:
        """Charge ``step``; if a stop was requested, write a checkpoint instead.

        Returns what is due once the step is over, the same on every rank.
        """
        done, last = step + 1, step + 1 == self.config.execution.steps

        def charge() -> Due | None:
            if stop_requested() or not self._supervision.allows(step, stop_requested):
                return None
            public = training.public_parameters(step)
            self._writer.charge(step, public, secrets.ratchet)
            keep = not last and self._checkpoints.due(done)
            return Due(keep=keep, digest=keep or last or self._digests.due(done))

        due = self._peers.run_on_leader(charge)
        if due is None and self._supervision.stop is None:
            self._keep(training, step, secrets, training.digest())
        return due

    def taken(
        self, training: TrainingState, step: int, records: int, secrets: RunSecrets, due: Due
    ) -> RunSecrets:
        """Record the end of ``step``, and write a checkpoint if one is due.

        Returns the secrets of the next step.
        """
        digest, secrets = "", replace(secrets, ratchet=secrets.ratchet.next())
        if due.digest:
            with self._digests.timed():
                digest = training.digest()
            self._peers.require_same(digest)
        counts = training.clip_counts
        self._peers.run_on_leader(
            lambda: self._writer.release(step, records, digest or None, counts)
        )
        if due.keep:
            with self._checkpoints.timed():
                self._keep(training, step + 1, secrets, digest)
        return secrets

    def ended_by(self, ended: str, training: TrainingState) -> Outcome:
        """Write the weights unless the run diverged, and the last line, on rank 0."""
        weights = None if ended == "diverged" else training.weights()
        parameters, seen = training.digest(), training.noise_entry()
        audit = None if weights is None else self._audit
        # Computed on every rank: each may hold a part of the model.
        files = {} if audit is None else audit_files(*audit)

        def end() -> Outcome:
            self._writer.end(
                ended, weights=weights, files=files, parameters=parameters, noise_test=seen
            )
            progress = self._writer.run_log.progress
            return Outcome(
                ended=ended,
                charged=progress.charged,
                released=progress.released,
                head=progress.head,
                guarantee=self.config.summary,
            )

        return self._peers.run_on_leader(end)

    def close(self) -> None:
        """Give back the folder and the model's layers."""
        if self._machine is not None:
            self._machine.close()
        if self._run_log is not None:
            self._run_log.close()


def _require_going_on(run_log: RunLog) -> None:
    if run_log.progress.ended is not None:
        checkpoint.remove(run_log.folder)  # the run may have died just before it did that
        raise RunFailure(
            "ended",
            f"the run in {run_log.folder} has ended ({run_log.progress.ended}); there is nothing "
            "to resume.",
        )


def _require_anew(config: RunConfig, charged: int) -> None:
    """Raise unless a run of which others may have charged steps may be begun once more."""
    _require_certified(config, charged)
    if charged and not config.execution.has_independent_steps:
        raise RunFailure(
            "not_anew",
            f"{charged} steps were charged elsewhere, and under this plan's lots or noise the run "
            "can only continue from their checkpoint. Resume where that checkpoint is.",
        )


def _all_charged(config: RunConfig, known: int, supervision: Supervision) -> int:
    """The steps that were charged by this record, and by others before."""
    _require_certified(config, supervision.charged)
    if supervision.allowance is not None and known > supervision.charged:
        raise RunFailure(
            "beyond_allowance",
            f"the record charges {known} steps, but only {supervision.charged} were granted.",
        )
    return max(known, supervision.charged)


def _require_certified(config: RunConfig, charged: int) -> None:
    if charged > config.execution.steps:
        raise RunFailure(
            "too_many_steps",
            f"{charged} steps were charged, but only {config.execution.steps} are certified.",
        )


@contextmanager
def _asked_to_stop(stop: Path | None) -> Iterator[Callable[[], bool]]:
    """Whether the file ``stop`` exists; without one, whether SIGINT or SIGTERM came.

    A second signal ends the process at once.
    """
    if stop is not None:
        yield stop.exists
        return
    requested: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def hear(number: int, _frame: FrameType | None) -> None:
        requested.append(number)
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, hear)
    except ValueError:  # not the main thread, which alone may
        pass
    try:
        yield lambda: bool(requested)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
