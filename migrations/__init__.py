"""Alembic migrations, which alone create and change the schema."""
