"""The validator and device of each verdict, and the real end of rounds that ended early.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns; end each completed round no later than its successor began."""
    op.add_column("submissions", sa.Column("validator_hotkey", sa.String()))
    op.add_column("submissions", sa.Column("validator_device", sa.String()))
    following = "SELECT {} FROM rounds AS next WHERE next.round_number = rounds.round_number + 1"
    op.execute(
        f"UPDATE rounds SET end_time = ({following.format('next.start_time')}) "  # noqa: S608
        "WHERE status = 'completed' "
        f"AND EXISTS ({following.format('1')} AND next.start_time < rounds.end_time)"
    )
