"""The page that verifies files in a browser rejects what Python rejects, at the same step."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from playwright.sync_api import expect

from affidavit.certificate import VerificationOptions, verify
from affidavit.certificate.issuance import BUNDLE_TYPE
from affidavit.certificate.verification.status_list import PAYLOAD_TYPE as STATUS_TYPE
from affidavit.certificate.verification.status_list import sign_status
from affidavit.evidence import complete_evidence, verify_evidence
from affidavit.evidence.evidence_file import _write_zip
from affidavit.plan import canonical_json, load_json
from affidavit.trust import (
    KeyFailure,
    KeyRole,
    KeysetError,
    PublicKey,
    Roots,
    StepError,
    TrustedKeys,
    format_instant,
    read_keyset,
    sign_envelope,
    statement_in,
)
from affidavit.trust.keyset import PAYLOAD_TYPE as KEYSET_TYPE
from affidavit.trust.log import parse_note
from affidavit.trust.trust_root import TrustRoot, accept_keyset
from tests.browser.conftest import chromium  # noqa: F401
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.service.runs.test_evidence import MANIFEST, Made, audited, fetch, made_of, replayed
from tests.support.hostile_files import (
    DATES,
    IDENTITY,
    LOW_ORDER,
    NAMES,
    altered_signature,
    altered_text,
    altered_zip,
    weak_key,
)
from tests.support.logged_certificate import NOW, ORIGIN, Log, certified, key_for, log_of
from tests.support.random_seeds import seeded
from tests.support.verifier_page import (
    ROOT,
    UNUSABLE,
    Case,
    VerifierPage,
    altered_bytes,
    altered_json,
    keyset_files,
    opened,
    outcome_of,
    trust_files,
)
from tests.trust.test_every_verifier import (
    FORGERIES,
    MISDATED,
    evidence_of,
    forge,
    forge_with,
)
from tests.trust.test_trust_policy import ALL, LOGGER, SIGNER, STATUS, bundle_of

NOT_HERE = {11, 14, 15}
"""The steps of evidence that the page performs in part."""


@pytest.fixture(scope="module")
def page(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierPage]:  # noqa: F811
    with opened(chromium, tmp_path_factory.mktemp("page")) as result:
        yield result


def outcome(check: Callable[[], object]) -> tuple[int, str]:
    """The step at which Python rejects, and its code; 0 if it does not."""
    try:
        check()
    except StepError as error:
        return error.step, error.code
    except KeysetError as error:
        return 3, error.code
    return 0, "held"


def of_bundle(case: Case, trusted: TrustedKeys) -> tuple[int, str]:
    options = VerificationOptions(status=case.trust.get("status.json"))
    return outcome(lambda: verify(case.subject, replace(trusted, at=case.now), options=options))


def case_of(bundle: bytes, trusted: TrustedKeys, **more: bytes) -> Case:
    files = {name.replace("_", "."): raw for name, raw in more.items()}
    return Case(subject=bundle, trust={**trust_files(trusted), **files}, now=trusted.now())


def compare(page: VerifierPage, cases: Sequence[Case], expected: Sequence[tuple[int, str]]) -> None:
    outcomes = zip(cases, page.outcomes(cases), expected, strict=True)
    # A joint noise multiplier that is too large for the plan is what the page does not compare.
    left_out = {((0, "held"), (7, "bad_statement"))}
    # The page knows a keyset by its fields, and cannot tell what something else would be.
    left_out.add((UNUSABLE, (3, "keyset_malformed")))
    differ = [
        (found, wanted, case)
        for case, found, wanted in outcomes
        if found != wanted and (found, wanted) not in left_out
    ]
    assert not differ, f"{len(differ)} differ, such as {differ[0]}"


# ---- Bundles ----------------------------------------------------------------------------


def test_both_reject_every_forgery_at_the_same_step(page: VerifierPage, plan: Any) -> None:
    items = [forge(plan())]
    for _, how in FORGERIES.values():
        rest = dict(how)
        checkpoint = {"at": NOW + rest.pop("dated")} if "dated" in rest else {}
        items.append(forge_with(plan(), rest, checkpoint))
    cases = [case_of(item.bundle, item.trusted) for item in items]
    expected = [of_bundle(case, item.trusted) for case, item in zip(cases, items, strict=True)]
    assert [code for _, code in expected] == ["held", *(code for code, _ in FORGERIES.values())]
    compare(page, cases, expected)
    evidence = [evidence_of(plan(), **dates) for _, dates in MISDATED.values()]
    expected = [
        outcome(lambda raw=raw, keys=keys: verify_evidence(raw, keys)) for raw, keys in evidence
    ]
    assert [code for _, code in expected] == [code for code, _ in MISDATED.values()]
    compare(page, [case_of(raw, keys) for raw, keys in evidence], expected)


def different_bundles(plan: Callable[..., dict[str, Any]], count: int) -> Iterator[bytes]:
    """Bundles of plans that are certified, refused or under-noised, in logs of all sizes."""
    chance = random.Random(seeded(100))
    for number in range(count):
        adjacency = chance.choice(("add_remove", "zero_out", "replace_one"))
        noise = chance.choice((0.3, 5, 20, 41.5))
        document = plan(
            name=f"plan-{number}",
            adjacency=adjacency,
            steps=chance.randint(1, 90),
            releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": noise}],
        )
        size = chance.randint(1, 40)
        log = log_of(certified(document, SIGNER), chance.randrange(size), size)
        bundle = bundle_of(log, dict.fromkeys(chance.sample(ALL, chance.randint(0, 3)), NOW), size)
        if chance.random() < 0.2:
            del bundle["log"]
        yield json.dumps(bundle).encode()


@pytest.mark.soak
def test_both_say_the_same_of_100_bundles(page: VerifierPage, plan: Any) -> None:
    trusted = forge(plan()).trusted
    free = replace(trusted, policy=None)
    found: set[tuple[int, str]] = set()
    for raw in different_bundles(plan, 100):
        cases = [case_of(raw, trusted), case_of(raw, free)]
        expected = [of_bundle(case, of) for case, of in zip(cases, (trusted, free), strict=True)]
        compare(page, cases, expected)
        found |= set(expected)
    assert {step for step, _ in found} == {0, 10, 11}


def signed_status(**changes: Any) -> dict[str, Any]:
    listed = {
        **{"envelope": "sha256:" + "1" * 64, "certificate_id": "sha256:" + "2" * 64, "issue": 1},
        **{"status": "revoked", "reason": "plan_error", "since": format_instant(NOW)},
    }
    content = {
        **{"issuer": "example.com/log", "sequence": 7, "issued_at": format_instant(NOW)},
        **{"next_update": format_instant(NOW + timedelta(hours=1)), "keyset_version": None},
        **{"keys": (SIGNER.key_id,), "listed": (listed,)},
    }
    raw = sign_status({**content, **changes}, STATUS)
    result: dict[str, Any] = load_json(raw).data
    return result


def altered_bundles(log: Log, plan: dict[str, Any], count: int) -> Iterator[Case]:
    """Bundles with altered bytes, fields, statements, log parts, status lists and keysets."""
    chance = random.Random(seeded(59))
    trusted = forge(plan).trusted
    bundle = bundle_of(log, dict.fromkeys(ALL, NOW))
    alone = {name: part for name, part in bundle.items() if name != "log"}
    raw, statement = json.dumps(bundle).encode(), log.certificate.statement
    free = replace(trusted, policy=None)
    status = signed_status()
    kinds = ("bytes", "fields", "log", "note", "statement", "approved", "status", "keys", "time")
    kinds += ("text", "written", "signature", "weak", "proof", "names", "list", "set", "record")
    for number in range(count):
        match kinds[number % len(kinds)]:
            case "bytes":
                yield case_of(altered_bytes(raw, chance), trusted)
            case "fields":
                yield case_of(altered_json(bundle, chance), trusted)
            case "log":
                part = json.loads(altered_json({"log": bundle["log"]}, chance))
                yield case_of(json.dumps({**alone, **part}).encode(), trusted)
            case "note":
                note = altered_bytes(bundle["log"]["checkpoint"].encode(), chance)
                part = {**bundle["log"], "checkpoint": note.decode(errors="replace")}
                yield case_of(json.dumps({**bundle, "log": part}).encode(), trusted)
            case "statement" | "approved" as kind:
                whole = statement if kind == "statement" else certifying(statement)
                payload = altered_json(whole, chance)
                envelope = sign_envelope(payload, SIGNER).as_document()
                yield case_of(json.dumps({**alone, "envelope": envelope}).encode(), free)
            case "status":
                payload = altered_json(signed_content(status), chance)
                signed = sign_envelope(payload, STATUS, STATUS_TYPE)
                yield case_of(raw, trusted, status_json=canonical_json(signed.as_document()))
            case "keys":
                files = keyset_files(trusted)
                content = signed_content(load_json(files["keyset.json"]).data)
                payload = altered_json(content, chance)
                if chance.random() < 0.7:
                    payload = canonical_or(payload)
                signed = sign_envelope(payload, ROOT, KEYSET_TYPE)
                files["keyset.json"] = canonical_json(signed.as_document())
                yield Case(subject=raw, trust=files, now=NOW)
            case "text":
                yield case_of(altered_text(raw, chance), trusted)
            case "written":  # a statement that was signed as it is written
                payload = altered_text(canonical_json(certifying(statement)), chance)
                yield case_of(signed_again(payload), free)
            case "signature":
                changed = copy.deepcopy(chance.choice((alone, bundle)))
                (item,) = changed["envelope"]["signatures"]
                odd = altered_signature(base64.b64decode(item["sig"]), chance)
                item["sig"] = base64.b64encode(odd).decode()
                yield case_of(json.dumps(changed).encode(), chance.choice((free, trusted)))
            case "weak":  # a key of small order that the reader trusts
                weak = weak_key(SIGNER, chance.choice(LOW_ORDER))
                point = chance.choice((IDENTITY, *LOW_ORDER))
                forged = {"keyid": weak.key_id, "sig": base64.b64encode(point + bytes(32)).decode()}
                changed = {**alone, "envelope": {**alone["envelope"], "signatures": [forged]}}
                trusting_it = TrustedKeys((weak, *free.keys), policy=None, at=NOW)
                yield case_of(json.dumps(changed).encode(), trusting_it)
            case "proof":
                yield case_of(json.dumps(odd_proof(log, bundle, chance)).encode(), trusted)
            case "names":
                note = chance.choice((named, dated))(bundle, chance.choice((*NAMES, *DATES)))
                yield case_of(note, free)
            case "list":
                payload = altered_text(canonical_json(signed_content(status)), chance)
                signed = sign_envelope(payload, STATUS, STATUS_TYPE)
                yield case_of(raw, trusted, status_json=canonical_json(signed.as_document()))
            case "set":
                files = keyset_files(trusted)
                if chance.random() < 0.3:
                    files["keyset.json"] = altered_text(files["keyset.json"], chance)
                else:
                    content = signed_content(load_json(files["keyset.json"]).data)
                    payload = altered_text(canonical_json(content), chance)
                    signed = sign_envelope(payload, ROOT, KEYSET_TYPE)
                    files["keyset.json"] = canonical_json(signed.as_document())
                yield Case(subject=raw, trust=files, now=NOW)
            case "record":
                records = json.dumps([key.as_record() for key in trusted.keys]).encode()
                files = {"keys.json": altered_text(records, chance)}
                yield Case(subject=raw, trust=files, now=NOW)
            case _:
                hours = chance.choice((-9_000, -2, -0.1, -0.02, 0.02, 1, 2, 25, 9_000, 99_000))
                moved = replace(trusted, at=NOW + timedelta(hours=hours))
                yield case_of(raw, moved, status_json=canonical_json(status))


def named(bundle: dict[str, Any], name: str) -> bytes:
    """The bundle with a checkpoint of a log of that name."""
    return _noted(bundle, lambda text: text.replace(ORIGIN, name, 1), name)


def dated(bundle: dict[str, Any], at: str) -> bytes:
    """The bundle with a checkpoint of that time."""
    return _noted(bundle, lambda text: text.replace(format_instant(NOW), at), ORIGIN)


def _noted(bundle: dict[str, Any], change: Callable[[str], str], name: str) -> bytes:
    """The bundle with another checkpoint, signed as no careful signer would."""
    text = change(parse_note(bundle["log"]["checkpoint"]).text)
    raw_name, raw_key = (name.encode(errors="surrogatepass"), LOGGER.public.key.public_bytes_raw())
    key_hash = hashlib.sha256(raw_name + b"\n\x01" + raw_key).digest()[:4]
    signature = LOGGER.sign(text.encode(errors="surrogatepass"))
    line = f"— {name} {base64.b64encode(key_hash + signature).decode()}\n"
    log = {**bundle["log"], "checkpoint": f"{text}\n{line}"}
    return json.dumps({**bundle, "log": log}).encode()


def signed_again(payload: bytes) -> bytes:
    envelope = sign_envelope(payload, SIGNER).as_document()
    bundle = {"bundleType": BUNDLE_TYPE, "envelope": envelope}
    return json.dumps(bundle).encode()


def odd_proof(log: Log, bundle: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The bundle with a proof of another leaf, of another tree, or of another length."""
    part = dict(bundle["log"])
    hashes = list(part["inclusionProof"])
    match chance.randrange(6):
        case 0:
            part["leafIndex"] = chance.choice((0, 2, 4, 8, 9, 2**31, 2**32 + 3, 2**53 - 1, -1, 3.0))
        case 1:
            part["treeSize"] = chance.choice((0, 1, 3, 4, 8, 9, 10, 16, 2**53 - 1, None, 9.0))
        case 2:
            part["inclusionProof"] = log.part(chance.choice((4, 5, 6, 7, 8)))["inclusionProof"]
        case 3:
            at = chance.randrange(len(hashes) + 1)
            part["inclusionProof"] = hashes[:at] + hashes[at + chance.choice((0, 1)) :]
        case 4:
            extra = [base64.b64encode(bytes(size)).decode() for size in (0, 31, 32, 33)]
            count = chance.choice((1, 1, 60, 128, 129))
            part["inclusionProof"] = hashes + [chance.choice(extra)] * count
        case _:
            chance.shuffle(hashes)
            part["inclusionProof"] = hashes
    return {**bundle, "log": part}


