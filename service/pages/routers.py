"""The pages, one file each; a new one is a file and a line here."""

from __future__ import annotations

from affidavit.service.pages import (
    approvals,
    compare,
    datasets,
    keys,
    new_plan,
    policies,
    runs,
    sign_in,
    static_files,
    waivers,
)

PAGES = (
    static_files.router,
    sign_in.router,
    keys.router,
    approvals.router,
    compare.router,
    datasets.router,
    new_plan.router,
    policies.router,
    runs.router,
    waivers.router,
)
