"""Plans and certificates that these tests share."""

from tests.support.certificates import certificate, key, make_plan, plan

__all__ = ["certificate", "key", "make_plan", "plan"]
