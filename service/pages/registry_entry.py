"""An entry for the OpenDP deployments registry, as YAML to be completed by a person.

The fields that the certificate proves are filled in. Who publishes the model, for what purpose
and where is unknown here: those fields say ``FILL IN``, and the status is ``Draft``. The ε is
the certified upper bound, never rounded below it.

The registry's schema changes. The fields are those of ``schemas/deployments-schema.yaml`` in
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
    """The entry of a certified model; ``certificate`` is its id."""
    plan, guarantee = predicate["plan"], predicate["guarantee"]
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
                "intended_use": f"{UNKNOWN}: intended use",
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
                + METRICS[guarantee["adjacency"]].format(unit=guarantee["unit"])
                + f" ({guarantee['adjacency']}).",
                "privacy_parameters": {
                    "epsilon": at_least(guarantee["epsilon"]["upper"]),
                    "delta": at_least(guarantee["delta"]["upper"]),
                },
                "privacy_parameters_description": _parameters(guarantee),
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
    """The entry as a file for the registry, with instructions at its top."""
    yaml = YAML()
    yaml.width = 100
    output = io.StringIO()
    output.write(f"# Complete every field that says {UNKNOWN}, then submit it to the registry.\n")
    yaml.dump(_quoted(dict(entry)), output)
    return output.getvalue().encode("utf-8")


def at_least(text: str) -> float:
    """The least floating-point number that is not below a decimal.

    >>> at_least("7.99"), at_least("0.30000000000000001")
    (7.99, 0.30000000000000004)
    """
    number = float(text)
    return number if Decimal(repr(number)) >= Decimal(text) else math.nextafter(number, math.inf)


def _parameters(guarantee: Mapping[str, Any]) -> str:
    confidence = guarantee.get("confidence")
    chance = "" if confidence is None else f" It holds with confidence {confidence}."
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
    """Strings in double quotes, so that no date or name is read as another type."""
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, list):
        return [_quoted(member) for member in value]
    if isinstance(value, dict):
        return {key: _quoted(member) for key, member in value.items()}
    return value
