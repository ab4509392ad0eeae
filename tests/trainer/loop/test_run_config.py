"""Nothing is trained but what a valid certificate certifies; each refusal has its own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from affidavit.assessment import certify
from affidavit.certificate import VerificationOptions, issue
from affidavit.certificate.policy import BUILT_IN, PolicyEvaluation
from affidavit.plan import digest
from affidavit.trainer.adapters import Group
from affidavit.trainer.errors import NotCertified, UnsupportedModel
from affidavit.trainer.optimizers.registry import OPTIMIZERS
from affidavit.trainer.run_config import OBLIGATIONS, bind
from affidavit.trust import SigningKey, development_key
from tests.support.trust import trusting
from tests.trainer.loop.small_run import (
    KEY,
    RECORDS,
    FinishedRun,
    MadeUpData,
    SmallModel,
    bundle_of,
    plan_with,
)

Run = Callable[..., FinishedRun]


def refusal_code(run: Run, out: Path, **arguments: Any) -> str:
    """The code of the refusal; no folder was made."""
    with pytest.raises(NotCertified) as refusal:
        run(out=out, **arguments)
    assert not out.exists()
    return refusal.value.code


def test_another_plan_is_refused(run: Run, tmp_path: Path) -> None:
    quieter = plan_with(releases=[{"name": "all", "count": 2, "clip_norm": 0.5,
                                   "noise_multiplier": 1.0}])  # fmt: skip
    code = refusal_code(run, tmp_path / "run", plan=quieter, bundle=bundle_of(plan_with()))
    assert code == "other_plan"


def test_a_changed_bundle_is_refused(run: Run, tmp_path: Path) -> None:
    document = json.loads(bundle_of(plan_with()))
    payload = document["envelope"]["payload"]
    document["envelope"]["payload"] = payload[:-8] + ("A" * 4) + payload[-4:]
    code = refusal_code(run, tmp_path / "run", bundle=json.dumps(document).encode())
    assert code in {"bad_signature", "bad_form"}


@pytest.mark.parametrize("key", [SigningKey.generate("stranger"), development_key()])
def test_an_untrusted_key_is_refused(run: Run, tmp_path: Path, key: SigningKey) -> None:
    bundle = bundle_of(plan_with(), key=key)
    assert refusal_code(run, tmp_path / "run", bundle=bundle) in {"unknown_key", "untrusted_key"}


def test_a_certificate_without_its_approvals_is_refused(run: Run, tmp_path: Path) -> None:
    plan, now = plan_with(), datetime.now(UTC).replace(microsecond=0)
    evaluation = PolicyEvaluation(policy=BUILT_IN.model_copy(update={"approvals": 1}))
    result = certify(plan, second_opinion=False)
    bundle = issue(result, KEY, requester="tests", issued_at=now, evaluation=evaluation).bundle
    code = refusal_code(run, tmp_path / "run", bundle=bundle)
    assert "approv" in code


def test_a_status_list_that_is_demanded_cannot_be_left_out(run: Run, tmp_path: Path) -> None:
    code = refusal_code(run, tmp_path / "run", options=VerificationOptions(require_status=True))
    assert "status" in code


def test_an_expired_certificate_is_refused(run: Run, tmp_path: Path) -> None:
    later = datetime.now(UTC) + timedelta(days=4000)
    trusted = trusting(KEY.public, at=later)
    assert refusal_code(run, tmp_path / "run", trusted=trusted) == "expired"


@pytest.mark.parametrize(
    ("target", "verdict"),
    [({"epsilon": 0.1, "delta": 1e-3}, "under_noised"), ({"epsilon": 9, "delta": 0.5}, "refused")],
)
def test_a_verdict_other_than_certified_is_refused(
    run: Run, tmp_path: Path, target: dict[str, float], verdict: str
) -> None:
    assert refusal_code(run, tmp_path / "run", plan=plan_with(target=target)) == verdict


def test_data_of_another_size_is_refused(run: Run, tmp_path: Path) -> None:
    assert refusal_code(run, tmp_path / "run", data=MadeUpData(RECORDS - 1)) == "dataset_size"


def test_a_plan_without_a_data_set_size_is_refused(run: Run, tmp_path: Path) -> None:
    plan = plan_with(dataset={}, sampling={"scheme": "poisson", "probability": 0.2})
    assert refusal_code(run, tmp_path / "run", plan=plan) == "dataset_size"


@pytest.mark.parametrize(
    "releases",
    [
        {"all": ("0",)},
        {"all": ("0", "2"), "more": ("2",)},
        {"hidden": ("0", "2")},
    ],
)
def test_blocks_that_are_not_the_plans_are_refused(
    run: Run, tmp_path: Path, releases: dict[str, tuple[str, ...]]
) -> None:
    assert refusal_code(run, tmp_path / "run", model=SmallModel(releases)) == "blocks"


def test_a_tensor_in_no_block_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    class Partial(SmallModel):
        def blocks(self) -> dict[str, tuple[Group, ...]]:
            return {"all": (Group(names=("0.weight",)), Group(names=("2.weight", "2.bias")))}

    with pytest.raises(UnsupportedModel, match=r"0\.bias: trainable, but in no block"):
        run(out=tmp_path / "run", model=Partial())
    assert not (tmp_path / "run").exists()


def test_a_model_that_mixes_records_is_refused_before_any_data_is_read(
    run: Run, tmp_path: Path
) -> None:
    class Mixing(SmallModel):
        def losses(self, batch: Any) -> torch.Tensor:
            found = super().losses(batch)
            return found - found.mean()

    data = MadeUpData()
    with pytest.raises(Exception, match="mixes records"):
        run(out=tmp_path / "run", model=Mixing(), data=data)
    assert data.asked == []


@pytest.mark.parametrize(
    "extra",
    [
        {"kind": "adaptive_clipping_quantile", "name": "clip", "noise_std": 50},
        {"kind": "repeat_and_select", "name": "pick", "distribution": "geometric", "mean": 2},
    ],
)
def test_events_that_belong_into_the_loop_are_refused(
    run: Run, tmp_path: Path, extra: dict[str, Any]
) -> None:
    code = refusal_code(run, tmp_path / "run", plan=plan_with(extra=[extra]))
    assert code in {"unsupported", "unknown_obligation"}


def test_noise_that_was_left_open_is_what_the_certificate_requires() -> None:
    plan = plan_with(
        releases=[
            {"name": "hidden", "count": 1, "clip_norm": 0.5},
            {"name": "aux", "count": 1, "clip_norm": 0.25},
        ],
        target={"epsilon": 2, "delta": 1e-3},
    )
    bundle = bundle_of(plan)
    bound = bind(bundle, trusting(KEY.public), plan, records=RECORDS)
    provided = [release.noise_multiplier for release in bound.plan.phases[0].releases]
    assert all(item is not None and item > 1 for item in provided)
    assert bound.plan_digest == digest(plan) != digest(bound.plan)
    # The closed plan, certified by itself, meets the target that the open one asked for.
    closed = bundle_of(bound.plan)
    assert bind(closed, trusting(KEY.public), bound.plan, records=RECORDS).plan == bound.plan


@pytest.mark.parametrize(
    "asked",
    [
        {"steps": None},
        {"sampling": {"scheme": "poisson", "lot_size": None}},
        {"sampling": {"scheme": "poisson", "probability": None}},
    ],
)
def test_what_else_was_left_open_is_closed_as_certified(asked: dict[str, Any]) -> None:
    plan = plan_with(target={"epsilon": 1.9, "delta": 1e-3}, **asked)
    bound = bind(bundle_of(plan), trusting(KEY.public), plan, records=RECORDS)
    assert not bound.plan.is_open
    assert bind(
        bundle_of(bound.plan), trusting(KEY.public), bound.plan, records=RECORDS
    ).execution.steps


def test_data_in_which_a_user_has_more_records_than_certified_is_refused() -> None:
    users = {"size": RECORDS, "unit": "user", "contributions_per_user": 2}
    plan = plan_with(dataset=users, adjacency="zero_out")
    bundle = bundle_of(plan)
    assert bind(bundle, trusting(KEY.public), plan, records=RECORDS, most_of_a_user=2)
    with pytest.raises(NotCertified) as refusal:
        bind(bundle, trusting(KEY.public), plan, records=RECORDS, most_of_a_user=3)
    assert refusal.value.code == "records_of_a_user"
    with pytest.raises(NotCertified) as refusal:
        bind(bundle, trusting(KEY.public), plan, records=RECORDS, most_of_a_user=2, most_users=2)
    assert refusal.value.code == "users_of_a_record"
    with pytest.raises(NotCertified) as refusal:
        bind(bundle, trusting(KEY.public), plan, records=RECORDS, most_of_a_user=2, own_parts=True)
    assert refusal.value.code == "parts_of_a_group"
    with pytest.raises(NotCertified, match="does not name the user of each record"):
        bind(bundle, trusting(KEY.public), plan, records=RECORDS)


def test_every_obligation_of_every_mechanism_is_known() -> None:
    from affidavit.mechanisms import mechanism

    for name in OPTIMIZERS:
        declared = {oblige.code for oblige in mechanism(name).obligations}  # type: ignore[arg-type]
        assert declared <= OBLIGATIONS
