"""The obligations of a guarded run: a verified certificate and the steps that it allows.

The certificate is verified offline with the user's trusted keys, and compared with the plan if one
is given. From then on the certified plan is the only reference. Plans that a guard cannot enforce
from outside are refused before the first release: correlated noise, several phases, and
additional releases inside the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from affidavit.certificate import (
    STEP_OBLIGATIONS,
    Execution,
    KeyFailure,
    NotTrainable,
    PublicKey,
    StepRequirement,
    TrustRoot,
    VerificationError,
    VerificationOptions,
    certified_execution,
    verify,
)
from affidavit.gate.guard.errors import GuardStop
from affidavit.gate.plan_io import read_bytes, read_plan
from affidavit.plan import MalformedPlan, Phase, Plan, PlanError, digest_of, schedule

Certificate = str | Path | bytes
Keys = str | Path | PublicKey | Sequence[str | Path | PublicKey] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifiedRun:
    """A certificate that may be run: its predicate, its solved plan and its steps."""

    predicate: dict[str, Any]
    plan: Plan
    execution: Execution

    @property
    def certificate_id(self) -> str:
        """The certificate's id."""
        return str(self.predicate["certificate_id"])

    @property
    def plan_digest(self) -> str:
        """The digest of the submitted plan."""
        return digest_of(self.predicate["plan"])

    @property
    def phase(self) -> Phase:
        """The only phase."""
        return self.plan.phases[0]

    @property
    def probability(self) -> Fraction:
        """The sampling probability q of a lot; 1 for full batches."""
        return schedule.sampling_probability(self.plan, self.phase)

    @property
    def divisor(self) -> Fraction:
        """The fixed divisor B of every sum."""
        divisor = schedule.divisor(self.plan, self.phase)
        assert divisor is not None  # checked by certified_run
        return divisor

    def at(self, step: int) -> StepRequirement:
        """What ``step`` must be; raises ``GuardStop`` if it was not certified."""
        if step >= self.execution.steps:
            raise GuardStop(
                "too_many_steps",
                f"all {self.execution.steps} certified steps were taken.",
                "Certify a plan with more steps, and start a new run.",
            )
        return self.execution.at(step)

    def require_size(self, records: int) -> None:
        """Raise ``GuardStop`` unless the data has the certified number of records."""
        if records != self.plan.dataset.size:
            raise GuardStop(
                "dataset_size",
                f"the data has {records} records, but {self.plan.dataset.size} were certified.",
                "Use the certified data set, or certify the plan for this size.",
            )


def certified_run(
    certificate: Certificate,
    *,
    plan: str | Path | Plan | None = None,
    keys: Keys = None,
    options: VerificationOptions | None = None,
    now: datetime | None = None,
) -> CertifiedRun:
    """The run that ``certificate`` allows; raises ``GuardStop`` if it allows none."""
    try:
        raw = certificate if isinstance(certificate, bytes) else read_bytes(str(certificate))
        expected = read_plan(str(plan)).plan if isinstance(plan, str | Path) else plan
        predicate = verify(raw, _trusted(keys), plan=expected, options=options, now=now).predicate
    except VerificationError as error:
        raise GuardStop(error.code, error.message, error.remedy) from None
    except MalformedPlan as error:
        reason = error.reasons[0]
        raise GuardStop(reason.code, reason.message, reason.remedy) from None
    except KeyFailure as failure:
        raise GuardStop("unreadable", str(failure), "Give the issuer's keys (keys=).") from None
    try:
        execution = certified_execution(predicate, STEP_OBLIGATIONS)
    except NotTrainable as error:
        raise GuardStop(error.code, error.message, error.remedy) from None
    except PlanError as error:
        raise GuardStop("open_plan", str(error), "Certify the plan again.") from None
    certified = CertifiedRun(predicate=predicate, plan=execution.plan, execution=execution)
    _require_enforceable(certified)
    return certified


def _trusted(keys: Keys) -> Iterable[PublicKey]:
    trusted = () if keys is None else (keys,) if isinstance(keys, str | Path | PublicKey) else keys
    if keys is not None and not trusted:
        raise GuardStop("bad_argument", "keys is empty.", "Give the issuer's keys, or None.")
    if trusted and all(isinstance(key, PublicKey) for key in trusted):
        return [key for key in trusted if isinstance(key, PublicKey)]
    paths = [Path(key) for key in trusted if isinstance(key, str | Path)]
    if len(paths) != len(trusted):
        raise GuardStop("bad_argument", "keys mixes files and keys.", "Use only one of them.")
    return TrustRoot(paths).public_keys()


def _require_enforceable(certified: CertifiedRun) -> None:
    plan = certified.plan
    for present, feature in (
        (len(plan.phases) > 1, "several phases"),
        (plan.phases[0].noise.kind != "independent", "noise that is correlated across steps"),
        (bool(plan.extra), "additional releases (extra)"),
        (plan.dataset.size is None, "no dataset.size, so that a mean has no divisor"),
    ):
        if present:
            raise GuardStop(
                "unsupported",
                f"the certified plan has {feature}, which a guard cannot enforce.",
                "Train it with affidavit train, or certify a plan without it.",
            )
