"""A small company in a served application: what its pages look like after some months.

``settle`` fills a site as people and workers would, over HTTP, so that nothing on a page
is there which could not come there: budgets that hold, are nearly spent and are
exhausted; plans that were certified, refused, under-noised, approved, rejected, revoked,
superseded and that wait; runs in every state; policies in versions; waivers that hold and
that do not. ``python -m tests.browser.sample_company`` serves one to look at until it is stopped.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from affidavit.evidence import check_conformance, sign_provenance
from affidavit.plan import load_json
from affidavit.service.operation.database_admin import upgrade
from affidavit.trust import (
    KeyStore,
    SigningKey,
    read_envelope,
)
from tests.browser.serving import Site, served, settings_in
from tests.support.polling import wait_until
from tests.support.run_records import Record, record_of

PLAN: dict[str, Any] = {
    "version": 1,
    "name": "ward-readmission",
    "dataset": {"name": "wards-2026", "size": 48_211},
    "adjacency": "add_remove",
    "sampling": {"scheme": "full_batch"},
    "steps": 500,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 60}],
    "target": {"epsilon": 8, "delta": 1e-6},
}
PEOPLE = {
    "submit": "dana",
    "approve": "priya",
    "audit": "omar",
    "admin": "ruth",
    "work": "gpu-7",
}
POLICIES: tuple[dict[str, Any], ...] = (
    {
        "schema_version": 1,
        "name": "clinical",
        "version": 1,
        "datasets": ["wards-2026", "imaging"],
        "epsilon_cap": 8,
        "approvals": 1,
    },
    {
        "schema_version": 1,
        "name": "clinical",
        "version": 2,
        "notes": "Agreed with the data protection officer on 2026-11-02.",
        "datasets": ["wards-2026", "imaging"],
        "epsilon_cap": 6,
        "delta_cap": 1e-5,
        "caps": {"imaging": {"epsilon": 2}},
        "approvals": 1,
        "valid_days": 20,
    },
    {
        "schema_version": 1,
        "name": "text-models",
        "version": 1,
        "datasets": ["support-mail"],
        "epsilon_cap": 0.5,
    },
)
BUDGETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("wards-2026", {"adjacency": "add_remove", "epsilon": 10, "delta": 1e-5}),
    ("clicks", {"adjacency": "add_remove", "epsilon": 40, "delta": 1e-3}),
    ("clicks", {"adjacency": "zero_out", "epsilon": 4, "delta": 1e-5}),
    ("digits", {"adjacency": "add_remove", "epsilon": 0.9, "delta": 1e-4}),
    ("panel", {"unit": "user", "adjacency": "add_remove", "epsilon": 3, "delta": 1e-6}),
)


class Worker:
    """A worker that only says what it did."""

    def __init__(self, site: Site, token: str | None = None) -> None:
        self.site = site
        self.token = token or site.token(PEOPLE["work"], "work")
        self.key = SigningKey.generate("worker")
        KeyStore(Path(site.settings.worker_keys)).save(self.key.public)

    def claim(self, queue: str = "default", worker: str = "w1") -> dict[str, Any]:
        path, requested = f"/v1/queues/{queue}/claims", {"worker": worker}
        result: dict[str, Any] = self.site.ask("POST", path, self.token, json=requested).json()
        return result

    def start(self, job: dict[str, Any]) -> None:
        self.say(job, "start", plan_digest=job["plan_digest"])

    def say(self, job: dict[str, Any], what: str, **body: Any) -> None:
        path = f"/v1/runs/{job['run']}/{what}"
        self.site.ask(
            "POST", path, self.token, json={"fence": job["fence"], "secret": job["secret"], **body}
        )

    def complete(self, job: dict[str, Any], steps: int, *, more: int = 0) -> None:
        """Report a run of so many steps, and ``more`` than it may have."""
        bundle = self.site.ask("GET", f"/v1/runs/{job['run']}/bundle", self.token).json()
        predicate = load_json(read_envelope(bundle["envelope"]).payload).data["predicate"]
        record = record_of(predicate, steps) if not more else Record(predicate)
        if more:
            for _ in range(steps + more):
                record.step()
            record.end()
        self.say(job, "record", part=1, lines=record.content)
        envelope = sign_provenance(
            self.key,
            check_conformance(record.content.encode(), record.predicate),
            **{name: job[name] for name in ("run", "fence", "data", "model")},
            worker="w1",
            weights="2" * 64,
            header={},
            began=datetime.now(UTC),
        )
        self.say(job, "complete", provenance=envelope)


@dataclass
class Company:
    """A site with its people's tokens, by scope, and what the pages of single things need."""

    site: Site
    tokens: dict[str, str]
    said: Callable[[str], str]
    certificates: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)

    def ask(self, who: str, path: str, body: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.site.ask("POST", path, self.tokens[who], json=body).json()
        return result

    def certify(self, label: str, **changes: Any) -> dict[str, Any]:
        plan = {**PLAN, **changes}
        # What takes longer than the request may wait is answered by the next one.
        while (result := self.ask("submit", "/v1/certificates", plan)["certificate"]) is None:
            time.sleep(0.5)
        self.certificates[label] = result["id"]
        return dict(result)

    def decide(self, found: dict[str, Any], **said: str) -> None:
        path = f"/v1/certificates/{found['id']}/approvals"
        self.ask("approve", path, {"envelope": found["envelope_digest"], **said})

    def run(self, label: str, certificate: str, **more: Any) -> str:
        requested = {
            "certificate": certificate,
            "data": "digits:part=train",
            "model": "mlp:32,seed=1",
            "output": f"runs/{label}",
        }
        created = str(self.ask("submit", "/v1/runs", {**requested, **more})["id"])
        self.runs[label] = created
        return created


def settle(site: Site, said: Callable[[str], str] = str) -> Company:
    """Fill ``site`` with everything; whatever people write freely passes through ``said``."""
    tokens = {scope: site.token(who, scope) for scope, who in PEOPLE.items()}
    company = Company(site, tokens, said)
    for policy in POLICIES:
        notes = said(policy.get("notes", "As agreed."))
        company.ask("admin", "/v1/policies", {**policy, "notes": notes})
    for dataset, budget in BUDGETS:
        reason = said("set for the year")
        company.ask("admin", f"/v1/ledgers/{dataset}/budget", {**budget, "reason": reason})
    _certificates(company)
    _waivers(company)
    _runs(company)
    site.ask(
        "POST",
        f"/v1/certificates/{company.certificates['revoked']}/revocation",
        company.tokens["approve"],
        json={
            "code": "plan_error",
            "reason": said("the data set had been joined with another"),
        },
    )
    _wait_for_the_log(company)
    return company


def _certificates(company: Company) -> None:
    first = company.certify("approved")
    company.decide(first, comment=company.said("The sampler was looked at."))
    company.certify(
        "waiting", steps=700, optimizer={"name": "dp_adam"}, notes=company.said("Adam in November.")
    )
    rejected = company.certify("rejected", name="ward-notes", steps=900)
    company.decide(
        rejected, decision="reject", comment=company.said("Notes name relatives; ask the board.")
    )
    digits = {"name": "digits", "size": 1437}
    small = [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}]
    for label, steps in (("digits", 10), ("digits-longer", 12), ("revoked", 14)):
        company.certify(
            label,
            name="digits-mlp",
            dataset=digits,
            steps=steps,
            releases=small,
            target={"epsilon": 8, "delta": 1e-5},
        )
    clicks = {"name": "clicks", "size": 240_000}
    company.certify("clicks", name="click-model", dataset=clicks, releases=small, steps=200)
    company.certify("zeroed", name="click-zeroed", dataset=clicks, adjacency="zero_out")
    company.certify("under-noised", name="click-greedy", dataset=clicks, steps=40_000)
    mail = {"name": "support-mail", "size": 88_000}
    company.certify("refused", name="mail-tagger", dataset=mail)
    company.certify(
        "no-theorem",
        name="click-shuffled",
        dataset=clicks,
        sampling={"scheme": "fixed_size", "lot_size": 512},
    )


