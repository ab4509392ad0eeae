"""First steps: a plan is written, fields and codes are explained, a token is stored."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from affidavit.client import Client, Problem
from affidavit.gate import service_commands
from affidavit.gate.service_commands import credentials_file
from affidavit.plan import (
    Adjacency,
    MalformedPlan,
    code_meanings,
    load_yaml,
    parse_plan,
    plan_from,
)

GIVEN = {
    "--size": "60000",
    "--sampling": "poisson",
    "--lot-size": "600",
    "--epochs": "10",
    "--adjacency": "add_remove",
    "--clip-norm": "1",
    "--epsilon": "2",
    "--delta": "1e-6",
}
ALL = [word for pair in GIVEN.items() for word in pair]


def test_a_first_plan_is_certified_and_fits_the_schema(run: Any, tmp_path: Path) -> None:
    file = tmp_path / ":smile:.yaml"  # a name, and no picture
    assert run("init", "--out", str(file), *ALL).exit_code == 0
    checked = run("check", str(file))
    assert checked.exit_code == 0
    assert file.name in checked.stdout
    schema = json.loads(run("schema").stdout)
    jsonschema.validate(load_yaml(file.read_bytes()).data, schema)
    assert run("init", "--out", str(file), *ALL).exit_code == 2


@pytest.mark.parametrize("missing", GIVEN)
def test_a_value_that_nobody_gives_is_named(run: Any, tmp_path: Path, missing: str) -> None:
    rest = [word for name, value in GIVEN.items() if name != missing for word in (name, value)]
    result = run("init", "--out", str(tmp_path / "plan.yaml"), *rest)
    assert result.exit_code == 2
    assert missing in result.stderr
    assert not (tmp_path / "plan.yaml").exists()


def test_a_wrong_value_is_reported_without_a_place_in_a_file_not_written(
    run: Any, tmp_path: Path
) -> None:
    file = tmp_path / "plan.yaml"
    result = run("init", "--out", str(file), *ALL, "--lot-size", "60001")
    assert result.exit_code == 2
    assert result.stderr.startswith("affidavit init: conflict /sampling/lot_size: ")
    assert not file.exists()


def test_a_script_gives_what_it_says(run: Any, tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "plan.yaml"
    script.write_text(
        "import opacus\nengine = opacus.PrivacyEngine()\nengine.make_private(module=m, "
        "noise_multiplier=1.1, max_grad_norm=0.5, poisson_sampling=True, epochs=3)\n"
    )
    rest = [
        word
        for name in ("--size", "--lot-size", "--adjacency", "--delta", "--epochs")
        for word in (name, GIVEN[name])
    ]
    assert run("init", str(script), "--out", str(file), *rest).exit_code == 0
    data = load_yaml(file.read_bytes()).data
    assert data["releases"] == [{"name": "all", "clip_norm": 0.5, "noise_multiplier": 1.1}]
    assert data["sampling"] == {"scheme": "poisson", "lot_size": 600}


def test_every_code_is_explained(run: Any) -> None:
    codes = ("unknown_field", "under_noised", "independent_blocks", "expired", "accumulation")
    for code in (*codes, *get_args(Adjacency)):
        result = run("explain", code)
        assert result.exit_code == 0
        assert result.stdout.startswith(code)
    assert {"unknown_field", "under_noised"} <= code_meanings().keys()
    result = run("explain", "under_noise")
    assert result.exit_code == 2
    assert "under_noised" in result.stderr


def test_a_field_is_described(run: Any) -> None:
    assert "poisson" in json.loads(run("schema", "sampling.scheme").stdout)["enum"]
    assert run("schema", "lot_size").exit_code == 0
    result = run("schema", "sampling.lot_siz")
    assert result.exit_code == 2
    assert "Did you mean lot_size?" in result.stderr


def test_a_remedy_names_a_command_that_answers(run: Any) -> None:
    phase = {"sampling": {"scheme": []}, "releases": [{"clip_norm": "x"}], "steps": "ten"}
    for document in (phase, {"phases": [phase]}, {"target": {"delta": []}, "noise": {"bands": 0}}):
        with pytest.raises(MalformedPlan) as refusal:
            plan_from(document)
        named = [
            name
            for reason in refusal.value.reasons
            for name in re.findall(r"`affidavit schema (\S+)`", reason.remedy)
        ]
        assert len(named) > 1
        assert {run("schema", name).exit_code for name in named} == {0}


def test_a_token_is_stored_for_its_owner_and_its_service_alone(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "get", lambda *_: {})
    result = run("login", "--server", "http://one.example", stdin=b"secret-1\n")
    assert result.exit_code == 0
    assert "secret-1" not in result.output
    assert stat.S_IMODE(credentials_file().stat().st_mode) == 0o600
    assert service_commands.token_for("http://one.example/") == "secret-1"
    assert service_commands.token_for("http://two.example") is None
    monkeypatch.setenv("AFFIDAVIT_TOKEN", "secret-2")
    assert service_commands.token_for("http://one.example") == "secret-2"


def test_a_token_that_the_service_does_not_know_is_not_stored(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Problem(401, "unauthenticated", "the token is not valid.")

    monkeypatch.setattr(Client, "get", refuse)
    assert run("login", stdin=b"secret\n").exit_code == 1
    assert run("login", stdin=b"no token\n").exit_code == 2
    assert not credentials_file().exists()


def test_the_address_of_a_certificate_is_opened(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    result = run("open", "sha256:ab/c", "--server", "http://one.example/")
    assert result.exit_code == 0
    assert opened == ["http://one.example/certificates/sha256%3Aab%2Fc"]


def test_a_malformed_field_is_shown_where_it_stands(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("version: 1\ntarget: {}\nsamplin:  # misspelt\n  scheme: poisson\n")
    lines = run("check", str(file)).stderr.splitlines()
    place = next(n for n, line in enumerate(lines) if "unknown_field" in line)
    assert lines[place + 2] == "3 | samplin:  # misspelt"
    assert lines[place + 3] == "  | ^^^^^^^"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("steps", "ten", "a whole number"),
        ("optimizer", "adamw", "a mapping"),
        ("releases", "{}", "a list"),
        ("target", "{epsilon: 0, delta: 0.5}", "above 0"),
        ("epsilon", "3", "target.epsilon"),
        ("lr", "3", "optimizer.learning_rate"),
    ],
)
def test_messages_are_in_the_words_of_plans(field: str, value: str, rule: str) -> None:
    with pytest.raises(MalformedPlan) as refused:
        parse_plan(f"version: 1\n{field}: {value}\n".encode(), "yaml")
    (reason,) = (r for r in refused.value.reasons if field in r.pointer and r.line == 2)
    assert rule in f"{reason.message} {reason.remedy}"
    assert not re.search("valid |instance|tuple|dictionary|0000", reason.message)


def test_what_a_field_takes_is_written_out(run: Any) -> None:
    sampling = json.loads(run("schema", "sampling").stdout)
    assert "poisson" in sampling["properties"]["scheme"]["enum"]
    assert "$ref" not in json.dumps(sampling)
