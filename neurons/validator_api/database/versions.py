"""Migrates a database of any earlier version to the current one with Alembic."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import inspect
from sqlalchemy.engine import Connection

from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.observe import get_logger

MIGRATIONS = Path(__file__).with_name("migrations")
BEFORE_ALEMBIC = "0001"
"""The version of a database that has the tables but no table `alembic_version`."""

log = get_logger("validator_api")


def bring_up_to_date(connection: Connection, url: str) -> None:
    """Migrate the database in the open transaction of `connection`.

    Raises a ConfigError, which names the `url`, for a version that this program does not know.
    """
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    tables = set(inspect(connection).get_table_names())
    try:
        if "submissions" in tables and "alembic_version" not in tables:
            log.info("taking over the database of an earlier version", database=url)
            command.stamp(config, BEFORE_ALEMBIC)
        command.upgrade(config, "head")
    except CommandError as error:
        raise ConfigError(
            Problem(
                f"DATABASE_URL={url} cannot be brought to this program's version ({error}).",
                "Run the newest program on it, or put back the copy from before the update.",
            )
        ) from error
