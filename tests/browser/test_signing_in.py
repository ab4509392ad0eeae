"""Signing in and out, with every browser."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.soak


def test_signing_in_and_out_with_a_token(visitor: Any, site: Any) -> None:
    token = site.token("priya", "submit", "approve", "audit", "admin")
    visitor.goto("/keys")
    visitor.page.wait_for_url("**/sign-in?next=%2Fkeys")
    visitor.look("sign-in")
    visitor.page.fill("input[name=token]", token[:-1] + "!")
    visitor.page.click("main button[type=submit]")
    visitor.sees("service does not know the token")
    visitor.look("sign-in-wrong")
    visitor.page.fill("input[name=token]", token)
    visitor.page.click("main button[type=submit]")
    visitor.sees("Signing keys")
    visitor.look("keys")
    visitor.page.click("text=Sign out")
    visitor.sees("You have signed out.")
    visitor.goto("/keys")
    visitor.page.wait_for_url("**/sign-in?next=%2Fkeys")


def test_an_unknown_page_is_not_found(visitor: Any, site: Any) -> None:
    visitor.sign_in(site.token("sam", "audit"), "/keys")
    visitor.goto("/nowhere")
    visitor.sees("not_found")
    visitor.look("not-found")
