"""The parts of ``affidavit check``: discovery, evaluation, findings, fixes and reports."""
