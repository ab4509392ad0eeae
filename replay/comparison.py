"""What two runs on neighbouring data sets say: where they part, and by how much.

``first`` is the record of the run on the given data set, and ``second`` one on a neighbour, with
the releases of the first run. What differs between two runs on the same data set is ``Unstable``,
for example by the load of the machine. It shows nothing of a record, and is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from affidavit.evidence import ChangedRecord, ReplayChecks, ReplayFinding
from affidavit.replay.lines import LINE_BITS
from affidavit.replay.settings import Neighbour

Record = dict[str, Any]

TOLERANCE = 1e-3
"""Relative error of a sum of clipped gradients in float32."""
NOISE_DEVIATIONS = 5.0
"""Standard deviations of a statistic of noise or lots that refute it: probability 3e-7."""
FRESH_NOISE = "Draw new noise for each release, and seed its generator once."
FULL_NOISE = "Add noise with the accounted standard deviation to every released value."
FEW_RECORDS = 6
"""Two Poisson lots with fewer records may well be equal."""
LOGS = (".log", "tfevents", "lightning_logs/", "wandb/", "mlruns/", "runs/")
"""Parts of the names of files that hold logs."""


@dataclass(frozen=True)
class Unstable:
    """What differs between two runs on the same data.

    ``state`` and ``files`` are names, ``printed`` numbers of lines of output. ``sums`` is the first
    release whose sums or parameters differ. ``steps`` and ``lines`` say whether their order does.
    """

    state: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    printed: frozenset[int] = frozenset()
    sums: float = math.inf
    steps: bool = False
    lines: bool = False

    @classmethod
    def of(cls, one: Record, other: Record) -> Unstable:
        """Return what differs between two records."""
        pairs = list(zip(releases_of(one), releases_of(other), strict=False))
        states = [(a["state"], b["state"]) for a, b in pairs]
        differ = (number for number, pair in enumerate(pairs) if not _same_sums(*pair))
        lines = enumerate(zip(one["printed"], other["printed"], strict=False))
        rest = min(len(one["printed"]), len(other["printed"])), len(one["printed"])
        return cls(
            state=frozenset(
                name
                for a, b in (*states, (one["state"], other["state"]))
                for name in _differing(a, b, frozenset())
            ),
            files=frozenset(_differing(one["files"], other["files"], frozenset())),
            printed=frozenset([*(at for at, (a, b) in lines if a != b), *range(*rest)]),
            sums=next(differ, math.inf),
            steps=_parting(one, other) is not None,
            lines=_branch(one, other) is not None,
        )

    def __or__(self, other: Unstable) -> Unstable:
        return Unstable(
            state=self.state | other.state,
            files=self.files | other.files,
            printed=self.printed | other.printed,
            sums=min(self.sums, other.sums),
            steps=self.steps or other.steps,
            lines=self.lines or other.lines,
        )

    def names(self) -> Iterator[str]:
        """Yield what is not decided for it. Files and output are notes."""
        yield from sorted(self.state)
        if self.sums < math.inf:
            yield f"the sum or noise of release {int(self.sums) + 1}"
        if self.steps:
            yield "the order of steps"
        if self.lines:
            yield "the order of lines"

    def files_besides_logs(self) -> list[str]:
        """Return the files other than logs."""
        return sorted(name for name in self.files if not _is_log(name))


def _same_sums(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a release before its noise is the same, and its noise as large."""
    if (one["clip_norm"], one["noise_std"]) != (other["clip_norm"], other["noise_std"]):
        return False
    count = len(one["names"])
    norms = one["clip_norm"] if isinstance(one["clip_norm"], list) else [one["clip_norm"]] * count
    moves = (item.get("distances") or [0.0] * count for item in (one, other))
    return all(
        a == b or abs(a - b) <= TOLERANCE * norm or not math.isfinite(a + b)
        for a, b, norm in zip(*moves, norms, strict=True)
    )


def _is_log(name: str) -> bool:
    return any(part in name for part in LOGS)


def _changed(neighbour: Neighbour) -> ChangedRecord:
    return ChangedRecord(kind=neighbour.kind, dataset=neighbour.dataset, record=neighbour.record)


