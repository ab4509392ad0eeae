"""The training loop: a certified run from its first step to its last, across crashes.

``train`` binds the run to its certificate, begins or resumes its record, and takes the steps:

    charge t (on disk) -> lot t -> clipped sums -> noise t, once -> update -> release t

A charged step counts whether or not it was finished. When a run is resumed, steps that were charged
after the checkpoint are lost: training continues with the next step, with its own lot, row of the
noise and key. So no key is used for two lots, no row of correlated noise is used twice, and there
are never more steps than certified. The same holds for steps of this run that another process may
have charged (``affidavit.trainer.settings``).

Guarantees
    * At most T steps are charged in all attempts together; each has its own key.
    * The parameters do not depend on the microbatch or the number of processes, up to rounding.
    * Private values are written only to the checkpoint and ``opening.json`` (mode 0600).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor

from affidavit.certificate import VerificationOptions
from affidavit.plan import Plan
from affidavit.trainer.adapters import Batch, DataAdapter, ModelAdapter
from affidavit.trainer.data.numeric_data import AuditedData, AuditedModel, WrongData, audit_files
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.errors import (
    Diverged,
    Interrupted,
    MixedRecords,
    RunFailure,
    UnsupportedModel,
)
from affidavit.trainer.noise.chacha import Entropy, Ratchet
from affidavit.trainer.run_config import RunConfig, bind
from affidavit.trainer.run_folder import checkpoint_storage
from affidavit.trainer.run_folder.run_log import RunLog, has_run
from affidavit.trainer.run_folder.run_writer import RunSecrets, RunWriter
from affidavit.trainer.settings import Settings, Supervision, Trial
from affidavit.trainer.steps.training_state import TrainingState
from affidavit.trust import TrustedKeys

PROGRESS_LINES = 10
"""Lines of progress for a whole run without a terminal."""


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
    trusted: TrustedKeys,
    plan: Plan,
    data: DataAdapter,
    model: ModelAdapter,
    out: Path,
    settings: Settings | None = None,
    resume: bool = False,
    quiet: bool = False,
    peers: Peers | None = None,
    options: VerificationOptions | None = None,
    entropy: Entropy = os.urandom,
    supervision: Supervision | None = None,
    trial: Trial | None = None,
) -> Outcome:
    """Train ``plan`` as ``bundle`` certifies it, and write record and weights to ``out``.

    ``trial`` tells which search the run is a repetition of.
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
        most_users=getattr(data, "most_users_of_a_record", 1),
        own_parts=getattr(data, "own_parts", False),
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
        run.enter(out, resume=resume)
        return run.take_steps()
    finally:
        run.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutputs:
    """What to write after a step: a checkpoint, a digest of the parameters."""

    checkpoint: bool
    digest: bool


