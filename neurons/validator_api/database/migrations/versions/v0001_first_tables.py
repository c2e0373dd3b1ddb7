"""The tables of version 0.1.0, which created them without Alembic.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "miners",
        sa.Column("hotkey", sa.String(), primary_key=True),
        sa.Column("uid", sa.Integer(), nullable=False, unique=True),
        sa.Column("registered_at", sa.DateTime(), nullable=False),
    )
    op.create_table(
        "league_entries",
        sa.Column("hotkey", sa.String(), sa.ForeignKey("miners.hotkey"), primary_key=True),
        sa.Column("model_name", sa.String(), primary_key=True),
        sa.Column("league", sa.String(), primary_key=True),
        sa.Column("registered_at", sa.DateTime(), nullable=False),
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("round_number", sa.Integer(), nullable=False, unique=True),
        sa.Column("start_time", sa.DateTime(), nullable=False),
        sa.Column("end_time", sa.DateTime(), nullable=False),
        sa.Column("status", sa.String(), nullable=False, index=True),
        sa.Column("baseline_submission_id", sa.Integer()),
        sa.Column("winner_submission_id", sa.Integer()),
        sa.Column("winner_hotkey", sa.String()),
    )
    op.create_table(
        "submissions",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column(
            "miner_hotkey", sa.String(), sa.ForeignKey("miners.hotkey"), nullable=False, index=True
        ),
        sa.Column("round_id", sa.Integer(), sa.ForeignKey("rounds.id"), nullable=False, index=True),
        sa.Column("target_sequence_length", sa.Integer(), nullable=False),
        sa.Column("signature", sa.String(), nullable=False),
        sa.Column("ip_address", sa.String()),
        sa.Column("created_at", sa.DateTime(), nullable=False, index=True),
        sa.Column("commitment_hash", sa.String(), unique=True),
        sa.Column("commitment_salt", sa.String()),
        sa.Column("reveal_block", sa.BigInteger()),
        sa.Column("is_revealed", sa.Boolean(), nullable=False),
        sa.Column("fork_url", sa.String()),
        sa.Column("commit_hash", sa.String()),
        sa.Column("repo_hash", sa.String()),
        sa.Column("docker_image", sa.String()),
        sa.Column("tokens_per_sec", sa.Double()),
        sa.Column("vram_mb", sa.Double()),
        sa.Column("benchmarks", sa.JSON()),
        sa.Column("validated_at", sa.DateTime(), index=True),
        sa.Column("score", sa.Double()),
        sa.Column("verification_passed", sa.Boolean()),
        sa.Column("cosine_similarity", sa.Double()),
        sa.Column("max_abs_diff", sa.Double()),
        sa.Column("throughput_verified", sa.Double()),
        sa.Column("verification_reason", sa.String()),
    )
    op.create_table(
        "ip_bans",
        sa.Column("ip_address", sa.String(), primary_key=True),
        sa.Column("failure_count", sa.Integer(), nullable=False),
        sa.Column("banned_until", sa.DateTime()),
    )
