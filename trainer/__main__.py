"""``python -m affidavit.trainer``: the program behind ``affidavit train``.

Exit codes: 0 trained to the end; 1 not certified for this run, a model that cannot be trained
privately, or a run that diverged; 2 usage or malformed input; 3 stopped before the end, and
may be resumed. Under ``torchrun --nproc-per-node N -m affidavit.trainer`` the ranks share
one run.

PyTorch takes seconds to load, so modules that need it are imported after the files were read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from affidavit import certificate as certificates
from affidavit import mechanisms
from affidavit import plan as plans
from affidavit import trust as trusts
from affidavit.trainer.errors import Diverged, Interrupted, NotCertified, RunFailure

if TYPE_CHECKING:
    from affidavit.trainer.adapters import ModelAdapter
    from affidavit.trainer.loop import Outcome

T = TypeVar("T")
err = Console(stderr=True, soft_wrap=True)
SCORE_FILE = "score"
"""The file in a trial's folder with its mean loss on the public data."""
SCORING_RECORDS = 1024
"""Records of the public data in one batch."""


class Exit(IntEnum):
    """Exit codes of the process."""

    TRAINED = 0
    BLOCKED = 1
    USAGE = 2
    UNFINISHED = 3


EXIT_CODES = {
    "not_written": Exit.UNFINISHED,
    "ranks_differ": Exit.UNFINISHED,
    "rank_lost": Exit.UNFINISHED,
    "out_of_memory": Exit.UNFINISHED,
    "run_in_use": Exit.UNFINISHED,
    "broken_record": Exit.BLOCKED,
    "no_checkpoint": Exit.BLOCKED,
    "bad_checkpoint": Exit.BLOCKED,
    "other_run": Exit.BLOCKED,
    "not_anew": Exit.BLOCKED,
    "beyond_allowance": Exit.BLOCKED,
    "too_many_steps": Exit.BLOCKED,
}
"""Exit codes of failures that do not come from wrong usage."""


