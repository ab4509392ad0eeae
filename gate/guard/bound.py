"""What a guarded run is held to: a verified certificate, and every step that it obliges to.

The certificate is verified offline with the keys that the user trusts, and its subject is
compared with the plan at hand where one is given. From there on the certified plan alone says
what is right. What no guard can see from outside is refused here, before the first release:
noise that is correlated across steps, several phases, and events beside training that belong
into the loop.

>>> sorted(KEPT)[0]
'charge_every_step'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from affidavit.certificate import (
    Execution,
    KeyFailure,
    PlanNotClosed,
    PublicKey,
    TrustRoot,
    VerificationError,
    VerificationOptions,
    certified_plan,
    verify,
)
from affidavit.gate.guard.stopping import GuardStop
from affidavit.gate.reading import read_bytes, read_plan
from affidavit.plan import MalformedPlan, Phase, Plan, PlanError, digest_of, schedule

KEPT = frozenset(
    {
        "sampler_of_the_plan",
        "clip_each_record",
        "every_tensor_in_one_block",
        "noise_once_per_lot",
        "cryptographic_generator",
        "empty_lot_counts",
        "non_finite_is_zero",
        "no_mixing_of_records",
        "charge_every_step",
        "one_lot_for_all_blocks",
        "probes_independent_of_noise",
        "clip_by_the_schedule",
    }
)
"""Obligations that a loop can keep whose releases are clipped, summed and noised."""

Certificate = str | Path | bytes
Keys = str | Path | PublicKey | Sequence[str | Path | PublicKey] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A certificate that may be run: its predicate, its closed plan and its steps."""

    predicate: dict[str, Any]
    plan: Plan
    execution: Execution

    @property
    def certificate_id(self) -> str:
        """The certificate's own name."""
        return str(self.predicate["certificate_id"])

    @property
    def plan_digest(self) -> str:
        """The digest of the plan as it was asked."""
        return digest_of(self.predicate["plan"])

    @property
    def phase(self) -> Phase:
        """The only phase."""
        return self.plan.phases[0]

    @property
    def probability(self) -> Fraction:
        """q of a lot; 1 where every record is in it."""
        return schedule.sampling_probability(self.plan, self.phase)

    @property
    def divisor(self) -> Fraction:
        """B, fixed, by which every sum is divided."""
        found = schedule.divisor(self.plan, self.phase)
        assert found is not None  # asked for when it was bound
        return found


def bind(
    certificate: Certificate,
    *,
    plan: str | Path | Plan | None = None,
    keys: Keys = None,
    demands: VerificationOptions | None = None,
    now: datetime | None = None,
) -> Bound:
    """The run that ``certificate`` allows; raises ``GuardStop`` with what is wrong with it."""
    try:
        raw = certificate if isinstance(certificate, bytes) else read_bytes(str(certificate))
        wanted = read_plan(str(plan)).plan if isinstance(plan, str | Path) else plan
        predicate = verify(raw, _trusted(keys), plan=wanted, demands=demands, now=now).predicate
    except VerificationError as error:
        raise GuardStop(error.code, error.message, error.remedy) from None
    except MalformedPlan as error:
        reason = error.reasons[0]
        raise GuardStop(reason.code, reason.message, reason.remedy) from None
    except KeyFailure as failure:
        raise GuardStop("unreadable", str(failure), "Give the issuer's keys (keys=).") from None
    _require_certified(predicate)
    try:
        closed = certified_plan(predicate)
        bound = Bound(predicate=predicate, plan=closed, execution=Execution.of(closed))
    except PlanError as error:
        raise GuardStop("open_plan", str(error), "Certify the plan again.") from None
    except (PlanNotClosed, ValueError) as error:
        raise GuardStop("open_plan", f"{error}.", "Certify the plan again.") from None
    _require_seen_from_outside(bound)
    return bound


def _trusted(keys: Keys) -> Iterable[PublicKey]:
    given = () if keys is None else (keys,) if isinstance(keys, str | Path | PublicKey) else keys
    if keys is not None and not given:
        raise GuardStop("bad_argument", "keys is empty.", "Give the issuer's keys, or None.")
    if given and all(isinstance(key, PublicKey) for key in given):
        return [key for key in given if isinstance(key, PublicKey)]
    paths = [Path(key) for key in given if isinstance(key, str | Path)]
    if len(paths) != len(given):
        raise GuardStop("bad_argument", "keys mixes files and keys.", "Give one kind.")
    return TrustRoot(paths).public_keys()


def _require_certified(predicate: dict[str, Any]) -> None:
    verdict = predicate["verdict"]
    if verdict != "certified" or not predicate.get("guarantee"):
        why = "; ".join(str(item.get("message", "")) for item in predicate.get("reasons", [])[:2])
        raise GuardStop(
            str(verdict),
            f"the certificate's verdict is {verdict}: nothing may be trained. {why}".strip(),
            "Mend the plan as the certificate says, and certify it.",
        )
    unknown = sorted({entry["code"] for entry in predicate["obligations"]} - KEPT)
    if unknown:
        raise GuardStop(
            "unknown_obligation",
            f"the certificate obliges to {', '.join(unknown)}, which cannot be seen from outside.",
            "Train it with affidavit train, or certify a plan without it.",
        )


def _require_seen_from_outside(bound: Bound) -> None:
    plan = bound.plan
    for found, what in (
        (len(plan.phases) > 1, "several phases"),
        (plan.phases[0].noise.kind != "independent", "noise that is correlated across steps"),
        (bool(plan.extra), "events beside training (extra)"),
        (plan.dataset.size is None, "no dataset.size, so that a mean has no divisor"),
    ):
        if found:
            raise GuardStop(
                "unsupported",
                f"the certified plan has {what}, and a guard cannot hold a run to that.",
                "Train it with affidavit train, or certify a plan that a guard can hold.",
            )
