"""Alembic's script around the migrations; it uses the connection that the caller has opened."""

from __future__ import annotations

from alembic import context

from neurons.validator_api.database.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=False,  # the caller has a transaction for all migrations
)
context.run_migrations()
