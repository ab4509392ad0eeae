"""What the organisation's service says of a plan: its policy, waivers, approvals, revocation.

The plan is judged here too. Numbers are never taken from the service: where it calls certified
what is under-noised here, the two contradict each other and nothing is decided. Where it
refuses what is certified here, its reasons stand among the findings, and what it waived stays
visible.

Whether an outage blocks is the policy's own word (``on_outage``). It is remembered from the
service's last answer, a file a server, and is ``block`` until the service was ever reached.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from affidavit.certificate import write_atomically
from affidavit.gate.checking.finding import Finding
from affidavit.gate.checking.source import Source
from affidavit.gate.checking.verdict import Judged
from affidavit.gate.exits import Exit
from affidavit.gate.service_client import authorization
from affidavit.plan import Reason, as_document, digest_of

SECONDS = 60.0
WORDS = ("block", "warn")
USABLE = "active"


class Unreachable(Exception):
    """The service gave no answer that decides anything."""


class Server:
    """The service at ``address``; what it last said of outages is kept in ``folder``."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address.rstrip("/")
        name = digest_of({"server": self.address}).removeprefix("sha256:")
        self._remembered = folder / "servers" / f"{name}.json"
        self._headers = authorization()

    def judge(self, source: Source, here: Judged) -> Judged:
        """``here``, what was judged on this machine, with what the service says."""
        if here.result is None or here.exit is Exit.UNDECIDED:
            return here
        try:
            said = self._ask("POST", "/v1/certificates", as_document(source.plan()))
            self._remember(said)
        except Unreachable as error:
            return self._unreached(source, here, error)
        return _together(source, here, said)

    def _ask(self, method: str, path: str, document: Any = None) -> dict[str, Any]:
        body: dict[str, Any] = {} if document is None else {"json": document}
        try:
            answer = httpx.request(
                method, f"{self.address}{path}", headers=self._headers, timeout=SECONDS, **body
            )
            found = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unreachable(f"{self.address} did not answer: {error}") from None
        if not isinstance(found, dict):
            raise Unreachable(f"{self.address} did not answer as a service does")
        if not answer.is_success:
            told = f"{found.get('code', answer.status_code)}: {found.get('detail', '')}"
            raise Unreachable(f"{self.address} refused to answer: {told}")
        return found

    def _remember(self, said: dict[str, Any]) -> None:
        policy = said.get("policy")
        if not isinstance(policy, dict):
            return
        found = self._ask("GET", f"/v1/policies/{policy['name']}/{policy['version']}")
        word = found.get("policy", {}).get("on_outage")
        if word in WORDS:
            self._remembered.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._remembered, json.dumps({"on_outage": word}).encode())

    def _on_outage(self) -> str:
        try:
            word = json.loads(self._remembered.read_bytes())["on_outage"]
        except (OSError, ValueError, KeyError, TypeError):
            return "block"
        return word if word in WORDS else "block"

    def _unreached(self, source: Source, here: Judged, error: Unreachable) -> Judged:
        blocks = self._on_outage() == "block"
        told = Reason(
            code="server_unreachable",
            pointer="",
            message=f"{error}. Policy, waivers and revocation were not looked at.",
            remedy="Try again when it answers."
            if blocks
            else "The policy lets the gate go on without it.",
        )
        finding = Finding.of(source.file, told, "error" if blocks else "warning")
        worse = Exit.UNDECIDED if blocks and here.exit is Exit.CERTIFIED else here.exit
        return replace(here, exit=worse, findings=(*here.findings, finding))


def _together(source: Source, here: Judged, said: dict[str, Any]) -> Judged:
    assert here.result is not None
    findings = list(here.findings)
    if said.get("plan_digest") != here.result["plan_digest"]:
        findings.append(_finding(source, "other_plan", "the service answered about another plan."))
        return replace(here, exit=Exit.UNDECIDED, findings=tuple(findings))
    verdict, status = said.get("verdict"), said.get("certificate", {}).get("status")
    if here.exit is Exit.BLOCKED:
        if verdict == "certified":
            findings.append(
                _finding(source, "engines_disagree", "the service certifies this plan.")
            )
            return replace(here, exit=Exit.UNDECIDED, findings=tuple(findings))
        return here
    findings += [_waived(source, item) for item in said.get("waived", [])]
    if verdict == "certified" and status == USABLE:
        return replace(here, findings=tuple(findings))
    if verdict == "certified":
        message = f"its certificate is {str(status).replace('_', ' ')}."
        findings.append(_finding(source, str(status or "no_status"), message))
    findings += [_refused(source, entry) for entry in said.get("reasons", [])]
    worse = Exit.UNDECIDED if verdict == "undecided" else Exit.BLOCKED
    return replace(here, exit=worse, findings=tuple(findings), headline=f"blocked: {verdict}")


def _finding(source: Source, code: str, message: str) -> Finding:
    remedy = "Ask whoever keeps the service."
    reason = Reason(code=code, pointer="", message=message, remedy=remedy)
    return Finding.of(source.file, reason)


def _refused(source: Source, reason: dict[str, Any]) -> Finding:
    own = Reason(
        code=str(reason.get("code", "refused")),
        pointer=str(reason.get("pointer", "")),
        message=str(reason.get("message", "")),
        remedy=str(reason.get("remedy", "")),
    )
    (placed,) = source.locate((own,))
    return Finding.of(source.file, placed)


def _waived(source: Source, waived: dict[str, Any]) -> Finding:
    """A reason that somebody answers for; it stays in every report."""
    return replace(_refused(source, waived), waiver=dict(waived.get("waiver", {})))
