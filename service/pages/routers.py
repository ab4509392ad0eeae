"""The pages, one file each; a new one is a file and a line here."""

from __future__ import annotations

from affidavit.service.pages import (
    approvals,
    audit,
    certificate,
    certificates,
    compare,
    datasets,
    keys,
    new_plan,
    overview,
    policies,
    runs,
    sign_in,
    sign_in_provider,
    static_files,
    tokens,
    waivers,
)

PAGES = (
    static_files.router,
    sign_in.router,
    sign_in_provider.router,
    overview.router,
    audit.router,
    tokens.router,
    keys.router,
    approvals.router,
    certificates.router,
    certificate.router,
    compare.router,
    datasets.router,
    new_plan.router,
    policies.router,
    runs.router,
    waivers.router,
)