def certifying(statement: dict[str, Any]) -> dict[str, Any]:
    """The statement with approvals, which only a certified verdict needs."""
    given = {"name": "alice", "at": "2026-01-01T00:00:00Z", "comment": "", "envelope": "sha256:0"}
    changes = {"approvals": {"required": 1, "given": [given]}, "supersedes": "sha256:0"}
    return {**statement, "predicate": {**statement["predicate"], **changes}}


def signed_content(envelope: dict[str, Any]) -> Any:
    return json.loads(base64.b64decode(envelope["payload"]))


def canonical_or(raw: bytes) -> bytes:
    try:
        return canonical_json(json.loads(raw))
    except (ValueError, RecursionError):
        return raw


def keys_in(records: bytes) -> tuple[PublicKey, ...]:
    """The keys that the command line trusts by a file of records; raises ``KeyFailure``."""
    with NamedTemporaryFile() as file:
        file.write(records)
        file.flush()
        return TrustRoot([Path(file.name)]).load().keys


def expected_of(case: Case, trusted: TrustedKeys) -> tuple[int, str]:
    if "keyset.json" not in case.trust:
        try:
            keys = keys_in(case.trust["keys.json"])
        except KeyFailure:
            return UNUSABLE
        policy = trusted.policy if "trust.json" in case.trust else None
        return of_bundle(case, replace(trusted, keys=keys, policy=policy))

    def check() -> None:
        roots = Roots.of([ROOT.public], threshold=1)
        keyset = accept_keyset([read_keyset(case.trust["keyset.json"])], roots, case.now)
        keys = TrustedKeys(keyset.public_keys(), keyset.trust, case.now)
        verify(case.subject, keys, options=VerificationOptions())

    return outcome(check)


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """So that twenty thousand files are never in memory at once."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def test_both_read_every_name_and_date_alike(page: VerifierPage, plan: Any) -> None:
    log = log_of(certified(plan(), SIGNER), 3, 9)
    bundle = bundle_of(log, {})
    free = replace(forge(plan()).trusted, policy=None)
    notes = [*(named(bundle, name) for name in NAMES), *(dated(bundle, at) for at in DATES)]
    cases = [case_of(raw, free) for raw in notes]
    expected = [of_bundle(case, free) for case in cases]
    compare(page, cases, expected)
    assert {step for step, _ in expected} == {0, 1, 10, 11}


def run_bundles(page: VerifierPage, plan: dict[str, Any], count: int) -> None:
    log = log_of(certified(plan, SIGNER), 3, 9)
    trusted = forge(plan).trusted
    rejecting = set()
    for cases in batched(altered_bundles(log, plan, count), 500):
        expected = [expected_of(case, trusted) for case in cases]
        compare(page, cases, expected)
        rejecting |= {step for step, _ in expected}
    assert rejecting >= {0, 1, 3, 4, 5, 7, 9, 10, 11, 13}


def test_both_reject_altered_bundles_at_the_same_step(page: VerifierPage, plan: Any) -> None:
    run_bundles(page, plan(), 300)


@pytest.mark.soak
def test_both_reject_20000_altered_bundles(page: VerifierPage, plan: Any) -> None:
    run_bundles(page, plan(), 20_000)


# ---- Evidence files ---------------------------------------------------------------------


def altered_evidence(made: Made, count: int) -> Iterator[bytes]:
    """Altered bytes of the zip, and altered files that the manifest lists."""
    chance = random.Random(seeded(5900))
    files = {name: content for name, content in made.files.items() if name != MANIFEST}
    for number in range(count):
        if number % 8 == 0:
            yield altered_bytes(made.raw, chance)
            continue
        if number % 8 == 2:
            yield altered_zip(made.raw, made.files, chance)
            continue
        if number % 8 == 3:
            name = chance.choice([name for name in sorted(files) if "json" in name])
            yield made.with_files(**{name: altered_text(files[name], chance)})
            continue
        if number % 8 == 1:
            manifest = altered_bytes(made.files[MANIFEST], chance)
            yield b"".join(_write_zip({**files, MANIFEST: manifest}))
            continue
        name = chance.choice(sorted(files))
        content: bytes | None = altered_bytes(files[name], chance)
        if name.endswith(".json") and chance.random() < 0.7:
            content = altered_json(load_json(files[name], 1 << 30).data, chance)
            if chance.random() < 0.8:
                content = canonical_or(content)
        if chance.random() < 0.03:
            content = None
        yield made.with_files(**{name: content})


def with_tests(yard: Yard, **how: Any) -> Made:
    """The evidence of a run to which a replay and an audit were added."""
    made = made_of(yard, 10, canaries=True, **how)
    path = f"/v1/runs/{json.loads(made.files['about.json'])['run']}"
    for kind, record in (("replay", json.loads(replayed(made))), ("audit", audited())):
        assert yard.ask("POST", f"{path}/{kind}", "admin", record).is_success
    return replace(made, raw=fetch(yard, f"{path}/evidence"))


def compare_evidence(
    page: VerifierPage, raws: Sequence[bytes], made: Made
) -> list[tuple[int, str]]:
    """Where Python rejects each file, which is where the page does, or what it leaves out."""
    trusted = made.trusted
    # The page tells a zip by its first bytes, where the command line is told.
    kinds = [verify_evidence if raw[:2] == b"PK" else verify for raw in raws]
    expected = [
        outcome(lambda of=of, raw=raw: of(raw, trusted))
        for of, raw in zip(kinds, raws, strict=True)
    ]
    parts = [content for _, content in sorted(made.files.items()) if len(content) > 200]
    results = page.results([case_of(raw, trusted) for raw in raws], parts)
    differ = []
    for raw, by_python, result in zip(raws, expected, results, strict=True):
        found = outcome_of(result)
        left_out = {item["step"] for item in result["steps"] if not item["checked"]} & NOT_HERE
        # What only Python checks, the page says that it did not.
        if found != by_python and not (found[0] == 0 and by_python[0] in left_out):
            differ.append((found, by_python, result, raw))
    assert not differ, f"{len(differ)} differ, such as {differ[0][:3]}"
    return expected


def run_evidence(page: VerifierPage, made: Made, count: int) -> None:
    """With what looks like a timestamp."""
    completed = complete_evidence(made.raw, None, lambda _: b"a reply")
    other = key_for(KeyRole.STATUS)
    keys = (*made.trusted.keys, other.public)
    trusted = replace(made.trusted, keys=keys, at=datetime.now(NOW.tzinfo))
    made = replace(made, raw=completed, trusted=trusted)
    listed = signed_content(json.loads(made.files["status.json"]))
    elsewhere = canonical_json({**listed, "keys": [other.key_id]})
    envelope = sign_envelope(elsewhere, other, STATUS_TYPE).as_document()
    about = json.loads(made.files["about.json"])
    odd = [
        *(
            made.with_files(**{"about.json": canonical_json({**about, "release": value})})
            for value in ({}, [[{}]], None, 3)
        ),
        made.with_files(**{"status.json": canonical_json(envelope)}),
        # A file of each name that is listed as it is, so that each step has something to reject.
        *(made.with_files(**{name: b"{}"}) for name in made.files if name != MANIFEST),
    ]
    rejecting = set()
    for raws in batched(chain([made.raw, *odd], altered_evidence(made, count)), 200):
        rejecting |= {step for step, _ in compare_evidence(page, raws, made)}
    assert rejecting >= {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14}


@ON_SQLITE
def test_both_reject_altered_evidence_at_the_same_step(page: VerifierPage, yard: Yard) -> None:
    run_evidence(page, with_tests(yard), 80)


@ON_SQLITE
@pytest.mark.soak
def test_both_reject_20000_altered_evidence_files(page: VerifierPage, yard: Yard) -> None:
    run_evidence(page, with_tests(yard), 20_000)


# ---- The page ---------------------------------------------------------------------------


def dropped(page: VerifierPage, case: Case, name: str) -> str:
    """Choose the files as a person does, and read what the page says."""
    files = [{"name": name, "mimeType": "", "buffer": case.subject}]
    trust = [{"name": n, "mimeType": "", "buffer": raw} for n, raw in case.trust.items()]
    page.page.click("#clear")
    page.page.set_input_files("#trust input", trust)
    page.page.set_input_files("#subject input", files)
    expect(page.page.locator("#result")).to_be_visible()
    result: str = page.page.inner_text("#verdict")
    return result


def test_a_person_reads_the_steps_and_what_was_not_checked(page: VerifierPage, plan: Any) -> None:
    item = forge(plan())
    case = case_of(item.bundle, item.trusted)
    said = dropped(page, case, "bundle.json")
    assert said.startswith("Verified, except what this page does not check.")
    assert "step 13 (status), proof of ε" in said
    assert page.page.locator("#steps tr").count() == 14
    rejected = dropped(page, replace(case, subject=case.subject.replace(b"sig", b"sgi")), "b.json")
    assert rejected.startswith("Rejected at step 1 (size and form): bad_form")
    unusable = dropped(page, replace(case, trust={"keys.json": b"{}"}), "bundle.json")
    assert unusable.startswith("Nothing was verified.")
    page.page.click("#clear")
    assert page.page.locator("#result").is_hidden()


def test_a_browser_without_ed25519_verifies_nothing(page: VerifierPage, plan: Any) -> None:
    item = forge(plan())
    page.page.evaluate(
        "() => { const whole = SubtleCrypto.prototype.importKey; globalThis.whole = whole;"
        " SubtleCrypto.prototype.importKey = async () => { throw new Error('unknown'); }; }"
    )
    try:
        said = dropped(page, case_of(item.bundle, item.trusted), "bundle.json")
    finally:
        page.page.evaluate("() => { SubtleCrypto.prototype.importKey = globalThis.whole; }")
    assert said.startswith("Nothing was verified.")
    assert "Ed25519" in said


def test_nothing_in_a_file_becomes_code_or_reaches_the_network(
    page: VerifierPage, plan: Any
) -> None:
    """``opened`` fails for a request, a dialog, an error or a message on the console."""
    attack = "<img src=x onerror=alert(1)><script>alert(1)</script>\u202egpj"
    item = forge(plan())
    case = case_of(item.bundle, item.trusted)
    key = {**SIGNER.public.as_record(), "label": attack}
    statement = statement_in(item.bundle)
    obligations = [{"code": attack, "checked_by": attack}]
    changes = {"requester": attack, "obligations": obligations, "warnings": [attack]}
    signed = {**statement, "predicate": {**statement["predicate"], **changes}}
    envelope = sign_envelope(canonical_json(signed), SIGNER).as_document()
    document = {**json.loads(item.bundle), "envelope": envelope}
    del document["log"]
    hostile = case_of(canonical_json(document), replace(item.trusted, policy=None))
    polluted = json.dumps([key]).replace('"label"', '"__proto__": {"verdict": "x"}, "label"')
    for changed in (
        replace(hostile, trust={f"{attack}.json": polluted.encode()}),
        replace(case, subject=json.dumps({"bundleType": attack}).encode()),
        replace(case, trust={"keys.json": json.dumps([{"key_id": attack}]).encode()}),
        replace(case, trust={attack: b"{"}),
    ):
        dropped(page, changed, attack)
        assert page.page.locator("main img, main script").count() == 0
        assert "\u202e" not in page.page.inner_text("main")
    assert page.page.evaluate("({}).verdict === undefined")
    # A policy of the page itself: even a script that got in could load and send nothing.
    sent = page.page.evaluate("fetch('https://example.com').then(() => 1, () => 0)")
    assert sent == 0
    page.wrong[:] = [text for text in page.wrong if "https://example.com" not in text]


@pytest.mark.soak
def test_large_and_deep_files_are_rejected_and_the_page_lives(
    page: VerifierPage, plan: Any
) -> None:
    trusted = forge(plan()).trusted
    subjects = (
        b" " * (8 * 1024 * 1024 + 1),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'"' + b"\\u0041" * 100_000 + b'"',
        b"9" * 100_000,
        # A zip that claims four gigabytes, and one whose only file is compressed.
        b"PK\x03\x04" + b"\xff" * 26 + b"about.json",
        b"PK\x03\x04\x14\x00\x00\x08\x08\x00" + bytes(16) + b"\x0a\x00\x00\x00about.jsonPK\x01\x02",
    )
    outcomes = page.outcomes([case_of(raw, trusted) for raw in subjects])
    assert {step for step, _ in outcomes} == {1}
    assert {code for _, code in outcomes} <= {"bad_form", "evidence_altered", "evidence_form"}
