"""The command line: what people and pipelines ask, and the service's own commands.

It works offline. Exit codes: 0 certified, 1 blocked (under-noised, refused, or a bundle
that does not verify), 2 usage or malformed input, 3 could not decide, or nobody read on.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from affidavit import __version__
from affidavit.accountants.registry import NAMES
from affidavit.certificate.assessment import Assessment
from affidavit.certificate.certify import certify as assess
from affidavit.certificate.issue import Certificate, issue
from affidavit.certificate.keys import KeyFailure, KeyStore, SigningKey, home
from affidavit.gate import batch as batching
from affidavit.gate.advise import advise
from affidavit.gate.console import err, out, print_findings, read, require_engine, stop, write
from affidavit.gate.curve import curve
from affidavit.gate.diagnose import diagnose
from affidavit.gate.exits import OF_VERDICT, Exit, worst
from affidavit.gate.files import print_json
from affidavit.gate.mechanisms import mechanisms
from affidavit.gate.reading import PlanFile, lines_as_they_come, read_plan
from affidavit.gate.report import headline, print_assessment, printable
from affidavit.gate.strategy import strategy
from affidavit.gate.verifying import verify_bundle
from affidavit.plan.reasons import MalformedPlan

app = typer.Typer(
    name="affidavit",
    help="Certify differentially private training plans, and check what was certified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="Signing keys.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")

PlanArgument = Annotated[str, typer.Argument(help="A plan, YAML or JSON; - reads it from stdin.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result document.")]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="Use one accountant only: " + ", ".join(NAMES) + "."),
]


@app.command()
def certify(
    plan: PlanArgument,
    as_json: JsonOption = False,
    bundle: Annotated[
        Path | None, typer.Option("--out", help="Write the signed bundle to this file.")
    ] = None,
    engine: EngineOption = None,
) -> None:
    """The noise a plan needs, or the ε it really has, as a bracket with the reasons."""
    require_engine(engine)
    file = read(plan, as_json=as_json)
    key = _signing_key(required=bundle is not None)
    assessment = assess(file.plan, engine=engine)
    certificate: Certificate | None = None
    if key is not None:
        certificate = issue(
            assessment, key, requester=_user(), issued_at=datetime.now(UTC).replace(microsecond=0)
        )
    if bundle is not None and certificate is not None:
        write(bundle, certificate.bundle)
    if as_json:
        print_json(
            assessment.as_result() if certificate is None else certificate.as_result(assessment)
        )
    else:
        _print_for_people(file, assessment, certificate, bundle)
    raise typer.Exit(OF_VERDICT[assessment.verdict])


@app.command()
def check(
    plans: Annotated[list[str], typer.Argument(help="Plans to check.")],
) -> None:
    """The gate: fail when a plan is under-noised, refused or malformed."""
    exits = []
    for name in plans:
        try:
            file = read_plan(name)
        except MalformedPlan as error:
            print_findings(name, error.reasons)
            exits.append(Exit.USAGE)
            continue
        assessment = assess(file.plan, second_opinion=False)
        print_findings(name, file.locate(assessment.reasons))
        if assessment.verdict == "certified":
            out.print(
                f"[green]{escape(printable(name))}: {escape(headline(assessment))}[/]",
                highlight=False,
            )
        exits.append(OF_VERDICT[assessment.verdict])
    raise typer.Exit(worst(exits))


@app.command()
def batch(
    plans: Annotated[str, typer.Argument(help="One JSON plan a line; - reads stdin.")],
    engine: EngineOption = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes to use.")] = os.cpu_count()
    or 1,
    second_opinion: Annotated[
        bool, typer.Option("--second-opinion", help="Ask a second engine about each plan.")
    ] = False,
) -> None:
    """One result a line, in the order of the plans; a bad line stops nothing."""
    require_engine(engine)
    exits: set[Exit] = set()
    with _open(plans) as lines, _progress() as progress:
        total = None if plans == "-" else _count_lines(plans)
        task = progress.add_task("plans", total=total)
        found = batching.answers(
            lines_as_they_come(lines),
            jobs=jobs,
            engine=engine,
            second_opinion=second_opinion,
            directory=Path() if plans == "-" else Path(plans).parent,
        )
        for result, code in found:
            print_json(result)
            exits.add(code)
            progress.advance(task)
    if not exits:
        err.print(f"{escape(plans)}: no plan in it, so nothing was checked.")
    raise typer.Exit(worst(exits))


@app.command()
def verify(
    bundle: Annotated[str, typer.Argument(help="A certificate bundle; - reads stdin.")],
    plan: Annotated[
        str | None, typer.Option("--plan", help="The plan that it must be about.")
    ] = None,
    keys: Annotated[
        list[Path] | None,
        typer.Option(
            "--keys",
            help="Public keys to trust, as GET /v1/keys answers them, instead of your own.",
        ),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Run the accountants again and compare.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a certificate offline, step by step; 0 only if it verifies and certifies."""
    file = None if plan is None else read(plan, as_json=False)
    try:
        code = verify_bundle(out, bundle, file, keys or [], recompute=recompute, as_json=as_json)
    except (KeyFailure, MalformedPlan) as failure:
        stop(str(failure))
    raise typer.Exit(code)


