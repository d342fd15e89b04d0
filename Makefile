# Shorthands; the scripts do the work.
.PHONY: checks test quickstart clean

checks: ## linters, types, import contracts, shell scripts; no tests
	bash scripts/test.sh --no-tests

test: ## every check and every test
	bash scripts/test.sh

quickstart: ## train a small GPT on this machine
	bash scripts/quickstart.sh

clean: ## caches; neither .venv nor runs
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
