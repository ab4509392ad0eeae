"""The obligations of a guarded run: a verified certificate and the steps that it allows.

The certificate is verified offline with the trusted keys, and compared with the plan if there is
one. Plans that a guard cannot enforce are refused before the first release: correlated noise,
several phases, and additional releases inside the loop.

The parameters of each release and the tensors of each block are compared. Under per-block clipping,
a release of count K has K blocks: a release is one block of all its tensors (count 1), or one block
per tensor (count K).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from affidavit.assessment import (
    FLAT,
    STEP_OBLIGATIONS,
    Execution,
    NotTrainable,
    StepRequirement,
    block_name,
    certified_execution,
)
from affidavit.certificate import VerificationOptions, verify
from affidavit.guard.errors import GuardStop
from affidavit.mechanisms import read_bytes
from affidavit.mechanisms.plan_files import read_plan
from affidavit.plan import MalformedPlan, Phase, Plan, PlanError, digest_of, schedule
from affidavit.trust import (
    KeyFailure,
    TrustedKeys,
    VerificationError,
    trusted_or_own,
)

Certificate = str | Path | bytes


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
        assert divisor is not None  # checked by load_certified_run
        return divisor

    def at(self, step: int) -> StepRequirement:
        """Return the requirements of ``step``; raises ``GuardStop`` if it was not certified."""
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


def load_certified_run(
    certificate: Certificate,
    *,
    plan: str | Path | Plan | None = None,
    trusted: TrustedKeys | None = None,
    options: VerificationOptions | None = None,
) -> CertifiedRun:
    """Verify ``certificate`` and return its run; raises ``GuardStop`` if it allows none."""
    try:
        trusted = trusted_or_own(trusted)
    except TypeError:
        raise GuardStop(
            "bad_argument",
            f"trusted is {type(trusted).__name__}, not keys with the policy under which they are "
            "trusted.",
            "Make it with affidavit.keys.trusted(...).",
        ) from None
    except KeyFailure as failure:
        raise GuardStop("unreadable", str(failure), "Give the issuer's keys (trusted=).") from None
    try:
        raw = certificate if isinstance(certificate, bytes) else read_bytes(str(certificate))
        expected = read_plan(str(plan)).plan if isinstance(plan, str | Path) else plan
        predicate = verify(raw, trusted, plan=expected, options=options).predicate
        execution = certified_execution(predicate, STEP_OBLIGATIONS)
    except (VerificationError, NotTrainable) as error:
        raise GuardStop(error.code, error.message, error.remedy) from None
    except MalformedPlan as error:
        reason = error.reasons[0]
        raise GuardStop(reason.code, reason.message, reason.remedy) from None
    except PlanError as error:
        raise GuardStop("open_plan", str(error), "Certify the plan again.") from None
    certified = CertifiedRun(predicate=predicate, plan=execution.plan, execution=execution)
    _require_enforceable(certified)
    return certified


def _require_enforceable(certified: CertifiedRun) -> None:
    plan = certified.plan
    for present, feature in (
        (len(plan.phases) > 1, "several phases"),
        (plan.phases[0].noise.kind != "independent", "noise that is correlated across steps"),
        (bool(plan.extra), "additional releases (extra)"),
    ):
        if present:
            raise GuardStop(
                "unsupported",
                f"the certified plan has {feature}, which a guard cannot enforce.",
                "Train it with affidavit train, or certify a plan without it.",
            )
    if plan.dataset.size is None:
        raise GuardStop(
            "unsupported",
            "the certified plan has no dataset.size, so a mean has no divisor.",
            "Certify a plan with dataset.size.",
        )


def require_certified_parameters(
    required: StepRequirement,
    *,
    clip_norm: Mapping[str, float],
    noise_std: Mapping[str, float],
    divisor: float | None,
) -> None:
    """Require clip norms at most, noise at least, and the divisor exactly as certified.

    Raises ``GuardStop`` otherwise.
    """
    for release, max_norm in required.clip_norm.items():
        if not 0 < clip_norm[release] <= max_norm:
            raise GuardStop(
                "clip_norm_above",
                f"{release} is clipped to {clip_norm[release]:g}, but at most {max_norm:g} was "
                "certified.",
                f"Clip to {max_norm!r}, or certify a plan with your clip norm.",
            )
    for release, min_std in required.noise_std.items():
        if not noise_std[release] >= min_std:
            raise GuardStop(
                "noise_below",
                f"{release} has noise of standard deviation {noise_std[release]:.9g} on the sum, "
                f"but at least {min_std:.9g} was certified.",
                f"Add {min_std!r} (noise multiplier times clip norm), or certify a plan with your "
                "noise.",
            )
    if divisor is not None and float(divisor) != float(Fraction(required.divisor)):
        raise GuardStop(
            "other_divisor",
            f"sums are divided by {divisor:g}, but {required.divisor} was certified.",
            "Divide by the certified number, whatever the size of the lot.",
        )


def assign_tensors(certified: CertifiedRun, blocks: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the release of every tensor; raises ``GuardStop`` if the blocks are not the plan's."""
    releases = {release.name: release for release in certified.phase.releases}
    if blocks.keys() != releases.keys():
        raise GuardStop(
            "other_blocks",
            f"blocks are given for {', '.join(sorted(blocks)) or 'nothing'}; the plan releases "
            f"{', '.join(releases)}.",
            "Give the tensors of each release of the plan (blocks=).",
        )
    assigned: dict[str, str] = {}
    for release, tensors in blocks.items():
        names = list(tensors)
        if repeated := sorted(assigned.keys() & set(names)):
            raise GuardStop(
                "other_blocks",
                f"tensors in two releases: {', '.join(repeated)}.",
                "Assign every tensor to one release.",
            )
        assigned.update(dict.fromkeys(names, release))
        count = releases[release].count
        flat = certified.phase.clipping == "flat"
        if not names or (not flat and count not in (1, len(names))):
            raise GuardStop(
                "other_blocks",
                f"release {release} has {len(names)} tensor(s) but count {count}; the count must "
                "be 1 or the number of tensors.",
                f"Certify the plan with count: {max(1, len(names))}, or count: 1.",
            )
    return assigned


def tensor_entries(
    certified: CertifiedRun, shapes: Mapping[str, list[int]], tensors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the tensors with their blocks, for a run record."""
    counts = {release.name: release.count for release in certified.phase.releases}
    next_blocks = dict.fromkeys(counts, 0)
    entries = []
    for name, release in tensors.items():
        flat = certified.phase.clipping == "flat"
        block = FLAT if flat else block_name(release, next_blocks[release])
        if counts[release] > 1:
            next_blocks[release] += 1
        entries.append({"name": name, "shape": shapes[name], "release": release, "block": block})
    return entries
