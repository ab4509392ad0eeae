"""Conformance: compare a run record with the run's certificate.

The chain of the record is checked, and every line is compared with the closed plan of the
certificate. Each mismatch is a finding with a stable code and its line. The trainer, the data and
the weights are not needed.

A record is ``header checkpoint (charge release? checkpoint* resumed?)* final``. A charge without
its release is a step in which the run crashed, followed by ``resumed`` or the end of the record.

The cost of a run is the number of its *charged* steps, finished or not. A record without a finding,
except ``noted`` ones, costs its charges; any other costs every certified step, because nobody can
prove that fewer were run. ``conformant`` means that the certificate's guarantee applies to the run;
``noted`` findings do not deny it.

``docs/reference/codes.md`` lists the codes and their messages.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from affidavit.assessment import (
    ClipAdaptation,
    Execution,
    StepRequirement,
    certified_plan,
)
from affidavit.evidence.hyperparameter_search import selection_of
from affidavit.evidence.run_record import (
    START,
    VERSION,
    BrokenLine,
    RecordEntry,
    decode_line,
    invalid_fields,
    is_guarded,
    is_number,
)
from affidavit.plan import canonical_json, digest_of

CLIP_NORM_TOLERANCE = 1e-9
"""The most by which a clip norm may be above the one that follows from the counts, relatively."""
NOTED_CODES = frozenset({"diverged", "stopped"})
"""The findings that leave the guarantee valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceFinding:
    """One mismatch; ``line`` counts from 1, and 0 is the record as a whole."""

    code: str
    line: int
    message: str

    @property
    def noted(self) -> bool:
        """Whether the finding leaves the guarantee valid."""
        return self.code in NOTED_CODES

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON data."""
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
        """Return the result as JSON data."""
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

    Raises ``PlanNotClosed`` and ``PlanError`` if the certificate has no closed plan.
    """
    check, findings = RecordCheck(predicate), []
    head: str | None = None
    broken = False
    if predicate.get("verdict") != "certified":
        message = f"the certificate's verdict is {predicate.get('verdict')}."
        findings.append(ConformanceFinding(code="not_certified", line=0, message=message))
    for number, line in enumerate(io.BytesIO(record), start=1):
        try:
            if not line.endswith(b"\n"):
                raise BrokenLine("not_json", "the last line is incomplete: it was truncated.")
            entry = decode_line(line, START if head is None else head)
        except BrokenLine as error:
            findings.append(ConformanceFinding(code=error.code, line=number, message=str(error)))
            broken = True
            break
        head = entry["digest"]
        findings += [
            ConformanceFinding(code=code, line=number, message=message)
            for code, message in check.find_mismatches(number, entry)
        ]
    if not check.ended and not broken:
        message = (
            "the record has no final line: the run is still going, or lines were removed. Until it "
            "ends, every certified step counts."
        )
        findings.append(ConformanceFinding(code="unfinished", line=0, message=message))
    steps, charged = check.execution.steps, check.charged
    conformant = all(finding.noted for finding in findings)
    return Conformance(
        certificate_id=predicate["certificate_id"],
        plan_digest=check.plan_digest,
        run=check.run,
        head=head,
        steps_certified=steps,
        steps_charged=charged,
        steps_released=check.released,
        steps_to_charge=charged if conformant else max(steps, charged),
        findings=tuple(findings),
    )


Mismatches = Iterator[tuple[str, str]]
"""The codes and messages of mismatches."""

GENERATOR = "chacha20"
GENERATOR_USES = frozenset({"noise", "sampling"})
"""The uses of random generators, each of which the header names."""
PHASE_CODES = {
    "steps": "too_many_steps",
    "sampling": "other_sampler",
    "divisor": "other_sampler",
    "clipping": "other_blocks",
    "scheduled": "clip_norm_above",
    "noise": "other_noise",
    "releases": "other_blocks",
}
"""The code of a mismatch in each field of a phase."""


