# Short verbs, explained in the scripts that they run. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help install lock test quick coverage lint types kernels resources audit fix bench once doctor hooks baseline nightly

help: ## list the verbs
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' Makefile | expand -t 12

install: ## make or update .venv with the developers' tools
	scripts/install.sh dev

lock: ## pin what pyproject.toml asks for; scripts/lock.sh --upgrade takes newer versions
	scripts/lock.sh

test: ## every check, as CI runs it
	scripts/test.sh

quick: ## format, lint, contracts of imports, and files of tests that start no process (tests/quick.txt)
	scripts/test.sh --quick

nightly: install ## faults at full length (10,000 interleavings, 2,000 cycles), and the long tests that CI omits
	QUASAR_NIGHTLY=1 .venv/bin/python -m pytest tests/faults $(ARGS)
	QUASAR_NIGHTLY=1 .venv/bin/python -m pytest -m nightly $(ARGS)

coverage: install ## which lines the tests run in their own process; `make coverage ARGS=tests/neurons`
	.venv/bin/python -m pytest --cov=neurons --cov=harness --cov=quasar_kernels \
	  --cov-report=term:skip-covered $(ARGS)

lint: install ## formatting and lint, nothing is changed
	.venv/bin/ruff format --check .
	git ls-files -z "*.cu" "*.cuh" | xargs -0 .venv/bin/clang-format --dry-run --Werror
	.venv/bin/ruff check .
	.venv/bin/shellcheck START_*.sh scripts/*.sh .ci/run

fix: install ## rewrite what the formatter and the linter can correct
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	git ls-files -z "*.cu" "*.cuh" | xargs -0 .venv/bin/clang-format -i

types: install ## strict type check
	.venv/bin/mypy

kernels: install ## compile every kernel for every supported GPU, and compare what each needs
	.venv/bin/python -m benchmarks.resources.compile --check

resources: install ## write the table of registers, spills and shared memory
	.venv/bin/python -m benchmarks.resources.compile --write

audit: install ## ask pypi.org for known vulnerabilities of what the lock pins; a mirror does not know them
	.venv/bin/uv tool run pip-audit@2.10.1 --strict --no-deps --disable-pip -r requirements/lock.txt

bench: ## measure the overlay on this machine
	./START_MINER.sh bench

once: ## one cycle of the miner, to its verdict
	./START_MINER.sh once

doctor: ## check this machine and its settings
	./START_MINER.sh doctor

hooks: install ## run the checks before each commit, and on its subject
	.venv/bin/pre-commit install

baseline: install ## accept what the secret scan finds now; read the difference before the commit
	@# benchmark reports hold digests, which look like secrets
	.venv/bin/detect-secrets scan --slim --no-verify \
	  --exclude-files '^(\.secrets\.baseline|benchmarks/.*\.json)$$' >.secrets.baseline
