"""``affidavit schema``, ``explain`` and ``mechanisms``: plans, codes, and what optimisers release.

Exit codes: 0 shown, 2 unknown field, code or mechanism.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from affidavit.gate.console import out, print_document, print_json, say, stop
from affidavit.gate.options import JsonOption
from affidavit.plan import CodeMeaning, code_meanings, published_schema, referenced_models
from affidavit.plan import explain as meanings_of

if TYPE_CHECKING:
    from rich.table import Table

    from affidavit.mechanisms import Mechanism

VERDICTS = {
    "certified": "the proved upper ends of ε and δ meet the target, or there is no target.",
    "under_noised": "even the lower bound on ε exceeds the target: more noise is needed. Use the "
    "noise multiplier in the column `required`, or fewer steps; `affidavit check --fix` writes it.",
    "unproved": "the target or the claim lies between the proved ends of ε. Use the noise "
    "multiplier in the column `required`, or claim the upper end.",
    "refused": "no theorem covers the plan, or it is known to be unsound; the reasons say which.",
    "undecided": "two accountants contradict each other, or they failed. Claim nothing, and report "
    "this.",
}
"""The meaning of each verdict."""
ADJACENCIES = {
    "add_remove": "two data sets are neighbours if one has one record (or user) more. The number "
    "of records is not public, so nothing may be divided by it.",
    "replace_one": "two data sets are neighbours if one record (or user) has other values. The "
    "number of records is public, and each release may move by twice its clip norm.",
    "zero_out": "two data sets are neighbours if one record (or user) is replaced by one that "
    "contributes nothing. The number of records is public.",
}
"""The meaning of each adjacency."""


def schema(
    field: Annotated[
        str | None, typer.Argument(help="A field, like sampling.scheme; default: the whole schema.")
    ] = None,
) -> None:
    """Print the JSON Schema of a plan, or of one field."""
    document = published_schema()
    if document is None:
        from affidavit.plan import plan_schema  # imports the models

        document = plan_schema()
    if field is not None:
        document = _find_field(document["$defs"], field)
    print_document(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _find_field(definitions: dict[str, Any], field: str) -> Any:
    """Return the schema of a field by its path; a single name may be in any definition."""
    *owners, name = field.split(".")
    owning = [definitions["PlanOfOnePhase"]] if owners else list(definitions.values())
    for owner in owners:
        owning = [
            definitions[reference]
            for definition in owning
            for reference in referenced_models(definition.get("properties", {}).get(owner, {}))
        ]
    for definition in owning:
        if name in definition.get("properties", {}):
            return _inline_references(definition["properties"][name], definitions)
    names = sorted({key for definition in owning for key in definition.get("properties", {})})
    similar = get_close_matches(name, names, n=1)
    hint = f" Did you mean {similar[0]}?" if similar else f" Use one of {', '.join(names)}."
    return stop(f"{field} is not a field of a plan.{hint if names else ''}")


def _inline_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace the references in a schema by their definitions, none of which is recursive."""
    if isinstance(schema, list):
        return [_inline_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    merged = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}
    merged = merged | {
        key: value for key, value in schema.items() if key not in ("$ref", "discriminator")
    }
    return {key: _inline_references(value, definitions) for key, value in merged.items()}


def explain(
    code: Annotated[
        str, typer.Argument(help="A verdict, or a code of a reason, problem or mistake.")
    ],
) -> None:
    """Explain a code or a verdict, and what to do about it."""
    if code in VERDICTS:
        say(f"{code} (verdict): {VERDICTS[code]}")
        return
    if code in ADJACENCIES:
        say(f"{code} (adjacency): {ADJACENCIES[code]}")
        return
    meanings = meanings_of(code)
    if meanings and all(meaning.part != "assessment" for meaning in meanings):
        _print_meanings(code, meanings)
        return
    # Imported here because the catalogue of mistakes loads the accountants.
    from affidavit.assessment.diagnosis import CATALOGUE

    if code in CATALOGUE:
        mistake = CATALOGUE[code]
        say(f"{code} (known mistake): {mistake.wrong}")
        say(f"  to do: {mistake.fix}")
        say(f"  source: {mistake.source}")
    elif meanings:
        _print_meanings(code, meanings)
    else:
        known = [*VERDICTS, *ADJACENCIES, *code_meanings(), *CATALOGUE]
        similar = get_close_matches(code, dict.fromkeys(known), n=2)
        hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
        stop(f"unknown code {code[:80]}.{hint or ' The documentation lists all codes.'}")


def _print_meanings(code: str, meanings: Sequence[CodeMeaning]) -> None:
    for meaning in meanings:
        say(f"{code} ({meaning.part}): {meaning.message}".rstrip(": "))
        if meaning.remedy:
            say(f"  to do: {meaning.remedy}")


def mechanisms(
    name: Annotated[
        str | None, typer.Argument(help="Optimiser, or denoise; default: list all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe what an optimiser releases, its sensitivity, and its obligations for the trainer."""
    from affidavit.mechanisms import all_mechanisms

    known = all_mechanisms()
    if name is None:
        if as_json:
            print_json({"mechanisms": [mechanism.as_dict() for mechanism in known.values()]})
        else:
            out.print(_mechanism_table(known))
        return
    if name not in known:
        similar = get_close_matches(name, known, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"choose one of {', '.join(known)}."
        stop(f"unknown mechanism {name[:80]}; {hint}")
    if as_json:
        print_json(known[name].as_dict())
    else:
        for line in _mechanism_lines(known[name]):
            out.print(line)


def _mechanism_table(known: dict[str, Mechanism]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("name", "", "state on raw data", "noise"):
        table.add_column(heading, no_wrap=heading == "name")
    for mechanism in known.values():
        state = "yes, accounted" if mechanism.state_on_raw_data else "none"
        table.add_row(mechanism.name, mechanism.title, state, mechanism.noise_description)
    return table


def _mechanism_lines(mechanism: Mechanism) -> Iterator[str]:
    yield f"[bold]{escape(mechanism.name)}[/]  {escape(mechanism.title)}"
    for label, text in (
        ("releases", mechanism.releases),
        ("sensitivity", mechanism.sensitivity),
        ("proof", mechanism.proof),
        ("post-processing", "; ".join(mechanism.post_processing)),
        ("state on raw data", "; ".join(mechanism.state_on_raw_data) or "none"),
        ("clipping", mechanism.clipping),
        ("noise", mechanism.noise_description),
        ("sources", "; ".join(mechanism.sources)),
    ):
        yield f"[bold]{label}:[/] {escape(text)}"
    for obligation in mechanism.obligations:
        yield f"[bold]trainer obligation:[/] {escape(obligation.text)} ({obligation.code})"
    for field in mechanism.hyperparameters():
        cost = "changes the guarantee" if field["changes_the_guarantee"] else "free"
        yield escape(f"  {field['field']}: {field['takes']}, {field['meaning']} ({cost})")
