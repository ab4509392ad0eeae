"""Conformance: what a run did, by its record, against what its certificate allows.

The record is read line by line, its chain checked, and every line compared with the closed
plan of the certificate. What does not fit is a finding with a stable code and the line where
it was found. Nothing here needs the trainer, the data or the weights.

What a run costs is what it *charged*, finished or not. A record that ends as it should and
has an unbroken chain is charged its charges; any other is charged every certified step, because
nobody can show that it ran fewer. ``conformant`` means that no finding denies the
certificate's guarantee for the run; a finding that is only ``noted`` does not.

=====================  ==========================================================
code                   what was found
=====================  ==========================================================
broken_chain           a line was changed, dropped, added, repeated or moved
                       (also ``not_json``, ``not_canonical``, ``wrong_digest``,
                       ``not_an_entry``)
unknown_fields         an entry has other fields, or what stands in one is not what
                       belongs there: a commitment that is no digest, a count that is
                       no integer
out_of_order           entries that no run writes in this order
not_certified          the certificate's verdict is another, or does not verify
other_certificate      the record is of another certificate
other_plan             a plan digest is not that of the certificate
other_sampler          sampling, divisor or data set size is not the certified one
other_noise            the noise's structure is not the certified one
other_blocks           releases, counts or tensors are not the certified ones
too_many_steps         more steps than certified
clip_norm_above        a record's contribution may have been larger than certified
noise_below            the noise of a release was less than certified
key_reused             two steps have one noise key
statistical_generator  lots or noise are not from a cryptographic generator
outside_validity       the run began when the certificate was not valid
wrong_counts           the last line does not count what is there
wrong_weights          the last line is not about the last release
unfinished             there is no last line; lines may be missing
diverged               noted: the run was ended because it diverged
stopped                noted: the run was ended early, as somebody asked
=====================  ==========================================================
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from affidavit.certificate.replay import Replay
from affidavit.certificate.run_record import START, BrokenLine, Entry, unsealed

NOTED = frozenset({"diverged", "stopped"})
"""Findings that leave the guarantee as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that does not fit; ``line`` counts from 1, 0 is the record as a whole."""

    code: str
    line: int
    message: str

    @property
    def noted(self) -> bool:
        """Whether it leaves the guarantee as it is."""
        return self.code in NOTED

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON data."""
        return {
            "code": self.code,
            "line": self.line,
            "message": self.message,
            "noted": self.noted,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Conformance:
    """What a record comes to; ``steps_to_charge`` is what the ledger is to settle on."""

    certificate_id: str
    plan_digest: str
    run: str | None
    head: str | None
    steps_certified: int
    steps_charged: int
    steps_released: int
    steps_to_charge: int
    findings: tuple[Finding, ...]

    @property
    def conformant(self) -> bool:
        """Whether the certificate's guarantee is the run's."""
        return all(finding.noted for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON data."""
        return {
            "conformant": self.conformant,
            "certificate_id": self.certificate_id,
            "plan_digest": self.plan_digest,
            "run": self.run,
            "head": self.head,
            "steps": {
                "certified": self.steps_certified,
                "charged": self.steps_charged,
                "released": self.steps_released,
                "to_charge": self.steps_to_charge,
            },
            "findings": [finding.as_dict() for finding in self.findings],
        }


def conformance(record: bytes, predicate: dict[str, Any]) -> Conformance:
    """Hold ``record`` against a verified certificate's ``predicate``.

    Raises ``NotClosed`` and ``PlanError`` where the certificate has no closed plan.
    """
    replay, findings = Replay(predicate), []
    head, broken = None, False
    if predicate.get("verdict") != "certified":
        message = f"the certificate's verdict is {predicate.get('verdict')}."
        findings.append(Finding(code="not_certified", line=0, message=message))
    for number, entry in enumerate(_entries(record), start=1):
        if isinstance(entry, Finding):
            findings.append(entry)
            broken = True
            break
        head = entry["digest"]
        findings += [
            Finding(code=code, line=number, message=message)
            for code, message in replay.of(number, entry)
        ]
    if not replay.ended and not broken:
        message = (
            "the record has no last line: the run goes on, or lines were cut off. Until it ends "
            "every certified step counts."
        )
        findings.append(Finding(code="unfinished", line=0, message=message))
    steps, charged = replay.execution.steps, replay.charged
    sound = all(finding.noted for finding in findings)
    return Conformance(
        certificate_id=predicate["certificate_id"],
        plan_digest=replay.plan_digest,
        run=replay.run,
        head=head,
        steps_certified=steps,
        steps_charged=charged,
        steps_released=replay.released,
        steps_to_charge=charged if sound else max(steps, charged),
        findings=tuple(findings),
    )


def _entries(record: bytes) -> Iterator[Entry | Finding]:
    """Whole lines up to the first that breaks the chain, and that one as a finding."""
    previous = START
    for number, line in enumerate(io.BytesIO(record), start=1):
        if not line.endswith(b"\n"):
            message = "the last line has no end: it was cut off while it was written, or since."
            yield Finding(code="not_json", line=number, message=message)
            return
        try:
            entry = unsealed(line, previous)
        except BrokenLine as error:
            yield Finding(code=error.code, line=number, message=str(error))
            return
        yield entry
        previous = entry["digest"]