def _require_device(device: str) -> str:
    """Return ``device``; raises a usage error for a missing GPU."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise typer.BadParameter("PyTorch finds no CUDA device; use auto or cpu.")
    return device


def main(
    certificate: Annotated[Path, typer.Option(help="Certificate bundle of the plan.")],
    plan: Annotated[Path, typer.Option(help="Certified plan, YAML or JSON.")],
    data: Annotated[str, typer.Option(help="Training data, NAME[:ARGUMENT].")],
    model: Annotated[str, typer.Option(help="Model, NAME[:ARGUMENT].")],
    out: Annotated[Path, typer.Option(help="Output folder: record, checkpoint, weights.")],
    keys: Annotated[
        list[Path] | None,
        typer.Option(
            "--keys", help="Trusted public keys, as returned by GET /v1/keys, instead of your own."
        ),
    ] = None,
    keyset: Annotated[
        list[Path] | None,
        typer.Option(
            "--keyset",
            help="Keyset whose keys to trust (GET /v1/keyset); repeatable, oldest first.",
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option("--root", help="With --keyset: the trusted roots, or the last keyset seen."),
    ] = None,
    trust: Annotated[
        Path | None,
        typer.Option(
            "--trust",
            help="Trust policy (YAML): log, witnesses and freshness; default: the keyset's.",
        ),
    ] = None,
    status: Annotated[
        Path | None, typer.Option(help="Signed status list; a revoked certificate is refused.")
    ] = None,
    require_log: Annotated[
        bool, typer.Option("--require-log", help="Refuse a certificate that is not in a log.")
    ] = False,
    checkpoint_store: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint-store",
            help="File with the last checkpoint seen of each log, instead of your own.",
        ),
    ] = None,
    consistency: Annotated[
        Path | None,
        typer.Option(
            "--consistency", help="Consistency proof of the log from the last checkpoint seen."
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--files", help="Folder whose files --data and --model may use; repeatable."),
    ] = None,
    no_files: Annotated[
        bool, typer.Option("--no-files", help="Allow no files in --data and --model.")
    ] = False,
    trial: Annotated[
        Path | None, typer.Option(help="Trial file written by affidavit search.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(callback=_require_device, help="auto, cpu or cuda."),
    ] = "auto",
    microbatch: Annotated[int, typer.Option(min=1, help="Records per microbatch.")] = 64,
    precision: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="float32 or bfloat16 (autocast).")
    ] = "float32",
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Compile the model with torch.compile.")
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between checkpoints; a crash loses the steps since the last one. Default: "
            "as often as takes 5 % of the time.",
        ),
    ] = None,
    digest_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between parameter digests in the record; same default."),
    ] = None,
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        typer.Option(help="Learning rate schedule: constant, linear or cosine."),
    ] = "constant",
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")] = 0,
    show_private: Annotated[
        bool,
        typer.Option(
            "--show-private", help="Show the loss of each lot on this screen; it is private."
        ),
    ] = False,
    allowance: Annotated[
        Path | None,
        typer.Option(help="File with the number of steps granted so far; training waits for more."),
    ] = None,
    charged_before: Annotated[
        int, typer.Option(min=0, help="Steps of this run that another process may have charged.")
    ] = 0,
    stop: Annotated[
        Path | None,
        typer.Option(help="End the run when this file appears; record and weights are saved."),
    ] = None,
) -> None:
    """Train exactly what a certificate certifies, and write the record of the run."""
    read = _read_plan(plan)
    bundle = _read(certificate, _read_signed)
    with _trust_errors():
        trusted = trusts.TrustRoot(keys, keyset, root, trust).load()
        options = certificates.verification_options(
            trusted,
            checkpoints=checkpoint_store,
            consistency=consistency,
            status=status,
            require_status=status is not None,
            require_log=require_log,
        )

    from affidavit.trainer.distributed.peers import Peers
    from affidavit.trainer.errors import MixedRecords, UnsupportedModel
    from affidavit.trainer.loop import train
    from affidavit.trainer.settings import Settings, Supervision, Trial
    from affidavit.trainer.sources import FOLDERS, FileRefused, load_data, load_model

    with _usage_errors("bad_trial", f"cannot read the trial {trial}", OSError, ValueError):
        searched = None if trial is None else Trial.read(trial)
    settings = Settings(
        device=device,
        microbatch=microbatch,
        precision=precision,
        compile=compile_model,
        checkpoint_every=checkpoint_every,
        digest_every=digest_every,
        schedule=schedule,
        warmup=warmup,
        learning_rate=None if searched is None else searched.learning_rate,
        show_private=show_private,
    )
    if files or no_files:
        FOLDERS.set(tuple(files or ()))
    with (
        _usage_errors(
            "bad_source", "cannot load the data or model", ValueError, OSError, ImportError
        ),
        _usage_errors("file_refused", "the run may not read this file", FileRefused),
    ):
        records = load_data(data)
        if left_out := getattr(records, "left_out", 0):
            err.print(f"{left_out} records are left out, and {len(records)} remain.")
        adapter = load_model(model, records)
    peers = Peers.join(settings.device_type)
    try:
        outcome = train(
            bundle=bundle,
            trusted=trusted,
            options=options,
            plan=read,
            data=records,
            model=adapter,
            out=out,
            settings=settings,
            resume=resume,
            peers=peers,
            supervision=Supervision(allowance=allowance, charged=charged_before, stop=stop),
            trial=searched,
        )
    except Interrupted as failure:
        _exit(Exit.UNFINISHED, failure.code, str(failure))
    except (NotCertified, Diverged) as failure:
        _exit(Exit.BLOCKED, failure.code, str(failure))
    except RunFailure as failure:
        _exit(EXIT_CODES.get(failure.code, Exit.USAGE), failure.code, str(failure))
    except trusts.VerificationError as failure:
        _exit(Exit.BLOCKED, failure.code, f"{failure.message} {failure.remedy}")
    except plans.PlanError as failure:
        _exit(Exit.BLOCKED, failure.reasons[0].code, str(failure))
    except (UnsupportedModel, MixedRecords) as failure:
        _exit(
            Exit.BLOCKED, "unsupported_model", f"the model cannot be trained privately: {failure}"
        )
    finally:
        peers.leave()
    if peers.is_leader:
        if searched is not None:
            score = _mean_loss(adapter, searched.score)
            trusts.write_atomically(out / SCORE_FILE, f"{score!r}\n".encode())
        _print_outcome(outcome, out)


def _mean_loss(model: ModelAdapter, named: str) -> float:
    """Return the mean loss on the data ``named``; infinite if it is not finite."""
    import torch

    from affidavit.trainer.adapters import move_to_device
    from affidavit.trainer.sources import load_data

    data = load_data(named)
    device = next(model.module.parameters()).device
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(data), SCORING_RECORDS):
            batch = data.collate(torch.arange(first, min(first + SCORING_RECORDS, len(data))))
            total += float(model.losses(move_to_device(batch, device)).double().sum())
    return total / len(data) if math.isfinite(total) else math.inf


def _print_outcome(outcome: Outcome, out: Path) -> None:
    print = Console(soft_wrap=True).print
    print(
        f"trained {outcome.released} of {outcome.charged} charged steps: {outcome.guarantee}",
        highlight=False,
    )
    print(f"weights and record are in {escape(str(out))}", highlight=False)
    print(f"the record ends in {outcome.head}", highlight=False)


def _read_plan(path: Path) -> plans.Plan:
    try:
        return _read(path, mechanisms.read_plan)
    except plans.PlanError as error:
        for reason in error.reasons:
            line = f"{path}: {reason}"
            err.print(escape(plans.printable(line)), highlight=False)
        raise typer.Exit(Exit.USAGE) from None


def _read_signed(path: Path) -> bytes:
    return plans.read_limited(path, certificates.MAX_BYTES)


def _read(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        _exit(Exit.USAGE, "unreadable", f"cannot read {path}: {error.strerror}.")


@contextmanager
def _trust_errors() -> Iterator[None]:
    """Exit if the block cannot use a file of keys, or of what was seen before."""
    try:
        yield
    except trusts.KeyFailure as failure:
        _exit(Exit.USAGE, "bad_keys", str(failure))
    except trusts.VerificationError as failure:
        _exit(Exit.BLOCKED, failure.code, f"{failure.message} {failure.remedy}")


@contextmanager
def _usage_errors(code: str, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Exit with ``code`` if the block raises one of ``kinds``."""
    try:
        yield
    except kinds as error:
        _exit(Exit.USAGE, code, f"{what}: {error}")


def _exit(status: Exit, code: str, message: str) -> NoReturn:
    err.print(f"[red]{escape(code)}:[/] {escape(plans.printable(message))}", highlight=False)
    raise typer.Exit(status)


app = typer.Typer(name="affidavit train", add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="affidavit train")
