"""What the checks of a certificate cover: arithmetic, implementation, theorems, or nothing.

Two engines that agree show less than it seems, because they rely on the same theorems: the checker
repeats the arithmetic, other code repeats the implementation, and neither would notice that a
theorem is false. ``checks_of`` says which of these a certificate has, from its signed predicate;
docs/explanation/checks.md says how theorems are attacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Coverage = Literal["arithmetic", "implementation", "theorems", "declarations"]
CHECKER = "checker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What a certificate has for one kind of error, as a sentence; ``is_done`` if it has a check.

    No check covers ``declarations``.
    """

    covers: Coverage
    is_done: bool
    sentence: str


def checks_of(predicate: Mapping[str, Any]) -> tuple[Check, ...]:
    """Return what the checks of a certificate cover, of each kind; ``predicate`` is the signed one.

    >>> one = {"name": "fourier", "version": "0.2.0", "epsilon": {"lower": "1", "upper": "2"}}
    >>> checks = checks_of({"accountants": [one], "obligations": []})
    >>> [(check.covers, check.is_done) for check in checks]
    [('arithmetic', False), ('implementation', False), ('theorems', False), ('declarations', False)]
    """
    return (*_engine_checks(predicate), _declared(predicate))


def brackets_meet(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Whether two signed brackets overlap; engines that agree may miss by their accuracy."""
    lower, upper = (
        [float(bracket[end]) for bracket in (first, second)] for end in ("lower", "upper")
    )
    return max(lower) <= min(upper)


def _engine_checks(predicate: Mapping[str, Any]) -> Iterator[Check]:
    accountants = predicate["accountants"]
    if not accountants:
        return
    first, *others = accountants
    by_checker = any(other["name"] == CHECKER for other in others)
    proof = predicate.get("proof") is not None
    if by_checker:
        arithmetic = "The checker computed an upper end of ε again in ball arithmetic."
    elif not proof:
        arithmetic = f"Only {first['name']} itself bounds its rounding."
    else:
        arithmetic = ""
    if proof:
        arithmetic = f"{arithmetic} The signed proof can be checked in ball arithmetic.".lstrip()
    yield Check(covers="arithmetic", is_done=by_checker or proof, sentence=arithmetic)
    code = " ".join(_code(first, other) for other in others)
    yield Check(
        covers="implementation",
        is_done=bool(others),
        sentence=code or f"No code other than that of {first['name']} computed ε.",
    )
    relies = "All accountants rely" if others else f"{first['name']} relies"
    yield Check(
        covers="theorems",
        is_done=False,
        sentence=f"{relies} on theorems, which no check of this certificate questions. Programs "
        "attack many of them in the tests of Affidavit.",
    )


def _code(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return how the code of a second engine differs from the first's, as a sentence."""
    if other["name"] == CHECKER:
        return f"The checker shares no code with {first['name']}, and uses the same theorems."
    # The versions of engines from other packages begin with the package's name.
    package = other["version"].rpartition(" ")[0]
    code = f"the code of {package}" if package else "another method of Affidavit"
    meets = brackets_meet(first["epsilon"], other["epsilon"])
    result = "their brackets meet" if meets else "their brackets meet within its accuracy"
    return f"{other['name']} computed ε by {code}, for the same law of the run; {result}."


def _declared(predicate: Mapping[str, Any]) -> Check:
    obligations = predicate["obligations"]
    declared = sum(item["checked_by"] == "declared" for item in obligations)
    duties = "1 obligation is" if declared == 1 else f"{declared} obligations are"
    also = f", and {duties} declared" if declared else ""
    return Check(
        covers="declarations",
        is_done=False,
        sentence=f"What the plan says about its data and its loop is taken as stated{also}.",
    )
