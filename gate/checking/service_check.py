"""Check a plan with the organisation's service: policy, waivers, approvals and revocation.

The plan is evaluated locally too, and numbers are never taken from the service. If the service
certifies a plan that is under-noised here, the result is undecided. If it refuses a plan that is
certified here, its reasons become findings, including the waived ones.

The policy decides whether an outage blocks (``on_outage``). Its last value is stored in a file per
server; the default is ``block``.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from affidavit.client import Client, Problem, Unreachable
from affidavit.gate.checking.finding import CheckResult, GateFinding
from affidavit.gate.checking.source import Source
from affidavit.gate.exit_codes import Exit
from affidavit.gate.service_commands import token_for
from affidavit.plan import Reason, as_document, digest_of
from affidavit.trust import write_atomically

TIMEOUT_SECONDS = 60.0
OUTAGE_ACTIONS = ("block", "warn")


class ServiceCheck:
    """Checks with the service at ``address``; its ``on_outage`` is stored in ``folder``, if any."""

    def __init__(self, address: str, folder: Path | None) -> None:
        self._client = Client(address, token=token_for(address), timeout=TIMEOUT_SECONDS)
        name = digest_of({"server": self._client.server}).removeprefix("sha256:")
        self._stored = None if folder is None else folder / "servers" / f"{name}.json"

    def apply(self, source: Source, local: CheckResult) -> CheckResult:
        """Combine the local result with the service's answer."""
        if local.result is None or local.exit is Exit.UNDECIDED:
            return local
        try:
            answer = self._client.submit(as_document(source.plan())).document
            self._store_on_outage(answer)
        except (Unreachable, Problem) as error:
            return self._unavailable(source, local, error)
        return _combine(source, local, answer)

    def _store_on_outage(self, answer: dict[str, Any]) -> None:
        policy = answer.get("policy")
        if policy is None or self._stored is None:
            return
        version = self._client.policy(policy["name"], policy["version"])
        on_outage = version.policy.root.get("on_outage")
        if on_outage in OUTAGE_ACTIONS:
            with suppress(OSError):  # an outage then blocks
                self._stored.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomically(self._stored, json.dumps({"on_outage": on_outage}).encode())

    def _on_outage(self) -> str:
        if self._stored is None:
            return "block"
        try:
            on_outage = str(json.loads(self._stored.read_bytes())["on_outage"])
        except (OSError, ValueError, KeyError, TypeError):
            return "block"
        return on_outage if on_outage in OUTAGE_ACTIONS else "block"

    def _unavailable(self, source: Source, local: CheckResult, error: Exception) -> CheckResult:
        blocks = self._on_outage() == "block"
        reason = Reason(
            code="server_unreachable",
            message=f"{error}. Policy, waivers and revocation were not checked.",
            remedy="Try again later."
            if blocks
            else "The policy allows checks to continue without the service.",
        )
        finding = GateFinding.of(source.file, reason, "error" if blocks else "warning")
        code = Exit.UNDECIDED if blocks and local.exit is Exit.CERTIFIED else local.exit
        return replace(local, exit=code, findings=(*local.findings, finding))


def _combine(source: Source, local: CheckResult, answer: dict[str, Any]) -> CheckResult:
    assert local.result is not None
    findings = list(local.findings)
    if answer.get("plan_digest") != local.result["plan_digest"]:
        findings.append(_finding(source, "other_plan", "the service returned a different plan."))
        return replace(local, exit=Exit.UNDECIDED, findings=tuple(findings))
    verdict, status = answer["verdict"], answer["certificate"]["status"]
    if local.exit is Exit.BLOCKED:
        if verdict == "certified":
            findings.append(
                _finding(source, "engines_disagree", "the service certifies this plan.")
            )
            return replace(local, exit=Exit.UNDECIDED, findings=tuple(findings))
        return local
    findings += [_waived_finding(source, reason) for reason in answer.get("waived", [])]
    if verdict == "certified" and status == "active":
        return replace(local, findings=tuple(findings))
    if verdict == "certified":
        message = f"its certificate is {str(status).replace('_', ' ')}."
        findings.append(_finding(source, str(status or "no_status"), message))
    findings += [_refusal_finding(source, reason) for reason in answer.get("reasons", [])]
    code = Exit.UNDECIDED if verdict == "undecided" else Exit.BLOCKED
    return replace(local, exit=code, findings=tuple(findings), headline=f"blocked: {verdict}")


def _finding(source: Source, code: str, message: str) -> GateFinding:
    remedy = "Ask the administrator of the service."
    reason = Reason(code=code, message=message, remedy=remedy)
    return GateFinding.of(source.file, reason)


def _refusal_finding(source: Source, reason: dict[str, Any]) -> GateFinding:
    located = Reason(
        code=str(reason.get("code", "refused")),
        pointer=str(reason.get("pointer", "")),
        message=str(reason.get("message", "")),
        remedy=str(reason.get("remedy", "")),
    )
    (placed,) = source.locate((located,))
    return GateFinding.of(source.file, placed)


def _waived_finding(source: Source, waived: dict[str, Any]) -> GateFinding:
    """Return the finding of a waived reason, for the reports."""
    return replace(_refusal_finding(source, waived), waiver=dict(waived.get("waiver", {})))
