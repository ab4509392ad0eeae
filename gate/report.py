"""What the gate prints for a person.

One finding is one line that an editor can jump to (``file:line:col``), with the code, the
numbers and the remedy. Upper bounds are printed rounded up and lower bounds down.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from affidavit.accountants import decimal_down, decimal_up
from affidavit.certificate import Assessment
from affidavit.certificate.policy import refused_by_policy
from affidavit.plan import Reason

STYLE = {"certified": "green", "under_noised": "red", "refused": "red", "undecided": "yellow"}
DIGITS = 6


def finding(name: str, reason: Reason) -> str:
    """One reason on one line, whatever its text was made of."""
    place = f":{reason.line}:{reason.column}" if reason.line is not None else ""
    field = f" {reason.pointer}" if reason.pointer else ""
    return printable(
        f"{name}{place}: {reason.code}{field}: {reason.message} {reason.remedy}".rstrip()
    )


def printable(text: str) -> str:
    """``text`` with what would steer a terminal, or break a line, written as an escape."""
    return "".join(
        item if item.isprintable() else item.encode("unicode_escape").decode() for item in text
    )


def headline(assessment: Assessment) -> str:
    """The verdict in one sentence."""
    by_policy = refused_by_policy(
        assessment.verdict, [reason.code for reason in assessment.reasons]
    )
    if (
        assessment.epsilon is None
        or assessment.delta is None
        or (assessment.verdict == "refused" and not by_policy)
    ):
        return "refused: nothing may be claimed about this plan."
    epsilon = decimal_up(assessment.epsilon.upper, DIGITS)
    delta = decimal_up(assessment.delta.upper, DIGITS)
    chance = "" if assessment.confidence is None else f" {assessment.confidence}"
    scope = f"under {assessment.adjacency}, for one {assessment.unit}"
    match assessment.verdict:
        case "certified":
            return f"certified: ε ≤ {epsilon} at δ = {delta}{chance}, {scope}."
        case "refused":
            return f"refused by policy: ε ≤ {epsilon} at δ = {delta}{chance} is proved, {scope}."
        case "under_noised":
            target = assessment.target_epsilon
            # Without a target it is the plan's claim that does not hold; the reasons name it.
            less = "less is claimed" if target is None else f"{target:g} is asked"
            return f"under-noised: ε ≤ {epsilon} at δ = {delta} is proved{chance}, {less}."
        case _:
            return "undecided: independent engines contradict each other; nothing is claimed."


def print_assessment(
    console: Console, name: str, reasons: tuple[Reason, ...], assessment: Assessment
) -> None:
    """The whole of an assessment, for ``certify``; ``reasons`` are its own, with positions."""
    style = STYLE[assessment.verdict]
    console.print(f"[bold {style}]{escape(headline(assessment))}[/]", highlight=False)
    for reason in reasons:
        console.print(escape(finding(name, reason)), highlight=False, soft_wrap=True)
    if assessment.releases:
        console.print(_noise_table(assessment))
    for line in _facts(assessment):
        console.print(escape(line), highlight=False, soft_wrap=True)
    if assessment.planning:
        console.print("planning figures, for information and no guarantee:", highlight=False)
    for entry in assessment.planning:
        console.print(f"  {escape(_figures(entry))}", highlight=False, soft_wrap=True)
    for warning in assessment.warnings:
        console.print(
            f"[yellow]warning[/] {warning.code}: {escape(warning.message)}",
            highlight=False,
            soft_wrap=True,
        )


def _noise_table(assessment: Assessment) -> Table:
    table = Table(title="noise multipliers", title_justify="left", box=None, pad_edge=False)
    for heading in ("release", "blocks", "given", "required"):
        table.add_column(heading, justify="left" if heading == "release" else "right")
    for release in assessment.releases:
        table.add_row(
            release.name if release.phase is None else f"{release.phase}/{release.name}",
            str(release.count),
            "" if release.given is None else f"{release.given:.7g}",
            "" if release.required is None else f"{release.required:.7g}",
        )
    return table


def _facts(assessment: Assessment) -> list[str]:
    found = []
    if assessment.joint is not None:
        found.append(f"joint noise multiplier of a step: {decimal_down(assessment.joint, DIGITS)}")
    if assessment.mu is not None:
        found.append(f"exactly Gaussian, μ = {decimal_up(assessment.mu, DIGITS)}")
    found += [_strategy(entry) for entry in assessment.strategies]
    saving = (assessment.allocation or {}).get("saving")
    if saving:
        kind = (assessment.allocation or {})["kind"]
        found.append(f"the {kind} allocation needs {saving:.1%} less noise energy than uniform")
    found += [_sampling(entry) for entry in assessment.sampling]
    for opinion in assessment.accountants:
        low = decimal_down(opinion.epsilon.lower, 8)
        high = decimal_up(opinion.epsilon.upper, 8)
        drawn = opinion.confidence
        chance = "" if drawn is None else f" {drawn} over draws from seed {drawn.seed}"
        found.append(f"{opinion.name} ({opinion.version}): ε in [{low}, {high}]{chance}")
    return found


def _strategy(entry: dict[str, Any]) -> str:
    bound = "" if entry["exact"] else " at most"
    parts = [
        f"{entry['kind']} noise: sensitivity{bound} {decimal_up(entry['sensitivity'], DIGITS)}"
    ]
    if entry["rms_error"] is not None:
        parts.append(f"rms error {entry['rms_error']:.5g} and maximum {entry['max_error']:.5g}")
    return ", ".join([*parts, f"{entry['buffers']} buffers"])


FIGURES = {
    "noise_std_of_mean": "noise in an entry of the mean",
    "phi": "Φ =",
    "prefix_sum_std": "in the sum of all",
    "signal_to_noise_at_most": "signal-to-noise at most",
    "noise_share_at_least": "ρ at least",
    "momentum_norm": "‖M‖_F of the noise",
    "probe_std": "ρ_t =",
}
"""How each planning figure is named to a person."""


def _figures(entry: dict[str, Any]) -> str:
    where = f"{entry['phase']}/{entry['release']}" if "phase" in entry else entry["release"]
    shown = [f"{name} {entry[key]:.3g}" for key, name in FIGURES.items() if key in entry]
    return f"{where}: {', '.join(shown)}"


def _sampling(entry: dict[str, Any]) -> str:
    parts = [f"sampling: {entry['scheme']}"]
    if entry["probability"] is not None:
        parts.append(f"q = {entry['probability']:.6g}")
    if entry.get("lot_size") is not None:
        parts.append(f"lots of {entry['lot_size']}")
    if entry["steps"] is not None:
        parts.append(f"{entry['steps']} steps")
    if "participations" in entry:
        parts.append(f"{entry['participations']} participations of a record")
    return ", ".join(parts)
