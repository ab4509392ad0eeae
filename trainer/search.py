"""``python -m affidavit.trainer.search``: the program behind ``affidavit search``.

A certificate of a plan with ``repeat_and_select`` covers a random number of runs of which only
the best is released. The number, and what each run tries, is drawn and saved (``search.json``,
secret) before the first run. Its digest is printed, and is in the released record. Each
run is a trial: a separate trainer, here or as a trial of Ray Tune on the nodes of a cluster
that share ``--out``. An interrupted trial is resumed, never drawn again.

At the end, ``OUT/run`` has record, weights and ``trial.json`` of the best trial. Everything else is
deleted: no certificate covers the number of trials, their losses and their order.

Exit codes: 0 the best was released; 1 there is nothing to release; 2 usage.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from affidavit import certificate as certificates
from affidavit import evidence as evidences
from affidavit import mechanisms
from affidavit import plan as plans
from affidavit import trust as trusts

OPENING_FILE = "search.json"
RUN_FOLDER = "run"
TRIALS_FOLDER = "trials"
SCORE_FILE = "score"
RELEASED_FILES = frozenset({"record.jsonl", "weights.pt", "opening.json", "trial.json"})
"""Files of the best trial's folder that are released."""
TRAINER = (sys.executable, "-m", "affidavit.trainer")
CHILD = (sys.executable, "-m", "affidavit.worker.exec_with_parent")
"""Ends with the process that started it."""
SECRETS = ("AFFIDAVIT_TOKEN", "AFFIDAVIT_SIGNING_KEY", "AFFIDAVIT_PKCS11_PIN_FILE")
MAX_FAILURES = 3
"""Number of times that Ray Tune retries a trial whose node dies."""
err = Console(stderr=True, soft_wrap=True)


