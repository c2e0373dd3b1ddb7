"""Each round's ranking rule, which was `claim` before, and the time of a reveal.

Revision ID: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    rule = sa.Column("ranking", sa.String(), nullable=False, server_default="claim")
    op.add_column("rounds", rule)
    op.add_column("submissions", sa.Column("revealed_at", sa.DateTime()))
