"""Conformance: compare what a run did, by its record, with what its certificate allows.

The record is read line by line, its chain checked, and every line compared with the closed
plan of the certificate. Each mismatch is a finding with a stable code and its line. Nothing here
needs the trainer, the data or the weights.

A record is ``header checkpoint (charge release? checkpoint* resumed?)* final``. A charge without
its release is a step in which the run died, followed by ``resumed`` or by nothing.

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
no_canaries            the plan's canaries were not committed to before the run
no_search              the run was to be repeated and selected from, and its record
                       is of no search, or the other way round
outside_validity       the run began when the certificate was not valid
wrong_counts           the last line does not count what is there
wrong_weights          the last line is not about the last release
unfinished             there is no last line; lines may be missing
diverged               noted: the run was ended because it diverged
stopped                noted: the run was ended early, as somebody asked
=====================  ==========================================================

>>> sorted(CODES)[:3]
['clipping', 'divisor', 'noise']
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from affidavit.certificate.runs.hyperparameter_search import selection_of
from affidavit.certificate.runs.run_record import (
    START,
    VERSION,
    BrokenLine,
    RecordEntry,
    decode_line,
    invalid_fields,
    is_guarded,
    is_number,
)
from affidavit.certificate.runs.step_requirements import (
    ClipAdaptation,
    Execution,
    StepRequirement,
    certified_plan,
)
from affidavit.plan import Plan, canonical_json, digest_of

FOLLOWED = 1e-9
"""By how much of itself a clip norm may be above what the recorded counts steer it to."""

NOTED = frozenset({"diverged", "stopped"})
"""Findings that leave the guarantee as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceFinding:
    """One mismatch; ``line`` counts from 1, and 0 is the record as a whole."""

    code: str
    line: int
    message: str

    @property
    def noted(self) -> bool:
        """Whether the finding leaves the guarantee valid."""
        return self.code in NOTED

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON data."""
        return {**asdict(self), "noted": self.noted}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conformance:
    """The result for a record; the ledger settles on ``steps_to_charge``."""

    certificate_id: str
    plan_digest: str
    run: str | None
    head: str | None
    steps_certified: int
    steps_charged: int
    steps_released: int
    steps_to_charge: int
    findings: tuple[ConformanceFinding, ...]

    @property
    def conformant(self) -> bool:
        """Whether the certificate's guarantee applies to the run."""
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


def check_conformance(record: bytes, predicate: dict[str, Any]) -> Conformance:
    """Compare ``record`` with a verified certificate's ``predicate``.

    Raises ``PlanNotClosed`` and ``PlanError`` where the certificate has no closed plan.
    """
    replay, findings = RecordCheck(predicate), []
    head, broken = None, False
    if predicate.get("verdict") != "certified":
        message = f"the certificate's verdict is {predicate.get('verdict')}."
        findings.append(ConformanceFinding(code="not_certified", line=0, message=message))
    for number, entry in enumerate(_entries(record), start=1):
        if isinstance(entry, ConformanceFinding):
            findings.append(entry)
            broken = True
            break
        head = entry["digest"]
        findings += [
            ConformanceFinding(code=code, line=number, message=message)
            for code, message in replay.of(number, entry)
        ]
    if not replay.ended and not broken:
        message = (
            "the record has no final line: the run is still going, or lines were removed. Until it "
            "ends, every certified step counts."
        )
        findings.append(ConformanceFinding(code="unfinished", line=0, message=message))
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


def _entries(record: bytes) -> Iterator[RecordEntry | ConformanceFinding]:
    """Whole lines up to the first that breaks the chain, and that one as a finding."""
    previous = START
    for number, line in enumerate(io.BytesIO(record), start=1):
        if not line.endswith(b"\n"):
            message = "the last line is incomplete: it was truncated."
            yield ConformanceFinding(code="not_json", line=number, message=message)
            return
        try:
            entry = decode_line(line, previous)
        except BrokenLine as error:
            yield ConformanceFinding(code=error.code, line=number, message=str(error))
            return
        yield entry
        previous = entry["digest"]


