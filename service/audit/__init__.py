"""The audit of the database against the log, and the watch that suspends writes.

Both know every table: ``entry_types`` says which log entry each row must have.
"""
