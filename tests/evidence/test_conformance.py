"""Every changed, dropped, repeated or moved line of a run record is detected.

The records are written here, line by line, as the format says; no trainer is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from affidavit.assessment import Execution, certified_plan, certify
from affidavit.certificate.issuance import issue
from affidavit.evidence import START, Conformance, check_conformance, encode_line
from affidavit.gate import app
from affidavit.plan import Plan, digest_of, plan_from
from affidavit.trust import SigningKey, TrustRoot
from tests.support.trust import trusting

Entry = dict[str, Any]
STEPS = 6


def plan_with(**changes: Any) -> Plan:
    """Two phases, one of them with a clip schedule."""
    releases = [
        {"name": "hidden", "count": 2, "clip_norm": 0.5, "noise_multiplier": 9.0},
        {"name": "auxiliary", "clip_norm": 0.25, "noise_multiplier": 7.0},
    ]
    return plan_from(
        {
            "version": 1,
            "dataset": {"size": 60},
            "adjacency": "zero_out",
            "phases": [
                {
                    "sampling": {"scheme": "cyclic", "lot_size": 20},
                    "steps": 2,
                    "releases": releases,
                },
                {
                    "sampling": {"scheme": "cyclic", "lot_size": 12},
                    "steps": 4,
                    "releases": releases,
                    "clip_schedule": [1.0, 1.0, 0.5, 0.5],
                },
            ],
            "target": {"delta": 1e-3},
            **changes,
        }
    )


def predicate_of(plan: Plan, key: SigningKey, at: datetime) -> tuple[dict[str, Any], bytes]:
    result = issue(certify(plan, second_opinion=False), key, requester="tests", issued_at=at)
    return result.statement["predicate"], result.bundle


@pytest.fixture(scope="module")
def signed(key: SigningKey) -> tuple[dict[str, Any], bytes]:
    """A certificate's predicate, and its bundle."""
    return predicate_of(plan_with(), key, datetime.now(UTC).replace(microsecond=0))


def digest(text: str) -> str:
    """A digest that no other text has."""
    return digest_of(text)


def checkpoint(step: int, parameters: str) -> Entry:
    """The line of a checkpoint with those parameters."""
    named = {"checkpoint": digest(f"c{step}"), "parameters": digest(parameters)}
    return {"type": "checkpoint", "step": step, **named}


def entries_of(predicate: dict[str, Any], *, lost: bool = True) -> list[Entry]:
    """A run of that certificate; with ``lost`` it died in step 3 and lost steps 2 and 3."""
    execution = Execution.of(certified_plan(predicate))
    began = predicate["validity"]["not_before"]
    tensors = [
        {"name": name, "shape": [2], "release": release, "block": block}
        for name, release, block in (
            ("a", "hidden", "hidden[0]"),
            ("b", "hidden", "hidden[1]"),
            ("c", "auxiliary", "auxiliary[0]"),
        )
    ]
    result: list[Entry] = [
        {
            "type": "header",
            "version": 1,
            "run": "run",
            "certificate_id": predicate["certificate_id"],
            "plan_digest": digest_of(predicate["plan"]),
            "started_at": began,
            "code": {"version": "0", "digest": digest("code")},
            "generator": {"sampling": "chacha20", "noise": "chacha20"},
            "adjacency": "zero_out",
            "unit": "example",
            "steps": STEPS,
            "data": {"size": 60, "commitment": digest("data")},
            "phases": execution.phases(),
            "optimizer": {"name": "dp_sgd"},
            "tensors": tensors,
            "parameters": digest("p0"),
            "performance": {"ranks": 1},
        },
        checkpoint(0, "p0"),
    ]
    for step in range(STEPS):
        required = execution.at(step)
        result.append(
            {
                "type": "charge",
                "step": step,
                "phase": required.phase,
                "plan_digest": digest_of(predicate["plan"]),
                "clip_norm": required.clip_norm,
                "noise_std": required.noise_std,
                "divisor": required.divisor,
                "learning_rate": 0.1,
                "key_commitment": digest(f"k{step}"),
            }
        )
        if lost and step == 3:
            result += [
                {
                    "type": "resumed",
                    "step": 4,
                    "from_step": 2,
                    "lost": 2,
                    "parameters": digest("p2"),
                    "performance": {"ranks": 1},
                    "at": began,
                },
                checkpoint(4, "p2"),
            ]
            continue
        result.append(
            {
                "type": "release",
                "step": step,
                "lot_size_commitment": digest(f"l{step}"),
                "parameters": digest(f"p{step + 1}"),
            }
        )
        if step == 1:
            result.append(checkpoint(2, "p2"))
    result.append(
        {
            "type": "final",
            "ended": "completed",
            "charged": STEPS,
            "released": STEPS - lost,
            "parameters": digest(f"p{STEPS}"),
            "at": began,
        }
    )
    return result


