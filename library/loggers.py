"""Log a guarantee to an experiment tracker: MLflow or Weights & Biases.

Both get parameters (plan digest, verdict, sampling, noise), metrics (ε and δ), ε after each
twentieth of the steps as ``privacy/epsilon_spent``, and the signed bundle and the run record as
files. ε after k steps is the upper bound of the plan with k steps. If the first k steps are not
such a plan (several phases, or dependent steps), only ε of the whole run is logged.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affidavit.assessment import Execution
from affidavit.library.api import epsilon
from affidavit.library.certification import Certification
from affidavit.trust import SigningPort

if TYPE_CHECKING:
    import wandb

CURVE_POINTS = 20
"""Number of points at which ε is logged over a run."""
SPENT_METRIC = "privacy/epsilon_spent"
Record = str | os.PathLike[str]


def log_to_mlflow(
    answer: Certification, *, record: Record | None = None, key: SigningPort | None = None
) -> None:
    """Log to the active run of MLflow or a new one, as ``mlflow.log_params`` does.

    ``record`` is the ``record.jsonl`` of a training run; ``key`` signs, by default the newest key
    of this machine. Raises ``NotCertified``, ``KeyFailure`` without a key, ``OSError`` and
    ``ImportError``.
    """
    try:
        import mlflow
    except ModuleNotFoundError:
        raise ImportError("log_to_mlflow needs MLflow; run: pip install mlflow") from None

    with _files(answer, record, key) as files:
        mlflow.log_params(_parameters(answer))
        mlflow.log_metrics(_metrics(answer))
        for step, spent in epsilon_over_steps(answer):
            mlflow.log_metric(SPENT_METRIC, spent, step=step)
        for file in files:
            mlflow.log_artifact(str(file), "privacy")


def log_to_wandb(
    answer: Certification,
    run: wandb.Run,
    *,
    record: Record | None = None,
    key: SigningPort | None = None,
) -> None:
    """Log to a ``run`` of Weights & Biases: its config, summary, history and an artifact.

    ``record`` is the ``record.jsonl`` of a training run; ``key`` signs, by default the newest key
    of this machine. ε has its own step metric, ``privacy/step``, apart from the run's steps. Raises
    ``NotCertified``, ``KeyFailure`` without a key, ``OSError`` and ``ImportError``.
    """
    import wandb

    with _files(answer, record, key) as files:
        run.config.update(_parameters(answer))
        run.summary.update(_metrics(answer))
        run.define_metric(SPENT_METRIC, step_metric="privacy/step")
        for step, spent in epsilon_over_steps(answer):
            run.log({SPENT_METRIC: spent, "privacy/step": step})
        artifact = wandb.Artifact(f"privacy-{run.id}", type="privacy")
        for file in files:
            artifact.add_file(str(file), name=file.name, policy="mutable")
        run.log_artifact(artifact).wait() if not run.offline else run.log_artifact(artifact)


def epsilon_over_steps(answer: Certification) -> list[tuple[int, float]]:
    """Return pairs of a number of steps and the upper bound of ε in nats after them.

    Raises ``NotCertified`` if the plan is not certified.
    """
    certified = answer.require().epsilon
    if certified is None or answer.steps is None:
        return []
    plan, total = answer.plan, answer.steps
    last = (total, certified.upper)
    divisible = len(plan.phases) == 1 and Execution.of(plan).has_independent_steps
    if not divisible or plan.extra or plan.phases[0].clip_schedule is not None:
        return [last]
    steps = sorted({-(-total * part // CURVE_POINTS) for part in range(1, CURVE_POINTS)} - {total})
    spent = [(step, min(epsilon(plan, steps=step).upper, certified.upper)) for step in steps]
    return [*spent, last]


def _parameters(answer: Certification) -> dict[str, Any]:
    result = answer.as_dict()
    noise = {f"privacy/noise_multiplier/{n}": v for n, v in answer.noise_multipliers.items()}
    return {
        "privacy/plan_digest": result["plan_digest"],
        "privacy/verdict": answer.verdict,
        "privacy/adjacency": result["adjacency"],
        "privacy/steps": answer.steps,
        "privacy/lot_size": answer.lot_size,
        **noise,
    }


def _metrics(answer: Certification) -> dict[str, float]:
    bounds = {"privacy/epsilon": answer.epsilon, "privacy/delta": answer.delta}
    return {name: bound.upper for name, bound in bounds.items() if bound is not None}


@contextmanager
def _files(
    answer: Certification, record: Record | None, key: SigningPort | None
) -> Iterator[list[Path]]:
    """Write the bundle to a temporary folder; yield its path and that of the record."""
    answer.require()
    records = [] if record is None else [Path(record)]
    for path in records:
        path.open("rb").close()  # an unreadable record is reported before anything is logged
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "certificate.json"
        answer.write(bundle, key)
        yield [bundle, *records]
