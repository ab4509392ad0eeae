"""``affidavit check``: discover plans, evaluate them, report findings and apply fixes."""
