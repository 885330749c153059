"""Alembic's entry point: it only ever migrates the connection that it is given."""

from alembic import context

from rackloom.carve.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    compare_type=True,
)
context.run_migrations()