def chained(entries: list[Entry]) -> bytes:
    """The record of ``entries``, properly chained whatever they say."""
    lines, previous = [], START
    for entry in entries:
        line, previous = encode_line(entry, previous)
        lines.append(line)
    return b"".join(lines)


def codes(found: Conformance) -> set[str]:
    return {finding.code for finding in found.findings}


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_as_certified_conforms(signed: tuple[dict[str, Any], bytes], lost: bool) -> None:
    predicate, _ = signed
    result = check_conformance(chained(entries_of(predicate, lost=lost)), predicate)
    assert result.findings == ()
    assert result.conformant
    assert (result.steps_charged, result.steps_to_charge) == (STEPS, STEPS)
    assert result.steps_released == STEPS - lost


def test_the_document_says_what_was_compared_with_what(
    signed: tuple[dict[str, Any], bytes],
) -> None:
    predicate, _ = signed
    record = chained(entries_of(predicate)[:-1])
    data = check_conformance(record, predicate).as_dict()
    (finding,) = data.pop("findings")
    assert data == {
        "conformant": False,
        "certificate_id": predicate["certificate_id"],
        "plan_digest": digest_of(predicate["plan"]),
        "run": "run",
        "head": json.loads(record.splitlines()[-1])["digest"],
        "steps": {
            "certified": STEPS,
            "charged": STEPS,
            "released": STEPS - 1,
            "to_charge": STEPS,
        },
    }
    assert (finding["code"], finding["line"], finding["noted"]) == ("unfinished", 0, False)


# ---- an unrepaired chain -----------------------------------------------------------


@pytest.mark.parametrize("every", [37, pytest.param(7, marks=pytest.mark.soak)])
def test_every_byte_that_is_changed_is_found(
    signed: tuple[dict[str, Any], bytes], every: int
) -> None:
    predicate, _ = signed
    record = chained(entries_of(predicate))
    for place in range(0, len(record), every):
        changed = bytearray(record)
        changed[place] ^= 1
        result = check_conformance(bytes(changed), predicate)
        assert not result.conformant, place
        assert result.steps_to_charge == STEPS


def test_every_line_dropped_repeated_or_moved_is_found(
    signed: tuple[dict[str, Any], bytes],
) -> None:
    predicate, _ = signed
    lines = chained(entries_of(predicate)).splitlines(keepends=True)
    for place in range(len(lines)):
        for changed in (
            lines[:place] + lines[place + 1 :],
            lines[: place + 1] + lines[place:],
            [*lines[:place], *lines[place + 1 : place + 2], lines[place], *lines[place + 2 :]],
            lines[:place],
        ):
            if changed != lines:
                result = check_conformance(b"".join(changed), predicate)
                assert not result.conformant, place
                assert result.steps_to_charge == STEPS


def test_what_is_no_record_at_all_is_found(signed: tuple[dict[str, Any], bytes]) -> None:
    predicate, _ = signed
    deep = b"[" * 100_000 + b"]" * 100_000 + b"\n"
    big = b'{"type":"charge","step":1e999}\n'
    for record in (b"", b"\n", b"{}\n", b"\xff\n", b"null\n", b'{"type":1}\n', big, deep):
        result = check_conformance(record, predicate)
        assert not result.conformant
        assert result.steps_to_charge == STEPS


# ---- a chain that was made anew over something else --------------------------------


def changed(entries: list[Entry], kind: str, place: int, change: dict[str, Any]) -> list[Entry]:
    """``entries`` with fields changed in the ``place``-th of a kind; dotted fields go deeper."""
    result = json.loads(json.dumps(entries))
    entry = [item for item in result if item["type"] == kind][place]
    for path, value in change.items():
        *parents, last = path.split(".")
        target = entry
        for parent in parents:
            target = target[int(parent) if parent.isdigit() else parent]
        target[int(last) if last.isdigit() else last] = value
    return result


