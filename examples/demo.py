"""Certify the DP-Muon plans over HTTP, and verify one certificate offline.

Starts the service on SQLite (in ``$AFFIDAVIT_HOME``), submits three plans of this folder, prints
the noise that they need and their ε, downloads one certificate, verifies its bundle offline, and
stops the service.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from affidavit.accountants import decimal_up
from affidavit.trust import home

EXAMPLES = Path(__file__).resolve().parent
HOME = home()
AFFIDAVIT = (sys.executable, "-m", "affidavit")
START_SECONDS = 60.0
# None is needed until the first one is made in this home.
GIVEN = os.environ.get("AFFIDAVIT_TOKEN")
TOKEN = {"authorization": f"Bearer {GIVEN}"} if GIVEN else {}
PLANS = {
    "e2e-dp-muon-corrected.yaml": "σ left out, uniform over blocks",
    "e2e-dp-muon-optimal.yaml": "σ left out, least total noise",
    "e2e-dp-muon-published.yaml": "σ = 2.3395, as published",
}

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demonstration; 0 when everything came out as it must."""
    os.environ["AFFIDAVIT_HOME"] = str(HOME)
    if not list((HOME / "keys").glob("*.pem")):
        run("keys", "new", "--label", "demo")
    run("migrate")
    with service() as base:
        results = {name: submit(base, name) for name in PLANS}
        show(results)
        published = results["e2e-dp-muon-published.yaml"]
        verified = fetch_and_verify(base, published)
    console.print(
        "\nThe service has stopped; [bold]make serve[/] starts it on the same data, "
        "with pages at http://127.0.0.1:8321/."
    )
    return 0 if published["verdict"] == "under_noised" and verified else 1


def run(*arguments: str) -> None:
    """One command of the command line, which must succeed."""
    subprocess.run([*AFFIDAVIT, *arguments], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def service() -> Iterator[str]:
    """The service on a free loopback port, stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = HOME / "demo-service.log"
    with log.open("wb") as stream:
        command = [*AFFIDAVIT, "serve", "--port", str(port)]
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    base = f"http://127.0.0.1:{port}"
    try:
        with console.status("starting the service"):
            wait_until_ready(base, process, log)
        yield base
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_ready(base: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the service is ready; stop with its log if it never is."""
    for _ in range(int(START_SECONDS / 0.1)):
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{base}/readyz").is_success:
                return
        time.sleep(0.1)
    raise SystemExit(f"the service did not start:\n{log.read_text()}")


def submit(base: str, name: str) -> dict[str, Any]:
    """POST one plan of this folder and return its result document."""
    with console.status(f"certifying {name}"):
        response = httpx.post(
            f"{base}/v1/certificates",
            content=(EXAMPLES / name).read_bytes(),
            headers={"content-type": "application/yaml", **TOKEN},
            timeout=120,
        )
    if response.status_code not in (200, 201):
        raise SystemExit(f"{name}: {response.status_code} {response.text}")
    new = "new" if response.status_code == 201 else "known"
    result: dict[str, Any] = response.json()
    console.print(f"POST {name}: {response.status_code} ({new}) {result['certificate']['id']}")
    return result


def show(results: dict[str, dict[str, Any]]) -> None:
    """The noise that is needed and the ε that is had, side by side."""
    for name, result in results.items():
        table = Table(
            title=f"\n{name}: {PLANS[name]}", title_justify="left", box=None, min_width=72
        )
        for heading in ("block", "count", "σ given", "σ required for ε = 8"):
            table.add_column(heading, justify="left" if heading == "block" else "right")
        for release in result["noise_multiplier"]["releases"]:
            provided = "" if release["given"] is None else f"{release['given']:g}"
            table.add_row(
                release["name"], str(release["count"]), provided, f"{release['required']:.7g}"
            )
        console.print(table)
        saving = (result["allocation"] or {}).get("saving")
        if saving:
            console.print(f"  {saving:.1%} less noise energy than uniform at the same ε")
        console.print(
            f"  [bold]{result['verdict']}[/]: ε ≤ {decimal_up(result['epsilon']['upper'], 6)} at "
            f"δ = {decimal_up(result['delta']['upper'], 6)}, "
            f"target ε = {result['target']['epsilon']:g}"
        )
        for reason in result["reasons"]:
            console.print(f"  {reason['code']}: {reason['message']} {reason['remedy']}")


def fetch_and_verify(base: str, result: dict[str, Any]) -> bool:
    """Fetch a bundle back and verify it with the command line, without the service."""
    identifier = result["certificate"]["id"]
    response = httpx.get(f"{base}/v1/certificates/{identifier}/bundle", headers=TOKEN)
    response.raise_for_status()
    bundle = HOME / "demo-bundle.json"
    bundle.write_bytes(response.content)
    console.print(f"\nGET …/bundle: {len(response.content)} bytes; verifying offline:")
    plan = EXAMPLES / "e2e-dp-muon-published.yaml"
    command = [*AFFIDAVIT, "verify", str(bundle), "--plan", str(plan)]
    # Exit code 1 here is right: the bundle verifies, and what it certifies is a refusal.
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    console.print(finished.stdout.rstrip(), markup=False)
    return "the certificate verifies" in finished.stdout


if __name__ == "__main__":
    raise SystemExit(main())
