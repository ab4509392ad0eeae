"""Certificates: submitting and previewing plans, decisions, and status."""