class RecordCheck:
    """The check of one record; ``find_mismatches`` is called for each line in order."""

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
        self._factors: dict[int, dict[str, float]] = {}
        self._open = self.ended = self._guarded = False
        self._adaptation: ClipAdaptation | None = None
        # If the plan does not assign one count to each clip norm, the norms are fixed.
        with suppress(ValueError):
            self._adaptation = ClipAdaptation.of(self.plan)

    def find_mismatches(self, number: int, entry: RecordEntry) -> Mismatches:
        """Yield the mismatches in line ``number``, counted from 1."""
        if number == 1 and entry["type"] != "header":
            yield "out_of_order", "the record does not begin with a header."
        if self.ended:
            yield "out_of_order", "there are entries after the run's final line."
        if entry["type"] == "header":
            self._guarded = is_guarded(entry)
        wrong = ", ".join(invalid_fields(entry, guarded=self._guarded))
        if wrong:
            yield "unknown_fields", f"the entry cannot be read: {wrong}."
        # An invalid entry is processed too: an incomplete charge was charged.
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
                case "strayed":
                    yield from self._strayed(entry)
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
        for code, subject, stated, certified in (
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
                yield code, f"{subject} is {stated!r}, and {certified!r} was certified."
        yield from self._phases(entry["phases"])
        yield from self._tensors(entry["tensors"])
        if entry["generator"].keys() != GENERATOR_USES:
            named = ", ".join(sorted(entry["generator"])) or "nothing"
            expected = " and ".join(sorted(GENERATOR_USES))
            yield "statistical_generator", f"generators are named for {named}, not for {expected}."
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
            for field, code in PHASE_CODES.items():
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
        # A release may omit the digest of its weights; the checkpoint after it has it.
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
        if self._adaptation is not None:
            required = _adapted(required, entry, self._adaptation)
        yield from _compare_parameters(entry, required)

    def _release(self, entry: RecordEntry) -> Mismatches:
        if not self._open or entry["step"] != self.charged - 1:
            yield "out_of_order", "a release does not follow its charge."
        self._open = False
        self.released += 1
        self._parameters = entry["parameters"]
        yield from self._counts(entry)

    def _strayed(self, entry: RecordEntry) -> Mismatches:
        # The loop was stopped before the step was released, and may go on once it is corrected.
        if not self._open or entry["step"] != self.charged - 1:
            yield "out_of_order", "a loop strays in a step that is charged and not released."

    def _counts(self, entry: RecordEntry) -> Mismatches:
        """Read the counts of a release, from which the clip norms of the next step follow."""
        counts, adaptation = entry.get("clip_counts"), self._adaptation
        requested = set() if adaptation is None else adaptation.factors.keys()
        if (counts or {}).keys() != requested or not all(map(is_number, (counts or {}).values())):
            certified = "no counts of clipped records were" if adaptation is None else "a count is"
            yield "unknown_fields", f"clip_counts: {certified} certified for every block."
        elif adaptation is not None and counts is not None:
            adaptation.update(counts, self.execution.at(entry["step"]))

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
            # Its weights are those of that update, which no earlier line describes.
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
    """Whether the two are one JSON value; in Python ``True == 1``."""
    return canonical_json(recorded) == canonical_json(certified)


def _adapted(
    required: StepRequirement, entry: RecordEntry, adaptation: ClipAdaptation
) -> StepRequirement:
    """Return ``required`` with adapted clip norms and the noise for the recorded clip norms."""
    adapted = adaptation.at(required)
    # The norms follow from released values; the last digits of e^x may differ.
    norms = {name: norm * (1 + CLIP_NORM_TOLERANCE) for name, norm in adapted.clip_norm.items()}
    stds = adapted.noise_std
    if entry["clip_norm"].keys() == norms.keys():
        stds = {
            name: adaptation.noise_for(name, norm, required) if norm > 0 else stds[name]
            for name, norm in entry["clip_norm"].items()
        }
    return replace(required, clip_norm=norms, noise_std=stds)


def _compare_parameters(entry: RecordEntry, required: StepRequirement) -> Mismatches:
    """Compare the public parameters of a charge with the requirement of its step."""
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
