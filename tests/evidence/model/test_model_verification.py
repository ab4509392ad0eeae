"""A signed model verifies, and every later change is reported by file name."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import save_file

from affidavit.certificate import verify
from affidavit.evidence import (
    CANARIES_FILE,
    CERTIFICATE_FILE,
    LOSSES_FILE,
    RECORD_FILE,
    STATEMENT_FILE,
    BadModel,
    Canaries,
    Evidence,
    ModelReport,
    UnsupportedClaim,
    losses_as_bytes,
    verify_model,
)
from affidavit.plan import Plan, as_document, canonical_json, plan_from
from affidavit.trust import (
    KeyRole,
    PublicKey,
    SigningKey,
    VerificationError,
    read_envelope,
    sign_envelope,
)
from tests.evidence.model.conftest import WEIGHTS, Run, run_of
from tests.evidence.test_conformance import plan_with
from tests.support.trust import trusting


@pytest.fixture
def model(run: Run, tmp_path: Path) -> Path:
    """A model signed with both keys."""
    return run.signed(tmp_path / "model", ec.generate_private_key(ec.SECP256R1()))


def named(report: ModelReport) -> set[tuple[str, str]]:
    return {(finding.file, finding.code) for finding in report.findings}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_signed_model_verifies_wherever_it_is_moved(
    model: Path, run: Run, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.move(model, moved)
    report = verify_model(moved, trusting(run.key.public))
    assert report.verified, report.findings
    assert report.claim["guarantee"]["epsilon"]["upper"]
    assert report.claim["checked"] == ["files", "certificate", "record", "weights"]
    assert report.claim["device_attestation"] is None


def test_every_file_with_a_byte_changed_is_named(model: Path, run: Run) -> None:
    for path in files(model):
        name, content = path.relative_to(model).as_posix(), path.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1}:
            changed = bytearray(content)
            changed[place] ^= 1
            path.write_bytes(changed)
            report = verify_model(model, trusting(run.key.public))
            assert not report.verified
            assert name in {finding.file for finding in report.findings}, (name, place)
        path.write_bytes(content)
    assert verify_model(model, trusting(run.key.public)).verified


def test_every_byte_of_the_statement_counts(model: Path, run: Run) -> None:
    content = (model / STATEMENT_FILE).read_bytes()
    for place in range(0, len(content), 97):
        changed = bytearray(content)
        changed[place] ^= 1
        (model / STATEMENT_FILE).write_bytes(changed)
        report = verify_model(model, trusting(run.key.public))
        assert {file for file, _ in named(report)} == {STATEMENT_FILE}, place


def test_a_file_that_is_missing_added_or_replaced_by_a_link_is_named(
    model: Path, run: Run, tmp_path: Path
) -> None:
    (model / "added.py").write_text("import os\n")
    (model / "README.md").unlink()
    (tmp_path / "other").write_bytes((model / WEIGHTS).read_bytes())
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to(tmp_path / "other")
    found = named(verify_model(model, trusting(run.key.public)))
    assert {
        ("added.py", "added"),
        ("README.md", "missing"),
        (WEIGHTS, "not_a_file"),
    } <= found


@pytest.mark.parametrize("extra", [b"\n", b" "])
def test_nothing_is_added_around_the_signed_claim(model: Path, run: Run, extra: bytes) -> None:
    with (model / STATEMENT_FILE).open("ab") as file:
        file.write(extra)
    assert named(verify_model(model, trusting(run.key.public))) == {(STATEMENT_FILE, "bad_claim")}


@pytest.mark.parametrize("file", [{"name": ["a"]}, {"digest": {"sha256": 7}}])
def test_a_claim_whose_files_are_no_names_and_digests_is_none(
    model: Path, run: Run, file: dict[str, Any]
) -> None:
    path = model / STATEMENT_FILE
    statement = json.loads(read_envelope(json.loads(path.read_bytes())).payload)
    statement["subject"][0] |= file
    path.write_bytes(
        canonical_json(sign_envelope(canonical_json(statement), run.key).as_document())
    )
    assert named(verify_model(model, trusting(run.key.public))) == {(STATEMENT_FILE, "bad_claim")}


def test_what_git_keeps_is_not_signed_and_is_said_to_be_there(model: Path, run: Run) -> None:
    (model / ".git" / "hooks").mkdir(parents=True)
    report = verify_model(model, trusting(run.key.public))
    assert report.verified
    assert ".git" in dict(report.steps)["files"]


def test_files_of_another_model_of_the_same_signer_are_named(
    model: Path, key: SigningKey, tmp_path: Path
) -> None:
    """Each file is valid where it comes from."""
    other = run_of(key).signed(tmp_path / "other", ec.generate_private_key(ec.SECP256R1()))
    for path in files(model):
        name, own = path.relative_to(model).as_posix(), path.read_bytes()
        if (other / name).read_bytes() == own:
            continue
        path.write_bytes((other / name).read_bytes())
        report = verify_model(model, trusting(key.public))
        assert not report.verified
        path.write_bytes(own)
    shutil.rmtree(model / "affidavit")
    shutil.copytree(other / "affidavit", model / "affidavit")
    assert (WEIGHTS, "altered") in named(verify_model(model, trusting(key.public)))


@pytest.mark.parametrize("role", [role for role in KeyRole if role is not KeyRole.RUN])
def test_a_claim_by_a_key_of_another_role_does_not_count(
    model: Path, run: Run, role: KeyRole
) -> None:
    other = SigningKey.generate()
    resign(model, other, lambda _: None)
    trusted = [run.key.public, replace(other.public, roles=frozenset({role}))]
    assert named(verify_model(model, trusting(trusted))) == {(STATEMENT_FILE, "untrusted_signer")}


def test_no_link_is_followed_to_the_evidence(model: Path, run: Run, tmp_path: Path) -> None:
    shutil.move(model / "affidavit", tmp_path / "evidence")
    (model / "affidavit").symlink_to(tmp_path / "evidence")
    report = verify_model(model, trusting(run.key.public))
    assert not report.verified
    assert report.claim == {}


def test_a_missing_certificate_or_record_is_named(model: Path, run: Run) -> None:
    for name in (CERTIFICATE_FILE, RECORD_FILE):
        (model / name).unlink()
    report = verify_model(model, trusting(run.key.public))
    assert {(CERTIFICATE_FILE, "missing"), (RECORD_FILE, "missing")} <= named(report)


def test_keys_that_are_not_trusted_revoked_or_too_late_do_not_count(model: Path, run: Run) -> None:
    def codes(key: PublicKey) -> set[tuple[str, str]]:
        return named(verify_model(model, trusting(key)))

    public, now = run.key.public, datetime.now(UTC)
    dated: Callable[..., PublicKey] = lambda **changes: PublicKey(  # noqa: E731
        **{"key": public.key, "not_before": public.not_before, "not_after": public.not_after}
        | changes
    )
    assert codes(SigningKey.generate().public) == {(STATEMENT_FILE, "untrusted_signer")}
    window = {(STATEMENT_FILE, "signer_outside_window")}
    assert codes(dated(revoked_from=now + timedelta(seconds=1))) == set()
    assert codes(dated(revoked_from=now)) == window
    assert codes(dated(not_after=now - timedelta(days=1))) == window


def test_a_certificate_that_expired_after_its_run_still_counts(model: Path, run: Run) -> None:
    later = datetime.now(UTC) + timedelta(days=3 * 365)
    lasting = replace(run.key.public, not_after=later + timedelta(days=1))
    trusted = trusting(lasting, at=later)
    with pytest.raises(VerificationError, match="has expired"):
        verify((model / CERTIFICATE_FILE).read_bytes(), trusted)
    report = verify_model(model, trusted)
    assert report.verified, report.findings


@pytest.mark.parametrize("field", ["guarantee", "mechanism", "declared", "ledger", "audit"])
def test_a_signed_claim_that_does_not_follow_from_the_files_is_named(
    model: Path, run: Run, field: str
) -> None:
    """Its signer has the key, and says more than certificate and record prove."""
    statement = verify_model(model, trusting(run.key.public)).claim
    claim = {**statement, field: {"epsilon": {"lower": "0", "upper": "0.1"}}}
    resign(model, run.key, lambda document: document.update(predicate=claim))
    assert (STATEMENT_FILE, "other_claim") in named(verify_model(model, trusting(run.key.public)))


def resign(model: Path, key: SigningKey, change: Callable[[dict[str, Any]], object]) -> None:
    """Sign the model's statement again after ``change``, whatever it says then."""
    import base64

    envelope = json.loads((model / STATEMENT_FILE).read_bytes())
    statement = json.loads(base64.b64decode(envelope["payload"]))
    change(statement)
    signed = sign_envelope(canonical_json(statement), key)
    (model / STATEMENT_FILE).write_bytes(canonical_json(signed.as_document()))