class NotBegun(Exception):
    """A trial could not start, for a reason that applies to all trials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A search in the folder ``out``; ``command`` has the trainer's options for all trials."""

    out: Path
    opening: evidences.SearchOpening
    model: str
    command: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The folder of trials; only the best trial leaves it."""
        return self.out / TRIALS_FOLDER

    def run(self, number: int) -> None:
        """Begin or resume a trial; a trial that finishes has a score.

        Raises ``NotBegun``.
        """
        from affidavit.trainer.run_folder.run_log import has_run

        folder = self.folder / str(number)
        if (folder / SCORE_FILE).exists():
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        tried = self.opening.trial(number)
        settings = [f"--{name}={tried[name]}" for name in ("schedule", "warmup") if name in tried]
        trial = {
            "search": self.opening.digest,
            "at": self.opening.at,
            "score": self.opening.score,
            "learning_rate": tried.get("learning_rate"),
        }
        trusts.write_atomically(
            folder / "trial.json", json.dumps({**trial, "tried": tried}).encode()
        )
        resume = ["--resume"] if has_run(folder) else []
        command = [
            *(*CHILD, str(os.getpid()), *TRAINER, f"--out={folder}"),
            *(f"--trial={folder / 'trial.json'}", f"--model={tried.get('model', self.model)}"),
            *(*settings, *resume, *self.command),
        ]
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        path = self.folder / f"{number}.log"
        with path.open("wb") as log:
            subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        if not has_run(folder):
            raise NotBegun(path.read_text(errors="replace").strip()[-500:])

    def best(self, trials: int) -> int | None:
        """Return the trial with the lowest loss on the public data, or None if none finished."""
        scores = []
        for number in range(trials):
            with suppress(OSError, ValueError):
                scores.append((float((self.folder / str(number) / SCORE_FILE).read_text()), number))
        loss, number = min(scores, default=(math.inf, 0))
        return number if math.isfinite(loss) else None

    def release(self, number: int) -> None:
        """Keep the record and weights of a trial, and delete everything else.

        The times of the files are reset, because they would reveal when the trial ran.
        """
        folder = self.folder / str(number)
        for path in folder.iterdir():
            if path.name in RELEASED_FILES:
                os.utime(path)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        folder.rename(self.out / RUN_FOLDER)


def main(
    context: typer.Context,
    certificate: Annotated[Path, typer.Option(help="Certificate bundle of the plan.")],
    plan: Annotated[Path, typer.Option(help="Certified plan, with repeat_and_select.")],
    data: Annotated[str, typer.Option(help="Training data, NAME[:ARGUMENT].")],
    model: Annotated[str, typer.Option(help="Model, NAME[:ARGUMENT].")],
    out: Annotated[Path, typer.Option(help="Output folder; an interrupted search resumes in it.")],
    choices: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with lists of values to try: model, learning_rate, schedule, warmup."
        ),
    ] = None,
    score: Annotated[
        str | None, typer.Option(help="Public data, NAME[:ARGUMENT]; the lowest loss on it wins.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", envvar="RAY_ADDRESS", help="Run trials on a Ray cluster's nodes."
        ),
    ] = None,
) -> None:
    """Train a random number of times as certified, and release the best; see train --help.

    Other options are those of affidavit train, in every trial.
    """
    read = _read_plan(plan)
    selection = evidences.selection_of(read)
    if selection is None:
        _exit_with_usage_error(
            f"{plan} has no repeat_and_select, so its certificate covers one run: train it."
        )
    if (out / RUN_FOLDER).exists():
        _exit_with_usage_error(f"{out / RUN_FOLDER} exists: this search has finished.")
    opening = _load_opening(out, certificate, choices, score)
    if "learning_rate" in opening.choices and read.workload and read.workload.learning_rates:
        _exit_with_usage_error(
            "the plan sets the learning rate of each step; remove learning_rate from --choices."
        )
    # For the log of the caller, before any trial.
    err.print(f"search {opening.digest}", highlight=False)
    shared = [f"--certificate={certificate.resolve()}", f"--plan={plan.resolve()}"]
    search = Search(
        out=out.resolve(),
        opening=opening,
        model=model,
        command=(*shared, f"--data={data}", *context.args),
    )
    search.folder.mkdir(mode=0o700, exist_ok=True)
    trials = opening.trials(selection)
    if ray is None:
        for number in range(trials):
            try:
                search.run(number)
            except NotBegun as error:
                _exit_with_usage_error(str(error))
    else:
        _run_on_ray(search, trials, ray, gpu="--device=cpu" not in context.args)
    best = search.best(trials)
    if best is not None:
        search.release(best)
        shutil.rmtree(search.folder)
        err.print(f"record and weights are in {escape(str(out / RUN_FOLDER))}", highlight=False)
        return
    err.print(f"no trial finished; see {escape(str(search.folder))}", highlight=False)
    raise typer.Exit(1)


def _run_on_ray(search: Search, trials: int, address: str, *, gpu: bool) -> None:
    """Run the trials as trials of Ray Tune, which learns nothing of their results."""
    try:
        ray: Any = importlib.import_module("ray")
        tune: Any = importlib.import_module("ray.tune")
    except ImportError:
        _exit_with_usage_error("Ray Tune is not installed: pip install 'affidavit[ray]'.")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        cpus = min(1, int(ray.cluster_resources().get("CPU", 1)))
        gpus = 1 if gpu and ray.cluster_resources().get("GPU", 0) else 0

        def train(trial: dict[str, int]) -> None:
            search.run(trial["number"])

        tuner = tune.Tuner(
            tune.with_resources(train, {"cpu": cpus, "gpu": gpus}),
            param_space={"number": tune.grid_search([*range(trials)])},
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(search.folder),
                failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
                verbose=0,
            ),
        )
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints their number
            tuner.fit()
    finally:
        ray.shutdown()


def _load_opening(
    out: Path, certificate: Path, choices: Path | None, score: str | None
) -> evidences.SearchOpening:
    """Return the opening in the folder, or a new one after writing it to disk."""
    path = out / OPENING_FILE
    try:
        if path.exists():
            return evidences.SearchOpening.read(json.loads(path.read_bytes()))
        if score is None:
            _exit_with_usage_error(
                "--score is missing: name the public data on which trials are compared."
            )
        values = {} if choices is None else json.loads(plans.read_limited(choices))
        bundle = plans.read_limited(certificate, certificates.MAX_BYTES)
        identifier = trusts.statement_in(bundle)["predicate"]["certificate_id"]
        opening = evidences.SearchOpening.create(identifier, values, score)
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        trusts.write_atomically(path, json.dumps(opening.as_document()).encode(), mode=0o600)
    except evidences.BadSearch as error:
        _exit_with_usage_error(str(error))
    except (trusts.BadEnvelope, OSError, ValueError, KeyError, TypeError) as error:
        _exit_with_usage_error(f"cannot read the certificate, the choices or {path}: {error}")
    return opening


def _read_plan(path: Path) -> plans.Plan:
    try:
        return mechanisms.read_plan(path)
    except (OSError, plans.PlanError) as error:
        _exit_with_usage_error(f"{path}: {error}")


def _exit_with_usage_error(message: str) -> NoReturn:
    lines = "\n".join(map(plans.printable, message.splitlines()))
    err.print(lines, highlight=False, markup=False)
    raise typer.Exit(2)


PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True}
app = typer.Typer(name="affidavit search", add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings=PASS_THROUGH)(main)

if __name__ == "__main__":
    app(prog_name="affidavit search")