@pytest.mark.parametrize(
    ("kind", "place", "change", "code"),
    [
        ("header", 0, {"certificate_id": "sha256:2"}, "other_certificate"),
        ("header", 0, {"plan_digest": "sha256:2"}, "other_plan"),
        ("header", 0, {"adjacency": "add_remove"}, "other_plan"),
        ("header", 0, {"unit": "user"}, "other_plan"),
        ("header", 0, {"optimizer.name": "dp_adam"}, "other_plan"),
        ("header", 0, {"steps": STEPS + 1}, "too_many_steps"),
        ("header", 0, {"data.size": 61}, "other_sampler"),
        ("header", 0, {"generator.noise": "mersenne_twister"}, "statistical_generator"),
        ("header", 0, {"generator.sampling": "philox"}, "statistical_generator"),
        ("header", 0, {"generator": {}}, "statistical_generator"),
        ("header", 0, {"generator": {"noise": "chacha20"}}, "statistical_generator"),
        ("header", 0, {"generator.more": "chacha20"}, "statistical_generator"),
        ("header", 0, {"version": 2}, "unknown_fields"),
        ("header", 0, {"version": True}, "unknown_fields"),
        ("header", 0, {"run": ""}, "unknown_fields"),
        ("header", 0, {"code": {}}, "unknown_fields"),
        ("header", 0, {"code.digest": "sha256:0"}, "unknown_fields"),
        ("header", 0, {"code.loop": 1, "data.commitment": None}, "unknown_fields"),
        ("header", 0, {"data.commitment": "sha256:" + 64 * "A"}, "unknown_fields"),
        ("header", 0, {"parameters": None}, "unknown_fields"),
        ("header", 0, {"started_at": "2026-1-1T0:0:0Z"}, "unknown_fields"),
        ("header", 0, {"started_at": "2001-01-01T00:00:00Z"}, "outside_validity"),
        ("header", 0, {"started_at": "2901-01-01T00:00:00Z"}, "outside_validity"),
        ("header", 0, {"phases.0.steps": 3}, "too_many_steps"),
        ("header", 0, {"phases.0.sampling.scheme": "shuffled"}, "other_sampler"),
        ("header", 0, {"phases.0.sampling.lot_size": 21}, "other_sampler"),
        ("header", 0, {"phases.0.sampling.probability": "1/2"}, "other_sampler"),
        ("header", 0, {"phases.1.divisor": "13"}, "other_sampler"),
        ("header", 0, {"phases.1.clipping": "flat"}, "other_blocks"),
        ("header", 0, {"phases.1.scheduled": False}, "clip_norm_above"),
        ("header", 0, {"phases.0.scheduled": 0}, "clip_norm_above"),
        ("header", 0, {"phases.0.releases.1.count": True}, "other_blocks"),
        ("header", 0, {"phases.1.noise.kind": "tree"}, "other_noise"),
        ("header", 0, {"phases.1.releases.0.count": 3}, "other_blocks"),
        ("header", 0, {"phases": []}, "other_plan"),
        ("header", 0, {"tensors.2.release": "hidden"}, "other_blocks"),
        ("header", 0, {"tensors.1.name": "a"}, "other_blocks"),
        ("header", 0, {"tensors.1.block": "hidden[0]"}, "other_blocks"),
        ("header", 0, {"tensors": []}, "other_blocks"),
        ("charge", 1, {"plan_digest": "sha256:2"}, "other_plan"),
        ("charge", 2, {"phase": 0}, "other_plan"),
        ("charge", 2, {"divisor": "11"}, "other_sampler"),
        ("charge", 0, {"clip_norm.hidden": 0.5000001}, "clip_norm_above"),
        ("charge", 0, {"clip_norm.hidden": -1}, "clip_norm_above"),
        ("charge", 4, {"clip_norm.hidden": 0.5}, "clip_norm_above"),
        ("charge", 0, {"noise_std.auxiliary": 1.7499}, "noise_below"),
        ("charge", 0, {"noise_std.auxiliary": "9"}, "unknown_fields"),
        ("charge", 0, {"noise_std.hidden": True}, "unknown_fields"),
        ("charge", 0, {"noise_std": {"hidden": 4.5}}, "other_blocks"),
        ("charge", 5, {"key_commitment": digest("k0")}, "key_reused"),
        ("charge", 0, {"key_commitment": ["k0"]}, "unknown_fields"),
        ("charge", 0, {"key_commitment": "undisclosed:0"}, "unknown_fields"),
        ("charge", 0, {"learning_rate": None}, "unknown_fields"),
        ("charge", 0, {"phase": False}, "unknown_fields"),
        ("charge", 1, {"step": True}, "unknown_fields"),
        ("charge", 3, {"step": 2}, "out_of_order"),
        ("release", 0, {"lot_size_commitment": 12}, "unknown_fields"),
        ("release", 0, {"parameters": False}, "unknown_fields"),
        ("release", -1, {"parameters": None}, "wrong_weights"),
        ("release", 1, {"step": 0}, "out_of_order"),
        ("checkpoint", 1, {"step": 1}, "out_of_order"),
        ("checkpoint", 1, {"parameters": digest("p9")}, "wrong_weights"),
        ("checkpoint", 0, {"checkpoint": None}, "unknown_fields"),
        ("checkpoint", 0, {"parameters": None}, "unknown_fields"),
        ("resumed", 0, {"parameters": None}, "unknown_fields"),
        ("resumed", 0, {"at": 0}, "unknown_fields"),
        ("resumed", 0, {"lost": 1}, "out_of_order"),
        ("resumed", 0, {"step": 3, "lost": 1}, "out_of_order"),
        ("resumed", 0, {"from_step": 1, "lost": 3}, "wrong_weights"),
        ("resumed", 0, {"parameters": digest("p3")}, "wrong_weights"),
        ("final", 0, {"charged": STEPS - 1}, "wrong_counts"),
        ("final", 0, {"released": STEPS}, "wrong_counts"),
        ("final", 0, {"parameters": digest("p9")}, "wrong_weights"),
        ("final", 0, {"parameters": None}, "unknown_fields"),
        ("final", 0, {"ended": "diverged"}, "out_of_order"),
        ("final", 0, {"ended": "somehow"}, "unknown_fields"),
        ("final", 0, {"ended": "stopped", "parameters": digest("p9")}, "wrong_weights"),
    ],
)
def test_what_was_not_certified_is_found_in_a_chain_made_anew(
    signed: tuple[dict[str, Any], bytes],
    kind: str,
    place: int,
    change: dict[str, Any],
    code: str,
) -> None:
    predicate, _ = signed
    result = check_conformance(
        chained(changed(entries_of(predicate), kind, place, change)), predicate
    )
    assert code in codes(result)
    assert not result.conformant
    assert result.steps_to_charge == STEPS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"certificate_id": "sha256:2"}, "the certificate is 'sha256:2'"),
        ({"plan_digest": "sha256:2"}, "the plan is 'sha256:2'"),
        ({"adjacency": "add_remove"}, "adjacency is 'add_remove', and 'zero_out' was certified."),
        ({"unit": "user"}, "unit is 'user', and 'example' was certified."),
        ({"steps": 7}, "steps is 7, and 6 was certified."),
        ({"data.size": 61}, "the size of the data is 61, and 60 was certified."),
        ({"optimizer.name": "dp_adam"}, "the optimiser is {'name': 'dp_adam'}"),
    ],
)
def test_what_is_wrong_in_a_header_is_named(
    signed: tuple[dict[str, Any], bytes], change: dict[str, Any], said: str
) -> None:
    predicate, _ = signed
    result = check_conformance(
        chained(changed(entries_of(predicate), "header", 0, change)), predicate
    )
    (finding,) = result.findings if "plan_digest" not in change else result.findings[:1]
    assert finding.message.startswith(said)


