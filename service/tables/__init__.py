"""The schema: tables without behaviour."""