def releases_of(record: Record) -> list[dict[str, Any]]:
    """Return the events of releases."""
    return [event for event in record["events"] if event["kind"] == "release"]


def noise_findings(first: Record) -> list[ReplayFinding]:
    """Test the noise of the first run: that it is there, as large as accounted, and new each time.

    Larger noise than that is no fault. All releases together are tested, and each by itself; in
    the end each tensor.
    """
    events = first["events"]
    in_all: list[tuple[float, int]] = []
    by_name: dict[str, list[tuple[float, int]]] = {}
    last: dict[str, tuple[int, dict[str, Any], float]] = {}
    for number, event in enumerate(releases_of(first)):
        accounted = _accounted_std(events, event)
        expected = event["noise_std"] if accounted is None else accounted
        if event["noise_equals"] is not None:
            earlier = event["noise_equals"] + 1
            message = f"release {number + 1} has noise of release {earlier} again."
            return [_noise_finding("noise_repeated", message, FRESH_NOISE, number, event)]
        if not expected:
            continue
        silent: list[tuple[str, str]] = []
        for name, (squares, size) in zip(event["names"], event["noise"], strict=True):
            by_name.setdefault(name, []).append((squares / expected**2, size))
            last[name] = number, event, expected
            if size and not squares:
                silent.append((name, name))
        for name, count in event["noiseless"]:
            silent.append((f"a part of {name} ({count} values)", name))
        for part, name in silent:
            message = f"{part} gets no noise in release {number + 1}."
            return [_noise_finding("noise_missing", message, FULL_NOISE, number, event, name)]
        squares, size = map(sum, zip(*event["noise"], strict=True))
        in_all.append((squares / expected**2, size))
        for sums, which in (
            (in_all[-1:], f"release {number + 1}"),
            (in_all, f"releases 1 to {number + 1}"),
        ):
            if (ratio := _smaller_noise(sums)) is not None:
                message = (
                    f"the noise of {which} has standard deviation {ratio * expected:.4g}, not "
                    f"{expected:.4g}."
                )
                return [_noise_finding("noise_scaled", message, FULL_NOISE, number, event)]
    for name, sums in by_name.items():
        if (ratio := _smaller_noise(sums)) is not None:
            number, event, expected = last[name]
            message = (
                f"the noise of {name} has standard deviation {ratio * expected:.4g}, not "
                f"{expected:.4g}."
            )
            return [_noise_finding("noise_scaled", message, FULL_NOISE, number, event, name)]
    return []


def _smaller_noise(sums: Sequence[tuple[float, int]]) -> float | None:
    """Return the deviation's estimate over the expected one if it is too small, or None.

    ``sums`` has sums of squares of that many standard normals; their tail is that of Wilson and
    Hilferty's cube root.
    """
    total, count = map(sum, zip(*sums, strict=True))
    if not count:
        return None
    variance = 2 / (9 * count)
    score = ((total / count) ** (1 / 3) - 1 + variance) / math.sqrt(variance)
    return math.sqrt(total / count) if score < -NOISE_DEVIATIONS else None


def _noise_finding(
    code: str,
    message: str,
    remedy: str,
    number: int,
    event: dict[str, Any],
    subject: str | None = None,
) -> ReplayFinding:
    return ReplayFinding(
        code=code,
        check="noise",
        message=message,
        remedy=remedy,
        where=event["line"],
        subject=subject,
        release=number,
    )


