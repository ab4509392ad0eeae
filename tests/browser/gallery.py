"""Screenshots of every page, for people to look at: ``python -m tests.browser.gallery``.

Serves a filled company, opens each page with a desktop window in light and dark and with a
phone, and writes the pictures and an ``index.html`` that shows them side by side to
``build/gallery``. Beside each stands the height of the page in screens.
Names of pages as arguments photograph these alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import sync_playwright

from affidavit.service.operation.database_admin import upgrade
from tests.browser.chromium import program
from tests.browser.sample_company import PEOPLE, Company, settle
from tests.browser.serving import served, settings_in

FOLDER = Path("build/gallery")
WINDOWS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 800}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 800}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}


def pages_of(company: Company) -> dict[str, str]:
    """A name for each page, and where it is."""
    certificates, runs = company.certificates, company.runs
    one = {
        f"certificate-{label}": f"/certificates/{certificates[label]}"
        for label in ("approved", "waiting", "under-noised", "refused", "revoked")
    }
    clicks, zeroed = certificates["clicks"], certificates["zeroed"]
    greedy, digits = certificates["under-noised"], certificates["digits"]
    return {
        "sign-in": "/sign-in",
        "overview": "/",
        "new-plan": "/plans/new",
        "new-plan-example": "/plans/new?example=federated",
        "certificates": "/certificates",
        **one,
        "compare": f"/compare?id={clicks}&id={greedy}",
        "compare-several": f"/compare?id={certificates['published']}&id={certificates['corrected']}"
        f"&id={clicks}",
        "compare-showcase": f"/compare?id={certificates['published']}"
        f"&id={certificates['corrected']}",
        "compare-unranked": f"/compare?id={clicks}&id={zeroed}",
        "search": "/search?q=c",
        "datasets": "/datasets",
        "dataset": "/datasets/clicks",
        "dataset-not-bounded": f"/datasets/digits?certificate={digits}",
        "dataset-empty": "/datasets/panel",
        "runs": "/runs",
        "run-new": f"/runs/new?certificate={digits}",
        **{f"run-{label}": f"/runs/{id_}" for label, id_ in runs.items()},
        "approvals": "/approvals",
        "approval": f"/approvals/{certificates['waiting']}",
        "approval-rejected": f"/approvals/{certificates['rejected']}",
        "policies": "/policies",
        "policy": "/policies/clinical/2",
        "waivers": "/waivers",
        "audit": "/audit?start=0&end=20",
        "tokens": "/tokens",
        "keys": "/keys",
    }


def photograph(browser: Any, url: str, token: str, pages: dict[str, str]) -> dict[str, float]:
    """A picture of each page in each window; returns heights in screens by picture name."""
    heights: dict[str, float] = {}
    for window, settings in WINDOWS.items():
        context = browser.new_context(reduced_motion="reduce", **settings)
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(f"{url}/sign-in")
        for name, path in pages.items():
            if name != "sign-in" and page.url.endswith("/sign-in"):
                page.fill("input[name=token]", token)
                page.click("main button[type=submit]")
            answer = page.goto(url + path)
            if answer.status >= 400:
                raise RuntimeError(f"{path} answered {answer.status}")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=str(FOLDER / f"{name}-{window}.png"), full_page=True)
            pixels = page.evaluate("document.documentElement.scrollHeight")
            heights[f"{name}-{window}"] = pixels / settings["viewport"]["height"]
        context.close()
    return heights


def index(pages: dict[str, str], heights: dict[str, float]) -> str:
    """The page that shows all pictures."""
    rows = []
    for name in pages:
        pictures = "".join(
            f'<figure><a href="{name}-{window}.png"><img loading="lazy" src="{name}-{window}.png" '
            f'alt="{escape(name)}, {window}"></a>'
            f"<figcaption>{window}, {heights[f'{name}-{window}']:.1f} screens</figcaption></figure>"
            for window in WINDOWS
        )
        rows.append(f'<h2 id="{name}">{escape(name)}</h2><div>{pictures}</div>')
    style = (
        "body{font-family:sans-serif;margin:2rem}div{display:flex;gap:1rem;align-items:start}"
        "figure{margin:0;flex:3}figure:last-child{flex:1}img{width:100%;border:1px solid #999}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Pages</title>'
        f"<style>{style}</style><h1>Pages</h1>{''.join(rows)}</html>\n"
    )


def main() -> None:
    """Write the gallery."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    installed = program()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        template, home = Path(folder) / "template.db", Path(folder) / "site"
        upgrade(f"sqlite:///{template}")
        home.mkdir()
        browser = playwright.chromium.launch(
            executable_path=installed.path,
            env={**os.environ, **installed.environment},
            args=["--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb"],
        )
        with served(settings_in(home, template)) as site:
            company = settle(site)
            for label in ("published", "corrected"):
                plan = yaml.safe_load(Path(f"examples/e2e-dp-muon-{label}.yaml").read_text())
                company.certify(label, **plan)
            pages = pages_of(company)
            pages = {name: pages[name] for name in sys.argv[1:] or pages}
            heights = photograph(browser, site.url, site.token("ines", *PEOPLE), pages)
        browser.close()
    (FOLDER / "index.html").write_text(index(pages, heights))
    sys.stdout.write(f"{len(heights)} pictures: {FOLDER / 'index.html'}\n")


if __name__ == "__main__":
    main()
