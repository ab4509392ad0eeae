"""Why something cannot be done with a certificate as it stands."""

from __future__ import annotations


class Impossible(Exception):
    """``code`` is stable and part of the API; the text is for people.

    =========================  =======================================================
    ``anonymous_approver``     it is not known who decides
    ``own_request``            who asked for a certificate cannot decide about it
    ``anonymous_request``      it is not known who asked for this issue
    ``already_decided``        the same person has decided already
    ``other_envelope``         the current issue is not the one that was named
    ``not_awaiting_approval``  there is nothing to decide: it says how the issue stands
    ``still_valid``            the current issue need not be issued again
    ``rules_changed``          issued again, it would be another certificate
    =========================  =======================================================
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
