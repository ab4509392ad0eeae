"""An entry for the OpenDP deployments registry, as YAML that a person completes.

What the certificate proves is filled in. Who publishes the model, for what and where is not
known here: those fields say ``FILL IN``, and the status is ``Draft``. The ε is the certified
upper bound, never rounded below it.

The registry's schema moves. Fields are those of ``schemas/deployments-schema.yaml`` in
opendp/deployments-registry-data at ``REVISION``.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

REVISION = "c1d3d30939608c9a448d6bec5bdcbd35d5facfea"
UNKNOWN = "FILL IN"
METRICS = {
    "add_remove": "one {unit} added or removed",
    "replace_one": "one {unit} replaced by any other",
    "zero_out": "one {unit} replaced by one that contributes nothing",
}


def registry_entry(
    predicate: Mapping[str, Any], *, published: datetime, certificate: str
) -> dict[str, Any]:
    """The entry of a certified model, as data; ``certificate`` is its id."""
    plan, said = predicate["plan"], predicate["guarantee"]
    name = plan.get("name") or plan["dataset"].get("name") or "model"
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model",
        "status": "Draft",
        "tier": 2,
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": [f"{UNKNOWN}: who publishes it"],
                "description": "A model trained with differential privacy on the data set "
                f"{plan['dataset'].get('name') or 'of the plan'}.",
                "intended_use": f"{UNKNOWN}: what it is for",
                "data_product_type": "Machine learning model",
                "data_product_region": f"{UNKNOWN}: whose data and whose law",
                "publication_date": f"{published:%Y-%m-%d}",
            },
            "dp_flavor": {
                "name": "Approximate DP",
                "data_domain": f"Data sets of {plan['dataset']['unit']}s.",
                "unprotected_quantities": "The plan: its steps, lot sizes, clip norms and noise. "
                "Also the size of the data set, where the plan gives it.",
            },
            "privacy_loss": {
                "privacy_unit": plan["dataset"]["unit"],
                "privacy_unit_description": "Neighbouring data sets differ in "
                + METRICS[said["adjacency"]].format(unit=said["unit"])
                + f" ({said['adjacency']}).",
                "privacy_parameters": {
                    "epsilon": at_least(said["epsilon"]["upper"]),
                    "delta": at_least(said["delta"]["upper"]),
                },
                "privacy_parameters_description": _parameters(said),
            },
            "deployment_model": {
                "model_name": "Central",
                "release_type": "One release",
                "release_type_description": "Every intermediate model is counted as released.",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "Everything that the optimiser does to the noisy releases.",
                "composition": "All steps composed by "
                + ", ".join(f"{e['name']} ({e['version']})" for e in predicate["accountants"])
                + ".",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": f"{UNKNOWN}: and whether it was counted",
                "mechanisms": _mechanisms(predicate),
                "justification": f"{UNKNOWN}: why these parameters",
            },
            "administrative": {
                "sources": f"Affidavit certificate {certificate}",
                "registry_authors": [predicate["requester"]],
            },
        },
    }


def as_yaml(entry: Mapping[str, Any]) -> bytes:
    """The entry as a file for the registry, with what is left to do at its top."""
    yaml = YAML()
    yaml.width = 100
    written = io.StringIO()
    written.write(f"# Complete every field that says {UNKNOWN}, then submit it to the registry.\n")
    yaml.dump(_quoted(dict(entry)), written)
    return written.getvalue().encode("utf-8")


def at_least(text: str) -> float:
    """A decimal as the least number that YAML writes and that is not below it.

    >>> at_least("7.99"), at_least("0.30000000000000001")
    (7.99, 0.30000000000000004)
    """
    found = float(text)
    return found if Decimal(repr(found)) >= Decimal(text) else math.nextafter(found, math.inf)


def _parameters(said: Mapping[str, Any]) -> str:
    chance = f" It holds with confidence {said['confidence']}." if "confidence" in said else ""
    return "ε is a proved upper bound at this δ." + chance


def _mechanisms(predicate: Mapping[str, Any]) -> str:
    joint = predicate["noise_multiplier"]["joint"]
    schemes = ", ".join(dict.fromkeys(item["scheme"] for item in predicate["sampling"]))
    noise = f" at a joint noise multiplier of {joint} a step" if joint else ""
    optimizer = predicate["plan"].get("optimizer", {}).get("name", "dp_sgd")
    return (
        f"{optimizer}: clipped sums with Gaussian noise{noise}, lots by {schemes} sampling. "
        "Floating-point noise is not modelled."
    )


def _quoted(value: Any) -> Any:
    """Texts in double quotes, so that a date stays a text and no name becomes a number."""
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, dict):
        return {key: _quoted(each) for key, each in value.items()}
    return value
