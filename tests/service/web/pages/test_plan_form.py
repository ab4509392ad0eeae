"""The form of a new plan: what is typed is what is read, whatever it is."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affidavit.plan import MalformedPlan, as_document, digest, load_yaml, parse_plan
from affidavit.service.web.pages.new_plan import curl_of
from affidavit.service.web.pages.plan_form import EXAMPLES as EXAMPLE_FORMS
from affidavit.service.web.pages.plan_form import (
    MAX_RELEASES,
    START,
    PlanForm,
    fields,
    parse,
    release_names,
    yaml_of,
)
from tests.support.random_seeds import examples

EXAMPLES = sorted(Path("examples").glob("*.yaml")) + sorted(Path("examples/train").glob("*.yaml"))
WHOLE = {
    **START,
    "dataset.size": "1000",
    "sampling.lot_size": "50",
    "steps": "10",
    "target.epsilon": "8",
    "target.delta": "1e-5",
}
NAMES = [*(field.name for field in fields()), *release_names(3)]
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            *("1e-5", "0x10", "007", "1_000", ".5", "5.", "+1", "nan", ".inf", "null", "~", "no"),
            *("a: b", "a # b", "{a: 1}", "[1]", "*a", "&a", "!!python/object:os", "'", '"', "\\"),
            *("- x", "? x", "|", ">", "%", "@", "`", "a\nb", "a\tb", "<script>", "\u202eb", "\x00"),
        ]
    ),
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_yaml_round_trips_a_plan(path: Path) -> None:
    plan = parse_plan(path.read_bytes(), "yaml")
    assert digest(parse_plan(yaml_of(as_document(plan)).encode(), "yaml")) == digest(plan)


@settings(max_examples=examples(150))
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS, max_size=6))
def test_any_input_is_parsed_or_refused_with_reasons(typed: dict[str, str]) -> None:
    form = PlanForm.of({**WHOLE, **typed})
    parsed = parse(form.yaml)
    if parsed.plan is None:
        assert parsed.reasons
        assert all(reason.remedy for reason in parsed.reasons)
        told = sum(map(len, parsed.at_field.values())) + len(parsed.elsewhere)
        assert told == len(parsed.reasons)
    else:
        assert parse_plan(form.yaml.encode(), "yaml") == parsed.plan


@settings(max_examples=examples(150))
@given(TEXTS)
def test_text_stays_one_yaml_string(text: str) -> None:
    form = PlanForm.of({"name": text, "dataset.name": text})
    try:
        read = load_yaml(form.yaml.encode("utf-8", "replace")).data
    except MalformedPlan:
        assert any("\ud800" <= item <= "\udfff" or item == "\x00" for item in text)
        return
    requested = text.strip()
    if requested:
        assert (read["name"], read["dataset"]["name"]) == (requested, requested)
    else:
        assert read == {"version": 1}


def test_an_error_is_assigned_to_its_field_and_row() -> None:
    form = PlanForm.of(
        {
            **WHOLE,
            "dataset.size": "many",
            "releases.2.name": "aux",
            "releases.2.clip_norm": "wide",
        }
    )
    # The empty second row is left out, so that the third one is the second release.
    assert (form.releases, form.value("releases.1.clip_norm")) == (2, "wide")
    parsed = parse(form.yaml)
    assert set(parsed.at_field) == {"dataset.size", "releases.1.clip_norm"}
    assert parsed.elsewhere == ()


def test_unknown_fields_and_extra_rows_are_ignored() -> None:
    form = PlanForm.of({"csrf": "x", "claim.epsilon": "1", f"releases.{MAX_RELEASES}.name": "a"})
    assert form.yaml == "version: 1\n"
    assert PlanForm.of(START, more_releases=99).releases == MAX_RELEASES


def test_null_steps_are_solved_for() -> None:
    form = PlanForm.of({**WHOLE, "steps": "null", "releases.0.noise_multiplier": "2"})
    plan = parse(form.yaml).plan
    assert plan is not None
    assert plan.asks_for_steps


@pytest.mark.parametrize("base", ["https://dp.example", "http://a'; rm -rf ~; '", "http://$(id)"])
def test_the_curl_command_quotes_the_address(base: str) -> None:
    words = shlex.split(curl_of(base))
    assert words[:3] == ["curl", "-sS", f"{base}/v1/certificates"]


def test_a_field_of_what_was_not_chosen_is_no_part_of_the_plan_nor_of_the_page() -> None:
    form = PlanForm.of({**WHOLE, "sampling.scheme": "full_batch", "sampling.groups": "7"})
    assert load_yaml(form.yaml.encode()).data["sampling"] == {"scheme": "full_batch"}
    assert form.value("sampling.groups") == "7"
    style = (resources.files("affidavit.service.web.pages") / "static/affidavit.css").read_text()
    choices = {field.name: [value for value, _ in field.choices] for field in fields()}
    for name in {field.of for field in fields() if field.of}:
        for value in choices[name]:
            hidden = f'[data-of="{name}"]:not([data-when~={value}])'
            assert f'[name="{name}"] > [value={value}]:checked) {hidden}' in style


@pytest.mark.parametrize("name", EXAMPLE_FORMS)
def test_an_example_is_a_plan(name: str) -> None:
    form = PlanForm.of({**START, **EXAMPLE_FORMS[name][1]})
    assert parse(form.yaml).plan is not None