Mismatches = Iterator[tuple[str, str]]
"""Codes and messages."""

GENERATOR = "chacha20"
DRAWN = frozenset({"noise", "sampling"})
"""What a run draws at random, each from a generator that its header names."""
CODES = {
    "steps": "too_many_steps",
    "sampling": "other_sampler",
    "divisor": "other_sampler",
    "clipping": "other_blocks",
    "scheduled": "clip_norm_above",
    "noise": "other_noise",
    "releases": "other_blocks",
}
"""What it is called when a field of a phase is not the certified one."""


class RecordCheck:
    """One walk through one record; ``of`` is called for each line in order."""

    def __init__(self, predicate: dict[str, Any]) -> None:
        self._predicate = predicate
        self.plan = certified_plan(predicate)
        self.plan_digest = digest_of(predicate["plan"])
        self.execution = Execution.of(self.plan)
        self.run: str | None = None
        self.charged = self.released = 0
        self._keys: dict[str, int] = {}
        self._parameters: str | None = None
        self._checkpoints: dict[int, str] = {}
        self._adaptation = _adaptation_of(self.plan)
        self._factors: dict[int, dict[str, float]] = {}
        self._open = self.ended = self._guarded = False

    def of(self, number: int, entry: RecordEntry) -> Mismatches:
        """The findings in line ``number``, counted from 1."""
        if number == 1 and entry["type"] != "header":
            yield "out_of_order", "the record does not begin with a header."
        if self.ended:
            yield "out_of_order", "there are entries after the run's final line."
        if entry["type"] == "header":
            self._guarded = is_guarded(entry)
        wrong = ", ".join(invalid_fields(entry, guarded=self._guarded))
        if wrong:
            yield "unknown_fields", f"the entry cannot be read: {wrong}."
        # It is walked all the same: a charge that says too little was charged.
        try:
            match entry["type"]:
                case "header":
                    yield from self._header(number, entry)
                case "checkpoint":
                    yield from self._checkpoint(entry)
                case "resumed":
                    yield from self._resumed(entry)
                case "charge":
                    yield from self._charge(entry)
                case "release":
                    yield from self._release(entry)
                case _:
                    yield from self._final(entry)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            if not wrong:
                yield "unknown_fields", f"the entry cannot be read: {error}."

    def _header(self, number: int, entry: RecordEntry) -> Mismatches:
        if number != 1:
            yield "out_of_order", "the record has more than one header."
        if entry["version"] != VERSION:
            yield "unknown_fields", f"record version {entry['version']} is not supported."
        self.run, self._parameters = entry["run"], entry["parameters"]
        plan = self.plan
        for code, what, stated, certified in (
            (
                "other_certificate",
                "the certificate",
                entry["certificate_id"],
                self._predicate["certificate_id"],
            ),
            ("other_plan", "the plan", entry["plan_digest"], self.plan_digest),
            ("other_plan", "adjacency", entry["adjacency"], plan.adjacency),
            ("other_plan", "unit", entry["unit"], plan.dataset.unit),
            ("too_many_steps", "steps", entry["steps"], self.execution.steps),
            ("other_sampler", "the size of the data", entry["data"]["size"], plan.dataset.size),
            (
                "other_plan",
                "the optimiser",
                entry["optimizer"],
                plan.optimizer.model_dump(mode="json", exclude_none=True),
            ),
        ):
            if not _same(stated, certified):
                yield code, f"{what} is {stated!r}, and {certified!r} was certified."
        yield from self._phases(entry["phases"])
        yield from self._tensors(entry["tensors"])
        if entry["generator"].keys() != DRAWN:
            named = ", ".join(sorted(entry["generator"])) or "nothing"
            yield (
                "statistical_generator",
                f"generators are named for {named}, not for {' and '.join(sorted(DRAWN))}.",
            )
        for use, name in entry["generator"].items():
            if name != GENERATOR:
                yield "statistical_generator", f"{use} is drawn from {name}, not {GENERATOR}."
        if plan.canaries is not None and entry.get("canaries") is None:
            yield "no_canaries", "the record does not commit to the canaries of the plan."
        if (selection_of(plan) is None) != (entry.get("search") is None):
            yield "no_search", "the plan and the record differ on whether this is one of a search."
        validity = self._predicate["validity"]
        if not validity["not_before"] <= entry["started_at"] <= validity["not_after"]:
            yield "outside_validity", f"the run began at {entry['started_at']}."

    def _phases(self, recorded: list[dict[str, Any]]) -> Mismatches:
        certified = self.execution.phases()
        if len(recorded) != len(certified):
            yield "other_plan", f"{len(recorded)} phases, and {len(certified)} were certified."
            return
        for index, (one, other) in enumerate(zip(recorded, certified, strict=True)):
            if one.keys() != other.keys():
                yield "unknown_fields", f"phase {index} has the wrong fields."
                continue
            for field, code in CODES.items():
                if not _same(one[field], other[field]):
                    yield code, f"phase {index}: {field} is not what was certified."

    def _tensors(self, recorded: list[dict[str, Any]]) -> Mismatches:
        phase = self.plan.phases[0]
        names = [tensor["name"] for tensor in recorded]
        if len(set(names)) < len(names) or not names:
            yield "other_blocks", "a tensor is in two blocks, or there are no blocks."
        blocks: dict[str, set[str]] = {}
        for tensor in recorded:
            blocks.setdefault(tensor["release"], set()).add(tensor["block"])
        for release in phase.releases:
            result = blocks.pop(release.name, set())
            if not result or (phase.clipping != "flat" and len(result) != release.count):
                yield (
                    "other_blocks",
                    f"release {release.name} has {len(result)} blocks, and {release.count} were "
                    "certified.",
                )
        if blocks:
            yield "other_blocks", f"{', '.join(sorted(blocks))}: no release of the plan."

    def _checkpoint(self, entry: RecordEntry) -> Mismatches:
        if self._open or entry["step"] != self.charged:
            yield "out_of_order", "a checkpoint must lie between two steps."
        if self._parameters is not None and entry["parameters"] != self._parameters:
            yield "wrong_weights", "the checkpoint's parameters are not those of the last step."
        # A release may say nothing of its weights; the checkpoint after it always does.
        self._parameters = self._checkpoints[entry["step"]] = entry["parameters"]
        if self._adaptation is not None:
            self._factors[entry["step"]] = dict(self._adaptation.factors)

    def _resumed(self, entry: RecordEntry) -> Mismatches:
        step, before = entry["step"], entry["from_step"]
        if step != self.charged or entry["lost"] != step - before or before > step:
            yield "out_of_order", f"{self.charged} steps were charged when the run resumed."
        if self._checkpoints.get(before) != entry["parameters"]:
            yield "wrong_weights", f"the run resumed without a checkpoint of step {before}."
        self._open, self._parameters = False, entry["parameters"]
        if self._adaptation is not None and before in self._factors:
            self._adaptation.factors = dict(self._factors[before])

    def _charge(self, entry: RecordEntry) -> Mismatches:
        step = entry["step"]
        if self._open or step != self.charged:
            yield "out_of_order", f"step {step} is charged, but step {self.charged} is due."
        if not self._checkpoints:
            yield "out_of_order", "a step is charged before there is a checkpoint."
        self.charged += 1
        self._open = True
        if entry["plan_digest"] != self.plan_digest:
            yield "other_plan", f"step {step} is of another plan."
        if (before := self._keys.get(entry["key_commitment"])) is not None:
            yield "key_reused", f"steps {before} and {step} share a noise key."
        self._keys[entry["key_commitment"]] = step
        if self.charged > self.execution.steps:
            yield "too_many_steps", f"{self.execution.steps} steps were certified."
            return
        required = self.execution.at(self.charged - 1)
        if self._adaptation is None:
            yield from _parameters(entry, required)
        else:
            yield from _adapted_parameters(entry, required, self._adaptation)

    def _release(self, entry: RecordEntry) -> Mismatches:
        if not self._open or entry["step"] != self.charged - 1:
            yield "out_of_order", "a release does not follow its charge."
        self._open = False
        self.released += 1
        self._parameters = entry["parameters"]
        yield from self._counts(entry)

    def _counts(self, entry: RecordEntry) -> Mismatches:
        """The counts of a release, which the clip norms of the next step follow from."""
        counts, adaptation = entry.get("clip_counts"), self._adaptation
        requested = set() if adaptation is None else adaptation.factors.keys()
        if (counts or {}).keys() != requested or not all(map(is_number, (counts or {}).values())):
            what = "no counts of clipped records were" if adaptation is None else "a count is"
            yield "unknown_fields", f"clip_counts: {what} certified for every block."
        elif adaptation is not None and counts is not None:
            adaptation.follow(counts, self.execution.at(entry["step"]))

    def _final(self, entry: RecordEntry) -> Mismatches:
        self.ended = True
        if (entry["charged"], entry["released"]) != (self.charged, self.released):
            yield (
                "wrong_counts",
                f"it counts {entry['charged']} charges and {entry['released']} releases; there are "
                f"{self.charged} and {self.released}.",
            )
        if entry["ended"] == "diverged":
            yield "diverged", "an update was not finite, and the run was ended."
            # Its weights are those of that update, of which no line says anything before.
            if not self._open:
                yield "out_of_order", "a run diverges in a step that is charged and not released."
        elif entry["ended"] == "stopped":
            yield "stopped", f"it was stopped after {self.charged} steps."
            if self._open or self._parameters not in (None, entry["parameters"]):
                yield "wrong_weights", "the weights are not those of the last step."
        elif entry["ended"] != "completed":
            yield "unknown_fields", f"a run cannot end as {entry['ended']!r}."
        elif self.charged != self.execution.steps:
            yield "wrong_counts", f"it is completed after {self.charged} steps."
        elif self._open or entry["parameters"] != self._parameters:
            yield "wrong_weights", "the weights are not those of the last step."


