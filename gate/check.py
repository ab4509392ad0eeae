"""``affidavit check``: fail if a plan is under-noised, refused or malformed."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from affidavit.gate.checking.cache import Evaluator, cache_folder
from affidavit.gate.checking.discovery import candidates
from affidavit.gate.checking.finding import CheckResult, Fix, GateFinding, unreadable_result
from affidavit.gate.checking.formats import WRITERS, add_changes
from affidavit.gate.checking.source import Source, read_sources
from affidavit.gate.console import (
    err,
    fail,
    out,
    print_document,
    require_writable,
    stop,
    write,
)
from affidavit.gate.exit_codes import Exit, worst
from affidavit.gate.options import PolicyFileOption, SecondOpinionOption
from affidavit.gate.render import print_excerpt
from affidavit.importers import LIBRARIES
from affidavit.plan import MalformedPlan, printable

if TYPE_CHECKING:
    from affidavit.certificate.policy import Policy

SCRIPT_SUFFIXES = (".py", ".ipynb")
LEVEL_STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}
FORMATS = ("text", *WRITERS)


def check(
    plans: Annotated[
        list[str] | None,
        typer.Argument(
            help="Plan files, folders or patterns; default: [tool.affidavit] in pyproject.toml."
        ),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="Output format: " + ", ".join(FORMATS) + ".")
    ] = "text",
    report: Annotated[
        list[str] | None,
        typer.Option("--report", help="Also write a report, as FORMAT=FILE; repeatable."),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Apply the first certified fix of each finding in place.")
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option("--diff", help="Show which changes since this commit or file moved ε."),
    ] = None,
    comment: Annotated[
        str | None,
        typer.Option(
            "--comment",
            help="Post the verdicts as a comment of the pull or merge request of this pipeline, "
            "on github or gitlab, with fixes as suggested changes; with --diff, also "
            "the changes that moved ε. The token is read from GITHUB_TOKEN or GITLAB_TOKEN.",
        ),
    ] = None,
    second_opinion: SecondOpinionOption = False,
    policy: PolicyFileOption = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            help="Also check policy, waivers, approvals and revocation with this service. The "
            "token is read from AFFIDAVIT_TOKEN.",
        ),
    ] = None,
    cached: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Reuse earlier results.")
    ] = True,
) -> None:
    """Fail if a plan is under-noised, refused or malformed."""
    reports = _parse_reports(format_, report or [])
    results: list[CheckResult] = []
    changes: list[str] = []
    if comment not in (None, "github", "gitlab"):
        stop(f"unknown --comment {comment}; choose github or gitlab.")
    rules = None if policy is None else _read_policy(policy)
    evaluator = Evaluator(second_opinion, rules, cache_folder() if cached and not fix else None)
    service = None
    if server is not None:
        # Imported here because offline checks need no network.
        from affidavit.gate.checking.service_check import ServiceCheck
        from affidavit.gate.service_commands import require_url

        require_url(server)
        service = ServiceCheck(server, cache_folder())
    searched: list[str] = []
    for original, source in _results(plans or [], evaluator, searched):
        fixed = _apply_fixes(source, original, evaluator) if fix and source is not None else None
        result = fixed or original
        if service is not None and source is not None:
            result = service.apply(source, result)
        results.append(result)
        if format_ == "text":
            _print(result)
        if diff is not None and source is not None:
            changes += (lines := _changes_since(source, diff))
            err.print(escape("\n".join(lines)))
    if evaluator.corrupt:
        results.append(_corrupt_cache(evaluator.corrupt))
        _print(results[-1])
    if searched and format_ == "text":
        err.print(escape(_search_summary(searched, results)))
    if not results:
        err.print("no plans found, nothing was checked. Name a plan, or write one: affidavit init.")
    if format_ != "text":
        print_document(WRITERS[format_](results))
    for kind, path in reports:
        write(path, WRITERS[kind](results).encode("utf-8", "backslashreplace"))
    if comment is not None:
        _post(comment, results, changes)
    raise typer.Exit(worst(result.exit for result in results))


def _results(
    names: Sequence[str], evaluator: Evaluator, searched: list[str]
) -> Iterator[tuple[CheckResult, Source | None]]:
    """Yield the results of all plans, in the order of the names.

    Appends the scripts and notebooks of folders and patterns to ``searched``.
    """
    try:
        for candidate in candidates(names):
            if not candidate.explicit and candidate.file.lower().endswith(SCRIPT_SUFFIXES):
                searched.append(candidate.file)
            try:
                sources = list(read_sources(candidate.file, explicit=candidate.explicit))
            except MalformedPlan as error:
                yield unreadable_result(candidate.file, error.reasons), None
                continue
            for source in sources:
                yield evaluator.evaluate_cached(source), source
    except MalformedPlan as error:
        yield unreadable_result("affidavit check", error.reasons), None


def _search_summary(searched: Sequence[str], results: Sequence[CheckResult]) -> str:
    """Return which scripts and notebooks of folders make a private call."""
    private = [name for name in searched if any(result.file == name for result in results)]
    notebooks = sum(name.lower().endswith(".ipynb") for name in searched)
    files = f"scripts searched: {len(searched) - notebooks:,}, notebooks: {notebooks:,}"
    if private:
        names = ", ".join(private)
        return printable(f"{files}; with a private call: {names}.")
    return f"{files}; none makes a private call of {', '.join(LIBRARIES)}."


def _read_policy(path: Path) -> Policy:
    # Imported here because most checks have no policy.
    from affidavit.gate.policy import read_policy

    return read_policy(path)


def _apply_fixes(source: Source, result: CheckResult, evaluator: Evaluator) -> CheckResult | None:
    """Apply the first fix of each finding and evaluate again; return None without fixes."""
    # A symbolic link is resolved so that its target is edited. A pipe cannot be edited.
    file = Path(source.file).resolve()
    if not _fixes(result) or source.file == "-" or not file.is_file():
        return None
    from affidavit.gate.checking.fixes import apply_edits

    content = file.read_bytes()
    current = source.find_same(content)
    if current is not None and current.text != source.text:
        # A fix of another plan in the same file has moved this one.
        result = evaluator.evaluate(current)
    fixes = _fixes(result)
    edits = tuple(edit for fix in fixes for edit in fix.edits)
    text = apply_edits(content.decode("utf-8"), edits)
    write(file, text.encode(), mode=stat.S_IMODE(file.stat().st_mode))
    for fix in fixes:
        err.print(f"{escape(printable(source.name))}: fixed: {escape(fix.description)}")
    fixed = source.find_same(text.encode())
    return None if fixed is None else evaluator.evaluate(fixed)


def _fixes(result: CheckResult) -> list[Fix]:
    return [
        finding.fixes[0] for finding in result.findings if finding.fixes and finding.fixes[0].edits
    ]


def _print(result: CheckResult) -> None:
    for finding in result.findings:
        style = "dim" if finding.waiver is not None else LEVEL_STYLES[finding.level]
        line = printable(finding.line_text(with_pointer=True))
        err.print(f"[{style}]{escape(line)}[/]")
        print_excerpt(err, finding.file, finding.line, finding.column, finding.rule)
    if result.exit is Exit.CERTIFIED:
        line = printable(f"{result.name}: {result.headline}")
        out.print(f"[green]{escape(line)}[/]")


def _post(host: str, results: Sequence[CheckResult], changes: Sequence[str]) -> None:
    """Post the verdicts; report a comment that cannot be posted and exit."""
    # Imported here because most checks need no network.
    from affidavit.gate.checking.comment import CommentError, find_suggestions, post

    try:
        body = add_changes(WRITERS["markdown"](results), changes)
        post(host, body, suggested=list(find_suggestions(results)))
    except CommentError as error:
        fail(f"--comment: {error}.", worst([*(result.exit for result in results), Exit.UNDECIDED]))


def _changes_since(source: Source, base: str) -> list[str]:
    # Imported here because most checks compare nothing.
    from affidavit.gate.checking.evaluate import UnreadableBase, describe_changes

    try:
        return describe_changes(source, base)
    except UnreadableBase as error:
        stop(f"--diff: {error}.")


def _corrupt_cache(entries: Sequence[Path]) -> CheckResult:
    finding = GateFinding(
        file=str(entries[0]),
        rule="corrupt_cache",
        level="error",
        message=f"{len(entries)} corrupt cache entries, like {entries[0].name}, were removed and "
        "their plans checked again.",
        remedy="Run the check again; if this happens again, find the program that writes to the "
        "cache.",
    )
    return CheckResult(file=finding.file, name="cache", exit=Exit.UNDECIDED, findings=(finding,))


def _parse_reports(format_: str, options: list[str]) -> list[tuple[str, Path]]:
    if format_ not in FORMATS:
        stop(f"unknown --format {format_}; choose one of {', '.join(FORMATS)}.")
    reports: list[tuple[str, Path]] = []
    for option in options:
        kind, _, file = option.partition("=")
        if kind not in WRITERS or not file:
            stop(f"--report {option}: use FORMAT=FILE with one of {', '.join(WRITERS)}.")
        require_writable(Path(file))
        reports.append((kind, Path(file)))
    return reports
