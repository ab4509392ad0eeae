"""What is proved about one plan, and how it is signed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affidavit.certificate import (
    Assessment,
    Certificate,
    KeyFailure,
    SigningPort,
    closed_plan,
    html_table,
    issue_here,
    write_atomically,
)
from affidavit.certificate.keys.signers import own_signing_key
from affidavit.library.bounds import Bound, bound_of
from affidavit.plan import Plan, Reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from affidavit.library.privacy_curve import Curve


class NotCertified(Exception):
    """A plan is not certified; ``certification`` has all of it."""

    def __init__(self, certification: Certification) -> None:
        self.certification = certification
        self.verdict = certification.verdict
        self.reasons = certification.reasons
        reasons = "; ".join(str(reason) for reason in self.reasons)
        super().__init__(f"{self.verdict}: {reasons}" if reasons else self.verdict)


@dataclass(frozen=True, slots=True, repr=False)
class Certification:
    """What is proved about a plan, with everything that the plan left open.

    ε is in nats, δ a probability, noise in clip norms on the sum. ``assessment`` has the rest.
    """

    source: Plan
    assessment: Assessment

    @property
    def verdict(self) -> str:
        """``certified``, ``under_noised``, ``unproved``, ``refused`` or ``undecided``."""
        return self.assessment.verdict

    @property
    def certified(self) -> bool:
        """Whether the guarantee may be claimed, and meets the target where there is one."""
        return self.verdict == "certified"

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why the plan is not certified, each with a code and a remedy."""
        return self.assessment.reasons

    @property
    def epsilon(self) -> Bound | None:
        """The proved bound on ε in nats at ``delta``; None where nothing may be claimed."""
        return self._bound("epsilon")

    @property
    def delta(self) -> Bound | None:
        """The proved bound on δ at ``epsilon``; None where nothing may be claimed."""
        return self._bound("delta")

    def _bound(self, name: str) -> Bound | None:
        bracket = getattr(self.assessment, name)
        if bracket is None or self.verdict in ("refused", "undecided"):
            return None
        level = self.assessment.confidence
        return bound_of(bracket, None if level is None else level.level)

    @property
    def noise_multipliers(self) -> dict[str, float]:
        """For each release, by name, the noise multiplier that the target requires or is given.

        Of several phases the names are ``0/NAME``, ``1/NAME`` and so on.
        """
        releases = self.assessment.releases
        noise = {
            release.name if release.phase is None else f"{release.phase}/{release.name}": (
                release.required if release.given is None else release.given
            )
            for release in releases
        }
        return {name: value for name, value in noise.items() if value is not None}

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier that all releases share; None where they differ."""
        values = set(self.noise_multipliers.values())
        return values.pop() if len(values) == 1 else None

    @property
    def joint_noise_multiplier(self) -> float | None:
        """The noise multiplier of one step as a whole, rounded down."""
        return self.assessment.joint

    @property
    def steps(self) -> int | None:
        """The steps of the whole run; None where nothing may be claimed."""
        steps = [entry["steps"] for entry in self.assessment.sampling]
        return sum(steps) if steps and None not in steps else None

    @property
    def lot_size(self) -> int | None:
        """Records in a lot, expected or fixed, where every phase has the same; or None."""
        sizes = {entry.get("lot_size") for entry in self.assessment.sampling}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def plan(self) -> Plan:
        """The plan with nothing left open; raises ``NotCertified`` where that is not known."""
        if not self.source.is_open:
            return self.source
        if not self.certified:
            raise NotCertified(self)
        return closed_plan(self.assessment)

    def require(self) -> Certification:
        """This certification; raises ``NotCertified`` unless it is one."""
        if not self.certified:
            raise NotCertified(self)
        return self

    def sign(self, key: SigningPort | None = None, *, requester: str | None = None) -> Certificate:
        """Sign with ``key``, or the newest key of this machine (``affidavit keys new``).

        Refusals are signed like certificates. Raises ``KeyFailure`` where there is no key.
        """
        if (key := key or own_signing_key()) is None:
            raise KeyFailure("there is no signing key; create one with `affidavit keys new`.")
        return issue_here(self.assessment, key, requester=requester)

    def write(self, path: str | os.PathLike[str], key: SigningPort | None = None) -> Certificate:
        """Sign, and write the bundle to ``path``; raises as ``sign``, and ``OSError``."""
        certificate = self.sign(key)
        write_atomically(Path(path), certificate.bundle)
        return certificate

    def curve(self) -> Curve:
        """The whole privacy curve; raises ``NotCertified`` where nothing may be claimed."""
        from affidavit.library.privacy_curve import curve_of

        return curve_of(self.source)

    def plot(self, ax: Axes | None = None, *, kind: str = "trade-off") -> Axes:
        """Draw the curve ``kind`` with Matplotlib; raises ``NotCertified`` and ``ImportError``."""
        return self.curve().plot(ax, kind=kind)

    def as_dict(self) -> dict[str, Any]:
        """The result document, as the command line and the HTTP API give it."""
        return self.assessment.as_result()

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        return self.assessment.headline

    def __repr__(self) -> str:
        return f"<{self.headline}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Any]] = [(str(reason.code), reason) for reason in self.reasons]
        rows += [(f"noise multiplier {name}", v) for name, v in self.noise_multipliers.items()]
        rows += [("joint noise multiplier", self.joint_noise_multiplier), ("steps", self.steps)]
        rows += [
            (
                f"ε by {opinion.name}",
                f"{opinion.epsilon.lower:.6g} to {bound_of(opinion.epsilon):.6g}",
            )
            for opinion in self.assessment.accountants
        ]
        rows += [(warning.code, warning.message) for warning in self.assessment.warnings]
        return html_table(rows, title=self.headline, verdict=self.verdict)