def lot_findings(first: Record) -> list[ReplayFinding]:
    """Test the lots of the first run against their sampler's rate, and that against the accountant.

    Sizes are those before a replay thins a lot.
    """
    draws = [event for event in first["events"] if event["kind"] == "draw" and event["rate"]]
    charged = {e["sample_rate"] for e in first["events"] if e["kind"] == "accounted"} - {None}
    expected = sum(event["rate"] * event["records"] for event in draws)
    variance = sum(event["rate"] * (1 - event["rate"]) * event["records"] for event in draws)
    drawn = sum(event["size"] for event in draws)
    if abs(drawn - expected) > NOISE_DEVIATIONS * math.sqrt(variance) + NOISE_DEVIATIONS:
        return [
            ReplayFinding(
                code="lots_other_rate",
                remedy="Draw each batch by the sampler whose rate is accounted.",
                check="lots",
                message=f"{len(draws)} lots have {drawn} records; at their sampler's rate they "
                f"would have {expected:.4g} in expectation.",
                where=draws[0]["line"],
            )
        ]
    for at, event in enumerate(draws):
        if event["size"] >= FEW_RECORDS and event["places"] in [d["places"] for d in draws[:at]]:
            return [
                ReplayFinding(
                    code="lots_repeated",
                    remedy="Do not seed the sampler's generator again.",
                    check="lots",
                    message=f"lot {at + 1} has the records of an earlier lot again; each lot of a "
                    "Poisson sampler is drawn anew.",
                    where=event["line"],
                )
            ]
    rate = max((event["rate"] for event in draws), default=0.0)
    if charged and rate > max(charged) * (1 + TOLERANCE):
        return [
            ReplayFinding(
                code="lots_accounted_otherwise",
                remedy="Give the accountant the sampler's rate.",
                check="lots",
                message=f"lots are drawn at rate {rate:.6g}, but the accountant charges "
                f"{max(charged):.6g}.",
                where=draws[0]["line"],
            )
        ]
    return []


def checks_of(
    first: Record, findings: list[ReplayFinding], *, moved: bool, unstable: bool
) -> ReplayChecks:
    """Return what the runs say of each check. ``moved``: whether a release was compared."""
    events = first["events"]
    kinds = {event["kind"] for event in events}
    tested = {
        "sensitivity": moved,
        "non_interference": True,
        "noise": all(event["noise_std"] for event in releases_of(first)) and "release" in kinds,
        "lots": any(event["kind"] == "draw" and event["rate"] for event in events),
    }
    result: dict[str, Any] = {
        name: "shown" if is_ else "not_tested" for name, is_ in tested.items()
    }
    if unstable or any(item.code == "branch_by_record" for item in findings):
        result["non_interference"] = "undecided"
    result |= {item.check: "refuted" for item in findings if item.refutes}
    return ReplayChecks(**result)


def _accounted_std(events: list[dict[str, Any]], release: dict[str, Any]) -> float | None:
    """Return the standard deviation that the accountant charges for a release, if it is known."""
    later = events[events.index(release) + 1 :]
    for event in later:
        if event["kind"] == "release":
            return None
        if event["kind"] == "accounted" and event["noise_multiplier"] is not None:
            std, sigma = release["noise_std"], release.get("noise_multiplier")
            return float(std if not sigma else std * event["noise_multiplier"] / sigma)
    return None


