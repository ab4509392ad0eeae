"""``docs/reference/mechanisms.md``, written from the catalogue of mechanisms.

The document is generated, so that what it says is what certifies; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from affidavit.mechanisms import Mechanism, all_mechanisms

HEAD = """\
# Mechanisms

Generated from the registry by `make docs`; change `mechanisms/`, not this file.

What each optimiser releases, how sensitive that is, and why the rest of it costs nothing. A plan
names one in `optimizer.name`; a field that it does not have, or noise that it is not defined with,
is refused. Every certificate lists what its trainer is obliged to. The same is shown by
`affidavit mechanisms [NAME]` and by `GET /v1/mechanisms`.

`dp_dice` is the only one whose state sees raw data; its bounds are proved in
[theorems/dp-dice.md](../theorems/dp-dice.md).

| name | | state on raw data | noise |
|---|---|---|---|
"""


def document() -> str:
    """The whole document."""
    rows = "".join(
        f"| [`{item.name}`](#{item.name}) | {item.title} | "
        f"{'yes, accounted' if item.state_on_raw_data else 'none'} | {item.noise_description} |\n"
        for item in all_mechanisms().values()
    )
    return HEAD + rows + "".join(_section(entry) for entry in all_mechanisms().values())


def _section(mechanism: Mechanism) -> str:
    return "\n".join(["", f"## {mechanism.name}", "", *_lines(mechanism), ""])


def _lines(mechanism: Mechanism) -> Iterator[str]:
    yield f"{mechanism.title}."
    yield ""
    yield f"* **Releases** {mechanism.releases}."
    yield f"* **Sensitivity** {mechanism.sensitivity}."
    yield f"* **Proof** {mechanism.proof}."
    yield f"* **Post-processing** {'; '.join(mechanism.post_processing)}."
    yield f"* **State on raw data** {'; '.join(mechanism.state_on_raw_data) or 'none'}."
    yield f"* **Clipping** {mechanism.clipping}."
    yield f"* **Noise** {mechanism.noise_description}."
    for obligation in mechanism.obligations:
        yield f"* **Obliges the trainer** (`{obligation.code}`): {obligation.text}."
    yield f"* **Sources** {'; '.join(mechanism.sources)}."
    yield ""
    yield "| field | takes | meaning | |"
    yield "|---|---|---|---|"
    for hyperparameter in mechanism.hyperparameters():
        cost = "changes the guarantee" if hyperparameter["changes_the_guarantee"] else "free"
        takes = hyperparameter["takes"].replace("|", "\\|")
        yield f"| `{hyperparameter['field']}` | {takes} | {hyperparameter['meaning']} | {cost} |"
    yield ""
    yield "```json"
    yield json.dumps(mechanism.minimal_plan(), ensure_ascii=False)
    yield "```"