def _same(recorded: Any, certified: Any) -> bool:
    """Whether they are one JSON value; to Python, ``True`` would be 1."""
    return canonical_json(recorded) == canonical_json(certified)


def _adaptation_of(plan: Plan) -> ClipAdaptation | None:
    """None also where a plan does not say which count steers which clip norm: norms are fixed."""
    try:
        return ClipAdaptation.of(plan)
    except ValueError:
        return None


def _adapted_parameters(
    entry: RecordEntry, required: StepRequirement, adaptation: ClipAdaptation
) -> Mismatches:
    """The same where clip norms follow the counts: the noise is relative to each as recorded."""
    here = adaptation.at(required)
    # The path of the norms is steered by released values; e^x may differ in its last digits.
    norms = {name: norm * (1 + FOLLOWED) for name, norm in here.clip_norm.items()}
    stds = here.noise_std
    if entry["clip_norm"].keys() == norms.keys():
        stds = {
            name: adaptation.noise_for(name, norm, required) if norm > 0 else stds[name]
            for name, norm in entry["clip_norm"].items()
        }
    yield from _parameters(entry, replace(required, clip_norm=norms, noise_std=stds))


def _parameters(entry: RecordEntry, required: StepRequirement) -> Mismatches:
    """A charge's public parameters against what its step must be."""
    step = entry["step"]
    if entry["phase"] != required.phase:
        yield "other_plan", f"step {step} belongs to phase {required.phase}, not {entry['phase']}."
    if entry["divisor"] != required.divisor:
        yield "other_sampler", f"step {step} is divided by {entry['divisor']}."
    for field in ("clip_norm", "noise_std"):
        if entry[field].keys() != required.clip_norm.keys():
            yield "other_blocks", f"step {step}: {field} is not given for every release."
            return
    for release, most in required.clip_norm.items():
        if not 0 < entry["clip_norm"][release] <= most:
            yield (
                "clip_norm_above",
                f"step {step}, {release}: clip norm {entry['clip_norm'][release]:g}, at most "
                f"{most:g} was certified.",
            )
    for release, least in required.noise_std.items():
        if not entry["noise_std"][release] >= least:
            yield (
                "noise_below",
                f"step {step}, {release}: noise {entry['noise_std'][release]:g}, at least "
                f"{least:g} was certified.",
            )
