"""What an earlier release certified still reads, verifies and means the same.

Three laws, for every plan of every release (docs/reference/versioning.md): its text has the digest
that was signed; its bundle verifies with the keys of its time, and fails on nothing but its age
later; and certifying it again gives the same verdict and a bracket that meets the old one and
is as wide, to the width that is promised, or exactly the old numbers while the accountant's
version is the same.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate import issue, verify
from affidavit.plan import digest
from affidavit.trust import SigningKey, VerificationError
from tests.release.corpus import RELEASES, bundles, keys, plan_named, statement_in
from tests.support.trust import trusting

KEPT = [(release, name) for release in RELEASES for name in bundles(release)]
ROUNDED = 1e-9
"""Twelve digits are signed; other processors differ in the last of sixteen."""
SEARCHED = 1e-4
"""The slack that a search for the required noise promises."""
PROMISED = 1e-4
"""The width of a bracket, of its upper end; of where laws leave a gap, a hundredth of that."""
SLACK = 1e-3
"""How far what is solved for may move."""
LIFTED = {"user_level_sampling"}
"""Refusals of plans that a theorem of a later release covers."""
KNOWN_ORDER = {"shuffled"}
"""Schemes whose lower ends were those of a known order, and false (see the changelog)."""
SAME = ("adjacency", "unit", "trajectory", "target")


@pytest.mark.parametrize(("release", "name"), KEPT)
def test_the_text_has_the_digest_that_was_signed(release: str, name: str) -> None:
    (subject,) = statement_in(bundles(release)[name])["subject"]
    assert digest(plan_named(release, name)) == f"sha256:{subject['digest']['sha256']}"


@pytest.mark.parametrize(("release", "name"), KEPT)
def test_the_bundle_verifies_and_later_fails_on_its_age_alone(release: str, name: str) -> None:
    bundle, plan = bundles(release)[name], plan_named(release, name)
    validity = statement_in(bundle)["predicate"]["validity"]
    issued = datetime.fromisoformat(validity["not_before"])
    at = issued + timedelta(days=1)
    assert verify(bundle, trusting(keys(release), at=at), plan=plan).statement == statement_in(
        bundle
    )
    with pytest.raises(VerificationError) as failed:
        verify(bundle, trusting(keys(release), at=datetime(2200, 1, 1, tzinfo=UTC)), plan=plan)
    assert failed.value.step == 9


@pytest.mark.by_turns
@pytest.mark.ordinary("not *repeat-and-select", "not *cifar10-truncated-poisson")
@pytest.mark.parametrize(("release", "name"), KEPT)
def test_certified_again_it_is_the_same_within_the_width_that_is_promised(
    release: str, name: str
) -> None:
    before = statement_in(bundles(release)[name])["predicate"]
    plan = plan_named(release, name)
    result = certify(plan, second_opinion=False)
    key = SigningKey.generate("now")
    now = issue(result, key, requester="corpus", issued_at=datetime.now(UTC)).statement["predicate"]
    if {item["code"] for item in before["reasons"]} & LIFTED and now["guarantee"] is not None:
        assert before["verdict"] == "refused"
        return
    if {phase.sampling.scheme for phase in plan.phases} & KNOWN_ORDER and before["guarantee"]:
        for field in ("epsilon", "delta"):
            before["guarantee"][field]["lower"] = now["guarantee"][field]["lower"]
    assert now["verdict"] == before["verdict"]
    assert [item["code"] for item in now["reasons"]] == [
        entry["code"] for entry in before["reasons"]
    ]
    assert {element["code"] for element in before["obligations"]} <= {
        member["code"] for member in now["obligations"]
    }
    same = _named(now) == _named(before)
    given = all(item["given"] is not None for item in before["noise_multiplier"]["releases"])
    solved = not given or now["sampling"] != before["sampling"]
    slack = SLACK if solved and not same else 0.0
    _guarantees(now["guarantee"], before["guarantee"], exactly=same, slack=slack)
    _agree(now["sampling"], before["sampling"], ROUNDED if same else SLACK)
    tolerance = SEARCHED if same else SLACK
    for new, old in zip(
        now["noise_multiplier"]["releases"], before["noise_multiplier"]["releases"], strict=True
    ):
        if not same and None not in (new["required"], old["required"]):
            # A bound that was narrowed since asks for less.
            assert float(new["required"]) <= float(old["required"]) * (1 + tolerance)
            old["required"] = new["required"]
    _agree(now["noise_multiplier"], before["noise_multiplier"], tolerance)
    _agree(now["strategies"], before["strategies"], ROUNDED)


def test_every_release_before_this_one_is_kept() -> None:
    assert "0.1.0" in RELEASES
    assert all(len(bundles(release)) >= 50 for release in RELEASES)


def _named(predicate: dict[str, Any]) -> list[tuple[str, str]]:
    """The accountant whose bracket was signed; none where there is no bracket."""
    return [(first["name"], first["version"]) for first in predicate["accountants"][:1]]


def _guarantees(new: Any, old: Any, *, exactly: bool, slack: float) -> None:
    """As wide and meeting, but for ``slack``: less noise may be enough by a narrower bracket."""
    assert (new is None) == (old is None)
    if new is None:
        return
    assert [new[field] for field in SAME] == [old[field] for field in SAME]
    for field in ("epsilon", "delta"):
        _meets(new[field], old[field], exactly=exactly, slack=slack)


def _meets(new: Any, old: Any, *, exactly: bool, slack: float) -> None:
    assert (new is None) == (old is None)
    if new is None:
        return
    (lower, old_lower), (upper, old_upper) = (
        (float(new[end]), float(old[end])) for end in ("lower", "upper")
    )
    moves = ROUNDED * max(1.0, abs(old_upper))
    if not exactly:
        moves = max(moves, PROMISED * old_upper, 0.01 * (old_upper - old_lower))
        assert max(lower, old_lower) <= min(upper, old_upper) + slack * old_upper
    # A bracket may have been narrowed since, a lower end that was not known by any engine.
    assert old_lower - moves <= lower
    assert upper <= old_upper + moves
    if exactly:
        assert old_lower == 0 or lower <= old_lower + moves
        assert old_upper - moves <= upper


def _agree(new: Any, old: Any, tolerance: float) -> None:
    """The same structure, names and words, and numbers within ``tolerance``."""
    if isinstance(old, dict):
        assert old.keys() <= new.keys()
        for key in old:
            _agree(new[key], old[key], tolerance)
    elif isinstance(old, list):
        assert len(new) == len(old)
        for one, other in zip(new, old, strict=True):
            _agree(one, other, tolerance)
    else:
        try:
            assert float(new) == pytest.approx(float(old), rel=tolerance, abs=tolerance)
        except (TypeError, ValueError):
            assert new == old
