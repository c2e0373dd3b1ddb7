"""An index of each hotkey's submissions without a verdict.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

WAITING = sa.text("validated_at IS NULL AND withdrawn_at IS NULL")


def upgrade() -> None:
    """Create the index, so that no query reads all submissions of a hotkey."""
    op.create_index(
        "ix_submissions_waiting",
        "submissions",
        ["miner_hotkey", "id"],
        postgresql_where=WAITING,
        sqlite_where=WAITING,
    )
