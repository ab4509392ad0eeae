"""The claim ``dp-training/v1``: what is proved, checked and declared about a model's training.

It is the predicate of an in-toto statement whose subjects are the files of the model's folder. All
of it except the time of signing follows from files of the folder, so that a verifier derives and
compares it (``claim_of``). ``checked`` lists what verification establishes, ``declared`` what only
the signer vouches for; the sentences are in ``CHECKED`` and ``DECLARED``.

``device_attestation`` is null. It is reserved for evidence by the training hardware (a quote of a
trusted execution environment over the last digest of the run record), which Affidavit neither makes
nor checks.

References: in-toto Attestation Framework v1; OpenSSF Model Signing v1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from affidavit.accountants import decimal_down
from affidavit.assessment import certified_plan
from affidavit.evidence.conformance import Conformance
from affidavit.evidence.model.canary_audit import Audit
from affidavit.evidence.model.manifest import (
    SIGNATURE_FILE,
    Manifest,
    ModelFile,
)
from affidavit.plan import Plan, digest_of
from affidavit.trust.dsse import in_toto

CLAIM_TYPE = "https://affidavit.dev/dp-training/v1"

FOLDER = "affidavit"
STATEMENT_FILE: str = f"{FOLDER}/dp-training.json"
CERTIFICATE_FILE = f"{FOLDER}/certificate.json"
RECORD_FILE = f"{FOLDER}/record.jsonl"
KEYSET_FILE = f"{FOLDER}/keyset.json"
CANARIES_FILE = f"{FOLDER}/canaries.json"
LOSSES_FILE = f"{FOLDER}/canary-losses.json"

CHECKED = {
    "files": "Every file of the folder is as it was when it was signed, and none was added.",
    "certificate": "A trusted key signed the certificate that proves the guarantee for its plan.",
    "record": "The run record has an unbroken chain, and its run did what the certificate allows.",
    "weights": "The trained tensors are those with whose digest the run record ends.",
    "audit": "Canaries that were committed to before the training, with these losses after it, "
    "prove no ε above the certified one.",
}
"""The sentences that verification establishes, by code."""
DECLARED = {
    "execution": "The machine did what the run record says; no hardware vouches for it.",
    "data": "The records were those of the data set that the plan names, each of one unit.",
    "sole_release": "Nothing else that depends on the data was released: no other run, no choice "
    "of settings by results on the data.",
    "gaussian_noise": "Noise in floating point is taken for exactly Gaussian.",
    "exact_noise": "Noise is exactly Gaussian and its sums are rounded to a grid; sums of clipped "
    "gradients in floating point are taken for exact.",
    "weights": "The weights came out of the run of the record: some are in a form whose digest "
    "cannot be compared with the record's.",
    "canary_losses": "The losses of the canaries are those of these weights.",
    "untrained_tensors": "Tensors that the run did not train do not depend on the data.",
}
"""The sentences that the signer vouches for, by code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The evidence in the folder: the certificate's bundle, the run record, and optional files.

    A run with canaries needs both ``canaries`` and ``losses``.
    """

    bundle: bytes
    record: bytes
    keyset: bytes | None = None
    canaries: bytes | None = None
    losses: bytes | None = None

    def files(self) -> dict[str, bytes]:
        """Return the content of each file by its name."""
        contents = {
            CERTIFICATE_FILE: self.bundle,
            RECORD_FILE: self.record,
            KEYSET_FILE: self.keyset,
            CANARIES_FILE: self.canaries,
            LOSSES_FILE: self.losses,
        }
        return {name: content for name, content in contents.items() if content is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The verified inputs of a claim.

    ``certificate`` is the predicate of the verified certificate. ``weights_checked`` is whether the
    weights were compared with the record, and ``untrained`` names the tensors that were not
    trained. ``audit`` is the result of the run's canaries, if it had any, and ``checkpoint`` the
    newest checkpoint of the certificate's log, if it is to be kept.
    """

    certificate: Mapping[str, Any]
    conformance: Conformance
    weights_checked: bool
    untrained: tuple[str, ...] = ()
    audit: Audit | None = None


def claim_of(training: Training, manifest: Manifest) -> dict[str, Any]:
    """Return the claim that follows from the model's folder."""
    predicate, report = training.certificate, training.conformance
    digests, plan = manifest.digests(), certified_plan(dict(training.certificate))
    exact = all(phase.has_exact_noise for phase in plan.phases)
    audited = training.audit is not None
    checked = {"weights": training.weights_checked, "audit": audited}
    declared = {
        "weights": not training.weights_checked,
        "untrained_tensors": bool(training.untrained),
        "canary_losses": audited,
        "gaussian_noise": not exact,
        "exact_noise": exact,
    }
    return {
        "guarantee": predicate["guarantee"],
        "mechanism": _mechanism(plan),
        "certificate": {
            "name": CERTIFICATE_FILE,
            "digest": {"sha256": digests[CERTIFICATE_FILE]},
            "id": predicate["certificate_id"],
            "plan_digest": digest_of(predicate["plan"]),
        },
        "record": {
            "name": RECORD_FILE,
            "digest": {"sha256": digests[RECORD_FILE]},
            "run": report.run,
            "head": report.head,
        },
        "conformance": {
            "conformant": report.conformant,
            "steps": report.as_dict()["steps"],
            "findings": sorted({finding.code for finding in report.findings}),
        },
        "ledger": predicate.get("ledger"),
        "manifest": {"digest": {"sha256": manifest.without(SIGNATURE_FILE).root}},
        "audit": None if training.audit is None else _audit(training.audit, digests),
        "checked": [code for code in CHECKED if checked.get(code, True)],
        "declared": [code for code in DECLARED if declared.get(code, True)],
        "untrained_tensors": list(training.untrained),
        "device_attestation": None,
    }


def statement_of(claim: Mapping[str, Any], files: Iterable[ModelFile], at: str) -> dict[str, Any]:
    """Return the in-toto statement of ``claim`` about ``files``, signed ``at`` an instant."""
    subjects = {item.name: item.sha256 for item in files}
    return in_toto(subjects, CLAIM_TYPE, {"signed_at": at, **claim})


def _audit(result: Audit, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the measured lower bounds, rounded down, and the files from which they follow."""
    return {
        "canaries": {"name": CANARIES_FILE, "digest": {"sha256": digests[CANARIES_FILE]}},
        "losses": {"name": LOSSES_FILE, "digest": {"sha256": digests[LOSSES_FILE]}},
        "count": result.canaries,
        "guesses": result.guesses,
        "right": result.right,
        "confidence": str(result.confidence),
        "epsilon_at_least": decimal_down(result.epsilon),
        "mu_at_least": decimal_down(result.mu),
    }


def _mechanism(plan: Plan) -> dict[str, Any]:
    """Return the optimiser and the sampling, clipping and noise of each phase."""
    return {
        "optimizer": plan.optimizer.name,
        "phases": [
            {
                "sampling": phase.sampling.scheme,
                "clipping": phase.clipping,
                "noise": phase.noise.kind,
                "releases": [release.name for release in phase.releases],
            }
            for phase in plan.phases
        ],
    }
