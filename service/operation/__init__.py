"""What operators see and do: logs, metrics, traces, roles of the database, backups."""
