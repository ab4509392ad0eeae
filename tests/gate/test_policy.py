"""Policies on the command line: checked, judged by, and asked of a certificate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from affidavit.certificate.policy import Policy, parse_policy

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "policies.md"
EXAMPLES = sorted((ROOT / "examples" / "policies").glob("*.yaml"))
Make = Callable[..., dict[str, Any]]


def policy(**changes: Any) -> dict[str, Any]:
    least = {"schema_version": 1, "name": "toys", "version": 1, "datasets": ["toy"]}
    return {**least, **changes}


@pytest.fixture
def rules(save: Any) -> Callable[..., str]:
    """A policy file."""
    return lambda **changes: save(policy(**changes), "policy.json")


def test_a_policy_is_checked_and_named_by_its_digest(rules: Any, run: Any, answer: Any) -> None:
    path = rules(epsilon_cap=3)
    result = run("policy", "check", path)
    assert result.exit_code == 0
    code, told = answer("policy", "check", path, "--json")
    assert code == 0
    assert told["digest"] in result.stdout
    assert told["digest"] == parse_policy(Path(path).read_bytes(), "json").digest()


def test_a_policy_that_is_none_is_told_where(save: Any, run: Any, document: Make) -> None:
    path = save("schema_version: 1\nname: a\nversion: 1\ndatasets: [a]\nepsilon_cup: 1\n", "p.yaml")
    for arguments in (
        ("policy", "check", path),
        ("check", save(document()), "--policy", path),
        ("certify", save(document()), "--policy", path),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert "p.yaml:5" in result.stderr
        assert "Did you mean epsilon_cap?" in result.stderr
    assert run("policy", "check", "nowhere.yaml").exit_code == 2
    assert run("policy", "check", "-", stdin=b"\x00").exit_code == 2


def test_check_blocks_what_the_policy_does_not_let_through(
    document: Make, save: Any, rules: Any, run: Any
) -> None:
    path = save(document())
    assert run("check", path, "--policy", rules(epsilon_cap=3)).exit_code == 0
    result = run("check", path, "--policy", rules(epsilon_cap=0.5))
    assert result.exit_code == 1
    assert "policy_epsilon_cap /target/epsilon" in result.stderr
    assert run("check", path).exit_code == 0, "what was judged by a policy is cached with it"
    elsewhere = run("check", path, "--policy", rules(datasets=["other"]))
    assert (elsewhere.exit_code, "policy_dataset" in elsewhere.stderr) == (1, True)


def test_a_policy_never_lets_through_what_is_under_noised(
    document: Make, save: Any, rules: Any, run: Any
) -> None:
    path = save(document(target={"epsilon": 0.1, "delta": 1e-5}))
    result = run("check", path, "--policy", rules(epsilon_cap=100))
    assert (result.exit_code, "under_noised" in result.stderr) == (1, True)
    both = run("check", path, "--policy", rules(epsilon_cap=0.1))
    assert all(code in both.stderr for code in ("under_noised", "policy_epsilon_cap"))


def test_a_second_opinion_that_is_required_is_asked_for(
    document: Make, save: Any, rules: Any, run: Any
) -> None:
    path = save(document())
    assert run("check", path, "--policy", rules(second_opinion="required")).exit_code == 0
    alone = ("certify", path, "--engine", "gaussian")
    assert run(*alone, "--policy", rules(second_opinion="required")).exit_code == 1


@pytest.mark.parametrize(("word", "code"), [("block", 1), ("warn", 0)])
def test_what_an_unreachable_ledger_means_is_the_policys_word(
    document: Make, save: Any, rules: Any, run: Any, word: str, code: int
) -> None:
    needs_budget = rules(budget="required", on_outage=word)
    result = run("check", save(document()), "--policy", needs_budget)
    assert (result.exit_code, "policy_budget" in result.stderr) == (code, True)
    # Nothing is signed that only the ledger could know.
    assert run("certify", save(document()), "--policy", needs_budget).exit_code == 1


def test_a_refusal_by_policy_is_signed_with_its_numbers_and_verifies(
    document: Make, save: Any, rules: Any, run: Any, answer: Any, tmp_path: Path
) -> None:
    run("keys", "new")
    bundle = str(tmp_path / "bundle.json")
    harsh = rules(epsilon_cap=0.5)
    code, result = answer("certify", save(document()), "--policy", harsh, "--out", bundle, "--json")
    assert (code, result["verdict"]) == (1, "refused")
    assert result["epsilon"]["upper"] > 0.5
    assert result["policy"]["digest"] == parse_policy(Path(harsh).read_bytes(), "json").digest()
    told = run("certify", save(document()), "--policy", harsh)
    assert "refused by the policy; the proved bound is ε ≤" in told.stdout
    checked, stated = answer("verify", bundle, "--recompute", "--json")
    assert (checked, stated["verified"], stated["recomputed"]) == (1, True, True)


def test_a_certificate_is_checked_against_the_policy_of_its_verifier(
    document: Make, save: Any, rules: Any, run: Any, answer: Any, tmp_path: Path
) -> None:
    run("keys", "new")
    bundle = str(tmp_path / "bundle.json")
    assert run("certify", save(document()), "--out", bundle).exit_code == 0
    assert run("verify", bundle, "--policy", rules(epsilon_cap=3)).exit_code == 0
    code, stated = answer("verify", bundle, "--policy", rules(epsilon_cap=0.5), "--json")
    assert (code, stated["step"], stated["code"]) == (1, 8, "below_policy")
    assert "policy_epsilon_cap" in stated["message"]
    assert run("verify", bundle, "--policy", "sha256:1").exit_code == 2
    assert run("verify", bundle, "--policy", "nowhere.yaml").exit_code == 2


# ---- the page ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_policy_that_says_what_for(path: Path) -> None:
    raw = path.read_bytes()
    assert raw.startswith(b"# ")
    assert parse_policy(raw, "yaml").version == 1


def test_the_page_names_every_field_and_every_code() -> None:
    from affidavit.certificate.policy.rules import RULES

    text = PAGE.read_text()
    assert [name for name in (*Policy.model_fields, *RULES) if f"`{name}`" not in text] == []


def test_the_policy_on_the_page_is_the_example() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    example = (ROOT / "examples" / "policies" / "text-models.yaml").read_bytes()
    assert parse_policy(shown.encode(), "yaml") == parse_policy(example, "yaml")


def test_the_waiver_on_the_page_is_one_that_the_service_takes() -> None:
    from affidavit.service.certificates.policy_changes import WaiverRequest

    (shown,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    provided = json.loads(shown) | {"plan_digest": "sha256:" + "0" * 64}
    assert WaiverRequest.from_data(provided).rule == "policy_epsilon_cap"
