"""Operation: logs, metrics, traces, readiness, and administration of the database."""
