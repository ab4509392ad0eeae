"""One file and one entry point add a strategy, a mechanism, an accountant or an optimiser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STRATEGY = '''
"""A throw-away strategy: w_t = z_t - z_{t-1} / n."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from affidavit.mechanisms.strategies import Setting, Strategy, StrategyForm, Toeplitz
from affidavit.plan import Integer, Reason


class Fading(StrategyForm):
    """w_t = z_t - z_{t-1} / ``part``."""

    kind: Literal["fading"]
    part: Annotated[Integer, Field(ge=1)]
    examples = ({"kind": "fading", "part": 2},)

    def check(self, pointer) -> Iterator[Reason]:
        if self.part == 13:
            yield Reason(
                code="conflict", pointer=pointer("part"), message="13.", remedy="Give another."
            )

    def build(self, setting: Setting) -> Strategy:
        return Toeplitz.from_noise([1.0, -1 / self.part], setting.steps, kind="fading")
'''
MECHANISM = '''
"""A throw-away mechanism: DP-SGD that forgets its weight decay."""

from affidavit.mechanisms import CLIPPED_SUM

MECHANISM = CLIPPED_SUM(
    name="dp_forgetful",
    title="Forgetful DP-SGD",
    post_processing=("an update of public length",),
    sources=("this test",),
    takes=frozenset({"name", "learning_rate", "momentum"}),
)
'''
ACCOUNTANT = """
import math
from dataclasses import dataclass

from affidavit.accountants import Bracket, Unsupported, leaves
from affidavit.plan import events


@dataclass(frozen=True)
class Curve:
    rho: float

    def epsilon(self, delta):
        if not 0 < delta < 1:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {delta}")
        upper = self.rho + 2 * math.sqrt(self.rho * -math.log(delta))
        return Bracket(lower=0.0, upper=upper * (1 + 1e-9))

    def delta(self, epsilon):
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"epsilon must be finite and not negative, got {epsilon}")
        if self.rho == 0:
            return Bracket(lower=0.0, upper=0.0)
        far = max(0.0, epsilon - self.rho)
        upper = math.exp(-(far**2) / (4 * self.rho)) * (1 + 1e-9)
        return Bracket(lower=0.0, upper=min(1.0, upper))


class ZcdpAccountant:
    name = "zcdp"
    version = "throw-away 1.0"

    def curve(self, event):
        rho = 0.0
        for leaf, count in leaves(event):
            if not isinstance(leaf, events.Gaussian):
                raise Unsupported("only Gaussian releases")
            rho += count / (2 * leaf.noise_multiplier**2)
        return Curve(rho)
"""
OPTIMIZER = """
from affidavit.trainer.optimizers.base import DPOptimizer


class Forgetful(DPOptimizer):
    def rule(self, inputs):
        def apply(parameters, means, states, at):
            for parameter, mean in zip(parameters, means):
                parameter.sub_(at.learning_rate * at.step * mean)

        return apply
"""
ENTRY_POINTS = """[affidavit.strategies]
fading = throw_away_strategy:Fading

[affidavit.mechanisms]
dp_forgetful = throw_away_mechanism:MECHANISM

[affidavit.accountants]
zcdp = throw_away_accountant:ZcdpAccountant

[affidavit.optimizers]
dp_forgetful = throw_away_optimizer:Forgetful
"""
TRIAL = """
import sys
from affidavit.assessment import certify
from affidavit.mechanisms import all_mechanisms, lower
from affidavit.plan import (
    MalformedPlan, Plan, as_document, digest, noise_forms, parse_plan, plan_from, plan_schemas
)

SCHEMA = plan_schemas("{model}")
assert "throw_away_mechanism" not in sys.modules  # a name is known without loading its package
DOCUMENT = {
    "version": 1,
    "dataset": {"size": 100},
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 10},
    "steps": 20,
    "noise": {"kind": "fading", "part": 2},
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 4}],
    "optimizer": {"name": "dp_forgetful", "momentum": 0.5},
    "target": {"delta": 1e-5},
}

# the plan, its schema and its canonical form
plan = plan_from(DOCUMENT)
assert as_document(plan)["noise"] == {"kind": "fading", "part": 2}, as_document(plan)
assert plan_from(as_document(plan)) == plan
assert "fading" in str(SCHEMA["Phase"]["properties"]["noise"])
assert "part" in SCHEMA["Fading"]["properties"]
assert "dp_forgetful" in SCHEMA["Optimizer"]["properties"]["name"]["enum"]

# what does not agree is refused with its place
for change, pointer in (
    ({"noise": {"kind": "fading", "part": 13}}, "/noise/part"),
    ({"noise": {"kind": "fading", "part": 0}}, "/noise/part"),
    ({"noise": {"kind": "fading", "parts": 1}}, "/noise/parts"),
    ({"noise": {"kind": "vanishing"}}, "/noise/kind"),
    ({"optimizer": {"name": "dp_forgetful", "weight_decay": 1}}, "/optimizer/weight_decay"),
    ({"optimizer": {"name": "dp_absent"}}, "/optimizer/name"),
):
    try:
        plan_from({**DOCUMENT, **change})
    except MalformedPlan as refusal:
        assert pointer in [reason.pointer for reason in refusal.reasons], refusal
    else:
        raise AssertionError(change)

# the certificate is that of the same noise, written as its coefficients
own = certify(plan)
same = plan_from({
    **DOCUMENT,
    "noise": {"kind": "toeplitz_inverse", "coefficients": [1, -0.5]},
    "optimizer": {"name": "dp_sgd", "momentum": 0.5},
})
assert own.verdict == "certified", own.reasons
assert lower(plan).event() == lower(same).event()
assert own.as_result()["epsilon"] == certify(same).as_result()["epsilon"]
assert digest(plan) != digest(same)
assert all_mechanisms()["dp_forgetful"].as_dict()["minimal_plan"]

# the trainer generates its noise
from affidavit.mechanisms.strategies import Participation, Setting, build
import torch
from affidavit.trainer.noise.recurrence import recurrence_of

(form,) = [form for form in noise_forms() if form.kinds() == ("fading",)]
setting = Setting(steps=3, participation=Participation.single())
step, past = recurrence_of(build(form.model_validate(form.examples[0]), setting)), []
assert [float(step(t, torch.tensor(8.0), past)) for t in range(3)] == [8.0, 4.0, 4.0]

# the accountant accounts a plan, after ours
from affidavit.accountants import ENGINE_NAMES, engine_versions
assert ENGINE_NAMES[-1] == "zcdp"
assert engine_versions()[-1] == {"name": "zcdp", "version": "throw-away 1.0"}
optimizer = {**DOCUMENT["optimizer"], "learning_rate": 0.5}
simple = {**DOCUMENT, "optimizer": optimizer, "noise": {"kind": "independent"}}
simple["sampling"] = {"scheme": "full_batch"}
ours, theirs = certify(plan_from(simple)), certify(plan_from(simple), engine="zcdp")
assert theirs.verdict == "certified", theirs.reasons
rho = 20 / (2 * 4**2)
expected = rho + 2 * (rho * 11.512925464970229) ** 0.5
upper = float(theirs.as_result()["epsilon"]["upper"])
assert abs(upper - expected) < 1e-3 * expected, (upper, expected)
assert float(ours.as_result()["epsilon"]["upper"]) < upper

# the optimiser takes two steps by its own rule
from affidavit.trainer.optimizers.inputs import optimizer_inputs
from affidavit.trainer.optimizers.registry import optimizer_of
weight = torch.nn.Parameter(torch.tensor([8.0]))
optimizer = optimizer_of(optimizer_inputs(plan_from(simple), {"all": {"weight": weight}}))
for _ in range(2):
    weight.grad = torch.tensor([1.0])
    optimizer.step()
assert weight.item() == 8 - 0.5 * (1 + 2), weight
print("all of it")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed distribution of two modules."""
    (tmp_path / "throw_away_strategy.py").write_text(STRATEGY)
    (tmp_path / "throw_away_mechanism.py").write_text(MECHANISM)
    (tmp_path / "throw_away_accountant.py").write_text(ACCOUNTANT)
    (tmp_path / "throw_away_optimizer.py").write_text(OPTIMIZER)
    metadata = tmp_path / "throw_away-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: throw-away\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def test_an_installed_package_adds_one_of_each(site: Path) -> None:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    trial = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", TRIAL],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert trial.stdout.strip() == "all of it", trial.stderr


LAWS = (
    "tests/conformance/test_accountants.py",
    "tests/conformance/test_mechanisms.py",
    "tests/mechanisms/strategies/test_families.py",
)


@pytest.mark.soak
def test_the_laws_find_them(site: Path) -> None:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", *LAWS]
    laws = subprocess.run(
        [*command, "-k", "fading or dp_forgetful or zcdp"],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert laws.returncode == 0, laws.stdout
    assert "no tests ran" not in laws.stdout
