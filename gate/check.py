"""``affidavit check``: the gate that fails when a plan may not run as it stands."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from affidavit.gate.checking.cache import Cache, folder
from affidavit.gate.checking.discovery import candidates
from affidavit.gate.checking.finding import Finding, Fix
from affidavit.gate.checking.formats import WRITERS
from affidavit.gate.checking.source import Source, sources_of
from affidavit.gate.checking.verdict import Judged, unreadable
from affidavit.gate.console import err, out, stop, write
from affidavit.gate.exits import Exit, worst
from affidavit.gate.options import PolicyFileOption
from affidavit.gate.report import printable
from affidavit.plan import MalformedPlan

if TYPE_CHECKING:
    from affidavit.certificate.policy import Policy
    from affidavit.gate.checking.server import Server

LEVELS = {"error": "red", "warning": "yellow", "note": "cyan"}
FORMATS = ("text", *WRITERS)


def check(
    plans: Annotated[
        list[str] | None,
        typer.Argument(
            help="Plans, folders or patterns; without any, those that [tool.affidavit] of "
            "pyproject.toml names."
        ),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="On standard output: " + ", ".join(FORMATS) + ".")
    ] = "text",
    report: Annotated[
        list[str] | None,
        typer.Option("--report", help="Write a report beside it, as FORMAT=FILE; repeatable."),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Make the first certified fix of each finding in place.")
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option("--diff", help="Show which change since this commit, or file, moved ε."),
    ] = None,
    second_opinion: Annotated[
        bool, typer.Option("--second-opinion", help="Ask a second engine about each plan.")
    ] = False,
    policy: PolicyFileOption = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            help="Ask this service too: policy, waivers, approvals, revocation. The token is "
            "AFFIDAVIT_TOKEN.",
        ),
    ] = None,
    cached: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Reuse what was judged before.")
    ] = True,
) -> None:
    """The gate: fail when a plan is under-noised, refused or malformed."""
    reports = _reports(format_, report or [])
    cache = Cache(folder()) if cached and not fix else None
    judged: list[Judged] = []
    asked = Asked(second_opinion, None if policy is None else _read_policy(policy))
    service = None if server is None else _server(server)
    for one, source in _judged(plans or [], cache, asked):
        found = (_mend(source, one, asked) if fix and source is not None else None) or one
        if service is not None and source is not None:
            found = service.judge(source, found)
        judged.append(found)
        if format_ == "text":
            _print(judged[-1])
        if diff is not None and source is not None:
            _print_difference(source, diff)
    if cache is not None and cache.corrupt:
        judged.append(_corrupt(cache))
        _print(judged[-1])
    if not judged:
        err.print("no plan was found, so nothing was checked.", highlight=False)
    if format_ != "text":
        out.out(WRITERS[format_](judged), end="", highlight=False)
    for kind, path in reports:
        write(path, WRITERS[kind](judged).encode("utf-8", "backslashreplace"))
    raise typer.Exit(worst(one.exit for one in judged))


@dataclass(frozen=True, slots=True)
class Asked:
    """How every plan is judged."""

    second_opinion: bool
    policy: Policy | None

    def judge(self, source: Source) -> Judged:
        """What is to be said about one plan."""
        # Loaded when something is judged: a cached answer needs no accountant.
        from affidavit.gate.checking.judge import judge

        return judge(source, second_opinion=self.second_opinion, policy=self.policy)


def _judged(
    names: Sequence[str], cache: Cache | None, asked: Asked
) -> Iterator[tuple[Judged, Source | None]]:
    """Everything that was found, judged, in the order of the names."""
    try:
        for candidate in candidates(names):
            try:
                found = list(sources_of(candidate.file, asked_for=candidate.asked_for))
            except MalformedPlan as error:
                yield unreadable(candidate.file, error.reasons), None
                continue
            for source in found:
                yield _judge(source, cache, asked), source
    except MalformedPlan as error:
        yield unreadable("affidavit check", error.reasons), None


def _server(address: str) -> Server:
    # Loaded when it is asked for: a gate that works offline needs no network.
    from affidavit.gate.checking.server import Server

    return Server(address, folder())


def _read_policy(path: Path) -> Policy:
    # Loaded when it is asked for: most checks have none.
    from affidavit.gate.policy import read_policy

    return read_policy(path)


def _judge(source: Source, cache: Cache | None, asked: Asked) -> Judged:
    if cache is None or not source.text or source.names_a_file:
        return asked.judge(source)
    text = hashlib.sha256(source.text.encode("utf-8", "surrogatepass")).hexdigest()
    question = {
        "file": source.file,
        "pointer": source.pointer,
        "text": text,
        "second_opinion": asked.second_opinion,
        "policy": None if asked.policy is None else asked.policy.digest(),
    }
    return cache.get(question, lambda: asked.judge(source))


def _mend(source: Source, found: Judged, asked: Asked) -> Judged | None:
    """What is judged after the first fixes were made in the file, if there were any to make."""
    from affidavit.gate.checking.edits import applied

    # Where a link leads, so that the link stays; a pipe was read and has nothing to mend.
    file = Path(source.file).resolve()
    if not _fixes(found) or source.file == "-" or not file.is_file():
        return None
    whole = file.read_bytes()
    now = source.same_in(whole)
    if now is not None and now.text != source.text:
        # Another plan of the same file was mended before, and its edits have moved this one.
        found = asked.judge(now)
    fixes = _fixes(found)
    edits = tuple(edit for fix in fixes for edit in fix.edits)
    text = applied(whole.decode("utf-8"), edits)
    write(file, text.encode(), mode=stat.S_IMODE(file.stat().st_mode))
    for item in fixes:
        err.print(f"{escape(printable(source.name))}: fixed: {escape(item.description)}")
    again = source.same_in(text.encode())
    return None if again is None else asked.judge(again)


def _fixes(found: Judged) -> list[Fix]:
    return [
        finding.fixes[0] for finding in found.findings if finding.fixes and finding.fixes[0].edits
    ]


def _print(one: Judged) -> None:
    for finding in one.findings:
        place = f":{finding.line}:{finding.column}" if finding.line is not None else ""
        field = f" {finding.pointer}" if finding.pointer else ""
        waived = " (waived)" if finding.waiver is not None else ""
        line = printable(f"{finding.file}{place}: {finding.rule}{field}{waived}: {finding.text}")
        style = "dim" if finding.waiver is not None else LEVELS[finding.level]
        err.print(f"[{style}]{escape(line)}[/]", highlight=False)
    if one.exit is Exit.CERTIFIED:
        line = printable(f"{one.name}: {one.headline}")
        out.print(f"[green]{escape(line)}[/]", highlight=False)


def _print_difference(source: Source, base: str) -> None:
    from affidavit.gate.checking.base import NoBase, former
    from affidavit.gate.checking.diff import difference

    try:
        raw = former(source.file, base)
    except NoBase as error:
        stop(f"--diff: {error}.")
    name = escape(printable(source.name))
    before = None if raw is None else source.same_in(raw)
    if before is None:
        err.print(f"{name}: there was no such plan in {escape(base)}.", highlight=False)
        return
    found = difference(before.data, source.data)
    err.print(f"{name}: {found.before} -> {found.after}", highlight=False)
    for change in found.changes:
        line = printable(
            f"  {change.pointer}: {change.before} -> {change.after}; alone: {change.alone}"
        )
        err.print(escape(line), highlight=False)


def _corrupt(cache: Cache) -> Judged:
    message = (
        f"{len(cache.corrupt)} entries of the cache did not fit their checksums, like "
        f"{cache.corrupt[0].name}; they were removed and their plans judged anew."
    )
    remedy = "Run the check again; if it comes back, find out what writes to the cache."
    told = Finding(
        file=str(cache.corrupt[0]),
        rule="corrupt_cache",
        level="error",
        message=message,
        remedy=remedy,
    )
    return Judged(file=told.file, name="cache", exit=Exit.UNDECIDED, findings=(told,))


def _reports(format_: str, given: list[str]) -> list[tuple[str, Path]]:
    if format_ not in FORMATS:
        stop(f"--format {format_} is not known; choose one of {', '.join(FORMATS)}.")
    found: list[tuple[str, Path]] = []
    for item in given:
        kind, _, file = item.partition("=")
        if kind not in WRITERS or not file:
            stop(f"--report {item} is not FORMAT=FILE with one of {', '.join(WRITERS)}.")
        found.append((kind, Path(file)))
    return found
