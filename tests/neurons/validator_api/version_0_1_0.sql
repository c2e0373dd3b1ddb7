-- The tables of version 0.1.0 in SQLite, as SQLAlchemy created them, with a few rows. The test replaces
-- the types of SQLite by those of PostgreSQL.
CREATE TABLE ip_bans (
	ip_address VARCHAR NOT NULL,
	failure_count INTEGER NOT NULL,
	banned_until DATETIME,
	PRIMARY KEY (ip_address)
);
CREATE TABLE miners (
	hotkey VARCHAR NOT NULL,
	uid INTEGER NOT NULL,
	registered_at DATETIME NOT NULL,
	PRIMARY KEY (hotkey),
	UNIQUE (uid)
);
CREATE TABLE league_entries (
	hotkey VARCHAR NOT NULL,
	model_name VARCHAR NOT NULL,
	league VARCHAR NOT NULL,
	registered_at DATETIME NOT NULL,
	PRIMARY KEY (hotkey, model_name, league),
	FOREIGN KEY(hotkey) REFERENCES miners (hotkey)
);
CREATE TABLE rounds (
	id INTEGER NOT NULL,
	round_number INTEGER NOT NULL,
	start_time DATETIME NOT NULL,
	end_time DATETIME NOT NULL,
	status VARCHAR NOT NULL,
	baseline_submission_id INTEGER,
	winner_submission_id INTEGER,
	winner_hotkey VARCHAR,
	PRIMARY KEY (id),
	UNIQUE (round_number)
);
CREATE TABLE submissions (
	id INTEGER NOT NULL,
	miner_hotkey VARCHAR NOT NULL,
	round_id INTEGER NOT NULL,
	target_sequence_length INTEGER NOT NULL,
	signature VARCHAR NOT NULL,
	ip_address VARCHAR,
	created_at DATETIME NOT NULL,
	commitment_hash VARCHAR,
	commitment_salt VARCHAR,
	reveal_block BIGINT,
	is_revealed BOOLEAN NOT NULL,
	fork_url VARCHAR,
	commit_hash VARCHAR,
	repo_hash VARCHAR,
	docker_image VARCHAR,
	tokens_per_sec DOUBLE,
	vram_mb DOUBLE,
	benchmarks JSON,
	validated_at DATETIME,
	score DOUBLE,
	verification_passed BOOLEAN,
	cosine_similarity DOUBLE,
	max_abs_diff DOUBLE,
	throughput_verified DOUBLE,
	verification_reason VARCHAR,
	PRIMARY KEY (id),
	FOREIGN KEY(miner_hotkey) REFERENCES miners (hotkey),
	FOREIGN KEY(round_id) REFERENCES rounds (id),
	UNIQUE (commitment_hash)
);
CREATE INDEX ix_rounds_status ON rounds (status);
CREATE INDEX ix_submissions_miner_hotkey ON submissions (miner_hotkey);
CREATE INDEX ix_submissions_round_id ON submissions (round_id);
CREATE INDEX ix_submissions_created_at ON submissions (created_at);
CREATE INDEX ix_submissions_validated_at ON submissions (validated_at);
INSERT INTO ip_bans VALUES ('203.0.113.9', 2, NULL);
INSERT INTO miners VALUES
	('5Alice', 0, '2026-11-01 00:00:00.000000'),
	('5Bob', 1, '2026-11-01 00:00:00.000000'),
	('5Carol', 2, '2026-11-01 00:00:00.000000');
INSERT INTO league_entries VALUES ('5Alice', 'Qwen', '100k', '2026-11-01 00:00:00.000000');
INSERT INTO rounds VALUES
	(1, 1, '2026-11-01 00:00:00.000000', '2026-11-03 00:00:00.000000', 'completed', NULL, 2, '5Bob'),
	(2, 2, '2026-11-03 00:00:00.000000', '2026-11-05 00:00:00.000000', 'active', 2, NULL, NULL);
INSERT INTO submissions (
	id, miner_hotkey, round_id, target_sequence_length, tokens_per_sec, score, validated_at, created_at,
	signature, is_revealed, benchmarks
) VALUES
	(1, '5Alice', 1, 100000, 100.0, 1.0, '2026-11-01 01:00:00.000000', '2026-11-01 00:01:00.000000', 'aa', true, '{"512": {"tokens_per_sec": 5.0}}'),
	(2, '5Bob', 1, 100000, 300.0, 0.95, '2026-11-01 01:00:00.000000', '2026-11-01 00:02:00.000000', 'aa', true, '{"512": {"tokens_per_sec": 5.0}}'),
	(3, '5Alice', 1, 100000, 200.0, 1.0, '2026-11-01 01:00:00.000000', '2026-11-01 00:03:00.000000', 'aa', true, '{"512": {"tokens_per_sec": 5.0}}'),
	(4, '5Carol', 1, 100000, 900.0, 0.0, '2026-11-01 01:00:00.000000', '2026-11-01 00:04:00.000000', 'aa', true, '{"512": {"tokens_per_sec": 5.0}}'),
	(5, '5Carol', 1, 1000000, 50.0, 1.0, '2026-11-01 01:00:00.000000', '2026-11-01 00:05:00.000000', 'aa', true, '{"512": {"tokens_per_sec": 5.0}}'),
	(6, '5Alice', 2, 100000, 400.0, NULL, NULL, '2026-11-01 00:06:00.000000', 'aa', true, '{"512": {"tokens_per_sec": 5.0}}'),
	(7, '5Alice', 2, 100000, 401.0, NULL, NULL, '2026-11-01 00:07:00.000000', 'aa', true, '{"512": {"tokens_per_sec": 5.0}}');
INSERT INTO submissions (
	id, miner_hotkey, round_id, target_sequence_length, commitment_hash, reveal_block, created_at,
	signature, is_revealed, benchmarks
) VALUES
	(8, '5Bob', 2, 100000, 'cccccccc', 15000000, '2026-11-01 00:08:00.000000', 'aa', false, 'null');
UPDATE submissions SET ip_address = '203.0.113.9';
