"""Signing in and out, with every browser."""

from __future__ import annotations

from typing import Any


def test_signing_in_and_out_with_a_token(visitor: Any, site: Any) -> None:
    token = site.token("priya", "submit", "approve", "audit", "admin")
    visitor.goto("/keys")
    assert visitor.page.url.endswith("/sign-in?next=%2Fkeys")
    visitor.look("sign-in")
    visitor.page.fill("input[name=token]", token[:-1] + "!")
    visitor.page.click("main button[type=submit]")
    assert "not one that this service knows" in visitor.text()
    visitor.look("sign-in-wrong")
    visitor.page.fill("input[name=token]", token)
    visitor.page.click("main button[type=submit]")
    assert "Signing keys" in visitor.text()
    visitor.look("keys")
    visitor.page.click("text=Sign out")
    assert "You have signed out." in visitor.text()
    visitor.goto("/keys")
    assert "/sign-in?next=%2Fkeys" in visitor.page.url


def test_an_unknown_page_is_not_found(visitor: Any, site: Any) -> None:
    visitor.sign_in(site.token("sam", "audit"), "/keys")
    visitor.goto("/nowhere")
    assert "not_found" in visitor.text()
    visitor.look("not-found")
