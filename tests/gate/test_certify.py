"""``certify`` answers with the verdict's exit code and the result document of SPEC section 11."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from affidavit.accountants import Bracket
from affidavit.assessment import certification as certifying
from affidavit.checker import Unproved

Make = Callable[..., dict[str, Any]]
Answer = Callable[..., tuple[int, dict[str, Any]]]

RESULT = {
    *("verdict", "plan_digest", "epsilon", "delta", "target", "adjacency", "unit"),
    *("noise_multiplier", "allocation", "sensitivity", "mu", "sampling", "accountants"),
    *("reasons", "warnings", "planning", "obligations", "assumptions", "confidence"),
}
MALFORMED = {
    *("verdict", "plan_digest", "epsilon", "delta", "accountants"),
    *("reasons", "warnings", "obligations"),
}
CERTIFIED: dict[str, Any] = {}
UNDER_NOISED = {"target": {"epsilon": 0.1, "delta": 1e-5}}
REFUSED = {"sampling": {"scheme": "shuffled", "lot_size": 10}}
UNSOUND = {"optimizer": {"name": "dp_dice"}}


def disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every engine but the exact one say that ε is a thousand; the checker proves nothing."""

    def unproved(*_: object, **__: object) -> None:
        raise Unproved("not_proved", "no", "")

    monkeypatch.setattr("affidavit.accountants.search_witness", unproved)
    curve = SimpleNamespace(epsilon=lambda _: Bracket(lower=1000.0, upper=1001.0))
    liar = SimpleNamespace(name="pld", version="liar", curve=lambda _: curve)
    real = certifying.accountant
    monkeypatch.setattr(
        certifying, "accountant", lambda name: real(name) if name == "gaussian" else liar
    )


@pytest.mark.parametrize(
    ("changes", "verdict", "code"),
    [
        (CERTIFIED, "certified", 0),
        ({"target": {"delta": 1e-5}}, "certified", 0),
        (UNDER_NOISED, "under_noised", 1),
        (REFUSED, "refused", 1),
        (UNSOUND, "refused", 1),
        ({"target": {"delta": 0.5}}, "refused", 1),
    ],
)
def test_the_exit_code_is_the_verdict(
    document: Make, save: Any, answer: Answer, changes: dict[str, Any], verdict: str, code: int
) -> None:
    outcome, result = answer("certify", save(document(**changes)), "--json")
    assert (outcome, result["verdict"]) == (code, verdict)
    assert bool(result["reasons"]) == (verdict != "certified")


@pytest.mark.parametrize("asked_by", ["option", "signature"])
def test_engines_that_contradict_each_other_decide_nothing(
    document: Make, save: Any, answer: Answer, run: Any, monkeypatch: Any, asked_by: str
) -> None:
    disagree(monkeypatch)
    path = save(document())
    options = ["--second-opinion"] if asked_by == "option" else []
    if asked_by == "signature":
        assert run("keys", "new").exit_code == 0
    code, result = answer("certify", path, "--json", *options)
    assert (code, result["verdict"]) == (3, "undecided")
    assert [reason["code"] for reason in result["reasons"]] == ["engines_disagree"]
    assert len(result["accountants"]) == 2


