"""``claims.md``: published private runs, each computed from its plan in ``claims/``.

A row is one file: a plan that carries the published ε as its ``claim``, under comments that name
the source, its link, the reading under which it is accounted, and what the source leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from affidavit.accountants import decimal_down, decimal_up
from affidavit.assessment import Assessment, certify
from affidavit.plan import load_yaml, plan_from
from docs.generate.tables import table

CLAIMS = Path(__file__).resolve().parents[2] / "claims"
KEYS = ("Source", "Link", "Reading", "Left out")
COLUMNS = ("plan", "claimed ε", "proved ε", "answer", "δ", "source", "reading")
USUAL = "Poisson lots, add or remove one record"
"""The reading that is not repeated in each row."""
ANSWERS = {"claim_below_certified": "refuted", "claim_not_decided": "not decided"}
"""The answer to a claim by the code of its reason."""
HEAD = """# Published claims

Generated from the plans in `claims/` by `make docs`; change a plan, not this file.

Each row is a plan in `claims/`: a published private run, accounted from the numbers that its source
states. *Holds* means that the claimed ε, to its digits, is not below the proved upper end; early
accountants often claim more than needed. *Refuted* means that even the proved lower end is above
the claim, *not decided* that the claim lies between the two ends. A row is about one number of one
version of a source, under the reading that it names. One number can have several rows: as its
source accounts it, and as the code beside it draws its lots. [Cases](../cases/README.md) explain
some of them.

"""
TAIL = """
## Check a row

`affidavit check claims/PLAN` in the root of the repository ends with 0 where the claim holds, with
1 where it is refuted, and with 3 where it is not decided. All of them together:

```sh
affidavit check claims/ || echo "some claims do not hold: $?"
```

To add a row, write a plan with its `claim` and the four comments of the other files, and run
`make docs`. Take numbers only from a source that you have read.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published claim and what is proved about it."""

    file: Path
    facts: dict[str, str]
    claimed: str
    assessment: Assessment

    @classmethod
    def of(cls, file: Path) -> Row:
        """The row of a file; raises ``ValueError`` if a comment or the claim is missing."""
        raw = file.read_bytes()
        comments = [line[2:] for line in raw.decode().splitlines() if line.startswith("# ")]
        facts = dict(line.split(": ", 1) for line in comments)
        plan = plan_from(load_yaml(raw).data)
        if tuple(facts) != KEYS or plan.claim is None:
            raise ValueError(f"{file.name} needs the comments {', '.join(KEYS)}, and a claim")
        assessment = certify(plan, second_opinion=False)
        return cls(file=file, facts=facts, claimed=plan.claim.text, assessment=assessment)

    @property
    def answer(self) -> str:
        """The answer to the claim."""
        if self.assessment.verdict == "certified":
            return "holds"
        return next(ANSWERS[code] for code in self.assessment.codes if code in ANSWERS)

    def cells(self, sources: list[str], readings: list[str]) -> list[str]:
        """The row's cells; source and reading are given by their places in the lists."""
        epsilon, delta = self.assessment.epsilon, self.assessment.target_delta
        if epsilon is None:
            raise ValueError(f"{self.file.name} is refused")
        proved = f"{decimal_down(epsilon.lower, 4)} to {decimal_up(epsilon.upper, 4)}"
        source = str(sources.index(self.source) + 1)
        reading = chr(ord("a") + readings.index(self.reading)) if self.reading else ""
        name, at = f"`{self.file.name}`", decimal_up(delta, 6)
        return [name, self.claimed, proved, self.answer, at, source, reading]

    @property
    def reading(self) -> str:
        """How the source is read, where that is not as usual."""
        return self.facts["Reading"].removeprefix(USUAL).removeprefix(", ")

    @property
    def source(self) -> str:
        """Where the numbers are from, and what is not said there."""
        link = f"[{self.facts['Source']}]({self.facts['Link']})"
        return f"{link}. Left out: {self.facts['Left out']}."


def page() -> str:
    """The whole page."""
    rows = [Row.of(file) for file in sorted(CLAIMS.glob("*.yaml"))]
    held, refuted = (sum(row.answer == answer for row in rows) for answer in ("holds", "refuted"))
    count = (
        f"{len(rows)} readings of published claims: {held} hold, {refuted} are refuted, and "
        f"{len(rows) - held - refuted} are not decided.\n\n"
    )
    sources = list(dict.fromkeys(row.source for row in rows))
    rows.sort(key=lambda row: sources.index(row.source))
    readings = [reading for reading in dict.fromkeys(row.reading for row in rows) if reading]
    cells = [row.cells(sources, readings) for row in rows]
    read = "".join(f"- {chr(ord('a') + place)}: {text}\n" for place, text in enumerate(readings))
    listed = "".join(_listed(sources))
    read = f"## Readings\n\n{USUAL}, and what the row's letter says:\n\n{read}"
    return f"{HEAD}{count}{table(COLUMNS, cells)}\n{read}\n## Sources\n\n{listed}{TAIL}"


def _listed(sources: list[str]) -> Iterator[str]:
    """The sources by number; a link that stands above is not repeated."""
    places: dict[str, int] = {}
    for number, source in enumerate(sources, 1):
        link, left_out = source.rsplit(". Left out: ", 1)
        place = places.setdefault(link, number)
        yield f"{number}. {link if place == number else f'As {place}'}. Left out: {left_out}\n"