@pytest.mark.parametrize(
    "subject",
    [
        "weights",
        [{"name": "../../etc/hostname", "digest": {"sha256": "00"}}],
        [{"name": "/etc/hostname", "digest": {"sha256": "00"}}],
        [{"name": WEIGHTS}],
        [{"name": WEIGHTS, "digest": []}],
        2 * [{"name": WEIGHTS, "digest": {"sha256": "00"}}],
    ],
    ids=["text", "escape", "absolute", "no digest", "list", "twice"],
)
def test_a_hostile_statement_is_refused_without_a_fault(
    model: Path, run: Run, subject: object
) -> None:
    resign(model, run.key, lambda document: document.update(subject=subject))
    assert not verify_model(model, trusting(run.key.public)).verified


def test_weights_of_another_run_are_not_signed(run: Run, tmp_path: Path) -> None:
    folder = run.signed(tmp_path / "model")
    save_file({**run.weights, "b": torch.zeros(2)}, folder / WEIGHTS)
    with pytest.raises(UnsupportedClaim) as failure:
        run.sign(folder)
    assert (failure.value.finding.file, failure.value.finding.code) == (WEIGHTS, "other_weights")


def test_tensors_that_were_not_trained_are_declared(run: Run, tmp_path: Path) -> None:
    folder = run.signed(tmp_path / "model")
    save_file({"buffer": torch.zeros(1)}, folder / "more.safetensors")
    claim = run.sign(folder)
    assert claim["untrained_tensors"] == ["buffer"]
    assert "untrained_tensors" in claim["declared"]
    assert verify_model(folder, trusting(run.key.public)).verified