def test_what_belongs_in_a_field_is_named(signed: tuple[dict[str, Any], bytes]) -> None:
    predicate, _ = signed
    wrong = {"key_commitment": [], "step": "0", "clip_norm": 1}
    result = check_conformance(
        chained(changed(entries_of(predicate), "charge", 0, wrong)), predicate
    )
    assert (
        "the entry cannot be read: step is not an integer, clip_norm is not a number for each "
        "release, key_commitment is not a digest."
    ) in {finding.message for finding in result.findings}
    assert result.steps_charged == STEPS


def test_a_guarded_loop_leaves_out_what_the_guard_does_not_know(
    signed: tuple[dict[str, Any], bytes],
) -> None:
    predicate, _ = signed
    entries = entries_of(predicate, lost=False)
    for kind, path, value in (
        ("header", "data.commitment", None),
        ("checkpoint", "checkpoint", None),
        ("charge", "learning_rate", None),
        ("charge", "key_commitment", "undisclosed:0"),
        ("release", "lot_size_commitment", None),
    ):
        entries = changed(entries, kind, 0, {path: value})
    assert codes(check_conformance(chained(entries), predicate)) == {"unknown_fields"}
    guarded = changed(entries, "header", 0, {"code.loop": "own"})
    assert check_conformance(chained(guarded), predicate).findings == ()
    other = changed(guarded, "charge", 0, {"key_commitment": "undisclosed:1"})
    assert codes(check_conformance(chained(other), predicate)) == {"unknown_fields"}


