"""Documents of a certificate that people complete and file.

``registry_entry`` is an entry for the OpenDP deployments registry, as YAML. It contains what the
certificate proves; fields that it cannot know, such as publisher and purpose, are ``FILL IN``, and
the status is ``Draft``. The ε is never below the certified upper bound. The fields follow
``schemas/deployments-schema.yaml`` in opendp/deployments-registry-data at ``REVISION``.

``technical_documentation`` is a Markdown document whose parts follow Annex IV of
Regulation (EU) 2024/1689 where differential privacy has an answer: purpose, data, method,
guarantee, residual risk. The last two contain the items of NIST SP 800-226 with their marks. The
document proves nothing, and says how to verify the signed bundle.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from affidavit.service.web.pages.certificate_view import (
    VERIFY,
    CertificateView,
    Item,
)
from affidavit.service.web.pages.text import (
    capitalized,
    escape_invisible,
    group_digits,
)

# ---- the deployments registry --------------------------------------------------------

REVISION = "c1d3d30939608c9a448d6bec5bdcbd35d5facfea"
FILL_IN = "FILL IN"
METRICS = {
    "add_remove": "one {unit} added or removed",
    "replace_one": "one {unit} replaced by any other",
    "zero_out": "one {unit} replaced by one that contributes nothing",
}


def registry_entry(
    predicate: Mapping[str, Any], *, published: datetime, certificate: str
) -> dict[str, Any]:
    """Return the entry of a certified model; ``certificate`` is an id."""
    plan, guarantee = predicate["plan"], predicate["guarantee"]
    name = plan.get("name") or plan["dataset"].get("name") or "model"
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model",
        "status": "Draft",
        "tier": 2,
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": [f"{FILL_IN}: who publishes it"],
                "description": "A model trained with differential privacy on the data set "
                f"{plan['dataset'].get('name') or 'of the plan'}.",
                "intended_use": f"{FILL_IN}: intended use",
                "data_product_type": "Machine learning model",
                "data_product_region": f"{FILL_IN}: whose data and whose law",
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
                "preprocessing_and_hyperparameter_tuning": f"{FILL_IN}: and whether it was counted",
                "mechanisms": _mechanisms(predicate),
                "justification": f"{FILL_IN}: why these parameters",
            },
            "administrative": {
                "sources": f"Affidavit certificate {certificate}",
                "registry_authors": [predicate["requester"]],
            },
        },
    }


def as_yaml(entry: Mapping[str, Any]) -> bytes:
    """Return an entry as a YAML file that begins with instructions."""
    yaml = YAML()
    yaml.width = 100
    output = io.StringIO()
    output.write(f"# Complete every field that says {FILL_IN}, then submit it to the registry.\n")
    yaml.dump(_quoted(dict(entry)), output)
    return output.getvalue().encode("utf-8")


def at_least(text: str) -> float:
    """Return the smallest float that is not below a decimal.

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
    """Double-quote strings, so that no date or name is read as another type."""
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, list):
        return [_quoted(member) for member in value]
    if isinstance(value, dict):
        return {key: _quoted(member) for key, member in value.items()}
    return value


# ---- technical documentation ---------------------------------------------------------

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#+!|~-])")


def technical_documentation(view: CertificateView, now: datetime) -> str:
    """Return the technical documentation of ``view``, as of ``now``."""
    return "\n".join(_lines(view, now)) + "\n"


def _lines(view: CertificateView, now: datetime) -> Iterator[str]:
    yield f"# Technical documentation: {_plain(view.name or 'unnamed plan')}"
    yield ""
    yield f"Certificate `{view.id}`, issue {view.issue}, as of {now:%Y-%m-%d %H:%M:%S} UTC."
    if view.standing is not None:
        yield f"\n**Do not use: {_plain(view.standing)}**"
    if view.untrusted:
        yield "\n**Untrusted: signed with a development key.**"
    yield "\n## 1. Purpose\n"
    yield f"{FILL_IN}: what the model is for, who provides it, and whom it affects."
    yield "\n## 2. Data\n"
    dataset = view.plan["dataset"]
    yield f"- Data set: {_plain(view.dataset or 'not named')}"
    size = dataset.get("size")
    yield f"- Size: {group_digits(size) + ' records' if size else 'not in the plan'}"
    yield f"- Privacy unit: one {dataset['unit']}"
    yield f"- Origin, legal basis and preparation: {FILL_IN}"
    yield "\n## 3. Method\n"
    yield f"- Mechanism: {_plain(view.mechanism)}"
    for noise in view.noise:
        sigma = noise.given or noise.required or "not solved for"
        blocks = "1 block" if noise.blocks == 1 else f"{noise.blocks} blocks"
        yield f"- Release {_plain(noise.release)}, {blocks}: noise multiplier {sigma}"
    yield f"- Plan: `{view.plan_digest}`"
    yield "\n```json"
    yield escape_invisible(view.plan_text).replace(
        "<", "\\u003c"
    )  # the same JSON, and never markup
    yield "```"
    yield "\n## 4. Guarantee\n"
    yield _plain(view.sentence)
    if view.guarantee is not None:
        yield f"\nLower bound of ε, no guarantee: {view.guarantee.epsilon_at_least}."
    yield "\n### What the checks cover\n"
    for check in view.checks:
        yield f"- {capitalized(check.covers)}: {_plain(check.sentence)}"
    for reason in view.reasons:
        yield "\n- " + _plain("{code}: {message} {remedy}".format_map(reason))
    yield from _items("Covered, by item of NIST SP 800-226", view, marks=("checked", "declared"))
    yield "\n### Approvals and runs\n"
    no_one = "no one yet" if view.approvals_required else "no approval required"
    yield f"- Approved by: {_plain(', '.join(view.approved_by) or no_one)}"
    yield from (
        f"- Run `{run.id}`, {run.state}: {run.steps or 0} steps charged, record "
        f"`{run.record or 'none'}`, weights `{run.weights or 'none'}`"
        for run in view.runs
    )
    yield "\n## 5. Residual risk\n"
    yield "ε bounds what one unit can change. It does not say that the data may be used."
    yield from (f"\n- {_plain(warning['message'])}" for warning in view.warnings)
    yield from _items("Open, by item of NIST SP 800-226", view, marks=("open",))
    yield "\n## Verification\n"
    yield "This document is not a proof. Verify the signed bundle with keys that you trust:\n"
    yield f"```sh\n{VERIFY}\n```"


def _items(title: str, view: CertificateView, marks: tuple[str, ...]) -> Iterator[str]:
    """Yield the items of the checklist with one of ``marks``."""
    items: list[Item] = [item for item in view.checklist if item.mark in marks]
    if items:
        yield f"\n### {title}\n"
    for item in items:
        yield f"- **{item.topic}** ({item.mark}, {item.by}). " + _plain(
            f"{item.question} {item.answer}"
        )


def _plain(text: str) -> str:
    r"""Return a text in one line with Markdown's special characters escaped.

    >>> _plain("a *b*\n# c")
    'a \\*b\\* \\# c'
    """
    return _SPECIAL.sub(r"\\\1", " ".join(escape_invisible(text).split()))