def test_disagreement_is_told_to_people(
    document: Make, save: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disagree(monkeypatch)
    told = run("certify", "--second-opinion", save(document()))
    assert told.exit_code == 3
    assert "undecided" in told.stdout
    assert "engines_disagree" in told.stdout


def test_the_result_document_has_the_fields_of_the_specification(
    document: Make, save: Any, answer: Answer
) -> None:
    _, result = answer("certify", save(document(**UNDER_NOISED)), "--json")
    assert result.keys() == RESULT
    assert result["plan_digest"].startswith("sha256:")
    for name in ("epsilon", "delta"):
        assert result[name].keys() == {"lower", "upper"}
    assert result["epsilon"]["lower"] <= result["epsilon"]["upper"]
    assert result["delta"] == {"lower": 1e-5, "upper": 1e-5}
    assert result["noise_multiplier"].keys() == {"joint", "releases"}
    (release,) = result["noise_multiplier"]["releases"]
    assert release.keys() == {"name", "count", "required", "given"}
    assert release["given"] == 20 < release["required"]
    assert result["sampling"] == {"scheme": "full_batch", "probability": 1.0, "steps": 10}
    for opinion in result["accountants"]:
        assert opinion.keys() == {"name", "version", "epsilon"}
    (reason,) = result["reasons"]
    assert reason.keys() == {"code", "pointer", "message", "remedy"}
    assert (reason["code"], reason["pointer"]) == ("under_noised", "/target/epsilon")
    for obligation in result["obligations"]:
        assert obligation.keys() == {"code", "text", "checked_by"}


def test_a_refused_plan_has_the_same_fields(document: Make, save: Any, answer: Answer) -> None:
    _, result = answer("certify", save(document(**REFUSED)), "--json")
    assert result.keys() == RESULT
    assert (result["epsilon"], result["delta"], result["accountants"]) == (None, None, [])


def test_a_malformed_plan_is_a_result_too_but_never_a_certificate(
    save: Any, answer: Answer
) -> None:
    code, result = answer("certify", save('{"version": NaN}'), "--json")
    assert code == 2
    assert result.keys() == MALFORMED
    assert (result["verdict"], result["plan_digest"]) == ("refused", None)
    assert result["reasons"] == [
        {
            "code": "not_finite",
            "pointer": "/version",
            "message": "NaN is not a finite number.",
            "remedy": "Give a plain decimal number in range.",
            "line": 1,
            "column": 2,
        }
    ]


@pytest.mark.parametrize(
    ("size", "steps", "k", "sigma", "blocks", "delta", "epsilon"),
    [
        (42043, 410, 10, 0.7189, 1, 8e-6, 27.9585),
        (42043, 410, 10, 2.3395, 49, 8e-6, 84.7631),
        (60591, 885, 15, 0.7094, 1, 1e-5, 37.4507),
        (60591, 885, 15, 2.3614, 49, 1e-5, 114.0203),
    ],
)
def test_the_shuffled_plans_of_the_paper_have_the_epsilon_of_the_specification(
    document: Make,
    save: Any,
    answer: Answer,
    size: int,
    steps: int,
    k: int,
    sigma: float,
    blocks: int,
    delta: float,
    epsilon: float,
) -> None:
    plan = document(
        dataset={"size": size},
        adjacency="zero_out",
        # An epoch that leaves out nobody costs what a known order does.
        sampling={"scheme": "shuffled", "lot_size": 1024, "drop_last": False},
        steps=steps,
        releases=[{"name": "all", "count": blocks, "clip_norm": 0.1, "noise_multiplier": sigma}],
        target={"delta": delta},
    )
    code, result = answer("certify", save(plan), "--json", "--engine", "gaussian")
    assert code == 0
    assert 0.6 * epsilon < result["epsilon"]["lower"] < result["epsilon"]["upper"]
    assert result["epsilon"]["upper"] == pytest.approx(epsilon, abs=6e-5)
    assert result["mu"] is None  # which is stated of exact costs alone
    assert result["sampling"]["participations"] == k


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) of μ-GDP by its definition; good to 1e-12 where nothing cancels."""

    def phi(z: float) -> float:
        return math.erfc(-z / math.sqrt(2)) / 2

    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


def test_epsilon_alone_is_answered_with_delta(document: Make, save: Any, answer: Answer) -> None:
    plan = document(target={"epsilon": 0.25}, dataset={"name": "toy"})
    code, result = answer("certify", save(plan), "--json")
    assert code == 0
    assert result["epsilon"] == {"lower": 0.25, "upper": 0.25}
    exact = gaussian_delta(math.sqrt(10) / 20, 0.25)
    assert result["delta"]["lower"] <= exact * (1 + 1e-11)
    assert result["delta"]["upper"] >= exact * (1 - 1e-11)
    assert result["delta"]["upper"] == pytest.approx(exact, rel=1e-9)


def test_delta_alone_is_answered_with_epsilon(document: Make, save: Any, answer: Answer) -> None:
    code, result = answer("certify", save(document(target={"delta": 1e-5})), "--json")
    assert code == 0
    assert result["target"] == {"epsilon": None, "delta": 1e-5}
    low, high = result["epsilon"]["lower"], result["epsilon"]["upper"]
    mu = math.sqrt(10) / 20
    assert gaussian_delta(mu, high) <= 1e-5 * (1 + 1e-9)
    assert gaussian_delta(mu, low * (1 - 1e-9)) >= 1e-5 * (1 - 1e-9)


def test_a_claim_that_fails_is_told_to_people_without_a_target(
    document: Make, save: Any, run: Any
) -> None:
    result = run("certify", save(document(target={"delta": 1e-5}, claim=1e-3)))
    assert result.exit_code == 1
    assert "ε = 0.001 is claimed" in result.stdout


def test_the_attack_of_the_lower_end_is_told_on_request(
    document: Make, save: Any, run: Any
) -> None:
    path = save(document(target={"delta": 1e-5}))
    sentences = json.loads(run("certify", path, "--show-attack", "--json").stdout)["attack"]
    assert sentences
    told = " ".join(run("certify", path, "--show-attack").stdout.split())
    assert all(sentence in told for sentence in sentences)
    assert "attack" not in json.loads(run("certify", path, "--json").stdout)


def test_a_plan_for_people_says_what_it_needs(document: Make, save: Any, run: Any) -> None:
    result = run("certify", save(document(**UNDER_NOISED)))
    assert result.exit_code == 1
    for stated in (
        "under-noised",
        "noise multipliers",
        "required",
        "/target/epsilon",
        "not signed",
    ):
        assert stated in result.stdout, stated


@pytest.mark.parametrize("syntax", ["json", "yaml"])
def test_a_dash_reads_the_plan_from_standard_input(
    document: Make, answer: Answer, syntax: str
) -> None:
    text = json.dumps(document())
    stdin = (
        text
        if syntax == "json"
        else "version: 1\n"
        + "\n".join(f"{key}: {json.dumps(value)}" for key, value in document(version=...).items())
    )
    code, result = answer("certify", "-", "--json", stdin=stdin.encode())
    assert (code, result["verdict"]) == (0, "certified")


def test_findings_point_into_the_file(save: Any, run: Any) -> None:
    path = save("version: 1\nadjacency: add_remove\nstepz: 3\n", "plan.yaml")
    result = run("certify", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{path}:3:1: unknown_field /stepz: " in result.stderr
    assert "Did you mean steps?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_refusal_points_into_the_file(document: Make, save: Any, run: Any) -> None:
    text = json.dumps(document(**UNSOUND), indent=1)
    path = save(text)
    line = text[: text.index('"name": "dp_dice"')].count("\n") + 1
    for command in ("certify", "check"):
        result = run(command, path)
        assert result.exit_code == 1
        assert f"{path}:{line}:3: unsound_optimizer /optimizer/name: " in result.output


def test_a_finding_stays_on_its_line(save: Any, run: Any) -> None:
    result = run("certify", save(b'{"version": 1, "a\\nb\\u001b[2J": 1}'))
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    diagnostics = [line for line in result.stderr.splitlines() if "plan.json:1:" in line]
    excerpts = [line for line in result.stderr.splitlines() if line[1:3] == " |"]
    assert len(diagnostics) + len(excerpts) == len(result.stderr.splitlines())
    assert len(excerpts) == 3


@pytest.mark.parametrize("name", ["no-such-plan.yaml", "."])
def test_what_cannot_be_read_is_malformed(run: Any, name: str) -> None:
    result = run("certify", name)
    assert result.exit_code == 2
    assert f"cannot read {name}" in result.stderr


def test_an_unknown_engine_is_a_mistake_of_use(document: Make, save: Any, run: Any) -> None:
    for command in ("certify", "batch"):
        result = run(command, save(document()), "--engine", "oracle")
        assert result.exit_code == 2
        assert "oracle" in result.stderr


def test_an_engine_alone_gives_its_own_opinion(document: Make, save: Any, answer: Answer) -> None:
    for name in ("gaussian", "rdp"):
        code, result = answer("certify", save(document()), "--json", "--engine", name)
        assert code == 0
        assert [opinion["name"] for opinion in result["accountants"]] == [name]


def test_a_signed_result_carries_its_certificate(
    document: Make, save: Any, answer: Answer, run: Any, tmp_path: Path
) -> None:
    assert run("keys", "new").exit_code == 0
    out = tmp_path / "bundle.json"
    for changes, code in ((CERTIFIED, 0), (UNDER_NOISED, 1), (REFUSED, 1)):
        outcome, result = answer("certify", save(document(**changes)), "--json", "--out", str(out))
        assert outcome == code
        assert result.keys() == RESULT | {"certificate", "policy", "waived"}
        assert result["certificate"].keys() == {"id", "bundle"}
        assert json.loads(out.read_bytes()) == result["certificate"]["bundle"]


def test_out_without_a_key_writes_nothing(
    document: Make, save: Any, run: Any, tmp_path: Path
) -> None:
    path = save(document())
    before = sorted(tmp_path.iterdir())
    result = run("certify", path, "--out", str(tmp_path / "bundle.json"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "affidavit keys new" in result.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("where", ["missing/bundle.json", "home", "plan.json/bundle.json"])
def test_a_bundle_that_cannot_be_written_is_said_and_nothing_is_left(
    document: Make, save: Any, run: Any, tmp_path: Path, where: str
) -> None:
    path = save(document())
    run("keys", "new")
    before = sorted(tmp_path.rglob("*"))
    result = run("certify", path, "--out", str(tmp_path / where))
    assert result.exit_code == 2
    assert "cannot write" in result.stderr
    assert result.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bundle_replaces_the_one_before(
    document: Make, save: Any, run: Any, tmp_path: Path
) -> None:
    run("keys", "new")
    out = tmp_path / "bundle.json"
    out.write_text("old")
    assert run("certify", save(document()), "--out", str(out)).exit_code == 0
    assert out.read_bytes().startswith(b'{"bundleType"')
    assert out.stat().st_mode & 0o777 == 0o644
