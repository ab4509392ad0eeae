"""The schema: tables without behaviour, one module for each part of the service.

A change of a table needs a file in ``affidavit.migrations``.
"""
