"""``verify`` is 0 only for a bundle that passes every step and certifies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from affidavit.accountants import Bracket
from affidavit.assessment import certify
from affidavit.gate.render import describe_certificate as in_words
from affidavit.mechanisms import correlation, noise_files
from affidavit.trust import STEPS

Make = Callable[..., dict[str, Any]]
Answer = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def bundle(document: Make, save: Any, run: Any, tmp_path: Path) -> Path:
    """A certified bundle, signed by the key at home."""
    run("keys", "new")
    path = tmp_path / "bundle.json"
    assert run("certify", save(document()), "--out", str(path)).exit_code == 0
    return path


def test_a_certified_bundle_passes_all_steps(
    bundle: Path, save: Any, document: Make, run: Any, answer: Answer
) -> None:
    told = run("verify", str(bundle), "--plan", save(document()))
    assert told.exit_code == 0
    # A bundle made offline was never logged, and no status list is at hand.
    assert told.stdout.count("✓") == len(STEPS) - 4
    assert [line[2:5] for line in told.stdout.splitlines() if line.startswith("–")] == [
        "10.", "11.", "12.", "13."
    ]  # fmt: skip
    assert "certified" in told.stdout
    code, result = answer("verify", str(bundle), "--json")
    assert (code, result["verified"], result["verdict"]) == (0, True, "certified")
    assert [step["name"] for step in result["steps"]] == list(STEPS)
    assert result["recomputed"] is None


def test_a_bundle_comes_from_standard_input_too(bundle: Path, run: Any) -> None:
    assert run("verify", "-", stdin=bundle.read_bytes()).exit_code == 0


def test_the_same_plan_in_other_words_is_the_same_plan(
    bundle: Path, save: Any, document: Make, run: Any
) -> None:
    other = json.dumps(document(version=1.0), indent=4)
    assert run("verify", str(bundle), "--plan", save(other, "other.yaml")).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target": {"epsilon": 0.1, "delta": 1e-5}}, 1),
        ({"optimizer": {"name": "dp_dice"}}, 1),
    ],
)
def test_a_verified_refusal_is_not_a_pass(
    document: Make, save: Any, run: Any, tmp_path: Path, changes: dict[str, Any], code: int
) -> None:
    run("keys", "new")
    path = str(tmp_path / "bundle.json")
    run("certify", save(document(**changes)), "--out", path)
    assert run("verify", path).exit_code == code


def test_another_plan_is_rejected(bundle: Path, save: Any, document: Make, answer: Answer) -> None:
    other = save(document(steps=11), "other.json")
    code, result = answer("verify", str(bundle), "--plan", other, "--json")
    assert code == 1
    assert (result["verified"], result["step_name"], result["code"]) == (
        False,
        "plan",
        "other_plan",
    )


def test_another_key_is_rejected(
    bundle: Path, home: Path, run: Any, answer: Answer, save: Any
) -> None:
    (mine,) = (home / "keys").glob("*.json")
    assert run("verify", str(bundle), "--keys", str(mine)).exit_code == 0
    (home / "keys").rename(home / "before")
    run("keys", "new")
    code, result = answer("verify", str(bundle), "--json")
    assert (code, result["step_name"], result["code"]) == (1, "key", "unknown_key")
    listed = save(run("keys", "list", "--json").stdout, "keys.json")
    assert run("verify", str(bundle), "--keys", listed).exit_code == 1
    old = home / "before" / mine.name
    assert run("verify", str(bundle), "--keys", listed, "--keys", str(old)).exit_code == 0


def test_no_changed_byte_passes(bundle: Path, run: Any) -> None:
    whole = bundle.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        result = run("verify", "-", stdin=changed)
        assert result.exit_code == 1, place
        assert "rejected at step" in result.stdout


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00", b"[" * 100_000, b'{"bundleType": NaN}'])
def test_what_is_no_bundle_is_rejected_at_the_first_step(run: Any, content: bytes) -> None:
    result = run("verify", "-", stdin=content)
    assert result.exit_code == 1
    assert "rejected at step 1 (size and form)" in result.stdout


def test_what_is_verified_is_shown_in_words(bundle: Path, run: Any) -> None:
    told = run("verify", str(bundle), "--show")
    assert told.exit_code == 0
    stated = json.loads(run("verify", str(bundle), "--json").stdout)["statement"]["predicate"]
    shown = [line.strip() for line in told.stdout.splitlines() if line.startswith("  ")]
    told_of = {line.partition(":")[0] for line in shown}
    assert {"plan", "protects", "guarantee", "sampling", "noise", "policy", "valid"} <= told_of
    assert [item["text"] for item in stated["obligations"]] == [
        line.partition("): ")[2] for line in shown if line.startswith("obligation")
    ]
    assert (
        f"valid: {stated['validity']['not_before']} to {stated['validity']['not_after']}" in shown
    )
    assert any(stated["guarantee"]["epsilon"]["upper"] in line for line in shown)


def test_nothing_is_shown_of_what_does_not_verify(bundle: Path, run: Any) -> None:
    document = json.loads(bundle.read_bytes())
    document["envelope"]["signatures"][0]["sig"] = "A" * 86 + "=="
    told = run("verify", "-", "--show", stdin=json.dumps(document).encode())
    assert told.exit_code == 1
    assert "guarantee" not in told.stdout


@pytest.mark.parametrize("form", [None, [], "text", {"required": 1}])
def test_what_a_later_release_wrote_differently_is_told_of(form: Any) -> None:
    stated = {"plan": {"name": "a"}, "guarantee": form, "approvals": form, "validity": form}
    assert any("of a later release" in line for line in in_words(stated))


def test_a_bundle_in_place_of_its_plan_is_named(bundle: Path, run: Any) -> None:
    told = run("curve", str(bundle))
    assert told.exit_code == 2
    assert "no_plan" in told.stderr.replace("\n", " ")


def test_what_cannot_be_read_is_a_mistake_of_use(bundle: Path, run: Any, save: Any) -> None:
    for arguments in (
        ("missing.json",),
        (str(bundle), "--plan", "missing.yaml"),
        (str(bundle), "--plan", save("version: one", "bad.yaml")),
        (str(bundle), "--keys", "missing.json"),
        (str(bundle), "--keys", save("[1]", "keys.json")),
        (str(bundle), "--keys", save("not json", "keys.json")),
        (str(bundle), "--keys", save("[" * 100_000, "deep.json")),
    ):
        result = run("verify", *arguments)
        assert result.exit_code == 2, arguments
        assert result.stderr
        assert result.stdout == ""


def test_recomputing_confirms(bundle: Path, run: Any, answer: Answer) -> None:
    told = run("verify", str(bundle), "--recompute")
    assert told.exit_code == 0
    assert "the accountants give the same bounds again" in told.stdout
    assert answer("verify", str(bundle), "--recompute", "--json")[1]["recomputed"] is True


def test_recomputing_without_the_file_that_the_plan_names_says_what_is_missing(
    run: Any, answer: Answer, document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("keys", "new")
    noise = json.dumps({"kind": "toeplitz_inverse", "coefficients": [1.0, -0.731]}).encode()
    (tmp_path / "n.json").write_bytes(noise)
    named = {"kind": "matrix", "file": "n.json", "sha256": hashlib.sha256(noise).hexdigest()}
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    about = {"adjacency": "zero_out", "sampling": {"scheme": "full_batch"}, "noise": named}
    plan.write_text(json.dumps(document(**about, steps=7)))
    assert answer("certify", str(plan), "--out", str(out), "--json")[0] == 0
    monkeypatch.setattr(noise_files, "_registered", {})
    correlation._built.cache_clear()
    told = run("verify", str(out), "--recompute")
    assert told.exit_code == 3
    assert "--plan" in told.stdout
    assert run("verify", str(out), "--recompute", "--plan", str(plan)).exit_code == 0


@pytest.mark.parametrize(
    "otherwise",
    [
        {"verdict": "under_noised"},
        {"epsilon": Bracket(lower=100.0, upper=101.0)},
    ],
)
def test_recomputing_to_another_answer_decides_nothing(
    bundle: Path,
    run: Any,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    otherwise: dict[str, Any],
) -> None:
    monkeypatch.setattr(
        "affidavit.assessment.certify", lambda plan: replace(certify(plan), **otherwise)
    )
    assert run("verify", str(bundle)).exit_code == 0
    told = run("verify", str(bundle), "--recompute")
    assert told.exit_code == 3
    assert "recomputed" in told.stdout
    code, result = answer("verify", str(bundle), "--recompute", "--json")
    assert (code, result["recomputed"], result["reasons"][0]["code"]) == (3, False, "recomputed")
    assert result["verified"] is False


def test_a_bound_is_proved_again_and_an_unprovable_one_is_undecided(
    document: Make, save: Any, run: Any, answer: Answer, tmp_path: Path
) -> None:
    run("keys", "new")
    path = tmp_path / "proved.json"
    plan = save(document(steps=50))
    assert run("certify", plan, "--prove", "--out", str(path)).exit_code == 0
    code, result = answer("verify", str(path), "--prove", "--json")
    assert (code, result["proved"]["statements"]) == (0, ["gaussian"])
    extra = [{"kind": "laplace", "name": "count", "noise_multiplier": 20.0}]
    counted = save(document(steps=50, extra=extra), "counted.json")
    refused = tmp_path / "refused.json"
    assert run("certify", counted, "--prove", "--out", str(refused)).exit_code == 3
    assert not refused.exists()
    policy = tmp_path / "policy.yaml"
    rules = {"schema_version": 1, "name": "strict", "version": 1, "datasets": "default"}
    policy.write_text(json.dumps(rules | {"proof": "required", "allow_large_delta": True}))
    issued = run("certify", plan, "--policy", str(policy), "--out", str(path))
    assert issued.exit_code == 0, issued.output
    code, result = answer("verify", str(path), "--policy", str(policy), "--json")
    assert (code, result["proved"]["statements"]) == (0, ["gaussian"])
    assert run("certify", counted, "--policy", str(policy)).exit_code == 1
    assert run("check", counted, "--policy", str(policy)).exit_code == 1
