"""``docs/reference/mistakes.md``, from the catalogue of known mistakes."""

from __future__ import annotations

from affidavit.assessment.diagnosis import CATALOGUE, Mistake

HEAD = """\
# Known mistakes

Generated from the catalogue by `make docs`; change `assessment/diagnosis/`, not this file.

`affidavit diagnose PLAN --claimed-epsilon E` and `POST /v1/diagnoses` compare a claim with the
certified bounds. A claim stands for all numbers that round to it, and the largest of them decides:

| answer | the largest number that rounds to the claim | exit code |
|---|---|---|
| `holds` | is at or above the upper end | 0 |
| `refuted` | is below the lower end | 1 |
| `not_decided` | lies between the two: the claim may be true or not | 3 |

Unless the claim holds, the mistakes below are tried, each alone and then in pairs, under the
accountants that people use, and those that reproduce the claim are named, the simplest first. With
only two or three digits, matches can be coincidental, and a claim can be wrong even if no known
mistake explains it.

A plan that carries its claim (`claim: 7.9852`) passes `check` and `certify` only if the claim
holds. If it is refuted, the plan is `under_noised` (exit code 1), and the mistakes are among the
reasons. If it is not decided, the plan is `unproved` (3).

Digits count. `7.98` stands for everything that rounds to it, `7.9800` for a hundredth of that;
give the claim as text to keep zeros at its end. A claimed noise multiplier is compared with the
target; a mistake explains it if it leads to the target, or up to 0.5 % below, where calibration
stops.

## Output fields

* `answer`: `holds`, `refuted` or `not_decided`.
* `certified`: the result document of the plan.
* `explanations[].mistakes`: codes of the list below; `none` alone when the claim holds.
* `explanations[].accountant`: the reading under which they give the claim: `gaussian` (exact),
  `rdp` (dp_accounting's orders), `rdp_opacus` (Opacus' orders), `rdp_classic` (of the moments
  accountant), `pld` and `prv` (the tight value), `gdp_clt`, `basic` or `advanced` composition.
* `explanations[].reproduces`: what it then says, an ε for a claimed noise multiplier too;
  `differs_by`: that minus the claim, or minus the target.
* `explanations[].agreement`: `exactly`, it rounds to the claim; `cut`, it is cut off or rounded up
  at the claim's last digit; `nearly`, it is within what rounding or the program's error leaves.
* `explanations[].steps`: for each mistake what was accounted, what is wrong, source and fix.
* `corrected`: the noise with which the claim holds, certified; null if there is none.

## The mistakes
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(item) for item in CATALOGUE.values())


def _section(mistake: Mistake) -> str:
    return (
        f"\n### {mistake.code}\n\n{mistake.wrong} {mistake.fix}\n\n"
        f"Field `{'.'.join(mistake.field)}`. Source: {mistake.source}.\n"
    )
