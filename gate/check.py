"""``affidavit check``: fail if a plan is under-noised, refused or malformed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.markup import escape

from affidavit.gate.checking.box import Ended, run_in_box
from affidavit.gate.checking.cache import Evaluator, cache_folder, is_in_repository
from affidavit.gate.checking.discovery import Skipped
from affidavit.gate.checking.finding import CheckResult, GateFinding
from affidavit.gate.checking.formats import WRITERS, add_changes
from affidavit.gate.checking.repository_check import (
    Checked,
    Evaluating,
    RepositoryCheck,
    Searched,
    UnreadableBase,
    UnwritableFix,
)
from affidavit.gate.console import (
    err,
    fail,
    out,
    print_document,
    require_writable,
    show_status,
    stop,
    stop_unwritable,
    write,
)
from affidavit.gate.exit_codes import Exit, worst
from affidavit.gate.options import PolicyFileOption, SecondOpinionOption
from affidavit.plan import Reason, printable

if TYPE_CHECKING:
    from affidavit.certificate.policy import Policy

T = TypeVar("T")

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
    folder = _trusted_cache() if cached or server is not None else None
    evaluator = Evaluator(second_opinion, rules, folder if cached and not fix else None)
    service = None
    if server is not None:
        # Imported here because offline checks need no network.
        from affidavit.gate.checking.service_check import ServiceCheck
        from affidavit.gate.service_commands import require_url

        require_url(server)
        service = ServiceCheck(server, folder)
    work = RepositoryCheck(plans or [], evaluator, service, fix=fix, base=diff)
    searched: list[str] = []
    corrupt: list[Path] = []
    try:
        for message in _with_status(run_in_box(work, asks_service=service is not None)):
            match message:
                case Searched(file=file):
                    searched.append(file)
                case Skipped(file=file, why=why):
                    err.print(escape(f"{printable(file)}: skipped: {why}"))
                case Checked() | Ended():
                    one = (
                        message if isinstance(message, Checked) else Checked(_ended_result(message))
                    )
                    for line in one.fixed:
                        err.print(escape(line))
                    results.append(one.result)
                    if format_ == "text":
                        _print(one.result)
                    if one.changes:
                        changes += one.changes
                        err.print(escape("\n".join(one.changes)))
                    corrupt += one.corrupt
    except UnwritableFix as error:
        stop_unwritable(error.file, error.cause)
    except UnreadableBase as error:
        stop(f"--diff: {error}.")
    if corrupt:
        results.append(_corrupt_cache(corrupt))
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


def _trusted_cache() -> Path | None:
    """Return the cache folder, or None if writers of the repository may also write to it."""
    folder = cache_folder()
    if not is_in_repository(folder):
        return folder
    err.print(escape(f"{printable(str(folder))}: skipped: a cache in the repository is not used"))
    return None


def _with_status(stream: Iterator[T | Evaluating]) -> Iterator[T]:
    """Yield all other messages, and show on a terminal which plan is being evaluated."""
    label: str | None = None
    while True:
        with nullcontext() if label is None else show_status(f"checking {label}"):
            message = next(stream, None)
        if message is None:
            return
        label = printable(message.name) if isinstance(message, Evaluating) else None
        if not isinstance(message, Evaluating):
            yield message


def _ended_result(ended: Ended) -> CheckResult:
    """Return the result of a file whose reading met a limit."""
    rest = " No file after it was checked." if ended.is_over else ""
    reason = Reason(
        code="limit_reached",
        message=f"{ended.item} was not checked: {ended.why}.{rest}",
        remedy="Make the file simpler, or raise the limit in [tool.affidavit.limits] of "
        "pyproject.toml.",
    )
    finding = GateFinding.of(ended.item, reason)
    return CheckResult(file=ended.item, name=ended.item, exit=Exit.UNDECIDED, findings=(finding,))


def _search_summary(searched: Sequence[str], results: Sequence[CheckResult]) -> str:
    """Return which scripts and notebooks of folders make a private call."""
    reported = {result.file for result in results}
    private = [name for name in searched if name in reported]
    notebooks = sum(name.lower().endswith(".ipynb") for name in searched)
    from affidavit.importers import LIBRARIES

    files = f"scripts searched: {len(searched) - notebooks:,}, notebooks: {notebooks:,}"
    if private:
        names = ", ".join(private)
        return printable(f"{files}; with a private call: {names}.")
    return f"{files}; none makes a private call of {', '.join(LIBRARIES)}."


def _read_policy(path: Path) -> Policy:
    # Imported here because most checks have no policy.
    from affidavit.gate.policy import read_policy

    return read_policy(path)


def _print(result: CheckResult) -> None:
    from affidavit.gate.render import print_excerpt

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
