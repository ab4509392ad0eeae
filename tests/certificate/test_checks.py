"""A certificate says what each of its checks covers, and of a theorem never that it is checked."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from affidavit.accountants import ENGINE_NAMES
from affidavit.certificate.checks import checks_of
from affidavit.certificate.issuance import Certificate
from affidavit.trust import statement_in

BUNDLES = Path(__file__).parents[1] / "release" / "0.1.0" / "bundles.jsonl"


def engine(name: str, lower: float = 1.0, version: str = "0.2.0") -> dict[str, Any]:
    return {"name": name, "version": version, "epsilon": {"lower": str(lower), "upper": "2.0"}}


def done(*names: str, **fields: Any) -> set[str]:
    predicate = {"accountants": [engine(name) for name in names], "obligations": [], **fields}
    return {check.covers for check in checks_of(predicate) if check.is_done}


def test_each_check_covers_what_it_computes_again() -> None:
    assert done("fourier") == set()
    assert done("fourier", proof={}) == {"arithmetic"}
    assert done("fourier", "checker") == {"arithmetic", "implementation"}
    for name in ENGINE_NAMES:
        assert done("fourier", name) == {"implementation"}


def test_no_check_of_a_certificate_covers_its_theorems() -> None:
    for names, proof in product((["fourier"], ["fourier", "checker"]), (None, {})):
        assert "theorems" not in done(*names, proof=proof)


def test_the_package_of_another_engine_is_named() -> None:
    others = [
        engine("pld", version="dp-accounting 0.6.0"),
        engine("prv", 3.0, "prv-accountant 0.2"),
    ]
    checks = checks_of({"accountants": [engine("fourier"), *others], "obligations": []})
    (sentence,) = [check.sentence for check in checks if check.covers == "implementation"]
    assert "the code of dp-accounting," in sentence
    assert "their brackets meet within its accuracy" in sentence


def test_obligations_that_nothing_checks_are_counted() -> None:
    duties = [{"checked_by": by} for by in ("trainer", "declared", "declared")]
    *_, declared = checks_of({"accountants": [], "obligations": duties})
    assert (declared.covers, declared.is_done) == ("declarations", False)
    assert "2 obligations" in declared.sentence


def test_certificates_of_an_earlier_release_say_it_too() -> None:
    for line in BUNDLES.read_bytes().splitlines():
        predicate = statement_in(line.partition(b"\t")[2])["predicate"]
        covered = {check.covers: check.is_done for check in checks_of(predicate)}
        assert covered.get("implementation", False) == (len(predicate["accountants"]) > 1)


def test_a_new_certificate_says_it(certificate: Certificate) -> None:
    predicate = statement_in(certificate.bundle)["predicate"]
    assert {check.covers for check in checks_of(predicate)} >= {"theorems", "declarations"}