def test_the_weights_are_those_of_the_last_line_that_names_some(
    signed: tuple[dict[str, Any], bytes],
) -> None:
    predicate, _ = signed
    entries = changed(entries_of(predicate, lost=False), "release", 1, {"parameters": None})
    ended = {**entries[-1], "ended": "stopped", "charged": 2, "released": 2}
    for parameters, result in (("p2", {"stopped"}), ("p9", {"stopped", "wrong_weights"})):
        final = {**ended, "parameters": digest(parameters)}
        for lines in (entries[:7], [*entries[:7], checkpoint(2, "p2")]):
            assert codes(check_conformance(chained([*lines, final]), predicate)) == result


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of everything in ``value`` that holds nothing else, and of what holds it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in inside:
        yield f"{path}{name}"
        if isinstance(item, dict | list) and item:
            yield from leaves(item, f"{path}{name}.")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_whatever_stands_in_a_field_is_judged_and_never_fails(
    signed: tuple[dict[str, Any], bytes], every: int
) -> None:
    """One value of five, a next one in each field; there are six of them."""
    predicate, _ = signed
    entries = entries_of(predicate)
    unchanged = chained(entries)
    free = {"performance", "shape"}
    turn = count()
    for kind in ("header", "checkpoint", "charge", "release", "resumed", "final"):
        entry = next(item for item in entries if item["type"] == kind)
        for path in leaves(entry):
            if path == "type" or free & set(path.split(".")):
                continue
            for value in (None, [], {"a": 1}, "x", True, [True]):
                if next(turn) % every:
                    continue
                record = chained(changed(entries, kind, 0, {path: value}))
                result = check_conformance(record, predicate)
                harmless = (
                    record == unchanged
                    or path.startswith("tensors")
                    or (path in {"run", "code.version"} and value == "x")
                    or (kind, path, value) == ("release", "parameters", None)
                )
                assert harmless or not result.conformant, (kind, path, value)


def test_every_entry_left_out_of_a_chain_made_anew_is_found(
    signed: tuple[dict[str, Any], bytes],
) -> None:
    predicate, _ = signed
    entries = entries_of(predicate)
    for place, entry in enumerate(entries):
        rest = entries[:place] + entries[place + 1 :]
        result = check_conformance(chained(rest), predicate)
        stored = entry["type"] == "checkpoint" and entry["step"] == 4
        assert result.conformant == stored, place  # that checkpoint was never gone on from


def test_more_steps_than_certified_are_all_charged(signed: tuple[dict[str, Any], bytes]) -> None:
    predicate, _ = signed
    *entries, final = entries_of(predicate)
    more = {**next(e for e in entries if e["type"] == "charge"), "step": STEPS,
            "key_commitment": digest("more")}  # fmt: skip
    result = check_conformance(
        chained([*entries, more, {**final, "charged": STEPS + 1}]), predicate
    )
    assert "too_many_steps" in codes(result)
    assert result.steps_to_charge == STEPS + 1


def test_a_run_that_diverged_is_charged_what_it_charged(
    signed: tuple[dict[str, Any], bytes],
) -> None:
    predicate, _ = signed
    entries = entries_of(predicate, lost=False)[:6]  # two steps, the second without release
    entries = [e for e in entries if (e["type"], e.get("step")) != ("release", 1)]
    final = {**entries_of(predicate)[-1], "ended": "diverged", "charged": 2, "released": 1}
    result = check_conformance(chained([*entries, final]), predicate)
    assert codes(result) == {"diverged"}
    assert result.conformant
    assert result.steps_to_charge == 2


