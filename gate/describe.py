"""``affidavit schema``, ``explain`` and ``mechanisms``: plans, codes, and what optimisers release.

Exit codes: 0 shown, 2 unknown field, code or mechanism.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from affidavit.gate.console import out, print_document, print_json, say, stop
from affidavit.gate.options import JsonOption
from affidavit.mechanisms import Mechanism, all_mechanisms
from affidavit.plan import code_meanings, plan_schema, referenced_models
from affidavit.plan import explain as meanings_of

VERDICTS = {
    "certified": "the proved upper ends of ε and δ meet the target, or there is no target.",
    "under_noised": "the proved lower end of ε is above the target. Use the noise multiplier in "
    "the column `required`, or fewer steps; `affidavit check --fix` writes it.",
    "unproved": "the target lies between the proved ends of ε. Use the noise multiplier in "
    "the column `required`.",
    "refused": "no theorem covers the plan, or it is known to be unsound; the reasons say which.",
    "undecided": "the accountants disagree or failed. Claim nothing, and report this.",
}
"""What each verdict says."""


def schema(
    field: Annotated[
        str | None, typer.Argument(help="A field, like sampling.scheme; default: the whole schema.")
    ] = None,
) -> None:
    """Print the JSON Schema of a plan, or of one field."""
    whole = plan_schema()
    shown = whole if field is None else _find(whole["$defs"], field)
    print_document(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")


def _find(parts: dict[str, Any], field: str) -> Any:
    """The schema of a field by its path; a name alone is looked for in every part."""
    *owners, name = field.split(".")
    below = [parts["PlanOfOnePhase"]] if owners else list(parts.values())
    for owner in owners:
        below = [
            parts[name]
            for part in below
            for name in referenced_models(part.get("properties", {}).get(owner, {}))
        ]
    for part in below:
        if name in part.get("properties", {}):
            return _written_out(part["properties"][name], parts)
    names = sorted({n for part in below for n in part.get("properties", {})})
    near = get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else f" Use one of {', '.join(names)}."
    return stop(f"{field} is not a field of a plan.{hint if names else ''}")


def _written_out(part: Any, parts: dict[str, Any]) -> Any:
    """A part of the schema with what it refers to in place; no part contains itself."""
    if isinstance(part, list):
        return [_written_out(item, parts) for item in part]
    if not isinstance(part, dict):
        return part
    named = parts[part["$ref"].rpartition("/")[2]] if "$ref" in part else {}
    whole = named | {
        key: value for key, value in part.items() if key not in ("$ref", "discriminator")
    }
    return {key: _written_out(value, parts) for key, value in whole.items()}


def explain(
    code: Annotated[
        str, typer.Argument(help="A verdict, or a code of a reason, problem or mistake.")
    ],
) -> None:
    """Explain a code or a verdict, and what to do about it."""
    # Imported here because the catalogue loads the accountants.
    from affidavit.certificate.diagnosis import CATALOGUE

    if code in VERDICTS:
        say(f"{code} (verdict): {VERDICTS[code]}")
        return
    for meaning in () if code in CATALOGUE else meanings_of(code):
        say(f"{code} ({meaning.room}): {meaning.message}".rstrip(": "))
        if meaning.remedy:
            say(f"  to do: {meaning.remedy}")
    if code in CATALOGUE:
        mistake = CATALOGUE[code]
        say(f"{code} (known mistake): {mistake.wrong}")
        say(f"  to do: {mistake.fix}")
        say(f"  source: {mistake.source}")
    if not meanings_of(code) and code not in CATALOGUE:
        near = get_close_matches(code, [*VERDICTS, *code_meanings(), *CATALOGUE], n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        stop(f"unknown code {code[:80]}.{hint or ' docs/reference/codes.md lists all codes.'}")


def mechanisms(
    name: Annotated[
        str | None, typer.Argument(help="Optimiser, or denoise; default: list all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe what an optimiser releases, its sensitivity, and its obligations for the trainer."""
    known = all_mechanisms()
    if name is None:
        if as_json:
            print_json({"mechanisms": [mechanism.as_dict() for mechanism in known.values()]})
        else:
            out.print(_table(known))
        return
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}."
        stop(f"unknown mechanism {name[:80]}; {hint}")
    if as_json:
        print_json(known[name].as_dict())
    else:
        for line in _lines(known[name]):
            out.print(line)


def _table(known: dict[str, Mechanism]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "", "state on raw data", "noise"):
        table.add_column(heading, no_wrap=heading == "name")
    for mechanism in known.values():
        state = "yes, accounted" if mechanism.state_on_raw_data else "none"
        table.add_row(mechanism.name, mechanism.title, state, mechanism.noise_description)
    return table


def _lines(mechanism: Mechanism) -> Iterator[str]:
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