def compare(
    first: Record,
    second: Record,
    unstable: Unstable,
    neighbour: Neighbour,
    removed: Record | None = None,
) -> tuple[list[ReplayFinding], float | None]:
    """Return what the neighbour shows, and the largest move of a release in clip norms.

    ``removed`` is the run without the changed record, a neighbour of ``second`` too.

    The move is None if no release of a lot with the record was compared. A file that differs by a
    record outside of the private data set fails only if the program branches on it, because the
    file may then be a model that such records chose.
    """
    findings: list[ReplayFinding] = []
    largest: float | None = None
    first_ones, second_ones = releases_of(first), releases_of(second)
    lots = lots_before_releases(first)
    if neighbour.kind == "not_finite":
        return _not_finite_findings(first_ones, second_ones, neighbour), None
    has_lots = any(neighbour.dataset == item[0] for lot in lots for item in lot)
    for number, (one, other) in enumerate(zip(first_ones, second_ones, strict=False)):
        differing = _differing(one["state"], other["state"], unstable.state)
        if differing:
            findings.append(_state_finding(differing, number, other["line"], neighbour))
            break
        if number >= unstable.sums:
            break
        read = {place for dataset, place in lots[number] if dataset == neighbour.dataset}
        changes_lot = neighbour.kind == "mixed" and not (
            read and read.isdisjoint(neighbour.rows or read)
        )
        if "distances" not in other or changes_lot or one["drawn"] != other["drawn"]:
            continue  # after unequal draws, such as drop-out in shorter rows, nothing is comparable
        if one["noise_std"] != other["noise_std"] or one["clip_norm"] != other["clip_norm"]:
            findings.append(_parameters_finding(one, other, number, neighbour))
            break
        times = lots[number].count([neighbour.dataset, neighbour.record]) if has_lots else 1
        moved, finding = _sensitivity(one, other, times, number, neighbour)
        others = [] if removed is None or neighbour.kind == "mixed" else releases_of(removed)
        if (
            finding is None
            and "distances_to_removed" in other
            and _alike(one, others[number : number + 1], unstable.state)
        ):
            also_moved, finding = _sensitivity(
                one, other, times, number, neighbour, to_removed=True
            )
            moved = max(moved, also_moved)
        if times and math.isfinite(moved):
            largest = max(largest or 0.0, moved)
        mixed = _mixing_finding(one, other, lots[number], number, neighbour)
        if finding is not None and mixed is not None:
            finding = finding.model_copy(update={"remedy": "Fix records_mixed first."})
        if finding is not None or mixed is not None:
            findings += filter(None, (mixed, finding))
            break
    if not findings:
        flow = None if unstable.steps else _flow_finding(first, second, neighbour)
        if flow is not None:
            findings.append(flow)
        else:
            differing = _differing(first["state"], second["state"], unstable.state)
            if differing:
                findings.append(_state_finding(differing, len(first_ones), None, neighbour))
    findings += _file_findings(first, second, unstable.files, neighbour)
    findings += _print_findings(first, second, unstable.printed, neighbour)
    is_compared = neighbour.kind != "removed" and not unstable.lines
    branch = _branch(first, second) if is_compared else None
    if branch is None and [neighbour.dataset, neighbour.record] in first["data"]["outside"]:
        findings = _outside_private(findings)
    if branch is not None and not any(finding.refutes for finding in findings):
        findings.append(
            ReplayFinding(
                code="branch_by_record",
                remedy="Branch by public values, or replay data on which both branches run.",
                check="non_interference",
                message=f"{branch} branches on a record. Nothing else differs in these steps.",
                where=branch,
                refutes=False,
                neighbour=_changed(neighbour),
            )
        )
    return findings, largest


def _alike(one: dict[str, Any], others: list[dict[str, Any]], unstable: frozenset[str]) -> bool:
    """Whether the other run was at the same release in the same state."""
    names = ("drawn", "noise_std", "clip_norm")
    return any(
        all(one[name] == other[name] for name in names)
        and not _differing(one["state"], other["state"], unstable)
        for other in others
    )


def _outside_private(findings: list[ReplayFinding]) -> list[ReplayFinding]:
    """Return the findings, where files that differ by a record that is not private are notes."""
    why = " The record is not in the private data set: a leak only if it is to be protected too."
    return [
        item.model_copy(update={"message": item.message + why, "refutes": False})
        if item.code == "file_differs"
        else item
        for item in findings
    ]


def _not_finite_findings(
    first_ones: list[dict[str, Any]], second_ones: list[dict[str, Any]], neighbour: Neighbour
) -> list[ReplayFinding]:
    """Return whether a record that is not a number makes a release one."""
    for number, (_, other) in enumerate(zip(first_ones, second_ones, strict=False)):
        if not all(map(math.isfinite, other.get("distances", ()))):
            return [
                ReplayFinding(
                    code="not_finite_released",
                    check="sensitivity",
                    message=f"a record that is not a number makes release {number + 1} one: "
                    "clipping does not bound it.",
                    remedy="Refuse or replace values that are not finite before training.",
                    where=other["line"],
                    release=number,
                    refutes=False,
                    neighbour=_changed(neighbour),
                )
            ]
    return []


def _parameters_finding(
    one: dict[str, Any], other: dict[str, Any], number: int, neighbour: Neighbour
) -> ReplayFinding:
    name = "clip_norm" if one["clip_norm"] != other["clip_norm"] else "noise_std"
    return ReplayFinding(
        code="parameters_differ",
        check="sensitivity",
        message=f"the {name} of release {number + 1} depends on a record: {one[name]} in one run, "
        f"{other[name]} in the other.",
        remedy="Fix clip norms and noise in advance, or compute them from released values.",
        where=other["line"],
        subject=name,
        release=number,
        neighbour=_changed(neighbour),
    )


