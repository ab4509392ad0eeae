"""The loop: a certified run from its first step to its last, through crashes if need be.

``train`` binds the run to its certificate, begins or resumes its record, and takes the steps:

    charge t (on the disk) -> lot t -> clipped sums -> noise t, once -> update -> release t

A step that was charged counts whether or not it was finished. When a run goes on, steps that
were charged and are not in the checkpoint are lost: training goes on with the step after them,
with its own lot, row of the noise and key. So no key is used for two lots, no row of
correlated noise twice, and there are never more steps than certified. The same is done with
steps that another process may have charged of this run (``affidavit.trainer.supervision``).

Guarantees
    * At most T steps are charged in all attempts together; each has a key that no other has.
    * The parameters do not depend on the microbatch or the number of processes, up to rounding.
    * Nothing private is written but to the checkpoint and ``opening.json`` (mode 0600).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from affidavit.certificate import PublicKey, VerificationOptions
from affidavit.plan import Plan
from affidavit.trainer import checkpoint
from affidavit.trainer.adapters import DataAdapter, ModelAdapter
from affidavit.trainer.binding import Bound, bind
from affidavit.trainer.distributed import Peers
from affidavit.trainer.failures import Diverged, Interrupted, RunFailure
from affidavit.trainer.journal import Journal
from affidavit.trainer.keeper import Keeper, RunSecrets
from affidavit.trainer.machine import Machine
from affidavit.trainer.progress import Quiet, Shown
from affidavit.trainer.ratchet import Entropy, Ratchet
from affidavit.trainer.settings import Settings
from affidavit.trainer.sparing import Sparing
from affidavit.trainer.supervision import Allowance, Supervision


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
    demands: VerificationOptions | None = None,
    entropy: Entropy = os.urandom,
    supervision: Supervision | None = None,
) -> Outcome:
    """Train what ``bundle`` certifies of ``plan``, and write record and weights to ``out``.

    Raises ``NotCertified``, ``Interrupted``, ``Diverged`` or another ``RunFailure``, and
    ``UnsupportedModel`` or ``MixedRecords`` for a model that does not keep records apart.
    """
    settings = settings or Settings()
    bound = bind(bundle, trusted, plan, records=len(data), now=now, demands=demands)
    run = _Run(
        bound=bound,
        model=model,
        data=data,
        settings=settings,
        peers=peers or Peers.alone(settings.device_type),
        quiet=quiet,
        entropy=entropy,
        supervision=supervision or Supervision(),
    )
    try:
        return run.resumed(out) if resume else run.begun(out)
    finally:
        run.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Due:
    """What follows a step: a checkpoint, a digest of the parameters."""

    keep: bool
    digest: bool


class _Run:
    """One attempt at a run, on one rank; only rank 0 has a keeper."""

    def __init__(
        self,
        *,
        bound: Bound,
        model: ModelAdapter,
        data: DataAdapter,
        settings: Settings,
        peers: Peers,
        quiet: bool,
        entropy: Entropy,
        supervision: Supervision,
    ) -> None:
        self._bound, self._model, self._data = bound, model, data
        self._settings, self._peers = settings, peers
        self._quiet = quiet or not peers.leads
        self._entropy, self._supervision = entropy, supervision
        self._allowance = Allowance(supervision.allowance)
        self._checkpoints = Sparing(settings.checkpoint_every)
        self._digests = Sparing(settings.digest_every)
        self._performance = settings.as_entry(ranks=peers.size)
        self._journal: Journal | None = None
        self._kept: Keeper | None = None
        self._machine: Machine | None = None

    def begun(self, out: Path) -> Outcome:
        """A run from its first step that nobody else may have charged."""
        charged = self._supervision.charged
        _require_anew(self._bound, charged)
        secrets = self._peers.led(lambda: RunSecrets.fresh(self._entropy))
        machine = self._built(secrets)
        machine.load(
            checkpoint.unpacked(self._peers.led(lambda: checkpoint.packed(machine.state())))
        )

        def begin() -> None:
            self._journal = Journal.begun(out)
            self._kept = Keeper(self._journal, secrets.opening)
            self._kept.header(self._bound, machine, self._data, secrets.run, self._performance)
            self._kept.checkpoint(machine, 0, secrets)

        self._peers.led(begin)
        if charged:
            secrets = self._past(machine, secrets, first=0, known=0, charged=charged)
        return self._steps(machine, charged, secrets)

    def resumed(self, out: Path) -> Outcome:
        """A run from its checkpoint; what was charged after it is lost."""

        def reopen() -> tuple[bytes, int]:
            journal = self._journal = Journal.resumed(out)
            _require_going_on(journal)
            state = checkpoint.load(journal)
            opening = RunSecrets.of_state(state["secrets"]).opening
            self._kept = Keeper(journal, opening)
            return checkpoint.packed(state), journal.standing.charged

        content, charged = self._peers.led(reopen)
        state = checkpoint.unpacked(content)
        secrets = RunSecrets.of_state(state["secrets"])
        machine = self._built(secrets)
        self._peers.led(lambda: self._keeper.require_same_run(self._bound, machine, self._data))
        machine.load(state)
        known, charged = charged, _all_charged(self._bound, charged, self._supervision)
        secrets = self._past(machine, secrets, first=state["step"], known=known, charged=charged)
        return self._steps(machine, charged, secrets)

    def _past(
        self, machine: Machine, secrets: RunSecrets, *, first: int, known: int, charged: int
    ) -> RunSecrets:
        """Pass over the steps from ``first`` on that were ``charged``, and stir the next key.

        Those up to ``known`` are in the record; the others are written there now, each as one
        that was charged and lost.
        """
        parameters, ratchet = machine.digest(), secrets.ratchet
        others: list[tuple[int, Ratchet]] = []
        for lost in range(first, charged):
            machine.pass_over(lost, ratchet)
            if lost >= known:
                others.append((lost, ratchet))
            ratchet = ratchet.next()
        ratchet = self._peers.led(lambda: ratchet.stirred(self._entropy))
        secrets = replace(secrets, ratchet=ratchet)

        def go_on() -> None:
            how = self._performance
            for lost, key in others:
                self._keeper.resumed(lost, first, parameters, how, durable=False)
                public = machine.public(lost)
                self._keeper.charge(lost, self._bound.plan_digest, public, key, durable=False)
            self._keeper.resumed(charged, first, parameters, how)
            self._keeper.checkpoint(machine, charged, secrets)

        self._peers.led(go_on)
        return secrets

    def _built(self, secrets: RunSecrets) -> Machine:
        self._machine = Machine(
            self._bound,
            self._model,
            self._data,
            settings=self._settings,
            peers=self._peers,
            keys=secrets.keys,
        )
        self._machine.require_apart(self._model)
        return self._machine

    @property
    def _keeper(self) -> Keeper:
        assert self._kept is not None  # asked on rank 0 alone, with the journal open
        return self._kept

    def _steps(self, machine: Machine, first: int, secrets: RunSecrets) -> Outcome:
        steps = self._bound.execution.steps
        shown = Quiet() if self._quiet else Shown(steps, self._bound.said)
        with shown, _asked_to_stop() as asked:
            for step in range(first, steps):
                due = self._charged(machine, step, secrets, asked)
                if due is None and self._supervision.ends:
                    return self._peers.led(lambda: self._ended(machine, "stopped"))
                if due is None:
                    raise Interrupted(
                        "interrupted",
                        f"stopped before step {step + 1} of {steps}, as it was asked to; go on "
                        "with --resume.",
                    )
                loss = _Loss(self._settings.show_private)
                try:
                    records = machine.step(step, secrets.ratchet, loss.see)
                except torch.OutOfMemoryError:
                    raise RunFailure(
                        "out_of_memory",
                        f"a microbatch of {self._settings.microbatch} records does not fit; go on "
                        "with --resume and a smaller --microbatch. The step stays charged.",
                    ) from None
                except Diverged:
                    self._peers.led(lambda: self._keeper.end("diverged", machine))
                    raise
                secrets = replace(secrets, ratchet=secrets.ratchet.next())
                self._taken(machine, step, records, secrets, due)
                shown.step(step + 1, loss.mean)
        return self._peers.led(lambda: self._ended(machine, "completed"))

    def _charged(
        self, machine: Machine, step: int, secrets: RunSecrets, asked: Callable[[], bool]
    ) -> _Due | None:
        """Charge ``step``, unless somebody asked to stop; then keep what there is.

        Returns what is due once the step is over, the same on every rank.
        """
        done, last = step + 1, step + 1 == self._bound.execution.steps

        def charge() -> _Due | None:
            if asked() or not self._allowance.waited_for(step, asked):
                if not self._supervision.ends:
                    self._keeper.checkpoint(machine, step, secrets)
                return None
            public = machine.public(step)
            self._keeper.charge(step, self._bound.plan_digest, public, secrets.ratchet)
            keep = not last and self._checkpoints.due(done)
            return _Due(keep=keep, digest=keep or last or self._digests.due(done))

        return self._peers.led(charge)

    def _taken(
        self, machine: Machine, step: int, records: int, secrets: RunSecrets, due: _Due
    ) -> None:
        """``step`` is over: say what it came to, and keep it if it is time."""
        digest = None
        if due.digest:
            with self._digests.timed():
                digest = machine.digest()
            self._peers.require_same(digest)

        def say() -> None:
            self._keeper.release(step, records, digest)
            if due.keep:
                with self._checkpoints.timed():
                    self._keeper.checkpoint(machine, step + 1, secrets)

        self._peers.led(say)

    def _ended(self, machine: Machine, ended: str) -> Outcome:
        self._keeper.end(ended, machine)
        standing = self._keeper.journal.standing
        return Outcome(
            ended=ended,
            charged=standing.charged,
            released=standing.released,
            head=standing.head,
            guarantee=self._bound.said,
        )

    def close(self) -> None:
        """Give back the folder and the model's layers."""
        if self._machine is not None:
            self._machine.close()
        if self._journal is not None:
            self._journal.close()


