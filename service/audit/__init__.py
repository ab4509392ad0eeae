"""The audit of the database against the log, which knows every table."""
