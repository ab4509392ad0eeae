"""``affidavit init``: write a first plan, from options, questions and a training script."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from affidavit import importers
from affidavit.gate.checking.box import Begun, Ended, run_in_box
from affidavit.gate.checking.discovery import root_of
from affidavit.gate.console import err, exit_with_reasons, say, stop, write
from affidavit.gate.exit_codes import Exit
from affidavit.mechanisms import read_bytes
from affidavit.plan import Adjacency, MalformedPlan, Scheme

_SCHEMES, _ADJACENCIES = (", ".join(get_args(words)) for words in (Scheme, Adjacency))
QUESTIONS: dict[str, tuple[str, str, Any]] = {
    "size": ("Records in the data set", "60000", int),
    "sampling": (
        f"Sampling scheme ({_SCHEMES})",
        "poisson",
        str,
    ),
    "lot_size": ("Records in a lot (the batch size)", "256", int),
    "epochs": ("Epochs", "10", float),
    "adjacency": (f"Neighbouring data sets ({_ADJACENCIES})", "add_remove", str),
    "clip_norm": ("Clip norm", "1.0", float),
    "epsilon": ("Target ε", "8", float),
    "delta": ("Target δ", "1e-6", float),
}
"""Fields of a plan: the question, the default answer, and its type."""


def init(
    script: Annotated[
        Path | None, typer.Argument(help="Training script to read values from.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write; never overwritten.")] = Path(
        "plan.yaml"
    ),
    optimizer: Annotated[
        str, typer.Option(help="Optimiser; `affidavit mechanisms` lists them.")
    ] = "dp_sgd",
    size: Annotated[int | None, typer.Option(help="Records in the data set, N.")] = None,
    sampling: Annotated[str | None, typer.Option(help=f"Sampling scheme: {_SCHEMES}.")] = None,
    lot_size: Annotated[
        int | None, typer.Option(help="Records in a lot, the expected batch of one step.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data; may be a fraction.")
    ] = None,
    adjacency: Annotated[
        str | None, typer.Option(help=f"Which data sets are neighbours: {_ADJACENCIES}.")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="L2 norm to which a record's gradient is clipped, above 0.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target ε, in nats, above 0.")] = None,
    delta: Annotated[float | None, typer.Option(help="Target δ, in (0, 1), below 1/N.")] = None,
) -> None:
    """Write a plan that solves for its noise; ask for missing values.

    Without a terminal, give every value as an option or in the script.
    """
    from affidavit.plan import plan_from, with_fields

    options = {
        "size": size,
        "sampling": sampling,
        "lot_size": lot_size,
        "epochs": epochs,
        "adjacency": adjacency,
        "clip_norm": clip_norm,
        "epsilon": epsilon,
        "delta": delta,
    }
    if out.exists():
        stop(f"{out} exists; choose another file with --out.")
    try:
        base = {} if script is None else _read_script(script)
        base = {"releases": [{"name": "all"}], "optimizer": {"name": optimizer}, **base}
        declared = {name: value for name, value in options.items() if value is not None}
        document = with_fields(base, **declared, **_ask(_missing_names(base, declared)))
        document = {"version": 1, **document}
        plan_from(document)
    except MalformedPlan as error:
        exit_with_reasons("affidavit init", error.reasons, Exit.USAGE, as_json=False)
    write(out, _yaml(document))
    say(f"plan written to {out}; next: affidavit certify {out}")


def _read_script(script: Path) -> dict[str, Any]:
    """Return the plan fields of a script, which is read in a child process with limits."""
    name = str(script)
    try:
        raw = read_bytes(name, root_of(name))
    except MalformedPlan as error:
        stop(error.reasons[0].message)
    data: dict[str, Any] | None = None

    def work(done: frozenset[str]) -> Iterator[Begun | tuple[dict[str, Any], tuple[str, ...]]]:
        if name not in done:
            yield Begun(name)
            partial = importers.import_file(name, raw)
            if partial is not None:
                count = len(partial.others) + 1
                first = f"of its {count} private calls, the plan is the first one's."
                yield partial.data, (*partial.assumed, *([first] if partial.others else []))

    for message in run_in_box(work):
        if isinstance(message, Ended):
            stop(f"{script} cannot be read: {message.why}.", Exit.UNDECIDED)
        if isinstance(message, tuple):
            data, assumed = message
            for assumption in assumed:
                err.print(assumption, markup=False)
    if data is None:
        stop(f"{script} makes no private call of {', '.join(importers.LIBRARIES)}.")
    return data


def _missing_names(document: dict[str, Any], declared: dict[str, Any]) -> list[str]:
    """Return the names of ``QUESTIONS`` that neither the document nor an option answers."""
    (release,) = document["releases"]
    sampling, target = document.get("sampling", {}), document.get("target", {})
    present = {
        "size": "size" in document.get("dataset", {}),
        "sampling": "scheme" in sampling,
        "lot_size": "lot_size" in sampling or "probability" in sampling,
        "epochs": "epochs" in document or "steps" in document,
        "adjacency": "adjacency" in document,
        "clip_norm": "clip_norm" in release,
        "epsilon": "epsilon" in target or "noise_multiplier" in release,
        "delta": "delta" in target,
    }
    if declared.get("sampling") == "full_batch":
        present["lot_size"] = True
    return [name for name in QUESTIONS if not present[name] and name not in declared]


def _ask(names: list[str]) -> dict[str, Any]:
    if names and not sys.stdin.isatty():
        options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        stop(f"{options} missing; give each as an option, or run this in a terminal.")
    answers = {}
    for name in names:
        question, default, kind = QUESTIONS[name]
        answers[name] = typer.prompt(question, default=default, type=kind, err=True)
    return answers


def _yaml(document: dict[str, Any]) -> bytes:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.default_flow_style = None
    stream = io.BytesIO()
    yaml.dump(document, stream)
    return stream.getvalue()