def _waivers(company: Company) -> None:
    until = (datetime.now(UTC) + timedelta(days=60)).strftime("%Y-%m-%dT%H:%M:%SZ")
    waiver = {
        "rule": "policy_epsilon_cap",
        "policy": "text-models",
        "dataset": "support-mail",
        "owner": company.said("head-of-support"),
        "reason": company.said("The pilot ends in January; the cap is argued about in DP-118."),
        "expires_at": until,
    }
    company.ask("approve", "/v1/waivers", waiver)
    second = {**waiver, "rule": "policy_delta_cap", "reason": company.said("Asked for by mistake.")}
    created = company.ask("approve", "/v1/waivers", second)
    company.site.ask(
        "DELETE",
        f"/v1/waivers/{created['id']}",
        company.tokens["approve"],
        params={"reason": company.said("Nobody needs it.")},
    )


def _runs(company: Company) -> None:
    worker = Worker(company.site, company.tokens["work"])
    digits, clicks = company.certificates["digits"], company.certificates["clicks"]
    company.run("settled", digits)
    job = worker.claim()
    worker.start(job)
    worker.complete(job, 10)
    company.run("not-conformant", digits)
    job = worker.claim(worker="w2")
    worker.start(job)
    worker.complete(job, 10, more=1)
    company.run("died", clicks)
    job = worker.claim(worker="w2")
    worker.start(job)
    worker.say(job, "fail", code="trainer_died", message=company.said("killed: out of memory"))
    stopped = company.run("cancelled", clicks)
    company.ask(
        "submit", f"/v1/runs/{stopped}/cancel", {"reason": company.said("the wrong branch")}
    )
    company.run("running", clicks)
    job = worker.claim()
    worker.start(job)
    worker.say(job, "heartbeat", steps=120)
    company.run("claimed", clicks)
    worker.claim(worker="w2")
    company.run("queued", clicks, requirements={"gpus": 1, "memory": 16_000})
    company.run("other-queue", clicks, queue="nightly")


def _wait_for_the_log(company: Company) -> None:
    """Until everything is under a checkpoint, so that pages look alike each time."""
    site, token = company.site, company.tokens["audit"]
    wait_until(lambda: "none waiting" in site.ask("GET", "/audit", token).text, often=0.1)


def main() -> None:
    """Serve one until it is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.db"
        upgrade(f"sqlite:///{template}")
        home = Path(folder) / "site"
        home.mkdir()
        with served(settings_in(home, template)) as site:
            company = settle(site)
            print(site.url)  # noqa: T201
            for scope, token in company.tokens.items():
                print(f"{scope:8} {token}")  # noqa: T201
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