def test_a_record_whose_tensor_has_no_shape_is_not_of_the_weights(
    key: SigningKey, tmp_path: Path
) -> None:
    unshaped = run_of(key, lambda entries: entries[0]["tensors"][0].update(shape=2))
    with pytest.raises(UnsupportedClaim) as failure:
        unshaped.signed(tmp_path / "model")
    assert failure.value.finding.code == "other_weights"


def test_weights_that_cannot_be_compared_are_declared(run: Run, tmp_path: Path) -> None:
    folder = run.signed(tmp_path / "model")
    (folder / WEIGHTS).unlink()
    torch.save(run.weights, folder / "weights.pt")
    claim = run.sign(folder)
    assert "weights" not in claim["checked"]
    assert "weights" in claim["declared"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", b""),
        ("model.ONNX", b""),
        ("deep/checkpoint.pt", b""),
        ("notes.txt", b"\x80\x04\x95"),
        ("archive", b"PK\x03\x04"),
        ("OTHER.SafeTensors", b""),
        ("model.nemo", b"./weights\0\0"),
        ("weights.raw", bytes(24)),
        ("notes.gz", b"\x1f\x8b\x08"),
        ("old.txt", pickle.dumps({"a": [0.0, 0.0]}, protocol=0)),
        ("objects.npz", b"PK\x03\x04"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "tokenizer.model"}}'),
        ("deep/pytorch_model.bin.index.json", b'{"weight_map": {"a": "../curve.png"}}'),
        ("model.safetensors.index.json", b'{"weight_map": []}'),
    ],
)
def test_weights_beside_those_that_were_checked_are_declared(
    run: Run, tmp_path: Path, name: str, content: bytes
) -> None:
    """A loader may prefer them to the safetensors."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    save_file(run.weights, tmp_path / WEIGHTS)
    claim = run.sign(tmp_path)
    assert "weights" in claim["declared"]
    assert "weights" not in claim["checked"]
    assert verify_model(tmp_path, trusting(run.key.public)).verified


def test_text_pictures_and_tokenizers_hold_no_weights(run: Run, tmp_path: Path) -> None:
    for name, content in (
        ("LICENSE", "© somebody\n".encode()),
        ("config.json", b"{}"),
        ("curve.png", b"\x89PNG\r\n\x1a\n\0\0"),
        ("tokenizer.model", b"\n\x0e\0"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": WEIGHTS}}).encode()),
    ):
        (tmp_path / name).write_bytes(content)
    save_file(run.weights, tmp_path / WEIGHTS)
    assert "weights" in run.sign(tmp_path)["checked"]


@pytest.mark.parametrize("extra", [bytes(9), b"PK\x03\x04"])
def test_weights_with_bytes_of_no_tensor_are_refused(
    run: Run, tmp_path: Path, extra: bytes
) -> None:
    """Another loader may find an archive there, or a pickle."""
    save_file(run.weights, tmp_path / WEIGHTS)
    content = (tmp_path / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for tensor in header.values():
        tensor["data_offsets"] = [place + len(extra) for place in tensor["data_offsets"]]
    moved = json.dumps(header).encode()
    before = len(moved).to_bytes(8, "little") + moved + extra + content[8 + length :]
    for changed in (content + extra, before):
        (tmp_path / WEIGHTS).write_bytes(changed)
        with pytest.raises(UnsupportedClaim) as failure:
            run.sign(tmp_path)
        assert failure.value.finding.code == "other_weights"


def test_a_run_that_broke_its_certificate_is_not_signed(key: SigningKey, tmp_path: Path) -> None:
    def less_noise(entries: list[dict[str, Any]]) -> None:
        charge = next(entry for entry in entries if entry["type"] == "charge")
        charge["noise_std"] = {**charge["noise_std"], "hidden": 0.1}

    with pytest.raises(UnsupportedClaim) as failure:
        run_of(key, less_noise).signed(tmp_path / "model")
    assert (failure.value.finding.file, failure.value.finding.code) == (RECORD_FILE, "noise_below")
    assert not (tmp_path / "model" / "affidavit").exists()


def with_canaries(key: SigningKey, right: float = 0.5) -> Run:
    """A run that committed to canaries, of which the share ``right`` gives itself away."""
    canaries = Canaries.generate(600)
    known = int(right * canaries.count)
    losses = [
        float(not taken) if index < known else 0.5 for index, taken in enumerate(canaries.included)
    ]
    done = run_of(key, lambda entries: entries[0].update(canaries=canaries.commitment))
    evidence = replace(done.evidence, canaries=canaries.as_bytes(), losses=losses_as_bytes(losses))
    return replace(done, evidence=evidence)


def test_what_canaries_prove_stands_in_the_claim(key: SigningKey, tmp_path: Path) -> None:
    done = with_canaries(key, right=0.05)
    report = verify_model(done.signed(tmp_path / "model"), trusting(key.public))
    assert report.verified, report.findings
    assert "audit" in report.claim["checked"]
    assert report.claim["audit"]["right"] <= report.claim["audit"]["guesses"] == 200


def test_a_run_that_its_canaries_falsify_is_not_signed(key: SigningKey, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedClaim) as failure:
        with_canaries(key, right=1.0).signed(tmp_path / "model")
    assert (failure.value.finding.file, failure.value.finding.code) == (LOSSES_FILE, "falsified")


@pytest.mark.parametrize(
    ("change", "file"),
    [
        ({"canaries": None}, CANARIES_FILE),
        ({"losses": None}, LOSSES_FILE),
        ({"canaries": None, "losses": None}, CANARIES_FILE),
        ({"canaries": Canaries.generate(600).as_bytes()}, CANARIES_FILE),
        ({"canaries": b"{}"}, CANARIES_FILE),
        ({"losses": losses_as_bytes([1.0])}, LOSSES_FILE),
    ],
)
def test_canaries_that_are_left_out_or_exchanged_are_named(
    key: SigningKey, tmp_path: Path, change: dict[str, Any], file: str
) -> None:
    done = with_canaries(key)
    with pytest.raises(UnsupportedClaim) as failure:
        replace(done, evidence=replace(done.evidence, **change)).signed(tmp_path / "model")
    assert failure.value.finding.file == file


def test_canaries_that_nothing_committed_to_prove_nothing(run: Run, tmp_path: Path) -> None:
    later = replace(
        run.evidence,
        canaries=Canaries.generate(4).as_bytes(),
        losses=losses_as_bytes([1.0, 2.0, 3.0, 4.0]),
    )
    with pytest.raises(UnsupportedClaim) as failure:
        replace(run, evidence=later).signed(tmp_path / "model")
    assert failure.value.finding.code == "other_canaries"


@pytest.mark.parametrize("record", [b"", b"\n", b"{}\n", b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_record_is_refused(run: Run, tmp_path: Path, record: bytes) -> None:
    broken = Run(
        weights=run.weights,
        evidence=Evidence(bundle=run.evidence.bundle, record=record),
        key=run.key,
    )
    with pytest.raises(UnsupportedClaim) as failure:
        broken.signed(tmp_path / "model")
    assert failure.value.finding.file == RECORD_FILE


def test_a_signature_of_model_signing_that_would_be_stale_stops_the_signing(
    model: Path, run: Run
) -> None:
    with pytest.raises(BadModel) as failure:
        run.sign(model)
    assert failure.value.code == "stale_model_signature"


@pytest.mark.parametrize(
    "content",
    [b"", b"12345678", (1 << 40).to_bytes(8, "little"), b"\x02" + 7 * b"\0" + b"[]"],
    ids=["empty", "no header", "too long", "no object"],
)
def test_weights_that_are_not_safetensors_are_refused(
    run: Run, tmp_path: Path, content: bytes
) -> None:
    folder = run.signed(tmp_path / "model")
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(UnsupportedClaim) as failure:
        run.sign(folder)
    assert failure.value.finding.code == "other_weights"


EXACT = {"kind": "independent", "arithmetic": "exact_grid"}


def plan_of(noise: dict[str, str]) -> Plan:
    """A plan whose phases all have this noise."""
    document = as_document(plan_with())
    return plan_from({**document, "phases": [{**p, "noise": noise} for p in document["phases"]]})


@pytest.mark.parametrize("noise", [EXACT, {"kind": "independent"}])
def test_the_claim_declares_the_noise_of_the_certified_plan(
    key: SigningKey, tmp_path: Path, noise: dict[str, str]
) -> None:
    run = run_of(key, plan=plan_of(noise))
    report = verify_model(run.signed(tmp_path / "model"), trusting(key.public))
    assert report.verified, report.findings
    declared = set(report.claim["declared"])
    expected = "exact_noise" if noise == EXACT else "gaussian_noise"
    assert declared & {"exact_noise", "gaussian_noise"} == {expected}


def test_a_record_of_other_arithmetic_than_certified_supports_no_claim(
    key: SigningKey, tmp_path: Path
) -> None:
    def change(entries: list[dict[str, Any]]) -> None:
        entries[0]["phases"][0]["noise"] = {"kind": "independent"}

    with pytest.raises(UnsupportedClaim) as failure:
        run_of(key, change, plan=plan_of(EXACT)).signed(tmp_path / "model")
    assert failure.value.finding.code == "other_noise"
