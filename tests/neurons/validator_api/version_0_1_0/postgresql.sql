-- A database that version 0.1.0 made in PostgreSQL, with a few rows.
CREATE TABLE public.ip_bans (
    ip_address character varying NOT NULL,
    failure_count integer NOT NULL,
    banned_until timestamp without time zone
);
CREATE TABLE public.league_entries (
    hotkey character varying NOT NULL,
    model_name character varying NOT NULL,
    league character varying NOT NULL,
    registered_at timestamp without time zone NOT NULL
);
CREATE TABLE public.miners (
    hotkey character varying NOT NULL,
    uid integer NOT NULL,
    registered_at timestamp without time zone NOT NULL
);
CREATE TABLE public.rounds (
    id integer NOT NULL,
    round_number integer NOT NULL,
    start_time timestamp without time zone NOT NULL,
    end_time timestamp without time zone NOT NULL,
    status character varying NOT NULL,
    baseline_submission_id integer,
    winner_submission_id integer,
    winner_hotkey character varying
);
CREATE SEQUENCE public.rounds_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.rounds_id_seq OWNED BY public.rounds.id;
CREATE TABLE public.submissions (
    id integer NOT NULL,
    miner_hotkey character varying NOT NULL,
    round_id integer NOT NULL,
    target_sequence_length integer NOT NULL,
    signature character varying NOT NULL,
    ip_address character varying,
    created_at timestamp without time zone NOT NULL,
    commitment_hash character varying,
    commitment_salt character varying,
    reveal_block bigint,
    is_revealed boolean NOT NULL,
    fork_url character varying,
    commit_hash character varying,
    repo_hash character varying,
    docker_image character varying,
    tokens_per_sec double precision,
    vram_mb double precision,
    benchmarks json,
    validated_at timestamp without time zone,
    score double precision,
    verification_passed boolean,
    cosine_similarity double precision,
    max_abs_diff double precision,
    throughput_verified double precision,
    verification_reason character varying
);
CREATE SEQUENCE public.submissions_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.submissions_id_seq OWNED BY public.submissions.id;
ALTER TABLE ONLY public.rounds ALTER COLUMN id SET DEFAULT nextval('public.rounds_id_seq'::regclass);
ALTER TABLE ONLY public.submissions ALTER COLUMN id SET DEFAULT nextval('public.submissions_id_seq'::regclass);
INSERT INTO public.ip_bans VALUES ('203.0.113.9', 2, NULL);
INSERT INTO public.league_entries VALUES ('5Alice', 'Qwen', '100k', '2026-11-01 00:00:00');
INSERT INTO public.miners VALUES ('5Alice', 0, '2026-11-01 00:00:00');
INSERT INTO public.miners VALUES ('5Bob', 1, '2026-11-01 00:00:00');
INSERT INTO public.miners VALUES ('5Carol', 2, '2026-11-01 00:00:00');
INSERT INTO public.rounds VALUES (1, 1, '2026-11-01 00:00:00', '2026-11-03 00:00:00', 'completed', NULL, 2, '5Bob');
INSERT INTO public.rounds VALUES (2, 2, '2026-11-03 00:00:00', '2026-11-05 00:00:00', 'active', 2, NULL, NULL);
INSERT INTO public.submissions VALUES (1, '5Alice', 1, 100000, 'aa', '203.0.113.9', '2026-11-01 00:01:00', NULL, NULL, NULL, true, 'https://host/fork', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', NULL, NULL, 100, NULL, '{"512": {"tokens_per_sec": 5.0}}', '2026-11-01 01:00:00', 1, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.submissions VALUES (2, '5Bob', 1, 100000, 'aa', '203.0.113.9', '2026-11-01 00:02:00', NULL, NULL, NULL, true, 'https://host/fork', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', NULL, NULL, 300, NULL, '{"512": {"tokens_per_sec": 5.0}}', '2026-11-01 01:00:00', 0.95, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.submissions VALUES (3, '5Alice', 1, 100000, 'aa', '203.0.113.9', '2026-11-01 00:03:00', NULL, NULL, NULL, true, 'https://host/fork', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', NULL, NULL, 200, NULL, '{"512": {"tokens_per_sec": 5.0}}', '2026-11-01 01:00:00', 1, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.submissions VALUES (4, '5Carol', 1, 100000, 'aa', '203.0.113.9', '2026-11-01 00:04:00', NULL, NULL, NULL, true, 'https://host/fork', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', NULL, NULL, 900, NULL, '{"512": {"tokens_per_sec": 5.0}}', '2026-11-01 01:00:00', 0, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.submissions VALUES (5, '5Carol', 1, 1000000, 'aa', '203.0.113.9', '2026-11-01 00:05:00', NULL, NULL, NULL, true, 'https://host/fork', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', NULL, NULL, 50, NULL, '{"512": {"tokens_per_sec": 5.0}}', '2026-11-01 01:00:00', 1, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.submissions VALUES (6, '5Alice', 2, 100000, 'aa', '203.0.113.9', '2026-11-01 00:06:00', NULL, NULL, NULL, true, 'https://host/fork', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', NULL, NULL, 400, NULL, '{"512": {"tokens_per_sec": 5.0}}', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.submissions VALUES (7, '5Alice', 2, 100000, 'aa', '203.0.113.9', '2026-11-01 00:07:00', NULL, NULL, NULL, true, 'https://host/fork', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', NULL, NULL, 401, NULL, '{"512": {"tokens_per_sec": 5.0}}', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.submissions VALUES (8, '5Bob', 2, 100000, 'aa', '203.0.113.9', '2026-11-01 00:08:00', 'cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc', NULL, 15000000, false, NULL, NULL, NULL, NULL, NULL, NULL, 'null', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
SELECT pg_catalog.setval('public.rounds_id_seq', 2, true);
SELECT pg_catalog.setval('public.submissions_id_seq', 8, true);
ALTER TABLE ONLY public.ip_bans
    ADD CONSTRAINT ip_bans_pkey PRIMARY KEY (ip_address);
ALTER TABLE ONLY public.league_entries
    ADD CONSTRAINT league_entries_pkey PRIMARY KEY (hotkey, model_name, league);
ALTER TABLE ONLY public.miners
    ADD CONSTRAINT miners_pkey PRIMARY KEY (hotkey);
ALTER TABLE ONLY public.miners
    ADD CONSTRAINT miners_uid_key UNIQUE (uid);
ALTER TABLE ONLY public.rounds
    ADD CONSTRAINT rounds_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.rounds
    ADD CONSTRAINT rounds_round_number_key UNIQUE (round_number);
ALTER TABLE ONLY public.submissions
    ADD CONSTRAINT submissions_commitment_hash_key UNIQUE (commitment_hash);
ALTER TABLE ONLY public.submissions
    ADD CONSTRAINT submissions_pkey PRIMARY KEY (id);
CREATE INDEX ix_rounds_status ON public.rounds USING btree (status);
CREATE INDEX ix_submissions_created_at ON public.submissions USING btree (created_at);
CREATE INDEX ix_submissions_miner_hotkey ON public.submissions USING btree (miner_hotkey);
CREATE INDEX ix_submissions_round_id ON public.submissions USING btree (round_id);
CREATE INDEX ix_submissions_validated_at ON public.submissions USING btree (validated_at);
ALTER TABLE ONLY public.league_entries
    ADD CONSTRAINT league_entries_hotkey_fkey FOREIGN KEY (hotkey) REFERENCES public.miners(hotkey);
ALTER TABLE ONLY public.submissions
    ADD CONSTRAINT submissions_miner_hotkey_fkey FOREIGN KEY (miner_hotkey) REFERENCES public.miners(hotkey);
ALTER TABLE ONLY public.submissions
    ADD CONSTRAINT submissions_round_id_fkey FOREIGN KEY (round_id) REFERENCES public.rounds(id);
