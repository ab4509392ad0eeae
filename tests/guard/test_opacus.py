"""The guard around the real Opacus: right runs pass and conform, wrong ones stop in time."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from affidavit.evidence import check_conformance
from affidavit.trust import SigningKey
from tests.support.forked_processes import fork
from tests.support.polling import TIMEOUT_SECONDS

ROOT = Path(__file__).resolve().parents[2]

STEPS = 8
LAYERS = {
    "clipping": "per_block",
    "releases": [{"name": "all", "count": 4, "clip_norm": 1, "noise_multiplier": 2.4}],
}

BEFORE_ANYTHING = {
    "sigma": "noise_below",
    "clip": "clip_norm_above",
    "ghost clip": "clip_norm_above",
    "accumulated ghosts": "accumulation",
    "shuffled": "other_sampler",
    "weighted": "other_probability",
    "weighted lots": "other_sampler",
    "lot": "other_probability",
    "Muon and AdamW": "tensor_not_noised",
    "noiseless": "tensor_not_noised",
    "half the noise": "noise_not_as_said",
    "accumulated lots": "accumulation",
    "other loader": "other_loader",
    "new tensor": "tensor_not_noised",
    "used before": "already_trained",
    "adaptive clipping": "unsupported",
}
"""Stopped with no release at all."""
ON_THE_WAY = {
    "too many steps": ("too_many_steps", 8),
    "reseeded": ("noise_repeated", 1),
    "reseeded, noise of Opacus": ("noise_repeated", 1),
    "bypassed": ("tensor_not_noised", 3),
    "noise decays": ("noise_below", 1),
}
"""Stopped before the release that was wrong, after as many right ones."""


@pytest.fixture(scope="module")
def certificates(certified: Callable[..., Any]) -> dict[str, Any]:
    """The bundles that the scenarios are run under."""
    return {"flat": certified(), "layers": certified(**LAYERS)}


@pytest.fixture(scope="module")
def folder(
    certificates: dict[str, Any], key: SigningKey, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Where the scenarios find certificates and keys, and leave their records."""
    result = tmp_path_factory.mktemp("opacus")
    for name, (_, bundle) in certificates.items():
        (result / f"{name}.json").write_bytes(bundle)
    (result / "keys.json").write_text(json.dumps(key.public.as_record()))
    return result


def scenarios(folder: Path, *arguments: str) -> dict[str, Any]:
    """What came of every scenario, by name."""
    results, log = folder / "results", folder / "log"
    given = [str(folder), str(results), *arguments]
    with log.open("wb") as stream:
        process = fork("tests.guard.opacus_scenarios", given, os.environ, stream.fileno())
        assert process.wait(TIMEOUT_SECONDS) == 0, log.read_text()[-3000:]
    result: dict[str, Any] = json.loads(results.read_text())
    return result


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    """What came of every scenario with the guard."""
    return scenarios(folder)


@pytest.mark.soak
def test_every_planted_mistake_ends_in_silence_without_the_guard(folder: Path) -> None:
    assert set(scenarios(folder, "unguarded").values()) == {"finished"}


@pytest.mark.parametrize(
    "name", ["", ", noise of Opacus", ", ghost clipping", ", virtual steps",
             ", ghost and virtual steps", ", worker processes", ", learning rates", ", per layer",
             ", more noise"],
)  # fmt: skip
def test_a_right_run_passes_and_its_record_conforms(
    outcomes: dict[str, Any], certificates: dict[str, Any], name: str
) -> None:
    result = outcomes["right" + name]
    assert (result["guarded"], result["released"], result["changed"]) == (None, STEPS, True)
    predicate, _ = certificates["layers" if "layer" in name else "flat"]
    stated = check_conformance(Path(result["record"]).read_bytes(), predicate)
    wrong = {finding.code for finding in stated.findings}
    assert wrong == ({"statistical_generator"} if "Opacus" in name else set())
    assert stated.steps_released == STEPS


@pytest.mark.parametrize(("name", "code"), BEFORE_ANYTHING.items())
def test_a_misconfigured_run_stops_before_its_first_release(
    outcomes: dict[str, Any], name: str, code: str
) -> None:
    result = outcomes[name]
    assert (result["guarded"], result["released"], result["changed"]) == (code, 0, False)


@pytest.mark.parametrize(("name", "stop"), ON_THE_WAY.items())
def test_a_run_that_goes_wrong_stops_before_the_wrong_release(
    outcomes: dict[str, Any], name: str, stop: tuple[str, int]
) -> None:
    assert (outcomes[name]["guarded"], outcomes[name]["released"]) == stop


def test_a_bias_without_noise_is_found_within_a_few_releases(outcomes: dict[str, Any]) -> None:
    result = outcomes["one tensor noiseless"]
    assert result["guarded"] == "tensor_not_noised"
    assert result["released"] <= 2


@pytest.mark.soak
def test_the_example_runs_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/guard.md").read_text()
    (shown,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    environment = {**os.environ, "AFFIDAVIT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    programs = {"affidavit": [sys.executable, "-m", "affidavit"], "python": [sys.executable]}
    for line in shown.splitlines():
        name, *words = shlex.split(line)
        provided = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        done = subprocess.run(
            [*programs[name], *provided], cwd=tmp_path, env=environment, capture_output=True,
            text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stdout, done.stderr[-2000:])


def test_what_opacus_rounded_is_set_to_what_was_certified(outcomes: dict[str, Any]) -> None:
    (probability, divisor) = outcomes["right"]["notes"]
    assert probability.startswith("sampling probability set to 0.106666667, from 0.1")
    assert divisor == "divisor set to 64, from 60."
    assert [rate for _, rate, _ in outcomes["right"]["accounted"]] == [pytest.approx(64 / 600)]
