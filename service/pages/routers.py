"""The routers of all pages; a new page is a file and a line here."""

from __future__ import annotations

from affidavit.service.pages import (
    approvals,
    audit,
    certificate,
    certificates,
    compare,
    dataset,
    datasets,
    keys,
    new_plan,
    overview,
    policies,
    policy_simulation,
    runs,
    search,
    sign_in,
    templating,
    tokens,
    waivers,
)

PAGES = (
    templating.router,
    sign_in.router,
    overview.router,
    audit.router,
    tokens.router,
    keys.router,
    approvals.router,
    certificates.router,
    certificate.router,
    compare.router,
    datasets.router,
    dataset.router,
    new_plan.router,
    policy_simulation.router,
    policies.router,
    runs.router,
    search.router,
    waivers.router,
)
