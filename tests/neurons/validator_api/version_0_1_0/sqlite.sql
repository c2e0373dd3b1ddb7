-- A database that version 0.1.0 made in SQLite, with a few rows.
BEGIN TRANSACTION;
CREATE TABLE ip_bans (
	ip_address VARCHAR NOT NULL, 
	failure_count INTEGER NOT NULL, 
	banned_until DATETIME, 
	PRIMARY KEY (ip_address)
);
INSERT INTO "ip_bans" VALUES('203.0.113.9',2,NULL);
CREATE TABLE league_entries (
	hotkey VARCHAR NOT NULL, 
	model_name VARCHAR NOT NULL, 
	league VARCHAR NOT NULL, 
	registered_at DATETIME NOT NULL, 
	PRIMARY KEY (hotkey, model_name, league), 
	FOREIGN KEY(hotkey) REFERENCES miners (hotkey)
);
INSERT INTO "league_entries" VALUES('5Alice','Qwen','100k','2026-11-01 00:00:00.000000');
CREATE TABLE miners (
	hotkey VARCHAR NOT NULL, 
	uid INTEGER NOT NULL, 
	registered_at DATETIME NOT NULL, 
	PRIMARY KEY (hotkey), 
	UNIQUE (uid)
);
INSERT INTO "miners" VALUES('5Alice',0,'2026-11-01 00:00:00.000000');
INSERT INTO "miners" VALUES('5Bob',1,'2026-11-01 00:00:00.000000');
INSERT INTO "miners" VALUES('5Carol',2,'2026-11-01 00:00:00.000000');
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
INSERT INTO "rounds" VALUES(1,1,'2026-11-01 00:00:00.000000','2026-11-03 00:00:00.000000','completed',NULL,2,'5Bob');
INSERT INTO "rounds" VALUES(2,2,'2026-11-03 00:00:00.000000','2026-11-05 00:00:00.000000','active',2,NULL,NULL);
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
INSERT INTO "submissions" VALUES(1,'5Alice',1,100000,'aa','203.0.113.9','2026-11-01 00:01:00.000000',NULL,NULL,NULL,1,'https://host/fork','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,NULL,100.0,NULL,'{"512": {"tokens_per_sec": 5.0}}','2026-11-01 01:00:00.000000',1.0,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "submissions" VALUES(2,'5Bob',1,100000,'aa','203.0.113.9','2026-11-01 00:02:00.000000',NULL,NULL,NULL,1,'https://host/fork','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,NULL,300.0,NULL,'{"512": {"tokens_per_sec": 5.0}}','2026-11-01 01:00:00.000000',0.95,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "submissions" VALUES(3,'5Alice',1,100000,'aa','203.0.113.9','2026-11-01 00:03:00.000000',NULL,NULL,NULL,1,'https://host/fork','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,NULL,200.0,NULL,'{"512": {"tokens_per_sec": 5.0}}','2026-11-01 01:00:00.000000',1.0,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "submissions" VALUES(4,'5Carol',1,100000,'aa','203.0.113.9','2026-11-01 00:04:00.000000',NULL,NULL,NULL,1,'https://host/fork','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,NULL,900.0,NULL,'{"512": {"tokens_per_sec": 5.0}}','2026-11-01 01:00:00.000000',0.0,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "submissions" VALUES(5,'5Carol',1,1000000,'aa','203.0.113.9','2026-11-01 00:05:00.000000',NULL,NULL,NULL,1,'https://host/fork','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,NULL,50.0,NULL,'{"512": {"tokens_per_sec": 5.0}}','2026-11-01 01:00:00.000000',1.0,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "submissions" VALUES(6,'5Alice',2,100000,'aa','203.0.113.9','2026-11-01 00:06:00.000000',NULL,NULL,NULL,1,'https://host/fork','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,NULL,400.0,NULL,'{"512": {"tokens_per_sec": 5.0}}',NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "submissions" VALUES(7,'5Alice',2,100000,'aa','203.0.113.9','2026-11-01 00:07:00.000000',NULL,NULL,NULL,1,'https://host/fork','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,NULL,401.0,NULL,'{"512": {"tokens_per_sec": 5.0}}',NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "submissions" VALUES(8,'5Bob',2,100000,'aa','203.0.113.9','2026-11-01 00:08:00.000000','cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc',NULL,15000000,0,NULL,NULL,NULL,NULL,NULL,NULL,'null',NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE INDEX ix_rounds_status ON rounds (status);
CREATE INDEX ix_submissions_miner_hotkey ON submissions (miner_hotkey);
CREATE INDEX ix_submissions_round_id ON submissions (round_id);
CREATE INDEX ix_submissions_created_at ON submissions (created_at);
CREATE INDEX ix_submissions_validated_at ON submissions (validated_at);
COMMIT;
