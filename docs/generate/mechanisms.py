"""``docs/reference/mechanisms.md``, written from the catalogue of mechanisms.

The document is generated, so that what it says is what certifies; a test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from affidavit.mechanisms import Mechanism, all_mechanisms
from docs.generate.tables import table

HEAD = """\
# Mechanisms

Generated from the registry by `make docs`; change `mechanisms/`, not this file.

What each optimiser releases, how sensitive that is, and why the rest of it costs nothing. A plan
names one in `optimizer.name`; a field that it does not have, or noise that it is not defined with,
is refused. `affidavit mechanisms NAME` and `GET /v1/mechanisms` say the same, with a minimal plan.
A field costs nothing of ε unless it says that it does.

`dp_dice` is the only one whose state sees raw data; its bounds are proved in
[theorems/dp-dice.md](../theorems/dp-dice.md).

| name | | noise |
|---|---|---|
"""


def document() -> str:
    """The whole document."""
    entries = list(all_mechanisms().values())
    rows = "".join(
        f"| [`{item.name}`](#{item.name}) | {item.title} | {item.noise_description} |\n"
        for item in entries
    )
    uses = Counter(field for item in entries for field in _fields(item))
    shared = {field for field, times in uses.items() if times > 1}
    told = [_told(field) for field in sorted(shared)]
    usual = {field for field, times in uses.items() if times == max(uses.values())}
    fields = f"\n## Fields of several\n\n{table(('field', 'takes', 'meaning'), told)}"
    names = ", ".join(f"`{field[0]}`" for field in sorted(usual))
    fields += f"\nEvery optimiser takes {names}; what else it takes is below.\n"
    obliged = dict.fromkeys(
        (f"`{item.code}`", item.text) for entry in entries for item in entry.obligations
    )
    fields += f"\n## Obligations\n\n{table(('code', 'the trainer must see to it that'), obliged)}"
    sections = [_section(item, shared, usual, _same_release(item, entries)) for item in entries]
    return HEAD + rows + fields + "".join(sections)


Field = tuple[str, str, str, bool]
"""A hyperparameter's name, what it takes, its meaning, and whether it changes the guarantee."""


def _fields(mechanism: Mechanism) -> list[Field]:
    names = ("field", "takes", "meaning", "changes_the_guarantee")
    return [tuple(item[name] for name in names) for item in mechanism.hyperparameters()]


def _told(field: Field) -> tuple[str, str, str]:
    name, takes, meaning, changes = field
    return f"`{name}`", takes, f"{meaning}; it changes the guarantee" if changes else meaning


def _same_release(mechanism: Mechanism, entries: list[Mechanism]) -> str:
    """The name of an earlier mechanism that releases the same, or nothing."""
    release = list(_release(mechanism))
    first = next(item for item in entries if list(_release(item)) == release)
    return "" if first is mechanism else first.name


def _release(mechanism: Mechanism) -> Iterator[str]:
    yield f"* **Releases** {mechanism.releases}."
    yield f"* **Sensitivity** {mechanism.sensitivity}."
    yield f"* **Proof** {mechanism.proof}."
    yield f"* **Clipping** {mechanism.clipping}."
    if mechanism.state_on_raw_data:
        yield f"* **State on raw data** {'; '.join(mechanism.state_on_raw_data)}."


def _section(mechanism: Mechanism, shared: set[Field], usual: set[Field], same: str) -> str:
    lines = _lines(mechanism, shared, usual, same)
    return "\n".join(["", f"## {mechanism.name}", "", *lines, ""])


def _lines(mechanism: Mechanism, shared: set[Field], usual: set[Field], same: str) -> Iterator[str]:
    if same:
        yield f"* **Releases**, sensitivity, proof, clipping: as [`{same}`](#{same})."
    else:
        yield from _release(mechanism)
    yield f"* **Post-processing** {'; '.join(mechanism.post_processing)}."
    if codes := [f"`{item.code}`" for item in mechanism.obligations]:
        yield f"* **Obliges the trainer**: {', '.join(codes)}."
    yield f"* **Sources** {'; '.join(mechanism.sources)}."
    fields = _fields(mechanism)
    if names := [f"`{field[0]}`" for field in fields if field in shared - usual]:
        yield f"* **Fields** {', '.join(names)}."
    if own := [_told(field) for field in fields if field not in shared]:
        yield ""
        yield table(("field", "takes", "meaning"), own).rstrip()
