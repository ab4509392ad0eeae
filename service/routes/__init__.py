"""The routes, one file each; a new one is a file and a line here."""

from __future__ import annotations

from affidavit.service.routes import (
    bundle,
    certificate,
    certificates,
    curve,
    diagnoses,
    document,
    keys,
    keysets,
    livez,
    log_checkpoint,
    log_entries,
    log_proofs,
    mechanisms,
    metrics,
    policies,
    readyz,
    simulate,
    submit,
    waivers,
)

ROUTERS = (
    submit.router,
    certificates.router,
    certificate.router,
    bundle.router,
    curve.router,
    diagnoses.router,
    keys.router,
    keysets.router,
    mechanisms.router,
    log_checkpoint.router,
    log_proofs.router,
    log_entries.router,
    policies.router,
    simulate.router,
    waivers.router,
    livez.router,
    metrics.router,
    readyz.router,
    document.router,
)
