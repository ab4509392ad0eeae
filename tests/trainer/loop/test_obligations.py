"""What certificates call checked by the trainer is what the trainer keeps."""

from __future__ import annotations

from typing import Any

import pytest

from affidavit.mechanisms import all_mechanisms, lower, obligations_of
from affidavit.plan import plan_from
from affidavit.trainer.run_config import OBLIGATIONS

EXTRAS: list[dict[str, Any]] = [
    {"kind": "repeat_and_select", "name": "r", "distribution": "poisson", "mean": 3},
]


@pytest.mark.parametrize("mechanism", all_mechanisms().values(), ids=lambda item: item.name)
def test_it_keeps_what_it_is_said_to_check(mechanism: Any) -> None:
    result = obligations_of(lower(plan_from(mechanism.minimal_plan())))
    assert result
    assert {item.code for item in result if item.checked_by == "trainer"} <= OBLIGATIONS


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda item: str(item["kind"]))
def test_what_it_refuses_to_run_is_declared(plan_of: Any, extra: dict[str, Any]) -> None:
    result = obligations_of(lower(plan_of(extra=[extra])))
    unknown = {item.code for item in result} - OBLIGATIONS
    assert unknown
    assert all(entry.checked_by == "declared" for entry in result if entry.code in unknown)
