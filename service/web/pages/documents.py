"""The technical documentation of a certificate, which people complete and file.

``technical_documentation`` is a Markdown document whose parts follow Annex IV of
Regulation (EU) 2024/1689 where differential privacy has an answer: purpose, data, method,
guarantee, residual risk. The last two contain the items of NIST SP 800-226 with their marks. The
document proves nothing, and says how to verify the signed bundle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from affidavit.service.web.pages.certificate_view import (
    VERIFY,
    CertificateView,
    Item,
)
from affidavit.service.web.pages.text import (
    capitalized,
    escape_invisible,
    group_digits,
    release_name,
    round_down,
    round_up,
)

FILL_IN = "FILL IN"
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#+!|~-])")


def technical_documentation(view: CertificateView, now: datetime) -> str:
    """Return the technical documentation of ``view``, as of ``now``."""
    return "\n".join(_lines(view, now)) + "\n"


def _lines(view: CertificateView, now: datetime) -> Iterator[str]:
    certificate, predicate = view.certificate, view.predicate
    yield f"# Technical documentation: {_plain(certificate.name or 'unnamed plan')}"
    yield ""
    yield (
        f"Certificate `{certificate.id}`, issue {certificate.issue}, "
        f"as of {now:%Y-%m-%d %H:%M:%S} UTC."
    )
    if view.standing is not None:
        yield f"\n**Do not use: {_plain(view.standing)}**"
    if certificate.untrusted:
        yield "\n**Untrusted: signed with a development key.**"
    yield "\n## 1. Purpose\n"
    yield f"{FILL_IN}: what the model is for, who provides it, and whom it affects."
    yield "\n## 2. Data\n"
    dataset = predicate["plan"]["dataset"]
    yield f"- Data set: {_plain(certificate.dataset or 'not named')}"
    size = dataset.get("size")
    yield f"- Size: {group_digits(size) + ' records' if size else 'not in the plan'}"
    sharing = dataset.get("users_per_record")
    shared = f"; a record belongs to up to {sharing} users, which are public" if sharing else ""
    yield f"- Privacy unit: one {dataset['unit']}{shared}"
    yield f"- Origin, legal basis and preparation: {FILL_IN}"
    yield "\n## 3. Method\n"
    yield f"- Mechanism: {_plain(view.mechanism)}"
    for noise in predicate["noise_multiplier"]["releases"]:
        sigma = round_down(noise["given"], 7) or round_up(noise["required"]) or "not solved for"
        blocks = "1 block" if noise["count"] == 1 else f"{noise['count']} blocks"
        yield f"- Release {_plain(release_name(noise))}, {blocks}: noise multiplier {sigma}"
    yield f"- Plan: `{certificate.plan_digest}`"
    yield "\n```json"
    yield escape_invisible(view.plan_text).replace(
        "<", "\\u003c"
    )  # the same JSON, and never markup
    yield "```"
    yield "\n## 4. Guarantee\n"
    yield _plain(view.sentence)
    if (guarantee := predicate["guarantee"]) is not None:
        yield f"\nLower bound of ε, no guarantee: {round_down(guarantee['epsilon']['lower'])}."
    yield "\n### What the checks cover\n"
    for check in view.checks:
        yield f"- {capitalized(check.covers)}: {_plain(check.sentence)}"
    for reason in predicate["reasons"]:
        yield "\n- " + _plain(f"{reason['code']}: {reason['message']} {reason.get('remedy', '')}")
    yield from _items("Covered, by item of NIST SP 800-226", view, marks=("checked", "declared"))
    yield "\n### Approvals and runs\n"
    no_one = "no one yet" if certificate.approvals_required else "no approval required"
    yield f"- Approved by: {_plain(', '.join(view.approved_by) or no_one)}"
    yield from (
        f"- Run `{run.id}`, {run.state}: {run.steps.charged or 0} steps charged, record "
        f"`{run.record or 'none'}`, weights `{view.weights(run) or 'none'}`"
        for run in view.runs
    )
    yield "\n## 5. Residual risk\n"
    yield "ε bounds what one unit can change. It does not say that the data may be used."
    yield from (f"\n- {_plain(warning['message'])}" for warning in predicate["warnings"])
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