@dataclass(kw_only=True, eq=False, repr=False)  # keys and data belong in no message
class Run:
    """One attempt at a run, on one rank; only rank 0 has a writer.

    ``step`` is the next step. ``collated`` makes batches of some of the model's made-up records.
    """

    config: RunConfig
    model: ModelAdapter
    data: DataAdapter
    settings: Settings
    peers: Peers
    entropy: Entropy
    quiet: bool = False
    supervision: Supervision = field(default_factory=Supervision)
    optimizer: torch.optim.Optimizer | None = None
    collated: Callable[[Tensor], Batch] | None = None
    trial: Trial | None = None
    step: int = field(default=0, init=False)
    training: TrainingState = field(init=False)
    secrets: RunSecrets = field(init=False)
    _audit: tuple[AuditedData, AuditedModel] | None = field(default=None, init=False)
    _run_log: RunLog | None = field(default=None, init=False)
    _writer: RunWriter = field(init=False)

    def __post_init__(self) -> None:
        self._checkpoints = checkpoint_storage.CheckpointSchedule(self.settings.checkpoint_every)
        self._digests = checkpoint_storage.CheckpointSchedule(self.settings.digest_every)

    def enter(self, out: Path, *, resume: bool | None) -> None:
        """Begin or resume the run in ``out``; None resumes if rank 0 finds a run there."""
        if resume is None:
            resume = self.peers.run_on_leader(lambda: has_run(out))
        if resume:
            self._resume(out)
        else:
            self._begin(out)

    def _begin(self, out: Path) -> None:
        charged = self.supervision.charged
        _require_restartable(self.config, charged)
        self.secrets = self.peers.run_on_leader(lambda: RunSecrets.generate(self.entropy))
        training = self._build_training()
        if training.shards is None:
            shared = self.peers.run_on_leader(
                lambda: checkpoint_storage.serialize_state(training.state())
            )
            training.load(checkpoint_storage.deserialize_state(shared))
        else:
            shared = self.peers.run_on_leader(
                lambda: checkpoint_storage.serialize_state(training.replicated_state())
            )
            training.load_replicated_state(checkpoint_storage.deserialize_state(shared))
        parameters = training.digest()

        def begin() -> None:
            self._open_writer(RunLog.create(out), self.secrets.opening)
            canaries = None if self._audit is None else self._audit[0].canaries.commitment
            self._writer.write_header(training, self.data, self.secrets.run, parameters, canaries)

        self.peers.run_on_leader(begin)
        self._save_checkpoint(parameters)
        if charged:
            self._skip_steps(known=0, charged=charged)

    def _resume(self, out: Path) -> None:
        def reopen() -> tuple[bytes, str | None, int]:
            run_log = self._run_log = RunLog.reopen(out)
            _require_unfinished(run_log)
            state, folder = checkpoint_storage.load(run_log)
            self._open_writer(run_log, RunSecrets.from_state(state["secrets"]).opening)
            return checkpoint_storage.serialize_state(state), folder, run_log.progress.charged

        content, folder, known = self.peers.run_on_leader(reopen)
        state = checkpoint_storage.deserialize_state(content)
        self.secrets, self.step = RunSecrets.from_state(state["secrets"]), state["step"]
        training = self._build_training()
        self.peers.run_on_leader(lambda: self._writer.require_same_run(training, self.data))
        if folder is not None:
            state = checkpoint_storage.load_sharded(out / folder, state, training.shards)
        training.load(state)
        self._skip_steps(known=known, charged=_count_charged(self.config, known, self.supervision))

    def _open_writer(self, run_log: RunLog, opening: bytes) -> None:
        self._run_log = run_log
        performance = self.settings.as_entry(ranks=self.peers.size)
        self._writer = RunWriter(run_log, opening, self.config, performance, self.trial)

    def _skip_steps(self, *, known: int, charged: int) -> None:
        """Skip the ``charged`` steps from ``step`` on, and mix entropy into the next key.

        The record has the steps up to ``known``. The others are added, each as charged and lost.
        """
        first, parameters, ratchet = self.step, self.training.digest(), self.secrets.ratchet
        missing: list[tuple[int, Ratchet]] = []
        for step in range(first, charged):
            self.training.skip_step(step, ratchet)
            if step >= known:
                missing.append((step, ratchet))
            ratchet = ratchet.next()
        ratchet = self.peers.run_on_leader(lambda: ratchet.reseeded(self.entropy))
        self.secrets, self.step = replace(self.secrets, ratchet=ratchet), charged

        def write() -> None:
            for step, key in missing:
                self._writer.write_resumed(step, first, parameters, durable=False)
                public = self.training.public_parameters(step)
                self._writer.charge(step, public, key, durable=False)
            self._writer.write_resumed(charged, first, parameters)

        self.peers.run_on_leader(write)
        self._save_checkpoint(parameters)

    def _save_checkpoint(self, parameters: str) -> None:
        """Save the state before ``step``, with the key of that step."""

        def state() -> checkpoint_storage.State:
            secrets = self.secrets.as_state()
            return {"step": self.step, "secrets": secrets, **self.training.state()}

        def log() -> RunLog:
            return self._writer.run_log

        at: Any = {"step": self.step, "parameters": parameters}
        if self.training.shards is None:
            self.peers.run_on_leader(lambda: checkpoint_storage.save(log(), state(), **at))
            return
        folder = Path(
            self.peers.run_on_leader(lambda: mkdtemp(prefix="checkpoint-", dir=log().folder))
        )
        digest = checkpoint_storage.save_sharded(folder, state(), self.peers)
        self.peers.run_on_leader(
            lambda: checkpoint_storage.commit_folder(log(), folder.name, digest, **at)
        )

    def _build_training(self) -> TrainingState:
        """Build the training state, with the plan's canaries in data and model."""
        if (canaries := self.secrets.canaries(self.config.plan)) is not None:
            try:
                self._audit = AuditedData.build(self.data, canaries), AuditedModel(self.model)
            except WrongData as error:
                raise RunFailure("unsupported", str(error)) from None
            self.data, self.model = self._audit
        self.training = TrainingState(
            self.config,
            self.model,
            self.data,
            settings=self.settings,
            peers=self.peers,
            keys=self.secrets.keys,
            optimizer=self.optimizer,
        )
        try:
            self.training.require_separate_records(self.model, self.collated)
        except torch.OutOfMemoryError:
            raise RunFailure(
                "out_of_memory",
                f"out of memory at --microbatch {self.settings.microbatch} before the first step; "
                "use a smaller --microbatch.",
            ) from None
        return self.training

    def take_steps(self) -> Outcome:
        """Take all remaining steps; raises like ``train``."""
        steps = self.config.execution.steps
        is_quiet = self.quiet or not self.peers.is_leader
        progress = nullcontext() if is_quiet else _progress(steps, self.config.summary)
        with progress as show, _stop_requests(self.supervision.stop) as is_stop_requested:
            while self.step < steps:
                outputs = self.charge_step(is_stop_requested)
                if outputs is None and self.supervision.stop is not None:
                    return self.end("stopped")
                if outputs is None:
                    raise Interrupted(
                        "interrupted",
                        f"stopped on request before step {self.step + 1} of {steps}; continue "
                        "with --resume.",
                    )
                losses: list[Tensor] = []
                on_losses = losses.append if self.settings.show_private else lambda _: None
                try:
                    with self.noting_strays():
                        records = self.training.step(self.step, self.secrets.ratchet, on_losses)
                except torch.OutOfMemoryError:
                    raise RunFailure(
                        "out_of_memory",
                        f"out of memory at --microbatch {self.settings.microbatch}; resume with "
                        "--resume and a smaller --microbatch. The step stays charged.",
                    ) from None
                except Diverged:
                    self.end("diverged")
                    raise
                self.finish_step(records, outputs)
                if show is not None:
                    show(self.step, float(torch.cat(losses).mean()) if losses else None)
        return self.end("completed")

    @contextmanager
    def noting_strays(self) -> Iterator[None]:
        """Record the code of an error by which the charged step strays from what was probed."""
        try:
            yield
        except (MixedRecords, UnsupportedModel, RunFailure) as error:
            if self.peers.is_leader and not isinstance(error, Diverged):
                self._writer.strayed(self.step, error.code)
            raise

    def charge_step(self, is_stop_requested: Callable[[], bool]) -> StepOutputs | None:
        """Charge the next step and return what to write after it, the same on every rank.

        If a stop was requested, write a checkpoint instead and return None.
        """
        step, done = self.step, self.step + 1
        is_last = done == self.config.execution.steps

        def charge() -> StepOutputs | None:
            if is_stop_requested() or not self.supervision.wait_until_allowed(
                step, is_stop_requested
            ):
                return None
            public = self.training.public_parameters(step)
            self._writer.charge(step, public, self.secrets.ratchet)
            saves = not is_last and self._checkpoints.due(done)
            return StepOutputs(checkpoint=saves, digest=saves or is_last or self._digests.due(done))

        outputs = self.peers.run_on_leader(charge)
        if outputs is None and self.supervision.stop is None:
            self._save_checkpoint(self.training.digest())
        return outputs

    def finish_step(self, records: int, outputs: StepOutputs) -> None:
        """Record the release of the charged step, of a lot of ``records``, and advance."""
        step, digest = self.step, ""
        self.secrets = replace(self.secrets, ratchet=self.secrets.ratchet.next())
        if outputs.digest:
            with self._digests.timed():
                digest = self.training.digest()
            self.peers.require_same(digest)
        counts = self.training.clip_counts
        self.peers.run_on_leader(
            lambda: self._writer.release(step, records, digest or None, counts)
        )
        self.step += 1
        if outputs.checkpoint:
            with self._checkpoints.timed():
                self._save_checkpoint(digest)

    def end(self, ended: str) -> Outcome:
        """Write the weights, unless the run diverged, and the last line of the record."""
        weights = None if ended == "diverged" else self.training.weights()
        parameters, noise_test = self.training.digest(), self.training.noise_entry()
        # All ranks compute the files, because each may hold a part of the model.
        files = {} if self._audit is None or weights is None else audit_files(*self._audit)

        def end() -> Outcome:
            self._writer.end(
                ended, weights=weights, files=files, parameters=parameters, noise_test=noise_test
            )
            progress = self._writer.run_log.progress
            return Outcome(
                ended=ended,
                charged=progress.charged,
                released=progress.released,
                head=progress.head,
                guarantee=self.config.summary,
            )

        return self.peers.run_on_leader(end)

    @property
    def lock(self) -> int | None:
        """The descriptor of the folder's lock, on rank 0."""
        return None if self._run_log is None else self._run_log.lock

    def close(self) -> None:
        """Release the folder and restore the model's layers."""
        if hasattr(self, "training"):
            self.training.close()
        if self._run_log is not None:
            self._run_log.close()


