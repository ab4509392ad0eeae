"""``/runs/ID/evidence.zip`` and ``/certificates/ID/evidence.zip``: evidence files to download."""

from __future__ import annotations

from fastapi import APIRouter, Response

from affidavit.evidence import write_evidence
from affidavit.service.runs.wire_models import RunId
from affidavit.service.web.dependencies import TheServices
from affidavit.service.web.pages.access import Auditor
from affidavit.service.web.pages.response import download, page
from affidavit.service.web.routing import CertificateId

router = APIRouter()
ZIP = "application/zip"


@page(router, "/runs/{run_id}/evidence.zip")
async def of_run(_: Auditor, services: TheServices, run_id: RunId) -> Response:
    """Download the evidence of a run with a browser session; the API returns the same bytes."""
    files = await services.evidence.of_run(run_id, services.clock.now())
    return download(write_evidence(files), ZIP, f"evidence-{run_id}.zip")


@page(router, "/certificates/{certificate_id}/evidence.zip")
async def of_certificate(
    _: Auditor, services: TheServices, certificate_id: CertificateId
) -> Response:
    """Download the evidence of a certificate's current issue."""
    files = await services.evidence.of_certificate(certificate_id, services.clock.now())
    return download(write_evidence(files), ZIP, f"evidence-{certificate_id[7:19]}.zip")
