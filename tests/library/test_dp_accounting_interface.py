"""dp-accounting's own tests of accountants, run on ours."""

from __future__ import annotations

from collections.abc import Collection

from dp_accounting import NeighboringRelation, privacy_accountant_test

import affidavit


class TestOurs(privacy_accountant_test.PrivacyAccountantTest):  # type: ignore[misc]
    """Ours, under both relations that it takes."""

    def _make_test_accountants(self) -> Collection[affidavit.PrivacyAccountant]:
        relations = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL
        return [affidavit.PrivacyAccountant(relation) for relation in relations]
