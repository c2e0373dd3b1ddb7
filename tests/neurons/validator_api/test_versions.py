"""Migrations: a new database has the program's tables, and one of version 0.1.0 is taken over."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import Session

from neurons.runtime.errors import ConfigError
from neurons.runtime.settings import Settings
from neurons.validator_api.competition import lists, ranking, rounds
from neurons.validator_api.competition.rounds import Transaction
from neurons.validator_api.database.storage import Storage
from neurons.validator_api.database.tables import Base, IpBan, Round, Submission
from neurons.wire.protocol import CreateRoundRequest
from tests import postgresql
from tests.postgresql import on_both

pytestmark = on_both

VERSION_0_1_0 = Path(__file__).with_name("version_0_1_0.sql")
POSTGRESQL = {"\tid INTEGER": "\tid SERIAL", "DATETIME": "TIMESTAMP", "DOUBLE": "DOUBLE PRECISION"}
"""Replacements for SQLite's types."""


def transaction(session: Session) -> Transaction:
    settings = Settings(reveal_window_blocks=1000)
    return Transaction(session, datetime(2026, 11, 4), 15_000_000, settings)  # noqa: DTZ001


@pytest.fixture
def old_url(database_url: str, request: pytest.FixtureRequest) -> str:
    """The URL of a database that version 0.1.0 has used."""
    script = VERSION_0_1_0.read_text()
    if database_url.startswith("sqlite"):
        with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"))) as connection:
            connection.executescript(script)
    else:
        for of_sqlite, of_postgresql in POSTGRESQL.items():
            script = script.replace(of_sqlite, of_postgresql)
        script += "SELECT setval('rounds_id_seq', 2), setval('submissions_id_seq', 8);"
        server: postgresql.Server = request.getfixturevalue("server")
        server.run_script(database_url, script)
    return database_url


def differences(url: str) -> list[object]:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    engine.dispose()
    return found


def test_the_migrations_make_the_tables_of_the_program(database_url: str) -> None:
    Storage(database_url).close()
    Storage(database_url).close()  # and leave alone what is up to date
    assert differences(database_url) == []


def test_a_database_of_version_0_1_0_is_taken_over_with_its_content(old_url: str) -> None:
    assert differences(old_url) != []
    storage = Storage(old_url)
    assert differences(old_url) == []
    with storage.read() as session:
        t = transaction(session)
        first, second = session.scalars(select(Round).order_by(Round.id)).all()
        frozen = [(p.submission.id, p.rank, p.weight) for p in ranking.of_round(session, first)]
        # 5 and 2 score the same, 150 weighted: the earlier one leads; 4 was refuted.
        assert frozen == [(2, 1, 0.60), (5, 2, 0.25), (3, 3, 0.10), (1, 3, 0.0)]
        assert [row.id for row in lists.validation_queue(t, 0, 9).submissions] == [7]
        (open_one,) = lists.pending_reveals(t, None, None, 9).pending_reveals
        assert (open_one.submission_id, second.baseline_submission_id) == (8, 2)
        assert session.get_one(Submission, 8).commitment_version == 1
        assert session.get_one(IpBan, "203.0.113.9").failure_count == 2
        assert [first.ranking, second.ranking] == ["claim", "claim"]
        assert session.get_one(Submission, 1).benchmarks == {"512": {"tokens_per_sec": 5.0}}
    with storage.write() as session:
        added = rounds.create(transaction(session), CreateRoundRequest())
        assert added.round_number == 3  # numbers go on behind those of the old rows
        assert added.ranking == "claim"
    storage.close()


def test_an_early_end_is_corrected_by_the_start_of_the_next_round(old_url: str) -> None:
    engine = create_engine(old_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        times = connection.execute(text("SELECT end_time FROM rounds ORDER BY id")).all()
        early = "UPDATE rounds SET start_time = '2026-10-01 00:00:00' WHERE round_number = 2"
        late = "UPDATE rounds SET end_time = '2026-10-02 00:00:00' WHERE round_number = 1"
        connection.execute(text(early))
        connection.execute(text(late))
    engine.dispose()
    assert len(times) == 2
    with closing(Storage(old_url)) as storage, storage.read() as session:
        first, second = session.scalars(select(Round).order_by(Round.id)).all()
        assert first.end_time == second.start_time == datetime(2026, 10, 1)  # noqa: DTZ001
        assert str(second.end_time) == str(times[1][0])[:19]  # it has no successor


def test_a_database_of_a_newer_program_is_refused(database_url: str) -> None:
    storage = Storage(database_url)
    with storage.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    storage.close()
    with pytest.raises(ConfigError, match=r"DATABASE_URL.*newest program"):
        Storage(database_url)


def test_several_servers_may_start_at_once_on_an_old_database(old_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        for storage in pool.map(Storage, [old_url] * 4):
            storage.close()
    assert differences(old_url) == []