def _require_unfinished(run_log: RunLog) -> None:
    if run_log.progress.ended is not None:
        checkpoint_storage.remove(run_log.folder)  # the run may have died before it removed them
        raise RunFailure(
            "ended",
            f"the run in {run_log.folder} has ended ({run_log.progress.ended}); there is nothing "
            "to resume.",
        )


def _require_restartable(config: RunConfig, charged: int) -> None:
    """Raise unless a run whose first steps others may have charged can start without them."""
    _require_certified_steps(config, charged)
    if charged and not config.execution.has_independent_steps:
        raise RunFailure(
            "not_anew",
            f"{charged} steps were charged elsewhere, and under this plan's lots or noise the run "
            "can only continue from their checkpoint. Resume where that checkpoint is.",
        )


def _count_charged(config: RunConfig, known: int, supervision: Supervision) -> int:
    """Return the number of steps that this record and others before it charged."""
    _require_certified_steps(config, supervision.charged)
    if supervision.allowance is not None and known > supervision.charged:
        raise RunFailure(
            "beyond_allowance",
            f"the record charges {known} steps, but only {supervision.charged} were granted.",
        )
    return max(known, supervision.charged)


def _require_certified_steps(config: RunConfig, charged: int) -> None:
    if charged > config.execution.steps:
        raise RunFailure(
            "too_many_steps",
            f"{charged} steps were charged, but only {config.execution.steps} are certified.",
        )


@contextmanager
def _stop_requests(stop: Path | None) -> Iterator[Callable[[], bool]]:
    """Yield a check whether the file ``stop`` exists or, without one, SIGINT or SIGTERM came.

    A second signal ends the process at once.
    """
    if stop is not None:
        yield stop.exists
        return
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, previous[signal.Signals(number)])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, on_signal)
    except ValueError:  # only the main thread can handle signals
        pass
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _progress(steps: int, summary: str) -> Iterator[Callable[[int, float | None], None]]:
    """Show progress on standard error: a bar on a terminal, otherwise a line now and then.

    The yielded function takes the number of completed steps, and the loss only if the user asked
    for private values on this screen. The loss is never written anywhere else.
    """
    console = Console(stderr=True)
    console.print(f"{summary} after all {steps} steps", highlight=False)
    with Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("training", total=steps)

        def show(done: int, loss: float | None) -> None:
            private = "" if loss is None else f"loss {loss:.4g} (private)"
            bar.update(task, completed=done, description=f"training {private}")
            if bar.disable and (done % max(1, steps // PROGRESS_LINES) == 0 or done == steps):
                console.print(f"step {done} of {steps} {private}".rstrip(), highlight=False)

        yield show