def _require_going_on(journal: Journal) -> None:
    if journal.standing.ended is not None:
        checkpoint.remove(journal.folder)  # the run may have died just before it did that
        raise RunFailure(
            "ended",
            f"the run in {journal.folder} has ended ({journal.standing.ended}); there is nothing "
            "to go on with.",
        )


def _require_anew(bound: Bound, charged: int) -> None:
    """Raise unless a run of which others may have charged steps may be begun once more."""
    _require_certified(bound, charged)
    if charged and not bound.execution.steps_stand_alone:
        raise RunFailure(
            "not_anew",
            f"{charged} steps were charged elsewhere, and with this plan's lots or noise those "
            "after them have to go on from their checkpoint. Go on where that is.",
        )


def _all_charged(bound: Bound, known: int, supervision: Supervision) -> int:
    """The steps that were charged by this record, and by others before."""
    _require_certified(bound, supervision.charged)
    if supervision.allowance is not None and known > supervision.charged:
        raise RunFailure(
            "beyond_allowance",
            f"the record charges {known} steps, and {supervision.charged} were allowed.",
        )
    return max(known, supervision.charged)


def _require_certified(bound: Bound, charged: int) -> None:
    if charged > bound.execution.steps:
        raise RunFailure(
            "too_many_steps",
            f"{charged} steps were charged before, and {bound.execution.steps} are certified.",
        )


class _Loss:
    """The mean loss of a step's records, where it may be shown at all."""

    def __init__(self, shown: bool) -> None:
        self._shown, self._sum, self._records = shown, 0.0, 0

    def see(self, losses: Tensor) -> None:
        """The losses of one microbatch."""
        if self._shown:
            self._sum += float(losses.sum())
            self._records += len(losses)

    @property
    def mean(self) -> float | None:
        """None where it may not be shown, or there was no record."""
        return self._sum / self._records if self._records else None


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM came; a second one ends the process at once."""
    asked: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def hear(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, hear)
    except ValueError:  # not the main thread, which alone may
        pass
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
