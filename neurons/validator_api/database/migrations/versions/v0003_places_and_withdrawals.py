"""Frozen places of completed rounds, withdrawn submissions, verdicts' reasons, nonces.

The changes of version 0.2.0 to a database of version 0.1.0. Revision ID: 0003
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0001"

MULTIPLIERS = (0.5, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0)
"""Multipliers of version 0.1.0, by the number of whole 100,000 tokens in the target length."""
SHARES = (0.60, 0.25, 0.10, 0.05)
WAITING = sa.text("validated_at IS NULL AND withdrawn_at IS NULL")


def upgrade() -> None:
    """Add columns and tables, freeze the rounds that are completed, and shorten the queue."""
    for column in (
        sa.Column("withdrawn_at", sa.DateTime()),
        sa.Column("commitment_version", sa.Integer()),
        sa.Column("verdict_reason", sa.String()),
        sa.Column("measured", sa.JSON()),
    ):
        op.add_column("submissions", column)
    op.create_index(
        "ix_submissions_open", "submissions", ["is_revealed", "validated_at", "withdrawn_at", "id"]
    )
    op.create_index(  # so that no query reads all submissions of a hotkey
        "ix_submissions_waiting",
        "submissions",
        ["miner_hotkey", "id"],
        postgresql_where=WAITING,
        sqlite_where=WAITING,
    )
    places = op.create_table(
        "places",
        sa.Column("round_id", sa.Integer(), sa.ForeignKey("rounds.id"), primary_key=True),
        sa.Column("submission_id", sa.Integer(), sa.ForeignKey("submissions.id"), primary_key=True),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("weighted_score", sa.Double(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("uid", sa.Integer()),
    )
    op.create_table(
        "used_nonces",
        sa.Column("hotkey", sa.String(), primary_key=True),
        sa.Column("nonce", sa.String(), primary_key=True),
        sa.Column("expires_at", sa.DateTime(), nullable=False, index=True),
    )
    connection = op.get_bind()
    connection.execute(
        sa.text("UPDATE submissions SET commitment_version = 1 WHERE commitment_hash IS NOT NULL")
    )
    connection.execute(
        sa.text(
            "UPDATE submissions SET withdrawn_at = created_at WHERE validated_at IS NULL AND "
            "EXISTS (SELECT 1 FROM submissions AS newer WHERE newer.id > submissions.id "
            "AND newer.miner_hotkey = submissions.miner_hotkey "
            "AND newer.target_sequence_length = submissions.target_sequence_length "
            "AND newer.is_revealed = submissions.is_revealed AND newer.validated_at IS NULL)"
        )
    )
    completed = connection.execute(
        sa.text("SELECT id, baseline_submission_id FROM rounds WHERE status = 'completed'")
    ).all()
    for round_id, baseline_id in completed:
        if rows := _places(connection, round_id, baseline_id):
            connection.execute(places.insert(), rows)


def _places(
    connection: sa.Connection, round_id: int, baseline_id: int | None
) -> list[dict[str, Any]]:
    """Return a completed round's ranking, by the rules of version 0.1.0."""
    submissions = connection.execute(
        sa.text(
            "SELECT s.id, s.miner_hotkey, s.tokens_per_sec, s.target_sequence_length, m.uid "
            "FROM submissions AS s JOIN miners AS m ON m.hotkey = s.miner_hotkey "
            "WHERE s.round_id = :round AND s.is_revealed AND s.validated_at IS NOT NULL "
            "AND s.score > 0 AND s.verification_passed IS NOT FALSE "
            "ORDER BY s.created_at, s.id"
        ),
        {"round": round_id},
    ).all()
    baseline = connection.execute(
        sa.text("SELECT tokens_per_sec, target_sequence_length FROM submissions WHERE id = :id"),
        {"id": baseline_id},
    ).one_or_none()
    floor = _weighted(*baseline) if baseline else 0.0
    scored = [
        (_weighted(speed, target), row, key, uid) for row, key, speed, target, uid in submissions
    ]
    hotkeys: list[str] = []
    rows = []
    for score, row, key, uid in sorted(scored, key=lambda one: -one[0]):
        if score <= floor:
            break
        best = key not in hotkeys
        rank = 1 + len([other for other in hotkeys if other != key])
        earns = best and len(hotkeys) < len(SHARES)
        rows.append(
            {
                "round_id": round_id,
                "submission_id": row,
                "rank": rank,
                "weighted_score": score,
                "weight": SHARES[len(hotkeys)] if earns else 0.0,
                "uid": uid,
            }
        )
        hotkeys += [key] if best else []
    return rows


def _weighted(speed: float | None, target: int) -> float:
    return (speed or 0.0) * MULTIPLIERS[min(target // 100_000, 10)]