def test_a_run_that_was_stopped_is_charged_the_steps_that_it_took(
    signed: tuple[dict[str, Any], bytes],
) -> None:
    predicate, _ = signed
    entries = entries_of(predicate, lost=False)[:6]  # two steps, the second without release
    stepped = [e for e in entries if (e["type"], e.get("step")) != ("release", 1)]
    released = [e for e in entries if e["type"] == "release"]
    final = {**entries_of(predicate)[-1], "ended": "stopped", "charged": 2, "released": 2}
    final["parameters"] = released[-1]["parameters"]
    result = check_conformance(chained([*entries, final]), predicate)
    assert codes(result) == {"stopped"}
    assert result.conformant
    assert result.steps_to_charge == 2
    # It stops between two steps; one that is open has no release.
    result = check_conformance(chained([*stepped, {**final, "released": 1}]), predicate)
    assert "wrong_weights" in codes(result)


def test_an_unfinished_record_is_charged_every_certified_step(
    signed: tuple[dict[str, Any], bytes],
) -> None:
    predicate, _ = signed
    result = check_conformance(chained(entries_of(predicate)[:5]), predicate)
    assert codes(result) == {"unfinished"}
    assert (result.steps_charged, result.steps_to_charge) == (2, STEPS)


def test_a_certificate_that_certifies_nothing_is_found(key: SigningKey) -> None:
    plan = plan_with(target={"epsilon": 0.01, "delta": 1e-3})
    predicate, _ = predicate_of(plan, key, datetime.now(UTC).replace(microsecond=0))
    result = check_conformance(chained(entries_of(predicate)), predicate)
    assert codes(result) == {"not_certified"}


# ---- the command -------------------------------------------------------------------


@pytest.fixture
def command(
    tmp_path: Path, signed: tuple[dict[str, Any], bytes], key: SigningKey
) -> Callable[..., Any]:
    """``affidavit conformance`` on a record; its result."""

    def make(record: bytes, *options: str, trusted: SigningKey = key) -> Any:
        (tmp_path / "record.jsonl").write_bytes(record)
        (tmp_path / "bundle.json").write_bytes(signed[1])
        (tmp_path / "keys.json").write_text(json.dumps(trusted.public.as_record()))
        names = {"--record": "record.jsonl", "--certificate": "bundle.json", "--keys": "keys.json"}
        provided = [text for name, file in names.items() for text in (name, str(tmp_path / file))]
        return CliRunner().invoke(app, ["conformance", *provided, *options])

    return make


def test_the_command_says_what_it_found(
    command: Callable[..., Any], signed: tuple[dict[str, Any], bytes]
) -> None:
    predicate, _ = signed
    record = chained(entries_of(predicate))
    good = command(record, "--json")
    assert good.exit_code == 0
    document = json.loads(good.stdout)
    assert document["conformant"]
    assert document["steps"] == {
        "certified": STEPS,
        "charged": STEPS,
        "released": STEPS - 1,
        "to_charge": STEPS,
    }
    bad = command(record[:-1])
    assert bad.exit_code == 1
    assert "not conformant" in bad.stdout
    assert command(record, trusted=SigningKey.generate("other")).exit_code == 1
    deep = command(b"[" * 100_000)
    assert deep.exit_code == 2
    assert "nested too deeply" in deep.stderr
    missing = CliRunner().invoke(app, ["conformance", "--record", "/none", "--certificate", "x"])
    assert missing.exit_code == 2


def test_a_run_is_judged_by_the_certificate_of_its_own_time(
    command: Callable[..., Any], signed: tuple[dict[str, Any], bytes]
) -> None:
    predicate, _ = signed
    late = datetime.now(UTC) + timedelta(days=3000)
    text = late.strftime("%Y-%m-%dT%H:%M:%SZ")
    entries = changed(entries_of(predicate), "header", 0, {"started_at": text})
    assert command(chained(entries)).exit_code == 1


def test_a_record_says_nothing_of_when_a_revoked_key_signed(
    command: Callable[..., Any],
    signed: tuple[dict[str, Any], bytes],
    key: SigningKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has the key writes the record, too."""
    revoked = replace(key.public, revoked_from=datetime.now(UTC))
    entries = entries_of(signed[0])
    monkeypatch.setattr(TrustRoot, "load", lambda _: trusting(revoked))
    began = {"started_at": signed[0]["validity"]["not_before"]}
    result = command(chained(changed(entries, "header", 0, began)))
    assert result.exit_code == 1
    assert "key_revoked" in result.stderr