def _differing(one: dict[str, str], other: dict[str, str], unstable: frozenset[str]) -> list[str]:
    names = [*one, *(name for name in other if name not in one)]
    return [n for n in names if n not in unstable and one.get(n) != other.get(n)]


def _state_finding(
    names: list[str], number: int, where: str | None, neighbour: Neighbour
) -> ReplayFinding:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    when = "before the first release" if number == 0 else f"after release {number}"
    return ReplayFinding(
        code="state_differs",
        remedy="Compute it from released values, public data or constants.",
        check="non_interference",
        message=f"{names[0]}{more}: depends on a record {when}, beyond the noisy releases.",
        where=where,
        subject=names[0],
        release=number,
        neighbour=_changed(neighbour),
    )


def lots_before_releases(record: Record) -> list[list[Any]]:
    """Return the records that were read for each release since the one before.

    Several releases of one lot have its records each.
    """
    result: list[list[Any]] = []
    current: list[Any] = []
    is_released = False
    for event in record["events"]:
        if event["kind"] == "lot" and event["is_private"]:
            current = event["records"] if is_released else current + event["records"]
            is_released = False
        elif event["kind"] == "release":
            result.append(current)
            is_released = True
    return result


def _sensitivity(
    one: dict[str, Any],
    other: dict[str, Any],
    times: int,
    number: int,
    neighbour: Neighbour,
    *,
    to_removed: bool = False,
) -> tuple[float, ReplayFinding | None]:
    """Compare the moves of a release with its clip norms.

    A record that is removed moves a sum by at most C; a changed one by at most 2 C, and those
    outside of its lot not at all. ``times`` is how often it was read for the release.
    ``to_removed``: compare the changed record with none.
    """
    distances = other["distances_to_removed" if to_removed else "distances"]
    norms, moves = one["clip_norm"], distances
    if not isinstance(norms, list):
        norms, moves = [norms], [math.sqrt(sum(move**2 for move in moves))]
    allowed = 1 if to_removed or neighbour.kind == "removed" else 2
    done = _changed(neighbour).change
    change = "that is removed" if to_removed else done
    ratios = [
        move / norm if norm and math.isfinite(norm) else math.inf if move else 0.0
        for move, norm in zip(moves, norms, strict=True)
    ]
    worst = max(range(len(moves)), key=ratios.__getitem__)
    ratio = ratios[worst]
    name = one["names"][worst] if len(moves) > 1 else "the joint release"
    is_one = neighbour.kind != "mixed"
    if is_one and (not math.isfinite(ratio) or ratio > allowed * (1 + TOLERANCE)):
        since = f" from data with a record {done}" if to_removed else ""
        read = f" It was read {times} times for this release." if times > 1 else ""
        return ratio, ReplayFinding(
            code="sensitivity_exceeded",
            remedy="Clip each record's gradient by itself, and add it once.",
            check="sensitivity",
            message=f"release {number + 1} moves by {ratio:.4g} clip norms ({name}, clip norm "
            f"{norms[worst]:.4g}){since}; a record {change} may move it by {allowed}.{read}",
            where=other["line"],
            subject=max(zip(distances, one["names"], strict=True))[1],
            release=number,
            neighbour=_changed(neighbour),
        )
    if times == 0 and not ratio <= TOLERANCE:
        return ratio, ReplayFinding(
            code="record_outside_lot",
            remedy="Let a release read only the records of its batch.",
            check="sensitivity",
            message=f"release {number + 1} moves by {ratio:.4g} clip norms, although no changed "
            "record is in its lot.",
            where=other["line"],
            release=number,
            neighbour=_changed(neighbour),
        )
    return ratio / allowed, None


