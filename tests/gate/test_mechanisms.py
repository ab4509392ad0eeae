"""``affidavit mechanisms``: the catalogue, for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from affidavit.mechanisms import all_mechanisms

Answer = Callable[..., tuple[int, dict[str, Any]]]


def test_all_are_listed(run: Callable[..., Result], answer: Answer) -> None:
    shown = run("mechanisms")
    assert shown.exit_code == 0
    code, result = answer("mechanisms", "--json")
    assert code == 0
    assert [item["name"] for item in result["mechanisms"]] == list(all_mechanisms())
    assert all(entry["name"] in shown.output for entry in result["mechanisms"])


@pytest.mark.parametrize("name", all_mechanisms())
def test_one_is_shown_whole(run: Callable[..., Result], answer: Answer, name: str) -> None:
    shown = run("mechanisms", name)
    assert shown.exit_code == 0
    code, result = answer("mechanisms", name, "--json")
    assert code == 0
    for text in (result["releases"], result["sensitivity"], result["proof"]):
        assert text in shown.output
    for item in (*result["post_processing"], *result["state_on_raw_data"], *result["sources"]):
        assert item in shown.output
    for obligation in result["obligations"]:
        assert obligation["text"] in shown.output
    for entry in result["hyperparameters"]:
        assert f"{entry['field']}: {entry['takes']}" in shown.output


@pytest.mark.parametrize(
    ("name", "hint"), [("dp_muonb", "did you mean dp_muonbc?"), ("\x1b[2J", "choose one of dp_sgd")]
)
def test_a_name_that_is_none_says_so_and_prints_nothing_else(
    run: Callable[..., Result], name: str, hint: str
) -> None:
    result = run("mechanisms", name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert hint in result.stderr
    assert "\x1b" not in result.stderr
