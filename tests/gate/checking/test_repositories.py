"""The forms of public repositories get a verdict with a few lines, and no false pass."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from ruamel.yaml import YAML

CASES: list[dict[str, Any]] = YAML(typ="safe").load(
    Path(__file__).with_name("repositories.yaml").read_text()
)
for before, case in pairwise(CASES):
    if case.get("same"):
        case["script"] = before["script"].replace(*case.get("replace", ("", "")))


@pytest.mark.by_turns
@pytest.mark.ordinary(
    "not *_vectorized.py",
    "not *linear_regression_dp_simple.py",
    "not *mlp_dp.py?",
    "not *dpfedavg.py",
    "not *dcgan.py",
    "not *nlg-reddit*",
    "not *imdb.py",
    "not *_eager.py",
    "not *CelebA*",
    "not *DP-SGD-Baseline*",
    "not *jax_api_example*",
    "not *private-transformers:examples/image*",
    "not *snsynth*",
    "not *CIFAR_TIMM*",
    "not *fl_dp_sa*",
    "not *tutorial_keras.py0",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['repository']}:{case['file']}")
def test_a_repository_gets_the_right_answer(
    case: dict[str, Any], checked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in case.get("files", {}).items():
        Path(name).write_text(text)
    lines = "".join(f"# affidavit: {line}\n" for line in case["lines"])
    Path("train.py").write_text(case["script"] + lines)
    assert len(case["lines"]) <= 5
    code, document = checked("train.py")
    (plan,) = document["plans"]
    blocking = [item for item in plan["findings"] if item["blocks"]]
    if case["exit"] in (1, 3):  # by a fault, or by an open use
        assert code in (1, 3), plan
        assert blocking
    else:
        codes = {item["rule"] for item in blocking}
        assert (code, codes) == (case["exit"], set(case.get("blocks", ()))), plan
    for name in case.get("names", ()):
        assert any(name in item["message"] for item in blocking), blocking
    if (told := case.get("poisson")) is not None:
        step: Any = PoissonSampledDpEvent(1 / told["rate"], GaussianDpEvent(told["noise"]))
    elif (told := case.get("gaussian")) is not None:
        step = GaussianDpEvent(told["noise"])
    else:
        return
    result = plan["result"]
    # A grid that moves ε by less than a tenth of what is allowed for.
    theirs = PLDAccountant(value_discretization_interval=2.5e-4).compose(step, told["steps"])
    truth = theirs.get_epsilon(result["target"]["delta"])
    assert result["epsilon"]["upper"] == pytest.approx(truth, rel=0.02, abs=0.02)
