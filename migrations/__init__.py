"""Alembic migrations: the only way a schema comes to be."""
