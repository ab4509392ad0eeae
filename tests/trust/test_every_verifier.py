"""Every verifier refuses every forged or misdated certificate, for the same reason.

A new verifier takes ``TrustedKeys`` like the others, and a test fails until it is in the table.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

import affidavit
from affidavit.certificate import verify
from affidavit.evidence import (
    Evidence,
    EvidenceError,
    UnsupportedClaim,
    sign_model,
    verify_evidence,
    verify_model,
    write_evidence,
)
from affidavit.evidence.model.claim import (
    CERTIFICATE_FILE,
    FOLDER,
    RECORD_FILE,
    STATEMENT_FILE,
    statement_of,
)
from affidavit.evidence.model.manifest import manifest_of
from affidavit.evidence.model.verification import IGNORED_FILES
from affidavit.evidence.run_record import fields
from affidavit.gate.cli import app
from affidavit.guard.certified_run import GuardStop, load_certified_run
from affidavit.plan import canonical_json, plan_from
from affidavit.trainer.__main__ import app as trainer_app
from affidavit.trainer.errors import NotCertified
from affidavit.trainer.run_config import bind
from affidavit.trust import (
    KeyRole,
    KeyStore,
    Roots,
    SigningKey,
    TrustedKeys,
    TrustPolicy,
    VerificationError,
    draft_keyset,
    format_instant,
    sign_envelope,
    statement_in,
)
from affidavit.trust.dsse import encode_base64
from affidavit.trust.log import (
    merkle_tree,
    read_checkpoint,
    sign_checkpoint,
)
from tests.evidence.test_conformance import chained
from tests.support.logged_certificate import NOW, certified, key_for, log_of
from tests.support.trust import trusting
from tests.trust.test_trust_policy import (
    ALL,
    HOUR,
    LOGGER,
    SIGNER,
    TRUSTED,
    bundle_of,
    policy,
)

RUN_KEY = key_for(KeyRole.RUN)
SIGNING_KEY = replace(RUN_KEY, public=replace(RUN_KEY.public, not_before=NOW - 9 * HOUR))
HEADER: dict[str, Any] = dict.fromkeys(fields("header", optional=False))
RECORD = chained([{**HEADER, "type": "header", "started_at": format_instant(NOW)}])
"""The start of a record; the certificate is verified before the rest is read."""


# ---- Forged and misdated things ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forgery:
    """A bundle that must not verify, and the keys and the policy that tell."""

    bundle: bytes
    trusted: TrustedKeys


def forge(
    document: dict[str, Any],
    *,
    witnesses: int = 2,
    logged: bool = True,
    required: TrustPolicy | None = None,
    signer: Mapping[str, Any] | None = None,
    logger: Mapping[str, Any] | None = None,
    at: datetime = NOW,
    **checkpoint: Any,
) -> Forgery:
    """``signer`` and ``logger`` are changes of what the verifier knows of these keys."""
    log = log_of(certified(document, SIGNER), 3, 9)
    bundle = bundle_of(log, dict.fromkeys(ALL[:witnesses], at), **checkpoint)
    if not logged:
        del bundle["log"]
    keys = (
        replace(SIGNER.public, **signer or {}),
        replace(LOGGER.public, **logger or {}),
        *TRUSTED[2:],
        SIGNING_KEY.public,
    )
    trusted = trusting(keys, policy=required or policy(), at=at)
    return Forgery(bundle=json.dumps(bundle).encode(), trusted=trusted)


FORGERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "never logged": ("not_logged", {"logged": False}),
    "no witness saw it": ("not_witnessed", {"witnesses": 0}),
    "too few witnesses saw it": ("not_witnessed", {"witnesses": 1}),
    "in another log": ("wrong_origin", {"origin": "example.com/other"}),
    "without the status list that the policy requires": (
        "no_status",
        {"required": policy(status_hours=1)},
    ),
    "signed by a key of another role": (
        "key_outside_role",
        {"signer": {"roles": frozenset({KeyRole.STATUS})}},
    ),
    "issued after its key was revoked": ("key_revoked", {"signer": {"revoked_from": NOW}}),
    "issued before its key's window": (
        "key_outside_window",
        {"signer": {"not_before": NOW + timedelta(seconds=1)}},
    ),
    "issued after its key's window": (
        "key_outside_window",
        {"signer": {"not_after": NOW - timedelta(seconds=1)}},
    ),
    "its checkpoint's key is revoked": (
        "checkpoint_key_revoked",
        {"logger": {"revoked_from": NOW - HOUR / 2}},
    ),
    "its checkpoint's key had ended": (
        "checkpoint_key_outside_window",
        {"logger": {"not_after": NOW - HOUR / 2}},
    ),
    "a checkpoint three hours before it": (
        "checkpoint_before_certificate",
        {"at": NOW + 3 * HOUR / 2, "logger": {"not_before": NOW - 9 * HOUR}, "dated": -3 * HOUR},
    ),
    "a checkpoint six minutes before it, of a key that had ended": (
        "checkpoint_before_certificate",
        {"logger": {"not_after": NOW - HOUR / 20}, "dated": -HOUR / 10},
    ),
    "a checkpoint of tomorrow": ("checkpoint_not_yet", {"dated": 24 * HOUR}),
    "a certificate of tomorrow": (
        "not_yet_valid",
        {"at": NOW - HOUR, "signer": {"not_before": NOW - 9 * HOUR}},
    ),
}


# ---- Verifiers --------------------------------------------------------------------------


def _library(item: Forgery, _: Path) -> None:
    affidavit.verify(item.bundle, trusted=item.trusted)


def _bundle(item: Forgery, _: Path) -> None:
    verify(item.bundle, item.trusted)


def _guard(item: Forgery, _: Path) -> None:
    load_certified_run(item.bundle, trusted=item.trusted)


def _trainer(item: Forgery, _: Path) -> None:
    plan = plan_from(statement_in(item.bundle)["predicate"]["plan"])
    bind(item.bundle, item.trusted, plan, records=10)


def _sign_model(item: Forgery, folder: Path) -> None:
    evidence = Evidence(bundle=item.bundle, record=RECORD)
    sign_model(folder, evidence, SIGNING_KEY, trusted=item.trusted, now=NOW)


def _verify_model(item: Forgery, folder: Path) -> None:
    """Somebody signed the folder with a good key without verifying anything."""
    (folder / FOLDER).mkdir()
    (folder / CERTIFICATE_FILE).write_bytes(item.bundle)
    (folder / RECORD_FILE).write_bytes(RECORD)
    signed_at = format_instant(item.trusted.now())
    statement = statement_of({}, manifest_of(folder, IGNORED_FILES).files, signed_at)
    envelope = sign_envelope(canonical_json(statement), SIGNING_KEY)
    (folder / STATEMENT_FILE).write_bytes(canonical_json(envelope.as_document()))
    report = verify_model(folder, item.trusted)
    assert not report.verified
    (finding,) = report.findings
    raise VerificationError(1, finding.code, finding.message, finding.remedy)


def _evidence_file(bundle: bytes) -> bytes:
    """What leads to the certificate in it, which is verified before everything else in the file."""
    about = canonical_json({"certificate": statement_id(bundle), "run": None})
    return b"".join(write_evidence({"about.json": about, "bundle.json": bundle}))


def statement_id(bundle: bytes) -> str:
    return str(statement_in(bundle)["predicate"]["certificate_id"])


def _verify_evidence(item: Forgery, _: Path) -> None:
    verify_evidence(_evidence_file(item.bundle), item.trusted)


VERIFIERS: dict[str, Callable[[Forgery, Path], None]] = {
    "certificate.verification.bundle_verification.verify": _bundle,
    "library.api.verify": _library,
    "guard.certified_run.load_certified_run": _guard,
    "trainer.run_config.bind": _trainer,
    "evidence.model.signing.sign_model": _sign_model,
    "evidence.model.verification.verify_model": _verify_model,
    "evidence.evidence_verification.verify_evidence": _verify_evidence,
}
"""Those that verify a certificate, by module and name."""
CURRENT_STATUS = "certificate.verification.status_list.current_status"
THROUGH = {
    "trainer.loop.train": "trainer.run_config.bind",
    "trainer.private_loop.private": "trainer.run_config.bind",
    "guard.loop.Guard": "guard.certified_run.load_certified_run",
    "guard.opacus_run.opacus": "guard.certified_run.load_certified_run",
    "evidence.model.training_check.training_of": "evidence.model.signing.sign_model",
    "certificate.verification.verifier_state.verification_options": CURRENT_STATUS,
    "certificate.verification.verifier_state.StatusStore.update": CURRENT_STATUS,
    "service.web.pages.certificate_view.verification": (
        "certificate.verification.bundle_verification.verify"
    ),
}
"""Those that hand the keys to another, which has to be the first thing that they do with them."""
OTHER_DOCUMENTS = {
    "certificate.verification.status_list.read_status",
    CURRENT_STATUS,
    "evidence.provenance.read_provenance",
}
"""Those that verify something else than certificates; their own tests forge it."""
DOOR = "trust.trust_root.trusted_or_own"
"""Refuses what is no ``TrustedKeys``, and verifies nothing."""


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_every_verifier_refuses_every_forgery(
    document: Callable[..., dict[str, Any]], verifier: str, forgery: str, tmp_path: Path
) -> None:
    code, how = FORGERIES[forgery]
    how = dict(how)
    checkpoint = {"at": NOW + how.pop("dated")} if "dated" in how else {}
    item = forge_with(document(), how, checkpoint)
    refusals = (VerificationError, GuardStop, NotCertified, UnsupportedClaim, EvidenceError)
    with pytest.raises(refusals) as caught:
        VERIFIERS[verifier](item, tmp_path)
    found = getattr(caught.value, "finding", caught.value)
    assert found.code == code


def forge_with(
    document: dict[str, Any], how: Mapping[str, Any], checkpoint: Mapping[str, Any]
) -> Forgery:
    result = forge(document, **how)
    if not checkpoint:
        return result
    log = log_of(certified(document, SIGNER), 3, 9)
    bundle = bundle_of(log, dict.fromkeys(ALL, result.trusted.now()), **checkpoint)
    return replace(result, bundle=json.dumps(bundle).encode())


def test_the_same_without_the_forgery_verifies(document: Callable[..., dict[str, Any]]) -> None:
    """Else the table would show nothing."""
    item = forge(document())
    assert verify(item.bundle, item.trusted).predicate["verdict"] == "certified"
    # Two clocks of a service may differ by minutes.
    slow = forge_with(document(), {}, {"at": NOW - timedelta(minutes=4)})
    assert verify(slow.bundle, slow.trusted).predicate["verdict"] == "certified"


def evidence_of(
    document: dict[str, Any], *, dated: timedelta, entered: timedelta, size: int = 12
) -> tuple[bytes, TrustedKeys]:
    """An evidence file up to its log, and what verifies it two hours later.

    Its checkpoint is ``dated`` after that of the bundle, and an entry of it ``entered``.
    """
    at = (NOW + entered).isoformat(timespec="microseconds")
    entry: dict[str, Any] = {"kind": "approval", "subject": "s", "actor": "a", "at": at, "body": {}}
    leaf = canonical_json(entry)
    log = log_of(certified(document, SIGNER), 3, 9)
    tree, nodes = merkle_tree.Frontier(), dict(log.nodes)
    for index in range(size):
        known = nodes.get(merkle_tree.Place(0, index))
        nodes.update(
            tree.append(merkle_tree.leaf_hash(leaf) if index >= 9 or known is None else known)
        )
    bundle = {**json.loads(log.certificate.bundle), "log": log.part(9, key=LOGGER)}
    longer = replace(log, nodes=nodes)
    proof = merkle_tree.assemble(merkle_tree.inclusion_path(size - 1, size), nodes)
    proofs = {
        "checkpoint": longer.checkpoint(size, key=LOGGER, at=NOW + dated),
        "entries": [{"index": size - 1, "hashes": list(map(encode_base64, proof))}],
        "consistency": longer.consistency(9, size).as_document(),
    }
    raw = json.dumps(bundle).encode()
    about = canonical_json({"certificate": statement_id(raw), "run": None})
    files = {"about.json": about, "bundle.json": raw, "log/entries.jsonl": leaf + b"\n"}
    files["log/proofs.json"] = canonical_json(proofs)
    keys = (SIGNER.public, replace(LOGGER.public, not_before=NOW - 9 * HOUR))
    trusted = trusting(keys, policy=None, at=NOW + 2 * HOUR)
    return b"".join(write_evidence(files)), trusted


MISDATED: dict[str, tuple[str, dict[str, timedelta]]] = {
    "as it should be": ("evidence_missing", {"dated": HOUR, "entered": HOUR}),
    "by clocks that differ": ("evidence_missing", {"dated": -HOUR / 20, "entered": HOUR / 60}),
    "an entry that is newer than its checkpoint": (
        "evidence_not_logged",
        {"dated": HOUR, "entered": 1.5 * HOUR},
    ),
    "a longer log that is older than the bundle's": (
        "evidence_not_logged",
        {"dated": -HOUR / 2, "entered": -HOUR},
    ),
}
"""Of the first two, the next file is missing that a later step reads."""


@pytest.mark.parametrize("name", MISDATED)
def test_the_checkpoint_of_an_evidence_file_is_newer_than_what_it_contains(
    document: Callable[..., dict[str, Any]], name: str
) -> None:
    code, dates = MISDATED[name]
    raw, trusted = evidence_of(document(), **dates)
    with pytest.raises(EvidenceError) as caught:
        verify_evidence(raw, trusted)
    assert caught.value.code == code


# ---- A verifier that is not in the table ------------------------------------------------

PACKAGE = Path(affidavit.__file__).parent


def _functions() -> Iterator[tuple[str, str]]:
    """The public functions of the product and the types of their parameters."""
    for room in sorted(path for path in PACKAGE.iterdir() if path.is_dir()):
        for path in sorted(room.glob("**/*.py")):
            parts = path.relative_to(room).with_suffix("").parts
            text = path.read_text()
            if not re.search("TrustedKeys|PublicKey", text):
                continue
            for node in ast.parse(text).body:
                inside = node.body if isinstance(node, ast.ClassDef) else [node]
                owner = (node.name,) if isinstance(node, ast.ClassDef) else ()
                for item in inside:
                    if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        continue
                    if item.name == "__init__" or not item.name.startswith("_"):
                        own = () if item.name == "__init__" else (item.name,)
                        name = ".".join((room.name, *parts, *owner, *own))
                        arguments = (*item.args.args, *item.args.kwonlyargs)
                        types = [ast.unparse(a.annotation) for a in arguments if a.annotation]
                        yield name, " | ".join(types)


def test_every_function_that_takes_trusted_keys_is_in_the_table() -> None:
    found = {name for name, types in _functions() if re.search(r"\bTrustedKeys\b", types)}
    assert found - {DOOR} == {*VERIFIERS, *THROUGH, *OTHER_DOCUMENTS}


def test_no_verifier_takes_bare_public_keys() -> None:
    """What takes them makes ``TrustedKeys`` of them, or compares the service with itself."""
    bare = re.compile(r"(Iterable|Sequence|tuple|list|Mapping)\[[^\]]*\bPublicKey\b")
    found = {name for name, types in _functions() if bare.search(types)}
    assert {name.partition(".")[0] for name in found} <= {"trust", "service"}


@pytest.mark.parametrize("call", [affidavit.verify, load_certified_run])
def test_what_has_no_policy_is_no_trust(
    document: Callable[..., dict[str, Any]], call: Callable[..., Any]
) -> None:
    item = forge(document(), logged=False)
    keys = item.trusted.keys
    look_alike = SimpleNamespace(keys=keys, policy=None, key=item.trusted.key, now=lambda: NOW)
    for trusted in (list(keys), keys, look_alike):
        with pytest.raises((TypeError, GuardStop)) as caught:
            call(item.bundle, trusted=trusted)
        assert getattr(caught.value, "code", "bad_argument") == "bad_argument"
    for policy_ in (False, {}, ""):
        with pytest.raises(TypeError):
            TrustedKeys(keys, policy=policy_)  # type: ignore[arg-type]


def test_only_the_module_of_dates_compares_dates_of_keys() -> None:
    """A verifier that compared them by itself could forget one of the comparisons."""
    verifiers = ("certificate", "client", "evidence", "gate", "guard", "library", "trainer")
    found = {
        f"{room}.{path.name}:{node.attr}"
        for room in (*verifiers, "worker")
        for path in (PACKAGE / room).glob("**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        if node.attr in {"revoked_at", "covers"}
    }
    assert found == {
        # A policy covers data sets, and a check covers a part of the plan.
        "certificate.rules.py:covers",
        "gate.render.py:covers",
        # Whether a key is revoked by now, which is no question about the date of a signature.
        "certificate.bundle_verification.py:revoked_at",
        "certificate.inclusion_verification.py:revoked_at",
        "certificate.status_list.py:revoked_at",
    }


# ---- The commands -----------------------------------------------------------------------

NO_CERTIFICATE = {"runs verify", "monitor"}
"""Commands that verify no certificate: the provenance of a run, and a log."""


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    context = group.make_context(None, [], resilient_parsing=True)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", {flag for item in command.params for flag in item.opts}


def test_a_command_that_takes_a_keyset_takes_all_that_tells_how_far_to_trust_it() -> None:
    options = {"--keys", "--keyset", "--root", "--trust", "--require-log", "--status"}
    gate = {name: flags for name, flags in _commands(typer.main.get_command(app))
            if {"--keyset", "--root"} <= flags}  # fmt: skip
    assert {"verify", "verify-model", "sign-model", "audit-model check", "conformance"} <= set(gate)
    trainer = typer.main.get_command(trainer_app)
    gate["train"] = {flag for item in trainer.params for flag in item.opts}
    assert gate.keys() - NO_CERTIFICATE == COMMANDS.keys()
    for name in COMMANDS:
        assert options | {"--checkpoint-store", "--consistency"} <= gate[name], name
    assert "--trust" in gate["runs verify"]


def _evidence(folder: Path) -> list[str]:
    return [f"--certificate={folder / 'bundle.json'}", f"--record={folder / 'record.jsonl'}"]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "verify": lambda folder: [str(folder / "bundle.json")],
    "verify-model": lambda folder: [str(folder / "model")],
    "sign-model": lambda folder: [str(folder / "unsigned"), *_evidence(folder)],
    "audit-model check": lambda folder: [
        f"--canaries={folder / 'none'}",
        f"--losses={folder / 'none'}",
        _evidence(folder)[0],
    ],
    "conformance": _evidence,
    "verify-evidence": lambda folder: [str(folder / "evidence.zip")],
    "train": lambda folder: [
        f"--plan={folder / 'plan.json'}",
        f"--out={folder / 'run'}",
        "--data=digits",
        "--model=mlp:8,seed=1",
        _evidence(folder)[0],
    ],
}


def _run(command: str, *arguments: str) -> Result:
    if command == "train":  # another program, which the gate's command starts
        return CliRunner().invoke(trainer_app, arguments)
    return CliRunner().invoke(app, [*command.split(), *arguments])


def _write_files(bundle: bytes, folder: Path) -> None:
    """Write what ``COMMANDS`` name."""
    (folder / "bundle.json").write_bytes(bundle)
    (folder / "record.jsonl").write_bytes(RECORD)
    (folder / "plan.json").write_bytes(canonical_json(statement_in(bundle)["predicate"]["plan"]))
    (folder / "evidence.zip").write_bytes(_evidence_file(bundle))
    (folder / "unsigned").mkdir()
    (folder / "model").mkdir()


DEMANDS: dict[str, tuple[dict[str, Any], TrustPolicy]] = {
    "not_logged": ({"logged": False}, policy(status_hours=1)),
    "not_witnessed": ({"witnesses": 1}, policy()),
    "wrong_origin": ({"origin": "example.com/other"}, policy()),
    "no_status": ({}, policy(status_hours=1)),
}
"""What the policy of a keyset demands, by the code of a bundle that does not have it."""


@pytest.mark.by_turns
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("code", DEMANDS)
def test_every_command_applies_the_policy_of_the_keyset(
    document: Callable[..., dict[str, Any]],
    command: str,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how, required = DEMANDS[code]
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    own = KeyStore(tmp_path / "home" / "keys").new("signer")
    item = forge(document(), **how)
    _write_files(item.bundle, tmp_path)
    with suppress(VerificationError, AssertionError):
        _verify_model(item, tmp_path / "model")
    root = SigningKey.generate()
    roots = Roots.of([root.public], threshold=1)
    for name, trust in (("lax", None), ("strict", required)):
        draft = draft_keyset(
            None,
            roots=roots,
            keys=[*item.trusted.keys, own.public],
            revoked=[],
            issued_at=NOW - HOUR,
            expires_at=NOW + 24 * HOUR,
            trust=trust,
        )
        (tmp_path / name).write_bytes(draft.signed_by(root).as_bytes())
    (tmp_path / "roots").write_bytes(canonical_json(roots.model_dump(mode="json")))
    (tmp_path / "policy").write_bytes(canonical_json(required.as_document()))
    arguments = [*COMMANDS[command](tmp_path), f"--root={tmp_path / 'roots'}"]

    def is_refused(*options: str) -> bool:
        shutil.rmtree(tmp_path / "home" / "keysets", ignore_errors=True)
        result = _run(command, *arguments, *options)
        return (result.exit_code, code in result.output) == (1, True)

    lax = f"--keyset={tmp_path / 'lax'}"
    assert is_refused(f"--keyset={tmp_path / 'strict'}")
    assert is_refused(lax, f"--trust={tmp_path / 'policy'}")
    assert is_refused(lax, "--require-log") == (code == "not_logged")
    # The demand alone makes the difference.
    assert not is_refused(lax)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_compares_the_log_with_what_was_seen_of_it(
    document: Callable[..., dict[str, Any]],
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log's own key signed another history of the same size."""
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "home"))
    own = KeyStore(tmp_path / "home" / "keys").new("signer")
    item = forge(document())
    _write_files(item.bundle, tmp_path)
    with suppress(VerificationError, AssertionError):
        _verify_model(item, tmp_path / "model")
    shown = json.loads(item.bundle)["log"]["checkpoint"]
    checkpoint = read_checkpoint(shown)
    other = sign_checkpoint(
        LOGGER,
        origin=checkpoint.origin,
        size=checkpoint.size,
        root_hash=bytes(32),
        at=NOW - HOUR,
    )
    public = (*item.trusted.keys, own.public)
    arguments = COMMANDS[command](tmp_path)
    for number, key in enumerate(public):
        (tmp_path / f"{number}.json").write_text(json.dumps(key.as_record()))
        arguments.append(f"--keys={tmp_path / f'{number}.json'}")

    def is_rewritten(note: str) -> bool:
        seen = {checkpoint.origin: {"note": note, "seen": format_instant(NOW - HOUR)}}
        store = {"version": 1, "checkpoints": seen}
        (tmp_path / "seen").write_text(json.dumps(store))
        result = _run(command, *arguments, f"--checkpoint-store={tmp_path / 'seen'}")
        return "log_rewritten" in result.output

    assert is_rewritten(other)
    assert not is_rewritten(shown)


def test_who_trusts_keys_without_a_policy_is_known() -> None:
    """Whoever makes ``TrustedKeys`` states the policy; these state that there is none, and why."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for room in PACKAGE.iterdir()
        if room.is_dir()
        for path in room.glob("**/*.py")
        if re.search(r"TrustedKeys|\bpolicy=", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _is_without_policy(node)
    }
    assert found == {
        # The service compares what it stored with its own keys and those of its workers.
        "service/audit/audit.py",
        "service/runs/service.py",
        "service/web/pages/certificate_view.py",
    }


def _is_without_policy(call: ast.Call) -> bool:
    """Whether ``TrustedKeys`` are made, or changed, so that they have no policy."""
    name = ast.unparse(call.func).rpartition(".")[2]
    named = {item.arg: ast.unparse(item.value) for item in call.keywords}
    if name == "TrustedKeys":
        positional = [ast.unparse(item) for item in call.args[1:2]]
        return [*positional, named.get("policy", "")][0] == "None" or None in named
    return name == "replace" and named.get("policy") == "None"