@app.command(context_settings={"allow_extra_args": False})
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8321,
) -> None:
    """Run the HTTP service."""
    _become_service("serve", "--host", host, "--port", str(port))


@app.command()
def migrate() -> None:
    """Bring the service's database (DATABASE_URL) to this release's schema."""
    _become_service("migrate")


app.command()(curve)
app.command()(diagnose)
app.command()(mechanisms)
app.command()(strategy)
app.command()(advise)


@keys_app.command("new")
def keys_new(
    label: Annotated[str, typer.Option(help="A name for people to know the key by.")] = "",
) -> None:
    """Create a signing key; its private half stays in the key directory."""
    try:
        key = _store().new(label)
    except OSError as error:
        stop(f"{error.filename} cannot be written: {error.strerror}.")
    out.print(f"{key.key_id}  signs until {key.public.not_after:%Y-%m-%d}", highlight=False)
    out.print(f"kept in {_store().directory}", highlight=False)


@keys_app.command("list")
def keys_list(as_json: JsonOption = False) -> None:
    """The keys in the key directory, oldest first."""
    try:
        found = _store().public_keys()
    except KeyFailure as failure:
        stop(str(failure))
    if as_json:
        print_json({"keys": [key.as_record() for key in found]})
        return
    for key in found:
        out.print(
            f"{key.key_id}  {key.not_before:%Y-%m-%d} to {key.not_after:%Y-%m-%d}  "
            f"{escape(key.label)}",
            highlight=False,
        )
    if not found:
        err.print("No keys yet; run `affidavit keys new`.", highlight=False)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Certify differentially private training plans, and check what was certified."""
    if version:
        out.print(__version__, highlight=False)
        raise typer.Exit


def main() -> None:
    """Entry point."""
    app()


# ---- shared by the commands --------------------------------------------------------


def _print_for_people(
    file: PlanFile,
    assessment: Assessment,
    certificate: Certificate | None,
    bundle: Path | None,
) -> None:
    print_assessment(out, file.name, file.locate(assessment.reasons), assessment)
    if certificate is None:
        out.print("not signed: run `affidavit keys new` to sign certificates.", highlight=False)
    else:
        out.print(f"certificate {certificate.id}", highlight=False)
    if bundle is not None:
        out.print(f"bundle written to {escape(str(bundle))}", highlight=False)


def _store() -> KeyStore:
    return KeyStore(home() / "keys")


def _signing_key(*, required: bool) -> SigningKey | None:
    try:
        key = _store().signing_key()
    except KeyFailure as failure:
        stop(str(failure))
    if key is None and required:
        stop("--out needs a signing key and there is none; run `affidavit keys new`.")
    return key


def _user() -> str:
    return f"{os.environ.get('USER') or os.environ.get('LOGNAME') or 'unknown'}@local"


def _open(name: str) -> BinaryIO:
    try:
        return sys.stdin.buffer if name == "-" else Path(name).open("rb")
    except OSError as error:
        stop(f"{name} cannot be read: {error.strerror}.")


def _count_lines(name: str) -> int:
    with Path(name).open("rb") as lines:
        return sum(1 for _ in lines)


def _progress() -> Progress:
    """A bar on the terminal; silent where stderr is not one."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _become_service(*arguments: str) -> NoReturn:
    """Become the service's own program, on which the gate must not depend to work offline.

    This process is replaced, so that a signal to it reaches the service.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "affidavit.service", *arguments])
