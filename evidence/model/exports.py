"""A model's claim in the forms of other ecosystems: CycloneDX and Hugging Face's model card.

Both are written into the model's folder before the claim is signed, so that the signature covers
them. They repeat the claim digit by digit and say where it is. They omit what only the publisher
knows (licence, supplier, download location).

The model card (``README.md``) gets the tag ``differential-privacy`` and the field
``differential_privacy`` in its metadata (the YAML before the text), and one section between two
comments in its text. Existing ones are replaced, and the rest of the card stays. Decimals are
strings, so that no reader rounds them.

References: CycloneDX 1.6; Hugging Face Hub, "Model Cards", metadata.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from affidavit.evidence.model.claim import (
    CERTIFICATE_FILE,
    CHECKED,
    CLAIM_TYPE,
    DECLARED,
    FOLDER,
    RECORD_FILE,
    STATEMENT_FILE,
)
from affidavit.evidence.model.manifest import BadModel, ModelFile

TOOL = "affidavit"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportContent:
    """The content of an export: the model's name, its claim and files, and the plan's data set.

    ``at`` is the instant of signing. ``files`` excludes the exports and the signatures.
    """

    model: str
    claim: Mapping[str, Any]
    dataset: Mapping[str, Any]
    files: tuple[ModelFile, ...]
    at: str

    @property
    def identity(self) -> str:
        """A URN that names this model with this certificate and record."""
        return uuid5(NAMESPACE_URL, f"{CLAIM_TYPE} {self.claim['manifest']['digest']}").urn

    @property
    def data(self) -> str:
        """The name of the data set."""
        return self.dataset.get("name") or "training data"

    @property
    def guarantee(self) -> str:
        """The proved upper bound as a sentence."""
        guarantee = self.claim["guarantee"]
        return (
            f"Trained with differential privacy: ε ≤ {guarantee['epsilon']['upper']} at "
            f"δ = {guarantee['delta']['upper']}, adjacency {guarantee['adjacency']}, "
            f"unit {guarantee['unit']}."
        )

    @property
    def declared(self) -> list[str]:
        """The sentences that only the signer vouches for."""
        return [DECLARED[code] for code in self.claim["declared"]]

    def properties(self) -> dict[str, str]:
        """Return the single-valued properties of the claim, by name."""
        claim, guarantee = self.claim, self.claim["guarantee"]
        result = {
            "epsilon_upper": guarantee["epsilon"]["upper"],
            "epsilon_lower": guarantee["epsilon"]["lower"],
            "delta": guarantee["delta"]["upper"],
            "adjacency": guarantee["adjacency"],
            "unit": guarantee["unit"],
            "trajectory": guarantee["trajectory"],
            "optimizer": claim["mechanism"]["optimizer"],
            "sampling": ", ".join(self._of_phases("sampling")),
            "clipping": ", ".join(self._of_phases("clipping")),
            "noise": ", ".join(self._of_phases("noise")),
            "certificate": claim["certificate"]["id"],
            "record": claim["record"]["head"],
            "checked": ", ".join(claim["checked"]),
            "declared": ", ".join(claim["declared"]),
        }
        if claim["audit"] is not None:
            result["audited_epsilon_lower"] = claim["audit"]["epsilon_at_least"]
            result["audit_confidence"] = claim["audit"]["confidence"]
        return {name: str(value) for name, value in result.items()}

    def _of_phases(self, name: str) -> list[str]:
        """Return each distinct value, in the order of the phases."""
        return list(dict.fromkeys(phase[name] for phase in self.claim["mechanism"]["phases"]))


BOM_FILE = f"{FOLDER}/model.cdx.json"


def bill_of_materials(of: ExportContent) -> bytes:
    """Return a CycloneDX ML-BOM as JSON: the model with its card, its data set and its files."""
    evidence = {"attestation": CERTIFICATE_FILE, "evidence": RECORD_FILE}
    digests = {item.name: item.sha256 for item in of.files}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": of.identity,
        "version": 1,
        "metadata": {
            "timestamp": of.at,
            "tools": {"components": [{"type": "application", "name": TOOL}]},
            "component": {
                "type": "machine-learning-model",
                "bom-ref": "model",
                "name": of.model,
                "description": of.guarantee,
                "modelCard": {
                    "modelParameters": {"datasets": [{"ref": "dataset"}]},
                    "considerations": {"technicalLimitations": of.declared},
                },
                "externalReferences": [
                    {
                        "type": kind,
                        "url": name,
                        "hashes": [{"alg": "SHA-256", "content": digests[name]}],
                    }
                    for kind, name in evidence.items()
                ]
                + [{"type": "attestation", "url": STATEMENT_FILE, "comment": CLAIM_TYPE}],
                "properties": [
                    {"name": f"{TOOL}:dp-training:{name}", "value": value}
                    for name, value in of.properties().items()
                ],
            },
        },
        "components": [
            {
                "type": "data",
                "bom-ref": "dataset",
                "name": of.data,
                "data": [{"type": "dataset", "name": of.data}],
            },
            *(
                {
                    "type": "file",
                    "bom-ref": f"file:{item.name}",
                    "name": item.name,
                    "hashes": [{"alg": "SHA-256", "content": item.sha256}],
                }
                for item in of.files
            ),
        ],
        "dependencies": [{"ref": "model", "dependsOn": ["dataset"]}],
    }
    return (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()


CARD_FILE = "README.md"
FIELD = "differential_privacy"
TAG = "differential-privacy"
BEGIN, END = "<!-- differential privacy: begin -->", "<!-- differential privacy: end -->"
_METADATA = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END) + r"\n?", re.DOTALL)


def has_section(card: bytes) -> bool:
    """Whether ``card`` has a section about differential privacy."""
    return BEGIN.encode() in card


def add_to_card(card: bytes, of: ExportContent) -> bytes:
    """Add the metadata and the section of the claim to ``card``, which may be empty.

    Raises ``BadModel`` unless the card is UTF-8 and its metadata are a mapping.
    """
    try:
        text = card.decode("utf-8")
        parts = _METADATA.match(text)
        metadata = _mapping("" if parts is None else parts[1])
        tags = metadata.get("tags")
        tags = [] if tags is None else tags
        if not isinstance(tags, list):
            raise ValueError("tags is not a list")
    except (ValueError, YAMLError) as error:
        reason = str(error).split("\n", 1)[0]
        raise BadModel(
            "bad_card",
            f"{CARD_FILE}: its metadata cannot be read: {reason}.",
            "Correct the YAML between the two lines ---, in UTF-8.",
        ) from None
    if TAG not in tags:
        tags.append(TAG)
    metadata["tags"] = tags
    metadata[FIELD] = of.properties()
    written = io.StringIO()
    _yaml().dump(metadata, written)
    body = text if parts is None else text[parts.end() :]
    section = _section(of)
    if _SECTION.search(body):
        body = _SECTION.sub(lambda _: section, body, count=1)
    else:
        body = f"{body.rstrip()}\n\n{section}".lstrip("\n")
    return f"---\n{written.getvalue()}---\n{body}".encode()


def _section(of: ExportContent) -> str:
    claim = of.claim
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in of.properties().items()]
    lines = [
        BEGIN,
        "## Differential privacy",
        "",
        of.guarantee,
        "",
        "| | |",
        "|---|---|",
        *rows,
        "",
        "Verification checks:",
        "",
        *(f"- {CHECKED[code]}" for code in claim["checked"]),
        "",
        "The signer declares:",
        "",
        *(f"- {sentence}" for sentence in of.declared),
        "",
        f"The claim is in `{FOLDER}/`; `affidavit verify-model` checks it offline.",
        END,
    ]
    return "\n".join(lines) + "\n"


def _mapping(text: str) -> Any:
    loaded = _yaml().load(text)
    if loaded is None:
        return CommentedMap()
    if not isinstance(loaded, dict):
        raise ValueError("it is not a mapping")
    return loaded


def _yaml() -> YAML:
    """Return a reader and writer that preserves comments, order and quotes."""
    result = YAML()
    result.width = 4096
    result.preserve_quotes = True
    return result