def _mixing_finding(
    one: dict[str, Any],
    other: dict[str, Any],
    lot: list[Any],
    number: int,
    neighbour: Neighbour,
) -> ReplayFinding | None:
    """Compare what the other records of the batch add to a release."""
    first, second = one.get("parts"), other.get("parts")
    rest = [at for at, record in enumerate(lot) if record != [neighbour.dataset, neighbour.record]]
    if first is None or second is None or len(first) != len(lot) or len(rest) == len(lot):
        return None
    if neighbour.kind != "removed":
        second = [second[at] for at in rest] if len(second) == len(lot) else []
    if len(second) != len(rest):
        return None
    for at, changed in zip(rest, second, strict=True):
        moves = [abs(a - b) for a, b in zip(first[at], changed, strict=True)]
        if not math.sqrt(sum(move**2 for move in moves)) <= TOLERANCE:
            tensor = one["names"][max(range(len(moves)), key=moves.__getitem__)]
            return ReplayFinding(
                code="records_mixed",
                check="sensitivity",
                message=f"what record {lot[at][1]} adds to release {number + 1} depends on another "
                f"record of its batch (by {max(moves):.4g} clip norms in {tensor}), so clipping "
                "each record does not bound what that one changes.",
                remedy="Let the model and the loss treat each record as if it were alone, and pad "
                "records to one length for all batches.",
                where=other["line"],
                subject=tensor,
                release=number,
                neighbour=_changed(neighbour),
            )
    return None


def _flow_finding(first: Record, second: Record, neighbour: Neighbour) -> ReplayFinding | None:
    if (parting := _parting(first, second)) is None:
        return None
    what, line = parting
    return ReplayFinding(
        code="steps_differ",
        remedy="Stop and branch by released values, public data or constants.",
        check="non_interference",
        message=f"the steps depend on a record: {what}",
        where=_branch(first, second) or line,
        neighbour=_changed(neighbour),
    )


def _parting(first: Record, second: Record) -> tuple[str, str | None] | None:
    """Compare the order of lots, releases and the end of the loop; say where the runs part."""
    kinds = ("lot", "release", "accounted", "draw")
    first_ones = [event for event in first["events"] if event["kind"] in kinds]
    second_ones = [event for event in second["events"] if event["kind"] in kinds]
    ends = first["ended"], second["ended"]
    for one, other in zip(first_ones, second_ones, strict=False):
        if (one["kind"], one.get("records")) != (other["kind"], other.get("records")):
            return (
                f"where one run continues with a {one['kind']} ({one['line']}), the other "
                f"continues with a {other['kind']} ({other['line']})."
            ), other["line"]
    if len(first_ones) == len(second_ones) and ends[0] == ends[1]:
        return None
    return (
        f"one run ends {ends[0]} after {first['releases']} releases, the other "
        f"{ends[1]} after {second['releases']}."
    ), second["ended_at"]


def _branch(first: Record, second: Record) -> str | None:
    """Return the line after which the orders of lines first differ."""
    one, other = first["lines"]["order"], second["lines"]["order"]
    names = (first["lines"]["files"], second["lines"]["files"])
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            place = one[at - 1] if at else a
            return f"{names[0][place >> LINE_BITS]}:{place & ((1 << LINE_BITS) - 1)}"
    return None


def _file_findings(
    first: Record, second: Record, unstable: frozenset[str], neighbour: Neighbour
) -> list[ReplayFinding]:
    first_ones, second_ones = first["files"], second["files"]
    findings = []
    for name in sorted(_differing(first_ones, second_ones, unstable)):
        is_log = _is_log(name)
        if name in first_ones and name in second_ones:
            message = f"{name} has other contents."
        else:
            message = f"{name} is written in one run and not in the other."
        findings.append(
            ReplayFinding(
                code="raw_value_logged" if is_log else "file_differs",
                remedy="Write released values only, or do not publish this file.",
                check="non_interference",
                message=message,
                where=second["written"].get(name) or first["written"].get(name),
                subject=name,
                refutes=not is_log,
                neighbour=_changed(neighbour),
            )
        )
    return findings


def _print_findings(
    first: Record, second: Record, unstable: frozenset[int], neighbour: Neighbour
) -> list[ReplayFinding]:
    findings: dict[str | None, ReplayFinding] = {}
    for at, (one, other) in enumerate(zip(first["printed"], second["printed"], strict=False)):
        if one[0] != other[0]:
            break
        if one[1] != other[1] and at not in unstable and one[0] not in findings:
            findings[one[0]] = ReplayFinding(
                code="raw_value_logged",
                remedy="Do not publish this output, or release the value with noise.",
                check="non_interference",
                message=f"prints a value without noise: {one[1].strip()[:120]}",
                where=one[0],
                refutes=False,
                neighbour=_changed(neighbour),
            )
    return list(findings.values())
